"""What a run leaves behind: counters, checkpoints, event files, the status file and the evaluation curve.

Owned by the learner. Everything is written so that a reader, or a later start of the run, never sees a half of it.
"""

import logging
import math
import time
from pathlib import Path

import msgspec

from apexrl.agents.apex_dqn import ApexLearner
from apexrl.checkpoint import (
    BEST,
    LATEST,
    Checkpoint,
    CheckpointHeader,
    Counters,
    load_checkpoint,
    random_state,
    save_checkpoint,
    set_random_state,
)
from apexrl.config import NetworkConfig
from apexrl.errors import ConfigError, WireError
from apexrl.files import write_json
from apexrl.metrics import Board
from apexrl.net.metrics_channel import Evaluation
from apexrl.parameters import decode_parameters
from apexrl.status import STATUS_FILE, Status
from apexrl.types import LogPosition, StreamSpec

logger = logging.getLogger(__name__)

CURVE_FILE = "evaluations.csv"
CURVE_COLUMNS = "seconds,frames,updates,episodes,mean,median,min,max"


def latest_checkpoint(directory: Path) -> Checkpoint | None:
    """Returns what a run directory continues from, None when it is new.

    Raises: WireError when it cannot be read.
    """
    path = directory / "checkpoints" / LATEST
    return load_checkpoint(path) if path.exists() else None


class RunRecord:
    """Counters and files of one run. Used from one thread."""

    def __init__(self, directory: Path, spec: StreamSpec, network: NetworkConfig):
        """Opens the run directory; what is in it is continued."""
        self.counters = Counters()
        self._directory = directory
        self._spec = spec
        self._network = network
        self._board = Board(directory / "tensorboard")
        self._figures: dict[str, float] = {}
        self._start = Counters()  # as they were when this process began
        self._started = time.monotonic()

    @property
    def frames(self) -> int:
        """Environment frames that the log has brought."""
        return self.counters.transitions_inserted * self._spec.frames_per_step

    def restore(self, agent: ApexLearner, checkpoint: Checkpoint) -> None:
        """Continues from a checkpoint.

        Raises: ConfigError when it is of another environment or network.
        """
        if (checkpoint.header.spec, checkpoint.header.network) != (self._spec, self._network):
            raise ConfigError(f"the checkpoint is of {checkpoint.header}, not of this run: choose another --run-dir")
        self.counters = self._start = checkpoint.header.counters
        agent.load_state_dict(checkpoint.tensors, self.counters.updates)
        set_random_state(checkpoint.tensors)
        logger.info("continuing from update %d, %d frames", self.counters.updates, self.frames)

    def count(self, updates: int, batch_size: int, log: LogPosition, episodes: int) -> None:
        """Takes the updates so far, how far the log was counted, and the episodes since the last call."""
        self.counters = msgspec.structs.replace(
            self.counters,
            updates=updates,
            log=log,
            transitions_sampled=self.counters.transitions_sampled + (updates - self.counters.updates) * batch_size,
            episodes=self.counters.episodes + episodes,
            seconds=self._start.seconds + time.monotonic() - self._started,
        )

    def report(self, figures: dict[str, float], waits_for: str) -> None:
        """Writes figures by tag to TensorBoard, and the newest of every tag to the status file."""
        figures = {tag: value for tag, value in figures.items() if math.isfinite(value)}
        self._board.scalars(figures, self.frames)
        self._figures |= figures
        write_json(
            self._directory / STATUS_FILE,
            Status(self._spec.env, self.frames, self.counters, self._figures, waits_for),
        )

    def evaluated(self, evaluation: Evaluation) -> None:
        """Takes an evaluation: figures, picture, curve, and the parameters when they are the best so far."""
        figures = evaluation.figures()
        self._figures |= figures
        self._board.scalars(figures, self.frames)
        if evaluation.picture:
            self._board.png("evaluation/game", evaluation.picture, self.frames)
        self._extend_curve(evaluation, figures)
        mean, best = figures["evaluation/return_mean"], self.counters.best_evaluation_return
        is_best = best is None or mean > best
        self.counters = msgspec.structs.replace(
            self.counters,
            evaluation_episodes=self.counters.evaluation_episodes + len(evaluation.returns),
            last_evaluation_return=mean,
            best_evaluation_return=mean if is_best else best,
        )
        if is_best and evaluation.parameters:
            self._keep(evaluation.parameters)

    def checkpoint(self, agent: ApexLearner) -> None:
        """Writes everything that a later start needs."""
        header = CheckpointHeader(self._spec, self._network, self.counters)
        save_checkpoint(self._directory / "checkpoints" / LATEST, header, agent.state_dict() | random_state())

    def close(self) -> None:
        """Flushes the event file."""
        self._board.close()

    def _extend_curve(self, evaluation: Evaluation, figures: dict[str, float]) -> None:
        path = self._directory / CURVE_FILE
        seconds = self._start.seconds + time.monotonic() - self._started
        values = ",".join(f"{figures[f'evaluation/return_{name}']:.2f}" for name in ("mean", "median", "min", "max"))
        with path.open("a") as file:
            if file.tell() == 0:
                file.write(f"{CURVE_COLUMNS}\n")
            file.write(f"{seconds:.0f},{self.frames},{evaluation.params_version},{len(evaluation.returns)},{values}\n")

    def _keep(self, encoded: bytes) -> None:
        """Writes evaluated parameters as the best ones: the network alone, in the precision in which it was played."""
        try:
            parameters = decode_parameters(encoded)
        except WireError as error:
            logger.warning("an evaluation came with parameters that cannot be read: %s", error)
            return
        counters = msgspec.structs.replace(self.counters, updates=parameters.header.params_version)
        header = CheckpointHeader(parameters.header.spec, parameters.header.network, counters)
        tensors = {f"online.{name}": tensor for name, tensor in parameters.tensors.items()}
        save_checkpoint(self._directory / "checkpoints" / BEST, header, tensors)
