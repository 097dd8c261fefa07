"""The division of a run among learners, and their decisions together."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest

from apexrl.acting.loop import shard_of
from apexrl.agents.apex_dqn_config import FAMILY
from apexrl.agents.families import FAMILIES
from apexrl.config.commands import LearnerCommand, OfflineCommand, ReplayCommand
from apexrl.config.flags import explicit_replay, of_own_shard, parse, wants_of
from apexrl.config.sections import ReplayConfig, WireConfig
from apexrl.config.tables import part_of
from apexrl.errors import ConfigError
from apexrl.learning.sharing import numbers_of, position_of, shards_of, share_of, totals
from apexrl.learning.updates.team import RankStanding, Team, may_update, scale_of, who_is_late
from apexrl.types import LogPosition

COMMAND = LearnerCommand(algorithm=FAMILY.algorithm, update=FAMILY.update, network=FAMILY.network)


class Seen(Team):
    """A rank of a team whose other ranks say what they are told here."""

    def __init__(self, rank, size, rows=()):
        self.rank, self.size, self.rows = rank, size, rows

    def gather(self, row):
        return np.array([*self.rows[: self.rank], row, *self.rows[self.rank :]])


def test_each_learner_has_its_part_of_batch_and_shards():
    assert share_of(COMMAND, 4).update.batch_size == 128 and share_of(COMMAND, 1) == COMMAND
    with pytest.raises(ConfigError, match="512 is not to be divided among 3"):
        share_of(COMMAND, 3)
    wires = WireConfig(shards=8)
    assert [list(shards_of(wires, Seen(rank, 4))) for rank in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    with pytest.raises(ConfigError, match="8 shards are not to be divided among 3 learners"):
        shards_of(wires, Seen(0, 3))


def test_the_sizes_of_an_own_algorithm_are_divided_as_it_says(monkeypatch):
    flags = ["--agent", "tests.system.counting_agent:counting", "--batch-size", "6", "--queue-size"]
    share = share_of(parse(LearnerCommand, [*flags, "4"]), 2)
    assert [want.batch_size for want in wants_of(share)] == [2, 3]
    with pytest.raises(ConfigError, match="--queue-size 5 is not to be divided among 2 learners: give a multiple"):
        share_of(parse(LearnerCommand, [*flags, "5"]), 2)
    family = FAMILIES["counting"]._replace(divided_sizes=("queue",))
    monkeypatch.setitem(FAMILIES, "counting", family)
    with pytest.raises(ConfigError, match=r"Family\.divided_sizes names queue, which its update has not"):
        share_of(parse(LearnerCommand, [*flags, "4"]), 1)


def test_a_part_that_the_mix_cannot_divide_is_told_with_the_whole_batch():
    mix = ["--mix", "queue=1/8", "uniform=7/8", "--batch-size", "8"]
    command = parse(LearnerCommand, ["--agent", "impala", *mix])
    with pytest.raises(ConfigError, match="each of 2 learners takes an equal part of --batch-size 8: --batch-size 4"):
        share_of(command, 2)
    command = parse(LearnerCommand, ["--agent", "impala", *mix[:-1], "9"])
    with pytest.raises(ConfigError, match=r"^--batch-size 9 cannot be divided"):
        share_of(command, 1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--batch-size", "20000"], "learner draws 20000 of transitions at once by --batch-size, .* at most 16384"),
        (["--agent", "impala", "--mix", "attentive=1/2", "queue=1/2", "--batch-size", "10000", "--candidates", "4"],
         "draws 20000 of attentive at once by --batch-size and --candidates, .* at most 16384"),
    ],
)  # fmt: skip
def test_a_batch_that_no_server_draws_is_refused_where_one_is_asked(flags, words):
    with pytest.raises(ConfigError, match=words):
        share_of(parse(LearnerCommand, flags), 1)
    assert share_of(parse(LearnerCommand, flags), 2)
    assert share_of(parse(OfflineCommand, ["--batch-size", "20000", "--from-journal", "x"]), 1)


def test_a_learner_walks_through_one_shard():
    command = parse(LearnerCommand, ["--agent", "impala", "--lstm", "--mix", "uniform=1", "--shards", "2"])
    assert share_of(command, 2).update.batch_size * 2 == command.update.batch_size
    with pytest.raises(ConfigError, match="--replay-state walk follows one shard"):
        share_of(command, 1)


def test_a_shard_has_ports_and_a_part_of_the_experience_of_its_own():
    wires = WireConfig(actor_port=100, batch_port=101, shards=3)
    assert [(w.actor_port, w.batch_port) for w in map(wires.of_shard, range(3))] == [(100, 101), (102, 103), (104, 105)]
    replay = ReplayConfig(
        100, 11, tables=("queue=fifo", "new=uniform:0:7:50", "old=uniform:2.5", "all=priority::1_000"), max_gb=3.0
    )
    part = part_of(replay, 2)
    assert (part.capacity, part.min_size_to_sample, part.max_gb) == (50, 6, 1.5) and part_of(replay, 1) == replay
    assert part.tables == ("queue=fifo", "new=uniform:0:4:25", "old=uniform:2.5", "all=priority::500")
    with pytest.raises(ConfigError, match="--tables odd=uniform:0:many: give NAME=KIND"):
        part_of(ReplayConfig(100, 11, tables=("odd=uniform:0:many",)), 2)


def test_a_replay_server_is_told_which_shard_it_is():
    flags = ["--preset", "small", "--seed", "3", "--capacity", "1001", "--min-size-to-sample", "100"]
    own = of_own_shard(parse(ReplayCommand, [*flags, "--shards", "4", "--shard", "2"]))
    assert (own.seed, own.wires.actor_port, own.wires.batch_port) == (5, 51005, 51006)
    assert (own.replay.capacity, own.replay.min_size_to_sample) == (251, 25)
    assert own.replay.tables == ("transitions=priority",)
    alone = parse(ReplayCommand, flags)
    assert of_own_shard(alone) == dataclasses.replace(alone, replay=explicit_replay(alone))
    with pytest.raises(ConfigError, match="--shard 4: with --shards 4 give one from 0 to 3"):
        of_own_shard(parse(ReplayCommand, [*flags, "--shards", "4", "--shard", "4"]))


@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_the_workers_of_a_host_are_spread_over_the_shards(num_shards):
    assert {shard_of(index, num_shards) for index in range(num_shards)} == set(range(num_shards))


def test_the_logs_of_all_shards_come_in_their_order():
    logs = [LogPosition(f"{shard + 2**60:016x}", 2**50 + shard, 7 * shard) for shard in range(4)]
    logs[2] = LogPosition()
    assert [position_of(np.array(numbers_of(log))) for log in logs] == logs

    counted = SimpleNamespace(counted={1: logs[1], 3: logs[3]})
    others = [*numbers_of(logs[0]), *numbers_of(logs[2]), 5.0, 6.0]
    found, sums = totals(Seen(1, 2, [others]), counted, np.array([[1.0, 2.0]]))
    assert found == tuple(logs) and sums.tolist() == [[6.0, 8.0]]


READY, LATE, DRY = (
    RankStanding(True, largest_weight=2.0),
    RankStanding(waits_for="actors"),
    RankStanding(is_skipped=True),
)


@pytest.mark.parametrize(
    ("standings", "may", "late"),
    [
        ([READY, READY], True, ""),
        ([READY, LATE], False, "learner 1 (actors)"),
        ([DRY, READY], True, "learner 0 (a batch)"),
        ([DRY, DRY], False, "learner 0 (a batch), learner 1 (a batch)"),
        ([READY], True, ""),
    ],
)
def test_learners_wait_for_each_other_but_not_for_ever(standings, may, late):
    assert may_update(standings) == may and who_is_late(standings) == late


def test_the_largest_weight_of_all_draws_is_one():
    standings = [READY, READY._replace(largest_weight=8.0), DRY._replace(largest_weight=math.inf)]
    assert [scale_of(standings, rank) for rank in (0, 1)] == [0.25, 1.0]
