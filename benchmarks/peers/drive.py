"""Feeds and reads a peer's replay server, and prints its rates as one line of JSON.

`python benchmarks/peers/drive.py --peer reverb --ports P --server-pid PID --frames Pong.npz --work together`
`python benchmarks/peers/drive.py --peer pickle --ports PUSH SAMPLE PRIORITY --server-pid PID --frames ... --work ...`

It runs in the peer's own environment, with numpy and reverb or zmq, and imports nothing of apexrl. It expects a fresh
server of its own, inserts `--fill` transitions in every workload, warms up for two seconds and then counts. Inserts
count when the server has confirmed them, batches when they lie decoded in this process.

A transition is the stack of 4 frames at t and at t + 3, the action at t, the 3-step return, its discount, a priority.
Stacks continue over the ends of episodes, which changes none of the sizes.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import json
import multiprocessing
import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HOST = "127.0.0.1"
STACK = 4
N_STEPS = 3
WINDOW = STACK + N_STEPS
GAMMA = 0.99
WARM_UP_SECONDS = 2.0
START_SECONDS = 60  # longest time for loading, connecting and filling

PUSH_TRANSITIONS = 50
PUSHES_UNCONFIRMED = 3
SAMPLES_UNANSWERED = 3
UPDATES_UNCONFIRMED = 16
ANSWER_MILLISECONDS = 30_000

TABLE = "transitions"
CHUNK_STEPS = 7  # the best of 1, 3, 4, 7 and automatic, for inserts, samples and memory
ITEMS_UNCONFIRMED = 30  # reverb warns at 50; ten more are made before the next check
SAMPLER_WORKERS = 2
SAMPLES_IN_FLIGHT = 1024  # for each worker
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8  # glibc's malloc.h


class Feed(NamedTuple):
    """The data to insert, by environment and step. A transition starts at each step from STACK - 1 on."""

    frames: np.ndarray  # [E, steps, 84, 84] uint8
    actions: np.ndarray  # [E, steps] int32
    returns: np.ndarray  # [E, steps - n] float32
    discounts: np.ndarray  # [E, steps - n] float32
    priorities: np.ndarray  # [E, steps - n] float64


def load_feed(path: Path) -> Feed:
    """Returns the feed from a file of `benchmarks.replay_frames`."""
    with np.load(path) as arrays:
        frames, actions, rewards, terminals = (arrays[key] for key in ("frames", "actions", "rewards", "terminals"))
    num_starts = rewards.shape[1] - N_STEPS
    returns = np.zeros((len(rewards), num_starts), np.float32)
    discounts = np.ones_like(returns)
    for i in range(N_STEPS):
        returns += discounts * rewards[:, i : i + num_starts]
        discounts *= np.float32(GAMMA) * ~terminals[:, i : i + num_starts]
    priorities = np.abs(np.random.default_rng(0).normal(size=returns.shape)) + 1e-3
    return Feed(frames, actions, returns, discounts, priorities)


class ReverbInserter:
    """Inserts through one trajectory writer. It sends each frame once, and an item refers to seven in a row.

    Action, return and discount share one column. With three columns the server takes a third fewer items a second.
    """

    def __init__(self, port: int, feed: Feed):
        import reverb

        client = reverb.Client(f"{HOST}:{port}")
        client.server_info(timeout=ANSWER_MILLISECONDS // 1000)
        self._writer = client.trajectory_writer(num_keep_alive_refs=WINDOW + 1)
        self._writer.configure(("frame",), num_keep_alive_refs=WINDOW + 1, max_chunk_length=CHUNK_STEPS)
        self._items = self._create(feed)

    def insert(self) -> int:
        """Creates ten items."""
        for _ in range(10):
            next(self._items)
        self._writer.flush(ITEMS_UNCONFIRMED, timeout_ms=ANSWER_MILLISECONDS)
        return 10

    def settle(self) -> None:
        """Waits until all items are in the table."""
        self._writer.flush(timeout_ms=ANSWER_MILLISECONDS)

    def _create(self, feed: Feed) -> Iterator[None]:
        """Appends steps without end; yields after each item. A step carries the numbers of the start n steps before."""
        writer = self._writer
        numbers = np.stack([feed.actions[:, :-N_STEPS], feed.returns, feed.discounts], axis=-1).astype(np.float32)
        while True:
            for env in range(len(feed.frames)):
                for t, frame in enumerate(feed.frames[env]):
                    start = max(t - N_STEPS, 0)
                    writer.append({"frame": frame, "numbers": numbers[env, start]})
                    if t >= WINDOW - 1:
                        history = writer.history
                        item = {"frames": history["frame"][-WINDOW:], "numbers": history["numbers"][-1]}
                        writer.create_item(TABLE, feed.priorities[env, start], item)
                        yield
                writer.end_episode(timeout_ms=ANSWER_MILLISECONDS)


class ReverbSampler:
    """Reverb's dataset client, as its manual recommends for training, with batching and prefetching in tf.data."""

    def __init__(self, port: int, batch_size: int):
        import reverb
        import tensorflow as tf

        dataset = reverb.TrajectoryDataset.from_table_signature(
            server_address=f"{HOST}:{port}",
            table=TABLE,
            max_in_flight_samples_per_worker=SAMPLES_IN_FLIGHT,
            num_workers_per_iterator=SAMPLER_WORKERS,
            rate_limiter_timeout_ms=ANSWER_MILLISECONDS,
        )
        self._shape = (batch_size, WINDOW, 84, 84)
        self._batches = dataset.batch(batch_size, drop_remainder=True).prefetch(2).as_numpy_iterator()
        self._client = reverb.TFClient(f"{HOST}:{port}")
        self._tf = tf

    def sample(self) -> np.ndarray:
        """Returns keys [B]; the observations are views into the frames [B, 7, 84, 84] of the batch."""
        batch = next(self._batches)
        if batch.data["frames"].shape != self._shape:
            raise ValueError(f"a batch of shape {batch.data['frames'].shape}, {self._shape} expected")
        return batch.info.key

    def update(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sends priorities and waits for the answer."""
        self._client.update_priorities(TABLE, self._tf.constant(keys, self._tf.uint64), priorities)


class PickleChannel:
    """A DEALER socket that counts the messages that wait for their answer."""

    def __init__(self, port: int):
        import zmq

        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, ANSWER_MILLISECONDS)
        self._socket.setsockopt(zmq.SNDTIMEO, ANSWER_MILLISECONDS)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"tcp://{HOST}:{port}")
        self.waiting = 0

    def send(self, message: bytes) -> None:
        """Sends one message, whose answer `receive` returns."""
        self._socket.send(message, copy=False)
        self.waiting += 1

    def receive(self) -> memoryview:
        """Returns the next answer."""
        answer = self._socket.recv(copy=False).buffer
        self.waiting -= 1
        return answer


class PickleInserter:
    """Inserts pushes of 50. A stack is one array wherever it occurs in a push, so that pickle writes it once."""

    def __init__(self, port: int, feed: Feed):
        self._channel = PickleChannel(port)
        self._pushes = self._encode(feed)

    def insert(self) -> int:
        """Sends one push."""
        self._channel.send(next(self._pushes))
        while self._channel.waiting >= PUSHES_UNCONFIRMED:
            self._channel.receive()
        return PUSH_TRANSITIONS

    def settle(self) -> None:
        """Waits for all answers."""
        while self._channel.waiting:
            self._channel.receive()

    def _encode(self, feed: Feed) -> Iterator[bytes]:
        """Yields pushes without end, and leaves out those that would be shorter than 50."""
        size = PUSH_TRANSITIONS
        while True:
            for env in range(len(feed.frames)):
                frames = feed.frames[env]
                for start in range(STACK - 1, feed.returns.shape[1] - size + 1, size):
                    stacks = [frames[t - STACK + 1 : t + 1] for t in range(start, start + size + N_STEPS)]
                    columns = (
                        stacks[:size],
                        feed.actions[env, start : start + size].tolist(),
                        feed.returns[env, start : start + size].tolist(),
                        stacks[N_STEPS:],
                        feed.discounts[env, start : start + size].tolist(),
                    )
                    priorities = feed.priorities[env, start : start + size].tolist()
                    yield pickle.dumps((columns, priorities), pickle.HIGHEST_PROTOCOL)


class PickleSampler:
    """Keeps three requests waiting. A batch arrives pickled whole, already stacked."""

    def __init__(self, sample_port: int, priority_port: int, batch_size: int):
        self._requests = PickleChannel(sample_port)
        self._updates = PickleChannel(priority_port)
        self._shape = (batch_size, STACK, 84, 84)
        for _ in range(SAMPLES_UNANSWERED):
            self._requests.send(b"")

    def sample(self) -> list[int]:
        """Returns the slots of the batch, and asks for one more."""
        observations, *_, slots = pickle.loads(self._requests.receive())
        self._requests.send(b"")
        if observations.shape != self._shape:
            raise ValueError(f"a batch of shape {observations.shape}, {self._shape} expected")
        return slots

    def update(self, slots: list[int], priorities: np.ndarray) -> None:
        """Sends priorities; up to 16 messages wait for their answer."""
        self._updates.send(pickle.dumps((slots, priorities.tolist()), pickle.HIGHEST_PROTOCOL))
        while self._updates.waiting >= UPDATES_UNCONFIRMED:
            self._updates.receive()


Inserter = ReverbInserter | PickleInserter
Sampler = ReverbSampler | PickleSampler


def make_inserter(arguments: argparse.Namespace, feed: Feed) -> Inserter:
    """Returns the peer's inserter."""
    return (ReverbInserter if arguments.peer == "reverb" else PickleInserter)(arguments.ports[0], feed)


def make_sampler(arguments: argparse.Namespace) -> Sampler:
    """Returns the peer's sampler."""
    if arguments.peer == "reverb":
        return ReverbSampler(arguments.ports[0], arguments.batch)
    return PickleSampler(*arguments.ports[1:], arguments.batch)


class Server:
    """The kernel's figures of the server's process."""

    def __init__(self, pid: int):
        self._directory = Path(f"/proc/{pid}")

    def resident_bytes(self) -> int:
        """Returns the memory it holds now."""
        return int((self._directory / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def cpu_seconds(self) -> float:
        """Returns the processor time of all its threads since it started."""
        after_name = (self._directory / "stat").read_text().rpartition(")")[2].split()
        return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


class Measured(NamedTuple):
    """The work of one process in its window."""

    count: int
    seconds: float
    client_cpu_seconds: float
    server_cpu_seconds: float


class Stopwatch:
    """Measures the time and CPU time from its construction to `read`."""

    def __init__(self, server: Server):
        self._server = server
        self._started = time.perf_counter(), time.process_time(), server.cpu_seconds()

    def seconds(self) -> float:
        """Returns the time since its construction."""
        return time.perf_counter() - self._started[0]

    def read(self, count: int) -> Measured:
        """Returns the time and CPU time used since its construction, with a count."""
        now = time.perf_counter(), time.process_time(), self._server.cpu_seconds()
        return Measured(count, *(after - before for before, after in zip(self._started, now, strict=True)))


def measure_inserts(inserter: Inserter, server: Server, seconds: float) -> Measured:
    """Inserts as fast as possible. The window ends when all inserts are confirmed."""
    for window_seconds in (WARM_UP_SECONDS, seconds):
        watch, count = Stopwatch(server), 0
        while watch.seconds() < window_seconds:
            count += inserter.insert()
        inserter.settle()
    return watch.read(count)


def measure_samples(sampler: Sampler, server: Server, seconds: float, batch: int, update: bool) -> Measured:
    """Reads batches as fast as possible, and with `update` sends new priorities for each."""
    rng = np.random.default_rng(1)
    for window_seconds in (WARM_UP_SECONDS, seconds):
        watch, count = Stopwatch(server), 0
        while watch.seconds() < window_seconds:
            keys = sampler.sample()
            if update:
                sampler.update(keys, np.abs(rng.normal(size=batch)) + 1e-3)
            count += 1
    return watch.read(count)


def keep_freed_memory(peer: str) -> None:
    """Makes glibc keep freed memory for the next batch, because fresh pages cost more than copying into them."""
    options = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**30, M_TOP_PAD: 64 * 2**20}
    if peer == "pickle":  # its one other thread passes messages to this one; TensorFlow's threads would contend
        options[M_ARENA_MAX] = 1
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for option, value in options.items():
            mallopt(option, value)


def insert_beside(arguments: argparse.Namespace, start: Any, results: Any) -> None:
    """Body of the inserting process of `together`."""
    faulthandler.dump_traceback_later(arguments.deadline, exit=True)
    keep_freed_memory(arguments.peer)
    inserter = make_inserter(arguments, load_feed(arguments.frames))
    start.wait(START_SECONDS)
    results.put(tuple(measure_inserts(inserter, Server(arguments.server_pid), arguments.seconds)))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fills the server and does the work; returns the figures to print."""
    server = Server(arguments.server_pid)
    empty_bytes = server.resident_bytes()
    inserter = make_inserter(arguments, load_feed(arguments.frames))
    filled = 0
    while filled < arguments.fill:
        filled += inserter.insert()
    inserter.settle()
    filled_bytes = server.resident_bytes()
    inserts = samples = None
    if arguments.work == "insert":
        inserts = measure_inserts(inserter, server, arguments.seconds)
    elif arguments.work == "sample":
        samples = measure_samples(make_sampler(arguments), server, arguments.seconds, arguments.batch, update=False)
    else:
        spawn = multiprocessing.get_context("spawn")
        start, results = spawn.Barrier(2), spawn.Queue()
        child = spawn.Process(target=insert_beside, args=(arguments, start, results), daemon=True)
        child.start()
        sampler = make_sampler(arguments)
        start.wait(START_SECONDS)
        samples = measure_samples(sampler, server, arguments.seconds, arguments.batch, update=True)
        inserts = Measured(*results.get(timeout=arguments.seconds + START_SECONDS))
        child.join(START_SECONDS)
    measured = [part for part in (inserts, samples) if part is not None]
    return {
        "peer": arguments.peer,
        "game": arguments.frames.stem,
        "work": arguments.work,
        "seconds": round(measured[-1].seconds, 2),
        "transitions_per_second": inserts and round(inserts.count / inserts.seconds, 1),
        "batches_per_second": samples and round(samples.count / samples.seconds, 1),
        "server_bytes_per_transition": round((filled_bytes - empty_bytes) / filled),
        "client_cpu_seconds": round(sum(part.client_cpu_seconds for part in measured), 2),
        "server_cpu_seconds": round(measured[-1].server_cpu_seconds, 2),
    }


def main() -> None:
    """Does one workload and prints one line, or ends with an error when it takes too long."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=("reverb", "pickle"), required=True)
    parser.add_argument("--ports", type=int, nargs="+", required=True, help="reverb: one; pickle: push sample priority")
    parser.add_argument("--server-pid", type=int, required=True)
    parser.add_argument("--frames", type=Path, required=True, help="a file of benchmarks.replay_frames")
    parser.add_argument("--work", choices=("insert", "sample", "together"), required=True)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--fill", type=int, default=20_000, help="at most the server's capacity")
    arguments = parser.parse_args()
    if len(arguments.ports) != (1 if arguments.peer == "reverb" else 3):
        parser.error("--ports takes one port for reverb, three for pickle")
    arguments.deadline = arguments.seconds + 2 * START_SECONDS
    faulthandler.dump_traceback_later(arguments.deadline, exit=True)
    keep_freed_memory(arguments.peer)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    print(json.dumps(run(arguments)), flush=True)


if __name__ == "__main__":
    main()
