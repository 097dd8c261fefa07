"""The replay server of a 2019 Ape-X, rebuilt from its description: pickle and one lock. Own code, nothing copied.

`python -m benchmarks.peers.pickle_lock_server --push-port P --sample-port P --priority-port P [--capacity N]`

Each port is a ROUTER, a zmq.proxy behind it, and asyncio workers. One lock guards pushes, samples and priorities. The
work under the lock, with unpickling and pickling, runs in a thread pool. Transitions are tuples with whole stacks, and
the priorities lie in segment trees of Python lists. The proxies are threads, where the original had processes. They
hold no Python lock while they work, and they end with the server.

The server unpickles its messages, so anybody who reaches its ports can run code in it. It binds to loopback only, and
that must never change.
"""

import argparse
import asyncio
import contextlib
import ctypes
import math
import pickle
import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import zmq
import zmq.asyncio

HOST = "127.0.0.1"
PRIORITY_EXPONENT = 0.6
IMPORTANCE_EXPONENT = 0.4
WORKERS = {"push": 4, "sample": 8, "priority": 4}
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8  # glibc's malloc.h

Handler = Callable[[bytes], bytes]


class ListTree:
    """A binary tree over `size` values, a power of two. Each parent is `combine` of its children."""

    def __init__(self, size: int, combine: Callable[[float, float], float], neutral: float):
        self._size = size
        self._combine = combine
        self.nodes = [neutral] * (2 * size)

    def __getitem__(self, slot: int) -> float:
        return self.nodes[self._size + slot]

    def __setitem__(self, slot: int, value: float) -> None:
        node = self._size + slot
        self.nodes[node] = value
        while node > 1:
            node //= 2
            self.nodes[node] = self._combine(self.nodes[2 * node], self.nodes[2 * node + 1])

    def find(self, mass: float) -> int:
        """Returns the slot in which the running sum of a tree of sums passes `mass`."""
        node = 1
        while node < self._size:
            node *= 2
            if mass > self.nodes[node]:
                mass -= self.nodes[node]
                node += 1
        return node - self._size


def add(left: float, right: float) -> float:
    """Returns the sum."""
    return left + right


class PrioritizedReplay:
    """A ring of transition tuples and their priorities. Only one thread at a time may use it."""

    def __init__(self, capacity: int, batch_size: int):
        size = 2 ** math.ceil(math.log2(capacity))
        self._capacity = capacity
        self._batch_size = batch_size
        self._transitions: list[tuple] = []
        self._next = 0
        self._sums = ListTree(size, add, 0.0)
        self._minima = ListTree(size, min, math.inf)
        self._random = random.Random(0)

    def __len__(self) -> int:
        return len(self._transitions)

    def push(self, message: bytes) -> bytes:
        """Stores pickled (observations, actions, returns, next observations, discounts), priorities."""
        columns, priorities = pickle.loads(message)
        for transition, priority in zip(zip(*columns, strict=True), priorities, strict=True):
            if len(self._transitions) < self._capacity:
                self._transitions.append(transition)
            else:
                self._transitions[self._next] = transition
            self._set(self._next, priority)
            self._next = (self._next + 1) % self._capacity
        return b""

    def sample(self, _: bytes) -> bytes:
        """Returns a pickled batch: the five columns as arrays, then weights and slots; one draw from each stratum."""
        total = self._sums.nodes[1]
        stride = total / self._batch_size
        newest = len(self._transitions) - 1
        slots = [min(self._sums.find((i + self._random.random()) * stride), newest) for i in range(self._batch_size)]
        smallest = self._minima.nodes[1]
        weights = [(self._sums[slot] / smallest) ** -IMPORTANCE_EXPONENT for slot in slots]
        columns = zip(*(self._transitions[slot] for slot in slots), strict=True)
        observations, actions, returns, next_observations, discounts = columns
        batch = (
            np.stack(observations),
            np.array(actions),
            np.array(returns),
            np.stack(next_observations),
            np.array(discounts),
            np.array(weights),
            slots,
        )
        return pickle.dumps(batch, pickle.HIGHEST_PROTOCOL)

    def update(self, message: bytes) -> bytes:
        """Takes pickled slots and their new priorities."""
        slots, priorities = pickle.loads(message)
        for slot, priority in zip(slots, priorities, strict=True):
            self._set(slot, priority)
        return b""

    def _set(self, slot: int, priority: float) -> None:
        value = float(priority) ** PRIORITY_EXPONENT
        self._sums[slot] = value
        self._minima[slot] = value


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next message, whichever thread freed it.

    Fresh pages cost more than copying into them. With kept memory the server takes several times as many pushes.
    """
    options = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**30, M_TOP_PAD: 64 * 2**20, M_ARENA_MAX: 1}
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for option, value in options.items():
            mallopt(option, value)


def forward(context: zmq.Context, port: int, inner: str) -> None:
    """Starts a thread that passes messages between the clients of a port and its workers."""
    outside = context.socket(zmq.ROUTER)
    outside.bind(f"tcp://{HOST}:{port}")
    inside = context.socket(zmq.DEALER)
    inside.bind(inner)
    threading.Thread(target=zmq.proxy, args=(outside, inside), daemon=True).start()


async def serve(ports: dict[str, int], capacity: int, batch_size: int) -> None:
    """Answers on the three ports until the process ends."""
    context = zmq.Context()
    async_context = zmq.asyncio.Context(context)
    replay = PrioritizedReplay(capacity, batch_size)
    handlers: dict[str, Handler] = {"push": replay.push, "sample": replay.sample, "priority": replay.update}
    lock = asyncio.Lock()
    filled = asyncio.Event()
    pool = ThreadPoolExecutor()

    async def work(name: str) -> Any:
        socket = async_context.socket(zmq.DEALER)
        socket.connect(f"inproc://{name}")
        while True:
            client, message = await socket.recv_multipart()
            if name == "sample":
                await filled.wait()
            async with lock:
                answer = await asyncio.get_running_loop().run_in_executor(pool, handlers[name], message)
            if len(replay) >= batch_size:
                filled.set()
            await socket.send_multipart((client, answer), copy=False)

    for name, port in ports.items():
        forward(context, port, f"inproc://{name}")
    print("ready", flush=True)
    await asyncio.gather(*(work(name) for name, count in WORKERS.items() for _ in range(count)))


def main() -> None:
    """Serves until killed, or until the lifetime is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in WORKERS:
        parser.add_argument(f"--{name}-port", type=int, required=True)
    parser.add_argument("--capacity", type=int, default=20_000, help="transitions of 28 to 57 kB each")
    parser.add_argument("--batch", type=int, default=512, help="transitions of a sample")
    parser.add_argument("--lifetime", type=float, default=600, metavar="SECONDS")
    arguments = parser.parse_args()
    keep_freed_memory()
    ports = {name: getattr(arguments, f"{name}_port") for name in WORKERS}
    try:
        asyncio.run(asyncio.wait_for(serve(ports, arguments.capacity, arguments.batch), arguments.lifetime))
    except TimeoutError:
        sys.exit(f"the lifetime of {arguments.lifetime} s is over")


if __name__ == "__main__":
    main()
