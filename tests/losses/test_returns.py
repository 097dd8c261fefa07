"""Lambda returns beside the targets of V-trace on policy, and beside their definition at both ends of lambda."""

import numpy as np
import pytest
import torch

from apexrl.losses.returns import lambda_returns
from apexrl.losses.vtrace import vtrace
from tests.losses.unrolls import T, random_unrolls


@pytest.mark.parametrize("lambda_", [0.0, 0.65, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_lambda_returns_are_v_traces_targets_on_policy(lambda_, seed):
    unrolls = random_unrolls(np.random.default_rng(seed), scale=0)
    values = torch.cat([unrolls.values, unrolls.bootstrap_value[None]])
    found = lambda_returns(unrolls.rewards, unrolls.discounts, values[1:], unrolls.starts, lambda_)
    expected = vtrace(**unrolls.required, valid=unrolls.valid, lambda_=lambda_).vs
    torch.testing.assert_close(found[unrolls.valid], expected[unrolls.valid])


def test_a_return_ends_with_its_episode_and_bootstraps_where_that_was_cut():
    rewards, values = torch.ones(4, 1), torch.full((4, 1), 10.0)
    starts = torch.tensor([False, False, False, True, False])[:, None]  # step 2 is a reset, after a truncation
    found = lambda_returns(rewards, torch.full((4, 1), 0.5), values, starts, 1.0)
    assert found[:2, 0].tolist() == [1 + 0.5 * 6, 6] and found[3].item() == 6
    assert lambda_returns(rewards, torch.full((4, 1), 0.5), values, starts, 0.0)[0].item() == 6


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="shapes must all be"):
        lambda_returns(torch.ones(T, 2), torch.ones(T, 2), torch.ones(T, 2), torch.zeros(T, 2, dtype=torch.bool), 1.0)
