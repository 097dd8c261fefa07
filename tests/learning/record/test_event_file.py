import struct
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from apexrl.clocks import Allowance
from apexrl.learning.record import event_file
from apexrl.learning.record.event_file import OVERVIEW, EventFile
from apexrl.learning.record.metric_texts import TEXTS, text_of
from tests.full_disk import full_disk

PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(1000)


def read(directory):
    accumulator = EventAccumulator(str(directory), size_guidance={"images": 0, "scalars": 0})
    accumulator.Reload()
    return accumulator


def test_tensorboard_reads_what_was_written(tmp_path):
    events = EventFile(tmp_path / "tensorboard")
    for frames in (10, 20):
        events.scalars({"learner/loss": frames / 8, "actor/lag": 1.0}, frames)
        events.flush()
    events.png("evaluation/game", PICTURE, 20)
    events.flush()
    events.flush()
    found = read(tmp_path / "tensorboard")
    assert [(event.step, event.value) for event in found.Scalars("learner/loss")] == [(10, 1.25), (20, 2.5)]
    assert [event.encoded_image_string for event in found.Images("evaluation/game")] == [PICTURE]
    assert found.Tensors("custom_scalars__config__")


def test_the_page_the_flags_and_the_overview_are_there(tmp_path):
    events = EventFile(tmp_path)
    events.about({"learning-rate": 1e-3, "env": "Catch-v0", "lstm": True}, "### Flags\n| name | value |")
    for frames in (10, 20):
        events.scalars({"evaluation/return_mean": 3.0, "replay/size": 5.0, "own/number": 1.0}, frames)
    events.flush()
    found = read(tmp_path)
    assert b"### Flags" in found.Tensors("about/text_summary")[0].tensor_proto.string_val[0]
    assert min(found.Tags()["tensors"]) == "about/text_summary"
    assert any(tag.startswith("_hparams_") for tag in found.summary_metadata)
    assert [event.value for event in found.Scalars(OVERVIEW["evaluation/return_mean"])] == [3.0, 3.0]
    described = {tag: found.SummaryMetadata(tag).summary_description for tag in ("replay/size", "own/number")}
    assert described == {"replay/size": "Transitions in the log. Unit: transitions.", "own/number": ""}
    assert min(found.Tags()["scalars"]).startswith("Overview/")  # the first cards
    assert max(map(len, OVERVIEW.values())) <= 22, "the title of a card is cut"


@pytest.mark.parametrize(
    ("tag", "unit"),
    [
        ("learner/version_lag_p95", "updates"),
        ("replay/table/queue@500/missed", "unrolls"),
        ("actor/time/emulator", "share"),
        ("learner_1/learner/updates_per_second", ""),
        ("evaluation/return_mean", ""),
    ],
)
def test_a_metric_has_a_unit_and_a_meaning(tag, unit):
    found = text_of(tag)
    assert found.unit == unit and found.text.endswith(".")


def test_texts_are_of_one_tag_each_and_the_first_that_fits_is_meant():
    tags = [text.tag for text in TEXTS]
    assert len(set(tags)) == len(tags)
    for text in TEXTS:
        assert text_of(text.tag.replace("*", "x")) == text, "an earlier one hides it"


def test_a_full_disk_costs_no_record(tmp_path, monkeypatch):
    """The file never ends in a half of a record, and goes on when there is space again."""
    events = EventFile(tmp_path)
    events.scalars({"a": 1.0}, 1)
    events.flush()
    (path,) = tmp_path.iterdir()
    size = path.stat().st_size
    events.scalars({"a": 2.0}, 2)
    with full_disk(monkeypatch, free_bytes=7), pytest.raises(OSError):
        events.flush()
    assert path.stat().st_size == size
    events.scalars({"a": 3.0}, 3)
    events.flush()
    assert [event.value for event in read(tmp_path).Scalars("a")] == [1.0, 2.0, 3.0]


def test_records_that_wait_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(event_file, "MAX_PENDING_BYTES", 1500)
    events = EventFile(tmp_path)
    for frames in range(100):
        events.scalars({"a": float(frames)}, frames)
    events.flush()
    values = [event.value for event in read(tmp_path).Scalars("a")]
    assert values == list(range(len(values))) and len(values) + events.num_dropped == 100 and events.num_dropped > 50


def test_records_have_the_lengths_that_they_say(tmp_path):
    events = EventFile(tmp_path)
    events.scalars({"a": 1.0}, 1)
    events.flush()
    (path,) = tmp_path.iterdir()
    data, count = path.read_bytes(), 0
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        data, count = data[16 + length :], count + 1
    assert count == 3


def test_a_file_that_somebody_removed_begins_anew(tmp_path):
    events = EventFile(tmp_path)
    events.scalars({"a": 1.0}, 1)
    events.flush()
    next(tmp_path.iterdir()).unlink()
    for value in (2.0, 3.0):
        events.scalars({"a": value}, int(value))
        events.flush()
    assert [event.value for event in read(tmp_path).Scalars("a")] == [2.0, 3.0]


def test_a_start_after_the_clock_was_set_back_has_a_later_name(tmp_path, monkeypatch):
    """TensorBoard reads a run's files in the order of their names, and never goes back."""
    for now in (2_000_000_000, 1_900_000_000, 1_900_000_000.5):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        EventFile(tmp_path).flush()
    names = sorted(path.name.split(".")[3] for path in tmp_path.iterdir())
    assert names == ["2000000000", "2000000001", "2000000002"]


def test_a_flood_of_pictures_leaves_the_file_small_and_the_numbers_in_it(tmp_path, caplog):
    now = [0.0]
    events = EventFile(tmp_path, clock=lambda: now[0])
    for frames in range(40):  # 200 MB
        for _ in range(10):
            events.png("evaluation/game", PICTURE[:8] + bytes(2**19), frames)
            events.text("evaluation/video", "\x1b[2J" + "x" * 4096, frames)
        events.scalars({"evaluation/return_mean": 1.0}, frames)
        events.flush()
        now[0] += 1.0
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size < 9 * 2**20 and events.num_dropped > 390
    assert len(read(tmp_path).Scalars("evaluation/return_mean")) == 40 and b"\x1b[2J" not in path.read_bytes()
    assert len([record for record in caplog.records if "too fast" in record.getMessage()]) == 1


def test_an_allowance_comes_back_with_time():
    now = [0.0]
    allowance = Allowance(100.0, 10.0, clock=lambda: now[0])
    assert [allowance.takes(60), allowance.takes(60), allowance.takes(40)] == [True, False, True]
    now[0] = 5.0
    assert [allowance.takes(51), allowance.takes(50)] == [False, True]
    now[0] = 1e6
    assert [allowance.takes(101), allowance.takes(100), allowance.takes(1)] == [False, True, False]


def test_flags_of_one_run_alone_are_columns_too(tmp_path):
    """TensorBoard takes the columns from the first record of an experiment that it meets, if there is one."""
    for name, flags in (("usual", {"env": "Catch-v0"}), ("other", {"env": "Catch-v0", "learning-rate": 1e-3})):
        events = EventFile(tmp_path / name)
        events.about(flags, "### Flags")
        events.flush()
        tags = {tag for tag in read(tmp_path / name).summary_metadata if tag.startswith("_hparams_")}
        assert tags == {"_hparams_/session_start_info", "_hparams_/session_end_info"}
