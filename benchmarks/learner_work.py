"""One process's part of `benchmarks.learner`: `python -m benchmarks.learner_work --kind ours --batch-size 512 ...`.

Fills a frame store with a played game, draws prioritized batches from it as the replay server would, and counts steps
of one kind: gathered from the store, updated, |TD| back on the host. Prints one line of JSON.
"""

import copy
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
import tyro

from apexrl.agents import apex_dqn
from apexrl.agents.optimizers import make_optimizer
from apexrl.config import PRESETS, LearnerCommand, ReplayConfig, TableConfig
from apexrl.flags import with_defaults
from apexrl.learning.unroll_store import Batch, FrameStore, TransitionBatch
from apexrl.lifecycle import keep_freed_memory
from apexrl.losses.value_learning import double_q_errors, huber
from apexrl.networks.device_stream import Arrivals, Lane
from apexrl.networks.dueling import make_network
from apexrl.replay.table import make_table
from apexrl.types import Sample, StreamSpec, Unroll
from benchmarks.replay_work import spec_of, unrolls_of

PONG_ACTIONS = 6
NUM_BATCHES = 64  # drawn before the clock starts: sampling is the replay server's work
WARM_UP_STEPS, WARM_UP_SECONDS = 3, 0.5


@dataclasses.dataclass(frozen=True)
class Setting:
    """What one process measures."""

    kind: str = "ours"
    """ours: what learner.py does; ours-eager: without a captured graph; eager: the plain float32 step; gather: none."""
    preset: str = "two-cores"
    batch_size: int = 64
    threads: int = 1
    device: str = "cpu"


def main(setting: Setting, frames: Path, transitions: int, seconds: float) -> None:
    """Prints how many steps were made, and in which time."""
    torch.set_num_threads(setting.threads)
    if setting.kind != "eager":
        keep_freed_memory()
    spec = msgspec.structs.replace(spec_of(frames.stem), num_actions=PONG_ACTIONS)
    lane = Lane(torch.device(setting.device))
    store = filled_store(spec, unrolls_of(frames), transitions, lane)
    batches = draw(store, setting.batch_size)
    print(json.dumps(timed(make_step(setting, spec, store, lane), batches, seconds, setting.device)))


def filled_store(spec: StreamSpec, unrolls: list[Unroll], transitions: int, lane: Lane) -> FrameStore:
    """Returns a store that holds so many transitions; the unrolls are applied again and again if there are fewer."""
    command = LearnerCommand()
    count = -(-transitions // spec.unroll_starts)
    num_batches = command.learning.prefetch_batches + 2
    store = FrameStore(spec, count, command.agent.gamma, lane.device, num_batches, lane)
    for number in range(count):
        store.apply(number, unrolls[number % len(unrolls)])
    return store


def draw(store: FrameStore, batch_size: int) -> list[Sample]:
    """Returns batches from a priority table over all that the store holds, with priorities like those of |TD|."""
    config = ReplayConfig()
    starts = store.spec.unroll_starts
    exponents = (config.priority_exponent, config.importance_exponent)
    table = make_table(TableConfig("priority", 0.0, 1), store.ring_unrolls, starts, exponents, seed=0)
    priorities = np.random.default_rng(0).exponential(size=(store.ring_unrolls, starts)).astype(np.float32)
    table.insert(0, priorities)
    return [table.sample(batch_size) for _ in range(NUM_BATCHES)]


def make_step(setting: Setting, spec: StreamSpec, store: FrameStore, lane: Lane) -> Callable[[Sample], object]:
    """Returns what is done with each batch."""
    if setting.kind == "gather":
        return in_turn(lane, lambda sample: store.gather(sample.keys, sample.weights))
    command = with_defaults(LearnerCommand(), PRESETS[setting.preset] | {"batch_size": setting.batch_size})
    if setting.kind == "eager":
        with lane.turn():
            eager = EagerLearner(command, spec, lane.device)
        return in_turn(lane, lambda sample: eager.update(store.gather(sample.keys, sample.weights)))
    learner = apex_dqn.ApexLearner(command.agent, command.update, command.network, spec, lane.device, lane)
    if setting.kind == "ours-eager":  # what the graph repeats, one kernel after the other
        return in_turn(lane, lambda sample: learner._step(store.gather(sample.keys, sample.weights)).cpu())
    arrivals = Arrivals()
    batches: list[Batch] = []

    def step(sample: Sample) -> None:
        """As `learning.LearnerLoop` does it, with as many updates on the way, and a batch ahead."""
        batch = store.batch(sample.keys, sample.weights)
        assert batch is not None, "the store holds all that was drawn"
        batches.append(batch)
        if len(batches) < 2:
            return
        pending = learner.update(batches.pop(0), batches[0])
        assert pending is not None, "the store holds all that was drawn"
        arrivals.expect(pending.mark, pending.result)
        arrivals.collect(lane.depth)

    return step


def in_turn(lane: Lane, step: Callable[[Sample], object]) -> Callable[[Sample], object]:
    """Returns the step on the lane's stream, where the frames were written."""

    def stepping(sample: Sample) -> None:
        with lane.turn():
            step(sample)

    return stepping


class EagerLearner:
    """The plain float32 step: same network, loss and optimizer, fresh memory for every tensor."""

    def __init__(self, command: LearnerCommand, spec: StreamSpec, device: torch.device):
        self._config = command.update
        self._online = make_network(spec, command.network).to(device).to(memory_format=torch.channels_last)
        self._target = copy.deepcopy(self._online).requires_grad_(False)
        self._optimizer = make_optimizer(command.update, self._online)

    def update(self, batch: TransitionBatch) -> np.ndarray:
        """Takes one optimizer step; returns |TD|."""
        q_tm1 = self._online(batch.observation)
        with torch.no_grad():
            prepared = self._online.prepare(batch.next_observation)
            q_online_t, q_target_t = self._online.values(prepared), self._target.values(prepared)
        returns = (batch.n_step_return, batch.discount)
        errors = double_q_errors(q_tm1, batch.action, *returns, q_target_t, q_online_t, rescaling=False)
        loss = (batch.weight * huber(errors)).mean()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._online.parameters(), self._config.max_gradient_norm)
        self._optimizer.step()
        return errors.detach().abs().cpu().numpy()


def timed(step: Callable[[Sample], object], batches: list[Sample], seconds: float, device: str) -> dict[str, float]:
    """Takes steps for so many seconds after a warm-up; the device has finished them when the clock stops."""

    def run(least_steps: int, duration: float) -> int:
        count, started = 0, time.perf_counter()
        while count < least_steps or time.perf_counter() - started < duration:
            step(batches[count % len(batches)])
            count += 1
        if device != "cpu":
            torch.cuda.synchronize()
        return count

    run(WARM_UP_STEPS, WARM_UP_SECONDS)
    started, cpu_started = time.perf_counter(), time.process_time()
    steps = run(1, seconds)
    return {
        "steps": steps,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu_started,
    }


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.OmitArgPrefixes,))
