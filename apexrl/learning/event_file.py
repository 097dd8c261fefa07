"""The event file of a run, which TensorBoard shows: its records are written here, because a disk may be full.

tensorboardX's own writer has a thread that ends with the first error of the disk; the next call then waits for it for
ever. Its messages and its record format are used, its writer is not.
"""

import os
import socket
import struct
import time
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import custom_scalars

MAX_PENDING_BYTES = 8 * 2**20
FILE_VERSION = "brain.Event:2"
CHARTS = {
    "Ape-X": {
        "return": ["Multiline", ["evaluation/return_mean", "evaluation/return_max", "actor/return_mean"]],
        "return by epsilon": ["Multiline", ["actor/return_by_epsilon/.*"]],
        "frames a second": ["Multiline", ["actor/frames_per_second"]],
        "updates a second": ["Multiline", ["learner/updates_per_second"]],
        "who waits": ["Multiline", ["actor/waits_for/.*", "learner/waits_for/.*"]],
        "samples per insert": ["Multiline", ["replay/samples_per_insert"]],
    }
}


class EventFile:
    """Adds records to a new event file of a directory. One owner.

    A record waits in memory until `flush` has written it; beyond MAX_PENDING_BYTES new ones are dropped and counted.
    """

    def __init__(self, directory: Path):
        """Names the file; `flush` makes it."""
        self.num_dropped = 0
        self._path = directory / f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._num_bytes = 0  # of whole records in the file
        self._pending = bytearray()
        self._add(Event(wall_time=time.time(), file_version=FILE_VERSION))
        self._add(Event(wall_time=time.time(), summary=custom_scalars(CHARTS)))

    def scalars(self, metrics: dict[str, float], frames: int) -> None:
        """Adds metrics at a number of environment frames."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()]
        self._add(Event(wall_time=time.time(), step=frames, summary=Summary(value=values)))

    def png(self, tag: str, picture: bytes, frames: int) -> None:
        """Adds an encoded picture as it is."""
        image = Summary.Image(colorspace=3, encoded_image_string=picture)
        self._add(
            Event(wall_time=time.time(), step=frames, summary=Summary(value=[Summary.Value(tag=tag, image=image)]))
        )

    def flush(self) -> None:
        """Writes all records that wait; those that are not written whole go on waiting.

        Raises: OSError when the disk takes nothing.
        """
        if not self._pending:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            written = os.pwrite(descriptor, self._pending, self._num_bytes)
            if written < len(self._pending):
                os.ftruncate(descriptor, self._num_bytes)
                raise OSError(f"{self._path}: only {written} of {len(self._pending)} bytes could be written")
        finally:
            os.close(descriptor)
        self._num_bytes += written
        self._pending.clear()

    def _add(self, event: Event) -> None:
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        record = b"".join((length, _checksum(length), data, _checksum(data)))
        if len(self._pending) + len(record) > MAX_PENDING_BYTES:
            self.num_dropped += 1
        else:
            self._pending += record


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(data))
