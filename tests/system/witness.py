"""An actor beside a run's own: it inserts numbered unrolls that its environment could have given, and keeps count.

Prefix and sequence decide every byte of an insert, so that a journal can be asked for each of them. A server may
lengthen the actor's name, never change how it begins.
"""

import threading
from collections.abc import Sequence

import numpy as np

from apexrl.net import InsertClient, wire
from apexrl.replay.segment import Entry
from apexrl.types import StreamSpec, Unroll, UnrollHeader
from apexrl.unroll import UnrollCodec

PREFIX = "witness"
NUM_STREAMS = 2
PATIENCE_SECONDS = 600.0


def numbered_unroll(spec: StreamSpec, sequence: int) -> Unroll:
    """Returns an unroll whose frames, actions and rewards (the binary digits of the number) name its sequence."""
    steps = np.arange(spec.unroll_steps)
    action = (sequence + steps) % spec.num_actions if spec.num_actions else np.zeros((len(steps), *spec.action.shape))
    return Unroll(
        np.full((spec.unroll_frames, *spec.frame_shape), sequence % 251, spec.frame_dtype),
        action.astype(spec.action.dtype),
        ((sequence >> (steps % 32)) & 1).astype(np.float32),
        np.ones(spec.unroll_steps, np.float32),
        np.zeros(spec.unroll_steps + 1, bool),
        {f.name: np.full((spec.num_entries(f), *f.shape), sequence % 2, f.dtype) for f in spec.extras},
    )


def header_of(spec: StreamSpec, sequence: int) -> UnrollHeader:
    """Returns the header of the insert with this sequence."""
    first_step = sequence // NUM_STREAMS * spec.unroll_starts
    valid = np.ones(spec.unroll_starts, bool)
    priorities = np.full(spec.num_priorities, 0.5 + sequence % 3, np.float32)
    return UnrollHeader(sequence % NUM_STREAMS, first_step, 0, 0.1, valid, priorities, ())


class Witness:
    """The actor, in a thread of its own, from the start until `finish`."""

    def __init__(self, endpoint: str, spec: StreamSpec, seconds_between: float):
        self.num_sent = 0
        self.num_acknowledged = 0
        self.error = ""
        self._endpoint = endpoint
        self._spec = spec
        self._seconds_between = seconds_between
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Ends the thread; waits that long for the last acknowledgements."""
        self._ended.set()
        self._thread.join(seconds + 10)

    def _run(self) -> None:
        codec = UnrollCodec(self._spec)
        client = InsertClient(self._endpoint, PREFIX, self._spec, NUM_STREAMS)
        try:
            client.connect(PATIENCE_SECONDS, self._ended.is_set)
            while not self._ended.wait(self._seconds_between):
                client.poll()
                if client.may_insert:
                    block = codec.encode(numbered_unroll(self._spec, self.num_sent))
                    client.insert(header_of(self._spec, self.num_sent), block, PATIENCE_SECONDS)
                    self.num_sent += 1
                self.num_acknowledged = self.num_sent - client.num_unacknowledged
            client.flush(30)
            self.num_acknowledged = self.num_sent - client.num_unacknowledged
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            client.close()


def faults_of(entries: Sequence[Entry], spec: StreamSpec, acknowledged: int) -> tuple[str, list[str]]:
    """Returns how many acknowledged inserts a journal holds, and what is wrong with them."""
    codec, found, faults = UnrollCodec(spec), [], []
    for entry in entries:
        insert = wire.decode_insert(entry.message)
        if not insert.actor.startswith(PREFIX):
            continue
        found.append(insert.sequence)
        header = header_of(spec, insert.sequence)
        same = (insert.stream, insert.first_step) == (header.stream, header.first_step)
        if not same or entry.block != codec.encode(numbered_unroll(spec, insert.sequence)):
            faults.append(f"unroll {entry.number}: insert {insert.sequence} is not what the witness inserted")
    lost = set(range(acknowledged)) - set(found)
    doubled = len(found) - len(set(found))
    if lost:
        faults.append(f"{len(lost)} of {acknowledged} acknowledged inserts are lost, the first is {min(lost)}")
    if doubled:
        faults.append(f"{doubled} inserts are there twice")
    if found != sorted(found):
        faults.append("inserts are out of order")
    return f"{acknowledged} acknowledged, {len(lost)} lost, {doubled} doubled", faults
