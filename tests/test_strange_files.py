"""Files of a run that hold, or are, anything: readers leave them out or refuse them in one line, and never hang."""

import contextlib
import os
import sys
from pathlib import Path

import msgspec
import pytest
import safetensors.torch
import torch
from rich.console import Console

import apexrl
from apexrl.config.sections import EnvConfig
from apexrl.errors import ApexError, ConfigError, WireError
from apexrl.files import MOST_BYTES, name_aside, open_regular, read_json, read_whole, write_json
from apexrl.learning.record.latest import latest_checkpoint
from apexrl.learning.record.run_page import flags_of
from apexrl.learning.record.run_record import RunRecord
from apexrl.learning.record.status_file import read_status
from apexrl.lifecycle import Stop
from apexrl.net.keyring import read_key
from apexrl.networks.checkpoint import load_checkpoint
from apexrl.networks.config import DuelingConfig, from_text
from apexrl.networks.headers import BEST, LATEST, CheckpointHeader, Counters, Identity, load_header
from apexrl.replay.snapshot import recover_snapshot
from apexrl.roles import export, watch
from apexrl.running.prepare import prepare
from apexrl.running.run_directory import read_config
from apexrl.running.trackers import begin
from apexrl.runs import CONFIG_FILE, CURVE_FILE, STATUS_FILE, SUMMARY_FILE, SWEEP_FILE
from apexrl.tools import compare, runs
from apexrl.tools.run_results import named_by_settings, read_run, readable_runs
from apexrl.tools.sweep import Sweep
from apexrl.tools.sweep_plan import read_file
from tests.system.processes import call
from tests.tools.run_directories import write_run

DEEP = 100_000


def pipe(path):
    os.mkfifo(path)


def written(data):
    return lambda path: path.write_bytes(data)


def linked(target):
    return lambda path: path.symlink_to(target)


def sparse(path):
    with path.open("wb") as file:
        file.truncate(2**40)


KINDS = {
    "pipe": pipe, "directory": Path.mkdir, "device": linked("/dev/zero"), "nowhere": linked("nothing/at/all"),
    "terabyte": sparse, "loop": lambda path: path.symlink_to(path.name), "empty": written(b""),
    "deep lists": written(b"[" * DEEP), "deep objects": written(b'{"command":' * DEEP),
    "deep but whole": written(b'{"command":' + b'{"a":' * 900 + b"1" + b"}" * 901),
    "deep below": written(b'{"command":{"env":' + b"[" * 900 + b"]" * 900 + b"}}"),
    "no utf-8": written(b'{"command":{"agent":"\xff\xfe"}}'), "binary": written(bytes(range(256)) * 9),
    "huge integer": written(b'{"frames":' + b"9" * 5000 + b',"command":{"seed":' + b"9" * 5000 + b"}}"),
    "huge number": written(b'{"frames":1e999,"updates":1e999,"command":{"seed":1e999}}'),
    "no number": written(b'{"frames":NaN,"updates":NaN,"command":{"seed":NaN}}'),
    **{text.decode(): written(text) for text in (b"[]", b"null", b"3", b'"text"', b'{"command":[]}', b"{}")},
}  # fmt: skip


@pytest.fixture(params=KINDS)
def strange(request):
    """Makes a file strange."""

    def make(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        KINDS[request.param](path)
        return path

    return make


def refused(function, *arguments):
    """Calls what may refuse: in one line. Returns what it gives."""
    try:
        return function(*arguments)
    except ApexError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
        return None


@pytest.mark.parametrize("name", [CONFIG_FILE, STATUS_FILE, CURVE_FILE, SUMMARY_FILE])
def test_lists_and_comparisons_leave_a_run_out(tmp_path, strange, name):
    good = write_run(tmp_path / "good", [1, 2])
    bad = write_run(tmp_path / "bad", [1, 2], seed=1)
    strange(bad / name)
    status, said = call(runs.main, tmp_path)
    assert status == 0 and str(good) in said and said.count("left out") <= 1
    faults = []
    found = readable_runs([good, bad], faults)
    assert len(found) + len(faults) == 2 and found[0].directory == good and "\n" not in "".join(faults)
    assert named_by_settings(found, []) == {"apex-dqn": found}
    read_status(bad), flags_of(bad)
    refused(lambda: apexrl.Run(bad).summary)
    refused(lambda: apexrl.Run(bad).evaluations)


def test_a_run_may_be_named_by_a_text_and_has_to_be_there(tmp_path):
    write_run(tmp_path / "run", [1, 2])
    run = apexrl.Run(str(tmp_path / "run"))
    assert run == apexrl.Run(tmp_path / "run") and [row.mean for row in run.evaluations] == [1, 2]
    with pytest.raises(ConfigError, match=r"nowhere: there is no such directory of a run"):
        apexrl.Run(tmp_path / "nowhere")


def test_a_comparison_says_a_line_for_each_run_that_it_leaves_out(tmp_path):
    good = write_run(tmp_path / "good", [1, 2])
    bad = [write_run(tmp_path / f"{name} {i}", [1], 7) for name in (CONFIG_FILE, CURVE_FILE) for i in range(len(KINDS))]
    for run, kind in zip(bad, [*KINDS.values()] * 2, strict=True):
        path = run / run.name.partition(" ")[0]
        path.unlink()
        kind(path)
    status, said = call(compare.main, good, *bad, "--out", tmp_path / "comparison")
    assert status == 0 and [line for line in said.splitlines() if "apex-dqn" in line]
    assert len([line for line in said.splitlines() if line.startswith("left out: ")]) == len(bad)


def test_the_largest_numbers_of_a_curve_can_be_compared(tmp_path):
    good, odd = write_run(tmp_path / "good", [1, 2]), write_run(tmp_path / "odd", [1, 2], seed=1)
    with (odd / CURVE_FILE).open("a") as file:
        file.write(f"{2**53},{2**53},{2**53},10,1e300,-1e300,-1e300,1e300\n")
    status, said = call(compare.main, good, odd, "--out", tmp_path / "comparison")
    assert status == 0 and "left out" not in said


def prepared(*words):
    with contextlib.ExitStack() as held:
        prepare([*map(str, words), "--no-tensorboard"], Console(quiet=True), held, False)


def test_a_run_whose_configuration_is_strange_is_refused_in_one_line(tmp_path, strange):
    run = write_run(tmp_path / "run", [1, 2])
    strange(run / CONFIG_FILE)
    for flag in ("--resume", "--fork", "--guest"):
        refused(prepared, flag, run)
    refused(latest_checkpoint, run)


@pytest.mark.parametrize("name", [STATUS_FILE, CURVE_FILE, SUMMARY_FILE, f"checkpoints/{LATEST}"])
def test_a_run_with_a_strange_result_goes_on_or_refuses_in_one_line(tmp_path, name):
    for kind in ("pipe", "device", "deep lists", "no utf-8"):
        run = write_run(tmp_path / kind, [1, 2])
        path = run / name
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        KINDS[kind](path)
        refused(prepared, "--resume", run)


@pytest.mark.parametrize("name", [CONFIG_FILE, f"checkpoints/{BEST}", f"checkpoints/{LATEST}"])
def test_an_agent_is_refused_in_one_line(tmp_path, strange, name, monkeypatch, spec):
    run = write_run(tmp_path / "run", [1])
    path = run / "checkpoints" / BEST
    path.parent.mkdir()
    safetensors.torch.save_file({"acting.x": torch.ones(1)}, path)
    path = strange(run / name)
    for argument in (run, path):
        with pytest.raises(ApexError):
            apexrl.load(argument)
        for main in (lambda: watch.main(Stop()), export.main):
            monkeypatch.setattr(sys, "argv", ["program", str(argument)])
            with pytest.raises(ApexError) as fault:
                main()
            assert "\n" not in str(fault.value)


def test_readers_of_single_files_refuse_them(tmp_path, strange, spec):
    path = strange(tmp_path / "file.secret")
    for read in (load_header, load_checkpoint, read_key, read_file):
        with pytest.raises(ConfigError) as fault:
            read(path)
        assert "\n" not in str(fault.value)
    assert recover_snapshot(path, "log") is None and not os.path.lexists(path)
    strange(tmp_path / SWEEP_FILE)
    refused(Sweep, tmp_path, [], Stop())
    identity = Identity(spec, "apex-dqn", "{}")
    for name in (CURVE_FILE, f"checkpoints/{BEST}"):
        run = tmp_path / name.replace("/", "-")
        strange(run / name)
        refused(RunRecord, run, identity)


def with_header(path, text, **tensors):
    safetensors.torch.save_file(tensors or {"acting.x": torch.ones(2)}, path, {"header": text})
    return path


def test_the_header_of_a_checkpoint_may_hold_anything(tmp_path, spec):
    whole = msgspec.json.encode(CheckpointHeader(spec, "apex-dqn", "{}", Counters())).decode()
    texts = ["", "[" * DEEP, "{}", "null", whole.replace('"updates":0', '"updates":1e999'), whole[:-1]]
    texts += [whole.replace('"updates":0', f'"updates":{number}') for number in (-1, 2**53 + 1, "9" * 4000, '"x"')]
    texts += [whole.replace('"seconds":0.0', '"seconds":1e308')]
    for text in texts:
        path = with_header(tmp_path / "c.safetensors", text)
        for read in (load_header, load_checkpoint):
            with pytest.raises(ConfigError, match=r"c\.safetensors is no checkpoint of this program: .") as fault:
                read(path)
            assert "\n" not in str(fault.value)


def test_tensors_of_types_that_no_network_has_are_refused(tmp_path, spec):
    whole = msgspec.json.encode(CheckpointHeader(spec, "apex-dqn", "{}", Counters())).decode()
    path = tmp_path / "c.safetensors"
    for dtype in ("F8_E4M3", "F8_E5M2", "F4", "C64", "U16", "U32"):
        size = {"C64": 8, "U16": 2, "U32": 4}.get(dtype, 1)
        shape = [2] if dtype == "F4" else [1]
        entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}
        header = msgspec.json.encode({"__metadata__": {"header": whole}, "acting.x": entry})
        header += b" " * (-len(header) % 8)
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
        with pytest.raises(ConfigError, match=r"c\.safetensors is no checkpoint of this program"):
            load_checkpoint(path)


def test_a_checkpoint_that_memory_does_not_hold_is_not_read(tmp_path, spec, monkeypatch):
    whole = msgspec.json.encode(CheckpointHeader(spec, "apex-dqn", "{}", Counters())).decode()
    path = with_header(tmp_path / "c.safetensors", whole)
    load_checkpoint(path)
    monkeypatch.setattr("apexrl.networks.checkpoint.free_memory_bytes", lambda: 100)
    with pytest.raises(ConfigError, match=r"c\.safetensors has 0\.0 GB, and 0\.0 GB of memory are free"):
        load_checkpoint(path)


@pytest.mark.parametrize("number", ["1e308", "-1e308", "1e999", "9" * 5000, "nan"], ids=lambda text: text[:5])
def test_huge_numbers_in_a_curve_are_named(tmp_path, number):
    run = write_run(tmp_path / "run", [1, 2])
    whole = (run / CURVE_FILE).read_text()
    for place in range(8):
        columns = ["60", "1000", "10", "10", "1", "0", "0", "2"]
        columns[place] = number
        (run / CURVE_FILE).write_text(whole + ",".join(columns) + "\n")
        with pytest.raises(ConfigError, match="line 4 is no evaluation"):
            read_run(run)


def test_settings_out_of_their_range_are_refused(tmp_path):
    run = write_run(tmp_path / "run", [1])
    config = msgspec.json.decode((run / CONFIG_FILE).read_bytes())
    for section, name, value in [("update", "batch_size", -1), ("evaluation", "episodes", 0), ("", "at", -5)]:
        changed = msgspec.json.decode(msgspec.json.encode(config))
        (changed["command"][section] if section else changed["command"])[name] = value
        write_json(run / CONFIG_FILE, changed)
        with pytest.raises(ConfigError, match=f"config.json: --{name.replace('_', '-')} {value} makes no sense"):
            read_config(run / CONFIG_FILE)


def test_texts_of_strangers_refuse_in_one_line():
    for text in ("[" * DEEP, "\ud800", "{", "3"):
        with pytest.raises(WireError):
            from_text(text, DuelingConfig)
        with pytest.raises(ConfigError):
            EnvConfig.of_variant("Catch-v0", text, 1)
        with pytest.raises(ConfigError):
            _ = EnvConfig(env_kwargs=text).kwargs


def test_a_tracker_reads_no_pipe(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "wandb.id")
    with pytest.raises(OSError, match="no regular file"):
        begin("wandb", tmp_path)


def test_a_file_is_read_whole_or_not(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_whole(path) == read_whole(path, 5) == b"12345" and read_json(path, int) == 12345
    with pytest.raises(OSError, match="it has 5 bytes, and 4 are the most"):
        read_whole(path, 4)
    with pytest.raises(ConfigError, match="file is odd: Expected `str`, got `int`"):
        read_json(path, str, "is odd")
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")
    sparse(path)
    with pytest.raises(ConfigError, match=f"cannot be read: it has 1,099,511,627,776 bytes, and {MOST_BYTES:,}"):
        read_json(path, int)


def test_each_file_is_kept_under_a_name_of_its_own(tmp_path):
    path = tmp_path / "file"
    for i in range(3):
        path.write_text(str(i))
        kept = name_aside(path, "damaged")
        assert kept.name == ("file.damaged", "file.2.damaged", "file.3.damaged")[i]
        path.rename(kept)
    path.write_text("1")
    assert name_aside(path, "damaged").name == "file.2.damaged"
