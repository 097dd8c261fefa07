import pytest
import torch

from apexrl.learning.unroll_store import FrameStore
from apexrl.replay.replay import ring_unrolls
from apexrl.running.plan import Machine, largest_capacity
from apexrl.types import StreamSpec

SPEC = StreamSpec("Atari-v0", (84, 84), "uint8", 4, 18, 4, unroll_starts=80, n_steps=3)
GB = 10**9


def largest(device, host_gb, device_gb):
    return largest_capacity(Machine(16, host_gb * GB, torch.device(device), device_gb * GB), SPEC, 8)


def test_the_gpu_is_the_bound_where_it_holds_more_than_the_host():
    capacity = largest("cuda", 64, 140)
    needed = FrameStore.bytes_needed(SPEC, ring_unrolls(capacity, SPEC.unroll_starts))
    assert needed == pytest.approx(0.85 * 140 * GB - 2 * GB, rel=0.01)


def test_the_host_is_the_bound_where_the_gpu_holds_less():
    capacity = largest("cuda", 64, 12)
    assert capacity == largest("cpu", 64, 64)
    needed = FrameStore.bytes_needed(SPEC, ring_unrolls(capacity, SPEC.unroll_starts)) + 300 * capacity
    assert needed == pytest.approx((0.85 * 64 - 0.4 * 12) * GB, rel=0.01)


def test_the_server_of_a_great_gpu_has_to_fit_the_host():
    assert largest("cuda", 8, 10_000) == int((0.85 * 8 - 0.4 * 12) * GB / 300)


def test_memory_that_is_given_is_what_the_plan_is_made_for():
    assert Machine.here("cpu", 2.5).memory_bytes == 2_500_000_000
