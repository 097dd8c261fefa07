"""When the replay server wakes for inserts: under low load they wait for others, under high load they do not."""

from unittest.mock import Mock

import pytest

from apexrl.config.sections import ReplayConfig
from apexrl.net.open_log import Advanced
from apexrl.net.replay_server import (
    BUSY_MESSAGES,
    CROWD,
    CROWD_LINGER_SECONDS,
    HURRY_SECONDS,
    LINGER_SECONDS,
    ReplayServer,
)


@pytest.fixture
def server():
    server = ReplayServer(ReplayConfig(tables=("t=priority",)), "127.0.0.1", 0, 0, 0)
    server._descriptors = {"actor": 7}
    server.service.advance = Mock(return_value=Advanced())
    yield server
    server.close()


def test_inserts_wait_until_a_learner_speaks_or_their_time_is_over(server):
    loop = Mock()
    server._wake_for_actors(loop)
    loop.remove_reader.assert_called_once_with(7)
    assert loop.call_later.call_args.args[0] == LINGER_SECONDS and not server.service.advance.called
    server._wake_for_learners(loop)
    assert server.service.advance.call_count == 1 and loop.call_later.return_value.cancel.call_count == 1
    assert loop.call_later.call_count == 2 and not loop.add_reader.called, "the next ones wait from here on"
    server._end_linger(loop)
    assert server.service.advance.call_count == 2 and loop.add_reader.call_args.args[0] == 7
    server._wake_for_learners(loop)
    assert loop.call_later.call_count == 2, "none waited"


def test_inserts_of_a_crowd_wait_longer(server):
    loop, log = Mock(), server.service.logs[""]
    log.open_log = Mock()
    log.open_log.actors.sessions = {bytes([i]): Mock() for i in range(CROWD)}
    server._wake_for_actors(loop)
    assert loop.call_later.call_args.args[0] == CROWD_LINGER_SECONDS


def test_under_high_load_no_insert_waits_however_often_learners_speak(server):
    loop = Mock()
    server._wake_for_actors(loop)
    server._num_received = BUSY_MESSAGES + 1
    server._wake_for_learners(loop)
    assert server.service.advance.call_count == 1 and loop.add_reader.call_args.args[0] == 7
    server._wake_for_actors(loop)
    assert server.service.advance.call_count == 2 and loop.call_later.call_count == 1


def test_no_insert_waits_for_a_while_after_an_actor_stood_still(server, monkeypatch):
    loop, now = Mock(), [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    server.service.advance.return_value = Advanced(has_stalled=True)
    server._wake_for_learners(loop)
    server.service.advance.return_value = Advanced()
    now[0] += HURRY_SECONDS - 0.1
    server._wake_for_actors(loop)
    assert server.service.advance.call_count == 2 and not loop.call_later.called
    now[0] += 0.2
    server._wake_for_actors(loop)
    assert server.service.advance.call_count == 2 and loop.call_later.called


def test_a_journal_of_the_configuration_is_kept(tmp_path):
    with ReplayServer(ReplayConfig(tables=("t=priority",), journal_dir=str(tmp_path / "service"))):
        pass
    assert (tmp_path / "service").is_dir()
