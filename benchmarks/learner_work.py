"""One measuring process of `benchmarks.learner`: `python -m benchmarks.learner_work --kind ours --batch-size 512 ...`.

It fills an unroll store with a played game, draws prioritized batches from it as the replay server would, and counts
steps of one kind. A step gathers a batch from the store, updates, and brings |TD| back to the host. It prints one line
of JSON.
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

from apexrl.agents.apex_dqn import ApexLearner
from apexrl.agents.contract import TransitionBatch, Transitions, Want
from apexrl.agents.optimizers import make_optimizer
from apexrl.config import LearnerCommand, ReplayConfig, TableConfig
from apexrl.flags import default_command, with_preset, with_sections
from apexrl.learning.draw import Draw, Gathered
from apexrl.learning.unroll_store import UnrollStore
from apexrl.learning.updater import Updater
from apexrl.lifecycle import keep_freed_memory
from apexrl.losses.value_learning import double_q_errors, huber
from apexrl.networks.device_stream import Arrivals, DeviceStream
from apexrl.networks.dueling import make_network
from apexrl.replay.table import make_table
from apexrl.types import Sample, StreamSpec, Unroll
from benchmarks.replay_work import spec_of, unrolls_of

TABLE = "transitions"
PONG_ACTIONS = 6
NUM_BATCHES = 64  # drawn before the clock starts, because sampling is the replay server's work
WARM_UP_STEPS, WARM_UP_SECONDS = 3, 0.5


@dataclasses.dataclass(frozen=True)
class Setting:
    """The measurement of one process."""

    kind: str = "ours"
    """ours: learner.py's step; ours-eager: without a captured graph; eager: plain float32 step; gather: no update."""
    preset: str = "two-cores"
    batch_size: int = 64
    threads: int = 1
    device: str = "cpu"


def main(setting: Setting, frames: Path, transitions: int, seconds: float) -> None:
    """Prints the number of steps and the time that they took."""
    torch.set_num_threads(setting.threads)
    if setting.kind != "eager":
        keep_freed_memory()
    spec = msgspec.structs.replace(spec_of(frames.stem), num_actions=PONG_ACTIONS)
    device_stream = DeviceStream(torch.device(setting.device))
    preset = "paper" if setting.kind == "gather" else setting.preset  # which has no network
    command = with_preset(default_command(LearnerCommand, "apex-dqn"), preset)
    command = with_sections(command, {"update": {"batch_size": setting.batch_size}})
    store = filled_store(command, spec, unrolls_of(frames), transitions, device_stream)
    samples = draw(store, setting.batch_size)
    print(json.dumps(timed(make_step(setting, command, store, device_stream), samples, seconds, setting.device)))


def filled_store(
    command: LearnerCommand, spec: StreamSpec, unrolls: list[Unroll], transitions: int, device_stream: DeviceStream
) -> UnrollStore:
    """Returns a store that holds so many transitions. It applies the unrolls repeatedly when they are too few."""
    count = -(-transitions // spec.unroll_starts)
    num_batches = command.learning.prefetch_batches + 2
    want = Want(TABLE, command.update.batch_size, Transitions(spec.overlap_steps, command.algorithm.gamma))
    store = UnrollStore(spec, count, [want], device_stream.device, num_batches, device_stream)
    for number in range(count):
        store.commit(store.begin(number), unrolls[number % len(unrolls)])
    return store


def draw(store: UnrollStore, batch_size: int) -> list[Sample]:
    """Returns batches from a priority table over the whole store, with exponential priorities, like those of |TD|."""
    config = ReplayConfig()
    exponents = (config.priority_exponent, config.importance_exponent)
    table = make_table(TableConfig("priority", 0.0, 1), store.ring_unrolls, store.spec, exponents, seed=0)
    shape = (store.ring_unrolls, store.spec.unroll_starts)
    table.insert(0, np.random.default_rng(0).exponential(size=shape).astype(np.float32), np.ones(shape, bool))
    return [table.sample(batch_size) for _ in range(NUM_BATCHES)]


def make_step(
    setting: Setting, command: LearnerCommand, store: UnrollStore, device_stream: DeviceStream
) -> Callable[[Sample], object]:
    """Returns the function that takes one step with a batch."""

    def gather(sample: Sample) -> Gathered:
        return store.gather(TABLE, sample.keys, sample.weights)

    if setting.kind == "gather":
        return in_turn(device_stream, gather)
    if setting.kind == "eager":
        with device_stream.exclusive():
            eager = EagerLearner(command, store.spec, device_stream.device)
        return in_turn(device_stream, lambda sample: eager.update(gather(sample).batch))
    sections = command.algorithm, command.network, command.update
    updater = Updater(ApexLearner(*sections, store.spec, device_stream.device), device_stream)
    if setting.kind == "ours-eager":  # the kernels of the graph, launched one after the other
        return in_turn(device_stream, lambda sample: updater._step({TABLE: gather(sample).batch}).cpu())
    arrivals = Arrivals()
    draws: list[Draw] = []

    def step(sample: Sample) -> None:
        """Takes a step as `learning.LearnerLoop` does, with as many updates in flight, and a draw ahead."""
        named_or_gathered = store.sample(TABLE, sample.keys, sample.weights)
        assert named_or_gathered is not None, "the store holds all that was drawn"
        draws.append(Draw(store.generation, {TABLE: named_or_gathered}))
        if len(draws) < 2:
            return
        pending = updater.update(draws.pop(0), draws[0])
        assert pending is not None, "the store holds all that was drawn"
        arrivals.expect(pending.event, pending.result)
        arrivals.collect(device_stream.depth)

    return step


def in_turn(device_stream: DeviceStream, step: Callable[[Sample], object]) -> Callable[[Sample], object]:
    """Wraps a step so that it holds the device stream, on which the frames were written."""

    def stepping(sample: Sample) -> None:
        with device_stream.exclusive():
            step(sample)

    return stepping


class EagerLearner:
    """The plain float32 step: the same network, loss and optimizer, with fresh memory for every tensor."""

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
    """Takes steps for so many seconds after a warm-up. The clock stops when the device has finished them."""

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
