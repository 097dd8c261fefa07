"""Valid messages of the replay's protocol, what an enemy makes of them, and well-behaved peers that must not notice."""

import contextlib
import os
import random
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import psutil
import zmq
import zstandard

from apexrl.errors import WireError
from apexrl.net import InsertClient, LogAppend, LogClient, ReplayClient, wire
from apexrl.net.identity import marked
from apexrl.net.protocols import PROTOCOL
from apexrl.types import Episode, StreamSpec, UnrollHeader
from apexrl.unroll import UnrollCodec
from tests.fields import random_unroll
from tests.system.processes import Process, wait_for

FULL = os.environ.get("APEXRL_FAULT_SCALE", "") == "full"
SPEC = StreamSpec("Known-v0", (2,), "float32", 3, 4, 1, unroll_starts=8, overlap_steps=2)
K = SPEC.unroll_starts
HOST = "127.0.0.1"
TABLE = "transitions"
BIG_LENGTHS = (b"\xc6", b"\xc9", b"\xdb", b"\xdd", b"\xdf")  # bin32, ext32, str32, array32, map32
ODD_NUMBERS = (
    *(float("nan"), float("inf"), -float("inf"), 1e308, -1.5, -1, 0),
    *(2**31, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
)
ODD_VALUES = (None, True, "", "x" * 300, b"", b"\0" * 7, [], [1] * 70, {}, {"a": 1}, [[[]]], "\u2603")


def scaled(short, full):
    """The size of a test: a short one for the suite, the full one when APEXRL_FAULT_SCALE is full."""
    return full if FULL else short


def make_unroll(seed=0):
    """A random unroll of SPEC without ends of episodes."""
    unroll = random_unroll(SPEC, seed)
    return unroll._replace(discounts=np.ones_like(unroll.discounts), starts=np.zeros_like(unroll.starts))


HUGE_FIELDS = [{"name": f"x{i}", "at": "step", "dtype": "float32", "shape": [2**31 - 1] * 8} for i in range(32)]
VALID = np.packbits(np.ones(K, bool)).tobytes()
BLOCK = UnrollCodec(SPEC).encode(make_unroll())


def make_header(i):
    """The header of an actor's i-th insert."""
    return UnrollHeader(0, K * i, 0, 0.1, np.ones(K, bool), np.ones(K, np.float32), ())


def make_bombs():
    """Blocks that promise or hold far more than an unroll."""
    huge = zstandard.ZstdCompressor(level=1).compress(bytes(scaled(2**28, 2**31)))
    undeclared = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(2**26))
    liar = bytearray(zstandard.ZstdCompressor(level=1).compress(bytes(2**17)))
    assert liar[4] & 0xE0 == 0xA0  # one segment, four bytes of content size behind the descriptor
    liar[5:9] = SPEC.unroll_bytes.to_bytes(4, "little")
    promise = BLOCK[:4] + b"\xe0" + (2**62).to_bytes(8, "little") + BLOCK[6:]
    return [huge, undeclared, bytes(liar), promise, b"", b"\x28\xb5\x2f\xfd", os.urandom(500)]


class Fuzzer:
    """Makes valid messages and mutations of them; the same seed gives the same ones."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.name = "fuzz"
        self.bombs = make_bombs()
        self.old = []
        self.mutations = (
            *(self.flip, self.cut, self.extend, self.splice, self.swap, self.reframe, self.declare, self.nest),
            *(self.number, self.value, self.foreign, self.spec, self.bomb, self.limit, self.replay),
        )

    def valid(self, role):
        """A valid message that a peer of the role may send."""
        rng, any_count = self.rng, self.rng.randrange(200)
        common = [wire.Goodbye() if rng.random() < 0.05 else wire.Heartbeat()]
        if role == "actor":
            arrays = VALID, np.ones(K, np.float32).tobytes(), (Episode(1.0, 2, 0.5),) * rng.randrange(3)
            insert = wire.Insert(any_count, self.name, 0, K * any_count, 0, 0.1, *arrays)
            hello = wire.Hello(PROTOCOL, self.name, rng.randrange(1, 9), SPEC, rng.randrange(3))
            message = rng.choice([hello, insert, insert, *common])
            return [wire.encode(message), BLOCK] if message is insert else [wire.encode(message)]
        wants = (wire.Want(TABLE, rng.choice((1, 16, 512))),)
        keys = np.arange(16, dtype=np.int64) + rng.randrange(4000)
        update = wire.UpdatePriorities(0, keys.tobytes(), np.ones(16, np.float32).tobytes())
        subscribe = wire.Subscribe(
            PROTOCOL, self.name, any_count, wants, rng.random() < 0.5, "", 0, 8, rng.randrange(9)
        )
        fetch = wire.Fetch(any_count, tuple(rng.randrange(4000) for _ in range(rng.randrange(9))))
        demand = wire.Demand(any_count, (rng.randrange(9),))
        messages = [subscribe, demand, update, fetch, wire.AskStatistics(any_count), *common]
        return [wire.encode(rng.choice(messages))]

    def mutated(self, role, frames=None):
        """A message with one or two things wrong with it, now and then none."""
        frames = list(frames or self.valid(role))
        self.old = [*self.old[-63:], frames]
        for _ in range(self.rng.choice((0, 1, 1, 1, 2))):
            frames = self.rng.choice(self.mutations)(frames)
        return frames

    def flip(self, frames):
        data = bytearray(frames[0])
        for _ in range(self.rng.randrange(1, 9)):
            if data:
                data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        return [bytes(data), *frames[1:]]

    def cut(self, frames):
        i = self.rng.randrange(len(frames))
        return [*frames[:i], frames[i][: self.rng.randrange(len(frames[i]) + 1)], *frames[i + 1 :]]

    def extend(self, frames):
        i = self.rng.randrange(len(frames))
        return [*frames[:i], frames[i] + self.rng.randbytes(self.rng.choice((1, 9, 3000))), *frames[i + 1 :]]

    def splice(self, frames):
        other = self.rng.choice(self.old)[0]
        first = frames[0]
        return [first[: self.rng.randrange(len(first) + 1)] + other[self.rng.randrange(len(other) + 1) :], *frames[1:]]

    def swap(self, frames):
        return [*frames[1:], frames[0]] if len(frames) > 1 else [b"", *frames]

    def reframe(self, frames):
        return (frames * self.rng.choice((0, 2, 3, 300)))[: self.rng.choice((1, 2, 3, 600))] or [b""]

    def declare(self, frames):
        i = self.rng.randrange(len(frames[0]) + 1)
        length = self.rng.choice((2**32 - 1, 2**31, 2**28, 2**20)).to_bytes(4, "big")
        return [frames[0][:i] + self.rng.choice(BIG_LENGTHS) + length + frames[0][i + 1 :], *frames[1:]]

    def nest(self, frames):
        deep = self.rng.choice((b"\x91", b"\x81\xa1a", b"\x93\x01\x02")) * self.rng.choice((50, 2000, 20_000))
        return self._with_fields(frames, {}, b"\xa1x" + deep + b"\xc0")

    def number(self, frames):
        return self._with_field(frames, (int, float), self.rng.choice(ODD_NUMBERS))

    def value(self, frames):
        return self._with_field(frames, object, self.rng.choice(ODD_VALUES))

    def foreign(self, frames):
        name = self.rng.choice(("x", "type", "", "protocol", "\0" * 50))
        return self._with_fields(frames, {name: self.rng.choice((*ODD_VALUES, *ODD_NUMBERS, b"y" * 4096))})

    def spec(self, frames):
        spec = msgspec.to_builtins(SPEC)
        for name in self.rng.sample(sorted(spec), 2):
            spec[name] = self.rng.choice((*ODD_NUMBERS, *ODD_VALUES, [2**31 - 1] * 8, [0], "float32", HUGE_FIELDS))
        return self._with_fields(frames, {"spec": spec})

    def bomb(self, frames):
        return [frames[0], self.rng.choice(self.bombs)]

    def limit(self, frames):
        """Sizes at a limit of the protocol, or one beyond."""
        more = self.rng.randrange(2)
        numbers = [self.rng.randrange(4000)] * (wire.MAX_FETCH + more)
        fields = {
            "numbers": numbers,
            "batches": [2**53 + more] * (wire.MAX_TABLES + more),
            "wants": [[TABLE, 64]] * (wire.MAX_TABLES + more),
            "keys": bytes(8 * (wire.MAX_BATCH + more)),
            "priorities": bytes(4 * (wire.MAX_BATCH + more)),
            "valid": b"\xff" * (1 + more),
            "episodes": [[1.0, 2, 0.5]] * 200,
            "num_streams": 4096 + more,
        }
        held = self._fields(frames)
        return self._with_fields(frames, {name: value for name, value in fields.items() if name in held})

    def replay(self, frames):
        return self.rng.choice(self.old)

    def _fields(self, frames):
        try:
            fields = msgspec.msgpack.decode(frames[0])
        except (msgspec.MsgspecError, ValueError, RecursionError, IndexError):
            return {}
        return fields if isinstance(fields, dict) else {}

    def _with_field(self, frames, kinds, value):
        names = [name for name, held in self._fields(frames).items() if isinstance(held, kinds)]
        return self._with_fields(frames, {self.rng.choice(names): value}) if names else frames

    def _with_fields(self, frames, changes, tail=b""):
        """Replaces or adds fields; the tail is one more name and value, encoded already."""
        fields = self._fields(frames)
        if not fields:
            return frames
        entries = [msgspec.msgpack.encode(part) for entry in {**fields, **changes}.items() for part in entry]
        try:
            count = len(entries) // 2 + bool(tail)
            return [b"\xde" + count.to_bytes(2, "big") + b"".join(entries) + tail, *frames[1:]]
        except (OverflowError, ValueError):
            return frames


def dealer(context, port, identity, **options):
    """A bare socket of the protocol."""
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.setsockopt(zmq.ROUTING_ID, identity)
    for name, value in options.items():
        setattr(socket, name, value)
    socket.connect(f"tcp://{HOST}:{port}")
    return socket


def start_replay(tmp_path, ports, *flags, name="replay"):
    """Starts a real replay server without limits of its own, and waits until it listens."""
    arguments = ["replay.py", "--actor-port", ports[0], "--batch-port", ports[1], "--min-size-to-sample", 64]
    arguments += ["--samples-per-insert", 0, *flags]
    log = Path(tmp_path) / f"{name}.txt"
    starts = log.read_text().count("actors at") if log.exists() else 0
    server = Process(arguments, log)
    wait_for(lambda: server.text().count("actors at") > starts or server.popen.poll() is not None, 30, "a server")
    return server


def resident_mb(process):
    """Resident memory of a process that was started."""
    return psutil.Process(process.popen.pid).memory_info().rss / 1e6


class GoodPeers:
    """An actor, a reader of batches and a follower of the log, in a thread each, that do as they should."""

    def __init__(self, ports, keyrings=(None, None), name="good", seconds_between=0.005):
        actor_keys, learner_keys = keyrings
        self.name = name
        self.actor = InsertClient(f"tcp://{HOST}:{ports[0]}", name, SPEC, 2, actor_keys)
        self.reader = ReplayClient(f"tcp://{HOST}:{ports[1]}", f"{name}-reader", {TABLE: 16}, 4, learner_keys)
        self.follower = LogClient(f"tcp://{HOST}:{ports[1]}", f"{name}-follower", {}, 1, True, learner_keys)
        self.num_inserts = self.num_samples = 0
        self.slots = set()
        self.seen = []  # sequences of our inserts in the order of the log
        self.jumps = 0
        self.errors = []
        self._seconds_between = seconds_between
        self._ended = threading.Event()
        self._followed = threading.Event()
        jobs = (self._act, self.actor), (self._sample, self.reader), (self._follow, self.follower)
        self._threads = [threading.Thread(target=self._guard, args=job) for job in jobs]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._followed.set()
        for thread in self._threads:
            thread.join(60)

    def finish(self, seconds=60):
        """Ends, and checks that each insert was stored once, in order."""
        self._ended.set()
        self._threads[0].join(seconds)
        wait_for(lambda: len(self.seen) >= self.num_inserts or self.errors, seconds, "all inserts in the log")
        self._followed.set()
        for thread in self._threads:
            thread.join(seconds)
        assert not self.errors, self.errors
        assert self.seen == list(range(self.num_inserts)), f"{len(self.seen)} of {self.num_inserts} inserts"

    def _guard(self, run, client):
        try:
            run()
        except Exception as error:
            self.errors.append(error)
        finally:
            client.close()

    def _act(self):
        self.actor.connect(30, self._ended.is_set)
        while not self._ended.wait(self._seconds_between):
            self.actor.insert(make_header(self.num_inserts), BLOCK, 30)
            self.num_inserts += 1
            self.slots.add(self.actor.slots)
        if not self.actor.flush(30):
            raise AssertionError(f"{self.actor.num_unacknowledged} inserts were not acknowledged")

    def _sample(self):
        while not self._ended.wait(self._seconds_between):
            sample = self.reader.sample(TABLE, 30)
            self.reader.update_priorities(TABLE, sample.keys, np.ones(len(sample.keys)))
            self.num_samples += 1

    def _follow(self):
        while not self._followed.is_set():
            event = self.follower.poll(50)
            if isinstance(event, LogAppend) and event.insert.actor == self.actor.actor:
                self.seen.append(event.insert.sequence)


class Enemy:
    """Fuzzing sockets on one port: some greet properly first, so that mutations get behind the door."""

    def __init__(self, context, role, port, seed):
        self.fuzzer = Fuzzer(seed)
        self.role = role
        self.sent = 0
        self._context, self._port = context, port
        self._socket = None
        self._sequence = 0

    def step(self, deadline):
        """Sends one message."""
        rng = self.fuzzer.rng
        if self._socket is None or rng.random() < 0.002:
            self._begin()
        self._listen()
        frames = None
        if self.role == "actor" and rng.random() < 0.5:
            insert = wire.Insert(self._sequence, self.fuzzer.name, 0, 0, 0, 0.1, VALID, np.ones(K, "f4").tobytes())
            frames = [wire.encode(insert), BLOCK]
        sent = self.fuzzer.mutated(self.role, frames)
        self._sequence += frames is not None and sent == frames
        self._send(sent, deadline)

    def close(self):
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _catch_up(self):
        """Waits until the server has read all: a socket that is closed before leaves its queue behind."""
        number = 2**40 + self.sent
        question = wire.AskStatistics(number)
        if self.role == "actor":  # a greeting in a protocol that nobody speaks: the refusal names it
            question = wire.Hello(number, self.fuzzer.name, 2, SPEC, 0)
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            self._send([wire.encode(question)], deadline)
            while self._socket.poll(100):  # an answer is lost when too many others are on the way
                if str(number) in str(wire.decode_from_replay(self._socket.recv_multipart())):
                    return
        raise AssertionError("the server does not answer")

    def _begin(self):
        if self._socket is not None:
            self._catch_up()
        self.close()
        rng = self.fuzzer.rng
        identity = b"\1" + rng.randbytes(rng.choice((3, 16, 31, 253)))
        self.fuzzer.name = marked(f"enemy-{self.role}", identity)
        self._socket = dealer(self._context, self._port, identity)
        self._greet()

    def _greet(self):
        self._sequence = 0
        greeting = wire.Subscribe(PROTOCOL, self.fuzzer.name, 0, (wire.Want(TABLE, 16),), True, "", 0, 8, 0)
        if self.role == "actor":
            greeting = wire.Hello(PROTOCOL, self.fuzzer.name, 2, SPEC, 0)
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart([wire.encode(greeting)], zmq.NOBLOCK)

    def _listen(self):
        for _ in range(50):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = wire.decode_from_replay(frames)
            except WireError as error:
                raise AssertionError("the server sent something malformed") from error
            if isinstance(message, wire.Welcome | wire.Acknowledge):
                self._sequence = message.stored_sequence
            elif isinstance(message, wire.Stranger):
                self._greet()

    def _send(self, frames, deadline):
        while True:
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
                self.sent += 1
                return
            except zmq.Again:
                self._listen()
                self._socket.poll(10, zmq.POLLOUT)
                assert time.monotonic() < deadline, "the server takes no messages"
