"""The bounds of what all senders of metrics together may hold."""

import pytest

from apexrl.net import metrics_channel as channel
from apexrl.net.metrics_channel import Report

RUN = "run-1"


def test_all_senders_together_hold_a_bounded_number_of_numbers(metrics, now, caplog):
    many = {f"actor/{i}": float(i) for i in range(380)}
    fitting = channel.MAX_NUMBERS // len(many)
    for i in range(fitting + 30):
        metrics.take(Report(f"stranger-{i}", RUN, many))
    assert metrics.dropped == {"crowded": 30}
    assert metrics.latest()["actor/1"] == 1.0
    metrics.take(Report("stranger-0", RUN, {"actor/1": 381.0}))  # who is in goes on, and may have less
    metrics.take(Report("actor", RUN, {"actor/1": 1.0}))  # in the room that this made
    assert metrics.latest()["actor/1"] == pytest.approx((fitting + 381) / (fitting + 1))
    (record,) = caplog.records
    assert f"{fitting} processes report as much as fits here, and 1 reports were left out" in record.getMessage()


def test_the_dead_make_room(metrics, now):
    many = {f"actor/{i}": float(i) for i in range(380)}
    for i in range(channel.MAX_NUMBERS // len(many)):
        metrics.take(Report(f"stranger-{i}", RUN, many))
    now[0] += channel.FORGET_SECONDS
    assert "actor/1" not in metrics.latest()
    metrics.take(Report("actor", RUN, many))
    assert metrics.latest()["actor/1"] == 1.0 and not metrics.dropped


def test_tags_are_bounded_over_all_time(metrics, now):
    for i in range(channel.MAX_TAGS_EVER + 10):
        metrics.take(Report("stranger", RUN, {f"actor/{i}": 1.0}))
        if i % channel.MAX_TAGS == 0:
            now[0] += channel.FORGET_SECONDS
            metrics.latest()
    assert metrics.dropped["crowded"] >= 10
    metrics.take(Report("actor", RUN, {"actor/0": 2.0}))  # a tag that is known
    assert metrics.latest()["actor/0"] == 2.0


def test_what_is_left_out_for_one_reason_hides_no_other(metrics, caplog):
    metrics.take(Report("actor", "another run", {"actor/1": 1.0}))
    metrics.take(Report("actor", RUN, {f"actor/{i}": 1.0 for i in range(channel.MAX_TAGS + 1)}))
    metrics.take(Report("actor", RUN, {"actor/1": float("nan")}))
    for words in ("'foreign': 1", "0 processes report as much as fits", "actor/1 of actor is not finite"):
        assert words in caplog.text
