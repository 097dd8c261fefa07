"""The event file of a run, which TensorBoard shows. This module writes its records itself, because a disk may be full.

tensorboardX's own writer has a thread that ends at the first error of the disk. The next call would then wait for that
thread without end. So this module uses tensorboardX's messages and record format, but not its writer.
"""

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import custom_scalars, hparams, text

from apexrl.learning.metric_texts import text_of

MAX_PENDING_BYTES = 8 * 2**20
FILE_VERSION = "brain.Event:2"
# The cards that TensorBoard shows first: it sorts them by their tags.
OVERVIEW = {
    "evaluation/return_mean": "Overview/1 evaluation return",
    "actor/return_mean": "Overview/2 training return",
    "actor/frames_per_second": "Overview/3 frames a second",
    "learner/updates_per_second": "Overview/4 updates a second",
}
CHARTS = {
    "run": {
        "return": ["Multiline", ["evaluation/return_mean", "evaluation/return_max", "actor/return_mean"]],
        "return by exploration": ["Multiline", ["actor/return_by_exploration/.*"]],
        "frames a second": ["Multiline", ["actor/frames_per_second"]],
        "updates a second": ["Multiline", ["learner/updates_per_second"]],
        "who waits": ["Multiline", ["actor/waits_for/.*", "learner/waits_for/.*"]],
        "lag in updates": ["Multiline", ["learner/version_lag.*"]],
        "samples per insert": ["Multiline", ["replay/samples_per_insert"]],
    }
}


class EventFile:
    """Adds records to a new event file of a directory. One owner.

    A record waits in memory until `flush` has written it. Beyond `max_pending_bytes` new ones are dropped and counted.
    """

    def __init__(self, directory: Path, max_pending_bytes: int = MAX_PENDING_BYTES):
        """Chooses the file's name; the first `flush` makes the file."""
        self.num_dropped = 0
        self._max_pending_bytes = max_pending_bytes
        self._path = directory / f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._num_bytes = 0  # bytes of whole records in the file
        self._pending = bytearray()
        self._described: set[str] = set()
        self._add(Event(wall_time=time.time(), file_version=FILE_VERSION))
        self._add(Event(wall_time=time.time(), summary=custom_scalars(CHARTS)))

    def about(self, flags: Mapping[str, bool | float | str], page: str) -> None:
        """Adds the flags of the run, for HParams, and a page of Markdown about it."""
        for summary in hparams(flags, {"evaluation/return_mean": 0.0}):
            self._add(Event(wall_time=time.time(), summary=summary))
        self.text("run", page, 0)

    def scalars(self, metrics: dict[str, float], frames: int) -> None:
        """Adds metrics under their tags at a number of environment frames; some of them in the overview, too."""
        shown = metrics | {title: metrics[tag] for tag, title in OVERVIEW.items() if tag in metrics}
        values = [self._value(tag, value) for tag, value in shown.items()]
        self._add(Event(wall_time=time.time(), step=frames, summary=Summary(value=values)))

    def _value(self, tag: str, value: float) -> Summary.Value:
        """Returns a metric; its first record tells its unit and its meaning."""
        if tag in self._described:
            return Summary.Value(tag=tag, simple_value=value)
        self._described.add(tag)
        titles = {title: name for name, title in OVERVIEW.items()}
        found = text_of(titles.get(tag, tag))
        described = "" if found is None else f"{found.text} Unit: {found.unit}." if found.unit else found.text
        metadata = SummaryMetadata(
            summary_description=described, plugin_data=SummaryMetadata.PluginData(plugin_name="scalars")
        )
        return Summary.Value(tag=tag, simple_value=value, metadata=metadata)

    def png(self, tag: str, picture: bytes, frames: int) -> None:
        """Adds a PNG picture, without decoding it."""
        image = Summary.Image(colorspace=3, encoded_image_string=picture)
        self._add(
            Event(wall_time=time.time(), step=frames, summary=Summary(value=[Summary.Value(tag=tag, image=image)]))
        )

    def text(self, tag: str, markdown: str, frames: int) -> None:
        """Adds a text."""
        self._add(Event(wall_time=time.time(), step=frames, summary=text(tag, markdown)))

    def flush(self) -> None:
        """Writes all waiting records, or none.

        Raises: OSError when the disk does not take them all; they go on waiting then.
        """
        if not self._pending:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            if os.fstat(descriptor).st_size < self._num_bytes:  # somebody removed it: it begins anew
                self._num_bytes = 0
                self._pending[:0] = _record(Event(wall_time=time.time(), file_version=FILE_VERSION))
            written = os.pwrite(descriptor, self._pending, self._num_bytes)
            if written < len(self._pending):
                os.ftruncate(descriptor, self._num_bytes)
                raise OSError(f"{self._path}: only {written} of {len(self._pending)} bytes could be written")
        finally:
            os.close(descriptor)
        self._num_bytes += written
        self._pending.clear()

    def _add(self, event: Event) -> None:
        record = _record(event)
        if len(self._pending) + len(record) > self._max_pending_bytes:
            self.num_dropped += 1
        else:
            self._pending += record


def _record(event: Event) -> bytes:
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return b"".join((length, _checksum(length), data, _checksum(data)))


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(data))
