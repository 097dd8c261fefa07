"""Whole systems side by side while they learn: `python -m benchmarks.end_to_end [--minutes M] [--repeats R]`.

Prints frames/s, updates/s, samples/s and resident memory. A sample is a transition in a batch.

  ours       all that `bash run.sh` starts but TensorBoard: at its own replay ratio, and at SB3's 8 samples a
             transition; with the network of its preset, and with one of the size of Nature's, as SB3's is
  impala     the same with `--agent impala`; laser: with LASER's mix, a batch of which is 7/8 replayed
  SB3 DQN    Stable-Baselines3's DQN with the Atari hyperparameters of its zoo (`benchmarks/peers/sb3_learning.py`)
  SB3 PPO    its PPO, with the same and with impala's network (`benchmarks/peers/sb3_ppo.py`)
  MonoBeast  its design, with impala's network and rollouts of 80 or 20 steps (`benchmarks/peers/monobeast.py`)

A peer runs in all its variants: with one thread and with its default number of threads; MonoBeast with 4 and 8 actors;
PPO's environments in one process and in one each. The one with the most frames/s counts. Rates are those of a window
that begins after some time of learning. One system runs at a time, and in each repeat all systems take turns.
`--systems impala laser monobeast monobeast-20 ppo` are the actor-critics.
"""

import dataclasses
import datetime
import itertools
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
IMPALA = ("--agent", "impala")
RATES = ("frames", "updates", "samples")
FIGURES = (*(f"{name}_per_second" for name in RATES), "samples_per_transition", "memory_bytes", "transitions_held")


class System(NamedTuple):
    """One of the systems that are compared."""

    name: str
    flags: tuple[str, ...] = ()  # flags of run.sh
    module: str = ""  # the script of a peer; empty: ours
    arguments: tuple[str, ...] = ()  # of the script
    variants: tuple[tuple[str, ...], ...] = ((),)  # more arguments of the script, the best of which count
    threads: tuple[int, ...] = (0,)
    needs: tuple[str, ...] = ()  # modules that have to be installed


_DQN, _PPO, _MONOBEAST = (f"benchmarks.peers.{name}" for name in ("sb3_learning", "sb3_ppo", "monobeast"))
_SB3 = ("stable_baselines3",)
_PROCESSES = (("--processes", "one"), ("--processes", "each"))
_ACTORS = (("--envs", "4"), ("--envs", "8"))

SYSTEMS = {
    "ours": System("ours"),
    "ours-nature": System("ours, Nature's size", NATURE),
    "equal": System("ours, 8 samples", AS_SB3),
    "equal-nature": System("ours, 8 samples, Nature's size", (*AS_SB3, *NATURE)),
    "equal-nature-512": System("ours, 8 samples, Nature's size, 512", (*AS_SB3, *NATURE, "--batch-size", "512")),
    "impala": System("ours, impala", IMPALA),
    "laser": System("ours, impala, LASER's mix", (*IMPALA, "--mix", "queue=1/8", "uniform=7/8", "--batch-size", "8")),
    "sb3": System("SB3 DQN, 1 env", (), _DQN, ("--envs", "1"), threads=(1, 0), needs=_SB3),
    "sb3-8": System("SB3 DQN, 8 envs", (), _DQN, ("--envs", "8"), threads=(1, 0), needs=_SB3),
    "ppo": System("SB3 PPO, 8 envs", (), _PPO, ("--envs", "8"), _PROCESSES, threads=(1, 0), needs=_SB3),
    "monobeast": System("MonoBeast's design, T = 80", (), _MONOBEAST, ("--unroll", "80"), _ACTORS, threads=(1,)),
    "monobeast-20": System("MonoBeast's design, T = 20", (), _MONOBEAST, ("--unroll", "20"), _ACTORS, threads=(1,)),
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
    """ours, ours-nature, equal, equal-nature, equal-nature-512 (Ape-X's batch), impala, laser; sb3, sb3-8, ppo,
    monobeast, monobeast-20."""
    flags: tuple[str, ...] = ()
    """More flags of run.sh, for all of ours: `--flags=--no-evaluator`."""
    json: str = ""
    """File for the figures as JSON."""


def measure(system: System, variant: tuple[str, ...], threads: int, options: Options) -> dict[str, Any]:
    """Returns one measurement of a system, with its rates."""
    seconds = 60 * options.minutes
    if system.module:
        where = ("--game", options.game, *system.arguments, *variant)
        found = running.run(system.module, threads, seconds, *where)
    else:
        found = whole_run.run(options.game, (*system.flags, *options.flags), options.settle_seconds, seconds)
    rates = {f"{name}_per_second": found[name] / found["wall_seconds"] for name in RATES}
    rates["samples_per_transition"] = FRAMES_PER_STEP * found["samples"] / found["frames"]
    return {"system": system.name, "variant": " ".join(variant), "threads": threads} | found | rates


def measure_all(systems: list[System], options: Options) -> list[dict[str, Any]]:
    """Measures the systems in turn, `repeats` times over. A system that fails is named and left out of the table."""
    measurements = []
    turns = [(system, *how) for system in systems for how in itertools.product(system.variants, system.threads)]
    for repeat in range(options.repeats):
        for system, variant, threads in turns:
            try:
                measured = measure(system, variant, threads, options) | {"repeat": repeat}
            except RuntimeError as error:
                print(f"FAILED: {system.name}: {error}", flush=True)
                continue
            measurements.append(measured)
            print(json.dumps(measured), flush=True)
    return measurements


def summarize(measurements: list[dict[str, Any]], systems: list[System]) -> list[dict[str, Any]]:
    """Returns a row for each system: medians of the variant with the most frames/s, and ratios to the peers.

    The best peer is the one with the most frames/s.
    """
    rows = []
    for system in systems:
        candidates: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for m in measurements:
            if m["system"] == system.name:
                candidates.setdefault((m["variant"], m["threads"]), []).append(m)
        medians = [
            {"variant": variant, "threads": threads}
            | {name: statistics.median(m[name] for m in same) for name in FIGURES}
            for (variant, threads), same in candidates.items()
        ]
        if medians:
            best = max(medians, key=lambda row: row["frames_per_second"])
            rows.append({"system": system.name, "is_peer": bool(system.module)} | best)
    peers = [row for row in rows if row["is_peer"]]
    if peers:
        best = max(peers, key=lambda row: row["frames_per_second"])
        for row in rows:
            row["to_best_peer"] = {name: row[f"{name}_per_second"] / best[f"{name}_per_second"] for name in RATES}
            row["frames_to_peers"] = {p["system"]: row["frames_per_second"] / p["frames_per_second"] for p in peers}
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as text: each rate and its ratio to the best peer's."""
    header = f"{'system':36}" + "".join(f" {name + '/s':>10} {'x peer':>6}" for name in RATES)
    lines = [f"{header} {'samples/transition':>18} {'memory MB':>9} {'transitions held':>16} {'threads':>7}  variant"]
    for row in rows:
        line = f"{row['system']:36}"
        for name in RATES:
            ratio = f"{row['to_best_peer'][name]:.2f}" if "to_best_peer" in row else "-"
            line += f" {row[f'{name}_per_second']:10,.1f} {ratio:>6}"
        line += f" {row['samples_per_transition']:18.2f} {row['memory_bytes'] / 1e6:9,.0f}"
        lines.append(f"{line} {row['transitions_held']:16,.0f} {row['threads'] or 'own':>7}  {row['variant']}")
    for row in rows:
        if not row["is_peer"] and "frames_to_peers" in row:
            ratios = ", ".join(f"{ratio:.2f} of {peer}" for peer, ratio in row["frames_to_peers"].items())
            lines.append(f"frames/s of {row['system']}: {ratios}")
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
    systems = [system for system in asked if not running.skip_aloud(system.name, system.needs)]
    results: dict[str, Any] = {"machine": machine(), "date": datetime.date.today().isoformat()}
    results |= {"options": dataclasses.asdict(options), "skipped": [s.name for s in asked if s not in systems]}
    measurements = measure_all(systems, options)
    results |= {"measurements": measurements, "rows": summarize(measurements, systems)}
    print(table(results["rows"]), roles(measurements), sep="\n")
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(tyro.cli(Options, config=(tyro.conf.OmitArgPrefixes,)))
