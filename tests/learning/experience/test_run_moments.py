"""Moments of a run's observations and rewards, against numpy over the same unrolls; and who is given them."""

import hashlib
from collections import namedtuple

import msgspec
import numpy as np
import pytest
import torch

import apexrl
from apexrl.agents.apex_dpg import make_network
from apexrl.agents.families import family_of, implementation
from apexrl.agents.impala_config import wants
from apexrl.config.commands import RunCommand
from apexrl.config.flags import parse
from apexrl.config.sections import LearningConfig
from apexrl.errors import ConfigError, WireError
from apexrl.learning.experience.decoder import Decoder
from apexrl.learning.experience.run_moments import Moments, RunMoments, running_returns
from apexrl.learning.experience.unroll_store import UnrollStore
from apexrl.learning.sharing import beginning
from apexrl.learning.updates.team import Team
from apexrl.learning.updates.updater import Updater
from apexrl.lifecycle import Stop
from apexrl.lockstep.loop import LockstepLoop
from apexrl.networks.checkpoint import Checkpoint, load_checkpoint
from apexrl.networks.config import DeterministicConfig, from_text
from apexrl.networks.device_stream import DeviceStream
from apexrl.networks.dueling import make_network as make_dueling
from apexrl.networks.headers import CheckpointHeader, Counters
from apexrl.networks.normalizer import MOST
from apexrl.networks.parameters import decode_parameters, encode_parameters
from apexrl.networks.policy import Policy
from apexrl.types import StreamSpec, StreamUnrolls, Unroll
from apexrl.unroll import UnrollCodec
from tests.agents.impala_parts import algorithm_of, spec_of, updates
from tests.fields import random_unroll
from tests.lockstep import ALGORITHM, CPU, NETWORK, TABLE, make_updater, parameters_of, want

BOTH = LearningConfig(normalize_observations=True, scale_rewards=True)
SPEC = StreamSpec("Numbers-v0", (3,), "float32", 2, 3, 1, unroll_starts=8, overlap_steps=3)
GAMMA = 0.9
RING = 6
Run = namedtuple("Run", "directory unrolls loop")


def unroll_of(number):
    """An unroll whose numbers lie far from 0, with an end, a reset and a termination."""
    rng = np.random.default_rng(number)
    starts = np.zeros(SPEC.unroll_steps + 1, bool)
    starts[5] = True
    discounts = np.where(np.arange(SPEC.unroll_steps) == 3, 0, 1).astype(np.float32)
    frames = (rng.normal(size=(SPEC.unroll_frames, 3)) * [1, 1e3, 1e-3] + [5, -7e4, 0]).astype(np.float32)
    rewards = np.where(starts[1:], 0, rng.normal(3, 2, SPEC.unroll_steps)).astype(np.float32)
    actions = rng.integers(0, 3, SPEC.unroll_steps).astype(np.int32)
    return Unroll(frames, actions, rewards, discounts, starts)


def begun(learning=BOTH, spec=SPEC):
    moments = RunMoments(learning, GAMMA, DeviceStream(CPU))
    moments.begin(spec)
    return moments


def taken(moments, numbers, is_new=True):
    """Adds unrolls of one stream."""
    before = 0.0
    for number in numbers:
        before = moments.add(unroll_of(number), SPEC.unroll_starts, before, is_new)
    return moments


def test_a_mask_of_actions_is_shown_as_it_is():
    spec = msgspec.structs.replace(SPEC, num_actions=2, variant='{"action_mask": "mask"}')
    found, usual = (taken(begun(spec=given), [0, 1]).normalizer_on(CPU) for given in (spec, SPEC))
    assert found.mean[1:].tolist() == [0, 0] and found.scale[1:].tolist() == [1, 1]
    assert (found.mean[0], found.scale[0]) == (usual.mean[0], usual.scale[0])


def test_observations_on_which_nobody_acts_do_not_count():
    """A copy of an environment that cannot be made gives blank ones, each as if an episode began."""
    unroll, starts, moments = unroll_of(0), SPEC.unroll_starts, begun()
    blank = unroll._replace(frames=np.zeros_like(unroll.frames), starts=np.ones_like(unroll.starts))
    moments.add(unroll, starts, 0.0, is_new=True)
    expected = moments.acting_tensors
    expected = {name: tensor.clone() for name, tensor in expected.items()}
    moments.add(blank, starts, 0.0, is_new=True)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in moments.acting_tensors.items())


def of_all(numbers):
    """The tensors that numpy gives of all steps of the unrolls of one stream."""
    frames = np.concatenate([unroll_of(n).frames[1 : 1 + SPEC.unroll_starts] for n in numbers]).astype(np.float64)
    sums, so_far = [], 0.0
    for n in numbers:
        unroll = unroll_of(n)
        for t in range(SPEC.unroll_starts):
            if unroll.starts[t + 1]:
                so_far = 0.0
                continue
            so_far = so_far * GAMMA + float(unroll.rewards[t])
            sums.append(so_far)
            so_far *= unroll.discounts[t]
    return {"normalizer.mean": frames.mean(0), "normalizer.scale": 1 / frames.std(0),
            "normalizer.reward_scale": 1 / np.std(sums)}  # fmt: skip


def check(moments, expected):
    found = moments.acting_tensors
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name].numpy(), value, rtol=1e-6)


def test_moments_of_parts_are_those_of_all_rows():
    rows = np.random.default_rng(0).normal(1e6, [1, 2, 1e-3], (100, 3))
    parts = [Moments.of(part) for part in np.split(rows, [0, 1, 7, 60])]
    joined = Moments.of(rows[:0])
    for part in parts:
        joined = joined.joined(Moments.of_numbers(part.numbers))
    assert joined.num_rows == 100
    np.testing.assert_allclose(joined.mean, rows.mean(0), rtol=1e-14)
    np.testing.assert_allclose(joined.scale, 1 / rows.std(0), rtol=1e-6)
    assert (Moments.of(np.full((4, 2), 0.1)).scale == 1).all(), "numbers that have not changed keep their scale"


@pytest.mark.parametrize("unit", [1e-7, 1e-4, 1.0, 1e5])
def test_the_unit_of_a_number_does_not_count(unit):
    rows = unit * np.random.default_rng(0).normal(2, 1, (100, 1))
    np.testing.assert_allclose(Moments.of(rows).scale, 1 / rows.std(0), rtol=1e-9)
    assert (Moments.of(np.full((100, 1), unit, np.float32)).scale == 1).all(), "it has not changed"


def test_bytes_are_normalized_as_numbers_are():
    spec = msgspec.structs.replace(SPEC, frame_dtype="uint8")
    unroll = unroll_of(0)._replace(frames=np.random.default_rng(0).integers(0, 256, (SPEC.unroll_frames, 3), np.uint8))
    moments = begun(spec=spec)
    moments.add(unroll, SPEC.unroll_starts, 0.0, is_new=True)
    store = UnrollStore(spec, RING, [want()], CPU, 2, None, moments.normalizer_on(CPU))
    store.commit(store.begin(0), unroll)
    found = store.gather(TABLE, np.array([3]), np.ones(1, np.float32)).batch.observation
    acting = moments.acting_tensors
    newest = (torch.from_numpy(unroll.frames[4]).float() - acting["normalizer.mean"]) * acting["normalizer.scale"]
    torch.testing.assert_close(found[0, -1], newest.clamp(-MOST, MOST))


def test_last_rewards_are_scaled_as_the_others():
    spec = spec_of(lstm=True)
    moments = begun(LearningConfig(scale_rewards=True), spec)
    moments.add(unroll := random_unroll(spec, 0), spec.unroll_starts, 0.0, is_new=True)
    store = UnrollStore(spec, RING, wants(algorithm_of(True), updates()), CPU, 2, None, moments.normalizer_on(CPU))
    store.commit(store.begin(0), unroll)
    batch = store.gather("queue", np.array([0]), np.ones(1, np.float32)).batch
    scale = moments.acting_tensors["normalizer.reward_scale"].numpy()
    assert scale != 1
    np.testing.assert_allclose(batch.extras["last_reward"][0], unroll.extras["last_reward"] * scale, rtol=1e-6)
    np.testing.assert_allclose(batch.reward[:, 0], unroll.rewards * scale, rtol=1e-6)


def test_sums_of_rewards_end_with_their_episode():
    sums, after = running_returns(unroll_of(1), SPEC.unroll_starts, GAMMA, 2.0)
    rewards = unroll_of(1).rewards
    assert len(sums) == SPEC.unroll_starts - 1 and sums[0] == pytest.approx(2 * GAMMA + rewards[0])
    assert after == sums[-1] == pytest.approx(GAMMA * (GAMMA * rewards[5] + rewards[6]) + rewards[7])


def test_the_normalizer_follows_all_that_was_seen():
    moments = taken(begun(), range(5))
    check(moments, of_all(range(5)))  # of itself, before the first update
    moments.follow(Team())
    taken(moments, [])
    check(moments, of_all(range(5)))
    moments.add(unroll_of(9), SPEC.unroll_starts, 0.0, is_new=True)
    check(moments, of_all(range(5)))  # until it follows again
    observations = begun(LearningConfig(normalize_observations=True))
    assert observations.acting_tensors.keys() == {"normalizer.mean", "normalizer.scale"}
    assert begun(LearningConfig(scale_rewards=True)).acting_tensors.keys() == {"normalizer.reward_scale"}


def test_a_later_start_goes_on_and_takes_nothing_twice():
    first = Updater(make_updater(SPEC).learner, DeviceStream(CPU), moments=taken(begun(), range(4)))
    first.follow_moments()
    state = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    moments = begun()
    second = Updater(make_updater(SPEC).learner, DeviceStream(CPU), moments=moments)
    taken(moments, [2], is_new=False)  # the log is read again while the checkpoint is loaded
    second.load_state_dict(state, 7)
    assert second.state_dict().keys() == state.keys()
    check(moments, of_all(range(4)))
    before = running_of(range(4))
    for number in (4, 5):
        before = moments.add(unroll_of(number), SPEC.unroll_starts, before, is_new=True)
    for _ in range(2):
        second.follow_moments()
        check(moments, of_all(range(6)))
    with pytest.raises(ConfigError, match="another network or optimizer"):
        make_updater(SPEC).load_state_dict({**make_updater(SPEC).state_dict(), **state}, 7)


def test_a_later_start_normalizes_its_first_batches_by_the_numbers_of_the_earlier_ones():
    first = Updater(make_updater(SPEC).learner, DeviceStream(CPU), moments=taken(begun(), range(4)))
    first.follow_moments()
    header = CheckpointHeader(SPEC, "apex-dqn", "{}", Counters())
    start = beginning(Checkpoint(header, first.state_dict()), 1)
    moments = RunMoments(BOTH, GAMMA, DeviceStream(CPU), start.moments)
    moments.begin(SPEC)
    check(moments, of_all(range(4)))
    moments.add(unroll_of(4), SPEC.unroll_starts, running_of(range(4)), is_new=True)
    check(moments, of_all(range(5)))
    other = RunMoments(BOTH, GAMMA, DeviceStream(CPU), start.moments)
    other.begin(msgspec.structs.replace(SPEC, frame_shape=(4,)))  # the checkpoint will be refused
    assert other.normalizer_on(CPU).mean.tolist() == [0] * 4


def running_of(numbers):
    before = 0.0
    for number in numbers:
        _, before = running_returns(unroll_of(number), SPEC.unroll_starts, GAMMA, before)
    return before


def test_learners_of_a_team_have_the_numbers_of_all_logs():
    parts = [taken(begun(), [0, 1]), taken(begun(), [0, 1, 2])]
    said = []

    class Ranks(Team):
        def gather(self, row):
            said.append(row)
            return np.array(said)

    for part in parts:  # what each says
        part.follow(Ranks())
    del said[2:]

    class Told(Team):
        def gather(self, row):
            return np.array(said)

    for part in parts:
        part.follow(Told())
    first, second = (part.acting_tensors | part.learning_tensors for part in parts)
    assert all(torch.equal(first[name], second[name]) for name in first)
    rows = np.concatenate([unroll_of(n).frames[1 : 1 + SPEC.unroll_starts] for n in (0, 1, 0, 1, 2)])
    np.testing.assert_allclose(first["normalizer.mean"].numpy(), rows.astype(np.float64).mean(0), rtol=1e-6)
    assert first["moments.observation"][0] == len(rows)


def test_batches_are_in_the_measure_of_the_run():
    moments = begun()
    plain, store = (UnrollStore(SPEC, RING, [want()], CPU, 2, None, own)
                    for own in (None, moments.normalizer_on(CPU)))  # fmt: skip
    for number in range(3):
        for kept in (plain, store):
            kept.commit(kept.begin(number), unroll_of(number))
    taken(moments, range(3))
    keys, weights = np.array([0, 3, 9, 20]), np.ones(4, np.float32)
    raw, found = (kept.gather(TABLE, keys, weights).batch for kept in (plain, store))
    acting = moments.acting_tensors
    for name in ("observation", "next_observation"):
        scaled = (getattr(raw, name) - acting["normalizer.mean"]) * acting["normalizer.scale"]
        assert torch.equal(getattr(found, name), scaled.clamp(-MOST, MOST))
    assert torch.equal(found.n_step_return, raw.n_step_return * acting["normalizer.reward_scale"])
    assert raw.observation.abs().max() > 1e4 and torch.equal(found.discount, raw.discount)


def without_normalizer(tensors):
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("normalizer.")}


def test_an_actor_sees_what_the_learner_sees():
    moments = taken(begun(), range(3))
    updater = Updater(make_updater(SPEC).learner, DeviceStream(CPU), moments=moments)
    parameters = parameters_of(updater, SPEC)
    mean = parameters.tensors["normalizer.mean"]
    assert torch.equal(mean, moments.acting_tensors["normalizer.mean"]), "float16 would lose what differs"
    store = UnrollStore(SPEC, RING, [want()], CPU, 2, None, moments.normalizer_on(CPU))
    store.commit(store.begin(0), unroll_of(0))
    seen_by_learner = store.gather(TABLE, np.arange(5), np.ones(5, np.float32)).batch.observation
    network = make_dueling(SPEC, NETWORK)
    network.load_state_dict(without_normalizer(parameters.tensors))
    policy = Policy(SPEC, lambda: make_dueling(SPEC, NETWORK), CPU, parameters.tensors)
    assert policy.reward_scale == parameters.tensors["normalizer.reward_scale"]
    stack, frames = policy.frame_stack(1), unroll_of(0).frames
    found = [policy.values(frame[None], np.array([step == 0]), stack) for step, frame in enumerate(frames[:6])]
    with torch.no_grad():
        wanted = network(seen_by_learner[:5]).numpy()
    np.testing.assert_allclose(np.concatenate(found[1:]), wanted, rtol=0, atol=1e-6)
    broken = {name: tensor for name, tensor in parameters.tensors.items() if name != "normalizer.scale"}
    with pytest.raises(WireError, match=r"normalizer\.scale"):
        policy.load(broken)


def test_first_priorities_are_of_scaled_rewards():
    moments = begun()
    updater = Updater(make_updater(SPEC).learner, DeviceStream(CPU), moments=moments)
    make = implementation(family_of("apex-dqn")).make_actor
    unroll = unroll_of(0)
    side_by_side = StreamUnrolls(*(array[:, None] for array in unroll[:5]))
    extras = {name: np.ones((SPEC.unroll_steps + 1, 1), np.float32) for name in ("q_max", "q_taken")}
    plain = make(ALGORITHM, parameters_of(updater, SPEC), CPU)
    taken(moments, range(3))
    scaled = make(ALGORITHM, parameters_of(updater, SPEC), CPU)
    scale = moments.acting_tensors["normalizer.reward_scale"].numpy()
    wanted = plain.priorities(side_by_side._replace(rewards=side_by_side.rewards * scale), extras)
    np.testing.assert_array_equal(scaled.priorities(side_by_side, extras), wanted)
    assert (plain.priorities(side_by_side, extras) != wanted).any()


def test_pictures_are_refused():
    pixels = StreamSpec("Pixels-v0", (10, 5), "uint8", 1, 3, 1)
    with pytest.raises(ConfigError, match=r"for vectors, and environment 'Pixels-v0' has observations"):
        begun(spec=pixels)
    assert begun(LearningConfig(scale_rewards=True), pixels).acting_tensors


def trained(directory, *flags):
    """A short run in lockstep, and the unrolls of its log in order."""
    unrolls, add = [], Decoder.add

    def kept(decoder, append, header, is_new=True):
        add(decoder, append, header, is_new)
        unrolls.append(UnrollCodec(decoder.store.spec).decode(append.block))

    flags = ["--agent", "apex-dpg", "--env", "Pendulum-v1", "--preset", "small", "--no-evaluator", "--batch-size", "16",
             "--min-size-to-sample", "200", "--hidden-size", "16", "--total-updates", "130",
             "--run-dir", str(directory), *flags]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "add", kept)
        loop = LockstepLoop(parse(RunCommand, flags), Stop())
        loop.run()
    return Run(directory, unrolls, loop)


@pytest.fixture(scope="module")
def normalized(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("run") / "a", "--normalize-observations", "--scale-rewards")


def digest(run):
    tensors = load_checkpoint(run.directory / "checkpoints" / "latest.safetensors").tensors
    return hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))).hexdigest()


def test_a_run_has_the_numbers_of_its_log_and_repeats_them(normalized, tmp_path):
    normalized.loop.learner.updater.follow_moments()
    tensors = normalized.loop.learner.updater.state_dict()
    frames = np.concatenate([unroll.frames[:20] for unroll in normalized.unrolls]).astype(np.float64)
    np.testing.assert_allclose(tensors["acting.normalizer.mean"].numpy(), frames.mean(0), rtol=1e-5)
    np.testing.assert_allclose(tensors["acting.normalizer.scale"].numpy(), 1 / frames.std(0), rtol=1e-5)
    assert 0 < tensors["acting.normalizer.reward_scale"] < 1
    again = trained(tmp_path / "b", "--normalize-observations", "--scale-rewards")
    assert digest(again) == digest(normalized)
    plain = trained(tmp_path / "c")
    assert not any("normalizer" in name or "moments" in name for name in plain.loop.learner.updater.state_dict())


def test_a_loaded_agent_acts_as_the_actors_do(normalized):
    checkpoint = load_checkpoint(normalized.directory / "checkpoints" / "latest.safetensors")
    agent = apexrl.load(normalized.directory)
    tensors = checkpoint.parameters().tensors
    observation = np.array([0.3, -0.9, 6.5], np.float32)
    scaled = (torch.from_numpy(observation) - tensors["normalizer.mean"]) * tensors["normalizer.scale"]
    network = make_network(checkpoint.header.spec, from_text(checkpoint.header.network, DeterministicConfig))
    network.load_state_dict(without_normalizer(tensors))
    with torch.no_grad():
        wanted = network(scaled.view(1, 1, 3))[0].numpy()
    np.testing.assert_allclose(agent.act(observation), wanted, rtol=0, atol=1e-6)
    assert abs(network(torch.from_numpy(observation).view(1, 1, 3)).item() - wanted.item()) > 1e-5
    sent = decode_parameters(encode_parameters(checkpoint.parameters().header, tensors)).tensors
    assert all(torch.equal(sent[name], tensors[name]) for name in tensors if name.startswith("normalizer."))
