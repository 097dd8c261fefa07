"""The results of a run: counters, checkpoints, event files, the status file and the evaluation curve.

Owned by the learner. Everything is written so that a reader, or a later start of the run, never sees a half of it. A
disk that takes nothing ends no run: training goes on, the fault is said and counted, and writing is tried again.
"""

import collections
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from apexrl.errors import MALFORMED, UNREADABLE, ApexError, ConfigError, JournalError
from apexrl.files import TEMPORARY, give_second_name, read_whole, replacing, write_durably, write_json
from apexrl.learning.record.event_file import EventFile
from apexrl.learning.record.status_file import STATUS_FILE, Status
from apexrl.learning.updates.updater import Updater
from apexrl.lines import Repeats
from apexrl.net.metrics_channel import EVALUATED_FRAMES, MAX_VERSIONS, Evaluation
from apexrl.networks.checkpoint import (
    ACTING,
    Checkpoint,
    all_finite,
    random_state,
    save_checkpoint,
    set_random_state,
)
from apexrl.networks.headers import (
    BEST,
    CHECKPOINTS,
    LATEST,
    NUMBERED,
    CheckpointHeader,
    Counters,
    Identity,
    Progress,
    load_header,
    numbered_checkpoints,
)
from apexrl.networks.parameters import decode_parameters, halved
from apexrl.runs import CURVE_FILE, CurvePoint
from apexrl.streams import difference
from apexrl.types import LogPosition

logger = logging.getLogger(__name__)

CURVE_COLUMNS = ",".join(CurvePoint._fields)
FAULT_SAID_SECONDS = 30.0


class Disk:
    """Tries to write, and logs and counts the failures. One owner."""

    def __init__(self) -> None:
        self.num_faults = 0
        self._repeats = Repeats(FAULT_SAID_SECONDS)

    def tries(self, write: Callable[[], None]) -> bool:
        """Returns whether something was written."""
        try:
            write()
        except OSError as error:
            self.num_faults += 1
            if self._repeats.let_through():
                logger.error("%s: training goes on and writing is tried again; free some space", error)
            return False
        return True


class RunRecord:
    """Counters and files of one run. Used from one thread."""

    def __init__(self, directory: Path, identity: Identity, keep_checkpoints: int = 0):
        """Takes the run directory; the results in it are continued.

        Args:
          keep_checkpoints: keep so many of the newest checkpoints, besides the latest.
        Raises: ConfigError when it cannot be written, or holds the best network of another environment or network, or
          one that cannot be read.
        """
        self.run = secrets.token_hex(8)
        self._directory = directory
        self._identity = identity
        self._keep_checkpoints = keep_checkpoints
        self._spec = identity.spec
        self._disk = Disk()
        try:
            _tidy(directory)
            curve = directory / CURVE_FILE
            text = read_whole(curve).decode() if os.path.lexists(curve) else ""
            self._curve = f"{CURVE_COLUMNS}\n{_whole_rows(text, curve)}"  # an earlier version has fewer columns
        except UNREADABLE as error:
            raise ConfigError(f"the run directory {directory} cannot be used: {error}") from error
        self._is_curve_written = True
        self._events = EventFile(directory / "tensorboard")
        self._unsaved_best: Evaluation | None = None
        self._told: tuple[object, ...] = ()  # the newest evaluation, without its parameters
        self._results: dict[str, float] = {}  # the newest of games, which stay true when nobody plays
        self.counters = self._start = Counters(best_evaluation_return=self._best_return())
        self._started = time.monotonic()
        self._published: collections.OrderedDict[int, tuple[float, int]] = collections.OrderedDict()

    def published(self, params_version: int, frames: int | None = None) -> None:
        """Remembers seconds and frames of published parameters, for the evaluation that may come of them.

        Args:
          frames: those that the log had brought; by default those that were counted last.
        """
        self._published[params_version] = self._seconds, self.frames if frames is None else frames
        if len(self._published) > MAX_VERSIONS:
            self._published.popitem(last=False)

    def about(self, flags: Mapping[str, bool | float | str], page: str) -> None:
        """Takes the flags of the run, and a page about it, for TensorBoard."""
        self._events.about(flags, page)

    @property
    def frames(self) -> int:
        """Environment frames that the log has brought."""
        return self.counters.transitions_inserted * self._spec.frames_per_step

    @property
    def _seconds(self) -> float:
        """The seconds of the run, over all its starts."""
        return self._start.seconds + time.monotonic() - self._started

    @property
    def evaluated_updates(self) -> int:
        """The update whose network was evaluated last since the start, -1 before the first evaluation."""
        return int(self._results.get("evaluation/params_version", -1))

    def restore(self, updater: Updater, checkpoint: Checkpoint) -> None:
        """Continues from a checkpoint; the best return is the one that the best network's own file says.

        Raises: ConfigError when it is of another environment, network or optimizer.
        """
        header = checkpoint.header
        self._check_same(self._directory / CHECKPOINTS / LATEST, header)
        self.run = header.run or self.run
        best = self.counters.best_evaluation_return
        self.counters = self._start = msgspec.structs.replace(header.counters, best_evaluation_return=best)
        updater.load_state_dict(checkpoint.tensors, self.counters.updates)
        set_random_state(checkpoint.tensors)
        logger.info("continuing from update %d, %d frames", self.counters.updates, self.frames)

    def count(self, updates: int, transitions_per_update: int, logs: tuple[LogPosition, ...], episodes: int,
              progress: Mapping[str, Progress] = MappingProxyType({})) -> None:  # fmt: skip
        """Takes the updates so far, the positions up to which the logs of all shards were counted, and new episodes.

        Args:
          progress: how far the numbers are that may change.
        """
        self.counters = msgspec.structs.replace(
            self.counters,
            updates=updates,
            logs=logs,
            transitions_sampled=self.counters.transitions_sampled
            + (updates - self.counters.updates) * transitions_per_update,
            episodes=self.counters.episodes + episodes,
            seconds=self._seconds,
            progress=dict(progress),
        )

    def report(self, living: dict[str, float], games: dict[str, float], waits_for: str) -> None:
        """Writes metrics by tag to TensorBoard and the status file.

        Args:
          living: metrics of processes that run now; a tag that is missing is not shown any more. TensorBoard
            does not get the progress of an evaluation, which is of an earlier network.
          games: metrics of games that have ended; the newest of each tag stays.
        """
        living = living | {"learner/disk_faults_total": float(self._disk.num_faults)}
        living, games = ({t: v for t, v in metrics.items() if math.isfinite(v)} for metrics in (living, games))
        self._results |= games
        drawn = {tag: value for tag, value in (living | games).items() if not tag.startswith("evaluation/")}
        self._events.scalars(drawn, self.frames)
        status = Status(self._spec.env, self.frames, self.counters, living | self._results, waits_for)
        self._disk.tries(lambda: write_json(self._directory / STATUS_FILE, status))
        self._write_results()

    def evaluated(self, evaluation: Evaluation) -> None:
        """Takes an evaluation: metrics, film, curve, and the parameters when none before were better.

        The evaluator tells one again when it is filmed, and the last one where it cannot know that it arrived: the
        games count once.
        """
        games = evaluation.params_version, evaluation.returns, evaluation.steps, evaluation.seconds
        told, is_new = (*games, evaluation.video, bool(evaluation.picture)), games != self._told[: len(games)]
        if told == self._told:
            return
        self._told = told
        # The run went on while the games were played: everything is drawn where the network was published.
        seconds, frames = self._published.get(evaluation.params_version, (self._seconds, self.frames))
        words = [evaluation.words] if is_new else []
        words += [f"`{evaluation.video.replace('`', '')}`"] if evaluation.video else []
        if words:
            self._events.text("evaluation/games", ", ".join(words), frames)
        if evaluation.picture:
            self._events.png("evaluation/game", evaluation.picture, frames)
        if is_new:
            self._count(evaluation, seconds, frames)
        self._write_results()

    def _count(self, evaluation: Evaluation, seconds: float, frames: int) -> None:
        """Takes the games of an evaluation, whose parameters were published after so many seconds and frames."""
        metrics = evaluation.metrics()
        self._results |= metrics | {EVALUATED_FRAMES: float(frames)}
        self._events.scalars(metrics, frames)
        self._curve += f"{seconds:.0f},{frames},{_curve_values(evaluation, metrics)}\n"
        self._is_curve_written = False
        mean, best = metrics["evaluation/return_mean"], self.counters.best_evaluation_return
        replaces = best is None or (evaluation.params_version > 0 and mean >= best)  # of equal ones the newest
        is_best = bool(evaluation.parameters) and replaces
        self.counters = msgspec.structs.replace(
            self.counters,
            evaluation_episodes=self.counters.evaluation_episodes + len(evaluation.returns),
            last_evaluation_return=mean,
            best_evaluation_return=mean if is_best else best,
        )
        if is_best:
            self._unsaved_best = evaluation

    def checkpoint(self, updater: Updater) -> bool:
        """Writes everything that a later start needs; returns whether the disk took it.

        Raises: ApexError when a value is not finite, or beyond float16 where actors need it: the last checkpoint stays.
        """
        tensors = updater.state_dict()
        header = CheckpointHeader(*self._identity, self.counters, self.run)
        acting = Checkpoint(header, tensors).parameters().tensors
        if not all_finite(tensors) or not all_finite(halved(acting)):  # nobody could act with it, or go on from it
            raise ApexError(
                f"the network has diverged by update {updater.num_updates}: lower --learning-rate; "
                "the run can go on from its last checkpoint (--resume)"
            )
        tensors |= random_state()
        latest = self._directory / CHECKPOINTS / LATEST
        is_written = self._disk.tries(lambda: save_checkpoint(latest, header, tensors))
        if is_written and self._keep_checkpoints:
            self._disk.tries(lambda: self._keep(latest))
        return is_written

    def last_checkpoint(self, updater: Updater) -> None:
        """Writes the checkpoint at the end of a start.

        Raises: JournalError when the disk does not take it; ApexError when a value is not finite.
        """
        if not self.checkpoint(updater):
            raise JournalError(f"the last checkpoint could not be written to {self._directory}: an older one is there")
        logger.info("stopped at update %d, %d frames", updater.num_updates, self.frames)

    def close(self) -> None:
        """Writes the results that the disk has not taken yet."""
        self._write_results()

    def _keep(self, latest: Path) -> None:
        """Gives the latest checkpoint a second name, which stays when it is replaced, and forgets the oldest such."""
        name = latest.with_name(NUMBERED.format(self.counters.updates))
        with replacing(name) as temporary:
            temporary.unlink(missing_ok=True)
            give_second_name(latest, temporary)
        # Later updates are older ones: the run has returned to an earlier checkpoint since.
        by_age = sorted(numbered_checkpoints(self._directory), key=lambda path: (path <= name, path))
        for old in by_age[: -self._keep_checkpoints]:
            old.unlink()

    def _best_return(self) -> float | None:
        """Returns the return of the best network, as its own file says it; None when there is none."""
        path = self._directory / CHECKPOINTS / BEST
        if not path.exists():
            return None
        best = load_header(path)
        self._check_same(path, best)
        return best.counters.best_evaluation_return

    def _check_same(self, path: Path, header: CheckpointHeader) -> None:
        """Raises ConfigError when a checkpoint is of another environment, algorithm or network than this run."""
        if (held := header.identity) != self._identity:
            raise ConfigError(
                f"{path} is of another run, whose {_difference(held, self._identity)}: give that run's flags to go on "
                "with it, or choose another --run-dir"
            )

    def _write_results(self) -> None:
        """Writes events, best network and curve, where the disk has not taken them yet."""
        self._disk.tries(self._events.flush)
        best = self._unsaved_best
        if best is not None and self._disk.tries(lambda: self._save_best(best)):
            self._unsaved_best = None
        if not self._is_curve_written:  # only now: of a kill between them stays a network, and no line without one
            curve = self._curve.encode()
            self._is_curve_written = self._disk.tries(lambda: write_durably(self._directory / CURVE_FILE, curve))

    def _save_best(self, evaluation: Evaluation) -> None:
        """Writes evaluated parameters as the best ones: the network alone, in the precision in which it was played."""
        parameters = decode_parameters(evaluation.parameters)  # published by us: their checksum was compared
        mean = evaluation.metrics()["evaluation/return_mean"]
        counters = msgspec.structs.replace(
            self.counters, updates=evaluation.params_version, best_evaluation_return=mean
        )
        header = CheckpointHeader(*self._identity, counters, self.run)
        tensors = {ACTING + name: tensor for name, tensor in parameters.tensors.items()}
        save_checkpoint(self._directory / CHECKPOINTS / BEST, header, tensors)


def _whole_rows(text: str, path: Path) -> str:
    """Returns the rows of a curve without the beginning of one at its end, which would run into the next."""
    columns, _, rows = text.partition("\n")
    rest = rows.rpartition("\n")[2]
    if not rest or rest.count(",") == columns.count(","):
        return rows + "\n" * bool(rest)
    logger.warning("%s: its last line is cut off and is left out: %s", path, rest)
    return rows.removesuffix(rest)


def _curve_values(evaluation: Evaluation, metrics: dict[str, float]) -> str:
    """Returns a line of the curve behind its seconds and frames."""
    values = ",".join(f"{metrics[f'evaluation/return_{name}']:.8g}" for name in ("mean", "median", "min", "max"))
    return f"{evaluation.params_version},{len(evaluation.returns)},{values},{evaluation.exploration:g}"


def _difference(held: Identity, ours: Identity) -> str:
    """Returns the algorithms of two identities; of one algorithm, the fields in which stream and network differ."""
    if held.agent != ours.agent:
        return f"agent is {held.agent}, not {ours.agent}"
    theirs, own = _fields(held.network), _fields(ours.network)
    differing = [difference(held.spec, ours.spec)] if held.spec != ours.spec else []
    for name in sorted(theirs | own):
        if (their := theirs.get(name, "the default")) != (our := own.get(name, "the default")):
            differing.append(f"{name} is {their}, not {our}")
    return "; ".join(differing)


def _fields(network: str) -> dict[str, Any]:
    """Returns the fields of a network's configuration as JSON; of a stranger's that is none, its beginning."""
    try:
        return msgspec.json.decode(network, type=dict[str, Any])
    except MALFORMED:
        return {"network": network[:100]}


def _tidy(directory: Path) -> None:
    """Makes the run directory, and removes the temporary files that a killed learner left."""
    (directory / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    written = (
        *(directory / CHECKPOINTS).glob(f"update-*{TEMPORARY}"),
        *(directory / CHECKPOINTS).glob(f"latest.*{TEMPORARY}"),
        *(directory / CHECKPOINTS).glob(f"best.*{TEMPORARY}"),
    )
    for left in (*written, *(directory / f"{name}{TEMPORARY}" for name in (STATUS_FILE, CURVE_FILE))):
        left.unlink(missing_ok=True)
