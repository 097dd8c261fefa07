"""Ports that nobody listens on."""

import socket

import pytest

from apexrl.errors import ConfigError
from apexrl.running.ports import free_ports

HOST = "127.0.0.1"


def test_free_ports_are_those_that_nobody_listens_on():
    searched = range(27_990, 28_000)
    with socket.socket() as taken:
        taken.bind((HOST, 27_995))
        assert sorted(free_ports(HOST, 9, searched)) == [port for port in searched if port != 27_995]
        with pytest.raises(ConfigError, match="no 10 free ports from 27990 to 27999"):
            free_ports(HOST, 10, searched)


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(OSError, match="Cannot assign"):
        free_ports("192.0.2.1", 1)


def test_ports_of_an_ipv6_address_are_looked_at_too():
    with socket.socket(socket.AF_INET6) as taken:
        try:
            taken.bind(("::1", 27_995))
        except OSError as error:
            pytest.skip(f"needs IPv6 on the loopback interface ({error.strerror})")
        assert 27_995 not in free_ports("::1", 9, range(27_990, 28_000))
