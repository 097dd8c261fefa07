"""Speed of the learner: `python -m benchmarks.learner [--agent impala] [--device cpu|cuda] [--json FILE]`.

Each step gathers a batch from the unroll store, updates, and brings the result back. The store holds played Pong, more
than a CPU's cache. Each kind of step has a process of its own. The kinds take turns, several times over, and the
figures are medians:

  ours         the step of learner.py: prioritized transitions for apex-dqn, whole unrolls for impala
  ours-eager   the same on a GPU, without a captured graph
  eager        the plain float32 step. apex-dqn: the same network, on the same store. impala: plain convolutions over
               NCHW screens, a loop for V-trace and torch's optimizer, on a buffer of stacked screens
               (`benchmarks/peers/plain_vtrace.py`); a test compares its update with ours.
  gather       the unroll store alone
  sb3          beside apex-dqn: `DQN.train` of Stable-Baselines3 with its CnnPolicy and its own buffer, at the better of
               one thread and its default. It has uniform sampling, one step and no dueling streams: less work a sample
               than the preset `paper`.

Ratios are of samples per CPU-second on a CPU, of samples per second on a GPU. A sample is a transition.
"""

import dataclasses
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from apexrl.files import write_json
from benchmarks.learner_work import NO_PRESET, PONG, Setting, stream_of
from benchmarks.replay_frames import make

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 120.0  # added to the time of a process, for loading, filling and warming up
BASE_BATCH = 32
WITHOUT_PEER = ("-quantiles", "-munchausen")  # end the names of presets whose losses the plain step does not have
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """The choice of measurements."""

    agent: Literal["apex-dqn", "impala"] = "apex-dqn"
    """The algorithm."""
    batch_sizes: tuple[int, ...] = ()
    """Transitions in a batch, by default 32 128 512; with impala unrolls of 20, by default 16 32."""
    presets: tuple[
        Literal["two-cores", "two-cores-nature", "two-cores-quantiles", "two-cores-munchausen", "gpu", "paper"], ...
    ] = ()
    """Presets of the networks and optimizers. two-cores-nature: with a network of the size of Nature's, which apex-dqn
    has in its preset paper; two-cores-quantiles and -munchausen: apex-dqn's with 32 quantiles or Munchausen's targets,
    which eager leaves out. impala's preset paper has the deep residual network, which is slow, so ask for it."""
    mixes: tuple[str, ...] = ("queue=1", "queue=1/8 uniform=7/8")
    """impala's mixes, each one word."""
    threads: tuple[int, ...] = (1,)
    """Threads of torch, for ours."""
    kinds: tuple[str, ...] = ("ours", "eager", "gather", "sb3")
    """Kinds of steps: ours, ours-eager, eager, gather, sb3 (beside apex-dqn only)."""
    seconds: float = 3.0
    """Seconds of each measurement, after its warm-up."""
    repeats: int = 3
    """Number of measurements of each setting, in turn."""
    device: str = "cpu"
    """cpu or cuda."""
    transitions: int = 25_600
    """Transitions in the unroll store, and in the buffer of sb3."""
    steps: int = 4000
    """Steps of each of the 8 environments whose frames are used. A larger store repeats them."""
    directory: Path = Path("runs/benchmark-replay")
    """Directory of the played game."""
    peer_python: str = sys.executable
    """Interpreter that has stable-baselines3."""
    json: str = ""
    """File for the figures."""


def settings_of(options: Options) -> list[Setting]:
    """Returns the settings to measure. A kind without a preset of ours occurs once, not once a preset."""
    is_impala = options.agent == "impala"
    mixes = options.mixes if is_impala else ("",)
    batch_sizes = options.batch_sizes or ((16, 32) if is_impala else (32, 128, 512))
    own_presets = options.presets or ("two-cores", "two-cores-nature" if is_impala else "paper")
    settings = []
    for batch_size, mix, kind in itertools.product(batch_sizes, mixes, options.kinds):
        if kind == "sb3" and is_impala:
            continue
        presets = (NO_PRESET,) if kind in ("gather", "sb3") else own_presets
        threads = (1, 0) if kind == "sb3" else options.threads
        settings += [
            Setting(kind, preset, batch_size, t, options.device, options.agent, mix)
            for preset in presets
            for t in threads
            if kind != "eager" or not preset.endswith(WITHOUT_PEER)
        ]
    return settings


def command_of(setting: Setting, frames: Path, options: Options) -> list[str]:
    """Returns the command line of the process that measures a setting."""
    arguments = {"frames": frames, "transitions": options.transitions, "seconds": options.seconds}
    if setting.kind == "sb3":
        command = [options.peer_python, "benchmarks/peers/sb3_train.py"]
        arguments |= {"batch-size": setting.batch_size, "threads": setting.threads, "device": setting.device}
    else:
        command = [sys.executable, "-m", "benchmarks.learner_work"]
        arguments |= {name.replace("_", "-"): value for name, value in dataclasses.asdict(setting).items()}
    return command + [text for name, value in arguments.items() for text in (f"--{name}", str(value))]


def measure(setting: Setting, frames: Path, options: Options) -> Row:
    """Runs one process to its end; returns its figures, or the reason of a failure under `failed`."""
    command, environment = command_of(setting, frames, options), dict(os.environ)
    if setting.threads == 0:
        environment.pop("OMP_NUM_THREADS", None)
    limit = START_SECONDS + options.seconds
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired as error:
        return {"failed": str(error)}
    if done.returncode:
        return {"failed": f"status {done.returncode}: {done.stderr.strip()[-1500:]}"}
    return json.loads(done.stdout.splitlines()[-1])


def row_of(setting: Setting, runs: list[Row]) -> Row:
    """Returns the medians over the runs of a setting."""
    row = dataclasses.asdict(setting)
    failed = [run["failed"] for run in runs if "failed" in run]
    if failed:
        return row | {"failed": failed[0]}
    rate = statistics.median(run["steps"] / run["seconds"] for run in runs)
    per_cpu = statistics.median(run["steps"] / run["cpu_seconds"] for run in runs)
    row |= {
        "updates_per_second": rate,
        "samples_per_second": rate * setting.samples(),
        "samples_per_cpu_second": per_cpu * setting.samples(),
        "runs": runs,
    }
    if setting.kind == "gather":
        row["gathered_gigabytes_per_second"] = rate * gathered_bytes(setting) / 1e9
    return row


def gathered_bytes(setting: Setting) -> int:
    """Returns the bytes of the observations of a step: two of a transition, all of an unroll."""
    steps = stream_of(setting.command()).unroll_steps
    observations = setting.batch_size * (steps + 1 if setting.agent == "impala" else 2)
    return observations * PONG.stacked_frames * PONG.frame_size


def with_ratios(rows: list[Row], basis: str) -> list[Row]:
    """Adds to the rows of our network the ratios of the figure `basis` to eager and to sb3."""

    def ratio(row: Row, **same: object) -> float | None:
        found = [other[basis] for other in rows if basis in other and same.items() <= other.items()]
        return row[basis] / max(found) if found else None

    for row in rows:
        if basis not in row or row["kind"] in ("gather", "sb3"):
            continue
        eager = {"kind": "eager"} | {name: row[name] for name in ("preset", "threads", "mix")}
        row["ratios"] = {
            "eager": ratio(row, batch_size=row["batch_size"], **eager),
            f"eager of {BASE_BATCH}": ratio(row, batch_size=BASE_BATCH, **eager),
            "sb3": ratio(row, batch_size=row["batch_size"], kind="sb3"),
        }
    return rows


def table(rows: list[Row]) -> str:
    """Returns the rows as a table of text."""
    lines = [
        f"{'preset':20} {'mix':21} {'batch':>5} {'threads':>7} {'kind':12} {'updates/s':>10} {'samples/s':>10} "
        f"{'per CPU-s':>10} {'to eager':>9} {'eager 32':>9} {'to sb3':>9}"
    ]
    for row in sorted(rows, key=lambda row: (row["preset"], row["mix"], row["batch_size"], row["threads"])):
        threads = row["threads"] or "default"
        line = f"{row['preset']:20} {row['mix']:21} {row['batch_size']:5} {threads:>7} {row['kind']:12}"
        if "failed" in row:
            lines.append(f"{line} FAILED: {row['failed'].splitlines()[-1]}")
            continue
        line += f" {row['updates_per_second']:10.1f} {row['samples_per_second']:10.0f} "
        line += f"{row['samples_per_cpu_second']:10.0f}"
        for ratio in row.get("ratios", {}).values():
            line += " " * 9 + "-" if ratio is None else f" {ratio:9.2f}"
        if "gathered_gigabytes_per_second" in row:
            line += f"  {row['gathered_gigabytes_per_second']:.1f} GB/s of observations"
        lines.append(line)
    return "\n".join(lines)


def without_missing_peers(options: Options) -> Options:
    """Returns the options; without sb3, and with a printed notice, when it is not installed."""
    check = [options.peer_python, "-c", "import stable_baselines3"]
    if "sb3" in options.kinds and subprocess.run(check, capture_output=True, check=False).returncode:
        print(f"SKIPPED: sb3: {options.peer_python} has no stable-baselines3 (requirements-bench.txt, --peer-python)")
        return dataclasses.replace(options, kinds=tuple(kind for kind in options.kinds if kind != "sb3"))
    return options


def machine_of(options: Options) -> str:
    """Returns the processor or GPU, the version of torch and the date."""
    name = torch.cuda.get_device_name() if options.device != "cpu" else platform.processor() or platform.machine()
    return f"{name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"


def main(options: Options) -> None:
    """Measures and prints. The exit status is 1 when a setting failed."""
    options = without_missing_peers(options)
    frames = make(options.directory, "Pong", options.steps)
    settings = settings_of(options)
    runs: dict[Setting, list[Row]] = {setting: [] for setting in settings}
    machine, basis = machine_of(options), "samples_per_cpu_second" if options.device == "cpu" else "samples_per_second"
    rows: list[Row] = []
    for _ in range(options.repeats):
        for setting in settings:
            runs[setting].append(measure(setting, frames, options))
            rows = with_ratios([row_of(setting, runs[setting]) for setting in settings if runs[setting]], basis)
            if options.json:  # after each measurement: a limit loses no figure
                write_json(Path(options.json), {"machine": machine, "rows": rows})
    print(f"{machine}; ratios of {basis}")
    print(table(rows), flush=True)
    if any("failed" in row for row in rows):
        sys.exit("some settings failed: see the table and the JSON file")


if __name__ == "__main__":
    main(tyro.cli(Options, config=(tyro.conf.OmitArgPrefixes,)))
