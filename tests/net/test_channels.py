"""Servers and clients over real sockets, in one process."""

import asyncio
import os
import threading
import time

import numpy as np
import pytest
import torch
import zmq

from apexrl.config import NetworkConfig, ReplayConfig
from apexrl.errors import ConfigError, PeerError, WireError
from apexrl.net import wire
from apexrl.net.metrics_channel import Evaluation, MetricsClient, MetricsServer
from apexrl.net.parameter_channel import ParameterPublisher, ParameterSubscriber, relay
from apexrl.net.replay_client import InsertClient, LogAppend, LogClient, LogStart
from apexrl.net.replay_server import ReplayServer
from apexrl.net.sockets import make_socket
from apexrl.parameters import ParametersHeader, decode_parameters, encode_parameters
from apexrl.types import Sample, UnrollHeader
from tests.system.processes import wait_for


@pytest.fixture
def server():
    """A replay server in a thread; yields it once it listens."""
    ready, servers, loops = threading.Event(), [], []

    async def serve():
        ended = asyncio.Event()
        server = ReplayServer(ReplayConfig(8000, 32, 0.0), "127.0.0.1", 0, 0, seed=0)
        servers.append(server)
        loops.append((asyncio.get_running_loop(), ended))
        ready.set()
        await server.run(ended)
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(10)
    yield servers[0]
    loop, ended = loops[0]
    loop.call_soon_threadsafe(ended.set)
    thread.join(10)
    assert not thread.is_alive()


def header(spec, first_step=0):
    return UnrollHeader(0, first_step, 0, 0.1, np.ones(spec.unroll_starts, np.float32), ())


def test_inserts_reach_the_learner_in_order_and_priorities_the_server(server, spec):
    actor = InsertClient(server.actor_endpoint, "actor", spec, 2)
    actor.connect(10)
    learner = LogClient(server.learner_endpoint, "learner", 4, 2)
    for i in range(30):
        actor.insert(header(spec, 8 * i), b"block%d" % i, 10)
    assert actor.flush(10) and actor.num_unacknowledged == 0
    blocks, samples, deadline = [], 0, time.monotonic() + 20
    while (samples < 50 or len(blocks) < 30) and time.monotonic() < deadline:
        match learner.poll(100):
            case LogStart() as start:
                assert start.spec == spec and not start.is_same_log
            case LogAppend() as append:
                assert append.number == len(blocks)
                blocks.append(bytes(append.block))
            case Sample() as sample:
                samples += 1
                assert sample.keys.max() < 8 * len(blocks)
                learner.update_priorities(sample.keys, np.full(4, 2.0))
                learner.take()
    assert blocks == [b"block%d" % i for i in range(30)] and samples >= 50
    quantile = wait_for(lambda: server.service.statistics(0)["priority_quantile_90"] > 1.5, 10, "new priorities")
    assert quantile
    actor.close()
    learner.close()


def test_malformed_messages_are_dropped_and_counted_and_the_server_lives(server, spec):
    actor = InsertClient(server.actor_endpoint, "actor", spec, 1)
    actor.connect(10)
    stranger = make_socket(zmq.Context.instance(), zmq.DEALER)
    stranger.connect(server.actor_endpoint)
    for _ in range(200):
        stranger.send_multipart([os.urandom(20)])
        stranger.send_multipart([wire.encode(wire.Heartbeat()), b"one frame too many"])
    wait_for(lambda: server.service.dropped["malformed"] >= 390, 10, "drops")
    actor.insert(header(spec), b"block", 10)
    assert actor.flush(10)
    stranger.close()
    actor.close()


def test_a_refused_actor_is_told_why(server, spec):
    actor = InsertClient(server.actor_endpoint, "first", spec, 1)
    actor.connect(10)
    other = InsertClient(server.actor_endpoint, "other", wire.msgspec.structs.replace(spec, n_steps=5), 1)
    with pytest.raises(PeerError, match="use the same --env"):
        other.connect(10)
    actor.close()
    other.close()


def test_an_actor_gives_up_on_a_server_that_is_not_there(spec, free_ports):
    actor = InsertClient(f"tcp://127.0.0.1:{free_ports(1)[0]}", "actor", spec, 1)
    with pytest.raises(PeerError, match="is it running"):
        actor.connect(0.5)
    assert actor.waited_seconds["replay_connection"] > 0.3
    actor.close()


def test_an_actor_waits_as_long_as_a_living_server_tells_it_to(server, spec):
    actor = InsertClient(server.actor_endpoint, "actor", spec, 1)
    actor.connect(10)
    server.service.replay.why_no_insert = lambda: "learner"
    enough = time.monotonic() + 4
    for i in range(10):
        actor.insert(header(spec, 8 * i), b"block", 2, lambda: time.monotonic() > enough)
    assert actor.waited_seconds["learner"] > 2
    assert server.service.replay.log.end_number == 4  # what was allowed before
    del server.service.replay.why_no_insert
    actor.insert(header(spec, 80), b"block", 10)
    assert actor.flush(10)
    actor.close()


def test_a_port_in_use_is_a_clear_error(server):
    port = int(server.actor_endpoint.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
        ParameterPublisher("127.0.0.1", port)


def test_a_learner_takes_only_the_answer_to_its_last_subscription(spec):
    server = make_socket(zmq.Context.instance(), zmq.ROUTER)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    learner = LogClient(f"tcp://127.0.0.1:{port}", "learner", 4, 2)
    requests = []

    def asked():
        learner.poll(10)
        while server.poll(0):
            message = wire.decode_to_replay(server.recv_multipart()[1:])
            requests.extend([message] * isinstance(message, wire.Subscribe))
        return len(requests) >= 2

    def answer(message, *attachments):
        server.send_multipart([b"learner", wire.encode(message), *attachments])
        return learner.poll(2000)

    wait_for(asked, 10, "two subscriptions")
    insert = wire.Insert(0, "actor", 0, 0, 0, 0.1, np.ones(8, np.float32).tobytes())
    append = (wire.Append(0), wire.encode(insert), b"block")
    first, last = requests[0].request, requests[-1].request
    assert last > first
    assert answer(wire.Subscribed(first, "server", spec, 10, 0, 0)) is None
    assert answer(*append) is None
    assert answer(wire.Subscribed(last, "server", spec, 10, 0, 0)) == LogStart("server", spec, 10, 0, False)
    assert answer(*append).number == 0
    learner.close()
    server.close()


def make_parameters(spec, version):
    tensors = {"w": torch.full((3, 4), version / 8), "b": torch.arange(5.0)}
    return encode_parameters(ParametersHeader(version, spec, NetworkConfig((1, 2, 3), 4)), tensors)


def test_parameters_travel_in_half_precision(spec):
    encoded = make_parameters(spec, 3)
    parameters = decode_parameters(encoded)
    assert parameters.header.params_version == 3 and parameters.header.spec == spec
    assert parameters.tensors["w"].dtype == torch.float32 and (parameters.tensors["w"] == 0.375).all()
    for damaged in (b"", b"\xff" * 8, encoded[:-3], encoded[:40]):
        with pytest.raises(WireError):
            decode_parameters(damaged)


@pytest.fixture
def publisher():
    publisher = ParameterPublisher("127.0.0.1", 0)
    thread = threading.Thread(target=publisher.run)
    thread.start()
    yield publisher
    publisher.close()
    thread.join(5)


def newest(subscriber):
    parameters = subscriber.fetch(100)
    return parameters is not None and parameters.header.params_version


def test_a_late_subscriber_gets_the_last_value_and_a_slow_one_the_newest(publisher, spec):
    early = ParameterSubscriber(publisher.endpoint)
    for version in range(1, 6):
        publisher.publish(make_parameters(spec, version))
        time.sleep(0.05)
    late = ParameterSubscriber(publisher.endpoint)
    assert wait_for(lambda: newest(late), 10, "the last value") == 5
    wait_for(lambda: newest(early) == 5, 10, "the newest value")
    time.sleep(0.3)
    for version in range(6, 40):
        publisher.publish(make_parameters(spec, version))
        time.sleep(0.03)
    time.sleep(0.3)
    assert newest(late) == 39 and newest(late) is False  # one message was kept, the newest
    early.close()
    late.close()


def test_a_subscriber_that_comes_before_the_first_value_gets_it(publisher, spec):
    subscriber = ParameterSubscriber(publisher.endpoint)
    assert subscriber.fetch(300) is None
    publisher.publish(make_parameters(spec, 1))
    assert wait_for(lambda: newest(subscriber), 10, "the first value") == 1
    subscriber.close()


def test_a_relay_passes_the_newest_on(publisher, spec):
    downstream = ParameterPublisher("127.0.0.1", 0)
    stop = threading.Event()
    threads = [
        threading.Thread(target=downstream.run),
        threading.Thread(target=relay, args=(publisher.endpoint, downstream, stop)),
    ]
    for thread in threads:
        thread.start()
    publisher.publish(make_parameters(spec, 7))
    worker = ParameterSubscriber(downstream.endpoint)
    assert wait_for(lambda: newest(worker), 10, "parameters through the relay") == 7
    stop.set()
    downstream.close()
    for thread in threads:
        thread.join(5)
    worker.close()


def test_figures_are_added_up_or_averaged_and_garbage_counted():
    server = MetricsServer("127.0.0.1", 0)
    thread = threading.Thread(target=server.run)
    thread.start()
    clients = [MetricsClient(server.endpoint, f"actor-{i}") for i in range(2)]
    for i, client in enumerate(clients):
        client.report({"actor/frames_per_second": 100.0, "actor/lag": float(i), "actor/agent_steps_total": 10.0})
    clients[0].evaluation(Evaluation(5, 0.0, (1.0, 3.0), (10, 20), 1.0))
    stranger = make_socket(zmq.Context.instance(), zmq.PUSH)
    stranger.connect(server.endpoint)
    stranger.send(b"\xc1garbage")
    wait_for(lambda: server.figures().get("actor/frames_per_second") == 200, 10, "both reports")
    wait_for(lambda: server.figures()["system/malformed_reports_total"] == 1, 10, "the garbage")
    figures = server.figures()
    assert figures["actor/lag"] == 0.5 and figures["actor/agent_steps_total"] == 20
    (evaluation,) = wait_for(server.evaluations, 10, "the evaluation")
    assert evaluation.figures()["evaluation/return_mean"] == 2.0
    server.close()
    thread.join(5)
    for client in clients:
        client.close()
    stranger.close()
