"""Draws the charts of docs/ from the figures in docs/results: `python -m benchmarks.charts [DIRECTORY]`."""

import csv
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, StrMethodFormatter

from apexrl.tools.picture import Line, Panel, picture_of
from apexrl.tools.run_results import read_curve

RESULTS = Path(__file__).parents[1] / "docs" / "results"
OURS = "apexrl"
COLOURS = {OURS: "C0", "Reverb": "C1"}  # all others are gray
GAMES = ("Pong", "Breakout", "Seaquest", "noise")
PEERS = {"ours": OURS, "reverb": "Reverb", "pickle": "pickle, one lock"}
SWEEPS = (  # curves in files of their names
    *("laser-catch", "laser-cartpole", "laser-breakout", "switching-catch"),
    *("memory-catch", "lstm-corridor", "replay-states"),
)


MIXES = {"queue": "IMPALA, queue=1", "laser": "LASER, queue=1/8 uniform=7/8"}
RIGHT = 0.595  # of the policy that V-trace converges to, exact
STEP_SECONDS = 2.5
ROBOTS = {  # the label of a curve, and its place
    "robots-half-cheetah-sac-core": ("apexrl", 22, 8200),
    "robots-half-cheetah-sb3-sac": ("Stable-Baselines3 2.9.2", 22, 5300),
}
ZOO_RETURN = 9535  # of the RL Zoo's SAC after a million steps, as its table has it


class Row(NamedTuple):
    """Panels beside each other, one for each axis, with the same curves."""

    title: str
    axes: Sequence[str]  # minutes, frames
    labels: Mapping[str, str]  # of curves, by the names of their files


COMPARISONS = {  # the rows of charts, by the names of their files
    "curves": [Row("", ("minutes", "frames"), {
        "pong-ape-x-seed0": "Ape-X", "pong-impala": "IMPALA", "pong-laser-seed0": "LASER, 3 of 4 replayed"})],
    "games": [
        Row(title, ("frames",), {f"games-{name}-{file}": label for file, label in {
            "ape-x": "Ape-X", "sb3-dqn": "SB3 DQN", "impact": "IMPACT"}.items()})
        for title, name in {"Breakout": "breakout", "SpaceInvaders": "spaceinvaders", "BeamRider": "beamrider"}.items()
    ],
    "games-breakout": [Row("", ("frames",), {
        "games-breakout-ape-x": "Ape-X, one rate", "games-breakout-falling": "Ape-X, a rate that falls over 16 M",
        "games-breakout-ape-x-hour": "Ape-X, an hour of two cores",
        "games-breakout-impact": "IMPACT, a rate that falls over 12 M, one core",
        "games-breakout-impact-hour": "IMPACT, an hour of two cores",
        "games-breakout-impact-night": "IMPACT, 145 minutes of one core"})],
    "games-beamrider-quantiles": [Row("", ("minutes", "frames"), {
        "games-beamrider-ape-x-core": "Ape-X", "games-beamrider-quantiles": "Ape-X with 32 quantiles",
        "games-beamrider-quantiles-night": "Ape-X with 32 quantiles, 145 minutes"})],
    **{
        "games-" + "-".join(titles).lower(): [
            Row(title, ("minutes", "frames"), {f"games-{title.lower()}-quantiles": "Ape-X with 32 quantiles"})
            for title in titles
        ]
        for titles in (("Seaquest", "Enduro"), ("SpaceInvaders", "Qbert"))
    },
    "games-qbert": [Row("", ("minutes", "frames"), {
        "games-qbert-quantiles": "Ape-X with 32 quantiles", "games-qbert-impact-night": "IMPACT"})],
    "games-roadrunner-spaceinvaders": [
        Row(title, ("minutes", "frames"), {
            f"games-{name}-{other}": label, f"games-{name}-impact-night": "IMPACT, 135 minutes of one core"})
        for title, name, other, label in (
            ("Road Runner", "roadrunner", "impact", "IMPACT, 400 seconds of a GPU"),
            ("Space Invaders", "spaceinvaders", "quantiles", "Ape-X with 32 quantiles, one core"))
    ],
    "games-breakout-gpu": [Row("", ("minutes", "frames"), {
        "games-breakout-gpu": "Ape-X", "games-breakout-gpu-impact": "IMPACT"})],
    "robots-half-cheetah-impact": [Row("", ("minutes", "frames"), {
        "robots-half-cheetah-impact": "IMPACT", "robots-half-cheetah-sb3-ppo": "SB3 PPO"})],
    "robots-bipedal": [
        Row(f"batches of {size}", ("minutes",), {f"robots-bipedal-{size}-seed{seed}": f"seed {seed}" for seed in seeds})
        for size, seeds in {64: (0, 1, 2), 256: (0, 1, 2, 3)}.items()
    ],
    "robots-walkers": [
        Row(title, ("minutes",), {
            f"robots-{name}-sac-core": "SAC, seed 1", f"robots-{name}-sac-core-seed4": "SAC, seed 4",
            **{f"robots-{name}-impact-seed{seed}": f"IMPACT, seed {seed}" for seed in (0, 1)}})
        for title, name in {"Walker2d-v5": "walker2d", "Hopper-v5": "hopper"}.items()
    ],
    "robots-seeds": [
        Row("Ant-v5, SAC", ("minutes",), {
            f"robots-ant-sac{'' if seed == 0 else f'-seed{seed}'}": f"seed {seed}" for seed in range(5)}),
        Row("Walker2d-v5, IMPACT", ("minutes",), {
            f"robots-walker2d-impact-seed{seed}": f"seed {seed}" for seed in range(5)}),
    ],
    "robots-sb3-sac": [
        Row(title, ("minutes", "frames"), {f"robots-{name}-sac-core": OURS, f"robots-{name}-sb3-sac": "SB3"})
        for title, name in {"HalfCheetah-v5": "half-cheetah", "Walker2d-v5": "walker2d", "Hopper-v5": "hopper"}.items()
    ],
}  # fmt: skip


class Bars(NamedTuple):
    """One pair of axes with bars: a group of bars for each work, a colour for each system."""

    title: str
    values: Mapping[str, Mapping[str, float]]  # by system, then by group


def speeds() -> list[Bars]:
    """Returns the speeds of ours and of others; larger is better."""
    rows = read("replay")["side_by_side"]["rows"]
    found = {(row["peer"], row["game"], row["work"]): row for row in rows}

    def replay(title: str, work: str, metric: str) -> Bars:
        own = "insert, compressing" if work == "insert" else work  # the others' clients make their chunks, too
        works = {peer: own if peer == "ours" else work for peer in PEERS}
        values = {
            name: {game: found[peer, game, works[peer]][metric] for game in GAMES} for peer, name in PEERS.items()
        }
        return Bars(title, values)

    loops = of_best(
        "agent_steps_per_cpu_second",
        (row for row in read("actor")["measurements"] if row["kind"] == "loop" and row["game"] == "Pong"),
    )
    actor = {
        f"{OURS}, Nature's network": loops["ours, Nature's size"], "SB3 DQN, 8 envs": loops["SB3 DQN, 8 envs"],
        "SB3 DQN, 1 env": loops["SB3 DQN, 1 env"], "CleanRL's style": loops["CleanRL's style"],
    }  # fmt: skip
    updates = [row for row in read("learner")["rows"] if row["batch_size"] == 512]
    learner = {
        f"{OURS}, Nature's network": rate(updates, kind="ours", preset="paper"),
        "SB3 DQN": rate(updates, kind="sb3"), "plain float32": rate(updates, kind="eager", preset="paper"),
    }  # fmt: skip
    whole = of_best("frames_per_second", read("end-to-end")["measurements"])
    system = {
        OURS: whole["ours"], f"{OURS}, Nature's network": whole["ours, Nature's size"],
        f"{OURS}, SB3's replay ratio": whole["ours, 8 samples, Nature's size, 512"], "SB3 DQN": whole["SB3 DQN, 1 env"],
    }  # fmt: skip
    return [
        replay("replay service: insert, transitions/s", "insert", "transitions_per_second"),
        replay("replay service: sample, batches of 512/s", "sample", "batches_per_second"),
        replay("replay service: insert while sampling, transitions/s", "together", "transitions_per_second"),
        Bars("actor on Pong: steps per CPU-second", {name: {"": value} for name, value in actor.items()}),
        Bars("learner, batch 512: samples per CPU-second", {name: {"": value} for name, value in learner.items()}),
        Bars("whole system on Pong: frames/s", {name: {"": value} for name, value in system.items()}),
    ]


def read(name: str) -> Any:
    """Returns the raw figures of a benchmark."""
    return json.loads((RESULTS / f"{name}-benchmark.json").read_text())


def of_best(metric: str, rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the median of each system over its repeats, at its better number of threads."""
    repeats: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        repeats.setdefault(row["system"], {}).setdefault(row["threads"], []).append(row[metric])
    return {system: max(map(statistics.median, by_threads.values())) for system, by_threads in repeats.items()}


def rate(rows: Iterable[Mapping[str, Any]], **wanted: str) -> float:
    """Returns the samples per CPU-second of a kind of update, at its better number of threads."""
    return max(row["samples_per_cpu_second"] for row in rows if wanted.items() <= row.items())


def draw(axes: Axes, bars: Bars) -> None:
    """Draws one pair of axes: a label for each group, or where there is one group, for each system."""
    groups = list(next(iter(bars.values.values())))
    height = 0.8 / len(bars.values)
    for i, (system, values) in enumerate(bars.values.items()):
        positions = [group + i * height for group in range(len(groups))]
        thickness = height if len(groups) > 1 else 0.7 * height
        drawn = axes.barh(positions, list(values.values()), thickness, color=COLOURS.get(system.split(",")[0], "C7"))
        axes.bar_label(drawn, [f" {value:,.0f}" for value in values.values()], fontsize=8)
    ticks = [group + height for group in range(len(groups))]
    if len(groups) == 1:
        ticks, groups = [i * height for i in range(len(bars.values))], list(bars.values)
    axes.set_yticks(ticks, groups)
    axes.invert_yaxis()
    axes.set_title(bars.title, fontsize=9, loc="left")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.tick_params(labelsize=8)
    axes.margins(x=0.2)
    axes.spines[["top", "right"]].set_visible(False)


def draw_speeds(path: Path) -> None:
    """Writes the chart of the speeds."""
    figure = Figure(figsize=(9.5, 8.5))
    grid = figure.subplots(3, 2)
    for axes, bars in zip(grid.flat, speeds(), strict=True):
        draw(axes, bars)
    figure.legend([grid[0, 0].containers[i] for i in range(3)], PEERS.values(), ncols=3, fontsize=9, loc="upper center")
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    figure.savefig(path, dpi=100)


def draw_comparison(path: Path, rows: Iterable[Row]) -> None:
    """Writes a chart of learning curves: mean return over minutes or frames, with the range of the games."""
    panels = []
    for row in rows:
        panels.append([Panel(row.title, axis, []) for axis in row.axes])
        for name, label in row.labels.items():
            curve = read_curve(RESULTS / f"{name}.csv")
            positions = {"minutes": curve.seconds / 60, "frames": curve.frames}
            for panel in panels[-1]:
                panel.lines.append(Line(label, positions[panel.position_name], curve.returns, curve.worst, curve.best))
    path.write_bytes(picture_of(panels, "evaluation return: mean, worst to best game"))


def draw_robot(path: Path) -> None:
    """Writes the README's chart, as high as the moving picture beside it: SAC on HalfCheetah, of ours and of SB3's."""
    figure = Figure(figsize=(5.4, 3.15))
    axes = figure.subplots()
    for (name, (label, *place)), colour in zip(ROBOTS.items(), ("C0", "C1"), strict=True):
        curve = read_curve(RESULTS / f"{name}.csv")
        axes.plot(curve.seconds / 60, curve.returns, color=colour, marker="o", markersize=3.5, linewidth=1.8)
        axes.text(*place, label, color=colour, fontsize=9, va="center")
    axes.axhline(ZOO_RETURN, color="C7", linewidth=1, linestyle="dashed")
    axes.text(0, ZOO_RETURN + 150, "RL Zoo's SAC after a million steps", color="C7", fontsize=8)
    axes.set_title("SAC on HalfCheetah-v5: return over minutes, one core each", fontsize=10, loc="left")
    axes.set(xticks=range(0, 46, 5), ylim=(-400, 11_000))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def draw_ratio(path: Path) -> None:
    """Writes the chart of samples an insert: mean return over minutes of each number, a panel for each robot."""
    runs: dict[str, dict[int, list[tuple[float, float]]]] = {}
    with (RESULTS / "robots-ratio.csv").open() as lines:
        for row in csv.DictReader(lines):
            if row["variant"].isdigit():
                points = runs.setdefault(row["env"], {}).setdefault(int(row["variant"]), [])
                points.append((float(row["seconds"]) / 60, float(row["mean"])))
    panels = []
    for env, curves in runs.items():
        panels.append(Panel(env, "minutes", []))
        for ratio, points in sorted(curves.items()):
            minutes, values = np.array(points).T
            nothing = np.full_like(values, np.nan)
            panels[-1].lines.append(Line(f"{ratio} samples an insert", minutes, values, nothing, nothing))
    path.write_bytes(picture_of([[panel] for panel in panels], "mean return"))


def draw_corridor(path: Path) -> None:
    """Writes the chart of the corridor: the probability of right over time, with the range over the seeds."""
    runs: dict[tuple[int, str], dict[str, list[tuple[float, float]]]] = {}
    with (RESULTS / "corridor.csv").open() as lines:
        for row in csv.DictReader(lines):
            seeds = runs.setdefault((int(row["actor_processes"]), row["mix"]), {})
            seeds.setdefault(row["seed"], []).append((float(row["seconds"]), float(row["probability_right"])))
    panels = {count: Panel(f"actor processes: {count}", "seconds", []) for count, _ in sorted(runs)}
    for (count, mix), seeds in sorted(runs.items(), key=lambda run: list(MIXES).index(run[0][1])):
        curves = [np.array(points).T for points in seeds.values()]
        times = np.arange(0, min(seconds[-1] for seconds, _ in curves), STEP_SECONDS)
        values = np.array([np.interp(times, *curve) for curve in curves])
        line = Line(
            MIXES[mix], times, values.mean(axis=0), values.min(axis=0), values.max(axis=0), [*map(tuple, curves)]
        )
        panels[count].lines.append(line)
    for panel in panels.values():
        exact = np.full(2, RIGHT)
        panel.lines.append(Line(f"exact, {RIGHT}", np.array([0, panel.lines[-1].positions[-1]]), exact, exact, exact))
    path.write_bytes(picture_of([[*panels.values()]], "probability of right"))


def draw_sweep(name: str, path: Path) -> None:
    """Writes the chart of a sweep: mean return over frames of each variant, with its interval over seeds."""
    panel = Panel("", "frames", [*variants(RESULTS / f"{name}.csv")])
    path.write_bytes(picture_of([[panel]], "return: mean over the seeds, 95 %"))


def variants(path: Path) -> Iterator[Line]:
    """Yields a curve of each group of a file with the columns group, frames, return, low and high."""
    groups: dict[str, list[list[float]]] = {}
    with path.open() as lines:
        for row in csv.DictReader(lines):
            groups.setdefault(row["group"], []).append(
                [float(row[name]) for name in ("frames", "return", "low", "high")]
            )
    for group, points in groups.items():
        yield Line(group, *np.array(points).T)


if __name__ == "__main__":
    if sys.argv[2:] or sys.argv[-1].startswith("-"):
        sys.exit(__doc__)
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    draw_speeds(folder / "speeds.png")
    for chart, rows_of_chart in COMPARISONS.items():
        draw_comparison(folder / f"{chart}.png", rows_of_chart)
    draw_robot(folder / "robots-half-cheetah.png")
    draw_ratio(folder / "robots-ratio.png")
    draw_corridor(folder / "corridor.png")
    for sweep in SWEEPS:
        draw_sweep(sweep, folder / f"{sweep}.png")
