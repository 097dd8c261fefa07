"""The replay's program: the stream that it is told."""

import msgspec
import pytest
import zmq

from apexrl.config.commands import ReplayCommand, RunCommand
from apexrl.config.flags import default_command, parse, to_flags, with_preset
from apexrl.errors import ConfigError
from apexrl.lines import ALIKE
from apexrl.net import wire
from apexrl.net.protocols import PROTOCOL
from apexrl.net.sockets import address, connect, make_socket
from apexrl.roles.replay import stream_of
from apexrl.running.launch import roles_of
from apexrl.types import Field
from tests.net.peers import greeting_of, routing_id_of
from tests.system.processes import Process, wait_for


def test_the_launcher_tells_each_replay_the_stream_of_its_run(spec):
    full = msgspec.structs.replace(
        spec, variant='{"env_kwargs": {"text": "--a b\'\\"ü"}}', action_bounds=((-1 / 3, 1e-300),),
        action_names=("", "fire"), extras=(Field("core", "first", "float16", (2, 3)),),
    )  # fmt: skip
    command = with_preset(default_command(RunCommand), "small")
    assert roles_of(command)["replay"][1].stream == ""
    told = roles_of(command, full)["replay"][1]
    assert stream_of(parse(ReplayCommand, to_flags(told)).stream) == full


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '{"env": 3}', "[" * 5000, "\udc80"])
def test_a_stream_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="--stream is no stream"):
        stream_of(text)


def test_a_replay_by_hand_says_what_is_wrong_with_its_stream(tmp_path, free_ports):
    actor_port, batch_port = free_ports(2)
    flags = ["--actor-port", actor_port, "--batch-port", batch_port, "--journal-dir", "off", "--stream", "{}"]
    with Process(["replay.py", *flags], tmp_path / "replay.log") as replay:
        wait_for(lambda: replay.popen.poll() is not None, 30, "the end of the server")
        assert replay.popen.returncode == 2 and "--stream is no stream" in replay.text()


def test_a_flood_of_greetings_is_some_lines_of_the_log(tmp_path, free_ports, spec):
    actor_port, batch_port = free_ports(2)
    flags = ["--actor-port", actor_port, "--batch-port", batch_port, "--journal-dir", "off"]
    wants = (wire.Want("transitions", 1),)
    floods = {
        actor_port: greeting_of(b"actor", 1, spec),
        batch_port: wire.Subscribe(PROTOCOL, "reader", 1, wants, False, "", 0, 0, 0),
    }
    with Process(["replay.py", *flags], tmp_path / "replay.log") as replay, zmq.Context() as context:
        for port, greeting in floods.items():
            socket = make_socket(context, zmq.DEALER, routing_id_of(b"actor"))
            connect(socket, address("127.0.0.1", port))
            for _ in range(20):
                for _ in range(100):
                    socket.send(wire.encode(greeting))
                    socket.send(wire.encode(wire.Goodbye()))
                for _ in range(100):
                    assert socket.poll(100_000) and socket.recv()
            socket.close()
        assert "(more like this are counted now, and not said)" in replay.text()
        assert replay.text().count("joined") <= 2 * ALIKE and replay.text().count("left") <= 2 * ALIKE + 4
