import pytest
import torch

from apexrl.config import EnvConfig, RunCommand
from apexrl.errors import ConfigError
from apexrl.learning.unroll_store import FrameStore
from apexrl.replay.replay import ring_unrolls
from apexrl.running.plan import Machine, largest_capacity, make_plan
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


SAVED = RunCommand(EnvConfig(env="Catch-v0"), run_dir="runs/earlier", preset="small")


@pytest.mark.parametrize(
    "flags",
    [
        *(["--preset", "two-cores"], ["--run-dir", "runs/other"], ["--env", "CartPole-v1"]),
        *(["--n-steps", "5"], ["--unroll-starts", "40"], ["--optimizer", "adam"], ["--hidden-size", "64"]),
        ["--channels", "1", "2", "3"],
        ["--from-scratch", "--env", "CartPole-v1"],
    ],
)
def test_a_resumed_run_keeps_what_its_experience_and_its_network_need(flags):
    with pytest.raises(ConfigError, match=f"cannot change {[flag for flag in flags if flag.startswith('--')][-1]}"):
        make_plan(SAVED, SAVED, flags)


def test_a_new_network_on_earlier_experience_may_be_another_one():
    changed = make_plan(SAVED, SAVED, ["--from-scratch", "--optimizer", "adam", "--hidden-size", "64"]).command
    assert (changed.update.optimizer, changed.network.hidden_size) == ("adam", 64)
    assert make_plan(SAVED, SAVED, ["--learning-rate", "0.1"]).command.update.learning_rate == 0.1
