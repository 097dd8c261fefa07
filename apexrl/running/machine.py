"""The machine that a run is planned for, and the numbers that follow from it: preset, actors, threads, capacity."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from apexrl.agents.contract import Want
from apexrl.config.commands import RunCommand
from apexrl.config.fields import with_values
from apexrl.config.flags import wants_of
from apexrl.control_groups import num_cores
from apexrl.errors import ConfigError
from apexrl.learning.devices import devices_of
from apexrl.learning.experience.mixed_log import Share
from apexrl.learning.experience.sizes import DEVICE_RESERVE_BYTES, bytes_needed
from apexrl.memory import free_memory_bytes
from apexrl.replay.replay import ring_unrolls
from apexrl.running.torch_look import Ask, Question
from apexrl.types import EnvironmentSpec, StreamSpec

CPU = "cpu"
ENVIRONMENTS_BESIDE_A_GPU = 128  # of an actor process: a call of its GPU costs the same for few and for many
SERVER_BYTES_PER_TRANSITION = 300  # log and priorities, of Atari; measured 60..250
PROCESS_BYTES = 400e6
CONTEXT_BYTES = 1.2e9  # on a GPU, of a process that computes there: libraries, a network, graphs
SHARE_OF_MEMORY = 0.85


class Machine(NamedTuple):
    """The machine that a plan is made for."""

    cores: int
    memory_bytes: int  # that is free now
    device: str  # of the learner: cpu, or cuda:N
    device_memory_bytes: int  # the GPU's, else as memory_bytes
    actor_device: str = CPU
    num_gpus: int = 0

    @classmethod
    def here(cls, ask: Ask, device: str, memory_gb: float = 0.0, actor_device: str = CPU) -> "Machine":
        """Looks at this machine, but for its memory where `memory_gb` is not 0.

        Raises: ConfigError when a device cannot be used.
        """
        found = ask(Question(device=device))
        acting = found if actor_device == device else ask(Question(device=actor_device))
        free = free_memory_bytes(memory_gb)
        on_device = free if found.device == CPU else found.free_bytes
        return cls(num_cores(), free, found.device, on_device, acting.device, found.num_gpus)

    @property
    def learns_on_gpu(self) -> bool:
        """Whether the learner computes on a GPU."""
        return self.device != CPU


def fitting_preset(machine: Machine, environment: EnvironmentSpec, presets: Collection[str]) -> str:
    """Returns the name of the preset, out of an algorithm's, that fits a machine and an environment."""
    if environment.action_bounds and "vectors" in presets:
        return "vectors"
    if environment.has_small_frames:
        return "small"
    return "gpu" if machine.learns_on_gpu else "two-cores"


def sizes(machine: Machine, environment: EnvironmentSpec) -> Mapping[str, int]:
    """Returns the values that follow from the number of cores: those of the actors, and the rest for the learner.

    An actor whose network runs on a GPU leaves its cores to the emulator, which has two threads in each process.
    """
    if environment.has_small_frames:
        return {}
    cores, learns_on_gpu = machine.cores, machine.learns_on_gpu
    acting = {"num_workers": max(cores - 3 if learns_on_gpu else cores // 2, 1)}
    if machine.actor_device != CPU:
        acting = {"num_workers": max((cores - 2) // 2, 1), "environments_per_worker": ENVIRONMENTS_BESIDE_A_GPU}
    threads = 2 if learns_on_gpu else max((cores - acting["num_workers"]) // 2, 1)
    return acting | {"learner_threads": threads}


def fitted(command: RunCommand, machine: Machine, spec: StreamSpec, is_asked_for: bool) -> RunCommand:
    """Returns the command with a capacity that fits; only a capacity that nobody asked for is made smaller.

    Raises: ConfigError when it does not fit.
    """
    replay = command.replay
    num_workers = command.acting.num_workers
    contexts = num_workers if command.has_actors and machine.actor_device == machine.device != CPU else 0
    num_devices = len(set(devices_of(command.learning, command.learning.num_learners, machine.num_gpus)))
    largest = largest_capacity(machine, spec, wants_of(command), num_workers, contexts, num_devices)
    if mixed := Share.of(command.learning):
        largest -= mixed.transitions
    if replay.capacity > largest:
        if is_asked_for or largest < replay.min_size_to_sample:
            memory = f"{machine.memory_bytes / 1e9:.1f} GB of memory are free"
            if machine.learns_on_gpu:
                memory += f", {machine.device_memory_bytes / 1e9:.1f} GB on {machine.device}"
            cure = _cure(largest, replay.min_size_to_sample, num_workers)
            raise ConfigError(f"a capacity of {replay.capacity:,} transitions does not fit ({memory}): {cure}")
        # Two digits: the free memory differs a little from run to run, and their capacity should not.
        unit = 10 ** max(len(str(largest)) - 2, 0)
        capacity = max(largest // unit * unit, replay.min_size_to_sample)
        return with_values(command, {"capacity": capacity})
    return command


def _cure(largest: int, min_size: int, num_workers: int) -> str:
    """Returns what a person may do who asks for more than the largest capacity that fits."""
    if largest < 1:
        beside = f"{num_workers} actor processes: give fewer --num-workers, or" if num_workers > 1 else "an actor: give"
        return f"none does beside {beside} more --memory-gb"
    smaller = f" --min-size-to-sample {largest}" if largest < min_size else ""
    return f"the largest that does is --capacity {largest}{smaller}; --memory-gb says how much may be taken"


def largest_capacity(
    machine: Machine, spec: StreamSpec, wants: Sequence[Want], num_workers: int, num_contexts: int = 0,
    num_devices: int = 1,
) -> int:  # fmt: skip
    """Returns how many transitions fit this machine beside its processes.

    Frames that do not fit the GPU lie in host memory: whichever holds more is the bound.

    Args:
      num_contexts: actors that compute on the learner's GPU.
      num_devices: GPUs of the learners, each of which holds its part.
    """
    per_transition = bytes_needed(spec, 1, wants) * ring_unrolls(10**6, 1) / 10**6 / spec.unroll_starts
    host = SHARE_OF_MEMORY * machine.memory_bytes - PROCESS_BYTES * (num_workers + 4)
    in_host_memory = host / (per_transition + SERVER_BYTES_PER_TRANSITION)
    if not machine.learns_on_gpu:
        return int(in_host_memory)
    taken = DEVICE_RESERVE_BYTES + CONTEXT_BYTES * num_contexts
    on_device = num_devices * (SHARE_OF_MEMORY * machine.device_memory_bytes - taken) / per_transition
    return int(max(in_host_memory, min(on_device, host / SERVER_BYTES_PER_TRANSITION)))
