"""The learners of a run that make each update together: a rank each, which add their gradients up. No engine.

`torchrun` starts the ranks, watches them and starts all of them again when one dies; `torch.distributed` carries what
they say. Before each update every rank says where it stands, so all of them decide the same: to update, to wait, to
write a checkpoint, or to stop. Nothing that comes from another rank is unpickled.
"""

import dataclasses
import hashlib
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from apexrl.agents.contract import LAST_BATCH
from apexrl.config.commands import LearnerCommand
from apexrl.config.fields import values_of
from apexrl.config.words import flag_of, words_of
from apexrl.errors import ApexError, ConfigError, PeerError
from apexrl.learning.devices import devices_of, is_rank
from apexrl.networks.device import choose_device
from apexrl.networks.headers import LEARNING

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 60.0  # for the other ranks, in each exchange
EQUAL_SECTIONS = ("algorithm", "update", "network")  # whose flags make an update what it is
EQUAL_FLAGS = ("seed", "normalize_observations", "scale_rewards", "total_frames", "total_updates", "ends_at")
REASONS = ("", "replay_connection", "min_size", "actors", "priorities", "another reason")
OUTSIDE = "192.0.2.1"  # of no host (RFC 5737): where the way out leads
OWN_STATE = LEARNING + LAST_BATCH  # begins the names of tensors that each rank has for itself


class RankStanding(NamedTuple):
    """Where a rank stands before an update."""

    has_draw: bool = False  # before the first one: whether it knows the logs' spec
    is_skipped: bool = False  # no draw for DRY_SECONDS: the others update without it
    stops: bool = False
    reports: bool = False  # rank 0 wants the totals of all ranks
    writes_checkpoint: bool = False  # and rank 0 will write a checkpoint
    is_over: bool = False  # by rank 0's clock: the time of the run
    waits_for: str = ""
    transitions: int = 0  # that the logs of its shards have brought
    largest_weight: float = 1.0  # by which the importance weights of its draw were divided
    late: float = 0.0  # by rank 0's clock: `Course.late`


class Team:
    """The ranks of a run, as one of them sees it. One rank alone exchanges nothing. Used from one thread."""

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | None = None):
        """Meets the other ranks, where there are any; `torchrun` says where in the environment.

        Raises: PeerError when they do not meet in time: a restart may help, as all of them begin again then.
        """
        self.rank, self.size = rank, size
        self.spans_hosts = int(os.environ.get("LOCAL_WORLD_SIZE", str(size))) < size
        self._group: dist.ProcessGroup | None = None  # that carries gradients
        if size == 1:
            return
        on_gpu = device is not None and device.type == "cuda"
        patience = timedelta(seconds=PATIENCE_SECONDS)
        try:
            if "GLOO_SOCKET_IFNAME" not in os.environ:
                os.environ["GLOO_SOCKET_IFNAME"] = interface_to(os.environ.get("MASTER_ADDR", ""))
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "=" + os.environ["GLOO_SOCKET_IFNAME"])  # that one alone
            dist.init_process_group("gloo", timeout=patience)
            self._group = dist.new_group(backend="nccl", timeout=patience) if on_gpu else dist.group.WORLD
        except (RuntimeError, ValueError, OSError) as error:  # DistError is a RuntimeError
            raise PeerError(
                f"learner {rank} does not meet the {size - 1} others ({_first_line(error)}): are all of them started, "
                "and does GLOO_SOCKET_IFNAME name an interface that reaches them?"
            ) from error
        logger.info("learner %d of %d; gradients by %s", rank, size, "nccl" if on_gpu else "gloo")

    @property
    def is_first(self) -> bool:
        """Whether this rank publishes, evaluates and writes for all."""
        return self.rank == 0

    def agree(self, standing: RankStanding) -> list[RankStanding]:
        """Returns where each rank stands; waits for all of them.

        Raises: PeerError when a rank is gone or says nothing in time.
        """
        if self.size == 1:
            return [standing]
        *flags, waits_for, transitions, largest_weight, late = standing
        reason = waits_for.split(" ")[0]
        code = REASONS.index(reason if reason in REASONS else REASONS[-1])
        row = [*map(float, flags), float(code), float(transitions), largest_weight, late]
        standings = []
        for *truths, code, total, largest, their_late in self.gather(row).tolist():
            has_draw, is_skipped, stops, reports, writes, is_over = map(bool, truths)
            numbers = REASONS[int(code)], int(total), largest, their_late
            standings.append(RankStanding(has_draw, is_skipped, stops, reports, writes, is_over, *numbers))
        return standings

    def gather(self, row: Sequence[float]) -> np.ndarray:
        """Returns [ranks, N] float64: the numbers [N] of every rank, exact up to 2**53.

        Raises: PeerError when a rank is gone or says nothing in time.
        """
        rows = torch.zeros(self.size, len(row), dtype=torch.float64)
        rows[self.rank] = torch.tensor(row, dtype=torch.float64)
        if self.size > 1:
            self._exchange(lambda: dist.all_reduce(rows))
        return rows.numpy()

    def add_up(self, gradient: Tensor, scale: float) -> None:
        """Replaces a gradient buffer by the sum over all ranks, in place. A GPU is not waited for.

        Args:
          scale: of this rank's gradients; the number behind them, by which a mean is divided, is not scaled.
        """
        if scale != 1:
            gradient[:-1].mul_(scale)
        self._exchange(lambda: dist.all_reduce(gradient, group=self._group))

    def share(self, tensors: Mapping[str, Tensor], text: bytes) -> bytes:
        """Copies rank 0's tensors into those of all ranks, in place; returns rank 0's text.

        Raises: PeerError when a rank is gone or says nothing in time.
        """
        if self.size == 1:
            return text
        said = torch.zeros(int(self.gather([len(text)])[0, 0]), dtype=torch.uint8)
        if self.is_first and text:
            said = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if len(said):
            self._exchange(lambda: dist.broadcast(said, 0))
        for name in sorted(tensors):
            if not name.startswith(OWN_STATE):
                there = tensors[name].detach().cpu().contiguous()
                self._exchange(lambda: dist.broadcast(there, 0))  # noqa: B023 - used at once
                with torch.no_grad():
                    tensors[name].copy_(there)
        return said.numpy().tobytes()

    def check_equal(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises ApexError when the ranks' tensors differ, with the ranks that differ from rank 0."""
        if self.size == 1:
            return
        digest = checksum(tensors)
        rows = self.gather([digest >> 32, digest & 0xFFFFFFFF])
        others = [rank for rank in range(self.size) if (rows[rank] != rows[0]).any()]
        if others:
            raise ApexError(
                f"the networks of learners {others} differ from that of learner 0: their experience or their machines "
                "are at fault; the run can go on from its last checkpoint (--resume)"
            )

    def check_flags(self, values: Mapping[str, Any]) -> None:
        """Raises ConfigError on all ranks when those of another host were given other flags than the first one has."""
        own = {name: " ".join(words_of(flag_of(name), value)) for name, value in values.items()}
        first = msgspec.json.decode(self.share({}, msgspec.json.encode(own)), type=dict[str, str])
        other = [f"{own[name]} for {first.get(name, 'none')}" for name in own if own[name] != first.get(name)]
        ranks = np.flatnonzero(self.gather([len(other)])[:, 0]).tolist()
        if ranks:
            told = ", ".join(other) if other else f"learners {ranks} say which"
            raise ConfigError(f"learners of one run need the same flags, and some differ from the first one's: {told}")

    def close(self) -> None:
        """Leaves the others."""
        self._group = None  # else its threads outlive it, and end the process with an abort
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _exchange(self, exchange: Callable[[], object]) -> None:
        try:
            exchange()
        except RuntimeError as error:
            raise PeerError(
                f"learner {self.rank} of {self.size} has lost another one ({_first_line(error)}): all of them begin "
                "again from the last checkpoint"
            ) from error


def may_update(standings: Sequence[RankStanding]) -> bool:
    """Returns whether an update is due: every learner has a draw, but those that have been without one for long."""
    return any(s.has_draw for s in standings) and all(s.has_draw or s.is_skipped for s in standings)


def scale_of(standings: Sequence[RankStanding], rank: int) -> float:
    """Returns what a learner's gradient is multiplied by: so the largest importance weight of all draws is 1."""
    return standings[rank].largest_weight / max(s.largest_weight for s in standings if s.has_draw)


def who_is_late(standings: Sequence[RankStanding]) -> str:
    """Returns the learners that the others wait for, with what those wait for; empty when nobody is late."""
    late = [f"learner {rank} ({s.waits_for or 'a batch'})" for rank, s in enumerate(standings) if not s.has_draw]
    return ", ".join(late)


def join_team(command: LearnerCommand) -> tuple[LearnerCommand, Team]:
    """Returns the command of this process with its own device, and the team that `torchrun` made it a rank of.

    Raises: ConfigError when there are too few devices, or learners have other flags, PeerError when the others do not
      come.
    """
    size, local_rank, local_size = command.team_size if is_rank(command.team_size) else 1, 0, 1
    if size > 1:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
    device = devices_of(command.learning, local_size, torch.cuda.device_count())[local_rank]
    command = dataclasses.replace(command, learning=dataclasses.replace(command.learning, device=device))
    if size == 1:
        return command, Team()
    team = Team(int(os.environ["RANK"]), size, choose_device(device))
    values = values_of(command)
    names = {"agent", *EQUAL_FLAGS, *(name for part in EQUAL_SECTIONS for name in values_of(getattr(command, part)))}
    team.check_flags({name: values[name] for name in sorted(names)})
    return command, team


def interface_to(host: str) -> str:
    """Returns the network interface through which a host is reached, which may be this one.

    An address of this host may be on its loopback interface, where others do not reach it: then that of its way out.

    Raises: OSError when none reaches it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # chooses an interface, and sends nothing
        own = probe.getsockname()[0]
    for name, found in psutil.net_if_addrs().items():
        addresses = [address.address for address in found]
        if own in addresses:
            is_hidden = "127.0.0.1" in addresses and not own.startswith("127.")
            return interface_to(OUTSIDE) if is_hidden and host != OUTSIDE else name
    raise OSError(f"no interface has the address {own}, from which {host} is reached")


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """Returns 64 bits that say whether two ranks have the same tensors, but for those that each has for itself."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(tensors):
        if not name.startswith(OWN_STATE):
            digest.update(name.encode())
            digest.update(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "big")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
