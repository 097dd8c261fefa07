"""R2D2: losses and states once more step by step, evictions, a graph's replays, actors' priorities, refusals."""

import numpy as np
import pytest
import torch

from apexrl.agents.contract import LAST_BATCH, Unrolls, Want
from apexrl.agents.r2d2 import R2d2Acting, make_learner, make_network
from apexrl.agents.r2d2_config import FAMILY, R2d2Algorithm, R2d2Update
from apexrl.config.commands import RunCommand
from apexrl.config.flags import check_together, default_command, with_preset, with_sections
from apexrl.errors import ConfigError
from apexrl.learning.experience.unroll_store import UnrollStore
from apexrl.learning.updates.updater import Updater
from apexrl.networks.config import ActorCriticConfig
from apexrl.networks.device_stream import DeviceStream
from apexrl.networks.recurrent import History, memory_of
from apexrl.types import EnvironmentSpec, StreamUnrolls, Unroll
from tests.devices import CPU
from tests.fake_graph import FakeDeviceStream
from tests.learning.twins import update_both
from tests.learning.updates.test_updater import World
from tests.lockstep import TABLE

K, N, RING, LSTM_SIZE = 4, 2, 6, 5
ALGORITHM = R2d2Algorithm(gamma=0.9, unroll_starts=K, n_steps=N, lstm_size=LSTM_SIZE)
SPEC = FAMILY.stream(ALGORITHM, EnvironmentSpec("Vectors-v0", (4,), "float32", 1, 3, 1))
SCREENS = FAMILY.stream(ALGORITHM, EnvironmentSpec("Screens-v0", (36, 36), "uint8", 2, 3, 1))
NETWORK = ActorCriticConfig("shallow", (4, 4, 4), 8)


class Stream:
    """A stream of RING unrolls whose episodes begin at some observations. The log's states are random numbers."""

    def __init__(self, starts, seed=0):
        rng = np.random.default_rng(seed)
        steps = RING * K + N
        self.frames = rng.normal(size=(steps + 1, 4)).astype(np.float32)
        self.actions = rng.integers(0, 3, steps).astype(np.int32)
        self.rewards = rng.normal(scale=3, size=steps).astype(np.float32)
        self.starts = np.isin(np.arange(steps + 1), starts)
        self.discounts = np.ones(steps, np.float32)
        self.discounts[[at - 2 for at in starts if at > 4]] = 0  # the step before a reset; the first end is truncated
        self.states = rng.normal(size=(RING, 2, LSTM_SIZE)).astype(np.float16)

    def unroll(self, number):
        """Returns one unroll as actors send it."""
        first, rows = number * K, slice(number * K, number * K + K + N)
        extras = {"core_state": self.states[number : number + 1]}
        extras["last_action"] = self.actions[first - 1 : first] if first else np.zeros(1, np.int32)
        extras["last_reward"] = self.rewards[first - 1 : first] if first else np.zeros(1, np.float32)
        observations = slice(rows.start, rows.stop + 1)
        steps = self.actions[rows], self.rewards[rows], self.discounts[rows]
        return Unroll(self.frames[observations], *steps, self.starts[observations], extras)

    def values(self, network, first, learned, last, state=None):
        """Returns values and states by observation, step by step; without gradient before the one `learned`."""
        state = torch.from_numpy(self.states[first // K].astype(np.float32))[None] if state is None else state
        values, states = {}, {}
        for at in range(first, last + 1):
            action, reward = (self.actions[at - 1], self.rewards[at - 1]) if at else (0, 0.0)
            past = (torch.tensor([number]) for number in (bool(self.starts[at]), int(action), float(reward)))
            state, states[at] = state.detach() if at == learned else state, state.detach()
            memory = memory_of(History(*past, state), 3)
            prepared = network.prepare(torch.from_numpy(self.frames[at])[None, None])
            output = network.step(network.torso.features(prepared, network.torso.kernel()), memory)
            values[at], state = output[0, :3], output[:, 3:].unflatten(1, (2, LSTM_SIZE))
        return values, states


def h(x):
    return torch.sign(x) * (torch.sqrt(x.abs() + 1) - 1) + 1e-3 * x


def inverse_h(y):
    root = (torch.sqrt(1 + 4e-3 * (y.abs() + 1 + 1e-3)) - 1) / 2e-3
    return torch.sign(y) * (root**2 - 1)


def slow_loss(stream, online, target, first, learned, number, weight):
    """Returns the loss of one sequence and its priority, window by window."""
    last = (number + 1) * K + N
    q, q_target = (stream.values(network, first, learned, last)[0] for network in (online, target))
    loss, errors = torch.zeros(()), []
    for at in range(learned, (number + 1) * K):
        if stream.starts[at + 1]:
            continue
        total, discount, end = 0.0, 1.0, at
        while end < at + N:
            total += discount * stream.rewards[end]
            discount *= 0.9 * stream.discounts[end]
            end += 1
            if discount == 0 or (end < at + N and stream.starts[end + 1]):
                break
        aim = h(total + discount * inverse_h(q_target[end].detach().double()[q[end].argmax()])).float()
        error = aim - q[at][stream.actions[at]]
        loss = loss + 0.5 * weight * error**2
        errors.append(abs(error.item()))
    return loss, 0.9 * max(errors) + 0.1 * np.mean(errors) + 1e-6


class R2d2World(World):
    """The world of Ape-X's tests with this family's learner, and one stream as experience."""

    def __init__(self, update, stream=None, device_stream=None, spec=SPEC, make_unroll=None):
        torch.manual_seed(7)
        self.spec, self.device, self.stream = spec, CPU, stream or Stream([0, 9, 19])
        self.device_stream = device_stream or DeviceStream(CPU)
        learner = make_learner(ALGORITHM, NETWORK, update, spec, CPU)
        with torch.no_grad():  # else the target network is the online one
            torch.manual_seed(8)
            for parameter in learner.target.parameters():
                parameter.copy_(torch.randn_like(parameter) / 3)
        self.updater = Updater(learner, self.device_stream)
        self.store = UnrollStore(spec, RING, FAMILY.wants(ALGORITHM, update), CPU, 8, self.device_stream)
        self.rng = np.random.default_rng(3)
        for number in range(RING):
            unroll = self.stream.unroll(number)
            if make_unroll is not None:  # of screens
                unroll = make_unroll(spec, number)._replace(starts=unroll.starts, extras=unroll.extras)
            self.store.commit(self.store.begin(number), unroll, number - 1)

    def sample(self):
        return self.rng.integers(0, RING, 3), self.rng.uniform(0.1, 1, 3).astype(np.float32)

    def batches(self, *numbers):
        """Returns the batch of some unrolls, filled up to three, and their weights."""
        weights = np.linspace(0.5, 1, len(numbers), dtype=np.float32)
        batch = self.store.gather(TABLE, np.array(numbers), weights).batch
        return {TABLE: batch}, batch.weight[-3:][: len(numbers)]


def update_of(sequence_unrolls, replay_state, batch_size=3):
    return R2d2Update(
        batch_size,
        sequence_unrolls=sequence_unrolls,
        replay_state=replay_state,
        learning_rate=1e-3,
        target_period_updates=7,
        table=TABLE,
    )


@pytest.mark.parametrize("starts", [[0], [0, 4, 9, 14], [0, 9, 19, 21]])
@pytest.mark.parametrize(("unrolls", "burn_in"), [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2)])
def test_gradients_and_priorities_are_those_of_single_steps(starts, unrolls, burn_in):
    """Unroll 3 has all others before it. Unroll 0 has none: its sequence is the unroll alone."""
    world = R2d2World(update_of(unrolls, f"burn-in:{burn_in * K}" if burn_in else "stored"), Stream(starts))
    check_gradients(world, unrolls, burn_in)


def check_gradients(world, unrolls, burn_in):
    """Compares the gradients and priorities of unrolls 4, 3 and 0 with those of single steps."""
    learner = world.updater.learner
    online, target = learner.online["q"], learner.target["q"]
    batches, weights = world.batches(4, 3, 0)
    expected, priorities = torch.zeros(()), []
    for number, weight in zip((4, 3, 0), weights, strict=True):
        learned = max(number - unrolls + 1, 0) * K
        first = max(learned - burn_in * K, 0)
        loss, priority = slow_loss(world.stream, online, target, first, learned, number, weight)
        expected = expected + loss
        priorities.append(priority)
    gradients = torch.autograd.grad(expected, list(online.parameters()))
    outcome = learner.gradients(batches, lambda: learner.from_online(batches, learner.from_target(batches)))
    for parameter, gradient in zip(online.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-4)
    assert outcome.priorities[TABLE].tolist() == pytest.approx(priorities, rel=1e-4)
    assert outcome.metrics["loss"].item() == pytest.approx(expected.item() / 3, rel=1e-4)
    assert learner.gradient[-1] == 3


@pytest.mark.parametrize("starts", [[0], [0, 9], [0, 8, 17], [0, 12]])
@pytest.mark.parametrize(("unrolls", "burn_in"), [(2, 0), (1, 2), (2, 1)])
def test_sequences_begin_with_the_state_of_the_whole_episode(starts, unrolls, burn_in):
    """Where the log's first state is the right one; those in between are random, and never looked at."""
    world = R2d2World(update_of(unrolls, f"burn-in:{burn_in * K}" if burn_in else "stored"), Stream(starts))
    learner, network = world.updater.learner, world.updater.learner.online["q"]
    values, states = world.stream.values(network, 0, -1, RING * K + N, torch.zeros(1, 2, LSTM_SIZE))
    for number in range(unrolls - 1 + burn_in, RING):
        begin = (number - burn_in - unrolls + 1) * K
        world.stream.states = np.random.default_rng(number).normal(size=world.stream.states.shape).astype(np.float16)
        world.stream.states[begin // K] = states[begin][0].numpy()
        for held in range(RING):
            world.store.commit(world.store.begin(held), world.stream.unroll(held), held - 1)
        found = learner.learning.from_target({"q": network}, world.batches(number)[0])
        first, last = begin + burn_in * K, (number + 1) * K + N
        expected = torch.stack([values[at] for at in range(first, last + 1)])
        assert torch.allclose(found[:, 0], expected, atol=3e-3) and len(found) == unrolls * K + N + 1


def test_an_evicted_beginning_shortens_a_sequence_and_another_log_leaves_nothing():
    stream = Stream([0])
    world = R2d2World(update_of(2, f"burn-in:{K}"), stream)
    learner = world.updater.learner
    online, target = learner.online["q"], learner.target["q"]
    world.store.begin(RING)  # in the place of unroll 0, and later of 1
    world.store.commit(world.store.begin(RING + 1), stream.unroll(1), -1)

    def gradients_of(number, first, learned):
        batches, (weight,) = world.batches(number)
        learner.gradients(batches, lambda: learner.from_online(batches, learner.from_target(batches)))
        loss, _ = slow_loss(stream, online, target, first, learned, number, weight)
        for parameter, gradient in zip(
            online.parameters(), torch.autograd.grad(loss, list(online.parameters())), strict=True
        ):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-4)

    gradients_of(4, 2 * K, 3 * K)  # all of it is there
    gradients_of(3, 2 * K, 2 * K)  # without burn-in
    gradients_of(2, 2 * K, 2 * K)  # alone, with the log's state
    world.store.clear(generation=1)
    stream = Stream([0, 6], seed=1)
    for number in range(3):
        world.store.commit(world.store.begin(number), stream.unroll(number), number - 1)
    gradients_of(0, 0, 0)
    gradients_of(2, 0, K)
    assert not any(name.startswith(LAST_BATCH) for name in learner.learning_tensors())


def test_zero_begins_without_the_logs_states():
    zero, stored = (R2d2World(update_of(2, kind)) for kind in ("zero", "stored"))
    stored.stream.states[:] = 0
    for number in range(RING):
        stored.store.commit(stored.store.begin(number), stored.stream.unroll(number), number - 1)
    found, expected = (world.updater.learner.from_target(world.batches(4, 1, 0)[0]) for world in (zero, stored))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("spec", [SPEC, SCREENS], ids=["vectors", "screens"])
@pytest.mark.parametrize(("unrolls", "replay_state"), [(1, "stored"), (2, f"burn-in:{K}")])
def test_a_graph_makes_the_same_updates(make_unroll, spec, unrolls, replay_state):
    screens = make_unroll if spec is SCREENS else None
    graph, plain = (
        R2d2World(update_of(unrolls, replay_state), None, stream, spec, screens)
        for stream in (FakeDeviceStream(), None)
    )
    for _ in range(4):
        keys = graph.sample()
        update_both(graph, plain, lambda keys=keys: graph.by_keys(*keys), lambda keys=keys: plain.by_keys(*keys))
    assert graph.device_stream.num_captures == 1


def test_an_actors_priority_mixes_the_errors_of_its_unroll():
    acting = R2d2Acting(R2d2Algorithm(gamma=1.0, n_steps=1, unroll_starts=3, value_rescaling=False), SPEC)
    rewards = np.float32([[1, 1], [2, 2], [4, 4], [0, 0]])
    starts = np.zeros((5, 2), bool)
    starts[3, 1] = True  # the third step of the second stream is a reset
    unrolls = StreamUnrolls(None, None, rewards, np.ones_like(rewards), starts)
    extras = {name: np.zeros((5, 2), np.float32) for name in ("q_taken", "q_max")}
    found = acting.priorities(unrolls._replace(rewards=rewards[:4], discounts=np.ones((4, 2))), extras)
    assert found.shape == (1, 2)
    assert found[0] == pytest.approx([0.9 * 4 + 0.1 * 7 / 3, 0.9 * 2 + 0.1 * 3 / 2], rel=1e-4)


def test_what_a_learner_wants():
    algorithm = R2d2Algorithm()
    assert FAMILY.wants(algorithm, R2d2Update()) == (Want("sequences", 64, Unrolls(burn_in_unrolls=2)),)
    assert FAMILY.wants(algorithm, R2d2Update(replay_state="zero")) == (Want("sequences", 64, Unrolls(1)),)
    with pytest.raises(ConfigError, match=r"--replay-state walk goes on .*: give burn-in:N, stored or zero"):
        FAMILY.wants(algorithm, R2d2Update(replay_state="walk"))
    with pytest.raises(ConfigError, match=r"burn-in:30: give stored, zero, or burn-in:N .*--unroll-starts 40"):
        FAMILY.wants(algorithm, R2d2Update(replay_state="burn-in:30"))
    with pytest.raises(ConfigError, match="has actions of 1 numbers"):
        FAMILY.stream(algorithm, EnvironmentSpec("Arm-v0", (4,), "float32", 1, 0, 1, action_bounds=((0, 1),)))


def test_the_papers_rewards_are_not_clipped_and_lives_do_not_end_episodes():
    command = with_preset(default_command(RunCommand, "r2d2"), "paper")
    check_together(command, SPEC)
    assert (command.env.clip_rewards, command.env.life_loss_terminal) == ("no", False)
    assert with_preset(default_command(RunCommand, "r2d2"), "two-cores").env == RunCommand.env
    uniform = with_sections(command, {"replay": {"tables": ("transitions=priority",)}})
    with pytest.raises(ConfigError, match="--agent r2d2 needs a table named sequences"):
        check_together(uniform, SPEC)


def test_values_are_those_of_dueling_streams():
    network = make_network(SPEC, NETWORK)
    core = torch.randn(6, LSTM_SIZE)
    with torch.no_grad():
        moved = network.outputs(core)
        network.value.bias.add_(2)
        network.advantage.bias.add_(3)  # of all actions alike
        torch.testing.assert_close(network.outputs(core), moved + 2)
