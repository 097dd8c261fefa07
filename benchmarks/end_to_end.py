"""Whole systems side by side while they learn: `python -m benchmarks.end_to_end [--minutes M] [--repeats R]`.

Prints frames/s, updates/s, samples/s and resident memory of two systems:

  ours   all that `bash run.sh` starts but TensorBoard: at its own replay ratio, and at SB3's 8 samples a transition;
         with the network of its preset, and with one of the size of Nature's, as SB3's is
  SB3    Stable-Baselines3's DQN with the Atari hyperparameters of its zoo (`benchmarks/peers/sb3_learning.py`), with
         one thread and with its default number of threads; the better counts

Rates are those of a window that begins after some time of learning. One system runs at a time, and in each repeat all
systems take turns.
"""

import dataclasses
import datetime
import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from benchmarks import whole_run
from benchmarks.machine import machine
from benchmarks.peers import running

FRAMES_PER_STEP = 4
NATURE = ("--channels", "32", "64", "64", "--hidden-size", "512")
AS_SB3 = ("--samples-per-insert", "8")
RATES = ("frames", "updates", "samples")


class System(NamedTuple):
    """One of the systems that are compared."""

    name: str
    flags: tuple[str, ...] = ()  # flags of run.sh
    peer_envs: int = 0  # environments of SB3; 0: ours
    threads: tuple[int, ...] = (0,)


SYSTEMS = {
    "ours": System("ours"),
    "ours-nature": System("ours, Nature's size", NATURE),
    "equal": System("ours, 8 samples", AS_SB3),
    "equal-nature": System("ours, 8 samples, Nature's size", (*AS_SB3, *NATURE)),
    "equal-nature-512": System("ours, 8 samples, Nature's size, 512", (*AS_SB3, *NATURE, "--batch-size", "512")),
    "sb3": System("SB3 DQN, 1 env", peer_envs=1, threads=(1, 0)),
    "sb3-8": System("SB3 DQN, 8 envs", peer_envs=8, threads=(1, 0)),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """The choice of measurements."""

    minutes: float = 3.0
    """Minutes of each measurement."""
    settle_seconds: float = 60.0
    """Seconds for which ours learns before its measurement."""
    repeats: int = 1
    """Number of measurements of each system."""
    game: str = "Pong"
    """Atari game."""
    systems: tuple[str, ...] = tuple(SYSTEMS)
    """ours, ours-nature, equal, equal-nature, equal-nature-512 (Ape-X's batch), sb3, sb3-8."""
    flags: tuple[str, ...] = ()
    """More flags of run.sh, for all of ours: `--flags=--no-evaluator`."""
    json: str = ""
    """File for the figures as JSON."""


def measure(system: System, threads: int, options: Options) -> dict[str, Any]:
    """Returns one measurement of a system, with its rates."""
    seconds = 60 * options.minutes
    if system.peer_envs:
        where = ("--game", options.game, "--envs", system.peer_envs)
        found = running.run("benchmarks.peers.sb3_learning", threads, seconds, *where)
    else:
        found = whole_run.run(options.game, (*system.flags, *options.flags), options.settle_seconds, seconds)
    rates = {f"{name}_per_second": found[name] / found["wall_seconds"] for name in RATES}
    rates["samples_per_transition"] = FRAMES_PER_STEP * found["samples"] / found["frames"]
    return {"system": system.name, "threads": threads} | found | rates


def measure_all(systems: list[System], options: Options) -> list[dict[str, Any]]:
    """Measures the systems in turn, `repeats` times over. A system that fails is named and left out of the table."""
    measurements = []
    turns = [(system, threads) for system in systems for threads in system.threads]
    for repeat in range(options.repeats):
        for system, threads in turns:
            try:
                measured = measure(system, threads, options) | {"repeat": repeat}
            except RuntimeError as error:
                print(f"FAILED: {system.name}: {error}", flush=True)
                continue
            measurements.append(measured)
            print(json.dumps(measured), flush=True)
    return measurements


def summarize(measurements: list[dict[str, Any]], systems: list[System]) -> list[dict[str, Any]]:
    """Returns a row for each system: medians, at the number of threads with the most frames/s; ratios to the best peer.

    The best peer is the one with the most frames/s.
    """
    rows = []
    for system in systems:
        candidates = []
        for threads in system.threads:
            same = [m for m in measurements if (m["system"], m["threads"]) == (system.name, threads)]
            if same:
                figures = [name for name in same[0] if name.endswith(("_per_second", "_per_transition", "_bytes"))]
                medians = {name: statistics.median(m[name] for m in same) for name in figures}
                held = statistics.median(m["transitions_held"] for m in same)
                candidates.append({"threads": threads, "transitions_held": held} | medians)
        if candidates:
            best = max(candidates, key=lambda row: row["frames_per_second"])
            rows.append({"system": system.name, "is_peer": bool(system.peer_envs)} | best)
    peers = [row for row in rows if row["is_peer"]]
    if peers:
        best = max(peers, key=lambda row: row["frames_per_second"])
        for row in rows:
            row["to_best_peer"] = {name: row[f"{name}_per_second"] / best[f"{name}_per_second"] for name in RATES}
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as text: each rate and its ratio to the best peer's."""
    header = f"{'system':36}" + "".join(f" {name + '/s':>10} {'x peer':>6}" for name in RATES)
    lines = [f"{header} {'samples/transition':>18} {'memory MB':>9} {'transitions held':>16} {'threads':>7}"]
    for row in rows:
        line = f"{row['system']:36}"
        for name in RATES:
            ratio = f"{row['to_best_peer'][name]:.2f}" if "to_best_peer" in row else "-"
            line += f" {row[f'{name}_per_second']:10,.1f} {ratio:>6}"
        line += f" {row['samples_per_transition']:18.2f} {row['memory_bytes'] / 1e6:9,.0f}"
        lines.append(f"{line} {row['transitions_held']:16,.0f} {row['threads'] or 'own':>7}")
    return "\n".join(lines)


def roles(measurements: list[dict[str, Any]]) -> str:
    """Returns as text the memory of our roles in the last measurement of each system."""
    lines = []
    for measured in {m["system"]: m for m in measurements if "memory_bytes_by_role" in m}.values():
        parts = (f"{role} {held / 1e6:,.0f}" for role, held in measured["memory_bytes_by_role"].items())
        once = measured["memory_bytes_shared_once"] / 1e6
        lines.append(f"{measured['system']}: {', '.join(parts)} MB; what they share counted once: {once:,.0f} MB")
    return "\n".join(lines)


def main(options: Options) -> None:
    """Measures and prints the chosen systems."""
    running.end_in_order()
    asked = [SYSTEMS[name] for name in options.systems]
    systems = [s for s in asked if not (s.peer_envs and running.skip_aloud(s.name, ("stable_baselines3",)))]
    results: dict[str, Any] = {"machine": machine(), "date": datetime.date.today().isoformat()}
    results |= {"options": dataclasses.asdict(options), "skipped": [s.name for s in asked if s not in systems]}
    measurements = measure_all(systems, options)
    results |= {"measurements": measurements, "rows": summarize(measurements, systems)}
    print(table(results["rows"]), roles(measurements), sep="\n")
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(tyro.cli(Options, config=(tyro.conf.OmitArgPrefixes,)))
