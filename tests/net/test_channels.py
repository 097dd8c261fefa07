"""The learner's channels, parameters and figures, over real sockets, in one process."""

import itertools
import threading
import time

import pytest
import torch
import zmq

from apexrl.config import NetworkConfig
from apexrl.errors import ConfigError, WireError
from apexrl.net import parameter_channel
from apexrl.net.metrics_channel import Evaluation, MetricsClient, MetricsServer
from apexrl.net.parameter_channel import ParameterPublisher, ParameterSubscriber, relay
from apexrl.net.sockets import make_socket
from apexrl.parameters import ParametersHeader, decode_parameters, encode_parameters
from tests.system.processes import wait_for


def test_a_port_in_use_is_a_clear_error(server):
    port = int(server.actor_endpoint.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
        ParameterPublisher("127.0.0.1", port)


def make_parameters(spec, version):
    tensors = {"w": torch.full((3, 4), version / 8), "b": torch.arange(5.0)}
    return encode_parameters(ParametersHeader(version, spec, NetworkConfig((1, 2, 3), 4)), tensors)


def test_parameters_travel_in_half_precision(spec):
    encoded = make_parameters(spec, 3)
    parameters = decode_parameters(encoded)
    assert parameters.header.params_version == 3 and parameters.header.spec == spec
    assert parameters.tensors["w"].dtype == torch.float32 and (parameters.tensors["w"] == 0.375).all()
    wide = encoded.replace(b'"F16"', b'"I16"')  # of the same size
    assert wide != encoded
    for damaged in (b"", b"\xff" * 8, encoded[:-3], encoded[:40], wide):
        with pytest.raises(WireError):
            decode_parameters(damaged)


@pytest.fixture
def publisher():
    publisher = ParameterPublisher("127.0.0.1", 0)
    thread = threading.Thread(target=publisher.run)
    thread.start()
    yield publisher
    publisher.close()
    thread.join(50)


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
    wait_for(lambda: newest(early) == 39, 10, "the last of them")
    got = []
    wait_for(lambda: got.append(newest(late)) or got[-1] == 39, 10, "the newest value")
    assert len([version for version in got if version]) < 10  # of 34: the socket keeps one
    early.close()
    late.close()


def test_a_subscriber_that_comes_before_the_first_value_gets_it(publisher, spec):
    subscriber = ParameterSubscriber(publisher.endpoint)
    assert subscriber.fetch(300) is None
    publisher.publish(make_parameters(spec, 1))
    assert wait_for(lambda: newest(subscriber), 10, "the first value") == 1
    subscriber.close()


def test_without_a_new_value_the_last_is_sent_again(monkeypatch, publisher, spec):
    monkeypatch.setattr(parameter_channel, "REPEAT_SECONDS", 0.1)
    subscriber = ParameterSubscriber(publisher.endpoint)
    publisher.publish(make_parameters(spec, 4))
    for _ in range(3):
        assert wait_for(lambda: newest(subscriber), 100, "the value") == 4
    subscriber.close()


def test_who_is_gone_is_forgotten_and_no_more_than_a_bound_are_served(monkeypatch, publisher, spec, caplog):
    monkeypatch.setattr(parameter_channel, "MAX_SUBSCRIBERS", 2)
    publisher.publish(make_parameters(spec, 1))
    first, second = (ParameterSubscriber(publisher.endpoint) for _ in range(2))
    for subscriber in (first, second):
        wait_for(lambda: newest(subscriber), 100, "the value")
    third = ParameterSubscriber(publisher.endpoint)
    wait_for(lambda: newest(third) is not False or "takes no more" in caplog.text, 100, "a refusal")
    assert len(publisher._told) == 2
    first.close()
    for version in itertools.count(2):
        publisher.publish(make_parameters(spec, version))
        if newest(third):
            break
    assert len(publisher._told) == 2
    for subscriber in (second, third):
        subscriber.close()


def test_a_relay_passes_the_newest_on(publisher, spec):
    downstream = ParameterPublisher("127.0.0.1", 0)
    stop = threading.Event()
    threads = [
        threading.Thread(target=downstream.run),
        threading.Thread(target=relay, args=(publisher.endpoint, downstream, stop, None)),
    ]
    for thread in threads:
        thread.start()
    publisher.publish(make_parameters(spec, 7))
    worker = ParameterSubscriber(downstream.endpoint)
    assert wait_for(lambda: newest(worker), 10, "parameters through the relay") == 7
    stop.set()
    downstream.close()
    for thread in threads:
        thread.join(50)
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
    thread.join(50)
    for client in clients:
        client.close()
    stranger.close()
