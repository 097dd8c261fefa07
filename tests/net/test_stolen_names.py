"""A stranger without keys at the ports of a server: it reads every name there is, and uses all of them."""

import contextlib
import threading
import time

import numpy as np
import pytest
import zmq

from apexrl.net import InsertClient, ReplayClient, wire
from apexrl.net.protocols import PROTOCOL
from apexrl.net.sockets import make_socket
from tests.net.peers import block_of


class Thief:
    """Speaks under the names that the statistics tell, from connections with those names and with others."""

    def __init__(self, server, spec, context):
        self.spec, self.context = spec, context
        self.actor_endpoint, self.learner_endpoint = server.actor_endpoint, server.learner_endpoint
        self.rounds = 0
        self.sockets = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join(20)

    def is_alive(self):
        return self._thread.is_alive()

    def _run(self):
        reader = ReplayClient(self.learner_endpoint, "thief", context=self.context)
        with contextlib.closing(reader):
            while not self._ended.wait(0.01):
                for peer in reader.statistics(10).peers:
                    self._steal(peer)
                self.rounds += 1
        for socket in self.sockets:
            socket.close()

    def _steal(self, peer):
        endpoint = self.actor_endpoint if peer.role == "actor" else self.learner_endpoint
        priorities = np.ones(self.spec.unroll_starts, np.float32).tobytes()
        valid = np.packbits(np.ones(self.spec.unroll_starts, bool)).tobytes()
        for routing_id in (peer.name.encode(), None):
            socket = make_socket(self.context, zmq.DEALER, routing_id)
            self.sockets = [*self.sockets[-20:], socket]
            for old in self.sockets[:-20]:
                old.close()
            socket.connect(endpoint)
            for sequence in (2**53 - 1, 5, 50):
                hello = wire.Hello(PROTOCOL, peer.name, 1, self.spec, sequence)
                insert = wire.Insert(sequence, peer.name, 0, 0, 0, 0.1, valid, priorities)
                socket.send_multipart([wire.encode(hello)])
                socket.send_multipart([wire.encode(insert), block_of(self.spec, 2**40)])
            socket.send_multipart([wire.encode(wire.Goodbye())])


@pytest.mark.parametrize("keeps", ["journal", "memory"])
def test_nothing_acknowledged_is_lost_while_a_stranger_uses_the_actors_name(
    start_server, free_ports, spec, header, tmp_path, context, keeps
):
    ports = free_ports(2)
    journal_dir = tmp_path if keeps == "journal" else None
    victim = InsertClient(f"tcp://127.0.0.1:{ports[0]}", "victim", spec, 2, context=context)
    stored = []
    for life in range(2):
        with start_server(*ports, journal_dir) as server, Thief(server, spec, context) as thief:
            for i in range(30 * life, 30 * life + 30):
                victim.insert(header(8 * i), block_of(spec, i), 20)
                before = thief.rounds
                while i % 3 == 0 and thief.rounds < before + 2 and thief.is_alive():
                    victim.poll()
                    time.sleep(0.002)
            assert victim.flush(20)
            log = server.service.open_log.replay.log
            records = [log.get(number) for number in range(log.first_number, log.end_number)]
            stored = stored * (keeps == "memory") + [(wire.decode_insert(r.message).sequence, r.block) for r in records]
            assert thief.is_alive(), "the thief gave up"
    assert stored == [(i, block_of(spec, i)) for i in range(60)]
    victim.close()
