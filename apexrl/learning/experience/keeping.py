"""The settings of a learner's replicas: which batches it wants, and where the unrolls lie."""

import contextlib
import functools
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from apexrl.agents.contract import RowStrategy, Want
from apexrl.agents.families import family_of, implementation
from apexrl.config.commands import LearnerCommand
from apexrl.config.flags import wants_of
from apexrl.errors import ConfigError
from apexrl.learning.experience.run_moments import NOTHING_KNOWN, Known, RunMoments
from apexrl.learning.experience.sizes import DEVICE_RESERVE_BYTES, bytes_needed
from apexrl.learning.experience.unroll_store import UnrollStore
from apexrl.memory import free_memory_bytes
from apexrl.networks.device_stream import DeviceStream
from apexrl.streams import StreamOrder
from apexrl.types import StreamSpec

logger = logging.getLogger(__name__)


def no_rows(*settings_and_order: Any) -> None:
    """Stands for the `make_rows` of a family that takes what the tables hand out."""


class Keeping(NamedTuple):
    """The same for each log that a learner follows."""

    wants: tuple[Want, ...]
    device_stream: DeviceStream
    prefetch_batches: int
    memory_gb: float = 0.0  # gigabytes that a store may take; 0: the memory that is free
    make_rows: Callable[[StreamOrder], RowStrategy | None] = no_rows
    moments: RunMoments | None = None  # where something is normalized

    @classmethod
    def of(
        cls, command: LearnerCommand, device_stream: DeviceStream, num_shards: int = 1, known: Known = NOTHING_KNOWN
    ) -> "Keeping":
        """Returns the settings of a learner that follows so many logs; `known` as `RunMoments` takes it."""
        learning, make_rows = command.learning, getattr(implementation(family_of(command.agent)), "make_rows", no_rows)
        stores = num_shards * learning.num_learners  # of this host; a store takes its memory as it fills
        memory_gb = free_memory_bytes(learning.memory_gb) / 1e9 / stores if stores > 1 else learning.memory_gb
        is_normalized = learning.normalize_observations or learning.scale_rewards
        return cls(
            wants_of(command), device_stream, learning.prefetch_batches, memory_gb,
            functools.partial(make_rows, command.algorithm, command.update),
            RunMoments(learning, command.algorithm.gamma, device_stream, known) if is_normalized else None,
        )  # fmt: skip

    def make_store(self, spec: StreamSpec, ring_unrolls: int) -> UnrollStore:
        """Makes an unroll store on the learner's device, or in host memory when it does not fit there.

        Raises: ConfigError when it fits nowhere.
        """
        started = time.monotonic()
        store = self._on_gpu(spec, ring_unrolls) or self._on_host(spec, ring_unrolls)
        logger.info(
            "unroll store on %s: %d unrolls, %.1f GB (%.1f s)",
            store.device, ring_unrolls, store.num_bytes / 1e9, time.monotonic() - started,
        )  # fmt: skip
        return store

    def _on_gpu(self, spec: StreamSpec, ring_unrolls: int) -> UnrollStore | None:
        """Returns a store on the learner's GPU; None where there is none, or too little memory."""
        device = self.device_stream.device
        if device.type != "cuda":
            return None
        needed = bytes_needed(spec, ring_unrolls, self.wants)
        with self.device_stream.exclusive():
            on_device = torch.cuda.mem_get_info(device)[0]
        if needed + DEVICE_RESERVE_BYTES <= on_device:
            with contextlib.suppress(torch.OutOfMemoryError):  # another process may take the memory first
                return self._store_on(device, spec, ring_unrolls)
        logger.warning(
            "the unroll store needs %.1f GB and %.1f GB beside it, %.1f GB were free on %s: "
            "it goes to host memory, and each batch is copied from there",
            needed / 1e9, DEVICE_RESERVE_BYTES / 1e9, on_device / 1e9, device,
        )  # fmt: skip
        return None

    def _on_host(self, spec: StreamSpec, ring_unrolls: int) -> UnrollStore:
        needed = bytes_needed(spec, ring_unrolls, self.wants)
        free = free_memory_bytes(self.memory_gb)
        if needed > free:
            raise ConfigError(
                f"the unroll store needs {needed / 1e9:.1f} GB in host memory, {free / 1e9:.1f} GB are free for it: "
                "start the replay with a smaller --capacity"
            )
        return self._store_on(torch.device("cpu"), spec, ring_unrolls)

    def _store_on(self, device: torch.device, spec: StreamSpec, ring_unrolls: int) -> UnrollStore:
        num_batches = self.prefetch_batches + 2 + self.device_stream.depth
        normalizer = None
        if self.moments is not None:
            self.moments.begin(spec)
            normalizer = self.moments.normalizer_on(device)
        return UnrollStore(spec, ring_unrolls, self.wants, device, num_batches, self.device_stream, normalizer)
