"""The runs of a sweep's file, and which of several values a run gets."""

import dataclasses
import math

import numpy as np
import pytest

from apexrl.config.commands import RunCommand
from apexrl.config.flags import Asked, default_command, with_preset, with_sections
from apexrl.errors import ConfigError
from apexrl.running.plan import make_plan
from apexrl.tools.sweep_plan import Span, SweepFile, read_file, runs_of

SMALL = {"env": "Catch-v0", "max-seconds": 5}


def write(tmp_path, text):
    path = tmp_path / "rates.toml"
    path.write_text(text)
    return path


def test_a_file_becomes_runs_with_the_variants_of_a_seed_together(tmp_path):
    path = write(
        tmp_path,
        'directory = "runs/x"\nseeds = [3, 1]\n[flags]\nenv = "Catch-v0"\nmax_seconds = 5\ntensorboard = false\n'
        "channels = [8, 8, 8]\n[variants.slow]\nlearning-rate = 1e-4\n[variants.plain]\nevaluator = true\n",
    )
    runs = runs_of(read_file(path), [])
    assert [str(run.directory) for run in runs] == [
        f"runs/x/{name}" for name in ("slow-seed3", "plain-seed3", "slow-seed1", "plain-seed1")
    ]
    common = "--env Catch-v0 --max-seconds 5 --no-tensorboard --channels 8 8 8"
    assert " ".join(runs[2].arguments) == f"{common} --learning-rate 0.0001 --seed 1"
    assert " ".join(runs[1].arguments) == f"{common} --evaluator --seed 3"
    assert runs[0].command.update.learning_rate == 1e-4 and runs[0].command.network.channels == (8, 8, 8)


def test_a_file_without_variants_is_one_of_its_own_name(tmp_path):
    path = write(tmp_path, 'directory = "runs/x"\nseeds = [0]\n[flags]\nenv = "Catch-v0"\ntotal-updates = 5\n')
    assert [(run.variant, run.directory.name) for run in runs_of(read_file(path), [])] == [("rates", "rates-seed0")]


RANGES = """directory = "runs/x"
seeds = [0, 1]
samples = {samples}
[flags]
env = "Catch-v0"
max-seconds = 5
learning_rate = {{low = 1e-5, high = 1e-3, log = true}}
[variants.drawn]
{own}
[variants.fixed]
learning-rate = 0.001
"""


def test_each_sample_of_a_range_is_a_variant_with_all_seeds(tmp_path):
    runs = runs_of(read_file(write(tmp_path, RANGES.format(samples=3, own="batch-size = {low = 8, high = 64}"))), [])
    assert [run.directory.name for run in runs] == [
        f"{name}-seed{seed}" for seed in (0, 1) for name in ("drawn-0", "drawn-1", "drawn-2", "fixed")
    ]
    updates = [run.command.update for run in runs[:4]]
    rates, sizes = [update.learning_rate for update in updates], [update.batch_size for update in updates]
    assert len(set(rates[:3])) == 3 and all(1e-5 <= rate <= 1e-3 for rate in rates) and rates[3] == 0.001
    assert all(8 <= size <= 64 for size in sizes[:3]) and len(set(sizes[:3])) > 1
    assert [run.command.update for run in runs[:4]] == [run.command.update for run in runs[4:]]
    more = runs_of(read_file(write(tmp_path, RANGES.format(samples=4, own=""))), [])
    assert [run.command.update.learning_rate for run in more[:3]] == rates[:3], "neither depends on the others"


def test_the_values_of_a_range_are_spread_over_it():
    exponents = [math.log10(Span(1e-6, 1.0, True).value("--x", sample)) for sample in range(3000)]
    assert np.histogram(exponents, 6, (-6, 0))[0] == pytest.approx(500, abs=100)
    assert np.bincount([Span(3, 5).value("--x", sample) for sample in range(3000)])[3:] == pytest.approx(1000, abs=150)


@pytest.mark.parametrize(
    ("value", "samples", "complaint"),
    [
        (Span(1, 2), 0, "the variant v: --batch-size is a range: give samples = N beside seeds"),
        (3, 2, "samples = 2, and no flag has a range"),
        (Span(2, 2), 2, "--batch-size: low 2 and high 2 make no range$"),
        (Span(0, 2, True), 2, "--batch-size: low 0 and high 2 make no range for log"),
    ],
)
def test_a_range_that_makes_no_sense_is_told(value, samples, complaint):
    with pytest.raises(ConfigError, match=complaint):
        runs_of(SweepFile("runs/x", (0,), SMALL, {"v": {"batch_size": value}}, samples), [])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("seeds = [0]", "directory"),
        ('directory = "x\\u0000"\nseeds = [1]', "directory"),
        ('directory = "x"\nseeds = []', "seeds"),
        ('directory = "x"\nseeds = [-1]', "seeds"),
        ('directory = "x"\nseeds = [0, 9223372036854775808]', "seeds"),
        ('directory = "x"\nseeds = [1, 1]', "each seed once"),
        ('directory = "x"\nseeds = [1]\nthreshold = nan', "threshold nan makes no sense"),
        ('directory = "x"\nseeds = [1]\nseed = 3', "seed"),
        ('directory = "x"\nseeds = [1]\n[variants."a b"]', "'a b' names no directory"),
        ('directory = "x"\nseeds = [1]\n[variants."../x"]', "names no directory"),
        ('directory = "x"\nseeds = [1]\n[flags]\nenv = 2020-01-01', "flags"),
        ("directory =", "rates.toml"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_a_line(tmp_path, text, complaint):
    with pytest.raises(ConfigError, match=complaint) as raised:
        read_file(write(tmp_path, text))
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml"):
        read_file(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"lerning-rate": 1.0}, "no flag --lerning-rate, did you mean --learning-rate"),
        ({"learning-rate": "fast"}, "command line is refused, see above: .*--learning-rate fast"),
        ({"learning-rate": -1.0}, "--learning-rate -1.0 makes no sense"),
        ({"env": "Nothing-v0"}, "Nothing"),
        ({"max-seconds": 0}, "it never ends: give max-seconds"),
        ({"seed": 3}, "--seed cannot be given here"),
        ({"run_dir": "x"}, "--run-dir cannot be given here"),
        ({"guest": "runs/x"}, "--guest cannot be given here"),
        ({"smoke": True}, "--smoke cannot be given here"),
        ({"name": "mine"}, "--name cannot be given here"),
        ({"checkpoint": "x"}, "--checkpoint does not train"),
        ({"journal-dir": "/fast/j"}, "--journal-dir: each run of a sweep keeps its own experience"),
        ({"total-frames": 5, "total_frames": 6}, "--total-frames stands there twice, once as total_frames"),
    ],
)
def test_a_variant_that_cannot_run_is_named_before_anything_starts(flags, complaint):
    file = SweepFile("runs/x", (0,), SMALL, {"good": {}, "bad": flags})
    with pytest.raises(ConfigError, match=f"^the variant bad: .*{complaint}"):
        runs_of(file, [])


def test_flags_of_the_sweep_itself_are_refused_on_the_command_line():
    for given in (["--resume=x"], ["--run_dir", "x"]):
        with pytest.raises(ConfigError, match="cannot be given here"):
            runs_of(SweepFile("runs/x", (0,), SMALL, {"v": {}}), given)


LAYERS = ["command line", "variant", "flags", "resumed", "preset"]


@pytest.mark.parametrize("top", range(len(LAYERS) + 1))
def test_the_value_of_a_run_is_the_first_that_is_given(top):
    """Command line, the sweep file's variant, its [flags], the resumed configuration, the preset, the default."""
    default = default_command(RunCommand)
    preset = with_preset(default, "small")
    values = [0.4, 0.3, 0.2, 0.1, preset.update.learning_rate, default.update.learning_rate]
    assert len(set(values)) == 6, "each layer can be told from the others"
    given = LAYERS[top:]
    file = SweepFile(
        "runs/x",
        (0,),
        SMALL | ({"learning-rate": 0.2} if "flags" in given else {}),
        {"v": {"learning-rate": 0.3} if "variant" in given else {}},
    )
    # The paper's preset of this field is the default.
    named = [] if "resumed" in given else ["--preset", "small" if "preset" in given else "paper"]
    on_top = ["--learning-rate", "0.4"] if "command line" in given else []
    (run,) = runs_of(file, [*named, *on_top])
    saved = None
    if "resumed" in given:
        saved = with_sections(preset, {"env": {"env": "Catch-v0"}, "update": {"learning_rate": 0.1}})
        saved = dataclasses.replace(saved, run_dir="runs/x/v-seed0")
    command = make_plan(Asked.of(default, run.arguments), saved).command
    assert command.update.learning_rate == values[top]


def test_a_sample_takes_no_other_variants_name():
    variants = {"slow": {"batch_size": Span(8, 64)}, "slow-0": {"batch_size": 8}}
    for order in (variants, dict(reversed(variants.items()))):
        with pytest.raises(ConfigError, match="slow-0 is a variant, and a sample of another one: give one of them"):
            runs_of(SweepFile("runs/x", (0,), SMALL, order, 2), [])


def test_a_flag_decides_between_algorithms_for_vectors_as_it_does_for_a_run():
    flags = {"env": "Pendulum-v1", "preset": "small", "critic-norm": "layer", "max-seconds": 5}
    (run,) = runs_of(SweepFile("runs/x", (0,), flags, {"v": {}}), [])
    assert (run.command.agent, run.command.network.critic_norm) == ("sac", "layer")
