"""Actors side by side: `python -m benchmarks.actor [--games Pong ...] [--seconds N] [--repeats 3] [--json FILE.json]`.

Prints agent steps per CPU-second (all threads, user and system) and per second, after a warm-up, as medians:

  stepping   environments alone with random actions: ours (the newest frame of each; our policy makes the stacks),
             gymnasium's SyncVectorEnv, EnvPool (stacks of 4)
  loop       all that an actor does. Ours is the real actor.py with a real replay.py: environments, network, n-step
             priorities, compression, sending. Stable-Baselines3 and a loop in CleanRL's style: environments, network
             and an insert into the buffer. Their network is Nature's, as ours is with the preset `paper`.

The systems `two-cores` and `two-cores-impala` are apex-dqn and impala with networks of one size. With both, a line for
each game says what an agent step of impala costs: `--systems two-cores two-cores-impala --games Pong Breakout`.

Each measurement has a process of its own, and in each repeat all systems take turns. A peer runs with one thread and
with its default number of threads. The better of the two counts, for each figure. requirements-bench.txt installs the
peers. EnvPool gives other screens when it resizes as in its own benchmark, so no ratio is to that row. `--profile`
prints instead where the time of our actor goes.
"""

import dataclasses
import datetime
import json
import statistics
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tyro

from benchmarks.actor_profile import profile
from benchmarks.machine import machine
from benchmarks.peers import running

ENVIRONMENTS = 64  # environments that step together under `stepping`, and by default in our workers
CPU, WALL = "agent_steps_per_cpu_second", "agent_steps_per_second"


class System(NamedTuple):
    """One of the systems that are compared."""

    name: str
    kind: Literal["stepping", "loop"]
    module: str = ""  # the script that measures; empty: the real actor.py
    arguments: tuple[object, ...] = ()
    needs: tuple[str, ...] = ()  # modules that have to be installed
    is_ours: bool = False
    is_like: bool = True  # it gives the same screens as ours, so ratios may be to it
    threads: tuple[int, ...] = (1, 0)  # 0: its default
    preset: str = ""
    agent: str = "apex-dqn"


_MANY = ("--envs", ENVIRONMENTS)
_SB3 = ("stable_baselines3",)
_ENVPOOL = "benchmarks.peers.envpool_vector"

SYSTEMS = {
    "vector": System("ours", "stepping", "benchmarks.actor_work", _MANY, is_ours=True),
    "gymnasium": System("gymnasium SyncVectorEnv", "stepping", "benchmarks.peers.gymnasium_vector", _MANY),
    "envpool": System("EnvPool", "stepping", _ENVPOOL, _MANY, ("envpool",)),
    "envpool-bilinear": System(
        "EnvPool, other screens", "stepping", _ENVPOOL, (*_MANY, "--resize", "bilinear"), ("envpool",), is_like=False
    ),
    "paper": System("ours, Nature's size", "loop", is_ours=True, threads=(0,), preset="paper"),
    "two-cores": System("ours, preset two-cores", "loop", is_ours=True, threads=(0,), preset="two-cores"),
    "two-cores-impala": System(
        "ours, impala, two-cores", "loop", is_ours=True, threads=(0,), preset="two-cores", agent="impala"
    ),
    "sb3": System("SB3 DQN, 1 env", "loop", "benchmarks.peers.sb3_loop", ("--envs", 1), _SB3),
    "sb3-8": System("SB3 DQN, 8 envs", "loop", "benchmarks.peers.sb3_loop", ("--envs", 8), _SB3),
    "cleanrl": System("CleanRL's style", "loop", "benchmarks.peers.cleanrl_loop", ("--envs", 1), _SB3),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """The choice of measurements."""

    games: tuple[str, ...] = ("Pong", "Breakout", "Seaquest")
    """Atari games, as in PongNoFrameskip-v4."""
    seconds: float = 10.0
    """Seconds of each measurement, after its warm-up; our actor reports every 5, so it takes a multiple of that."""
    repeats: int = 3
    """Number of measurements of each system."""
    systems: tuple[str, ...] = tuple(SYSTEMS)
    """vector, gymnasium, envpool, envpool-bilinear; paper, two-cores, two-cores-impala, sb3, sb3-8, cleanrl."""
    device: str = "cpu"
    """Device of our actors' networks; with a GPU, a worker has as many environments as the launcher gives it."""
    profile: bool = False
    """Print where the time of our actor goes, with the networks among --systems."""
    json: str = ""
    """File for the figures as JSON."""


def measure(system: System, game: str, threads: int, options: Options) -> dict[str, Any]:
    """Returns one measurement of a system."""
    if system.module:
        found = running.run(system.module, threads, options.seconds, "--game", game, *system.arguments)
    else:
        from benchmarks.actor_process import play

        played = dataclasses.asdict(play(game, system.agent, system.preset, options.device, options.seconds))
        found = {name: played[name] for name in ("agent_steps", "cpu_seconds", "wall_seconds")}
    rates = {CPU: found["agent_steps"] / found["cpu_seconds"], WALL: found["agent_steps"] / found["wall_seconds"]}
    return {"system": system.name, "kind": system.kind, "game": game, "threads": threads} | found | rates


def measure_all(systems: list[System], options: Options) -> list[dict[str, Any]]:
    """Measures everything in turn, `repeats` times over. A peer that fails is named and left out of the table."""
    measurements = []
    turns = [(game, system, threads) for game in options.games for system in systems for threads in system.threads]
    for repeat in range(options.repeats):
        for game, system, threads in turns:
            try:
                measured = measure(system, game, threads, options) | {"repeat": repeat}
            except RuntimeError as error:
                if system.is_ours:
                    raise
                print(f"FAILED: {system.name}, {game}: {error}", flush=True)
                continue
            measurements.append(measured)
            print(json.dumps(measured), flush=True)
    return measurements


def summarize(measurements: list[dict[str, Any]], systems: list[System], games: tuple[str, ...]) -> list[dict]:
    """Returns a row for each game and system: medians at the better number of threads, ratios to the best peer."""
    rows = [
        {"kind": kind, "game": game, "system": system.name, "is_peer": system.is_like and not system.is_ours}
        | {figure: best for figure in (CPU, WALL) if (best := _best(measurements, system, game, figure))}
        for kind in ("stepping", "loop")
        for game in games
        for system in systems
        if system.kind == kind
    ]
    for row in rows:
        for figure in (CPU, WALL):
            same = [r for r in rows if (r["kind"], r["game"]) == (row["kind"], row["game"]) and r["is_peer"]]
            peers = [r[figure]["median"] for r in same if figure in r]
            if peers and figure in row:
                row[figure]["to_best_peer"] = row[figure]["median"] / max(peers)
    return rows


def _best(measurements: list[dict], system: System, game: str, figure: str) -> dict[str, float] | None:
    """Returns the highest median of a figure over the numbers of threads, None when nothing was measured."""
    best: dict[str, float] | None = None
    for threads in system.threads:
        values = [
            measured[figure]
            for measured in measurements
            if (measured["system"], measured["game"], measured["threads"]) == (system.name, game, threads)
        ]
        if values and (best is None or statistics.median(values) > best["median"]):
            spread = {"lowest": min(values), "highest": max(values)}
            best = {"median": statistics.median(values), **spread, "threads": threads}
    return best


def table(rows: list[dict]) -> str:
    """Returns the rows as text: each rate, its ratio to the best peer's and the threads that gave it."""
    header = f"{'':8} {'game':9} {'system':24}"
    lines = [header + "".join(f" {name:>12} {'x best peer':>11} {'threads':>7}" for name in ("steps/CPU-s", "steps/s"))]
    for row in rows:
        line = f"{row['kind']:8} {row['game']:9} {row['system']:24}"
        for figure in (CPU, WALL):
            best = row.get(figure)
            if best is None:
                line += f" {'not measured':>12} {'':11} {'':7}"
                continue
            ratio = f"{best['to_best_peer']:.2f}" if "to_best_peer" in best else "-"
            line += f" {best['median']:12,.0f} {ratio:>11} {best['threads'] or 'own':>7}"
        lines.append(line)
    return "\n".join(lines)


def costs(rows: list[dict]) -> list[str]:
    """Returns a line for each game: the CPU time of an agent step of impala, divided by apex-dqn's."""
    ours = {(row["game"], row["system"]): row[CPU]["median"] for row in rows if CPU in row}
    apex, impala = SYSTEMS["two-cores"].name, SYSTEMS["two-cores-impala"].name
    return [
        f"{game}: an agent step of impala costs {ours[game, apex] / ours[game, impala]:.2f} times one of apex-dqn"
        for game, system in ours
        if system == apex and (game, impala) in ours
    ]


def main(options: Options) -> None:
    """Measures and prints the chosen systems."""
    running.end_in_order()
    systems = [SYSTEMS[name] for name in options.systems]
    results: dict[str, Any] = {"machine": machine(), "date": datetime.date.today().isoformat()}
    results["options"] = dataclasses.asdict(options)
    if options.profile:
        networks = [(system.agent, system.preset) for system in systems if system.preset]
        try:
            results["profile"] = profile(options.games, networks, options.device, options.seconds, options.repeats)
        except RuntimeError as error:
            sys.exit(f"no profile: {error}")
    else:
        skipped = [system for system in systems if running.skip_aloud(system.name, system.needs)]
        systems = [system for system in systems if system not in skipped]
        results["skipped"] = [system.name for system in skipped]
        results["measurements"] = measure_all(systems, options)
        results["rows"] = summarize(results["measurements"], systems, options.games)
        print(table(results["rows"]), *costs(results["rows"]), sep="\n")
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(tyro.cli(Options, config=(tyro.conf.OmitArgPrefixes,)))
