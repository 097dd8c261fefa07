from types import SimpleNamespace

import numpy as np
import pytest

from apexrl.config.tables import TableSpec
from apexrl.learning.results import Results
from tests.own_agent import OWN


@pytest.mark.parametrize("is_offline", [False, True])
def test_experience_of_other_learners_has_no_age(is_offline):
    """A guest's version 20,000 and its host's 1,000 are of two counts."""
    results = Results(OWN.tables(OWN.update), is_offline)
    pending = SimpleNamespace(result=lambda: ({}, {"loss": 1.0}), row_metrics=dict, rows=dict, keys={})
    draw = SimpleNamespace(generation=0, versions={"queue": np.arange(1000, 1006)})
    results.take(pending, draw, 20_000, None, None)
    ages = {name for name in results.metrics() if "version_lag" in name}
    assert ages == (set() if is_offline else {f"learner/version_lag_{name}" for name in ("p50", "p95", "max")})


def test_priorities_that_a_learner_forgets_are_said_once(caplog):
    results = Results(
        (TableSpec("transitions", "priority"), TableSpec("queue", "fifo"), TableSpec("other", "priority"))
    )
    pending = SimpleNamespace(
        result=lambda: ({}, {"loss": 1.0}), row_metrics=dict, rows=dict, keys={"transitions": [], "queue": []}
    )
    draw = SimpleNamespace(generation=0, versions={})
    for _ in range(3):
        results.take(pending, draw, 5, None, None)
    assert [record.message for record in caplog.records] == [
        "the learner gives no priorities of transitions: those of the actors stay"
    ]
