"""One measuring process of `benchmarks.learner`: `python -m benchmarks.learner_work --kind ours --batch-size 512 ...`.

It fills an unroll store with a played game, draws batches from it as the replay server would, and counts steps of one
kind. A step gathers a batch from the store, updates, and brings the result back to the host. It prints one line of
JSON.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor

from apexrl.agents.contract import Transitions, Want
from apexrl.agents.families import family_of, implementation
from apexrl.config.commands import LearnerCommand
from apexrl.config.flags import default_command, wants_of, with_preset, with_sections
from apexrl.config.sections import ReplayConfig
from apexrl.config.tables import TableConfig
from apexrl.learning.experience.draw import Draw
from apexrl.learning.experience.unroll_store import UnrollStore
from apexrl.learning.updates.updater import Updater
from apexrl.networks.device import prepare_for_updates
from apexrl.networks.device_stream import Arrivals, DeviceStream
from apexrl.replay.kinds import make_table
from apexrl.types import EnvironmentSpec, Sample, StreamSpec, Unroll
from benchmarks.learner_plain import EagerLearner, PlainActorCritic
from benchmarks.replay_work import unrolls_of

PONG = EnvironmentSpec("Pong", (84, 84), "uint8", stacked_frames=4, num_actions=6, frames_per_step=4)
NO_PRESET = "-"  # of steps without a network of ours
ADDITIONS: dict[str, dict[str, dict[str, Any]]] = {  # what the end of a preset's name adds to it
    "-nature": {"network": {"channels": (32, 64, 64), "hidden_size": 512}},
    "-quantiles": {"network": {"quantiles": 32}},
    "-munchausen": {"update": {"munchausen": 0.9}},
}
NUM_DRAWS = 64  # drawn before the clock starts, because sampling is the replay server's work
WARM_UP_STEPS, WARM_UP_SECONDS = 3, 0.5

Samples = Mapping[str, Sample]  # by table


@dataclasses.dataclass(frozen=True)
class Setting:
    """The measurement of one process."""

    kind: str = "ours"
    """ours: learner.py's step; ours-eager: without a captured graph; eager: plain float32 step; gather: no update."""
    preset: str = "two-cores"
    """A preset of the agent, or one with an addition, as two-cores-nature: with a network of the size of Nature's."""
    batch_size: int = 64
    """Transitions in a batch; with impala unrolls."""
    threads: int = 1
    device: str = "cpu"
    agent: str = "apex-dqn"
    mix: str = ""
    """impala's --mix in one word, as in 'queue=1/8 uniform=7/8'; empty: the agent has none."""

    def command(self) -> LearnerCommand:
        """Returns the learner's command."""
        addition = next((end for end in ADDITIONS if self.preset.endswith(end)), "")
        preset = "paper" if self.preset == NO_PRESET else self.preset.removesuffix(addition)
        command = with_preset(default_command(LearnerCommand, self.agent), preset)
        update: dict[str, Any] = {"batch_size": self.batch_size}
        if self.mix:
            update["mix"] = tuple(self.mix.split())
        return with_sections(with_sections(command, {"update": update}), ADDITIONS.get(addition, {}))

    def samples(self) -> int:
        """Returns the transitions of a step."""
        if self.kind == "sb3":
            return self.batch_size
        command = self.command()
        return sum(want.num_transitions(stream_of(command)) for want in wants_of(command))


def stream_of(command: LearnerCommand) -> StreamSpec:
    """Returns the stream of Pong."""
    return family_of(command.agent).stream(command.algorithm, PONG)


def main(setting: Setting, frames: Path, transitions: int, seconds: float) -> None:
    """Prints the number of steps and the time that they took."""
    if setting.kind == "eager":
        torch.set_num_threads(setting.threads)
    else:
        prepare_for_updates(setting.threads)
    device_stream = DeviceStream(torch.device(setting.device))
    command = setting.command()
    store, unrolls = filled_store(command, frames, transitions, device_stream)
    draws = draws_from(store, wants_of(command))
    print(json.dumps(timed(make_step(setting, store, unrolls, device_stream), draws, seconds, setting.device)))


def filled_store(
    command: LearnerCommand, frames: Path, transitions: int, device_stream: DeviceStream
) -> tuple[UnrollStore, list[Unroll]]:
    """Returns a store that holds so many transitions, and its unrolls; they repeat when they are too few."""
    spec = stream_of(command)
    played = [unroll._replace(extras=extras_of(spec)) for unroll in unrolls_of(frames, spec)]
    count = -(-transitions // spec.unroll_starts)
    unrolls = [played[number % len(played)] for number in range(count)]
    num_batches = command.learning.prefetch_batches + 2
    store = UnrollStore(spec, count, wants_of(command), device_stream.device, num_batches, device_stream)
    for number, unroll in enumerate(unrolls):
        store.commit(store.begin(number), unroll)
    return store, unrolls


def extras_of(spec: StreamSpec) -> dict[str, np.ndarray]:
    """Returns the extras of an unroll that a uniformly random policy has played: its log-probabilities, else zeros."""
    extras = {field.name: np.zeros((spec.num_entries(field), *field.shape), field.dtype) for field in spec.extras}
    if "behavior_log_probs" in extras:
        extras["behavior_log_probs"][:] = -np.log(spec.num_actions)
    return extras


def draws_from(store: UnrollStore, wants: tuple[Want, ...]) -> list[Samples]:
    """Returns draws from the whole store: transitions by exponential priorities, like those of |TD|; unrolls uniformly.

    A new unroll costs as much as another one, so a queue's are drawn uniformly, too.
    """
    config = ReplayConfig()
    exponents = (config.priority_exponent, config.importance_exponent)
    shape = (store.ring_unrolls, store.spec.unroll_starts)
    samples = {}
    for seed, want in enumerate(wants):
        kind = "priority" if isinstance(want.view, Transitions) else "uniform"
        table = make_table(TableConfig(kind, 0.0, 1), store.ring_unrolls, store.spec, exponents, seed)
        table.insert(0, np.random.default_rng(0).exponential(size=shape).astype(np.float32), np.ones(shape, bool))
        samples[want.table] = [table.sample(want.batch_size) for _ in range(NUM_DRAWS)]
    return [dict(zip(samples, drawn, strict=True)) for drawn in zip(*samples.values(), strict=True)]


def make_step(
    setting: Setting, store: UnrollStore, unrolls: list[Unroll], device_stream: DeviceStream
) -> Callable[[Samples], object]:
    """Returns the function that takes one step with a draw."""
    command, device = setting.command(), device_stream.device

    def gather(samples: Samples) -> Draw:
        gathered = {table: store.gather(table, sample.keys, sample.weights) for table, sample in samples.items()}
        return Draw(store.generation, gathered)

    if setting.kind == "gather":
        return in_turn(device_stream, gather)
    if setting.kind == "eager":
        with device_stream.exclusive():
            if setting.agent == "impala":
                return in_turn(device_stream, PlainActorCritic(command, store.spec, unrolls, device).update)
            eager = EagerLearner(command, store.spec, device)
        return in_turn(device_stream, lambda samples: eager.update(*gather(samples).batches().values()))
    sections = command.algorithm, command.network, command.update
    with device_stream.exclusive():
        learner = implementation(family_of(command.agent)).make_learner(*sections, store.spec, device)
    updater = Updater(learner, device_stream)
    if setting.kind == "ours-eager":  # the kernels of the graph, launched one after the other
        return in_turn(device_stream, lambda samples: whole(updater, gather(samples)).cpu())
    arrivals = Arrivals()
    draws: list[Draw] = []

    def step(samples: Samples) -> None:
        """Takes a step as `learning.LearnerLoop` does, with as many updates in flight, and a draw ahead."""
        found = {}
        for table, sample in samples.items():
            found[table] = store.sample(table, sample.keys, sample.weights)
            assert found[table] is not None, "the store holds all that was drawn"
        draws.append(Draw(store.generation, found))
        if len(draws) < 2:
            return
        pending = updater.update(draws.pop(0), draws[0])
        assert pending is not None, "the store holds all that was drawn"
        arrivals.expect(pending.event, pending.result)
        arrivals.collect(device_stream.depth)

    return step


def whole(updater: Updater, draw: Draw) -> Tensor:
    """Returns the results of an update that no graph holds."""
    return updater._work.run(draw.batches())


def in_turn(device_stream: DeviceStream, step: Callable[[Samples], object]) -> Callable[[Samples], object]:
    """Wraps a step so that it holds the device stream, on which the frames were written."""

    def stepping(samples: Samples) -> None:
        with device_stream.exclusive():
            step(samples)

    return stepping


def timed(step: Callable[[Samples], object], draws: list[Samples], seconds: float, device: str) -> dict[str, float]:
    """Takes steps for so many seconds after a warm-up. The clock stops when the device has finished them."""

    def run(least_steps: int, duration: float) -> int:
        count, started = 0, time.perf_counter()
        while count < least_steps or time.perf_counter() - started < duration:
            step(draws[count % len(draws)])
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
