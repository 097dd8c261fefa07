"""A replay service fed by hand: messages in, its answers by peer, and a restart like that of a killed server."""

import asyncio
import contextlib
import threading

import numpy as np
import zmq
import zstandard

from apexrl.config.sections import ReplayConfig
from apexrl.net import wire
from apexrl.net.identity import marked
from apexrl.net.keyring import Keyring
from apexrl.net.log_client import LogClient
from apexrl.net.metrics_channel import MetricsServer
from apexrl.net.parameter_channel import ParameterPublisher
from apexrl.net.protocols import PROTOCOL
from apexrl.net.service import ReplayService
from tests.system.processes import wait_for

TABLE = "transitions"


def block_of(spec, number=0):
    """A compressed block of the right size; blocks of different numbers differ."""
    return zstandard.compress(number.to_bytes(8, "little").ljust(spec.unroll_bytes, b"\0"))


def routing_id_of(peer):
    """The routing id of a peer, which is as long as a server asks for."""
    return peer.ljust(16, b".")


def name_of(peer):
    """The whole name of an actor."""
    return marked(peer.decode(), routing_id_of(peer))


def greeting_of(peer, streams, spec, first=0):
    return wire.Hello(PROTOCOL, name_of(peer), streams, spec, first)


def insert_of(peer, sequence, priorities=None, stream=0, valid=None):
    """An insert; transitions are valid where they have a priority unless `valid` says otherwise."""
    priorities = np.asarray(np.ones(8) if priorities is None else priorities, np.float32)
    valid = np.packbits(priorities > 0 if valid is None else np.asarray(valid, bool)).tobytes()
    return wire.Insert(sequence, name_of(peer), stream, 8 * sequence, 0, 0.1, valid, priorities.tobytes())


def only(messages, kind):
    return [message for message in messages if isinstance(message, kind)]


class Peers:
    """Feeds a service and keeps what it answers, by peer."""

    def __init__(self, spec, journal_dir=None, stream=None, **changes):
        numbers = {"capacity": 8000, "min_size_to_sample": 16, "samples_per_insert": 0.0}
        numbers["tables"] = (f"{TABLE}=priority",)
        self.spec = spec
        self.config = ReplayConfig(**(numbers | changes))
        self.journal_dir = journal_dir
        self.now = 0.0
        self.unread = []
        self.stream = stream
        self.service = ReplayService(self.config, 0, journal_dir, self.now, stream)

    @property
    def log(self):
        return self.service.open_log.replay.log

    @property
    def dropped(self):
        return self.service.outbox.dropped

    def crash(self):
        """Takes the journal away from a server as its death does: nothing is closed or synced."""
        for log in self.service.logs.values():
            log._lock.close()
        self.unread = []

    def restart(self, **changes):
        self.crash()
        values = {name: getattr(self.config, name) for name in self.config.__dataclass_fields__}
        self.config = ReplayConfig(**(values | changes))
        self.service = ReplayService(self.config, 0, self.journal_dir, self.now, self.stream)

    def try_journal(self):
        """One try of a journal that has failed, as a server makes in its second thread."""

        async def at_once(function):
            return function()

        asyncio.run(self.service.open_log.try_journal(at_once))

    def say(self, role, peer, message, *attachments):
        self.raw(role, peer, [wire.encode(message), *attachments])

    def raw(self, role, peer, frames):
        self.service.receive(role, routing_id_of(peer), frames, self.now)

    def hello(self, peer, streams=2, first=0, spec=None):
        self.say("actor", peer, greeting_of(peer, streams, spec or self.spec, first))

    def insert(self, peer, sequence, priorities=None, stream=0, valid=None):
        message = insert_of(peer, sequence, priorities, stream, valid)
        self.say("actor", peer, message, block_of(self.spec, sequence))

    def store(self, peer, sequence, *rest, **options):
        """An insert that is stored before the next message."""
        self.insert(peer, sequence, *rest, **options)
        self.service.advance()

    def acknowledged(self, peer):
        """The inserts of an actor that are acknowledged when it asks."""
        self.say("actor", peer, wire.Heartbeat())
        return only(self.heard(peer), wire.Acknowledge)[-1].stored_sequence

    def subscribe(self, peer, log="", life=0, number=0, batch_size=4, tables=(TABLE,), follows=True, ring=None):
        ring = ring or (self.service.open_log.replay.ring_unrolls if self.service.open_log else 0)
        wants = tuple(wire.Want(table, batch_size) for table in tables)
        message = wire.Subscribe(PROTOCOL, peer.decode(), 1, wants, follows, log, life, ring, number)
        self.say("learner", peer, message)

    def demand(self, peer, applied, *batches):
        self.say("learner", peer, wire.Demand(applied, batches))

    def frames(self, peer):
        """The messages that the peer was sent since the last call, as frames."""
        self.service.advance()
        self.unread += self.service.outbox.drain()
        found = [outgoing.frames for outgoing in self.unread if outgoing.peer == routing_id_of(peer)]
        self.unread = [outgoing for outgoing in self.unread if outgoing.peer != routing_id_of(peer)]
        return found

    def heard(self, peer):
        """The messages that the peer was sent since the last call."""
        return [wire.decode_from_replay(frames) for frames in self.frames(peer)]


class HandServer:
    """A ROUTER that is served by hand."""

    def __init__(self, context):
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.endpoint = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.peer = b""

    def heard(self, least=0):
        """All messages that have come, as soon as there are so many; on a busy machine the last ones may be late."""
        messages = []
        while self.socket.poll(50 if len(messages) >= least else 100_000):
            self.peer, *frames = self.socket.recv_multipart()
            messages.append(wire.decode_to_replay(frames))
        return messages

    def say(self, message, *attachments):
        self.socket.send_multipart([self.peer, wire.encode(message), *attachments])


def hear(server, client, kind):
    """The first message of a kind, while the client keeps itself alive."""

    def come():
        client.poll(10) if isinstance(client, LogClient) else client.poll()
        return [message for message in server.heard() if isinstance(message, kind)]

    return wait_for(come, 20, kind.__name__)[0]


class Foreign(Keyring):
    """The right key of the server, and a key of ours that it does not know."""

    def __init__(self, server, client, role):
        super().__init__(client, role)
        self.directory = server


@contextlib.contextmanager
def learning_behind(keyring):
    """The learner's two servers behind keys: parameters are published, and metrics of `run` taken."""
    servers = zmq.Context()
    publisher = ParameterPublisher("127.0.0.1", 0, keyring, servers)
    metrics = MetricsServer("127.0.0.1", 0, keyring, servers)
    parts = publisher, metrics
    metrics.runs = frozenset({"run"})
    threads = [threading.Thread(target=part.run) for part in parts]
    for thread in threads:
        thread.start()
    publisher.publish(b"parameters")
    try:
        yield publisher, metrics
    finally:
        for part in parts:
            part.close()
        for thread in threads:
            thread.join(50)
        keyring.close()
        servers.term()
