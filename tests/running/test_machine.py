"""The numbers of a run that follow from its machine."""

import msgspec
import pytest

from apexrl.config.commands import LearnerCommand, RunCommand
from apexrl.config.flags import default_command, wants_of, with_sections
from apexrl.errors import ConfigError
from apexrl.learning.experience.sizes import bytes_needed
from apexrl.replay.journal import Journal, new_identity
from apexrl.replay.replay import ring_unrolls
from apexrl.running.machine import Machine, fitted, fitting_preset, largest_capacity, sizes
from apexrl.running.torch_look import here
from apexrl.types import StreamSpec

SPEC = StreamSpec("Atari-v0", (84, 84), "uint8", 4, 18, 4, unroll_starts=80, overlap_steps=3)
WANTS = wants_of(default_command(LearnerCommand))
GB = 10**9
CPU, GPU = "cpu", "cuda:0"


def largest(device, host_gb, device_gb, num_contexts=0, num_devices=1):
    machine = Machine(16, host_gb * GB, device, device_gb * GB)
    return largest_capacity(machine, SPEC, WANTS, 8, num_contexts, num_devices)


def test_the_gpu_is_the_bound_where_it_holds_more_than_the_host():
    capacity = largest("cuda", 64, 140)
    needed = bytes_needed(SPEC, ring_unrolls(capacity, SPEC.unroll_starts), WANTS)
    assert needed == pytest.approx(0.85 * 140 * GB - 2 * GB, rel=0.01)


def test_a_journal_beside_the_run_takes_its_part_of_the_memory(tmp_path):
    journal = Journal(tmp_path, new_identity(SPEC))
    journal.append(0, [(b"", b"")] * 5000)
    journal.close()
    machine = Machine(16, 12 * GB, CPU, 12 * GB)
    command = with_sections(default_command(RunCommand), {"replay": {"capacity": 10**9}})
    commands = [with_sections(command, {"learning": {"mix_journal": mixed}}) for mixed in ("", f"{tmp_path}=1/2")]
    capacities = [fitted(command, machine, SPEC, is_asked_for=False).replay.capacity for command in commands]
    assert capacities[0] - capacities[1] == pytest.approx(5000 * 80, abs=20_000)


def test_actors_that_compute_on_the_gpu_have_room_there():
    capacity = largest("cuda", 16, 80, num_contexts=13)
    needed = bytes_needed(SPEC, ring_unrolls(capacity, SPEC.unroll_starts), WANTS)
    assert needed == pytest.approx((0.85 * 80 - 2 - 13 * 1.2) * GB, rel=0.01)


def test_the_gpus_of_several_learners_hold_a_part_each():
    assert largest("cuda", 16, 24, num_devices=4) == pytest.approx(4 * largest("cuda", 16, 24), rel=1e-6)


def test_the_host_is_the_bound_where_the_gpu_holds_less():
    capacity = largest("cuda", 64, 12)
    assert capacity == largest("cpu", 64, 64)
    needed = bytes_needed(SPEC, ring_unrolls(capacity, SPEC.unroll_starts), WANTS) + 300 * capacity
    assert needed == pytest.approx((0.85 * 64 - 0.4 * 12) * GB, rel=0.01)


def test_the_server_of_a_great_gpu_has_to_fit_the_host():
    assert largest("cuda", 8, 10_000) == int((0.85 * 8 - 0.4 * 12) * GB / 300)


def test_memory_that_is_given_is_what_the_plan_is_made_for():
    assert Machine.here(here, "cpu", 2.5).memory_bytes == 2_500_000_000


def sizes_of(cores, device, actor_device):
    """Workers, environments of each (0: the preset's), and threads of the learner."""
    found = sizes(Machine(cores, 64 * GB, device, 64 * GB, actor_device), SPEC)
    return found["num_workers"], found.get("environments_per_worker", 0), found["learner_threads"]


@pytest.mark.parametrize(
    ("cores", "device", "actor_device", "expected"),
    [
        (16, GPU, GPU, (7, 128, 2)),
        (16, GPU, CPU, (13, 0, 2)),
        (2, GPU, GPU, (1, 128, 2)),
        (2, CPU, CPU, (1, 0, 1)),
        (16, CPU, CPU, (8, 0, 4)),
        (16, CPU, GPU, (7, 128, 4)),
    ],
)
def test_actors_leave_cores_to_the_others_and_on_a_gpu_to_the_emulator(cores, device, actor_device, expected):
    assert sizes_of(cores, device, actor_device) == expected


@pytest.mark.parametrize(("device", "preset"), [(CPU, "two-cores"), (GPU, "gpu")])
def test_the_preset_follows_from_the_machine_and_the_environment(device, preset):
    machine = Machine(16, 64 * GB, device, 64 * GB)
    assert fitting_preset(machine, SPEC, ["vectors"]) == preset
    vectors = StreamSpec("Vectors-v0", (4,), "float32", 1, 2, 1, unroll_starts=80, overlap_steps=3)
    assert fitting_preset(machine, vectors, ["vectors"]) == "small" and not sizes(machine, vectors)
    steering = msgspec.structs.replace(vectors, num_actions=0, action_bounds=((-1.0, 1.0),))
    assert fitting_preset(machine, steering, ["vectors"]) == "vectors"
    assert fitting_preset(machine, steering, []) == "small", "a family whose presets are for vectors all"


def test_a_capacity_that_follows_from_free_memory_is_the_same_for_runs_one_after_the_other():
    command = default_command(RunCommand)
    machines = [Machine(16, host_bytes, CPU, 0) for host_bytes in (16_000_000_000, 16_050_000_000)]
    largest_ones = [largest_capacity(machine, SPEC, WANTS, command.acting.num_workers) for machine in machines]
    capacities = {fitted(command, machine, SPEC, is_asked_for=False).replay.capacity for machine in machines}
    assert len(set(largest_ones)) == 2 and len(capacities) == 1
    assert 0.9 * min(largest_ones) <= capacities.pop() <= min(largest_ones) < command.replay.capacity


@pytest.mark.parametrize(
    ("gigabytes", "num_workers", "cure"),
    [
        (1, 1, "none does beside an actor: give more --memory-gb"),
        (1, 4, "none does beside 4 actor processes: give fewer --num-workers, or more --memory-gb"),
        (2.5, 1, r"the largest that does is --capacity (\d+) --min-size-to-sample \1; --memory-gb says"),
        (10, 1, r"the largest that does is --capacity \d+; --memory-gb says"),
    ],
)
def test_what_does_not_fit_is_refused_with_flags_that_help(gigabytes, num_workers, cure):
    command = with_sections(default_command(RunCommand), {"acting": {"num_workers": num_workers}})
    machine = Machine(2, int(gigabytes * GB), CPU, 0)
    with pytest.raises(ConfigError, match=cure):
        fitted(command, machine, SPEC, is_asked_for=True)
