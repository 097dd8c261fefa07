"""One learner's replicas of several logs."""

import msgspec
import pytest

from apexrl.errors import ConfigError, PeerTimeout
from apexrl.learning.experience.draw import Draw, DrawQueue
from apexrl.learning.experience.replicas import Replicas
from apexrl.learning.waiter import Waiter
from apexrl.types import LogPosition
from tests.test_clocks import turn


class OneReplica:
    """The parts of a replica that its learner sees."""

    def __init__(self, shard, spec, waits_for=""):
        self.shard, self.spec, self.waits_for = shard, spec, waits_for
        self.counted = LogPosition(f"{shard:016x}", 3 * shard, 10 * shard)
        self.params_versions, self.num_undecodable, self.num_updates = [shard], shard, 0
        self.selection_metrics, self.num_taken = {f"table/{shard}": 1.0}, 0

    def draw_taken(self):
        self.num_taken += 1

    def drain_episodes(self):
        return [self.shard]


def test_draws_come_in_order_and_their_own_replica_hears_of_each(spec):
    queue, ones = DrawQueue(), [OneReplica(1, spec), OneReplica(3, spec)]
    replicas = Replicas(ones, queue)
    for shard in (3, 3, 1):
        queue.put(Draw(0, {}, shard=shard))
    assert replicas.upcoming_draw().shard == 3
    drawn = [replicas.next_draw(0) for _ in range(4)]
    assert [draw and draw.shard for draw in drawn] == [3, 3, 1, None]
    assert [replicas.of(draw).shard for draw in drawn[:3]] == [3, 3, 1] and [one.num_taken for one in ones] == [1, 2]
    replicas.made(7)
    assert [one.num_updates for one in ones] == [7, 7]


def test_what_is_known_of_all_logs(spec):
    replicas = Replicas([OneReplica(1, spec), OneReplica(3, spec)], DrawQueue())
    assert replicas.spec == spec and replicas.transitions == 40 and replicas.num_undecodable == 4
    assert replicas.counted == {1: LogPosition(f"{1:016x}", 3, 10), 3: LogPosition(f"{3:016x}", 9, 30)}
    assert (replicas.params_versions, replicas.drain_episodes()) == ([1, 3], [1, 3])
    assert replicas.selection_metrics == {"table/1": 1.0, "table/3": 1.0}


@pytest.mark.parametrize(
    ("waits", "expected"),
    [(("", "actors"), ""), (("actors", "actors"), "actors"), (("min_size", "actors"), "min_size actors")],
)
def test_a_learner_waits_while_all_its_shards_do(spec, waits, expected):
    ones = [OneReplica(shard, spec, reason) for shard, reason in enumerate(waits)]
    assert Replicas(ones, DrawQueue()).waits_for == expected


@pytest.mark.parametrize(
    ("waits", "which"),
    [(("", "replay_connection", ""), " of shard 1"), (("actors", "replay_connection", "min_size"), " of shard 1"),
     (("replay_connection", "", "replay_connection"), " of shard 0 and 2"), (("replay_connection",) * 3, ""),
     (("replay_connection",), "")],
)  # fmt: skip
def test_a_shard_that_is_away_ends_the_wait_also_where_the_others_give_draws(spec, monkeypatch, waits, which):
    replicas = Replicas([OneReplica(shard, spec, reason) for shard, reason in enumerate(waits)], DrawQueue())
    waiter = Waiter(3.0)
    with pytest.raises(PeerTimeout, match=f"the replay server{which} was away for 3 s"):
        for _ in range(9):
            turn(monkeypatch, 1.0)
            waiter.check(replicas.waits_for, something_came=True, which=replicas.away)


def test_a_shard_that_is_away_for_long_is_said_beside_draws(spec, monkeypatch, caplog):
    caplog.set_level("INFO")
    replicas = Replicas([OneReplica(0, spec), OneReplica(1, spec, "replay_connection")], DrawQueue())
    waiter = Waiter(60.0)
    for _ in range(12):
        turn(monkeypatch, 1.0)
        waiter.check(replicas.waits_for, something_came=True, which=replicas.away)
    assert caplog.messages == ["waiting for replay_connection of shard 1"]


def test_shards_that_hold_other_streams_are_refused(spec):
    ones = [OneReplica(0, spec), OneReplica(1, None)]
    assert Replicas(ones, DrawQueue()).spec is None
    ones[1].spec = msgspec.structs.replace(spec, num_actions=7)
    with pytest.raises(ConfigError, match="different streams"):
        _ = Replicas(ones, DrawQueue()).spec
