"""Speed of the learner's update alone: `python -m benchmarks.learner [--batch-sizes 64 128 512] [--threads 1 2]`.

Each setting runs in a process of its own, in turn, several times over; the table shows medians, and ratios to the first
kind. `eager` is the plain float32 update with fresh memory for every tensor; `ours` is what learner.py does.
Screens are random: the arithmetic does not depend on them.
"""

import dataclasses
import json
import statistics
import subprocess
import sys
import time

import tyro


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row."""

    kind: str
    preset: str
    batch_size: int
    threads: int


def measure(setting: Setting, seconds: float) -> float:
    """Returns updates a second in this process."""
    import numpy as np
    import torch

    from apexrl.agents import apex_dqn
    from apexrl.config import PRESETS, LearnerCommand
    from apexrl.flags import with_defaults
    from apexrl.frame_store import TransitionBatch
    from apexrl.lifecycle import keep_freed_memory
    from apexrl.types import StreamSpec

    torch.set_num_threads(setting.threads)
    if setting.kind == "ours":
        keep_freed_memory()
    else:
        apex_dqn.precision_for = lambda device, spec: lambda: torch.autocast(device.type, enabled=False)
    command = with_defaults(LearnerCommand(), PRESETS[setting.preset])
    spec = StreamSpec("Screens-v0", (84, 84), "uint8", 4, 6, 4)
    learner = apex_dqn.ApexLearner(command.agent, command.update, command.network, spec, torch.device("cpu"))
    size = setting.batch_size

    def batch() -> TransitionBatch:
        screens = [torch.randint(0, 255, (size, 4, 84, 84), dtype=torch.uint8) for _ in range(2)]
        numbers = torch.zeros(size), torch.ones(size)
        return TransitionBatch(
            screens[0], torch.randint(0, 6, (size,)), *numbers, screens[1], torch.ones(size), np.arange(size)
        )

    batches = [batch() for _ in range(4)]
    for i in range(4):
        learner.update(batches[i])
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        learner.update(batches[count % 4])
        count += 1
    return count / (time.perf_counter() - started)


def main(
    batch_sizes: tuple[int, ...] = (64, 128, 512),
    threads: tuple[int, ...] = (1, 2),
    presets: tuple[str, ...] = ("two-cores", "paper"),
    seconds: float = 3.0,
    repeats: int = 3,
    one: str = "",
) -> None:
    """Prints a table and, as the last line, JSON."""
    if one:
        print(measure(Setting(**json.loads(one)), seconds))
        return
    settings = [
        Setting(kind, preset, size, count)
        for preset in presets
        for size in batch_sizes
        for count in threads
        for kind in ("eager", "ours")
    ]
    rates: dict[Setting, list[float]] = {setting: [] for setting in settings}
    for _ in range(repeats):
        for setting in settings:
            arguments = ["--one", json.dumps(dataclasses.asdict(setting)), "--seconds", str(seconds)]
            result = subprocess.run(
                [sys.executable, "-m", "benchmarks.learner", *arguments], capture_output=True, text=True, check=True
            )
            rates[setting].append(float(result.stdout.split()[-1]))
    rows = []
    print(f"{'preset':10} {'batch':>5} {'threads':>7} {'kind':6} {'updates/s':>10} {'samples/s':>10} {'to eager':>9}")
    for setting in settings:
        rate = statistics.median(rates[setting])
        eager = statistics.median(rates[dataclasses.replace(setting, kind="eager")])
        row = dataclasses.asdict(setting) | {"updates_per_second": rate, "ratio": rate / eager}
        rows.append(row)
        print(
            f"{setting.preset:10} {setting.batch_size:5} {setting.threads:7} {setting.kind:6} "
            f"{rate:10.1f} {rate * setting.batch_size:10.0f} {rate / eager:9.2f}"
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    tyro.cli(main)
