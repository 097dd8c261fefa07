"""Results of an update that are not one of each row."""

import math

import numpy as np
import pytest
import torch

from apexrl.errors import ApexError
from apexrl.learning.updates.soundness import Soundness
from apexrl.learning.updates.updater import Pending, Result
from apexrl.networks.device_stream import DONE

KEYS = {"table": np.arange(3)}


def pending(num_priorities=4, metric=(4,), row=(4, 2)):
    """Results of an update from three rows of a batch of four."""
    results = (
        Result("priorities", "priorities", (num_priorities,), "table"),
        Result("rows", "share", row, "table"),
        Result("metrics", "loss", (), ""),
        Result("metrics", "error", metric, "table"),
    )
    size = sum(math.prod(result.shape) for result in results)
    return Pending(KEYS, results, torch.arange(size).float(), DONE)


def test_results_may_be_more_than_the_rows_but_never_fewer():
    priorities, metrics = pending().result()
    assert priorities["table"].tolist() == [0, 1, 2] and metrics == {"loss": 12.0}
    pending(3, (3,), (3,)).result()
    for wrong, name in ((pending(2), "priorities"), (pending(metric=(2,)), "error"), (pending(row=(1, 2)), "share")):
        with pytest.raises(ApexError, match=f"the learner gives . numbers of {name} for 3 rows of table"):
            wrong.result()


@pytest.mark.parametrize(("name", "expected"), [("error", 2.0), ("error_max", 3.0)])
def test_a_row_that_is_not_finite_hides_no_other(name, expected):
    values = torch.tensor([1.0, math.nan, 3.0, 9.0])  # the last one only fills the batch
    found = Pending(KEYS, (Result("metrics", name, (4,), "table"),), values, DONE)
    assert found.row_metrics() == {name: expected}
    none = found._replace(values=torch.full((4,), math.nan))
    assert math.isnan(none.row_metrics()[name])


def test_a_negative_priority_ends_the_learner():
    with pytest.raises(ApexError, match="the learner gives negative priorities of table: at least 0"):
        Soundness().check({"table": np.array([0.5, -0.1, np.nan])}, {}, None)
