"""Which stream a log holds: the one that a server was told, else that of the first actor with an unroll."""

import msgspec
import pytest

from apexrl.errors import ConfigError
from apexrl.net import served_log, wire
from apexrl.net.service import PEER_TIMEOUT_SECONDS, ReplayService
from apexrl.replay.journal import IDENTITY_FILE, new_identity
from tests.net.peers import Peers, block_of, insert_of, name_of, only


@pytest.fixture
def other(spec):
    return msgspec.structs.replace(spec, env="Other-v0", unroll_starts=16, overlap_steps=0)


@pytest.fixture(params=["memory", "journal"])
def peers(spec, tmp_path, request):
    return Peers(spec, tmp_path if request.param == "journal" else None)


def give_up(peers):
    """Lets so much time pass that silent peers are given up."""
    for _ in range(int(PEER_TIMEOUT_SECONDS) + 2):
        peers.now += 1.0
        peers.service.expire(peers.now)


@pytest.mark.parametrize("leaves", [True, False])
def test_an_empty_log_takes_another_stream_when_the_actors_of_the_first_are_gone(peers, spec, other, leaves):
    peers.hello(b"wrong", spec=other)
    peers.subscribe(b"l")
    assert only(peers.heard(b"l"), wire.Subscribed)[0].spec == other
    if leaves:
        peers.say("actor", b"wrong", wire.Goodbye())
    else:
        give_up(peers)
        peers.subscribe(b"l")
        peers.heard(b"l")
    peers.hello(b"right")
    assert only(peers.heard(b"right"), wire.Welcome)
    peers.store(b"right", 0)
    assert peers.acknowledged(b"right") == 1 and peers.service.open_log.replay.spec == spec
    assert peers.heard(b"l") == [wire.Stranger()]
    peers.subscribe(b"l")
    messages = peers.heard(b"l")
    assert messages[0].spec == spec and not messages[0].continues and len(only(messages, wire.Append)) == 1
    if peers.journal_dir is not None:
        peers.restart()
        assert peers.service.open_log.replay.spec == spec and peers.log.end_number == 1


def test_an_empty_log_that_waits_for_its_actors_says_so_to_others(peers, spec, other):
    peers.hello(b"wrong", spec=other)
    peers.hello(b"right")
    (refused,) = peers.heard(b"right")
    assert "env is Other-v0, not Known-v0" in refused.reason and "overlap_steps is 0, not 2" in refused.reason
    assert "takes yours when the actors of the other one have left" in refused.reason
    assert peers.service.open_log.replay.spec == other


@pytest.mark.parametrize("advances", [True, False])
def test_a_log_with_an_unroll_keeps_its_stream_and_the_refusal_says_the_way_out(peers, spec, other, advances):
    peers.hello(b"first", spec=other)
    insert = insert_of(b"first", 0, [1.0] * 16)
    peers.say("actor", b"first", insert, block_of(other))
    peers.say("actor", b"first", wire.Goodbye())
    if advances:
        peers.service.advance()
    peers.hello(b"second")
    (refused,) = peers.heard(b"second")
    assert peers.service.open_log.replay.spec == other and peers.log.end_number == 1
    directory = peers.journal_dir
    way_out = "again" if directory is None else f"with another --journal-dir than {directory}"
    assert not advances or f"a log of yours begins when the server is started {way_out}" in refused.reason


def test_a_stream_whose_tables_fit_into_no_memory_is_refused(spec, monkeypatch):
    """Rows of priorities have eight columns, so unrolls of one step take eight times as much as they need."""
    monkeypatch.setattr(served_log, "free_memory_bytes", lambda: 50e6)
    peers = Peers(spec, capacity=10**6)
    peers.hello(b"long")
    assert only(peers.heard(b"long"), wire.Welcome)
    peers.say("actor", b"long", wire.Goodbye())
    peers.hello(b"short", spec=msgspec.structs.replace(spec, unroll_starts=1, overlap_steps=0))
    (refused,) = only(peers.heard(b"short"), wire.Refused)
    assert "--capacity 1,000,000 does not fit for Known-v0: the tables take 0.1 GB, and 0.1 GB are" in refused.reason


def test_a_greeting_that_cannot_be_served_changes_nothing(peers, spec, other):
    peers.hello(b"first")
    peers.say("actor", b"first", wire.Goodbye())
    log = peers.service.open_log.replay.identity.log
    peers.say("actor", b"x", wire.Hello(99, name_of(b"x"), 1, other, 0))
    peers.hello(b"y", spec=msgspec.structs.replace(other, frame_shape=(2**20, 2**10)))
    assert all(isinstance(peers.heard(peer)[0], wire.Refused) for peer in (b"x", b"y"))
    assert peers.service.open_log.replay.identity.log == log


def test_a_server_that_was_told_its_stream_takes_no_other_one(spec, other, tmp_path):
    peers = Peers(spec, tmp_path, stream=spec)
    peers.hello(b"stranger", spec=other)
    (refused,) = peers.heard(b"stranger")
    assert "env is Known-v0, not Other-v0" in refused.reason and "start one of your own" in refused.reason
    peers.subscribe(b"l")
    assert peers.heard(b"l") == [wire.Waiting(0, "actors")]
    peers.hello(b"ours")
    peers.store(b"ours", 0)
    peers.hello(b"stranger", spec=other)
    assert peers.acknowledged(b"ours") == 1 and "for that stream alone" in peers.heard(b"stranger")[0].reason
    peers.restart()
    assert peers.log.end_number == 1


def test_a_journal_of_another_stream_ends_a_server_that_was_told_its_own(spec, other, tmp_path):
    peers = Peers(other, tmp_path)
    peers.hello(b"stranger")
    peers.say("actor", b"stranger", insert_of(b"stranger", 0, [1.0] * 16), block_of(other))
    peers.service.advance()
    peers.service.close()
    for _ in range(2):  # it is given back
        with pytest.raises(ConfigError, match=rf"{tmp_path} .*env is Other-v0, not Known-v0.*: move it away, or"):
            ReplayService(peers.config, 0, tmp_path, 0.0, spec)


def test_a_journal_without_an_unroll_holds_no_stream(spec, other, tmp_path):
    (tmp_path / IDENTITY_FILE).write_bytes(msgspec.json.encode(new_identity(other)))
    for told in (None, spec):
        peers = Peers(spec, tmp_path, stream=told)
        peers.hello(b"a")
        assert only(peers.heard(b"a"), wire.Welcome)
        peers.crash()
