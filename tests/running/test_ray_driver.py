"""The driver of a run on Ray without a cluster: how it ends a run, and whose it leaves alone."""

import itertools

import pytest
from rich.console import Console

from apexrl.lifecycle import Stop

pytest.importorskip("ray")


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """A driver without a cluster: what it kills, and whether it has cleaned up."""
    from apexrl.running import ray_cluster

    monkeypatch.chdir(tmp_path)
    driver = ray_cluster.Driver(ray_cluster.RayConfig(), ["--env", "Catch-v0"], 0, Console())
    driver.killed, driver.cleaned = [], []
    monkeypatch.setattr(ray_cluster, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(ray_cluster, "clean_up", driver.cleaned.append)
    monkeypatch.setattr(ray_cluster.ray, "kill", driver.killed.append)
    monkeypatch.setattr(ray_cluster, "sees_directory", lambda learner, directory: True)
    monkeypatch.setattr(driver, "_connect", lambda: None)
    return driver


class Forgetting:
    """Stands for the registry's handle, which `_drop` tells a group to forget."""

    def __init__(self):
        self.forget = self
        self.forgotten = []

    def remote(self, group):
        self.forgotten.append(group)


def test_a_stop_while_another_run_of_that_name_ends_leaves_that_one_alone(alone, monkeypatch):
    from apexrl.running import ray_cluster

    stop, silences = Stop(), itertools.count(1.0)

    def silence():
        stop.set()
        return next(silences)

    monkeypatch.setattr(ray_cluster, "_driver_silence", silence)
    monkeypatch.setattr(Stop, "on_signals", lambda stop: None)
    assert alone.run(stop) == 0 and not alone.cleaned


def test_actors_that_are_late_cost_no_checkpoint(alone, monkeypatch):
    """Such as those of a node that was lost just before."""
    from apexrl.running import ray_cluster
    from apexrl.running.ray_groups import LEARNER, NUM_STAGES, REGISTRY, REPLAY, Report

    registry = Forgetting()
    monkeypatch.setattr(ray_cluster, "END_SECONDS", 0.05)
    alone._groups = {REGISTRY: registry, LEARNER: "l", REPLAY: "r", "actors a": "a"}
    waiting = [Report(LEARNER, "1", {}, 1), Report(REPLAY, "1", {}, 1), Report("actors a", "2", {}, 0)]
    ended = [report._replace(stages_ended=NUM_STAGES) for report in waiting[:2]]
    alone._printed = {report.group: () for report in waiting}
    monkeypatch.setattr(alone, "_ask", lambda ends: ended if registry.forgotten else waiting)
    assert alone._end(alone.asked, waiting, Stop()) == 0
    assert alone.killed == ["a"] and registry.forgotten == ["actors a"]


def test_a_registry_that_is_away_is_asked_until_the_run_has_ended(alone, monkeypatch):
    from apexrl.running import ray_cluster
    from apexrl.running.ray_groups import LEARNER, NUM_STAGES, Report

    monkeypatch.setattr(ray_cluster, "END_SECONDS", 100.0)
    learner = Report(LEARNER, "1", {}, 1)
    answers = iter([None, [], [learner], None, [learner._replace(stages_ended=NUM_STAGES)]])
    alone._printed = {LEARNER: ()}
    monkeypatch.setattr(alone, "_ask", lambda ends: next(answers))
    assert alone._end(alone.asked, [], Stop()) == 0 and next(answers, "none") == "none"
    monkeypatch.setattr(ray_cluster, "END_SECONDS", 0.05)
    monkeypatch.setattr(alone, "_ask", lambda ends: None)
    assert alone._end(alone.asked, [], Stop()) == 1, "nobody knows what became of it"
