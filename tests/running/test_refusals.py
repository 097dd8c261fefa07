"""Command lines that mean nothing for a run on this machine."""

import pytest

from apexrl.config.commands import RunCommand
from apexrl.config.flags import Asked, default_command
from apexrl.errors import ConfigError
from apexrl.running.refusals import check_asked
from tests.tools.run_directories import write_run


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


def test_a_guest_takes_the_environment_of_its_run(tmp_path):
    write_run(tmp_path / "run", [1])
    with pytest.raises(ConfigError, match="leave out --env and its settings"):
        check_asked(Asked.of(default_command(RunCommand), ["--guest", f"{tmp_path}/run", "--env", "CartPole-v1"]))


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
