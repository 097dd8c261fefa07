"""CURVE keys: the files, and the ports that each of them opens."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
import zmq

from apexrl.config.sections import WireConfig
from apexrl.errors import ConfigError, PeerError
from apexrl.learning.connections import Connections
from apexrl.lifecycle import Stop
from apexrl.net.insert_client import InsertClient
from apexrl.net.keyring import ROLES, Keyring, load_keyring, make_keys, public_keys, read_key
from apexrl.net.log_client import LogClient
from apexrl.net.metrics_channel import MetricsClient
from apexrl.net.parameter_channel import ParameterPublisher, ParameterSubscriber
from apexrl.net.replay_client import ReplayClient
from apexrl.net.sockets import connect, make_socket
from apexrl.tools.keys import main
from tests.net.peers import TABLE, Foreign, block_of, learning_behind
from tests.system.processes import ROOT, call, wait_for


def test_keys_that_are_read_again_let_others_in(keys, strange, start_server, spec, context):
    keyring, own = Keyring(keys, "replay"), strange / "actor.public"
    (strange / "replay.public").write_bytes((keys / "replay.public").read_bytes())
    with start_server(keyring=keyring) as server:
        for seconds in (1.0, 60.0):
            client = InsertClient(server.actor_endpoint, "new", spec, 1, Keyring(strange, "actor"), context)
            with contextlib.closing(client), pytest.raises(PeerError) if seconds == 1.0 else contextlib.nullcontext():
                client.connect(seconds)
            (keys / "actor-new.public").write_bytes(own.read_bytes())
            keyring.read_again()
        (keys / "actor-bad.public").write_text("no key")
        with pytest.raises(ConfigError):
            keyring.read_again()


def test_where_one_key_cannot_be_read_all_old_ones_count(keys, strange, context):
    keyring, key = Keyring(keys, "replay"), read_key(strange / "actor.public")
    with contextlib.ExitStack() as held:
        held.callback(keyring.close)
        for role in ("actor", "learner"):
            keyring.guard(held.enter_context(contextlib.closing(context.socket(zmq.ROUTER))), (role,))
        (keys / "actor-new.public").write_bytes((strange / "actor.public").read_bytes())
        learner = (keys / "learner.public").read_bytes()
        (keys / "learner.public").write_text("no key")
        with pytest.raises(ConfigError, match=r"learner\.public is not a key"):
            keyring.read_again()
        assert not any(allowed.callback("", key) for allowed in keyring._allowed)
        (keys / "learner.public").write_bytes(learner)
        keyring.read_again()
        assert [allowed.callback("", key) for allowed in keyring._allowed] == [True, False]


def test_a_hang_up_makes_a_learner_read_its_keys_again(keys, strange, free_ports, context, caplog):
    (strange / "learner.public").write_bytes((keys / "learner.public").read_bytes())
    parameter_port, metrics_port = free_ports(2)
    caplog.set_level("INFO")
    new_key, stop = (strange / "actor.public").read_text(), Stop()
    stop.on_signals()
    wires = WireConfig(parameter_port=parameter_port, metrics_port=metrics_port, keys=str(keys))
    with contextlib.closing(Connections(wires)) as logs:
        logs.start(stop)
        logs.accept("run")

        def gets_in(client):
            client.run = "run"
            client.report({"x": 1.0})
            time.sleep(0.02)
            return "x" in logs.metrics.latest()

        for is_known in (False, True):
            endpoint = f"tcp://127.0.0.1:{metrics_port}"
            with contextlib.closing(MetricsClient(endpoint, "new", Keyring(strange, "actor"), context)) as client:
                if is_known:
                    wait_for(lambda: gets_in(client), 60, "its metrics")
                else:
                    assert not any(gets_in(client) for _ in range(50))
            key, told = ("no key", "stay as they are") if is_known else (new_key, "were read again")
            (keys / "actor-new.public").write_text(key)
            os.kill(os.getpid(), signal.SIGHUP)
            wait_for(lambda: told in caplog.text, 60, "its line")
        assert not stop.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(60) and stop.error is None


def test_a_pair_of_files_a_role_that_only_the_owner_can_read(tmp_path):
    status, said = call(main, tmp_path / "keys")
    assert status == 0
    made = said.split()
    assert [path.rsplit("/", 1)[1] for path in made] == [f"{r}{s}" for r in ROLES for s in (".public", ".secret")]
    for role in ROLES:
        public, secret = (tmp_path / "keys" / f"{role}{suffix}" for suffix in (".public", ".secret"))
        assert secret.stat().st_mode & 0o777 == 0o600
        assert zmq.curve_public(read_key(secret)) == read_key(public)
    assert len({path.read_text() for path in (tmp_path / "keys").iterdir()}) == 6


def test_keys_are_never_replaced(keys):
    before = (keys / "actor.secret").read_bytes()
    with pytest.raises(ConfigError, match="exists already: remove it"):
        make_keys(keys, ("learner-2", "actor"))
    status, said = call(main, keys, "actor")
    assert status == 2 and said.startswith("cannot make keys: ") and "exists already" in said
    assert (keys / "actor.secret").read_bytes() == before and not (keys / "learner-2.public").exists()


def test_names_follow_the_directory_on_the_command_line(tmp_path):
    command = [sys.executable, "-m", "apexrl", "keys", tmp_path / "keys", "actor-2", "replay", "replay"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True).stdout.split()
    names = [f"{name}{suffix}" for name in ("actor-2", "replay") for suffix in (".public", ".secret")]
    assert made == [str(tmp_path / "keys" / name) for name in names]


@pytest.mark.parametrize("name", ["server", "learner-"])
def test_a_key_of_no_role_is_refused(tmp_path, name):
    status, said = call(main, tmp_path, name)
    assert status == 2 and name in said and not list(tmp_path.iterdir())


def test_a_role_may_have_several_keys(keys):
    make_keys(keys, ("actor-gpu", "actor-2"))
    assert len(set(public_keys(keys, "actor"))) == 3
    assert len(public_keys(keys, "learner")) == 1


def test_no_directory_means_no_keys():
    assert load_keyring("", "actor") is None


@pytest.mark.parametrize("missing", ["actor.public", "actor.secret"])
def test_a_missing_key_is_named_with_the_cure(keys, missing):
    (keys / missing).unlink()
    with pytest.raises(ConfigError, match=f"{missing} .*apexrl keys"):
        load_keyring(str(keys), "actor")


def test_a_missing_directory_is_named_with_the_cure(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.*apexrl keys"):
        load_keyring(str(tmp_path / "nowhere"), "actor")


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"x" * 39, b"x" * 41, b"~" * 40, b"#" * 40, b" " * 40, b"\xff" * 40, b"\0" * 40, b"x" * 10**6],
)
def test_a_malformed_key_is_named(keys, content):
    (keys / "actor.public").write_bytes(content)
    with pytest.raises(ConfigError, match=r"actor\.public"):
        load_keyring(str(keys), "actor")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_secret_that_others_may_read_is_refused_with_the_cure(keys, mode):
    (keys / "actor.secret").chmod(mode)
    with pytest.raises(ConfigError, match=r"chmod 600 .*actor\.secret"):
        load_keyring(str(keys), "actor")


def test_a_server_needs_the_public_keys_of_its_clients_and_a_client_that_of_its_server(keys, context):
    for path in [*keys.glob("actor*"), *keys.glob("replay.*")]:
        path.unlink()
    keyring = Keyring(keys, "learner")
    with pytest.raises(ConfigError, match=r"no actor\.public.*apexrl keys"):
        ParameterPublisher("127.0.0.1", 0, keyring, context)
    with pytest.raises(ConfigError, match=r"replay\.public"):
        LogClient("tcp://127.0.0.1:1", "learner", {TABLE: 4}, 1, keyring=keyring, context=context)


def test_a_directory_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        make_keys(tmp_path / "file" / "keys", ("actor",))


@pytest.fixture
def guarded(keys, start_server):
    """A server with keys."""
    with start_server(keyring=Keyring(keys, "replay")) as server:
        yield server


def test_owners_of_the_right_keys_get_in(guarded, keys, spec, header, context):
    actor = InsertClient(guarded.actor_endpoint, "actor", spec, 2, Keyring(keys, "actor"), context)
    actor.connect(10)
    for i in range(6):
        actor.insert(header(8 * i), block_of(spec, i), 10)
    assert actor.flush(10)
    learner = ReplayClient(guarded.learner_endpoint, "reader", {TABLE: 4}, 1, Keyring(keys, "learner"), context)
    assert learner.sample(TABLE, 10).keys.max() < 48
    actor.close()
    learner.close()


def test_a_further_key_of_a_role_gets_in(keys, start_server, spec, context, tmp_path):
    make_keys(keys, ("actor-2",))
    host = tmp_path / "host"  # the host of the second kind of actors
    host.mkdir()
    for name in ("replay.public", "learner.public"):
        os.link(keys / name, host / name)
    for suffix in (".public", ".secret"):
        os.link(keys / f"actor-2{suffix}", host / f"actor{suffix}")
    with start_server(keyring=Keyring(keys, "replay")) as server:
        actor = InsertClient(server.actor_endpoint, "actor", spec, 2, Keyring(host, "actor"), context)
        actor.connect(10)
        actor.close()


def intruder(kind, keys, strange):
    """The keyring of somebody who must not get into the actors' port."""
    return {
        "no keys": lambda: None,
        "keys of another run": lambda: Keyring(strange, "actor"),
        "a foreign key and the right server's": lambda: Foreign(keys, strange, "actor"),
        "the learner's key": lambda: Keyring(keys, "learner"),
    }[kind]()


@pytest.mark.parametrize(
    "kind", ["no keys", "keys of another run", "a foreign key and the right server's", "the learner's key"]
)
def test_a_stranger_does_not_get_in_and_disturbs_nobody(guarded, keys, strange, spec, header, context, kind):
    actor = InsertClient(guarded.actor_endpoint, "actor", spec, 2, Keyring(keys, "actor"), context)
    actor.connect(10)
    stranger = InsertClient(guarded.actor_endpoint, "stranger", spec, 1, intruder(kind, keys, strange), context)
    end = time.monotonic() + 1.5
    for i in range(1000):
        actor.insert(header(8 * i), block_of(spec, i), 10)
        stranger.poll()
        if time.monotonic() > end:
            break
    assert actor.flush(10)
    with pytest.raises(PeerError):
        stranger.connect(0.5)
    assert [s.actor for s in guarded.service.open_log.actors.sessions.values()] == [actor.actor]
    assert guarded.service.open_log.replay.log.end_number == i + 1
    assert not guarded.service.outbox.dropped
    actor.close()
    stranger.close()


def test_an_actors_key_does_not_open_the_learners_port(guarded, keys, spec, context):
    actor = InsertClient(guarded.actor_endpoint, "actor", spec, 2, Keyring(keys, "actor"), context)
    actor.connect(10)
    readers = {
        role: ReplayClient(guarded.learner_endpoint, role, {}, 1, Keyring(keys, role), context)
        for role in ("actor", "learner")
    }
    with pytest.raises(PeerError):
        readers["actor"].statistics(1.0)
    assert readers["learner"].statistics(10).metrics["actors"] == 1
    for client in (actor, *readers.values()):
        client.close()


def test_who_is_not_let_in_is_told_why(guarded, keys, strange, spec, context, caplog):
    actor = InsertClient(guarded.actor_endpoint, "x", spec, 1, Foreign(keys, strange, "actor"), context)
    wait_for(lambda: actor.poll() or "does not accept our key" in caplog.text, 10, "the reason")
    actor.close()
    caplog.clear()
    actor = InsertClient(guarded.actor_endpoint, "y", spec, 1, Keyring(strange, "actor"), context)
    wait_for(lambda: actor.poll() or "have the same --keys" in caplog.text, 10, "the reason")
    actor.close()


def test_who_is_slow_after_its_connect_is_told_why_too(guarded, keys, strange, spec, context, monkeypatch):
    """The server's refusal comes once, and may be there before the client does anything else."""

    def connect_slowly(*arguments):
        connect(*arguments)
        time.sleep(1.0)

    monkeypatch.setattr("apexrl.net.sockets.connect", connect_slowly)
    actor = InsertClient(guarded.actor_endpoint, "x", spec, 1, Foreign(keys, strange, "actor"), context)
    with contextlib.closing(actor), pytest.raises(PeerError, match="does not accept our key"):
        actor.connect(2.0)


def test_plain_bytes_at_a_guarded_port_do_no_harm(guarded, keys, spec, header, context):
    actor = InsertClient(guarded.actor_endpoint, "actor", spec, 2, Keyring(keys, "actor"), context)
    actor.connect(10)
    stranger = make_socket(context, zmq.STREAM)
    stranger.connect(guarded.actor_endpoint)
    assert stranger.poll(5000)
    identity, _ = stranger.recv_multipart()
    for _ in range(20):
        stranger.send_multipart([identity, os.urandom(200)])
    for i in range(20):
        actor.insert(header(8 * i), block_of(spec, i), 10)
    assert actor.flush(10)
    assert not guarded.service.outbox.dropped
    actor.close()
    stranger.close()


def test_parameters_go_to_actors_only_and_metrics_come_from_known_roles(keys, strange, context):
    kinds = {
        "actor": Keyring(keys, "actor"),
        "replay": Keyring(keys, "replay"),
        "plain": None,
        "foreign": Foreign(keys, strange, "actor"),
    }
    with learning_behind(Keyring(keys, "learner")) as (publisher, metrics):
        clients = {name: MetricsClient(metrics.endpoint, name, ring, context) for name, ring in kinds.items()}
        subscribers = {name: ParameterSubscriber(publisher.endpoint, ring, context) for name, ring in kinds.items()}
        got, told = set(), set()

        def is_served():
            for name, client in clients.items():
                client.run = "run"
                client.report({f"x/{name}": 1.0})
            got.update(name for name, subscriber in subscribers.items() if subscriber.fetch_encoded(20))
            told.update(tag for tag in metrics.latest() if tag.startswith("x/"))
            return got >= {"actor"} and told >= {"x/actor", "x/replay"}

        wait_for(is_served, 30, "parameters and metrics")
        for _ in range(20):  # any other one that gets in does so meanwhile
            is_served()
        assert got == {"actor"} and told == {"x/actor", "x/replay"}
        for part in (*clients.values(), *subscribers.values()):
            part.close()
