"""Figures of a run in TensorBoard: one event file at the learner, with a first page of the few that matter.

Tags are grouped as evaluation/, actor/, replay/, learner/, system/. What several processes report under one tag was
added up where it is a rate, a total or a size, and averaged otherwise (`net.metrics_channel`).
"""

import collections
from pathlib import Path

import numpy as np
from tensorboardX import SummaryWriter
from tensorboardX.proto.summary_pb2 import Summary

from apexrl.types import Episode

EPSILON_BANDS = ((0.2, "above_0.2"), (0.05, "0.05_to_0.2"), (0.01, "0.01_to_0.05"), (0.0, "below_0.01"))


def returns_by_epsilon(episodes: list[Episode]) -> dict[str, float]:
    """Returns the mean raw return of training games, over all and in bands of epsilon, and their mean length."""
    if not episodes:
        return {}
    figures = {
        "actor/return_mean": float(np.mean([e.episode_return for e in episodes])),
        "actor/game_steps": float(np.mean([e.steps for e in episodes])),
    }
    bands = collections.defaultdict(list)
    for episode in episodes:
        band = next(name for floor, name in EPSILON_BANDS if episode.epsilon >= floor)
        bands[band].append(episode.episode_return)
    return figures | {f"actor/return_by_epsilon/{band}": float(np.mean(values)) for band, values in bands.items()}


class Board:
    """The TensorBoard run. One owner."""

    def __init__(self, directory: Path):
        self._writer = SummaryWriter(str(directory), flush_secs=5)
        self._writer.add_custom_scalars(
            {
                "Ape-X": {
                    "return": ["Multiline", ["evaluation/return_mean", "evaluation/return_max", "actor/return_mean"]],
                    "return by epsilon": ["Multiline", ["actor/return_by_epsilon/.*"]],
                    "frames a second": ["Multiline", ["actor/frames_per_second"]],
                    "updates a second": ["Multiline", ["learner/updates_per_second"]],
                    "who waits": ["Multiline", ["actor/waits_for/.*", "learner/waits_for/.*"]],
                    "samples per insert": ["Multiline", ["replay/samples_per_insert"]],
                }
            }
        )

    def scalars(self, figures: dict[str, float], frames: int) -> None:
        """Writes figures at a number of environment frames."""
        for tag, value in figures.items():
            self._writer.add_scalar(tag, value, frames)

    def png(self, tag: str, picture: bytes, frames: int) -> None:
        """Writes an encoded picture as it is."""
        image = Summary.Image(colorspace=3, encoded_image_string=picture)
        self._writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), frames)

    def close(self) -> None:
        """Flushes everything."""
        self._writer.close()
