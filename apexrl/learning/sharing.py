"""The division of a run among several learners, and its sums: shards, rows of a batch, counts."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from apexrl.agents.families import family_of
from apexrl.clocks import time_of_day
from apexrl.config.commands import LearnerCommand, OfflineCommand
from apexrl.config.flags import wants_of
from apexrl.config.sections import UpdateConfig, WireConfig
from apexrl.config.words import flag_of
from apexrl.errors import ConfigError
from apexrl.learning.experience.mixed_log import mixed_rows
from apexrl.net.wire import MAX_BATCH
from apexrl.networks.headers import LEARNING, MOMENTS, Counters, Progress
from apexrl.types import LogPosition

if TYPE_CHECKING:  # a plan divides a run, too, and loads no torch
    from apexrl.learning.experience.replicas import Replicas
    from apexrl.learning.updates.team import Team
    from apexrl.networks.checkpoint import Checkpoint


class Beginning(msgspec.Struct, frozen=True):
    """Where the first learner begins, as the others hear it."""

    updates: int = 0
    seconds: float = 0.0
    logs: tuple[LogPosition, ...] = ()
    run: str = ""
    progress: dict[str, Progress] = {}  # of numbers that may change
    moments: dict[str, list[float]] = {}  # as `RunMoments` knows them
    now: float = 0.0  # seconds since 1970, by the clock that counts for all

    @property
    def steps(self) -> int:
        """Those of environments until then, in all logs."""
        return sum(log.transitions for log in self.logs)


def share_of(command: LearnerCommand, num_learners: int) -> LearnerCommand:
    """Returns the command of one of several learners: its part of the batch, and of the sizes that go with it.

    Raises: ConfigError when a size cannot be divided, is more than a replay server gives, one learner would walk
      through several shards, or networks have statistics of batches.
    """
    if num_learners > 1 and getattr(command.network, "critic_norm", "") == "batch":
        raise ConfigError("--critic-norm batch has the statistics of one learner's batches: leave out --num-learners")
    if getattr(command, "from_journal", "") and max(num_learners, command.wires.shards) > 1:
        raise ConfigError("--from-journal is one log for one learner: leave out --num-learners and --shards")
    sizes = divided_sizes(command.agent, command.update)
    for name, size in sizes.items():
        if size % num_learners:
            raise ConfigError(
                f"{flag_of(name)} {size} is not to be divided among {num_learners} learners: give a multiple"
            )
    parts: dict[str, Any] = {name: size // num_learners for name, size in sizes.items()}
    share = dataclasses.replace(command, update=dataclasses.replace(command.update, **parts))
    try:
        wants = wants_of(share)
    except ConfigError as error:
        if num_learners == 1:
            raise
        given = " and ".join(f"{flag_of(name)} {size}" for name, size in sizes.items())
        raise ConfigError(f"each of {num_learners} learners takes an equal part of {given}: {error}") from error
    walks = any(want.is_replaced for want in wants)
    if walks and command.wires.shards > num_learners:
        raise ConfigError(
            "--replay-state walk follows one shard: give as many --shards as --num-learners, or another --replay-state"
        )
    rows = mixed_rows(share, num_learners)
    if not isinstance(command, OfflineCommand):
        _check_drawn(share, {want.table: want.batch_size - rows.get(want.table, 0) for want in wants})
    return share


def _check_drawn(share: LearnerCommand, drawn: Mapping[str, int]) -> None:
    """Raises ConfigError when a learner would draw more than a server gives at once, by table."""
    for table, size in drawn.items():
        if size > MAX_BATCH:
            flags = [flag_of(name) for name in (*divided_sizes(share.agent, share.update), "candidates")
                     if hasattr(share.update, name)]  # fmt: skip
            raise ConfigError(
                f"each learner draws {size} of {table} at once by {' and '.join(flags)}, and a replay server gives at "
                f"most {MAX_BATCH}: give less, or more --num-learners"
            )


def divided_sizes(agent: str, update: UpdateConfig) -> dict[str, int]:
    """Returns the sizes of an update that several learners divide, by name.

    Raises: ConfigError when the algorithm names one that its update has not.
    """
    names = dict.fromkeys(("batch_size", *family_of(agent).divided_sizes))
    if unknown := [name for name in names if not hasattr(update, name)]:
        raise ConfigError(f"--agent {agent}: Family.divided_sizes names {unknown[0]}, which its update has not")
    return {name: getattr(update, name) for name in names}


def shards_of(wires: WireConfig, team: "Team") -> range:
    """Returns the shards that a learner follows.

    Raises: ConfigError when they cannot be divided among the learners.
    """
    if wires.shards % team.size:
        raise ConfigError(
            f"{wires.shards} shards are not to be divided among {team.size} learners: give --num-learners that divides "
            "--shards, which stays as it is for a run"
        )
    return range(team.rank, wires.shards, team.size)


def beginning(checkpoint: "Checkpoint | None", num_shards: int) -> Beginning:
    """Returns where a run begins, or goes on.

    Raises: ConfigError when its experience lies in another number of shards.
    """
    counters = checkpoint.header.counters if checkpoint is not None else Counters()
    logs = counters.logs
    if len(logs) not in (0, num_shards):
        raise ConfigError(f"the run has {len(logs)} shards, not --shards {num_shards}: they stay as they are for a run")
    tensors, begin = {} if checkpoint is None else checkpoint.tensors, LEARNING + MOMENTS
    moments = {name.removeprefix(begin): tensors[name].flatten().tolist() for name in tensors if name.startswith(begin)}
    logs, progress = logs or (LogPosition(),) * num_shards, counters.progress
    return Beginning(counters.updates, counters.seconds, logs, progress=progress, moments=moments, now=time_of_day())


def totals(team: "Team", replicas: "Replicas", sums: np.ndarray) -> tuple[tuple[LogPosition, ...], np.ndarray]:
    """Returns the positions in the logs of all shards, in their order, and the sums over all learners' games.

    Raises: PeerError when a learner is gone or says nothing in time.
    """
    counted = list(replicas.counted.values())
    if team.size == 1:
        return tuple(counted), sums
    own = [number for log in counted for number in numbers_of(log)]
    rows = team.gather([*own, *sums.flatten()])
    positions = rows[:, : len(own)].reshape(team.size, len(counted), -1)
    # Rank r follows the shards r, r + L, ...: transposed, they are in order.
    logs = tuple(position_of(numbers) for numbers in positions.swapaxes(0, 1).reshape(-1, positions.shape[-1]))
    return logs, rows[:, len(own) :].sum(axis=0).reshape(sums.shape)


def numbers_of(log: LogPosition) -> list[float]:
    """Returns a position as numbers that float64 holds exactly; `position_of` reads them."""
    name = int(log.log or "0", 16)
    return [float(bool(log.log)), float(name >> 32), float(name & 0xFFFFFFFF), log.next_number, log.transitions]


def position_of(numbers: np.ndarray) -> LogPosition:
    """Returns the position that `numbers_of` made numbers of."""
    is_known, high, low, next_number, transitions = map(int, numbers)
    return LogPosition(f"{high << 32 | low:016x}" if is_known else "", next_number, transitions)
