"""Command lines that mean nothing for a run on this machine."""

import pytest

from apexrl.config.commands import RunCommand
from apexrl.config.flags import Asked, default_command
from apexrl.errors import ConfigError
from apexrl.running.refusals import check_asked
from tests.running.test_plan import planned
from tests.tools.run_directories import write_run

ON_NUMBERS = ["--env", "Pendulum-v1"]  # the last environment of a command line counts
LASER = ["--agent", "impala", "--mix", "queue=1/4", "uniform=3/4"]
SELECTING = ["--agent", "impala", "--mix", "queue=1/4", "elite-1:candidates=8=3/4"]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--fork", "a", "--resume", "b"], "--resume and --fork begin differently"),
        (["--from-journal", "a", "--fork", "b"], "--fork and --from-journal begin differently"),
        (["--at", "3"], "--at says where --fork DIR begins"),
        (["--smoke", "--fork", "a"], "leave out --fork --no-evaluator"),
        (["--from-scratch"], "give its --resume DIR or --fork DIR"),
        (["--from-journal", "a", "--num-workers", "3", "--capacity", "9"], "leave out --num-workers$"),
        (["--from-journal", "a", "--learning-rate", "1e-3:0:5M", "--max-gradient-norm", "9:1"], "out --learning-rate$"),
        (["--from-journal", "a", "--num-workers", "1"], "leave out --num-workers$"),  # the usual number
        (["--from-journal", "a", "--actor-device", "cpu", "--batch-port", "3"], "out --actor-device$"),
        (["--reproducible", "--max-restarts", "3", "--keys", "k"], "no journal: leave out --max-restarts --keys"),
        (["--checkpoint-period-updates", "1000"], "without --reproducible these mean nothing"),
        (
            ["--from-journal", "a", "--total-frames", "3", "--samples-per-insert", "1"],
            "--samples-per-insert --total",
        ),
    ],
)
def test_flags_that_say_nothing_together_are_refused(flags, complaint):
    with pytest.raises(ConfigError, match=complaint):
        check_asked(Asked.of(default_command(RunCommand), flags))


@pytest.mark.parametrize("flag", ["journal-dir", "max-gb", "actor-device", "shards", "num-workers"])
def test_a_guest_has_no_servers_that_flags_could_be_of(tmp_path, flag):
    write_run(tmp_path / "run", [1])
    with pytest.raises(ConfigError, match=f"--guest has neither actors nor a replay server: leave out --{flag}$"):
        words = ["--guest", f"{tmp_path}/run", "--env", "Catch-v0", f"--{flag}", "3"]
        check_asked(Asked.of(default_command(RunCommand), words))


def test_a_guest_takes_the_environment_of_its_run(tmp_path):
    write_run(tmp_path / "run", [1])
    with pytest.raises(ConfigError, match="leave out --env and its settings"):
        check_asked(Asked.of(default_command(RunCommand), ["--guest", f"{tmp_path}/run", "--env", "CartPole-v1"]))


@pytest.mark.parametrize("words", [["--total-frames", "5M"], ["--learning-rate", "1e-3:0:1M"]])
def test_the_frames_of_a_guest_are_no_measure(tmp_path, words):
    """It begins with millions of them, so a rate would be at its end, and the guest at its own."""
    write_run(tmp_path / "run", [1])
    guest = ["--guest", f"{tmp_path}/run", "--env", "Catch-v0", "--max-gradient-norm", "9:1"]
    check_asked(Asked.of(default_command(RunCommand), guest))
    with pytest.raises(ConfigError, match=f"not {words[0]}; give --total-updates or --max-seconds, and numbers"):
        check_asked(Asked.of(default_command(RunCommand), [*guest, *words]))


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--stop-at-return", "3", "--no-evaluator"], "--stop-at-return needs an evaluator beside it"),
        (["--stop-at-return", "3", "--reproducible"], "--stop-at-return needs an evaluator beside it"),
        (["--callback", "nothing"], "--callback nothing: give module:name"),
        (["--callback", "../a:b"], "--callback ../a:b: give module:name"),
        (["--callback", "a:b", "c:d", "--callback", "a:b"], "--callback a:b stands there twice"),
    ],
)
def test_what_watches_a_run_needs_something_to_see_and_a_name(flags, complaint):
    with pytest.raises(ConfigError, match=complaint):
        check_asked(Asked.of(default_command(RunCommand), flags))


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--policy-temperature", "0.1"], "--policy-temperature means nothing without --munchausen: leave it out"),
        (["--inputs", "map=2x5"], "--inputs means nothing without --network"),
        (["--agent", "impala", "--lstm-size", "128"], "--lstm-size means nothing without --lstm"),
        (["--agent", "impala", "--replay-state", "stored"], "--replay-state means nothing without --lstm"),
        (["--agent", "impact", "--first-deviation", "0.5"], "without actions that are vectors"),
        (["--agent", "r2d2", "--first-deviation", "0.5"], "without actions that are vectors"),
        ([*ON_NUMBERS, "--agent", "apex-dpg", "--target-period-updates", "50"], "without --target-rate 0: leave"),
        ([*ON_NUMBERS, "--agent", "apex-dpg", "--least-return", "5"], "--least-return means nothing without --atoms"),
        ([*ON_NUMBERS, "--agent", "apex-dpg", "--target-noise", "0", "--target-noise-clip", "1"], "--target-noise:"),
        ([*ON_NUMBERS, "--agent", "apex-dpg", "--initial-priorities", "critic"], "without --priority-exponent"),
        ([*ON_NUMBERS, "--critic-norm", "batch", "--target-rate", "0.1"], "--target-rate means nothing without --crit"),
        ([*ON_NUMBERS, "--agent", "impact", "--evaluation-epsilon", "0.1"], "without actions to choose from"),
        ([*ON_NUMBERS, "--agent", "impact", "--minibatches", "1", "--trust-region", "0.1"], "--trust-region compares"),
        (["--agent", "impala", "--trust-region", "0.2"], "--trust-region means nothing without a part of --mix that"),
        (["--agent", "impala", "--lstm", "--replay-state", "zero"], "--replay-state means nothing without a part of -"),
        ([*LASER, "--candidates", "8"], "--candidates means nothing without a part of --mix that keeps some of sever"),
        ([*LASER, "--distance", "l2"], "--distance means nothing without a part of --mix that keeps some of several"),
        (["--agent", "impact", "--anneal-updates", "9"], "--anneal-updates means nothing without a part of --mix"),
        ([*SELECTING, "--candidates", "8"], "--candidates means nothing without a part of .* leaves it to this flag"),
        ([*ON_NUMBERS, "--channels", "8", "8", "8"], "--channels means nothing without observations that are pictures"),
        (["--network", "tests.networks.test_own_torso:Layers", "--channels", "8", "8", "8"], "--channels means noth"),
        ([*LASER, "--priority-exponent", "0.6"], "--priority-exponent means nothing without a table of the kind prio"),
        (["--agent", "impala", "--entropy-target", "1.1"], "3 actions has an entropy between 0 and 1.1: give one"),
        ([*LASER, "--value-cloning-cost", "0.5", "--scale-rewards"], "--value-cloning-cost: --scale-rewards changes"),
        (["--agent", "impala", "--entropy-target", "-1:1:9000"], "an entropy between 0 and 1.1: give one"),
        (["--agent", "impala", "--reward-transform", "soft-asymmetric", "--clip-rewards", "no", "--scale-rewards"],
         "--reward-transform needs the environment's own rewards: give --no-scale-rewards"),
    ],
)  # fmt: skip
def test_what_has_no_effect_in_a_run_or_is_impossible_in_it_is_refused_by_its_plan(flags, complaint):
    with pytest.raises(ConfigError, match=complaint):
        planned("--env", "Catch-v0", *flags)


@pytest.mark.parametrize(
    "flags",
    [
        ["--munchausen", "0.9", "--policy-temperature", "0.1"],
        [*LASER, "--lstm", "--lstm-size", "64", "--replay-state", "stored", "--trust-region", "0.2"],
        [*SELECTING, "--distance", "l2", "--anneal-updates", "9000"],
        ["--agent", "impala", "--mix", "uniform=1", "--channels", "8", "8", "8"],
        ["--priority-exponent", "0", "--importance-exponent", "0"],
        ["--agent", "impala", "--entropy-target", "1"],
        [*ON_NUMBERS, "--agent", "apex-dpg", "--target-rate", "0", "--target-period-updates", "50"],
        [*ON_NUMBERS, "--agent", "apex-dpg", "--preset", "d4pg", "--least-return", "-1000", "--most-return", "0"],
        [
            *ON_NUMBERS,
            "--agent",
            "impact",
            "--entropy-target",
            "-1",
            "--entropy-cost",
            "0.01",
            "--first-deviation",
            "1",
        ],
    ],
)
def test_the_same_flags_have_an_effect_beside_what_they_need(flags):
    planned("--env", "Catch-v0", *flags)
