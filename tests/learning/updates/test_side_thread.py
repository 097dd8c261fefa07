import itertools
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from apexrl.agents.apex_dqn import make_learner
from apexrl.agents.apex_dqn_config import ApexUpdate
from apexrl.agents.contract import TransitionBatch
from apexrl.learning.experience.draw import Draw, Gathered
from apexrl.learning.updates.side_thread import SideThread, _result_of
from apexrl.networks.config import DuelingConfig
from apexrl.types import EnvironmentSpec
from tests.devices import CPU
from tests.lockstep import ALGORITHM, TABLE

SIZE, NUM_DRAWS = 32, 10


def learner_of(spec):
    torch.manual_seed(0)
    return make_learner(ALGORITHM, DuelingConfig((16, 32, 32), 256), ApexUpdate(SIZE), spec, CPU)


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_a_second_thread_gives_the_gradient_of_one(monkeypatch, has_bfloat16):
    """Both threads cast the same layers at the same time. Some versions of torch mix up what they keep of that."""
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: has_bfloat16)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: has_bfloat16)
    spec = EnvironmentSpec("Screens-v0", (84, 84), "uint8", 4, 6, 4).streamed(80, 3)
    plain, threaded = (learner_of(spec) for _ in range(2))
    rng = np.random.default_rng(0)

    def draw():
        blocks = [torch.from_numpy(rng.integers(0, 256, (SIZE, 4, 21, 21, 16), np.uint8)) for _ in range(2)]
        actions, rewards = torch.from_numpy(rng.integers(0, 6, SIZE)), torch.from_numpy(rng.normal(size=SIZE)).float()
        batch = TransitionBatch(blocks[0], actions, rewards, torch.full((SIZE,), 0.97), blocks[1], torch.ones(SIZE))
        return Draw(0, {TABLE: Gathered(np.arange(SIZE), batch)})

    draws, side = [draw() for _ in range(NUM_DRAWS + 1)], SideThread(threaded)
    for this, upcoming in itertools.pairwise(draws):
        batches = this.batches()
        plain.gradients(batches, lambda batches=batches: plain.from_online(batches, plain.from_target(batches)))
        threaded.gradients(batches, side.begin(this))
        side.look_ahead(upcoming)
        torch.testing.assert_close(threaded.gradient, plain.gradient, rtol=0, atol=0)
    side.forget()


class Late:
    """Work of which the first look finds its time over, as where the process was stopped meanwhile."""

    def exception(self, seconds):
        raise TimeoutError

    def result(self, seconds):
        return 3


def test_the_time_in_which_the_process_stood_still_is_nobodys_fault():
    assert _result_of(Late()) == 3
    left = Future()
    left.set_exception(ValueError("stuck"))
    with pytest.raises(ValueError, match="stuck"):
        _result_of(left)
