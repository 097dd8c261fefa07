"""Records of 64 floats in Reverb: `python benchmarks/peers/reverb_records.py --port P [--work insert|sample] ...`.

Without --work it serves. It runs in Reverb's own environment, and imports nothing of apexrl. A record is one step of a
trajectory writer, whose items are confirmed some at a time: one client.insert a record is several times slower.
"""

import argparse
import json
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import reverb
import tensorflow as tf

TABLE, SIZE, SECONDS_TO_WAIT = "records", 64, 30
ITEMS_UNCONFIRMED = 40  # Reverb warns at 50


def serve(port: int, capacity: int) -> None:
    """Serves one prioritized table until killed."""
    signature = {"x": tf.TensorSpec([1, SIZE], tf.float32)}
    table = reverb.Table(
        TABLE, reverb.selectors.Prioritized(0.6), reverb.selectors.Fifo(), capacity, reverb.rate_limiters.MinSize(1),
        signature=signature,
    )  # fmt: skip
    server = reverb.Server([table], port=port)
    print("ready", flush=True)
    server.wait()


def insert(port: int, count: int, seconds: float) -> float:
    """Returns the records/s that the server confirmed, after the first `count`."""
    client = reverb.Client(f"127.0.0.1:{port}")
    client.server_info(timeout=SECONDS_TO_WAIT)
    writer = client.trajectory_writer(num_keep_alive_refs=1)
    records = np.random.default_rng(0).standard_normal((1000, SIZE)).astype(np.float32)
    made, began, counted = 0, time.perf_counter(), 0
    while made < count or time.perf_counter() - began < seconds:
        if made == count:
            writer.flush(timeout_ms=1000 * SECONDS_TO_WAIT)
            began, counted = time.perf_counter(), made
        writer.append({"x": records[made % 1000]})
        writer.create_item(TABLE, 1.0, {"x": writer.history["x"][-1:]})
        writer.flush(ITEMS_UNCONFIRMED, timeout_ms=1000 * SECONDS_TO_WAIT)
        made += 1
    writer.flush(timeout_ms=1000 * SECONDS_TO_WAIT)
    return (made - counted) / (time.perf_counter() - began)


def sample(port: int, batch: int, seconds: float) -> float:
    """Returns the batches/s that arrive in numpy."""
    dataset = reverb.TrajectoryDataset.from_table_signature(
        server_address=f"127.0.0.1:{port}", table=TABLE, max_in_flight_samples_per_worker=2 * batch
    )
    batches = iter(dataset.batch(batch, drop_remainder=True).prefetch(2).as_numpy_iterator())
    for _ in range(20):
        next(batches)
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        assert next(batches).data["x"].shape == (batch, 1, SIZE)
        count += 1
    return count / (time.perf_counter() - began)


def main() -> None:
    """Serves, or prints a rate as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--capacity", type=int, default=200_000)
    parser.add_argument("--work", choices=("insert", "sample"))
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=5.0)
    arguments = parser.parse_args()
    if arguments.work is None:
        serve(arguments.port, arguments.capacity)
    elif arguments.work == "insert":
        print(json.dumps(insert(arguments.port, arguments.count, arguments.seconds)))
    else:
        print(json.dumps(sample(arguments.port, arguments.batch, arguments.seconds)))


if __name__ == "__main__":
    main()
