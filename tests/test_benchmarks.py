"""The reports that the benchmarks make of their measurements."""

import contextlib
import dataclasses
import os
import re
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch

from apexrl.agents import impala, impala_config
from apexrl.agents.engine import plain_learner
from apexrl.agents.replaying.mix import parts_of
from apexrl.config.commands import LearnerCommand, RunCommand
from apexrl.config.flags import default_command, parse, wants_of
from apexrl.config.schedules import Schedule
from apexrl.learning.experience.unroll_store import UnrollStore
from apexrl.learning.record.status_file import Status
from apexrl.losses.categorical import log_probs
from apexrl.networks.config import ActorCriticConfig
from apexrl.networks.headers import Counters
from apexrl.tools.sweep_plan import read_file, runs_of
from apexrl.types import LogPosition, Sample, Unroll
from benchmarks import end_to_end, gpu_report, gpu_run, learner, learner_work, selection, whole_run
from benchmarks.learner_plain import PlainActorCritic
from tests.system.processes import ROOT


def report(seconds: float, frames: int, updates: int, best: float | None = None) -> gpu_run.Report:
    counters = Counters(updates=updates, logs=(LogPosition(transitions=frames // 4),), best_evaluation_return=best)
    return gpu_run.Report(1000.0 + seconds, Status("Pong", frames, counters, {}, ""), {"learner": 2 * seconds})


def test_rates_of_a_run_begin_when_its_updates_have_settled():
    reports = [report(5, 0, 0), report(10, 80_000, 10), report(15, 100_000, 110), report(25, 140_000, 310, 18.5)]
    found = gpu_run.figures_of(reports, 1000.0, 18)
    assert found["frames_per_second"] == pytest.approx(4000)
    assert found["updates_per_second"] == pytest.approx(20)
    assert found["cores_by_role"] == {"learner": pytest.approx(2)}
    assert found["return_reached_after_seconds"] == pytest.approx(25)
    assert gpu_run.figures_of(reports, 1000.0, 19)["return_reached_after_seconds"] is None
    with pytest.raises(ValueError, match="1 of them with updates going on"):
        gpu_run.figures_of(reports[:3], 1000.0, None)
    early = gpu_run.figures_of([*reports[:2], report(11, 80_000, 15, 18.0)], 1000.0, 18)
    assert early["return_reached_after_seconds"] == pytest.approx(11)
    assert "updates_per_second" not in early


@pytest.mark.parametrize(
    ("command", "role"),
    [
        (["python", "-P", "/x/learner.py", "--device", "cuda"], "learner"),
        (["python", "-P", "-m", "apexrl.running.tensorboard"], "tensorboard"),
        (["bash"], "others"),
    ],
)
def test_the_time_of_a_process_counts_for_its_role(command, role):
    assert gpu_run.role_of(command) == role


def test_every_case_that_needs_a_gpu_is_selected_for_it():
    """`benchmarks/gpu.sh` selects by the marker; a skipped case, or none, is no result."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "gpu", "-p", "no:cacheprovider"]
    found = subprocess.run(
        [*command, "tests/learning/updates/test_updater.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    cases = [line for line in found.stdout.splitlines() if "::" in line]
    assert len(cases) > 10 and all("cuda" in case for case in cases)
    assert any("test_a_graph_gives_the_numbers_of_the_plain_update" in case for case in cases)


def test_the_tests_of_the_gpu_need_pytest_alone():
    """A rented machine has no other package of the tests: a file that asked for one would end the collection."""
    files = [
        str(path) for path in (ROOT / "tests").rglob("test_*.py") if re.search(r"tests\.devices", path.read_text())
    ]
    blocked = "import sys; sys.modules['hypothesis'] = None; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    flags = ["-c", "/dev/null", "--rootdir", ".", "-p", "no:cacheprovider", "--collect-only", "-q", "-m", "gpu"]
    command = [sys.executable, "-c", blocked, *flags, *files]
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    found = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-2000:]


def run(frames: float, updates: float, batch_size: int = 512, env: str = "PongNoFrameskip-v4") -> dict[str, object]:
    rates = {"frames_per_second": frames, "updates_per_second": updates}
    return rates | {"batch_size": batch_size, "env": env}


def test_goals_are_reached_by_what_they_ask_for_alone():
    parts = {"together-cpu": run(130_000, 18), "together-cuda": run(110_000, 900), "other": run(50, 2000, 64)}
    parts["another"] = run(10**6, 10**4, env="CartPole-v1")
    assert [value for _, _, value in gpu_report.goals(parts)] == ["900: missed", "110,000: missed", "not measured"]
    parts |= {"together-cpu": run(130_000, 19), "pong": run(100, 1000) | {"return_reached_after_seconds": 80.0}}
    assert [value for _, _, value in gpu_report.goals(parts)] == ["1,000: reached", "130,000: reached", "80: reached"]
    parts["pong"] |= {"return_reached_after_seconds": None, "seconds": 140.0, "best_return": 17.0}
    assert [value for _, _, value in gpu_report.goals(parts)][
        2
    ] == "not reached in 140 s of PongNoFrameskip-v4: best 17.0"
    assert gpu_report.faster(parts) == "cpu"
    assert gpu_report.faster(parts | {"together-mps": run(140_000, 900)}) == "mps"


def test_what_is_missing_is_named_with_its_version(tmp_path, monkeypatch):
    (tmp_path / "requirements.txt").write_text("numpy==2.4.6\npyzmq==1  # zmq\nnot-there==3.1\ntensorboard==2\n")
    (tmp_path / "requirements-dev.txt").write_text("pytest==1\npytest-not-there==1\n")
    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)
    assert gpu_report.missing() == ["not-there==3.1"]


def test_a_part_that_was_killed_while_it_wrote_is_left_out(tmp_path, capsys):
    (tmp_path / "cores.json").write_text('{"one": 1}')
    (tmp_path / "profile.part").write_text('{"two": [1,')
    assert gpu_report.read_parts(tmp_path) == {"cores": {"one": 1}}
    assert "profile.part is left out" in capsys.readouterr().err


def test_wheels_are_wanted_in_another_version_but_never_torch(tmp_path):
    here = f"numpy-{np.__version__}-cp311-cp311-linux_x86_64.whl"
    for name in (here, "msgspec-0.0.1-py3-none-any.whl", "torch-9.9-py3-none-any.whl", "not_there-1-py3-none-any.whl"):
        (tmp_path / name).touch()
    assert [wheel.name.split("-")[0] for wheel in gpu_report.wanted_wheels(tmp_path)] == ["msgspec", "not_there"]


def test_a_peers_best_variant_counts_and_each_peer_has_a_ratio():
    systems = [end_to_end.SYSTEMS[name] for name in ("impala", "ppo", "monobeast")]

    def measured(system, frames, variant="", threads=0):
        counts = dict.fromkeys(end_to_end.FIGURES, 1.0)
        return counts | {"system": system.name, "variant": variant, "threads": threads, "frames_per_second": frames}

    ours, ppo, monobeast = systems
    measurements = [measured(ours, frames) for frames in (900.0, 1200.0, 1000.0)]
    measurements += [measured(ppo, 100.0, "one", 1), measured(ppo, 250.0, "one"), measured(ppo, 200.0, "each")]
    rows = end_to_end.summarize([*measurements, measured(monobeast, 125.0)], systems)
    assert [row["frames_per_second"] for row in rows] == [1000, 250, 125]
    assert rows[0]["frames_to_peers"] == {ppo.name: 4.0, monobeast.name: 8.0}
    assert rows[0]["to_best_peer"]["frames"] == 4
    assert f"frames/s of {ours.name}: 4.00 of {ppo.name}, 8.00 of {monobeast.name}" in end_to_end.table(rows)


@pytest.mark.parametrize(
    ("flags", "samples"),
    [
        (["--samples-per-insert", "2.5"], 2.5),
        (["--agent", "impala"], 1),
        (["--agent", "impala", "--mix", "queue=1/8", "uniform=7/8", "--batch-size", "8"], 8),
        (["--agent", "impala", "--mix", "uniform=1", "--samples-per-insert", "3"], 3),
    ],
)
def test_a_whole_run_is_in_balance_at_the_samples_of_all_its_tables(flags, samples):
    assert whole_run.samples_wanted(parse(RunCommand, flags)) == pytest.approx(samples)


def test_ratios_are_to_the_same_setting_and_to_the_better_peer():
    settings = [learner.Setting("ours", "paper", 128), learner.Setting("eager", "paper", 128)]
    settings += [learner.Setting("eager", "paper", 32), learner.Setting("eager", "two-cores", 32)]
    settings += [learner.Setting("sb3", "-", 128, threads) for threads in (1, 0)]
    seconds = [1.0, 2.0, 1.0, 9.0, 8.0, 4.0]
    rows = [
        learner.row_of(setting, [{"steps": 10, "seconds": spent, "cpu_seconds": 2 * spent}])
        for setting, spent in zip(settings, seconds, strict=True)
    ]
    rows = learner.with_ratios(rows, "samples_per_cpu_second")
    assert rows[0]["samples_per_second"] == 1280
    assert rows[0]["samples_per_cpu_second"] == 640
    assert rows[0]["ratios"] == {"eager": 2.0, "eager of 32": 4.0, "sb3": 4.0}
    failed = learner.row_of(settings[0], [{"steps": 10, "seconds": 1.0, "cpu_seconds": 1.0}, {"failed": "status 1: x"}])
    assert failed["failed"] == "status 1: x"
    assert "FAILED: status 1: x" in learner.table([failed])
    assert msgspec.json.encode(rows)


def test_a_presets_name_tells_what_is_added_to_it():
    usual, nature, quantiles, munchausen = (
        learner.Setting("ours", f"two-cores{end}", 64).command() for end in ("", "-nature", "-quantiles", "-munchausen")
    )
    assert (nature.network.hidden_size, quantiles.network.quantiles, munchausen.update.munchausen) == (512, 32, 0.9)
    assert quantiles == dataclasses.replace(usual, network=dataclasses.replace(usual.network, quantiles=32))
    assert munchausen == dataclasses.replace(usual, update=dataclasses.replace(usual.update, munchausen=0.9))


def test_losses_that_the_plain_step_does_not_have_are_not_compared_with_it():
    options = learner.Options(presets=("two-cores", "two-cores-quantiles", "two-cores-munchausen"), batch_sizes=(64,))
    settings = learner.settings_of(options)
    assert [setting.preset for setting in settings if setting.kind == "eager"] == ["two-cores"]
    assert [setting.preset for setting in settings if setting.kind == "ours"] == list(options.presets)


@pytest.mark.parametrize("mix", [("queue=1",), ("queue=1/4", "uniform=3/4"), ("uniform=1",)])
@pytest.mark.parametrize("torso", ["shallow", "deep"])
def test_the_plain_peer_makes_impalas_update(mix, torso, monkeypatch):
    monkeypatch.setattr(plain_learner, "autocast_for", lambda device, spec: contextlib.nullcontext)
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    update = impala_config.ImpalaUpdate(4, mix=mix, max_gradient_norm=1e9, trust_region=0.01)
    network = ActorCriticConfig(torso, (4, 5, 6), 16)
    command = dataclasses.replace(default_command(LearnerCommand, "impala"), update=update, network=network)
    spec = learner_work.stream_of(command)
    unrolls = [random_unroll(spec, rng) for _ in range(4)]
    ours = impala.make_learner(command.algorithm, network, update, spec, torch.device("cpu"))
    plain = PlainActorCritic(command, spec, unrolls, torch.device("cpu"))
    names = ours.acting_tensors().keys()
    plain_tensors = dict(zip(names, plain.network.state_dict().values(), strict=True))
    for name, tensor in ours.acting_tensors().items():
        assert tensor.shape == plain_tensors[name].shape, name
        tensor.copy_(plain_tensors[name])

    wants = wants_of(command)
    store = UnrollStore(spec, 4, wants, torch.device("cpu"), num_batches=1)
    for number, unroll in enumerate(unrolls):
        store.commit(store.begin(number), unroll)
    samples, batches, keys = {}, {}, np.arange(4)
    for want in wants:
        own, keys = keys[: want.batch_size], keys[want.batch_size :]
        samples[want.table] = Sample(own, np.ones(len(own)), np.ones(len(own), np.float32))
        batches[want.table] = store.gather(want.table, own, samples[want.table].weights).batch

    outcome = ours.gradients(batches, lambda: None)
    assert mix == ("queue=1",) or 0 < outcome.metrics["rejected_share"] < 1
    expected = [parameter.grad for parameter in ours.online["network"].parameters()]
    loss = plain.update(samples)
    assert loss == pytest.approx(float(outcome.metrics["loss"] * ours.gradient[-1]), rel=1e-4)
    for name, gradient, parameter in zip(names, expected, plain.network.parameters(), strict=True):
        scale = gradient.abs().max()
        assert (parameter.grad - gradient).abs().max() <= 3e-3 * scale, name


def random_unroll(spec, rng):
    """An unroll without a start in it; its policy is like that of a new network."""
    frames = rng.integers(256, size=(spec.unroll_frames, *spec.frame_shape), dtype=np.uint8)
    logits = torch.from_numpy(rng.normal(scale=0.15, size=(spec.unroll_steps, spec.num_actions)))
    extras = learner_work.extras_of(spec) | {"behavior_log_probs": log_probs(logits).numpy().astype(np.float16)}
    steps = spec.unroll_steps
    discounts = (rng.random(steps) > 0.1).astype(np.float32)
    actions, rewards = rng.integers(spec.num_actions, size=steps, dtype=np.int32), rng.normal(size=steps)
    return Unroll(frames, actions, rewards.astype(np.float32), discounts, np.zeros(steps + 1, bool), extras)


def test_each_kind_of_selection_has_a_cost():
    found = selection.costs(num_batches=2)
    assert {name.split()[1] for name in found if name.startswith("keep")} == {
        *("attentive", "elite-1", "elite-2", "elite-3", "elite-4")
    }
    assert len(found) == 1 + 3 + 4 + 5 + 5 and all(np.isfinite(list(found.values())))


NIGHT = ROOT / "benchmarks/experiments/atari-night.toml"
OF_EXTRAS = {NIGHT.with_stem(name) for name in ("minatar", "robots", "robots-ratio")}  # packages that tests do without
SMALL_EXPERIMENTS = sorted({*NIGHT.parent.glob("*.toml")} - {NIGHT} - OF_EXTRAS)


@pytest.mark.parametrize("path", SMALL_EXPERIMENTS, ids=lambda path: path.stem)
def test_all_runs_of_an_experiment_make_an_update_after_as_many_new_unrolls(path):
    file = read_file(path)
    runs = runs_of(file, [])
    assert len(runs) == len(file.seeds) * len(file.variants)
    assert file.directory == f"runs/{path.stem}"
    new_unrolls = set()
    for run in runs:
        command = run.command
        assert command.reproducible or path.stem in ("laser-pong", "impact-pong")  # their minutes count
        parts = parts_of(command.update.mix) if command.agent in ("impala", "impact") else ()
        online = sum(part.share for part in parts if part.is_online)
        new_unrolls.add(command.update.batch_size * (online or 1 / command.replay.samples_per_insert))
    others = {
        "corridor": 4,
        "laser-breakout": 4,
        "laser-pong": 1,
        "impact-pong": 1,
        "replay-states": 4,
        "memory-catch-r2d2": 4,
    }
    assert new_unrolls == {others.get(path.stem, 8)}


@pytest.mark.parametrize("path", sorted(OF_EXTRAS), ids=lambda path: path.stem)
def test_experiments_with_packages_of_their_own_have_their_name(path):
    file = read_file(path)
    assert file.directory == f"runs/{path.stem}" and file.variants and file.seeds


def test_the_atari_row_is_planned_with_one_set_of_flags():
    """Its rate falls to the end of each game, and the last network plays 30 games with an epsilon of 0.001."""
    file = read_file(NIGHT)
    runs = runs_of(file, [])
    assert [run.variant for run in runs] == list(file.variants) and len(runs) == 8
    assert all(list(own) == ["env"] for own in file.variants.values()), "no flag for a single game"
    for run in runs:
        command, row = run.command, run.command.update
        assert command.env.env.endswith("NoFrameskip-v4") and not command.reproducible
        assert (command.learning.total_frames, command.evaluation.episodes) == (40_000_000, 30)
        assert command.algorithm.evaluation_epsilon == 0.001
        assert Schedule.of(row.learning_rate) == (2.5e-4, 1e-5, 0, "linear")
