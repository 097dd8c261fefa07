import collections
import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apexrl.agents.contract import Unrolls, Want
from apexrl.agents.impala import make_learner
from apexrl.agents.impala_config import ActorCriticConfig, ImpalaUpdate, wants
from apexrl.agents.replaying.mix import parts_of
from apexrl.agents.replaying.replay_states import ReplayStates
from apexrl.agents.replaying.rows import Walks
from apexrl.agents.replaying.unroll_batches import history_of
from apexrl.config.flags import kinds_for
from apexrl.errors import ConfigError
from apexrl.learning.experience.replica import Replica
from apexrl.learning.updates.updater import Updater
from apexrl.lifecycle import Stop
from apexrl.net import wire
from apexrl.net.log_client import LogAppend, LogBatch, LogStart
from apexrl.networks.device_stream import DeviceStream
from apexrl.streams import StreamOrder
from apexrl.types import LogPosition, Sample, StreamSpec
from apexrl.unroll import UnrollCodec
from tests.agents.impala_parts import keeping
from tests.learning.experience.test_replica import Log
from tests.learning.long_streams import ALGORITHM, SPEC, LongStream, T, new_network
from tests.lockstep import CPU

RING = 16


@dataclasses.dataclass
class Known:
    """An unroll as the test knows it."""

    starts: np.ndarray
    before: int  # -1: none
    after: int = -1


class KnownLog:
    """A log of several streams, whose actors end, begin again, and lose unrolls; each place is found by search."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.order = StreamOrder(RING, T)
        self.unrolls = []
        self.tails = {}  # by actor and stream: number, next first step, whether its next observation begins an episode

    def held(self):
        return range(max(len(self.unrolls) - RING, 0), len(self.unrolls))

    def append(self):
        rng, number = self.rng, len(self.unrolls)
        place = f"actor-{rng.integers(2)}", int(rng.integers(2))
        previous, first_step, begins = self.tails.get(place, (-1, 0, True))
        event = rng.random()
        if event < 0.05:  # the actor begins anew
            previous, first_step, begins = -1, 0, True
        elif event < 0.1:  # an unroll was lost
            previous, first_step = -1, first_step + T
        starts = rng.random(T + 1) < 0.12
        starts[0] = begins
        if previous not in self.held() or number - previous >= RING:
            previous = -1
        self.unrolls.append(Known(starts, previous))
        if previous >= 0:
            self.unrolls[previous].after = number
        self.tails[place] = number, first_step + T, starts[-1]
        assert self.order.add(number, *place, first_step, starts) == previous

    def goes_on(self, number, is_first):
        """Whether the walk's episode reaches the end of an unroll, and beyond it."""
        inside = self.unrolls[number].starts[1 if not is_first else 0 : T]
        return not self.unrolls[number].starts[T] and (is_first or not inside.any())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_walks_follow_episodes_through_any_log(seed):
    log, size = KnownLog(seed), 5
    walks, last = Walks(log.order), {}
    for _ in range(60):
        for _ in range(int(log.rng.integers(6))):
            log.append()
        if not log.unrolls:
            continue
        # Some of a sample may be evicted by the time it comes.
        sampled = log.rng.integers(max(len(log.unrolls) - RING - 2, 0), len(log.unrolls), size)
        expected_on = [following for following in last.values() if following in log.held()]
        numbers = walks.next_batch(sampled.tolist(), size).tolist()
        assert len(set(numbers)) == len(numbers) <= size and set(numbers) <= set(log.held())
        assert numbers[: len(expected_on)] == expected_on
        for number in numbers[len(expected_on) :]:
            known = log.unrolls[number]
            assert known.starts[:T].any() or known.before not in log.held()
        last = {}
        for place, number in enumerate(numbers):
            known = log.unrolls[number]
            if log.goes_on(number, place >= len(expected_on)) and known.after >= 0:
                last[number] = known.after
                assert not log.unrolls[known.after].starts[0]  # a walk never goes into an episode that begins there


def test_a_walk_takes_an_episode_from_its_beginning_to_its_end():
    order = StreamOrder(RING, T)
    for number in range(10):  # one stream, whose episodes begin at steps 0, 6 and 30
        starts = np.isin(np.arange(number * T, number * T + T + 1), [0, 6, 30])
        assert order.add(number, "actor", 0, number * T, starts) == number - 1
    walks = Walks(order)
    assert [walks.next_batch([5], 1).tolist() for _ in range(8)] == [[1], [2], [3], [4], [5], [6], [7], [1]]
    assert Walks(order).next_batch([0, 5, 3, 9], 3).tolist() == [0, 1, 7]  # 3 is of the same episode as 5


def test_an_actor_of_the_same_name_is_another_stream():
    order = StreamOrder(RING, T)
    none = np.zeros(T + 1, bool)
    assert [order.add(0, "a", 0, 0, none), order.add(1, "a", 1, 0, none), order.add(2, "b", 0, T, none)] == [-1] * 3
    assert order.add(3, "a", 0, T, none) == 0
    assert order.add(4, "a", 0, 0, none) == -1  # started again
    assert order.add(5, "a", 0, 3 * T, none) == -1  # lost one
    assert order.add(6, "a", 0, 4 * T, none) == 5


def test_actors_that_ended_are_forgotten():
    order = StreamOrder(RING, T)
    for number in range(10 * RING):
        order.add(number, f"actor-{number}", 0, 0, np.zeros(T + 1, bool))
    assert len(order._newest) <= RING + 1


class Learner:
    """A replica behind a log of two streams in turns, and a network that never changes."""

    def __init__(self, episodes, ring_unrolls=100, num_rows=2):
        self.long = [LongStream(40, starts, seed) for seed, starts in enumerate(episodes)]
        self.network = new_network()
        self.whole = [stream.whole(self.network)[0] for stream in self.long]
        mix = ("uniform=1",)
        update = ImpalaUpdate(batch_size=num_rows, mix=mix)
        own = wants(ALGORITHM, update)
        self.log, self.num_appended = Log(), 0
        self.log.batch_used = lambda table: None
        self.log.events = [LogStart("log", SPEC, ring_unrolls, 0, False, {"uniform": "unrolls"})]
        self.replica = Replica(self.log, keeping(ALGORITHM, update), LogPosition(), Stop())
        self.new_states = lambda: ReplayStates(parts_of(mix), own, "walk", SPEC, CPU)
        self.states = self.new_states()
        self.follow()

    def append(self, count):
        for number in range(self.num_appended, self.num_appended + count):
            index, stream = divmod(number, 2)
            block = UnrollCodec(SPEC).encode(self.long[stream].unroll(index))
            insert = wire.Insert(number, "actor", stream, index * T, 0, 0.0, b"\xf0", np.ones(T, np.float32).tobytes())
            self.log.events.append(LogAppend(number, insert, block))
        self.num_appended += count
        self.follow()

    def follow(self):
        while self.replica.follow(0):
            pass

    def update(self, sampled):
        """Goes through a batch; returns by unroll whether its logits are those of the whole episode.

        The first answer is of steps from the first start in the unroll on, the second of all.
        """
        sample = Sample(np.array(sampled), np.ones(len(sampled)), np.ones(len(sampled), np.float32))
        self.log.events.append(LogBatch("uniform", sample))
        self.follow()
        batches = self.replica.next_draw(1.0).batches()
        batch = self.states.begin(batches, self.network)["uniform"]
        with torch.no_grad():
            output = self.network.unroll(batch.observation, history_of(batch), num_steps=T)
        self.states.keep(batches, output.state)
        numbers = batches["uniform"].extras["number"].tolist()
        right = {}
        for row, number in enumerate(numbers):
            index, stream = divmod(number, 2)
            expected = self.whole[stream][index * T : (index + 1) * T + 1]
            same = torch.isclose(output.logits[:, row], expected, atol=1e-5).all(dim=1)
            begun = torch.from_numpy(np.cumsum(self.long[stream].starts[index * T : (index + 1) * T + 1]) > 0)
            right[number] = bool(same[begun].all()), bool(same.all())
        return right


EPISODES = ([0, 13, 26, 28, 61, 100], [0, 9, 16, 47, 90])


def test_states_of_a_walk_are_those_of_the_whole_episode():
    learner = Learner(EPISODES)
    learner.append(60)
    seen, going = collections.Counter(), set()
    rng = np.random.default_rng(0)
    for _ in range(60):
        right = learner.update(rng.integers(0, 60, 2).tolist())
        for number, (from_start, everywhere) in right.items():
            assert from_start
            assert everywhere or number not in going  # the head of a first unroll is of the episode before
            seen[number in going] += 1
        going = {number + 2 for number in right}
    assert seen[True] > 50 and seen[False] > 10


def test_a_walk_goes_on_with_its_states_while_its_beginning_is_evicted():
    learner = Learner(([0, 100], [0, 30]), ring_unrolls=10, num_rows=1)
    learner.append(10)
    walked = []
    for _ in range(15):
        (number, (_, everywhere)), *_ = (
            learner.update([2]).items() if not walked else learner.update([walked[-1]]).items()
        )
        assert everywhere
        walked.append(number)
        learner.append(2)
    assert walked == list(range(0, 30, 2))
    assert learner.num_appended - 10 > 0 and not learner.replica.store.holds("uniform", np.array([0]))[0]


def test_a_walk_that_is_overtaken_begins_elsewhere():
    learner = Learner(([0, 100], [0, 30]), ring_unrolls=10, num_rows=1)
    learner.append(10)
    assert list(learner.update([4])) == [0]
    learner.append(20)
    assert list(learner.update([25])) == [21]  # the oldest that is held of the other stream


def test_a_checkpoint_of_other_rows_goes_on_with_new_walks():
    def updater(batch_size, learning_rate=1e-3):
        torch.manual_seed(batch_size)
        update = ImpalaUpdate(batch_size=batch_size, mix=("uniform=1",), learning_rate=learning_rate)
        device = DeviceStream(CPU)
        with device.exclusive():
            return Updater(
                make_learner(ALGORITHM, ActorCriticConfig("shallow", (4, 4, 4), 8), update, SPEC, CPU), device
            )

    old, same, other = updater(4), updater(4), updater(6)
    state = {name: torch.ones_like(tensor) for name, tensor in old.state_dict().items()}
    walks = [name for name in state if "last_batch." in name]
    assert len(walks) == 2
    same.load_state_dict(state, 3)
    flags = {"learning.entropy_cost"}  # stays the command's
    assert all(torch.equal(tensor, state[name]) or name in flags for name, tensor in same.state_dict().items())
    before = other.state_dict()
    other.load_state_dict(state, 3)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, before[name] if name in walks or name in flags else state[name]), name
    without = {name: tensor for name, tensor in state.items() if name not in walks}
    updater(4).load_state_dict(without, 3)
    del without[next(name for name in without if "optimizer" in name)]
    with pytest.raises(ConfigError, match="another network or optimizer"):
        updater(4).load_state_dict(without, 3)


def test_a_new_log_begins_new_walks():
    learner = Learner(EPISODES, num_rows=1)
    learner.append(20)
    assert list(learner.update([3])) == [1]
    learner.log.events.append(LogStart("another", SPEC, 100, 0, False, {"uniform": "unrolls"}))
    learner.num_appended = 0
    learner.append(20)
    assert list(learner.update([8])) == [6]


@pytest.mark.parametrize("kept", [True, False])
def test_without_the_states_of_the_last_batch_a_walk_would_be_wrong(kept):
    learner = Learner(([0, 100], [0, 100]), num_rows=1)
    learner.append(20)
    assert learner.update([0]) == {0: (True, True)}
    if not kept:
        learner.states = learner.new_states()
    assert learner.update([0])[2][1] == kept


def test_no_walk_goes_through_a_table_whose_unrolls_have_weights():
    """The unroll that goes on with an episode is not the one that was drawn, whose importance weight comes with it."""
    stream = StreamSpec(
        "Any-v0", (4,), "float32", 1, 2, 1, unroll_starts=8, overlap_steps=0, has_unroll_priorities=True
    )
    assert "priority" in kinds_for(Want("sequences", 4, Unrolls()), stream)
    assert "priority" not in kinds_for(Want("sequences", 4, Unrolls(), is_replaced=True), stream)
