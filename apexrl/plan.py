"""What a run on this machine will be: sizes that fit its cores, memory and GPU, checked before anything starts."""

import dataclasses
import socket
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from apexrl.config import RunCommand, defaults_of, resolve
from apexrl.envs import make_environment, make_spec
from apexrl.errors import ConfigError
from apexrl.frame_store import FrameStore
from apexrl.learning import choose_device
from apexrl.networks import make_network
from apexrl.replay.replay import ring_unrolls
from apexrl.types import StreamSpec

SMALL_FRAME_SIZE = 1024
SERVER_BYTES_PER_TRANSITION = 300  # log and priorities, of Atari; measured 60..250
PROCESS_BYTES = 400e6
SHARE_OF_MEMORY = 0.85

SMOKE: dict[str, Any] = {"capacity": 20_000, "min_size_to_sample": 2_000, "samples_per_insert": 1.0}


class Machine(NamedTuple):
    """What the plan is made for."""

    cores: int
    memory_bytes: int  # that is free now
    device: torch.device
    device_memory_bytes: int  # of the GPU, else as memory_bytes

    @classmethod
    def here(cls, device: str) -> "Machine":
        """Looks at this machine."""
        chosen = choose_device(device)
        free = psutil.virtual_memory().available
        gpu = torch.cuda.mem_get_info(chosen)[0] if chosen.type == "cuda" else free
        cores = (
            len(psutil.Process().cpu_affinity() or [0])
            if hasattr(psutil.Process, "cpu_affinity")
            else psutil.cpu_count() or 1
        )
        return cls(cores, free, chosen, gpu)


def make_plan(command: RunCommand, machine: Machine) -> tuple[RunCommand, StreamSpec]:
    """Returns the command with every number filled in.

    Raises: ConfigError when the environment cannot be made, or does not fit this machine.
    """
    if command.smoke:
        command = _smoke(command)
    environment = make_environment(command.env, 1)
    spec = make_spec(command.env, environment, command.agent.unroll_starts, command.agent.n_steps)
    environment.close()
    preset = command.preset
    if preset == "auto":
        preset = (
            "small"
            if spec.frame_size <= SMALL_FRAME_SIZE
            else ("paper" if machine.device.type == "cuda" else "two-cores")
        )
    command = dataclasses.replace(command, preset=preset)
    given = command.replay.capacity
    command = resolve(command, defaults_of(preset) | _sizes(machine, spec))
    make_network(spec, command.network)
    capacity = command.replay.capacity or 0
    largest = largest_capacity(machine, spec, command.acting.num_workers or 1)
    if capacity > largest:
        if given is not None or largest < (command.replay.min_size_to_sample or 1):
            raise ConfigError(
                f"a capacity of {capacity:,} transitions does not fit: the largest that does is --capacity {max(largest, 0)} "
                f"({machine.memory_bytes / 1e9:.1f} GB of memory are free, {machine.device_memory_bytes / 1e9:.1f} GB on {machine.device})"
            )
        command = dataclasses.replace(command, replay=dataclasses.replace(command.replay, capacity=largest))
    if (command.replay.min_size_to_sample or 0) > (command.replay.capacity or 0):
        raise ConfigError(
            f"--min-size-to-sample {command.replay.min_size_to_sample} is more than --capacity {command.replay.capacity}"
        )
    if not command.run_dir:
        name = command.env.env.replace("/", "-")
        command = dataclasses.replace(command, run_dir=f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    return command, spec


def largest_capacity(machine: Machine, spec: StreamSpec, num_workers: int) -> int:
    """Returns how many transitions fit this machine beside its processes."""
    per_unroll = FrameStore.bytes_needed(spec, 1) * ring_unrolls(10**6, 1) / 10**6
    per_transition = per_unroll / spec.unroll_starts
    processes = PROCESS_BYTES * (num_workers + 4)
    host = SHARE_OF_MEMORY * machine.memory_bytes - processes
    if machine.device.type == "cuda":
        on_device = SHARE_OF_MEMORY * machine.device_memory_bytes - 2e9
        return int(min(on_device / per_transition, host / SERVER_BYTES_PER_TRANSITION))
    return int(host / (per_transition + SERVER_BYTES_PER_TRANSITION))


def check_ports(command: RunCommand) -> None:
    """Raises ConfigError when a port that the run needs is taken."""
    wires = command.wires
    needed = {
        "actor_port": (wires.bind_host, wires.actor_port),
        "batch_port": (wires.bind_host, wires.batch_port),
        "parameter_port": (wires.bind_host, wires.parameter_port),
        "metrics_port": (wires.bind_host, wires.metrics_port),
    }
    if command.tensorboard:
        needed["tensorboard_port"] = (command.tensorboard_host, command.tensorboard_port)
    for name, (host, port) in needed.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(
                    f"port {port} on {host} cannot be used ({error.strerror}): stop who uses it or give another {flag}"
                ) from error


def check_run_dir(command: RunCommand) -> None:
    """Raises ConfigError when the run directory holds another run that would be written over."""
    directory = Path(command.run_dir)
    if not command.resume and directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty: give another --run-dir, or --resume {directory} to continue it")


def describe(command: RunCommand, spec: StreamSpec, machine: Machine) -> list[tuple[str, str]]:
    """Returns the plan for a person to read, as names and values."""
    acting, replay, update = command.acting, command.replay, command.update
    workers, each = acting.num_workers or 0, acting.environments_per_worker or 0
    store = FrameStore.bytes_needed(spec, ring_unrolls(replay.capacity or 0, spec.unroll_starts))
    wires = command.wires
    rows = [
        ("machine", f"{machine.cores} cores, {machine.memory_bytes / 1e9:.0f} GB free, learning on {machine.device}"),
        ("environment", f"{spec.env}, {spec.num_actions} actions, {workers} x {each} copies"),
        (
            "replay",
            f"{replay.capacity:,} transitions ({store / 1e9:.1f} GB on {machine.device}), from {replay.min_size_to_sample:,} on; {replay.samples_per_insert} samples an insert",
        ),
        (
            "update",
            f"batch {update.batch_size}, {update.optimizer} {update.learning_rate:g}, target every {update.target_period_updates}",
        ),
        ("network", f"channels {command.network.channels}, hidden {command.network.hidden_size}"),
        ("ports", f"replay {wires.actor_port} {wires.batch_port}, learner {wires.parameter_port} {wires.metrics_port}"),
        ("run", command.run_dir),
    ]
    if command.tensorboard:
        rows.append(("TensorBoard", f"http://{command.tensorboard_host}:{command.tensorboard_port}"))
    return rows


def _sizes(machine: Machine, spec: StreamSpec) -> dict[str, Any]:
    """Returns what follows from the number of cores: one core for each actor process, the rest for the learner."""
    if machine.device.type == "cuda":
        workers, threads = max(machine.cores - 3, 1), 2
    else:
        workers = max(machine.cores // 2, 1)
        threads = max(machine.cores - workers, 1)
    small = spec.frame_size <= SMALL_FRAME_SIZE
    return {
        "num_workers": 1 if small else workers,
        "environments_per_worker": 8 if small else 32,
        "learner_threads": 1 if small else threads,
    }


def _smoke(command: RunCommand) -> RunCommand:
    """Shrinks a run so that it passes through everything in about a minute."""
    return dataclasses.replace(
        resolve(command, SMOKE),
        max_seconds=command.max_seconds or 75.0,
        env=dataclasses.replace(command.env, max_episode_frames=min(command.env.max_episode_frames, 4_000)),
        evaluation=dataclasses.replace(command.evaluation, episodes=2, evaluation_period_seconds=10.0),
    )
