"""No reinforcement learning: a classifier that sees the records more often which it still gets wrong.

Start a server with two tables over one log, then this program with the server's two ports:

    python replay.py --tables plain=priority:0:64 hard=priority:0:64 --priority-exponent 1
    PYTHONPATH=. python examples/hard_examples.py 51001 51002

A record is a ticket: 6 numbers, 3 marks, a text as its name, a label. The third mark is rare, and turns the label
around. One classifier learns from `plain`, whose priorities stay equal, the other one from `hard`, whose priorities are
its errors. It takes no importance weights: a miner of hard examples wants them more often than they come.
"""

import sys
from collections.abc import Iterator

import numpy as np

from apexrl.net import InsertClient, ReplayClient, StoredUnroll
from apexrl.types import Field, StreamSpec, Unroll, UnrollHeader
from apexrl.unroll import UnrollCodec

SIZE, MARKS, CLASSES, TEXT_BYTES, TOGETHER, BATCH, RARE = 6, 3, 3, 24, 16, 64, 0.02
SPEC = StreamSpec(
    "tickets", frame_shape=(SIZE,), frame_dtype="float32", stacked_frames=1, num_actions=CLASSES, frames_per_step=1,
    unroll_starts=TOGETHER, overlap_steps=0,
    extras=(Field("marks", "step", "uint8", (MARKS,)), Field("name", "step", "uint8", (TEXT_BYTES,))),
)  # fmt: skip


def tickets(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns numbers [N, 6], marks [N, 3] and labels [N] of new tickets."""
    numbers = rng.standard_normal((count, SIZE)).astype(np.float32)
    marks = rng.random((count, MARKS)) < [0.5, 0.5, RARE]
    labels = np.digitize(numbers[:, 0] + marks[:, 0] - 0.5, [-0.5, 0.5])
    return numbers, marks, np.where(marks[:, 2], CLASSES - 1 - labels, labels)


def features(numbers: np.ndarray, marks: np.ndarray) -> np.ndarray:
    """Returns the inputs [N, 20] of a linear classifier: all of them, and again where a ticket has the rare mark."""
    inputs = np.column_stack([numbers, marks, np.ones(len(marks))])
    return np.hstack([inputs, inputs * marks[:, 2:]])


def insert(endpoint: str, num_unrolls: int) -> None:
    """Sends tickets, 16 in an unroll, all with priority 1."""
    client = InsertClient(endpoint, "tickets", SPEC, num_streams=1)
    client.connect(timeout_seconds=10)
    codec, rng = UnrollCodec(SPEC), np.random.default_rng(0)
    no_rewards, no_starts, everywhere = np.zeros(TOGETHER), np.zeros(TOGETHER + 1, bool), np.ones(TOGETHER, bool)
    for number in range(num_unrolls):
        numbers, marks, labels = tickets(rng, TOGETHER)
        texts = [f"Nº {number * TOGETHER + i}".encode().ljust(TEXT_BYTES, b"\0") for i in range(TOGETHER)]
        names = np.frombuffer(b"".join(texts), np.uint8).reshape(TOGETHER, TEXT_BYTES)
        frames = np.vstack([numbers, numbers[-1:]])  # an unroll has a frame more than steps
        unroll = Unroll(frames, labels, no_rewards, no_rewards, no_starts, {"marks": marks, "name": names})
        header = UnrollHeader(0, number * TOGETHER, 0, 0.0, everywhere, everywhere.astype(np.float32), episodes=())
        client.insert(header, codec.encode(unroll), timeout_seconds=10)
    client.flush(timeout_seconds=10)
    client.close()


def batches(client: ReplayClient, table: str, count: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Yields keys [B] of a table, and the numbers, marks, labels and names of their tickets."""
    held = dict[int, StoredUnroll]()
    for _ in range(count):
        keys = client.sample(table, timeout_seconds=10).keys
        places = [divmod(key, TOGETHER) for key in keys.tolist()]
        held |= client.fetch({number for number, _ in places} - held.keys(), timeout_seconds=10)
        of = [(held[number].unroll, start) for number, start in places]
        rows = [(u.frames[i], u.extras["marks"][i], u.actions[i], u.extras["name"][i].tobytes()) for u, i in of]
        yield (keys, *map(np.array, zip(*rows, strict=True)))


def learn(endpoint: str, table: str, count: int) -> tuple[np.ndarray, float, int]:
    """Returns a classifier [20, 3], the share of rare tickets in its batches, and the number of different tickets."""
    client = ReplayClient(endpoint, table, batch_sizes={table: BATCH})
    weights, rare, names = np.zeros((2 * (SIZE + MARKS + 1), CLASSES)), 0.0, set[str]()
    for keys, numbers, marks, labels, texts in batches(client, table, count):
        inputs = features(numbers, marks)
        errors = probabilities(inputs @ weights) - np.eye(CLASSES)[labels]
        weights -= inputs.T @ errors / BATCH
        if table == "hard":
            client.update_priorities(table, keys, np.abs(errors).max(axis=1))
        rare += marks[:, 2].mean() / count
        names |= {text.decode() for text in texts}
    client.close()
    return weights, rare, len(names)


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Returns probabilities [N, classes]."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


if __name__ == "__main__":
    actor_port, batch_port = sys.argv[1:]
    insert(f"tcp://127.0.0.1:{actor_port}", num_unrolls=300)
    numbers, marks, labels = tickets(np.random.default_rng(1), 20_000)
    for table in ("plain", "hard"):
        weights, rare, num_seen = learn(f"tcp://127.0.0.1:{batch_port}", table, count=1000)
        right = (features(numbers, marks) @ weights).argmax(axis=1) == labels
        of_rare, of_others = right[marks[:, 2]].mean(), right[~marks[:, 2]].mean()
        print(
            f"{table}: {num_seen} tickets seen, {rare:.3f} rare, right {of_rare:.3f} of rare, {of_others:.3f} of others"
        )
