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
