"""Metrics of many processes of which one sends no number."""

import math

import pytest

from apexrl.net.metrics_channel import MetricsServer, Report

RUN = "run-1"


@pytest.fixture
def metrics():
    server = MetricsServer("127.0.0.1", 0)
    server.runs = frozenset({RUN})
    yield server
    server.close()
    server.run()  # closes the socket


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_hides_no_other(metrics, strange, caplog):
    for i, lag in enumerate((2.0, strange, 4.0)):
        metrics.take(Report(f"actor-{i}", RUN, {"actor/lag": lag, "actor/frames_per_second": 10.0 + lag}))
    found = metrics.latest()
    assert found["actor/lag"] == 3.0 and found["actor/frames_per_second"] == 26.0
    assert found["system/dropped_reports/not finite"] == 2.0
    assert "actor/frames_per_second of actor-1 is not finite" in caplog.text
    for _ in range(20):
        metrics.take(Report("actor-1", RUN, {"actor/lag": strange}))
    assert len(caplog.records) == 1
    metrics.take(Report("actor-1", RUN, {"actor/lag": 6.0}))
    assert metrics.latest()["actor/lag"] == 4.0


def test_a_number_that_nobody_has_is_not_there(metrics):
    metrics.take(Report("actor-0", RUN, {"actor/lag": math.nan, "actor/more": 1.0}))
    assert "actor/lag" not in metrics.latest() and metrics.latest()["actor/more"] == 1.0
