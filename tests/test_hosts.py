"""Hosts that are hosts, and texts that are none."""

import contextlib
import dataclasses
import socket

import pytest

from apexrl.config.commands import ActorCommand, LearnerCommand, ReplayCommand, RunCommand
from apexrl.config.flags import default_command, parse
from apexrl.config.sections import WireConfig
from apexrl.errors import ConfigError
from apexrl.hosts import at_port, check_hosts, is_host, is_loopback, knock

HOSTS = ("localhost", "replay", "replay.example.com", "replay.example.", "actor_1", "ip-10-0-0-1",
         "10.0.0.1", "0.0.0.0", "::1", "::", "fd00::1", "fe80::1%eth0", "4server", "a" * 63)  # fmt: skip
OTHERS = ("", " ", "a b", "tcp://127.0.0.1", "http://host", "host/", "127.0.0.1:51001", "host:51001",
          "[::1]", "::1::2", "[::1]:51001", "256.0.0.1", "10.0.0", "1", "-a", "a-", "a..b", ".", "a" * 64,
          "a." * 127 + "com", "host\n", "user@host", "*", "höst", "10.0.0.1 ", "a,b")  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
def test_names_and_addresses_are_hosts(host):
    assert is_host(host)


@pytest.mark.parametrize("host", OTHERS)
def test_other_texts_are_none(host):
    assert not is_host(host)


@pytest.mark.parametrize("flag", ["--replay-host", "--learner-host", "--bind-host"])
@pytest.mark.parametrize("kind", [ActorCommand, LearnerCommand, ReplayCommand, RunCommand])
@pytest.mark.parametrize("host", ["tcp://127.0.0.1", "a b", "127.0.0.1:51001"])
def test_a_flag_that_names_no_host_is_named(flag, kind, host, monkeypatch):
    monkeypatch.setattr("sys.argv", ["program", "--preset", "small", flag, host])
    with pytest.raises(ConfigError, match=f"{flag} '{host}' is no host"):
        parse(kind)


def test_an_address_that_tensorboard_cannot_listen_on_is_named():
    command = dataclasses.replace(default_command(RunCommand, "apex-dqn"), tensorboard_host="http://x")
    with pytest.raises(ConfigError, match="--tensorboard-host 'http://x' is no host"):
        check_hosts(command)


def test_a_server_may_listen_everywhere():
    for host in ("*", "0.0.0.0", "::"):
        check_hosts(dataclasses.replace(default_command(ReplayCommand, "apex-dqn"), wires=WireConfig(bind_host=host)))


def test_learners_of_several_hosts_do_not_meet_over_ipv6():
    command = default_command(LearnerCommand, "apex-dqn")
    command = dataclasses.replace(command, learner_hosts=2, wires=WireConfig(learner_host="fd00::1"))
    with pytest.raises(ConfigError, match="fd00::1: learners of several hosts meet over IPv4 alone"):
        check_hosts(command)


def test_a_knock_finds_who_listens_and_leaves_other_texts_alone():
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with contextlib.ExitStack() as held:
            try:
                door = held.enter_context(socket.socket(family))
                door.bind((host, 0))
            except OSError:  # no IPv6 on this machine
                assert family == socket.AF_INET6
                continue
            address = at_port(host, door.getsockname()[1])
            with pytest.raises(OSError, match="refused"):
                knock(address, 1.0)
            door.listen()
            knock(address, 1.0)
    for text in ("auto", "", "ray://head:10001", "head", ":80"):
        knock(text, 1.0)


def test_only_this_machine_reaches_its_loopback():
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "localhost", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "replay", "::2")))
