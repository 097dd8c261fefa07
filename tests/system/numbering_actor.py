"""An actor process that plays nothing: it inserts numbered unrolls and writes down what was acknowledged.

Arguments: the server's endpoint, the actor's name before its mark, its streams, the file of the acknowledged count.
Runs until SIGTERM.
The name and the sequence of an insert decide every byte of it, so that a checker can tell what the log has to hold.
"""

import os
import random
import signal
import sys
import time
import zlib
from pathlib import Path

import numpy as np

from apexrl.net import InsertClient
from apexrl.types import StreamSpec, Unroll, UnrollHeader
from apexrl.unroll import UnrollCodec

SPEC = StreamSpec("Numbers-v0", (2,), "float32", 3, 4, 1, unroll_starts=8, overlap_steps=2)
PATIENCE_SECONDS = 600.0
LONGEST_PAUSE_SECONDS = 0.1


def numbered_insert(actor: str, num_streams: int, sequence: int, codec: UnrollCodec) -> tuple[UnrollHeader, bytes]:
    """Returns the insert of an actor with this sequence: its frames count the steps of its stream."""
    stream, first_step = sequence % num_streams, sequence // num_streams * SPEC.unroll_starts
    steps = np.arange(SPEC.unroll_steps)
    frames = np.empty((SPEC.unroll_frames, 2), np.float32)
    frames[:, 0], frames[:, 1] = stream, first_step + np.arange(SPEC.unroll_frames)
    unroll = Unroll(
        frames,
        ((first_step + steps) % SPEC.num_actions).astype(np.int32),
        np.full(SPEC.unroll_steps, zlib.crc32(actor.encode()) % 2**20, np.float32),
        np.ones(SPEC.unroll_steps, np.float32),
        np.zeros(SPEC.unroll_steps + 1, bool),
    )
    priorities = np.full(SPEC.unroll_starts, 1 + sequence % 7, np.float32)
    return UnrollHeader(stream, first_step, 0, 0.1, priorities > 0, priorities, ()), codec.encode(unroll)


def main(endpoint: str, actor: str, num_streams: int, path: Path) -> int:
    """Inserts in bursts until SIGTERM; returns the exit status."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    client = InsertClient(endpoint, actor, SPEC, num_streams)
    codec, rng, num_sent = UnrollCodec(SPEC), random.Random(actor), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)

    def note() -> None:
        os.pwrite(descriptor, b"%012d" % (num_sent - client.num_unacknowledged), 0)

    client.connect(PATIENCE_SECONDS)
    while not told:
        for _ in range(rng.randint(1, 2 * num_streams + 2)):
            client.insert(*numbered_insert(actor, num_streams, num_sent, codec), PATIENCE_SECONDS)
            num_sent += 1
            note()
        time.sleep(rng.uniform(0, LONGEST_PAUSE_SECONDS))
        client.poll()
        note()
    is_flushed = client.flush(60)
    note()
    client.close()
    return 0 if is_flushed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])))
