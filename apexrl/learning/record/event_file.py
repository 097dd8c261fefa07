"""The event file of a run, which TensorBoard shows. This module writes its records itself, because a disk may be full.

tensorboardX's own writer has a thread that ends at the first error of the disk. The next call would then wait for that
thread without end. So this module uses tensorboardX's messages and record format, but not its writer.
"""

import logging
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import custom_scalars, hparams, text

from apexrl.clocks import Allowance
from apexrl.learning.record.metric_texts import text_of
from apexrl.lines import Repeats, printable

logger = logging.getLogger(__name__)

MAX_PENDING_BYTES = 8 * 2**20
# Bytes of records that are written at once, and in each second after that. A usual run needs 500 bytes a second, and
# TensorBoard shows 1,000 numbers of a tag and 10 pictures, whatever the file holds.
NUMBERS_BYTES, NUMBERS_RATE = 256 * 2**20, 4096.0
PICTURES_BYTES, PICTURES_RATE = 8 * 2**20, 2048.0
FRAMING_BYTES = 16  # of a record
SAID_SECONDS = 600.0
FILE_VERSION = "brain.Event:2"
EARLIER = re.compile(r"events\.out\.tfevents\.(\d{10})\.")
ABOUT = "about"  # the first of the texts, which are sorted by their tags
# The cards that TensorBoard shows first: it sorts them by their tags. A card has room for 22 characters.
OVERVIEW = {
    "evaluation/return_mean": "Overview/1 evaluation",
    "actor/return_mean": "Overview/2 training",
    "actor/frames_per_second": "Overview/3 frames/s",
    "learner/updates_per_second": "Overview/4 updates/s",
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

    A record waits in memory until `flush` has written it. Beyond `MAX_PENDING_BYTES` new ones are dropped and counted,
    and so are those that come faster than the file may grow.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic):
        """Chooses the file's name; the first `flush` makes the file."""
        self.num_dropped = 0
        self._numbers = Allowance(NUMBERS_BYTES, NUMBERS_RATE, clock)
        self._pictures = Allowance(PICTURES_BYTES, PICTURES_RATE, clock)  # and texts
        self._repeats = Repeats(SAID_SECONDS, clock=clock)
        earlier = (EARLIER.match(path.name) for path in directory.glob("events.out.tfevents.*"))
        # TensorBoard reads files in the order of their names, also where the clock was set back since.
        began = max([int(time.time()), *(1 + int(found[1]) for found in earlier if found is not None)])
        self._path = directory / f"events.out.tfevents.{began:010d}.{socket.gethostname()}.{os.getpid()}"
        self._num_bytes = 0  # bytes of whole records in the file
        self._pending = bytearray()
        self._described: set[str] = set()
        self._add(Event(wall_time=time.time(), file_version=FILE_VERSION), self._numbers)
        self._add(Event(wall_time=time.time(), summary=custom_scalars(CHARTS)), self._numbers)

    def about(self, flags: Mapping[str, bool | float | str], page: str) -> None:
        """Adds the flags of the run, for HParams, and a page of Markdown about it.

        The record of the experiment is left out: TensorBoard takes its columns from that of any one run, and from the
        flags of all runs where there is none.
        """
        for summary in hparams(flags, {})[1:]:
            self._add(Event(wall_time=time.time(), summary=summary), self._numbers)
        self.text(ABOUT, page, 0)

    def scalars(self, metrics: dict[str, float], frames: int) -> None:
        """Adds metrics under their tags at a number of environment frames; some of them in the overview, too."""
        shown = metrics | {title: metrics[tag] for tag, title in OVERVIEW.items() if tag in metrics}
        values = [self._value(tag, value) for tag, value in shown.items()]
        self._add(Event(wall_time=time.time(), step=frames, summary=Summary(value=values)), self._numbers)

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
        summary = Summary(value=[Summary.Value(tag=tag, image=image)])
        self._add(Event(wall_time=time.time(), step=frames, summary=summary), self._pictures)

    def text(self, tag: str, markdown: str, frames: int) -> None:
        """Adds a text."""
        self._add(Event(wall_time=time.time(), step=frames, summary=text(tag, printable(markdown))), self._pictures)

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

    def _add(self, event: Event, allowance: Allowance) -> None:
        num_bytes = event.ByteSize() + FRAMING_BYTES  # checksums take a tenth of a second a megabyte
        if len(self._pending) + num_bytes > MAX_PENDING_BYTES:
            self.num_dropped += 1
        elif allowance.takes(num_bytes):
            self._pending += _record(event)
        else:
            self.num_dropped += 1
            if self._repeats.let_through():
                logger.warning("%s would grow too fast: TensorBoard gets only some of the pictures, or of the numbers "
                               "(%d records were left out so far)", self._path, self.num_dropped)  # fmt: skip


def _record(event: Event) -> bytes:
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return b"".join((length, _checksum(length), data, _checksum(data)))


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(data))
