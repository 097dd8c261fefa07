"""Sizes that a person gave stay as they are, also where they are those of the preset."""

import pytest

from apexrl.config.commands import RunCommand
from apexrl.config.flags import Asked, default_command, with_preset
from apexrl.errors import ConfigError
from apexrl.running.plan import make_plan


@pytest.mark.parametrize("spelling", [["--capacity", "400000"], ["--capacity=400k"], ["--capacity", "400001"]])
def test_a_capacity_that_was_asked_for_is_never_made_smaller(spelling):
    """Not even where it is the preset's own."""

    def capacity(*flags):
        arguments = ["--preset", "two-cores", "--run-dir", "runs/x", "--memory-gb", "3", *flags]
        command = make_plan(Asked.of(default_command(RunCommand), arguments), None).command
        return command.replay.capacity

    assert with_preset(default_command(RunCommand), "two-cores").replay.capacity == 400_000 > capacity()
    with pytest.raises(ConfigError, match=r"a capacity of 400,00\d transitions does not fit"):
        capacity(*spelling)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--shards", "2", "--num-workers", "1"], "--num-workers 1 leaves some of 2 shards without actors"),
        (["--num-learners", "2", "--shards", "1"], "--num-learners 2 does not divide --shards 1"),
    ],
)
def test_sizes_that_were_asked_for_are_kept_where_they_are_the_usual_ones(flags, reason):
    arguments = ["--env", "Catch-v0", "--preset", "small", "--run-dir", "runs/x"]

    def plan(words):
        return make_plan(Asked.of(default_command(RunCommand), words), None).command

    planned = plan([*arguments, *flags[:2]])
    assert planned.wires.shards == planned.acting.num_workers == 2
    with pytest.raises(ConfigError, match=reason):
        plan([*arguments, *flags])


@pytest.mark.parametrize(
    ("workers", "environments", "batch", "reason"),
    [
        (4097, 1, 32, "--num-workers 4097 of --environments-per-worker 1 are more than the 4,096 processes"),
        (65, 4096, 32, "--environments-per-worker 4096 are more .* and 262,144 environments of a replay server"),
        (1, 1, 20_000, "each learner draws 20000 of transitions at once by --batch-size"),
    ],
)
def test_sizes_that_no_replay_server_takes_are_refused(workers, environments, batch, reason):
    arguments = ["--env", "Catch-v0", "--preset", "small", "--run-dir", "runs/x", "--batch-size", str(batch)]
    arguments += ["--num-workers", str(workers), "--environments-per-worker", str(environments)]
    with pytest.raises(ConfigError, match=reason):
        make_plan(Asked.of(default_command(RunCommand), arguments), None)
