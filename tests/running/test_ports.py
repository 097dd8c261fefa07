"""Ports that nobody listens on."""

import contextlib
import dataclasses
import socket

import pytest

from apexrl.config.commands import RunCommand
from apexrl.config.flags import Asked, default_command
from apexrl.errors import ConfigError
from apexrl.running.ports import free_row, from_base, with_free_ports

HOST = "127.0.0.1"


AVOIDED = range(20_000, 27_990)  # leaves the last ten of those that are searched


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, HOST), (socket.AF_INET6, "::1")])
def test_free_ports_are_those_that_nobody_listens_on(family, host):
    with socket.socket(family) as taken:
        try:
            taken.bind((host, 27_995))
        except OSError as error:
            pytest.skip(f"needs {host} on the loopback interface ({error.strerror})")
        assert free_row(host, 5, AVOIDED) == 27_990
        with pytest.raises(ConfigError, match="no 6 free ports in a row on "):
            free_row(host, 6, AVOIDED)


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(OSError, match="Cannot assign"):
        free_row("192.0.2.1", 1)


def test_ports_in_a_row_are_free():
    first = free_row(HOST, 6)
    with contextlib.ExitStack() as held:
        for port in range(first, first + 6):
            held.enter_context(socket.socket()).bind((HOST, port))


def asked(*arguments: object) -> Asked[RunCommand]:
    return from_base(Asked.of(default_command(RunCommand), [str(word) for word in arguments]))


@pytest.fixture
def held():
    with contextlib.ExitStack() as stack:
        yield stack


def listening(held: contextlib.ExitStack, *ports: int) -> None:
    for port in ports:
        held.enter_context(socket.create_server((HOST, port)))


def all_ports(command: RunCommand) -> set[int]:
    shards = [command.wires.of_shard(shard) for shard in range(command.wires.shards)]
    wires = command.wires
    return {port for shard in shards for port in (shard.actor_port, shard.batch_port)} | {
        wires.parameter_port, wires.metrics_port, command.tensorboard_port
    }  # fmt: skip


@pytest.mark.parametrize("shards", [1, 3])
def test_a_run_takes_free_ports_where_nobody_asked_for_taken_ones(shards, held):
    base = free_row(HOST, 5 + 2 * shards)
    command = asked("--port-base", base, "--shards", shards).command
    with contextlib.ExitStack() as before:
        assert with_free_ports(command, (), before) == (command, "")
    listening(held, base, base + 1, base + 3 + 2 * shards)  # the board's, the parameters', the last shard's
    found, said = with_free_ports(command, (), held)
    listening(held, *all_ports(found))
    assert found.wires.metrics_port == command.wires.metrics_port and len(all_ports(found)) == 3 + 2 * shards
    assert said.startswith("ports ") and f"{base} " in said and f"has {found.wires.parameter_port}" in said


def test_taken_ports_that_were_asked_for_are_named_at_once(held):
    base = free_row(HOST, 7)
    listening(held, base, base + 4)
    for words, flags in (
        (["--actor-port", base + 4, "--tensorboard-port", base], "--actor-port and --tensorboard-port"),
        (["--port-base", base], "--port-base"),
        (["--port-base", base, "--actor-port", base + 1, "--metrics-port", base + 4], "--metrics-port and --port-base"),
    ):
        line = asked(*words)
        cure = f"stop what listens there, give another {flags}, or leave that out"
        wrong = pytest.raises(ConfigError, match=f"port {base + 4} .* and port {base} .*: {cure}")
        with contextlib.ExitStack() as reserved, wrong:
            with_free_ports(line.command, line.given, reserved)


def test_runs_that_begin_at_the_same_moment_have_ports_of_their_own(held):
    """Nobody listens yet, on the ports of either."""
    command = asked("--port-base", free_row(HOST, 7)).command
    runs = [with_free_ports(command, (), held)[0] for _ in range(3)]
    assert len(set.union(*map(all_ports, runs))) == 15 and runs[0] == command
    line = asked("--actor-port", runs[1].wires.actor_port)
    with pytest.raises(ConfigError, match=r"cannot be used \(another run has it\): .* give another --actor-port"):
        with_free_ports(line.command, line.given, held)
    held.close()
    assert with_free_ports(command, (), held) == (command, "")


def test_ports_that_are_the_same_are_refused_or_told_apart(held):
    port, other = free_row(HOST, 1), free_row(HOST, 1)
    line = asked("--parameter-port", port, "--actor-port", port)
    with pytest.raises(ConfigError, match=r"^--parameter-port and --actor-port give .* each has to be another one"):
        with_free_ports(line.command, line.given, held)
    line = asked("--parameter-port", other)
    wires = dataclasses.replace(line.command.wires, metrics_port=other)
    found, said = with_free_ports(dataclasses.replace(line.command, wires=wires), line.given, held)
    assert found.wires.parameter_port == other != found.wires.metrics_port and str(other) in said


def test_a_base_gives_a_row_but_for_the_ports_that_are_given():
    line = asked("--port-base", "30000", "--batch-port", "40000")
    wires = line.command.wires
    assert (line.command.tensorboard_port, wires.parameter_port, wires.metrics_port) == (30000, 30001, 30002)
    assert (wires.meeting_port, wires.actor_port, wires.batch_port) == (30003, 30004, 40000)
    assert {"actor_port", "tensorboard_port"} <= line.given
