import msgspec
import pytest
import torch

from apexrl.agents.contract import Unrolls
from apexrl.agents.engine.minibatches import rows_of
from apexrl.agents.impala_config import ImpalaUpdate, replay_view, stream, wants
from apexrl.agents.replaying.mix import parts_of
from apexrl.agents.replaying.replay_states import ReplayStates, burned_in
from apexrl.agents.replaying.unroll_batches import history_of
from apexrl.errors import ConfigError
from apexrl.learning.experience.unroll_store import UnrollStore
from tests.agents.impala_parts import VECTORS
from tests.learning.long_streams import ALGORITHM, LSTM_SIZE, SPEC, LongStream, T, new_network
from tests.lockstep import CPU

MIX = ("queue=1/4", "uniform=3/4")
RING = 6


class World:
    """A store of one stream, and the states with which its unrolls begin."""

    def __init__(self, replay_state, long_stream, batch_size=12):
        update = ImpalaUpdate(batch_size=batch_size, mix=MIX, replay_state=replay_state)
        self.wants = wants(ALGORITHM, update)
        self.states = ReplayStates(parts_of(MIX), self.wants, replay_state, SPEC, CPU)
        self.store = UnrollStore(SPEC, RING, self.wants, CPU, 4)
        self.stream, self.network = long_stream, new_network()

    def hold(self, number, previous):
        self.store.commit(self.store.begin(number), self.stream.unroll(number), previous)

    def gathered(self, **numbers):
        """Returns batches of unroll numbers by table, all of them of weight 1."""
        weights = {table: torch.ones(len(own)) for table, own in numbers.items()}
        return {table: self.store.batch(table, torch.tensor(own), weights[table]) for table, own in numbers.items()}

    def begin(self, batches):
        with torch.no_grad():
            return self.states.begin(batches, self.network)

    def first_states(self, **numbers):
        """Returns the states [B, 2, size] with which a batch of each table begins."""
        return {table: b.extras["core_state"].float() for table, b in self.begin(self.gathered(**numbers)).items()}


def stored(long_stream, *numbers):
    """Returns the states of the log."""
    return torch.from_numpy(long_stream.states[list(numbers)]).float()


def test_stored_states_are_those_of_the_log():
    stream = LongStream(RING, starts=[0])
    world = World("stored", stream)
    for number in range(RING):
        world.hold(number, number - 1)
    states = world.first_states(queue=[5, 4, 3], uniform=[3, 1])
    assert torch.equal(states["queue"], stored(stream, 5, 4, 3))
    assert torch.equal(states["uniform"], stored(stream, 3, 1))


def test_zero_replaces_the_states_of_replayed_unrolls_alone():
    stream = LongStream(RING, starts=[0])
    world = World("zero", stream)
    for number in range(RING):
        world.hold(number, number - 1)
    states = world.first_states(queue=[5], uniform=[3, 1])
    assert torch.equal(states["queue"], stored(stream, 5)) and not states["uniform"].any()


@pytest.mark.parametrize("unrolls", [1, 2, 3])
@pytest.mark.parametrize("starts", [[0], [0, 9], [0, 12], [0, 8, 18]])
def test_burn_in_goes_from_an_earlier_state_to_the_one_of_the_whole_episode(unrolls, starts):
    """The earlier state of the log is made the right one; those in between stay random."""
    stream = LongStream(RING, starts)
    world = World(f"burn-in:{unrolls * T}", stream)
    _, states = stream.whole(world.network)
    for number in range(unrolls, RING):
        stream.states = stream.states.copy()
        stream.states[number - unrolls] = states[(number - unrolls) * T].numpy()
        for earlier in range(number + 1):
            world.hold(earlier, earlier - 1)
        begun = world.begin(world.gathered(queue=[0], uniform=[number, 0]))["uniform"]
        assert begun.observation.shape[:2] == (T + 1, 2) and begun.weight.tolist() == [1, 1]
        assert begun.observation[:, 0, 0].numpy() == pytest.approx(stream.unroll(number).frames)
        assert begun.extras["core_state"].shape == (2, 2, LSTM_SIZE)
        if not stream.starts[number * T]:  # else whatever comes before does not count
            assert torch.allclose(begun.extras["core_state"][0], states[number * T], atol=2e-3)


def test_burn_in_takes_the_state_of_the_log_where_the_unrolls_before_are_not_held():
    stream = LongStream(12, starts=[0])
    world = World(f"burn-in:{2 * T}", stream)
    for number in range(RING + 3):  # 0 to 2 are evicted; 5 lies in another stream
        world.hold(number, -1 if number == 5 else number - 1)
    states = world.first_states(queue=[4], uniform=[3, 5, 4, 6, 8])["uniform"]
    assert torch.equal(states[:2], stored(stream, 3, 5))
    # Before 4 and 6 one unroll is held, so that they begin where it leads from the state of the log.
    one_before = World(f"burn-in:{T}", stream)
    for number in (3, 4, 5, 6):
        one_before.hold(number, number - 1)
    expected = one_before.first_states(queue=[4], uniform=[4, 6])["uniform"]
    assert torch.allclose(states[2:4], expected, atol=1e-6)


def test_a_walk_begins_where_the_unroll_before_it_ended_in_the_last_batch():
    stream = LongStream(RING, starts=[0])
    world = World("walk", stream, batch_size=4)
    for number in range(RING):
        world.hold(number, number - 1)
    given = torch.arange(4 * 2 * LSTM_SIZE).reshape(4, 2, LSTM_SIZE).float()
    world.states.keep(world.gathered(queue=[5], uniform=[1, 3, 0]), given)
    states = world.first_states(queue=[2], uniform=[4, 1, 3])
    assert torch.equal(states["queue"], stored(stream, 2))  # an actor's own is nearly as new
    assert torch.equal(states["uniform"], torch.stack([given[2], given[3], stored(stream, 3)[0]]))


@pytest.mark.parametrize("table", ["uniform@64", "elite-insertion@64"])
def test_a_part_of_the_log_is_not_left_by_walks(table):
    [_, want] = wants(ALGORITHM, ImpalaUpdate(batch_size=12, mix=("queue=1/2", f"{table}=1/2")))
    assert want.table == table and want.view == Unrolls()


def test_views_of_replayed_unrolls():
    def views(**changes):
        update = ImpalaUpdate(batch_size=12, mix=("queue=1/2", "uniform=1/4", "elite-1=1/4"), **changes)
        return {want.table: want.view for want in wants(ALGORITHM, update)}

    assert views() == {"queue": Unrolls(), "uniform": Unrolls(is_named=True), "elite-1": Unrolls()}
    assert views(replay_state="stored") == views(replay_state="zero") == dict.fromkeys(views(), Unrolls())
    burnt = Unrolls(burn_in_unrolls=2)
    assert views(replay_state="burn-in:8") == {"queue": Unrolls(), "uniform": burnt, "elite-1": burnt}


@pytest.mark.parametrize("text", ["", "walks", "burn-in", "burn-in:", "burn-in:0", "burn-in:6", "burn-in:-4", "zero:4"])
def test_a_state_that_nobody_can_make_is_refused(text):
    with pytest.raises(ConfigError, match=r"--replay-state .*walk, stored, zero, or burn-in:N .*--unroll-starts 4"):
        replay_view(ALGORITHM, ImpalaUpdate(replay_state=text))


def test_burn_in_goes_to_the_beginning_of_the_next_unroll_where_unrolls_overlap():
    world = World("stored", LongStream(2, starts=[0]))
    world.hold(0, -1)
    world.hold(1, 0)
    batch, network = world.gathered(uniform=[0, 1])["uniform"], world.network
    spec = msgspec.structs.replace(SPEC, unroll_starts=T - 1, overlap_steps=1)
    with torch.no_grad():
        found = burned_in(batch, 1, network, spec).extras["core_state"]
        before = rows_of(batch, slice(0, 1), spec)
        expected = network.unroll(before.observation, history_of(before), num_steps=T - 1).state
    assert torch.equal(found, expected)


def test_nothing_is_added_to_batches_without_an_lstm():
    algorithm = ALGORITHM.__class__(unroll_starts=T)
    wanted = wants(algorithm, ImpalaUpdate(batch_size=8, mix=MIX))
    assert {want.view for want in wanted} == {Unrolls()}
    assert ReplayStates(parts_of(MIX), wanted, "walk", stream(algorithm, VECTORS), CPU).tensors == {}
