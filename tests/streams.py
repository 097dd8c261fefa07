"""Streams written by hand, and a slow reader of them: the oracle of unrolls, windows and the frame store."""

from typing import NamedTuple

import numpy as np
import torch

from apexrl.environments.vector import take_step
from apexrl.types import StreamSpec, StreamUnrolls, TimeSteps
from apexrl.unroll import UnrollBuilder


class Step(NamedTuple):
    """One step of one stream as the environment gave it, kept for comparison."""

    observation: np.ndarray  # [H, *frame] that was acted on
    action: int
    reward: float
    terminated: bool
    ends: bool  # the last step of its episode
    is_reset: bool
    next_observation: np.ndarray


def record(
    envs, num_envs: int, num_steps: int, spec: StreamSpec, seed: int
) -> tuple[list[list[Step]], list[StreamUnrolls]]:
    """Plays random actions; returns the steps of each stream and the unrolls (all streams side by side)."""
    rng = np.random.default_rng(seed)
    frames = envs.reset(seed=seed)
    builder = UnrollBuilder(spec, frames)
    observations = np.zeros((num_envs, *spec.observation_shape), spec.frame_dtype)
    observations[:, -1] = frames
    streams: list[list[Step]] = [[] for _ in range(num_envs)]
    unrolls = []
    for _ in range(num_steps):
        complete = builder.observe({"value": observations.reshape(num_envs, -1)[:, 0].astype(np.float32)})
        if complete is not None:
            unrolls.append(complete[0])
        actions = rng.integers(0, spec.num_actions, num_envs)
        seen = take_step(envs, actions)
        builder.add(actions, seen)
        following = slow_stack(observations, seen)
        for e in range(num_envs):
            streams[e].append(
                Step(
                    observations[e],
                    int(actions[e]),
                    float(seen.rewards[e]),
                    bool(seen.discounts[e] == 0),
                    bool(seen.episode_steps[e] > 0),
                    bool(seen.starts[e]),
                    following[e],
                )
            )
        observations = following
    return streams, unrolls


def slow_stack(observations: np.ndarray, step: TimeSteps) -> np.ndarray:
    """Returns the observations [E, H, *frame] after a step, from those before it."""
    following = np.zeros_like(observations)
    for e, frame in enumerate(step.frames):
        if not step.starts[e]:
            following[e, :-1] = observations[e, 1:]
        following[e, -1] = frame
    return following


def slow_screens(stacks: torch.Tensor) -> np.ndarray:
    """Returns stacks [.., h, w] of the frames that the store gathered, also of those in blocks [.., h/4, w/4, 16]."""
    if stacks.dim() != 5:
        return stacks.numpy()
    batch, stacked, height, width, _ = stacks.shape
    screens = np.zeros((batch, stacked, 4 * height, 4 * width), np.uint8)
    for y in range(4):
        for x in range(4):
            screens[:, :, y::4, x::4] = stacks[..., 4 * y + x]
    return screens


def slow_transition(stream: list[Step], start: int, gamma: float, n: int) -> tuple[float, float, np.ndarray]:
    """Returns the n-step return, the bootstrap discount and the observation that a window from `start` ends at."""
    total, discount = 0.0, 1.0
    for step in stream[start : start + n]:
        total += discount * step.reward
        discount *= gamma
        if step.terminated:
            return total, 0.0, step.next_observation
        if step.ends:
            break
    return total, discount, step.next_observation
