"""Actors and learners of a service fed by hand (`Peers`): each does what its program would do next, without a clock."""

import numpy as np

from apexrl.net import wire
from apexrl.net.protocols import PROTOCOL
from tests.net.peers import only


class Actor:
    """Inserts whenever it may."""

    def __init__(self, peers, peer, streams=2):
        self.peers, self.peer, self.streams = peers, peer, streams
        self.sequence = self.acknowledged = self.allowed = 0
        self.priorities = None
        self.greet()

    def greet(self):
        self.peers.hello(self.peer, self.streams, first=self.acknowledged)

    def act(self):
        """Inserts an unroll; returns whether it might."""
        for message in self.peers.heard(self.peer):
            if isinstance(message, wire.Welcome | wire.Acknowledge):
                self.acknowledged, self.allowed = message.stored_sequence, message.allowed_sequence
                if isinstance(message, wire.Welcome):  # what a restart took is sent again
                    self.sequence = self.acknowledged
            elif isinstance(message, wire.Stranger):
                self.greet()
        if self.sequence >= self.allowed:
            return False
        self.peers.store(self.peer, self.sequence, self.priorities)
        self.sequence += 1
        return True

    def beat(self):
        self.peers.say("actor", self.peer, wire.Heartbeat())


class Reader:
    """Wants batches of some tables, and by default uses one of each at a time, as a learner does."""

    def __init__(self, peers, peer, sizes, prefetch=2, use="together", follows=False):
        """`use`: together, apart (any batch as it comes) or never (it keeps what it was sent)."""
        self.peers, self.peer, self.sizes = peers, peer, sizes
        self.prefetch, self.use, self.follows = prefetch, use, follows
        self.held = dict.fromkeys(sizes, 0)
        self.keys = {table: [] for table in sizes}  # of each batch
        self.num_updates = self.applied = 0
        self.told = ()
        self.subscribe()

    def subscribe(self):
        self.next = dict.fromkeys(self.sizes, 0)
        wants = tuple(wire.Want(table, size) for table, size in self.sizes.items())
        message = wire.Subscribe(PROTOCOL, self.peer.decode(), 1, wants, self.follows, "", 0, 0, 0)
        self.peers.say("learner", self.peer, message)

    def demand(self):
        ahead = (self.next[table] + self.prefetch - self.held[table] for table in self.sizes)
        self.peers.say("learner", self.peer, wire.Demand(self.applied, tuple(ahead)))

    def act(self):
        """Takes what came, makes an update, and asks for more; returns whether it made one."""
        tables, messages = list(self.sizes), self.peers.heard(self.peer)
        for message in messages:
            match message:
                case wire.Subscribed():
                    self.applied = message.next_number
                case wire.Append():
                    self.applied = message.number + 1
                case wire.Batch():
                    self.next[tables[message.table]] += 1
                    self.held[tables[message.table]] += 1
                    self.keys[tables[message.table]].append(message.sample().keys.tolist())
                case wire.Standing():
                    self.told = message.waits_for
                case wire.Stranger():
                    self.subscribe()
                case wire.Refused() | wire.Dropped():
                    raise AssertionError(message.reason)
        used = [] if self.use == "never" else [table for table in tables if self.held[table]]
        if self.use == "together" and len(used) < len(tables):
            used = []
        for table in used:
            self.held[table] -= 1
        self.num_updates += bool(used)
        if used or messages:
            self.demand()
        return bool(used)

    @property
    def lacking(self):
        return [table for table, count in self.held.items() if not count]

    def forget(self, keys):
        """Gives keys the priority 0 in its first table: they are never drawn again."""
        zeros = np.zeros(len(keys), np.float32).tobytes()
        self.peers.say("learner", self.peer, wire.UpdatePriorities(0, np.asarray(keys, np.int64).tobytes(), zeros))

    def beat(self):
        self.demand()
        self.peers.say("learner", self.peer, wire.Heartbeat())

    def leave(self):
        self.peers.say("learner", self.peer, wire.Goodbye())


def standing_of(peers, program):
    """The reason for which a program waits, as the server says it."""
    peers.say("learner", b"observer", wire.AskStatistics(0))
    peers.now += 0.1  # a later question gets a new answer
    (answer,) = only(peers.heard(b"observer"), wire.Statistics)
    names = [s.name for s in answer.peers]
    assert len(names) == len(set(names))
    return next((s.waits_for for s in answer.peers if s.name.startswith(program.peer.decode())), None)


def pass_second(peers, programs):
    """Lets a second pass, in which all of them say that they are there."""
    peers.now += 1.0
    for program in programs:
        program.beat()
    peers.service.expire(peers.now)
    peers.service.advance()


def run_until_all_wait(programs, most=1000):
    """Lets all of them act in turn until none can; returns how often one could, `most` at most."""
    count = 0
    while count < most:
        done = [program.act() for program in programs]
        count += sum(done)
        if not any(done):
            break
    return count
