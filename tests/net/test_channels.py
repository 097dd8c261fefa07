"""The learner's channels, parameters and metrics, over real sockets, in one process."""

import contextlib
import itertools
import threading
import time

import msgspec
import numpy as np
import pytest
import torch
import zmq

from apexrl.errors import ConfigError, WireError
from apexrl.net import metrics_channel as channel
from apexrl.net import parameter_channel
from apexrl.net.metrics_channel import (
    MAX_PICTURE_BYTES,
    PNG_MAGIC,
    Evaluation,
    MetricsClient,
    Report,
    checksum,
)
from apexrl.net.parameter_channel import ParameterPublisher, ParameterSubscriber, relay
from apexrl.net.sockets import bind, make_socket
from apexrl.networks.headers import ParametersHeader
from apexrl.networks.parameters import decode_parameters, encode_parameters
from tests.system.processes import wait_for


def test_a_port_in_use_is_a_clear_error(server):
    port = int(server.actor_endpoint.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
        ParameterPublisher("127.0.0.1", port)


@pytest.mark.parametrize("host", ["2001:db8::1", "203.0.113.7", "no-such-interface"])
def test_an_address_of_another_host_is_named_as_the_mistake(context, host):
    with pytest.raises(ConfigError, match=f"cannot listen on {host}:.*: give --bind-host an address of this host"):
        bind(make_socket(context, zmq.ROUTER), host, 0)


def make_parameters(spec, version):
    tensors = {"w": torch.full((3, 4), version / 8), "b": torch.arange(5.0)}
    return encode_parameters(ParametersHeader(version, spec, "apex-dqn", "{}"), tensors)


def test_parameters_travel_in_half_precision(spec):
    encoded = make_parameters(spec, 3)
    parameters = decode_parameters(encoded)
    assert parameters.header.params_version == 3 and parameters.header.spec == spec
    assert parameters.tensors["w"].dtype == torch.float32 and (parameters.tensors["w"] == 0.375).all()
    wide = encoded.replace(b'"F16"', b'"I16"')  # the same size
    assert wide != encoded
    for damaged in (b"", b"\xff" * 8, encoded[:-3], encoded[:40], wide, make_parameters(spec, -1)):
        with pytest.raises(WireError):
            decode_parameters(damaged)


@contextlib.contextmanager
def running(**options):
    """A publisher and its thread."""
    publisher = ParameterPublisher("127.0.0.1", 0, **options)
    thread = threading.Thread(target=publisher.run)
    thread.start()
    try:
        yield publisher
    finally:
        publisher.close()
        thread.join(50)


@pytest.fixture
def publisher():
    with running() as publisher:
        yield publisher


def newest(subscriber):
    parameters = subscriber.fetch(100)
    return parameters is not None and parameters.header.params_version


def test_a_publisher_with_a_bound_sends_fewer_values(spec):
    """The time from one value to the next grows with the values' size and with the subscribers."""
    subscribers = []
    with running(bytes_per_second=1.0) as publisher, contextlib.ExitStack() as stack:

        def first_value():
            """The version that one more subscriber gets in five seconds: a lost value comes again after minutes."""
            subscribers.append(stack.enter_context(contextlib.closing(ParameterSubscriber(publisher.endpoint))))
            return next(filter(None, (newest(subscribers[-1]) for _ in range(50))), None)

        publisher.publish(make_parameters(spec, 1))
        assert wait_for(first_value, 10, "the first value") == 1
        publisher.publish(make_parameters(spec, 2))
        assert wait_for(first_value, 10, "a value") == 1, "the next one has to wait for minutes"
        assert publisher.round_seconds(b"x" * 1000) == len(subscribers) * 1000 >= 2 * 1000


def test_a_repeat_does_not_hold_a_new_value_up(spec, monkeypatch):
    """A round that lasts longer than the time to a repeat: the value that waits comes after the round."""
    monkeypatch.setattr(parameter_channel, "REPEAT_SECONDS", 0.1)
    with running(bytes_per_second=2.0 * len(make_parameters(spec, 1))) as publisher:
        subscriber = ParameterSubscriber(publisher.endpoint)
        publisher.publish(make_parameters(spec, 1))
        wait_for(lambda: newest(subscriber) == 1, 10, "the first value")
        publisher.publish(make_parameters(spec, 2))
        wait_for(lambda: newest(subscriber) == 2, 10, "the next value")
        subscriber.close()


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
    assert len([version for version in got if version]) < 10  # 34 were published: the socket keeps one
    early.close()
    late.close()


def test_an_error_of_the_encoding_ends_the_thread_and_closes_the_socket():
    publisher = ParameterPublisher("127.0.0.1", 0)

    def encode():
        raise ValueError("beyond float16")

    publisher.publish_later(encode)
    with pytest.raises(ValueError, match="beyond float16"):
        publisher.run()
    assert publisher._socket.closed


def test_a_subscriber_that_comes_before_the_first_value_gets_it(publisher, spec):
    subscriber = ParameterSubscriber(publisher.endpoint)
    assert subscriber.fetch(300) is None
    publisher.publish(make_parameters(spec, 1))
    assert wait_for(lambda: newest(subscriber), 10, "the first value") == 1
    subscriber.close()


def test_without_a_new_value_the_last_is_sent_again(spec, monkeypatch):
    monkeypatch.setattr(parameter_channel, "REPEAT_SECONDS", 0.1)
    with running() as publisher:
        subscriber = ParameterSubscriber(publisher.endpoint)
        publisher.publish(make_parameters(spec, 4))
        for _ in range(3):
            assert wait_for(lambda: newest(subscriber), 100, "the value") == 4
        subscriber.close()


def test_who_is_gone_is_forgotten_and_no_more_than_a_bound_are_served(spec, caplog, monkeypatch):
    monkeypatch.setattr(parameter_channel, "MAX_SUBSCRIBERS", 2)
    with running() as publisher:
        publisher.publish(make_parameters(spec, 1))
        first, second = (ParameterSubscriber(publisher.endpoint) for _ in range(2))
        for subscriber in (first, second):
            wait_for(lambda: newest(subscriber), 100, "the value")
        third = ParameterSubscriber(publisher.endpoint)
        wait_for(lambda: newest(third) is not False or "takes no more" in caplog.text, 100, "a refusal")
        first.close()
        for version in itertools.count(2):
            publisher.publish(make_parameters(spec, version))
            if newest(third):  # the first one is forgotten
                break
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


RUN, PLAYED = "run-1", b"the parameters of version 5"
GAMES = Evaluation(5, 0.0, (1.0, 3.0), (10, 20), 1.0, RUN, checksum(PLAYED))


@pytest.fixture
def metrics(metrics):
    """Those of a run and its log that has published what GAMES were played with."""
    metrics.runs = frozenset({RUN, "log-1"})
    metrics.published(5, PLAYED)
    return metrics


def test_metrics_are_added_up_or_averaged_and_garbage_counted(metrics):
    thread = threading.Thread(target=metrics.run)
    thread.start()
    clients = [MetricsClient(metrics.endpoint, f"actor-{i}") for i in range(2)]
    of_a_shard = {"size": 5, "fill": 0.25, "dropped_old": 1, "table/a/inserted": 7, "table/a/samples_per_insert": 4}
    for i, client in enumerate(clients):
        client.report({"actor/too_early": 1.0})
        client.run = RUN
        metrics_of_one = {"actor/frames_per_second": 100.0, "actor/agent_steps_total": 10.0, "system/actors_cores": 0.5}
        metrics_of_one |= {f"replay/{name}": float(value) for name, value in of_a_shard.items()}
        client.report(metrics_of_one | {"actor/lag": float(i)})
    clients[0].evaluation(GAMES)
    stranger = make_socket(zmq.Context.instance(), zmq.PUSH)
    stranger.connect(metrics.endpoint)
    stranger.send(b"\xc1garbage")
    wait_for(lambda: metrics.latest().get("actor/frames_per_second") == 200, 10, "both reports")
    wait_for(lambda: metrics.latest().get("system/dropped_reports/malformed") == 1, 10, "the garbage")
    found = metrics.latest()
    assert found["actor/lag"] == 0.5 and found["actor/agent_steps_total"] == 20
    assert found["system/actors_cores"] == 1.0
    assert [found[f"replay/{name}"] for name in of_a_shard] == [10, 0.25, 2, 14, 4]
    assert "actor/too_early" not in found
    (evaluation,) = wait_for(metrics.evaluations, 10, "the evaluation")
    assert evaluation.metrics()["evaluation/return_mean"] == 2.0
    metrics.close()
    thread.join(5)
    for client in clients:
        client.close()
    stranger.close()


def changed(**changes):
    return msgspec.structs.replace(GAMES, **changes)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (changed(run="run-2"), "foreign"),
        (Report("replay", "log-2", {"replay/fill": 1.0}), "foreign"),
        (changed(params_version=6), "unpublished"),
        (changed(checksum=b""), "unpublished"),
        (changed(checksum=checksum(b"evil"), parameters=b"evil"), "unpublished"),
        (changed(parameters=b"evil"), "unpublished"),
        (changed(steps=(1,)), "malformed"),
        (changed(picture=b"MZ" * 100), "malformed"),
        (Report("actor", RUN, {"learner/loss": 1.0}), "malformed"),
        (Report("actor", RUN, {"evaluation/return_mean": 1e9}), "malformed"),
        (Report("actor", RUN, {"evaluation/frames": 1e9}), "malformed"),
    ],
)
def test_a_message_that_is_not_of_this_run_is_dropped_by_reason(metrics, message, reason):
    metrics.take(message)
    assert metrics.dropped == {reason: 1}
    assert metrics.evaluations() == []
    assert metrics.latest() == {f"system/dropped_reports/{reason}": 1.0}


def test_an_evaluation_of_published_parameters_is_taken(metrics):
    for evaluation in (GAMES, changed(parameters=PLAYED)):
        metrics.take(evaluation)
        assert metrics.evaluations() == [evaluation]
    metrics.published(5, b"others, after the learner came back from a checkpoint")
    metrics.take(GAMES)
    assert metrics.dropped == {"unpublished": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"returns": (np.nan, 1.0)},
        {"returns": (np.inf, 1.0)},
        {"returns": (), "steps": ()},
        {"steps": (0, 5)},
        {"seconds": np.nan},
        {"picture": PNG_MAGIC + bytes(MAX_PICTURE_BYTES)},
        {"run": "r" * 201},
    ],
)
def test_what_no_evaluation_can_hold_is_malformed(changes):
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(changed(**changes)), type=Evaluation)


def test_senders_and_tags_are_bounded(metrics, now):
    for i in range(channel.MAX_SENDERS + 2):
        metrics.take(Report(f"actor-{i}", RUN, {f"actor/{i % 5}": 1.0}))
    assert metrics.dropped == {"crowded": 2}
    metrics.take(Report("actor-0", RUN, {"actor/new": 2.0}))  # a known sender goes on
    assert metrics.latest()["actor/new"] == 2.0
    many = {f"actor/{i}": 1.0 for i in range(channel.MAX_TAGS)}
    metrics.take(Report("actor-1", RUN, {f"actor/other/{i}": 1.0 for i in range(channel.MAX_TAGS)}))
    assert metrics.dropped == {"crowded": 3}
    now[0] += channel.FORGET_SECONDS
    assert "actor/0" not in metrics.latest()  # the dead are forgotten, and make room
    metrics.take(Report("actor-7", RUN, many), num_bytes=channel.MAX_REPORT_BYTES)
    assert metrics.dropped == {"crowded": 3}
    metrics.take(Report("actor-7", RUN, {"actor/0": 1.0}), num_bytes=channel.MAX_REPORT_BYTES + 1)
    assert metrics.dropped == {"crowded": 3, "too large": 1}


def test_evaluations_that_nobody_takes_are_bounded(metrics):
    for _ in range(channel.MAX_EVALUATIONS + 2):
        metrics.take(GAMES)
    assert metrics.dropped == {"crowded": 2}


def test_evaluations_come_no_faster_than_a_disk_bears(metrics, now):
    """Each is written there, whoever tells it."""

    def taken(count):
        for _ in range(count):
            metrics.take(GAMES)
        return len(metrics.evaluations())

    assert sum(taken(4) for _ in range(10)) == channel.EVALUATIONS_AT_ONCE
    now[0] += 3.0
    assert sum(taken(4) for _ in range(10)) == 3 * channel.EVALUATIONS_PER_SECOND


def test_checksums_of_old_versions_are_forgotten(metrics):
    metrics.take(GAMES)
    for version in range(6, 6 + channel.MAX_VERSIONS):
        metrics.published(version, b"more")
        if not version % channel.MAX_FRESH:
            metrics._sum_up()
    metrics.take(GAMES)
    assert metrics.dropped == {"unpublished": 1}


def test_a_picture_too_large_stays_behind(metrics):
    thread = threading.Thread(target=metrics.run)
    thread.start()
    client = MetricsClient(metrics.endpoint, "evaluator")
    client.evaluation(changed(picture=PNG_MAGIC + bytes(MAX_PICTURE_BYTES)))
    (evaluation,) = wait_for(metrics.evaluations, 10, "the evaluation")
    assert evaluation.picture == b"" and evaluation.returns == GAMES.returns
    metrics.close()
    thread.join(5)
    client.close()
