"""Endpoints: those that are none, IPv6, and an address that swallows packets."""

import socket

import pytest
import zmq

from apexrl.errors import ConfigError
from apexrl.lifecycle import PERMANENT_STATUS, exit_status
from apexrl.net import sockets
from apexrl.net.connection import Connection
from apexrl.net.sockets import CONNECT_SECONDS, address, bind, connect, make_socket, receive, send


@pytest.mark.parametrize(
    "endpoint",
    [
        *("", "127.0.0.1:51001", "tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://127.0.0.1:x", "tcp://127.0.0.1:0"),
        *("tcp://127.0.0.1:65536", "tcp://tcp://127.0.0.1:51001", "http://host:51001", "tcp://a b:51001"),
        *(
            "tcp://127.0.0.1:51001:51001",
            "tcp://::1:51001",
            "tcp://[127.0.0.1]:51001",
            "tcp://:51001",
            "tcp://a:\u0661",
        ),
    ],
)
def test_a_text_that_is_no_endpoint_is_refused_with_the_right_form(context, endpoint):
    with pytest.raises(ConfigError, match="is no endpoint: give tcp://HOST:PORT") as fault:
        Connection(endpoint, context=context)
    assert exit_status(fault.value) == PERMANENT_STATUS


def test_a_peer_that_never_reads_is_cut_off(context, monkeypatch):
    """Else whatever waits for it would stay in memory for as long as it is there."""
    monkeypatch.setattr(sockets, "UNREAD_SECONDS", 1)
    server = make_socket(context, zmq.ROUTER)
    monitor = server.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    host, port = bind(server, "127.0.0.1", 0).removeprefix("tcp://").split(":")
    peer = make_socket(context, zmq.DEALER)
    peer.rcvhwm, peer.rcvbuf = 1, 4096
    connect(peer, f"tcp://{host}:{port}")
    peer.send(b"I am here")
    name, _ = server.recv_multipart()
    for _ in range(500):
        server.send_multipart([name, bytes(2**16)], zmq.NOBLOCK)
    assert monitor.poll(120_000), "it is connected still"
    server.disable_monitor()
    for one in (monitor, peer, server):
        one.close(linger=0)


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


NEEDS_IPV6 = pytest.mark.skipif(not has_ipv6(), reason="needs IPv6 on the loopback interface")


def heard_by_a_server(context, host, client_host):
    """Returns the message that a server on a host hears from a client which connects to another name of it."""
    server, client = make_socket(context, zmq.ROUTER), make_socket(context, zmq.DEALER)
    port = int(bind(server, host, 0).rpartition(":")[2])
    connect(client, address(client_host, port))
    send(client, [b"hello"])
    heard = receive(server, 60_000)
    server.close()
    client.close()
    return heard and heard[1:]


@NEEDS_IPV6
def test_ipv6_serves_as_ipv4_does(context):
    assert heard_by_a_server(context, "::1", "::1") == [b"hello"]


@NEEDS_IPV6
def test_a_server_on_all_addresses_of_ipv6_serves_ipv4_too(context):
    assert heard_by_a_server(context, "::", "127.0.0.1") == heard_by_a_server(context, "::", "::1") == [b"hello"]


@NEEDS_IPV6
def test_the_loopback_of_ipv6_is_open_to_nobody_else(context, caplog):
    for host in ("::1", "127.0.0.1"):
        with make_socket(context, zmq.ROUTER) as server:
            bind(server, host, 0)
    assert "open to everybody" not in caplog.text


def test_a_name_is_tried_by_ipv4(context):
    assert heard_by_a_server(context, "127.0.0.1", "localhost") == [b"hello"]


def test_an_address_that_swallows_packets_is_given_up_before_the_system_does(context):
    with make_socket(context, zmq.DEALER) as client:
        connect(client, "tcp://192.0.2.1:51001")
        assert client.getsockopt(zmq.CONNECT_TIMEOUT) == CONNECT_SECONDS * 1000
