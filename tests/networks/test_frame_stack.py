import itertools

import numpy as np
import pytest
import torch

from apexrl.networks.frame_layout import FrameLayout
from apexrl.networks.frame_stack import FrameStack, frame_numbers
from apexrl.types import EnvironmentSpec

NUM_STEPS = 7
PATTERNS = np.array([(True, *resets) for resets in itertools.product((False, True), repeat=NUM_STEPS - 1)]).T
SHAPES = [(), (3,), (10, 7), (36, 40), (37, 40), (36, 36, 3)]


def slow_stacks(frames: np.ndarray, starts: np.ndarray, stacked: int) -> np.ndarray:
    """Returns stacks [T, E, H, *frame] of frames [T, E, *frame]: looks back from each, to where its episode began."""
    num_steps, num_envs = starts.shape
    stacks = np.zeros((num_steps, num_envs, stacked, *frames.shape[2:]), frames.dtype)
    for t, e, j in itertools.product(range(num_steps), range(num_envs), range(stacked)):
        if j <= t and not starts[t - j + 1 : t + 1, e].any():
            stacks[t, e, stacked - 1 - j] = frames[t - j, e]
    return stacks


def streams(shape, stacked):
    """Returns a layout, frames [T, E, *frame] of streams that begin episodes at all combinations of steps, stacks."""
    dtype = "uint8" if len(shape) > 1 else "float32"
    layout = FrameLayout.of(EnvironmentSpec("Shape-v0", shape, dtype, stacked, 6, 1))
    frames = np.random.default_rng(0).integers(1, 256, (*PATTERNS.shape, *shape)).astype(dtype)
    return layout, frames, slow_stacks(frames, PATTERNS, stacked)


def test_the_oracle_shows_one_frame_where_an_episode_begins():
    frames = np.arange(1, 6)[:, None]
    starts = np.array([True, False, False, True, False])[:, None]
    assert slow_stacks(frames, starts, 3)[:, 0].tolist() == [[0, 0, 1], [0, 1, 2], [1, 2, 3], [0, 0, 4], [0, 4, 5]]


@pytest.mark.parametrize("stacked", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_actors_ring_follows_the_rule(shape, stacked):
    layout, frames, expected = streams(shape, stacked)
    stack = FrameStack(layout, PATTERNS.shape[1], torch.float32, torch.device("cpu"))
    for t, starts in enumerate(PATTERNS):
        stack.advance()
        stack.write(torch.from_numpy(frames[t]), torch.from_numpy(starts))
        found = layout.in_order(stack.ring, stack.newest).to(layout.dtype)
        assert torch.equal(found, layout.store_stacks(torch.from_numpy(expected[t])))


@pytest.mark.parametrize("first", [0, 2, 5])  # step of the unroll's first observation
@pytest.mark.parametrize("stacked", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_learners_stacks_follow_the_rule(shape, stacked, first):
    layout, frames, expected = streams(shape, stacked)
    # Unrolls as their builder makes them: the first observation whole, then the newest frames.
    unrolls = np.concatenate([np.moveaxis(expected[first], 1, 0), frames[first + 1 :]])  # [F, E, *frame]
    memory, zero_frame = flat_memory(layout, np.moveaxis(unrolls, 1, 0))
    numbers = [
        frame_numbers(starts, stacked, number * len(unrolls), zero_frame)
        for number, starts in enumerate(PATTERNS[first:].T)
    ]
    found = layout.as_frames(memory[torch.from_numpy(np.stack(numbers, axis=1))])  # [T + 1, E, H, *stored]
    assert torch.equal(found.flatten(0, 1), layout.store_stacks(torch.from_numpy(expected[first:]).flatten(0, 1)))


def flat_memory(layout, frames):
    """Returns the memory [frames + 1, words] of frames [N, F, *frame] and the position of the frame of zeros."""
    stored = layout.store(torch.from_numpy(frames).flatten(0, 1))
    memory = stored.reshape(len(stored), -1).contiguous().view(torch.uint8)
    words = memory.view(torch.int32 if memory.shape[1] % 4 == 0 else torch.uint8)
    return torch.cat([words, torch.zeros_like(words[:1])]), len(words)
