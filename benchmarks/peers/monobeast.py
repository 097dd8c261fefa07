"""MonoBeast's design while it learns, written from its description (arXiv:1910.03552): none of its code is copied.

* Each actor process has one environment, and computes its own actions with a network in shared memory.
* Rollouts lie in shared memory. A queue of free indices and one of full indices are all that processes send each other.
* Two learner threads in turn stack a batch of full rollouts, free them, update, and copy the network to the actors.

The update is the plain one of `plain_vtrace`, in batches of 8 rollouts. Its numbers are those known of MonoBeast: the
sum of the losses, RMSProp with 4.8e-4 and epsilon 0.01, entropy cost 0.0006, at least two rollouts for each actor, one
thread in each process. The network is the small one of our preset `two-cores`. The environment is Gymnasium's, with
DQN's screens, as ours are; rewards are clipped.
"""

import contextlib
import json
import os
import queue
import threading
import time
from typing import NamedTuple

import ale_py
import gymnasium
import numpy as np
import psutil
import torch
import torch.multiprocessing as mp

from apexrl.agents.impala_config import ImpalaUpdate
from apexrl.networks.config import ActorCriticConfig
from benchmarks.peers.gymnasium_vector import make
from benchmarks.peers.measuring import parse_arguments
from benchmarks.peers.plain_vtrace import PlainLearner, PlainNetwork, Rollouts

NETWORK = ActorCriticConfig("shallow", (16, 32, 32), 256)
UPDATE = ImpalaUpdate(batch_size=8, learning_rate=4.8e-4, entropy_cost=6e-4)
GAMMA = 0.99
FRAMES_PER_STEP = 4
LEARNER_THREADS = 2
SETTLE_SECONDS = 10.0  # seconds of learning before the measurement
LOOK_SECONDS = 1.0  # between looks whether to end


class Buffers(NamedTuple):
    """N rollouts of T steps in shared memory; `Rollouts` describes the fields."""

    frames: torch.Tensor  # [N, T + 1, 4, 84, 84]
    actions: torch.Tensor  # [N, T]
    rewards: torch.Tensor
    discounts: torch.Tensor
    behavior_logits: torch.Tensor  # [N, T, A]


def make_buffers(num_rollouts: int, num_steps: int, num_actions: int) -> Buffers:
    """Returns zeros."""
    shape = num_rollouts, num_steps
    buffers = Buffers(
        torch.zeros(num_rollouts, num_steps + 1, 4, 84, 84, dtype=torch.uint8),
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(shape),
        torch.zeros(shape),
        torch.zeros(*shape, num_actions),
    )
    for tensor in buffers:
        tensor.share_memory_()
    return buffers


@torch.no_grad()
def act(game: str, seed: int, network: PlainNetwork, buffers: Buffers, free: mp.Queue, full: mp.Queue) -> None:
    """Plays one game into free rollouts, until the process that started this one has ended."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    parent = os.getppid()
    env = make(game)
    observation, _ = env.reset(seed=seed)
    while os.getppid() == parent:
        with contextlib.suppress(queue.Empty):
            index = free.get(timeout=LOOK_SECONDS)
            observation = _play(env, observation, network, Buffers(*(tensor[index] for tensor in buffers)))
            full.put(index)


def _play(env: gymnasium.Env, observation: np.ndarray, network: PlainNetwork, rollout: Buffers) -> np.ndarray:
    """Fills a rollout, whose tensors lack the axis N; returns the observation after its last step."""
    for t in range(len(rollout.actions)):
        rollout.frames[t] = torch.from_numpy(observation)
        logits, _ = network(rollout.frames[t : t + 1])
        action = torch.multinomial(logits.softmax(dim=1), 1)
        observation, reward, terminated, truncated, _ = env.step(action.item())
        ended = terminated or truncated
        if ended:
            observation, _ = env.reset()
        rollout.actions[t], rollout.rewards[t] = action.item(), np.sign(reward)
        rollout.discounts[t], rollout.behavior_logits[t] = 0.0 if ended else 1.0, logits[0]
    rollout.frames[-1] = torch.from_numpy(observation)
    return observation


class Learners:
    """The threads that learn in turn, and the times at which their updates were complete."""

    def __init__(self, shared: PlainNetwork, buffers: Buffers, free: mp.Queue, full: mp.Queue):
        self.update_times: list[float] = []
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self._shared = shared
        self._buffers, self._free, self._full = buffers, free, full
        network = PlainNetwork(NETWORK, buffers.behavior_logits.shape[-1])
        network.load_state_dict(shared.state_dict())
        self._learner = PlainLearner(network, UPDATE, GAMMA)
        self._batching, self._learning = threading.Lock(), threading.Lock()

    def run(self) -> None:
        """Learns until stopped; keeps the error that ends it."""
        try:
            while not self.stop.is_set():
                with self._batching:
                    batch = self._next_batch()
                if batch is None:
                    continue
                with self._learning:
                    self._learner.step(batch)
                    self._shared.load_state_dict(self._learner.network.state_dict())
                    self.update_times.append(time.perf_counter())
        except BaseException as error:
            self.error = error
            raise

    def _next_batch(self) -> Rollouts | None:
        """Returns a batch of full rollouts; None when stopped."""
        indices: list[int] = []
        while len(indices) < UPDATE.batch_size:
            if self.stop.is_set():
                return None
            with contextlib.suppress(queue.Empty):
                indices.append(self._full.get(timeout=LOOK_SECONDS))
        stacked = (torch.stack([tensor[index] for index in indices], dim=1) for tensor in self._buffers)
        batch = Rollouts(*stacked, torch.ones(UPDATE.batch_size, dtype=torch.bool))
        for index in indices:
            self._free.put(index)
        return batch


def measure(learners: Learners, seconds: float) -> tuple[int, float]:
    """Returns the updates in so many seconds that begin after some time of learning, and the time that they took."""
    while True:
        time.sleep(LOOK_SECONDS)
        if learners.error is not None:
            raise RuntimeError("a learner thread ended") from learners.error
        times = list(learners.update_times)
        settled = [at for at in times if at >= times[0] + SETTLE_SECONDS]
        if settled and settled[-1] - settled[0] >= seconds:
            return len(settled) - 1, settled[-1] - settled[0]


def main() -> None:
    """Learns and prints the counts. `--envs` is the number of actors."""
    arguments = parse_arguments(__doc__, unroll=("80", "20"))
    num_actors, num_steps = arguments.envs, int(arguments.unroll)
    torch.set_num_threads(1)
    gymnasium.register_envs(ale_py)
    env = make(arguments.game)
    num_actions = int(env.action_space.n)
    env.close()
    context = mp.get_context("fork")
    num_rollouts = max(2 * num_actors, 2 * UPDATE.batch_size)
    buffers, free, full = make_buffers(num_rollouts, num_steps, num_actions), context.Queue(), context.Queue()
    shared = PlainNetwork(NETWORK, num_actions)
    shared.share_memory()
    for seed in range(num_actors):  # before any thread is there
        context.Process(target=act, args=(arguments.game, seed, shared, buffers, free, full), daemon=True).start()
    for index in range(num_rollouts):
        free.put(index)
    learners = Learners(shared, buffers, free, full)
    threads = [threading.Thread(target=learners.run) for _ in range(LEARNER_THREADS)]
    for thread in threads:
        thread.start()
    try:
        updates, wall_seconds = measure(learners, arguments.seconds)
    finally:
        learners.stop.set()
        for thread in threads:
            thread.join()
    here = psutil.Process()
    samples = updates * UPDATE.batch_size * num_steps
    found = {
        "wall_seconds": wall_seconds,
        "frames": FRAMES_PER_STEP * samples,
        "updates": updates,
        "samples": samples,
        "transitions_held": num_rollouts * num_steps,
        "memory_bytes": sum(process.memory_info().rss for process in [here, *here.children()]),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
