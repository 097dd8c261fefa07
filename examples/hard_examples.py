"""No reinforcement learning: a classifier that sees the records more often which it still gets wrong.

Start a server with two tables over one log, then this program with the server's two ports:

    .venv/bin/python replay.py --tables plain=priority:0:64 hard=priority:0:64 --priority-exponent 1
    .venv/bin/python examples/hard_examples.py 51001 51002

A record is a ticket: 6 numbers, 3 marks, a text as its name, a label. The third mark is rare, and turns the label
around. One classifier learns from `plain`, whose priorities stay equal, the other one from `hard`, whose priorities are
its errors. It takes no importance weights: a miner of hard examples wants them more often than they come.
"""

import sys

import numpy as np

from apexrl import RecordClient

SIZE, MARKS, CLASSES, BATCH, RARE = 6, 3, 3, 64, 0.02
FIELDS = {"numbers": ("float32", SIZE), "marks": ("bool", MARKS), "name": "U20", "label": "int64"}


def tickets(rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    """Returns numbers [N, 6], marks [N, 3] and labels [N] of new tickets."""
    numbers = rng.standard_normal((count, SIZE)).astype(np.float32)
    marks = rng.random((count, MARKS)) < [0.5, 0.5, RARE]
    labels = np.digitize(numbers[:, 0] + marks[:, 0] - 0.5, [-0.5, 0.5])
    return {"numbers": numbers, "marks": marks, "label": np.where(marks[:, 2], CLASSES - 1 - labels, labels)}


def features(tickets: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the inputs [N, 20] of a linear classifier: all of them, and again where a ticket has the rare mark."""
    marks = tickets["marks"]
    inputs = np.column_stack([tickets["numbers"], marks, np.ones(len(marks))])
    return np.hstack([inputs, inputs * marks[:, 2:]])


def insert(endpoints: tuple[str, str], count: int) -> None:
    """Sends tickets, all with priority 1."""
    made = tickets(np.random.default_rng(0), count)
    with RecordClient(endpoints, "tickets", FIELDS) as client:
        for i in range(count):
            client.insert({"name": f"Nº {i}", **{field: array[i] for field, array in made.items()}}, priority=1.0)
        client.flush()


def learn(endpoints: tuple[str, str], table: str, count: int) -> tuple[np.ndarray, float, int]:
    """Returns a classifier [20, 3], the share of rare tickets in its batches, and the number of different tickets."""
    weights, rare, names = np.zeros((2 * (SIZE + MARKS + 1), CLASSES)), 0.0, set[str]()
    with RecordClient(endpoints, table, batch_sizes={table: BATCH}) as client:
        for _, batch in zip(range(count), client.batches(table), strict=False):
            inputs = features(batch.data)
            errors = probabilities(inputs @ weights) - np.eye(CLASSES)[batch.data["label"]]
            weights -= inputs.T @ errors / BATCH
            if table == "hard":
                client.update_priorities(table, batch.keys, np.abs(errors).max(axis=1))
            rare += batch.data["marks"][:, 2].mean() / count
            names |= set(batch.data["name"].tolist())
    return weights, rare, len(names)


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Returns probabilities [N, classes]."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


if __name__ == "__main__":
    endpoints = f"tcp://127.0.0.1:{sys.argv[1]}", f"tcp://127.0.0.1:{sys.argv[2]}"
    insert(endpoints, 4800)
    new = tickets(np.random.default_rng(1), 20_000)
    for table in ("plain", "hard"):
        weights, rare, num_seen = learn(endpoints, table, count=1000)
        right = (features(new) @ weights).argmax(axis=1) == new["label"]
        of_rare, of_others = right[new["marks"][:, 2]].mean(), right[~new["marks"][:, 2]].mean()
        print(
            f"{table}: {num_seen} tickets seen, {rare:.3f} rare, right {of_rare:.3f} of rare, {of_others:.3f} of others"
        )
