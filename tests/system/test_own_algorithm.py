"""The examples of docs/own-algorithm.md: they learn, on a captured graph, too, and all that reads a run takes them."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import apexrl
from apexrl.agents.families import FAMILIES, family_of, implementation
from apexrl.config.commands import LearnerCommand
from apexrl.config.flags import parse, wants_of
from apexrl.errors import ConfigError
from apexrl.roles.export import export
from tests.agents.test_masks import MASKED, masks, with_masks
from tests.captured_runs import check_captured_run, run_lockstep
from tests.devices import CPU
from tests.examples import EXAMPLES, train_flags
from tests.system.processes import ROOT
from tests.system.test_training import learn

QUANTILES, DPG = train_flags("quantile_dqn"), train_flags("dpg")
SHORT = ["--preset", "small", "--total-updates", "12", "--min-size-to-sample", "200", "--no-evaluator"]


@pytest.fixture
def examples(monkeypatch):
    """Makes the examples importable, and forgets them in the end."""
    monkeypatch.syspath_prepend(EXAMPLES)
    known = dict(FAMILIES)
    yield
    for name in FAMILIES.keys() - known.keys():
        sys.modules.pop(FAMILIES.pop(name).module)


@pytest.mark.parametrize("flags", [QUANTILES, DPG], ids=["quantiles", "dpg"])
def test_a_captured_graph_learns_the_same_networks(tmp_path, monkeypatch, examples, flags):
    check_captured_run(monkeypatch, tmp_path, [*SHORT, *flags])


def test_a_policy_of_vectors_plays_in_the_library(tmp_path, examples):
    run_lockstep(tmp_path, [*SHORT, *DPG])
    agent = apexrl.load(tmp_path)
    action = agent.act(np.array([1.0, 0.0, 0.5], np.float32))
    assert action.shape == (1,) and action.dtype == np.float32 and -2 <= action[0] <= 2


@pytest.mark.parametrize("flags", [QUANTILES, DPG], ids=["quantiles", "dpg"])
def test_the_network_has_an_onnx_graph(tmp_path, examples, flags):
    run_lockstep(tmp_path, [*SHORT, *flags])
    assert "it gives values" in export(tmp_path / "checkpoints" / "latest.safetensors", tmp_path / "network.onnx")


def test_targets_of_quantiles_keep_to_masks(examples):
    family, rng = family_of("quantile_dqn:quantile-dqn"), np.random.default_rng(0)
    spec = family.stream(family.algorithm, MASKED)
    learner = implementation(family).make_learner(family.algorithm, family.network, family.update, spec, CPU)
    mask = masks(rng, 40)
    observations = with_masks(torch.randn(40, 2, 4), mask)
    of_target = torch.arange(float(mask.shape[1])).view(1, -1, 1).expand(40, -1, family.network.quantiles)
    batch = SimpleNamespace(next_observation=observations)
    best = learner.learning.from_online(learner.online, {"transitions": batch}, of_target)[:, 0].long()
    assert mask[torch.arange(40), best].all() and len(set(best.tolist())) > 1


@pytest.mark.parametrize("flags", [["--munchausen", "0.9"], ["--value-rescaling"]])
def test_flags_of_ape_x_that_the_quantiles_do_not_know_are_refused(examples, flags):
    with pytest.raises(ConfigError, match=f"--agent quantile-dqn takes no {flags[0]}: leave it out"):
        wants_of(parse(LearnerCommand, ["--agent", "quantile_dqn:quantile-dqn", *flags]))


def test_a_policy_of_vectors_refuses_actions_to_choose_from(examples):
    family = family_of("dpg:dpg")
    with pytest.raises(ConfigError, match="'Doors-v0' has 3 actions to choose from, and this algorithm chooses numb"):
        family.stream(family.algorithm, MASKED)


def test_the_page_shows_both_examples():
    page = (ROOT / "docs" / "own-algorithm.md").read_text()
    for flags, file in ((QUANTILES, "quantile_dqn.py"), (DPG, "dpg.py")):
        assert f"](../examples/{file})" in page and " ".join(["bash ../run.sh", *flags]) in page


@pytest.mark.long("trainings")
@pytest.mark.timeout(3200)
@pytest.mark.parametrize(
    ("flags", "most_frames", "enough"), [(QUANTILES, 20_000, 0.9), (DPG, 20_000, -250)], ids=["quantiles", "dpg"]
)
def test_the_examples_learn(tmp_path, free_ports, monkeypatch, flags, most_frames, enough):
    """In turns, so that the seed decides the curve; a reproducible run takes no longer on a slow machine, in frames."""
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
    flags = [*flags, "--reproducible", "--seed", "1", "--total-frames", str(most_frames)]
    summary = learn(tmp_path, free_ports(4), *flags, "--evaluation-period-updates", "300", enough=enough)
    assert summary["evaluation_best_return"] >= enough
