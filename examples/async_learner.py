"""An asynchronous learner: actors that are some updates behind, a learner that counts how many, and a bound on them.

    .venv/bin/python examples/async_learner.py

A server, two actors and a learner in one program. They share nothing but the service and the newest policy, so each
could be a program on a host of its own. The task has 4 contexts, 3 actions, and no time: each step is a bandit.

The queue hands out each unroll once. Its limiter lets actors be ahead by two batches, so nothing gets old; the learner
corrects for the rest, and leaves out unrolls that are older than MAX_LAG updates.
"""

import collections
import itertools
import threading

import numpy as np

from apexrl.config.sections import ReplayConfig
from apexrl.net import InsertClient, ReplayClient
from apexrl.net.replay_server import ReplayServer
from apexrl.types import Field, StreamSpec, Unroll, UnrollHeader
from apexrl.unroll import UnrollCodec

CHANCES = np.array([[0.9, 0.2, 0.1], [0.3, 0.8, 0.1], [0.1, 0.3, 0.7], [0.6, 0.1, 0.2]])  # of a reward of 1
STEPS, BATCH, UPDATES, MAX_LAG, ACTORS, STEP_SIZE = 16, 8, 300, 10, 2, 1.0
TABLES = ("queue=fifo",)
SPEC = StreamSpec(
    "bandits", frame_shape=(), frame_dtype="uint8", stacked_frames=1, num_actions=CHANCES.shape[1], frames_per_step=1,
    unroll_starts=STEPS, overlap_steps=0, extras=(Field("probability", "step", "float32"),),
)  # fmt: skip


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Returns probabilities [N, actions]."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


class Newest:
    """The newest policy: its version, and its logits [contexts, actions], which nobody changes in place."""

    def __init__(self) -> None:
        self.policy = (0, np.zeros(CHANCES.shape))


def act(endpoint: str, seed: int, newest: Newest, ended: threading.Event) -> None:
    """Plays and inserts until the end. Each unroll tells the version that chose its first action."""
    client = InsertClient(endpoint, f"actor-{seed}", SPEC, num_streams=1)
    client.connect(timeout_seconds=10)
    rng, codec, everywhere = np.random.default_rng(seed), UnrollCodec(SPEC), np.ones(STEPS, bool)
    for number in itertools.count():
        version, logits = newest.policy
        contexts = rng.integers(len(CHANCES), size=STEPS + 1)
        chosen = probabilities(logits[contexts[:-1]])
        actions = (chosen.cumsum(axis=1) > rng.random((STEPS, 1))).argmax(axis=1)
        rewards = rng.random(STEPS) < CHANCES[contexts[:-1], actions]
        of_actions = chosen[range(STEPS), actions].astype(np.float32)
        unroll = Unroll(
            contexts, actions, rewards, np.zeros(STEPS), np.ones(STEPS + 1, bool), {"probability": of_actions}
        )
        header = UnrollHeader(0, number * STEPS, version, 0.0, everywhere, everywhere.astype(np.float32), episodes=())
        if not client.insert(header, codec.encode(unroll), timeout_seconds=60, stopped=ended.is_set):
            break
    client.close()


def learn(endpoint: str, newest: Newest) -> tuple[list[float], collections.Counter[int]]:
    """Returns the mean reward of each batch, and the number of unrolls by their lag in updates."""
    client = ReplayClient(endpoint, "learner", batch_sizes={"queue": BATCH}, prefetch_batches=1)
    values, rewards_seen, lags = np.zeros(len(CHANCES)), [], collections.Counter[int]()
    for version in range(UPDATES):
        unrolls = client.sample_unrolls("queue", timeout_seconds=10).unrolls.values()
        lags.update(version - stored.header.params_version for stored in unrolls)
        taken = [stored.unroll for stored in unrolls if version - stored.header.params_version <= MAX_LAG]
        contexts = np.concatenate([unroll.frames[:-1] for unroll in taken])
        actions, rewards = (np.concatenate([getattr(u, name) for u in taken]) for name in ("actions", "rewards"))
        logits = newest.policy[1].copy()
        now = probabilities(logits[contexts])
        then = np.concatenate([unroll.extras["probability"] for unroll in taken])
        ratios = np.minimum(now[range(len(now)), actions] / then, 1.0)  # V-trace's, of one step
        advantages = ratios * (rewards - values[contexts])
        np.add.at(values, contexts, 2 * STEP_SIZE * advantages / len(contexts))
        steps = advantages[:, None] * (np.eye(CHANCES.shape[1])[actions] - now)
        np.add.at(logits, contexts, len(CHANCES) * STEP_SIZE * steps / len(contexts))
        newest.policy = version + 1, logits
        rewards_seen.append(float(rewards.mean()))
    client.close()
    return rewards_seen, lags


if __name__ == "__main__":
    best = CHANCES.max(axis=1).mean()
    newest, ended = Newest(), threading.Event()
    with ReplayServer(ReplayConfig(tables=TABLES, capacity=100_000)) as server:
        actors = [
            threading.Thread(target=act, args=(server.actor_endpoint, seed, newest, ended)) for seed in range(ACTORS)
        ]
        for actor in actors:
            actor.start()
        try:
            rewards, lags = learn(server.learner_endpoint, newest)
        finally:
            ended.set()
            for actor in actors:
                actor.join()
    print(f"reward {np.mean(rewards[:10]):.3f} at first, {np.mean(rewards[-50:]):.3f} at last; {best:.3f} is the best")
    for lag, count in sorted(lags.items()):
        print(f"lag {lag}: {count} unrolls")
