"""The benchmarks of actors and whole runs: their counts, and the systems that they compare."""

import time

import psutil
import pytest

from benchmarks import actor, actor_profile, end_to_end
from benchmarks.actor_process import Played, cpu_seconds, play


def test_cpu_time_of_a_process_is_the_schedulers():
    process, used = psutil.Process(), time.process_time()
    before = cpu_seconds(process)
    while time.process_time() < used + 0.5:
        pass
    # The kernel's sum over threads may step back by some milliseconds on a virtual machine.
    assert cpu_seconds(process) - before == pytest.approx(0.5, abs=0.2)


@pytest.mark.parametrize("agent", ["apex-dqn", pytest.param("impala", marks=pytest.mark.long("benchmarks"))])
def test_the_real_actor_is_measured_and_says_where_its_time_goes(agent):
    played = play("Pong", agent, "two-cores", "cpu", 0.5)
    assert played.agent_steps > 0
    assert 0 < played.cpu_seconds
    shares = actor_profile.shares_of(played)
    assert all(0 <= share <= 1 for share in shares.values()), shares
    assert shares["emulator"] > 0 and shares["inference"] > 0


def test_a_profile_names_what_the_actor_does_not_report():
    figures = {f"actor/time/{name}": 0.1 for name in ("emulator", "assembly", "sending")}
    with pytest.raises(RuntimeError, match="actor/time/inference, actor/time/waiting"):
        actor_profile.shares_of(Played(1, 1, 1, figures))


def _measured(name, threads, per_cpu_second, per_second):
    rates = {actor.CPU: per_cpu_second, actor.WALL: per_second}
    return {"system": actor.SYSTEMS[name].name, "game": "Pong", "threads": threads} | rates


def test_peers_count_at_their_better_number_of_threads_and_by_the_median():
    systems = [actor.SYSTEMS[name] for name in ("paper", "sb3", "sb3-8")]
    measurements = [_measured("paper", 0, 900, 1200)]
    measurements += [_measured("sb3", 1, rate, 90) for rate in (100, 500, 120)]
    measurements += [_measured("sb3", 0, 60, rate) for rate in (100, 150, 5)]
    ours, one, eight = actor.summarize(measurements, systems, ("Pong",))
    assert one[actor.CPU] == {"median": 120, "lowest": 100, "highest": 500, "threads": 1, "to_best_peer": 1}
    assert (one[actor.WALL]["median"], one[actor.WALL]["threads"]) == (100, 0)
    assert (ours[actor.CPU]["to_best_peer"], ours[actor.WALL]["to_best_peer"]) == (900 / 120, 12)
    assert actor.CPU not in eight
    assert "not measured" in actor.table([ours, one, eight]).splitlines()[-1]


def test_other_screens_are_no_yardstick():
    systems = [actor.SYSTEMS[name] for name in ("vector", "envpool", "envpool-bilinear")]
    measurements = [
        _measured(name, 1, rate, rate) for name, rate in zip(("vector", "envpool"), (300, 200), strict=True)
    ]
    measurements.append(_measured("envpool-bilinear", 1, 400, 400))
    ours, *_ = actor.summarize(measurements, systems, ("Pong",))
    assert ours[actor.CPU]["to_best_peer"] == 1.5


def test_whole_runs_are_compared_with_the_fastest_peer():
    def measured(name, threads, rate):
        rates = {f"{figure}_per_second": rate for figure in end_to_end.RATES}
        figures = {"samples_per_transition": 8.0, "memory_bytes": 1e9, "transitions_held": 100}
        return {"system": end_to_end.SYSTEMS[name].name, "variant": "", "threads": threads} | rates | figures

    systems = [end_to_end.SYSTEMS[name] for name in ("ours", "sb3", "sb3-8")]
    found = [measured("ours", 0, 800), measured("sb3", 1, 50), measured("sb3-8", 1, 100), measured("sb3-8", 0, 10)]
    rows = {row["system"]: row for row in end_to_end.summarize(found, systems)}
    assert rows["ours"]["to_best_peer"]["frames"] == 8
    assert rows["SB3 DQN, 8 envs"]["threads"] == 1
    assert rows["SB3 DQN, 1 env"]["to_best_peer"]["updates"] == 0.5
