"""An actor's captured calls on a CPU: `tests.fake_graph` stands for CUDA."""

import contextlib
from unittest import mock

import numpy as np
import pytest
import torch

from apexrl.networks import policy
from apexrl.networks.device_stream import DONE
from apexrl.networks.dueling import make_network
from tests.fake_graph import FakeGraph
from tests.learning.updates.test_updater import OnDevice
from tests.networks import test_actor_critic as actor_critics
from tests.networks.test_policy import CONFIG, NUM_ENVS, policy_of, spec_of, stream


@pytest.fixture
def captures(monkeypatch):
    """Puts fakes in the place of CUDA; returns the places of all captures, by stream and pool."""
    places, empty = [], torch.empty

    def capture(graph, pool, side, capture_error_mode):
        places.append((side, pool or graph))
        return graph

    def pageable(*sizes, pin_memory=False, **named):
        return empty(*sizes, **named)

    monkeypatch.setattr(torch, "empty", pageable)
    monkeypatch.setattr(torch.Tensor, "any", lambda starts: True)  # on a GPU, a stack does not look whether one begins
    names = ("Stream", "current_stream", "synchronize")
    fakes = {name: mock.MagicMock(side_effect=lambda *_: mock.MagicMock()) for name in names}
    event = mock.MagicMock(query=DONE.query)
    with mock.patch.multiple(
        torch.cuda, CUDAGraph=FakeGraph, graph=capture, Event=lambda: event, stream=contextlib.nullcontext, **fakes
    ):
        yield places


@pytest.mark.parametrize("shape", [(84, 84), (10, 7), (3,)])
def test_replayed_calls_give_the_values_of_plain_ones_at_every_ring_position(captures, shape):
    spec = spec_of(shape)
    tensors = make_network(spec, CONFIG).state_dict()
    captured, plain = (policy_of(spec, tensors, captures=of_gpu) for of_gpu in (True, False))
    stacks = [captured.frame_stack(NUM_ENVS) for _ in range(2)]
    assert len(captures) == 2 * spec.stacked_frames, "no game waits for a capture"
    references = [plain.frame_stack(NUM_ENVS) for _ in range(2)]
    for step, inputs in enumerate(zip(stream(spec, 13), stream(spec, 13, seed=2), strict=True)):
        if step == 9:  # the graphs see new parameters
            tensors = make_network(spec, CONFIG).state_dict()
            captured.load(tensors)
            plain.load(tensors)
        for (frames, starts, _), stack, reference in zip(inputs, stacks, references, strict=True):
            assert np.array_equal(captured.values(frames, starts, stack), plain.values(frames, starts, reference))
    assert len(captures) == 2 * spec.stacked_frames
    assert len({id(side) for side, _ in captures}) == 1, "libraries keep memory for each stream"
    assert len({id(pool) for _, pool in captures}) == 2, "the graphs of a stack share memory, and give it back together"


def test_calls_of_an_earlier_network_are_captured_anew(captures):
    spec = spec_of((3,))
    first, second = (policy_of(spec, make_network(spec, CONFIG).state_dict(), captures=True) for _ in range(2))
    stack, (frames, starts, _) = first.frame_stack(NUM_ENVS), next(iter(stream(spec, 1)))
    expected = second.values(frames, starts, second.frame_stack(NUM_ENVS))
    assert np.array_equal(second.values(frames, starts, stack), expected)
    assert len(captures) == 3 * spec.stacked_frames


@pytest.mark.parametrize("sizes", actor_critics.CONFIGS, ids=["shallow", "deep", "shallow-lstm", "deep-lstm"])
def test_replayed_calls_of_an_actor_critic_are_plain_ones_with_memory_or_without(captures, sizes):
    spec = actor_critics.spec_of((84, 84))
    network, parts = actor_critics.make_network(spec, sizes), actor_critics.stream(spec)
    captured, plain = (actor_critics.policy_of(spec, sizes, network, captures=of_gpu) for of_gpu in (True, False))
    found, expected = (actor_critics.act(one, sizes, parts, actor_critics.first_state()) for one in (captured, plain))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert np.array_equal(found[2], expected[2]) and len(captures) == spec.stacked_frames


@pytest.mark.parametrize("shape", [(84, 84), (96, 96, 3), (3,)])
def test_a_call_waits_for_nothing_and_needs_nothing_of_the_host(monkeypatch, shape):
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(policy, "check_tensors", lambda make, tensors: None)  # it looks at values
    meta, spec = torch.device("meta"), spec_of(shape)
    acting = policy_of(spec, make_network(spec, CONFIG).to(meta).state_dict(), meta, dtype=torch.float32)
    stack = acting.frame_stack(NUM_ENVS)
    frames = torch.zeros(NUM_ENVS, *shape, dtype=getattr(torch, spec.frame_dtype), device=meta)
    with OnDevice(), torch.no_grad():
        stack.advance()
        stack.write(frames, torch.zeros(NUM_ENVS, dtype=torch.bool, device=meta))
        assert acting.values_of(stack).shape == (NUM_ENVS, spec.num_actions)
