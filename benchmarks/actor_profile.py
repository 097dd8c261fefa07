"""Profile of our actor: the loop's shares of wall time, and the parts of an environment step.

The actor's loop reports the share of its wall time by activity. "emulator" is the time that it waits for environments,
which also step while it does other things. The loop cannot time the parts of an environment step. So another process
runs ale-py with and without these parts, with as many environments.
"""

import statistics
from typing import Any

from benchmarks.actor_process import Played, play
from benchmarks.peers import running

LOOP = ("emulator", "inference", "assembly", "waiting")  # all of the time of the loop's thread
SENDING = "sending"  # the sender thread: compression and sockets
PREFIX = "actor/time/"
ENVIRONMENTS = 32


def profile(
    games: tuple[str, ...], networks: list[tuple[str, str]], device: str, seconds: float, repeats: int
) -> list[dict]:
    """Measures and prints a profile for each game and network; returns them as medians of the repeats.

    Args:
      networks: agents and presets.
    Raises: RuntimeError when the actor does not report where its time goes.
    """
    found = []
    for game in games:
        for agent, preset in networks:
            runs = [_once(game, agent, preset, device, seconds) for _ in range(repeats)]
            medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            print(table(game, f"{agent}, {preset}", medians), flush=True)
            found.append({"game": game, "agent": agent, "preset": preset, "runs": runs} | medians)
    return found


def _once(game: str, agent: str, preset: str, device: str, seconds: float) -> dict[str, float]:
    played = play(game, agent, preset, device, seconds)
    shares = shares_of(played)
    where = ("--work", "emulator", "--game", game, "--envs", ENVIRONMENTS)
    parts = running.run("benchmarks.actor_work", 1, seconds, *where)
    microseconds = {
        "environment_cpu_us": parts["resized"],
        "emulator_cpu_us": parts["emulator"],
        "resizing_cpu_us": parts["resized"] - parts["not_resized"],
        "other_preprocessing_cpu_us": parts["not_resized"] - parts["emulator"],
        "step_cpu_us": 1e6 * played.cpu_seconds / played.agent_steps,
        "step_us": 1e6 * played.wall_seconds / played.agent_steps,
    }
    return microseconds | {f"{name}_share": share for name, share in shares.items()}


def shares_of(played: Played) -> dict[str, float]:
    """Returns the shares of wall time that the actor reported.

    Raises: RuntimeError when one is missing.
    """
    lacking = [PREFIX + name for name in (*LOOP, SENDING) if PREFIX + name not in played.figures]
    if lacking:
        raise RuntimeError(f"actor.py does not report {', '.join(lacking)}: this benchmark needs an actor that does")
    return {name: played.figures[PREFIX + name] for name in (*LOOP, SENDING)}


def table(game: str, network: str, row: dict[str, Any]) -> str:
    """Returns one profile as text."""
    lines = [f"{game}, {network}: an agent step takes {row['step_us']:.0f} us and "
             f"{row['step_cpu_us']:.0f} us of CPU time"]  # fmt: skip
    lines.append(f"  {'its loop':24} {'share of wall time':>18} {'us':>7}")
    for name in (*LOOP, SENDING):
        share = row[f"{name}_share"]
        label = f"({name}, beside it)" if name == SENDING else name
        lines.append(f"  {label:24} {share:18.1%} {share * row['step_us']:7.1f}")
    lines.append(f"  {'its environment alone':24} {'share of CPU time':>18} {'CPU us':>7}")
    for name in ("environment", "emulator", "resizing", "other_preprocessing"):
        spent = row[f"{name}_cpu_us"]
        lines.append(f"  {name.replace('_', ' '):24} {spent / row['step_cpu_us']:18.1%} {spent:7.1f}")
    return "\n".join(lines)
