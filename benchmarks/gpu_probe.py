"""Short measurements of one GPU, by part: `python -m benchmarks.gpu_probe PART --json FILE [--device cuda]`.

  smoke     a captured update and an actor's captured policy beside the same on the CPU: fails when they differ
  ceilings  bytes/s of a copy, operations/s of a product in bfloat16, seconds of a graph's smallest kernel
  profile   one update of each kind: its time on the wall, of the learner and on the device, its kernels by time, and
            the operations that start them, from an update without a graph
  cores     agent steps/s of environments alone, with one process and with more

A file is written after each figure, so that a limit loses only the rest. `--device cpu` tries the program.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apexrl.agents.contract import Learner, Observation
from apexrl.agents.families import family_of, implementation
from apexrl.config.commands import LearnerCommand
from apexrl.config.flags import default_command, wants_of, with_preset, with_sections
from apexrl.config.sections import EnvConfig
from apexrl.environments.vector import make_environment, take_step
from apexrl.files import write_json
from apexrl.learning.experience.draw import Draw, SampledKeys
from apexrl.learning.experience.unroll_store import UnrollStore
from apexrl.learning.updates.updater import Updater
from apexrl.networks.config import to_text
from apexrl.networks.device_stream import DeviceStream, wait
from apexrl.networks.headers import ParametersHeader
from apexrl.networks.parameters import Parameters
from apexrl.types import EnvironmentSpec, Unroll
from benchmarks.learner_work import PONG, draws_from, extras_of

RING, GPU_RING = 256, 4096  # unrolls in a store; the latter are 2.1 GB of Ape-X's screens, far more than a GPU's cache
GATHERS = 20
SMOKE_UPDATES, PROFILED_UPDATES, TIMED_UPDATES = 10, 30, 200
GRAPH_NODES = 200
MOST_KERNELS = 60
ENVIRONMENTS, CORE_SECONDS = 32, 3.0
TOLERANCE = 0.05  # bfloat16 and other sums make up to 2 %
CHEETAH = EnvironmentSpec("HalfCheetah-v5", (17,), "float32", 1, 0, 1, action_bounds=((-1.0, 1.0),) * 6)
PROFILED: dict[str, tuple[str, str, EnvironmentSpec, dict[str, Any]]] = {  # agent, preset, environment, other numbers
    "paper_rmsprop_512": ("apex-dqn", "paper", PONG, {"optimizer": "rmsprop", "batch_size": 512}),
    "paper_adam_512": ("apex-dqn", "paper", PONG, {"optimizer": "adam", "batch_size": 512}),
    "gpu_adam_64": ("apex-dqn", "gpu", PONG, {"optimizer": "adam", "batch_size": 64}),
    "impact": ("impact", "gpu", PONG, {}),
    "r2d2": ("r2d2", "gpu", PONG, {}),
    "sac": ("sac", "gpu", CHEETAH, {}),
    "apex_dpg": ("apex-dpg", "gpu", CHEETAH, {}),
}


class World:
    """A learner with a store of random unrolls, always from the same seed."""

    def __init__(self, device: torch.device, agent: str = "apex-dqn", preset: str = "paper",
                 environment: EnvironmentSpec = PONG, ring: int = RING, **update: Any):  # fmt: skip
        """Takes the numbers of the update that differ from the preset's."""
        command = with_preset(default_command(LearnerCommand, agent), preset)
        self.command = command = with_sections(command, {"update": update})
        self.spec = family_of(agent).stream(command.algorithm, environment)
        self.stream = DeviceStream(device)
        first = self._learner(torch.device("cpu")).acting_tensors()  # a GPU has random numbers of its own
        with self.stream.exclusive():
            self.learner = self._learner(device)
            for name, tensor in self.learner.acting_tensors().items():
                tensor.copy_(first[name])
            self.learner.copy_target()
        self.updater = Updater(self.learner, self.stream)
        wants = wants_of(command)
        self.table = wants[0].table
        self.store = UnrollStore(self.spec, ring, wants, device, 4, self.stream)
        rng = np.random.default_rng(0)
        unrolls = [self._unroll(rng) for _ in range(8)]
        for number in range(ring):
            self.store.commit(self.store.begin(number), unrolls[number % len(unrolls)])
        self._draws = itertools.cycle(draws_from(self.store, wants))

    def _learner(self, device: torch.device) -> Learner:
        torch.manual_seed(0)
        sections = self.command.algorithm, self.command.network, self.command.update
        return implementation(family_of(self.command.agent)).make_learner(*sections, self.spec, device)

    def _unroll(self, rng: np.random.Generator) -> Unroll:
        spec, steps = self.spec, self.spec.unroll_steps
        shape = (spec.unroll_frames, *spec.frame_shape)
        frames = rng.integers(0, 256, shape, np.uint8) if spec.frame_dtype == "uint8" else rng.random(shape, np.float32)
        actions = rng.integers(0, spec.num_actions, steps).astype(np.int32) if spec.num_actions else (
            rng.random((steps, len(spec.action_bounds)), np.float32)
        )  # fmt: skip
        rewards = np.zeros(steps, np.float32)  # so errors are those of the network's values alone
        starts = np.zeros(steps + 1, bool)
        return Unroll(frames, actions, rewards, np.ones(steps, np.float32), starts, extras_of(spec))

    def draw(self) -> Draw:
        """Returns the keys of the next of some draws."""
        store, generation = self.store, self.store.generation
        drawn = next(self._draws).items()
        return Draw(
            generation, {name: SampledKeys(store, name, generation, one.keys, one.weights) for name, one in drawn}
        )

    def priorities(self) -> np.ndarray:
        """Makes an update, and returns its priorities when they are there."""
        pending = self.updater.update(self.draw())
        assert pending is not None, "the store holds all keys"
        return pending.result()[0][self.table]

    def run(self, count: int) -> float:
        """Makes so many updates, four of them in flight; returns the seconds until the last is done."""
        started, events = time.perf_counter(), []
        for _ in range(count):
            pending = self.updater.update(self.draw())
            assert pending is not None, "the store holds all keys"
            events.append(pending.event)
            if len(events) > max(self.stream.depth, 1):
                wait(events.pop(0))
        for event in events:
            wait(event)
        return time.perf_counter() - started


def smoke(device: torch.device) -> Iterator[tuple[str, Any]]:
    """Yields figures of a first try.

    Raises: RuntimeError when the device's numbers are not those of the CPU.
    """
    here, there = World(torch.device("cpu"), batch_size=64), World(device, batch_size=64)
    started = time.perf_counter()
    first = _distance(there.priorities(), here.priorities())
    yield "first_update_seconds", time.perf_counter() - started
    yield "first_priorities_distance", first
    gradient = _distance(*(world.learner.gradient[:-1].cpu().numpy() for world in (there, here)))
    yield "first_gradient_distance", gradient
    yield "ten_updates_seconds", there.run(SMOKE_UPDATES)
    parameters = here.learner.acting_tensors()
    header = ParametersHeader(1, here.spec, here.command.agent, to_text(here.command.network))
    rng, values = np.random.default_rng(0), []
    frames = rng.integers(0, 256, (2 * here.spec.stacked_frames, 16, 84, 84), np.uint8)
    for where in (torch.device("cpu"), device):
        family = implementation(family_of(here.command.agent))
        actor = family.make_actor(here.command.algorithm, Parameters(header, parameters), where)
        state = actor.initial_state(16)
        for frame in frames:
            observation = Observation(frame, np.zeros(16, bool), np.zeros(16, np.float32))
            _, extras, state = actor.act(observation, np.zeros(16), state, rng)
        values.append(extras["q_max"])
    second = _distance(values[1], values[0])
    yield "actor_values_distance", second
    if not max(first, gradient, second) < TOLERANCE:
        raise RuntimeError(
            f"on {device} the errors of an update differ by {first:.3f} from the CPU's, "
            f"its gradient by {gradient:.3f}, an actor's values by {second:.3f}"
        )


def _distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def ceilings(device: torch.device) -> Iterator[tuple[str, float]]:
    """Yields the limits of the hardware that an update comes near to."""
    on_gpu = device.type == "cuda"
    source = torch.zeros(2**31 if on_gpu else 2**24, dtype=torch.uint8, device=device)
    place = torch.empty_like(source)
    yield "copy_bytes_per_second", 2 * source.nbytes / _seconds(device, lambda: place.copy_(source))
    size = 8192 if on_gpu else 256
    matrix = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    yield "bfloat16_operations_per_second", 2 * size**3 / _seconds(device, lambda: matrix @ matrix)
    numbers = torch.zeros(32, device=device)

    def nodes() -> None:
        for _ in range(GRAPH_NODES):
            numbers.add_(1)

    with DeviceStream(device).exclusive():
        yield "seconds_of_a_small_kernel_launched", _seconds(device, nodes) / GRAPH_NODES
    if on_gpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            nodes()
        yield "seconds_of_a_small_kernel_in_a_graph", _seconds(device, graph.replay) / GRAPH_NODES


def _seconds(device: torch.device, work: Callable[[], Any], repeats: int = 10) -> float:
    """Returns the least seconds of one call."""
    taken = []
    for _ in range(repeats):
        _finish(device)
        started = time.perf_counter()
        work()
        _finish(device)
        taken.append(time.perf_counter() - started)
    return min(taken)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def profile(device: torch.device) -> Iterator[tuple[str, Any]]:
    """Yields for each kind of update its seconds, and its kernels and operations by time."""
    ring = GPU_RING if device.type == "cuda" else RING
    for name, (agent, preset, environment, update) in PROFILED.items():
        world = World(device, agent, preset, environment, ring, **update)
        timed = TIMED_UPDATES if device.type == "cuda" else 3
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        world.run(3)
        yield f"{name}_first_seconds", time.perf_counter() - started
        began, wall = time.process_time(), world.run(timed)
        taken = time.process_time() - began
        yield f"{name}_wall_seconds", wall / timed
        yield f"{name}_cpu_seconds", taken / timed
        if device.type == "cuda":
            yield f"{name}_device_seconds", _replay_seconds(world, world.updater._graphs[0]._graphs, timed)
            yield f"{name}_gather_seconds", _gather_seconds(world)
        profiled = PROFILED_UPDATES if device.type == "cuda" else 3
        with torch.profiler.profile() as profiler:
            world.run(profiled)
        yield f"{name}_kernels", kernels(profiler, profiled, device.type)
        with torch.profiler.profile() as profiler:
            _update_without_graph(world)
        yield f"{name}_operations", kernels(profiler, 1, "cpu")
        yield f"{name}_memory_bytes", torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def _gather_seconds(world: World) -> float:
    """Returns the device's time to gather a draw; launched one by one, its operations wait for Python."""
    graph = torch.cuda.CUDAGraph()
    with world.stream.aside() as stream, torch.cuda.graph(graph, stream=stream):
        world.updater._graphs[0]._batches()
    return _replay_seconds(world, [graph], GATHERS)


def _replay_seconds(world: World, graphs: list[torch.cuda.CUDAGraph], count: int) -> float:
    """Returns the device's time to replay graphs once, of so many times without a pause."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with world.stream.exclusive():
        begin.record(world.stream.cuda)
        for _ in range(count):
            for graph in graphs:
                graph.replay()
        end.record(world.stream.cuda)
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / count


def _update_without_graph(world: World) -> None:
    """Makes the last update again, operation after operation."""
    graph = world.updater._graphs[0]
    with world.stream.exclusive():
        graph._work.run(graph._batches())
    _finish(world.stream.device)


def kernels(profiler: torch.profiler.profile, updates: int, device: str) -> list[dict[str, Any]]:
    """Returns the work of a device by its time in an update: kernels and copies of a GPU, operations of a CPU."""
    kind = torch.autograd.DeviceType.CUDA if device == "cuda" else torch.autograd.DeviceType.CPU
    found = []
    for event in profiler.key_averages():
        if event.device_type == kind:
            seconds = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
            row = {"name": event.key[:120], "count": event.count / updates, "seconds": seconds / 1e6 / updates}
            found.append(row)
    return sorted(found, key=lambda row: -row["seconds"])[:MOST_KERNELS]


def cores(device: torch.device) -> Iterator[tuple[str, float]]:
    """Yields the agent steps/s of environments alone, by the number of processes."""
    most = len(os.sched_getaffinity(0))
    for count in sorted({1, max(most // 2, 1), most}):
        with multiprocessing.get_context("spawn").Pool(count) as pool:
            pool.map(_step, [0.1] * count, chunksize=1)  # the processes are there, and have loaded all they need
            steps = sum(pool.map(_step, [CORE_SECONDS] * count, chunksize=1))
        yield f"agent_steps_per_second_of_{count}_processes", steps


def _step(seconds: float) -> float:
    """Returns the agent steps/s of one process."""
    environment = make_environment(EnvConfig(), ENVIRONMENTS)
    environment.reset(0)
    actions, count, started = np.zeros(ENVIRONMENTS, np.int64), 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        take_step(environment, actions)
        count += ENVIRONMENTS
    rate = count / (time.perf_counter() - started)
    environment.close()
    return rate


PARTS: dict[str, Callable[[torch.device], Iterator[tuple[str, Any]]]] = {
    "smoke": smoke, "ceilings": ceilings, "profile": profile, "cores": cores
}  # fmt: skip


def main() -> None:
    """Measures one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--json", type=Path, required=True, help="file for the figures")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for name, figure in PARTS[arguments.part](torch.device(arguments.device)):
        found[name] = figure
        write_json(arguments.json, found)
        print(name, figure if not isinstance(figure, list) else json.dumps(figure, indent=1), flush=True)


if __name__ == "__main__":
    main()
