"""A program of its own that learns with the replay service: tabular Q-learning of a walk along a corridor.

Start a server, then this program with the server's two ports:

    .venv/bin/python replay.py --min-size-to-sample 500 --samples-per-insert 0 --actor-port 51001 --batch-port 51002
    .venv/bin/python examples/own_learner.py 51001 51002

Places 0..6, from 3 on one step left (0) or right (1); the episode ends at 0 with nothing and at 6 with reward 1.
It walks at random, so it may look one step ahead only: a longer return would tell of what it did, not of what is best.
"""

import secrets
import sys

import numpy as np

from apexrl.losses.windows import n_step_windows, valid_starts
from apexrl.net import InsertClient, ReplayClient, StoredUnroll
from apexrl.types import StreamSpec, TimeSteps, UnrollHeader
from apexrl.unroll import UnrollBuilder, UnrollCodec

START, END, GAMMA = 3, 6, 0.9
SPEC = StreamSpec("Corridor", frame_shape=(), frame_dtype="uint8", stacked_frames=1, num_actions=2, frames_per_step=1,
                  unroll_starts=16, overlap_steps=1)  # fmt: skip


def play(endpoint: str, num_unrolls: int) -> None:
    """Walks at random, and inserts what happened."""
    client = InsertClient(endpoint, f"walker-{secrets.token_hex(4)}", SPEC, num_streams=1)
    client.connect(timeout_seconds=10)
    builder, codec, rng = UnrollBuilder(SPEC, np.array([[START]])), UnrollCodec(SPEC), np.random.default_rng(0)
    place, num_sent = START, 0
    while num_sent < num_unrolls:
        complete = builder.observe({})  # what an agent computed from the observation goes in here
        if complete is not None:  # every 16 steps
            unroll = complete[0].stream(0)  # the only one
            valid = valid_starts(unroll.starts, SPEC.unroll_starts)
            first_step = num_sent * SPEC.unroll_starts
            header = UnrollHeader(0, first_step, 0, 1.0, valid, valid.astype(np.float32), episodes=())
            client.insert(header, codec.encode(unroll), timeout_seconds=10)
            num_sent += 1
        action, resets = rng.integers(2), place in (0, END)  # the step after the last one of an episode is the reset
        place = START if resets else place + 2 * action - 1
        reward, discount = float(place == END), float(place not in (0, END))
        step = (np.array([[place]]), [reward], [discount], [resets], [np.nan], [0])
        builder.add(np.array([action]), TimeSteps(*map(np.array, step)))
    client.flush(timeout_seconds=10)
    client.close()


def learn(endpoint: str, num_batches: int) -> np.ndarray:
    """Returns action values [places, 2] learned from prioritized batches."""
    client = ReplayClient(endpoint, f"reader-{secrets.token_hex(4)}", batch_sizes={"transitions": 32})
    values, held = np.zeros((END + 1, 2)), dict[int, StoredUnroll]()
    for _ in range(num_batches):
        sample = client.sample("transitions", timeout_seconds=10)
        numbers, starts = np.divmod(sample.keys, SPEC.unroll_starts)
        held |= client.fetch(set(numbers.tolist()) - held.keys(), timeout_seconds=10)
        errors = np.zeros(len(numbers), np.float32)
        for i, (number, start) in enumerate(zip(numbers.tolist(), starts, strict=True)):
            if number not in held:  # the server has evicted it since it was drawn
                continue
            frames, actions, rewards, discounts, is_start, _ = held[number].unroll
            windows = n_step_windows(rewards, discounts, is_start, GAMMA, SPEC.overlap_steps)
            n_step_return, discount, offset = (array[start] for array in windows)
            bootstrap = values[frames[start + offset]].max()
            errors[i] = n_step_return + discount * bootstrap - values[frames[start], actions[start]]
            values[frames[start], actions[start]] += 0.5 * sample.weights[i] * errors[i]
        client.update_priorities("transitions", sample.keys, np.abs(errors) + 0.01)
    client.close()
    return values


if __name__ == "__main__":
    actor_port, batch_port = sys.argv[1:]
    play(f"tcp://127.0.0.1:{actor_port}", num_unrolls=100)
    for place, (left, right) in enumerate(learn(f"tcp://127.0.0.1:{batch_port}", num_batches=300)):
        print(f"{place} {left:.3f} {right:.3f}")
