"""The registry of a run on Ray: who begins when, and in which order all end. Without Ray: it is a plain class."""

import threading

import pytest

from apexrl.running import ray_groups
from apexrl.running.ray_groups import NUM_STAGES, Registry, Report, own_code

PATIENCE_SECONDS = 20.0
REPLAY = Report("replay", "10.0.0.1", {"replay_host": "10.0.0.1", "actor_port": 1, "batch_port": 2})
LEARNER = Report("learner", "10.0.0.2", {"learner_host": "10.0.0.2", "parameter_port": 3, "metrics_port": 4})
ACTORS = Report("actors a", "10.0.0.3", {})


@pytest.fixture
def clock(monkeypatch):
    """The time, which only the test moves."""

    class Clock:
        now = 1000.0
        monotonic = staticmethod(lambda: Clock.now)

    monkeypatch.setattr(ray_groups, "time", Clock)
    return Clock


def test_nodes_get_the_checkout_or_the_installed_package(tmp_path):
    assert own_code(tmp_path) == {"py_modules": [f"{tmp_path}/apexrl"]}
    (tmp_path / "pyproject.toml").touch()
    sent = own_code(tmp_path)
    assert sent["working_dir"] == str(tmp_path) and {".venv", "runs", "tests"} <= {*sent["excludes"]}


def test_everybody_hears_the_addresses_of_all(clock):
    registry = Registry("run", PATIENCE_SECONDS)
    assert registry.tell(ACTORS) == (0, {})
    registry.tell(REPLAY)
    assert registry.tell(LEARNER) == (0, REPLAY.addresses | LEARNER.addresses)
    moved = REPLAY._replace(addresses=REPLAY.addresses | {"replay_host": "10.0.0.9"})
    registry.tell(moved)
    assert registry.tell(ACTORS).addresses["replay_host"] == "10.0.0.9"
    assert registry.ask(False) == [ACTORS, moved, LEARNER]


def test_the_groups_end_step_by_step_and_the_slowest_decides(clock):
    registry = Registry("run", PATIENCE_SECONDS)
    for report in (REPLAY, LEARNER, ACTORS):
        registry.tell(report)
    registry.ask(True)
    assert [registry.tell(report).stage for report in (REPLAY, LEARNER, ACTORS)] == [1, 1, 1]
    assert registry.tell(REPLAY._replace(stages_ended=1)).stage == 1
    assert registry.tell(LEARNER._replace(stages_ended=1)).stage == 1  # the actors still end
    assert registry.tell(ACTORS._replace(stages_ended=1)).stage == 2
    for report in (ACTORS, REPLAY):
        registry.tell(report._replace(stages_ended=2))
    assert registry.tell(REPLAY._replace(stages_ended=2)).stage == 2  # the learner writes its checkpoint
    assert registry.tell(LEARNER._replace(stages_ended=2)).stage == NUM_STAGES
    assert registry.tell(LEARNER._replace(stages_ended=NUM_STAGES)).stage == NUM_STAGES


@pytest.mark.parametrize("change", [{"has_finished": True}, {"fault": "learner: no such game"}])
def test_the_end_of_the_learner_is_that_of_the_run(clock, change):
    registry = Registry("run", PATIENCE_SECONDS)
    registry.tell(ACTORS)
    assert registry.tell(LEARNER._replace(**change)).stage == 1
    assert registry.tell(ACTORS).stage == 1


def test_a_group_that_is_silent_or_forgotten_holds_nobody_up(clock):
    registry = Registry("run", PATIENCE_SECONDS)
    for report in (REPLAY, LEARNER, ACTORS):
        registry.tell(report)
    registry.ask(True)
    registry.tell(REPLAY._replace(stages_ended=1))
    registry.tell(LEARNER._replace(stages_ended=1))
    registry.forget("actors a")
    assert registry.tell(REPLAY._replace(stages_ended=1)).stage == 2
    clock.now += PATIENCE_SECONDS
    assert registry.tell(REPLAY._replace(stages_ended=2)).stage == NUM_STAGES  # the learner's node is gone


def test_without_a_driver_the_run_ends_and_leaves_nothing(clock, monkeypatch):
    cleaned = []
    monkeypatch.setattr(ray_groups, "clean_up", cleaned.append)
    registry = Registry("run", PATIENCE_SECONDS)
    registry.tell(LEARNER)
    clock.now += PATIENCE_SECONDS - 1
    assert registry.tell(LEARNER).stage == 0
    registry.ask(False)
    clock.now += PATIENCE_SECONDS + 1
    assert registry.tell(LEARNER).stage == 1 and not cleaned
    assert registry.tell(LEARNER._replace(stages_ended=NUM_STAGES)).stage == NUM_STAGES
    assert cleaned == ["run"]


def test_a_registry_ends_a_run_whose_driver_died_before_there_was_a_group(monkeypatch):
    cleaned = threading.Event()
    monkeypatch.setattr(ray_groups, "clean_up", lambda run: cleaned.set())
    monkeypatch.setattr(ray_groups, "BEAT_SECONDS", 0.01)
    Registry("run", 0.05, watches=True)
    assert cleaned.wait(60)


def test_a_registry_that_is_started_again_learns_all_from_the_reports(clock):
    registry = Registry("run", PATIENCE_SECONDS)
    assert registry.tell(LEARNER._replace(stages_ended=2)).stage == 0  # until the driver says it again
    registry.ask(True)
    assert registry.tell(LEARNER._replace(stages_ended=2)).stage == NUM_STAGES
