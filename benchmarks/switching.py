"""Returns after each switch of SwitchingCatch-v0: `python -m benchmarks.switching RUNS_DIR [--csv FILE]`.

RUNS_DIR is that of `benchmarks/experiments/switching-catch.toml`: RUNS_DIR/VARIANT-seedN. The training games count,
because the evaluator's own games are not switched at the same time. A phase lies between two switches. For each phase
the first half tells how fast a rule is learned, the second half how well. From the third phase on a rule returns.
"""

import csv
import dataclasses
from pathlib import Path

import numpy as np
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from apexrl.environments.catch import SWITCH_PERIOD_STEPS
from apexrl.running.run_directory import SUMMARY_FILE
from apexrl.tools.intervals import bootstrap_interval, mean

TAG = "actor/return_mean"


@dataclasses.dataclass(frozen=True)
class Options:
    """The runs to read."""

    directory: tyro.conf.Positional[Path]
    """The directory of a sweep."""
    environments: int = 8
    """Environments of each run: all of them switch after as many steps."""
    csv: str = ""
    """File for the figures: a line for each half of a phase, at the frames of its middle."""


def halves(run: Path, period_frames: int) -> list[float]:
    """Returns the mean training return of each half phase of a run."""
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    points = np.array([(event.step, event.value) for event in events.Scalars(TAG)])
    half = (points[:, 0] * 2 // period_frames).astype(int)
    return [float(points[half == index, 1].mean()) for index in range(half.max()) if (half == index).any()]


def main(options: Options) -> None:
    """Prints a row for each variant: the mean over its seeds, and 95 % intervals over seeds."""
    period_frames, rows = SWITCH_PERIOD_STEPS * options.environments, []
    variants: dict[str, list[list[float]]] = {}
    for summary in sorted(options.directory.glob(f"*-seed*/{SUMMARY_FILE}")):
        variants.setdefault(summary.parent.name.rpartition("-seed")[0], []).append(
            halves(summary.parent, period_frames)
        )
    length = max((len(run) for runs in variants.values() for run in runs), default=0)
    for variant, found in variants.items():
        runs = [run for run in found if len(run) == length]  # a run that was cut off is left out
        if not runs:
            continue
        scores = np.array(runs)
        interval = bootstrap_interval([scores], mean)
        middles = (np.arange(length) + 0.5) * period_frames / 2
        for frames, *values in zip(middles, mean(scores), *interval, strict=True):
            rows.append([variant, f"{frames:.0f}", *(f"{value:.3f}" for value in values), len(runs)])
        cells = [
            f"{value:5.2f} ({low:5.2f} to {high:5.2f})"
            for value, low, high in zip(mean(scores), *interval, strict=True)
        ]
        print(f"{variant:16} {len(runs):2} seeds  " + "  ".join(cells))
    if options.csv:
        with Path(options.csv).open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(
                [["group", "frames", "return", "low", "high", "seeds"], *rows]
            )


if __name__ == "__main__":
    main(tyro.cli(Options))
