"""Peers of other versions: recorded messages of release 0.2.0, and simulated later ones, on both sides."""

import json

import msgspec
import pytest

from apexrl.errors import PeerRefused
from apexrl.net import wire
from apexrl.net.connection import Connection
from apexrl.net.protocols import PROTOCOL, PROTOCOLS, agreed_protocol, why_other_protocol
from apexrl.replay import segment
from apexrl.replay.journal import IDENTITY_FILE
from apexrl.tools import replay_tool
from tests.net.peers import Peers, greeting_of, name_of, only
from tests.system.processes import ROOT, wait_for

RELEASE = json.loads((ROOT / "tests" / "net" / "release_0_2_0.json").read_text())
FIRST = PROTOCOLS[0]
IDENTITY = b'{"format":2,"log":"0123456789abcdef","lives":[3],"spec":%s,"ancestors":[]}'  # as 0.2.0 wrote it


def recorded(name, direction="to_replay"):
    """The first frames of a kind of message, as 0.2.0 sent them."""
    return [bytes.fromhex(m["frame"]) for m in RELEASE["messages"] if (m["name"], m["direction"]) == (name, direction)]


@pytest.mark.parametrize("example", RELEASE["messages"], ids=lambda example: example["name"])
def test_every_message_of_the_release_is_read(example):
    decode = wire.decode_to_replay if example["direction"] == "to_replay" else wire.decode_from_replay
    frames = [bytes.fromhex(frame) for frame in (example["frame"], *example["attachments"])]
    message = decode(frames)
    assert type(message).__name__ == example["name"]
    # The other way round: what this version sends has all that the release needs; it ignores other keys.
    now, then = (msgspec.msgpack.decode(frame) for frame in (wire.encode(message), frames[0]))
    assert {key: now[key] for key in then} == then


def old_greeting(peer, spec):
    """A greeting with the keys of a recorded one."""
    [*_, frame] = recorded("Hello")
    now = msgspec.msgpack.decode(wire.encode(greeting_of(peer, 1, spec)))
    return msgspec.msgpack.encode({key: now[key] for key in msgspec.msgpack.decode(frame)})


def test_a_rolling_upgrade_from_the_release(spec, tmp_path):
    """First the server, then the learner, then the actors: at each step everybody is served, over one journal."""
    peers = Peers(spec, tmp_path)
    assert b"newest_protocol" not in old_greeting(b"a", spec)
    peers.raw("actor", b"a", [old_greeting(b"a", spec)])
    assert only(peers.heard(b"a"), wire.Welcome)[-1].protocol == FIRST
    peers.store(b"a", 0)
    [*_, subscription] = recorded("Subscribe")
    old = msgspec.msgpack.decode(subscription) | {"wants": [], "log": "", "next_number": 0, "follows_log": True}
    peers.raw("learner", b"l", [msgspec.msgpack.encode(old)])
    assert only(peers.heard(b"l"), wire.Subscribed)[0].protocol == FIRST
    peers.restart()
    peers.subscribe(b"n")
    assert only(peers.heard(b"n"), wire.Subscribed)[0].protocol == FIRST
    peers.raw("actor", b"a", [old_greeting(b"a", spec)])
    assert peers.heard(b"a")[0].stored_sequence == 1
    peers.hello(b"b")
    peers.store(b"b", 0)
    assert peers.log.end_number == 2


@pytest.mark.parametrize(
    ("oldest", "newest", "own", "agreed"),
    [
        (6, 0, range(6, 7), 6), (6, 6, range(6, 9), 6), (6, 9, range(6, 8), 7), (6, 8, range(7, 10), 8),
        (7, 9, range(6, 8), 7), (8, 9, range(6, 8), -1), (3, 0, range(6, 8), -1), (3, 5, range(6, 8), -1),
        (5, 2, range(5, 6), 5),
    ],
)  # fmt: skip
def test_the_highest_protocol_that_both_speak(spec, oldest, newest, own, agreed):
    greeting = wire.Hello(oldest, name_of(b"a"), 1, spec, 0, newest)
    assert agreed_protocol(greeting, own) == agreed
    assert bool(why_other_protocol(greeting, own)) == (agreed < 0)


@pytest.mark.parametrize(("oldest", "newest"), [(FIRST, PROTOCOL + 3), (1, PROTOCOL + 3)])
def test_a_later_peer_that_speaks_ours_too_is_served(peers, spec, oldest, newest):
    peers.say("actor", b"a", wire.Hello(oldest, name_of(b"a"), 1, spec, 0, newest))
    assert peers.heard(b"a")[0].protocol == PROTOCOL
    peers.say("learner", b"l", wire.Subscribe(oldest, "l", 1, (), True, "", 0, 0, 0, newest_protocol=newest))
    assert peers.heard(b"l")[0].protocol == PROTOCOL


@pytest.mark.parametrize(
    ("oldest", "newest", "text"),
    [
        (PROTOCOL + 1, PROTOCOL + 3, "you speak 7 to 9: update the server first, then its peers"),
        (3, 0, "you speak 3: update this peer"),
    ],
)
def test_a_peer_without_a_common_protocol_is_told_what_to_update(peers, spec, oldest, newest, text):
    peers.say("actor", b"a", wire.Hello(oldest, name_of(b"a"), 1, spec, 0, newest))
    assert text in peers.heard(b"a")[0].reason
    peers.say("learner", b"l", wire.Subscribe(oldest, "l", 1, (), True, "", 0, 0, 0, newest_protocol=newest))
    assert text in peers.heard(b"l")[0].reason


def test_a_server_that_chooses_a_protocol_we_do_not_speak_is_left(by_hand, context):
    connection = Connection(by_hand.endpoint, context=context)
    connection.send(wire.Heartbeat())
    wait_for(by_hand.heard, 60, "a heartbeat")
    by_hand.say(wire.Welcome((0,), 1, 0, 8, "", PROTOCOL + 1))
    with pytest.raises(PeerRefused, match=f"answers in protocol {PROTOCOL + 1}, we speak {FIRST} to"):
        connection.receive(10_000)
    connection.close()


def test_a_journal_of_the_release_is_read(tmp_path, capsys):
    header, record = (bytes.fromhex(RELEASE["journal"][part]) for part in ("header", "record"))
    spec = segment.scan(header).header.spec
    (tmp_path / IDENTITY_FILE).write_bytes(IDENTITY % msgspec.json.encode(spec))
    (tmp_path / "unrolls-0000000000000003.log").write_bytes(header + record)
    peers = Peers(spec, tmp_path)
    assert len(peers.log) == 1 and peers.log.get(3).block == b"block"
    assert replay_tool.inspect(tmp_path) == 0 and "0123456789abcdef, format 2" in capsys.readouterr().out
