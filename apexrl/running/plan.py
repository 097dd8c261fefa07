"""What a run on this machine will be: sizes that fit its cores, memory and GPU, checked before anything starts."""

import dataclasses
import os
import shlex
import socket
import time
from typing import Any, NamedTuple

import torch

from apexrl.config import PRESETS, RunCommand, WireConfig
from apexrl.environments.vector import make_environment, make_spec
from apexrl.errors import ConfigError
from apexrl.flags import check_together, parse_onto, with_defaults
from apexrl.learning.unroll_store import DEVICE_RESERVE_BYTES, FrameStore
from apexrl.memory import free_memory_bytes
from apexrl.networks.device import choose_device
from apexrl.networks.dueling import make_network
from apexrl.replay.replay import ring_unrolls
from apexrl.types import StreamSpec

SMALL_FRAME_SIZE = 1024  # numbers in an observation for which the preset `small` is meant
SERVER_BYTES_PER_TRANSITION = 300  # log and priorities, of Atari; measured 60..250
PROCESS_BYTES = 400e6
SHARE_OF_MEMORY = 0.85

SMOKE: dict[str, Any] = {
    "capacity": 20_000,
    "min_size_to_sample": 2_000,
    "samples_per_insert": 1.0,
    "max_episode_frames": 4_000,
    "episodes": 2,
    "evaluation_period_seconds": 10.0,
    "max_seconds": 60.0,
}


class Machine(NamedTuple):
    """What the plan is made for."""

    cores: int
    memory_bytes: int  # that is free now
    device: torch.device
    device_memory_bytes: int  # of the GPU, else as memory_bytes

    @classmethod
    def here(cls, device: str, memory_gb: float = 0.0) -> "Machine":
        """Looks at this machine, but for its memory where `memory_gb` is not 0.

        Raises: ConfigError when the device cannot be used.
        """
        chosen = choose_device(device)
        free = free_memory_bytes(memory_gb)
        gpu = torch.cuda.mem_get_info(chosen)[0] if chosen.type == "cuda" else free
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(cores, free, chosen, gpu)


class Plan(NamedTuple):
    """A run with every number filled in."""

    command: RunCommand
    spec: StreamSpec
    machine: Machine


def make_plan(asked: RunCommand, saved: RunCommand | None, arguments: list[str] | None = None) -> Plan:
    """Returns the plan for what the arguments ask: on top of a saved run, or of the preset that fits.

    Args:
      asked: the arguments on top of the papers' defaults; only what decides the preset is read from it.
      saved: the configuration of the run that is continued.
    Raises: ConfigError when the environment cannot be made, or does not fit this machine.
    """
    if saved is not None:
        asked = parse_onto(saved, arguments)
        _check_kept(asked, saved)
    machine = Machine.here(asked.learning.device, asked.learning.memory_gb)
    choose_device(asked.actor_device)
    environment = make_environment(asked.env, 1)
    spec = make_spec(asked.env, environment, asked.agent.unroll_starts, asked.agent.n_steps)
    environment.close()
    default = saved
    if default is None:
        preset = asked.preset if asked.preset != "auto" else _fitting_preset(machine, spec)
        smoke = SMOKE if asked.smoke else {}
        default = with_defaults(RunCommand(), PRESETS[preset] | _sizes(machine, spec) | smoke | {"preset": preset})
    command = parse_onto(default, arguments)
    command = dataclasses.replace(command, preset=default.preset, wires=_reachable(command.wires))
    check_together(command)
    command = _fitted(command, default, machine, spec)
    make_network(spec, command.network)
    if not command.run_dir:
        name = command.env.env.replace("/", "-").replace(":", "-")
        command = dataclasses.replace(command, run_dir=f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    return Plan(command, spec, machine)


def _check_kept(asked: RunCommand, saved: RunCommand) -> None:
    """Raises ConfigError when flags change what the experience or the checkpoint of a resumed run cannot follow."""
    kept = {
        "--preset": (asked.preset, saved.preset),
        "--run-dir": (asked.run_dir, saved.run_dir),
        "--env": (asked.env.env, saved.env.env),
        "--n-steps": (asked.agent.n_steps, saved.agent.n_steps),
        "--unroll-starts": (asked.agent.unroll_starts, saved.agent.unroll_starts),
    }
    if not asked.from_scratch:
        kept |= {
            "--optimizer": (asked.update.optimizer, saved.update.optimizer),
            "--channels": (asked.network.channels, saved.network.channels),
            "--hidden-size": (asked.network.hidden_size, saved.network.hidden_size),
        }
    changed = [flag for flag, (now, before) in kept.items() if now != before]
    if changed:
        raise ConfigError(
            f"a run that is resumed cannot change {' '.join(changed)}: leave that out, or begin a new run"
        )


def _reachable(wires: WireConfig) -> WireConfig:
    """Lets the roles of this machine connect to the address on which its servers listen."""
    host = "127.0.0.1" if wires.bind_host == "0.0.0.0" else wires.bind_host
    return dataclasses.replace(wires, replay_host=host, learner_host=host)


def _fitting_preset(machine: Machine, spec: StreamSpec) -> str:
    if spec.frame_size <= SMALL_FRAME_SIZE:
        return "small"
    return "paper" if machine.device.type == "cuda" else "two-cores"


def _sizes(machine: Machine, spec: StreamSpec) -> dict[str, Any]:
    """Returns what follows from the number of cores: those of the actors, and the rest for the learner."""
    if spec.frame_size <= SMALL_FRAME_SIZE:
        return {}
    if machine.device.type == "cuda":
        return {"num_workers": max(machine.cores - 3, 1), "learner_threads": 2, "prefetch_batches": 16}
    workers = max(machine.cores // 2, 1)
    return {"num_workers": workers, "learner_threads": max((machine.cores - workers) // 2, 1)}


def _fitted(command: RunCommand, default: RunCommand, machine: Machine, spec: StreamSpec) -> RunCommand:
    """Returns the command with a capacity that fits; only a capacity that nobody asked for is made smaller.

    Raises: ConfigError when it does not fit.
    """
    replay = command.replay
    largest = largest_capacity(machine, spec, command.acting.num_workers)
    if replay.capacity > largest:
        if replay.capacity != default.replay.capacity or largest < replay.min_size_to_sample:
            memory = f"{machine.memory_bytes / 1e9:.1f} GB of memory are free"
            if machine.device.type == "cuda":
                memory += f", {machine.device_memory_bytes / 1e9:.1f} GB on {machine.device}"
            raise ConfigError(
                f"a capacity of {replay.capacity:,} transitions does not fit ({memory}): "
                f"the largest that does is --capacity {max(largest, 0)}; --memory-gb says how much may be taken"
            )
        replay = dataclasses.replace(replay, capacity=largest)
    return dataclasses.replace(command, replay=replay)


def largest_capacity(machine: Machine, spec: StreamSpec, num_workers: int) -> int:
    """Returns how many transitions fit this machine beside its processes.

    Frames that do not fit the GPU lie in host memory: whichever holds more is the bound.
    """
    per_transition = FrameStore.bytes_needed(spec, 1) * ring_unrolls(10**6, 1) / 10**6 / spec.unroll_starts
    host = SHARE_OF_MEMORY * machine.memory_bytes - PROCESS_BYTES * (num_workers + 4)
    in_host_memory = host / (per_transition + SERVER_BYTES_PER_TRANSITION)
    if machine.device.type == "cpu":
        return int(in_host_memory)
    on_device = (SHARE_OF_MEMORY * machine.device_memory_bytes - DEVICE_RESERVE_BYTES) / per_transition
    return int(max(in_host_memory, min(on_device, host / SERVER_BYTES_PER_TRANSITION)))


def check_asked(asked: RunCommand) -> None:
    """Raises ConfigError when flags are given, on top of the defaults, that mean nothing for a run on this machine."""
    usual = WireConfig()
    if asked.evaluation.checkpoint:
        watch = ["actor.py", "--env", asked.env.env, "--checkpoint", asked.evaluation.checkpoint]
        raise ConfigError(
            f"--checkpoint does not train; to watch one, say `.venv/bin/python {shlex.join(watch)} --record-dir videos`"
        )
    if (asked.wires.replay_host, asked.wires.learner_host) != (usual.replay_host, usual.learner_host):
        raise ConfigError(
            "--replay-host and --learner-host are for roles on several hosts: start actor.py, learner.py and replay.py "
            "there; here --bind-host chooses the address"
        )
    if asked.from_scratch and not asked.resume:
        raise ConfigError("--from-scratch trains a new network on the experience of a run: give its --resume DIR, too")
    if asked.smoke and (asked.resume or not asked.evaluator):
        raise ConfigError("--smoke tries everything once: leave out --resume and --no-evaluator")


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
    ports = [port for _, port in needed.values()]
    if len(set(ports)) < len(ports):
        raise ConfigError(f"ports {sorted(ports)}: each has to be another one")
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


def describe(plan: Plan) -> list[tuple[str, str]]:
    """Returns the plan for a person to read, as names and values."""
    command, spec, machine = plan
    acting, replay, update, wires = command.acting, command.replay, command.update, command.wires
    store = FrameStore.bytes_needed(spec, ring_unrolls(replay.capacity, spec.unroll_starts))
    on_device = machine.device.type == "cuda" and store + DEVICE_RESERVE_BYTES <= machine.device_memory_bytes
    frames = machine.device if on_device else "the host"
    workers = f"{acting.num_workers} x {acting.environments_per_worker}"
    rows = [
        ("machine", f"{machine.cores} cores, {machine.memory_bytes / 1e9:.0f} GB free, learning on {machine.device}"),
        ("environment", f"{spec.env}, {spec.num_actions} actions; {workers} copies"),
        ("preset", command.preset),
        ("replay", f"{replay.capacity:,} transitions, {store / 1e9:.1f} GB on {frames} when full"),
        ("sampling", f"from {replay.min_size_to_sample:,} on, {replay.samples_per_insert} samples an insert"),
        ("update", f"batch {update.batch_size}, {update.optimizer} {update.learning_rate:g}, "
                   f"target every {update.target_period_updates}"),
        ("network", f"channels {command.network.channels}, hidden {command.network.hidden_size}"),
        ("ports", f"replay {wires.actor_port} {wires.batch_port}, learner {wires.parameter_port} {wires.metrics_port}"),
        ("journal", f"{command.run_dir}/journal" if replay.journal_dir == "auto" else replay.journal_dir),
        ("run", command.run_dir),
    ]  # fmt: skip
    if command.tensorboard:
        rows.append(("TensorBoard", f"http://{command.tensorboard_host}:{command.tensorboard_port}"))
    return rows
