"""Clients whose key, or whose server's key, was not known at first: they get in once it is."""

import contextlib
import shutil

import pytest

from apexrl.errors import PeerError
from apexrl.net.insert_client import InsertClient
from apexrl.net.keyring import Keyring
from apexrl.net.metrics_channel import MetricsClient
from apexrl.net.parameter_channel import ParameterSubscriber
from apexrl.net.replay_client import ReplayClient
from tests.net.peers import Foreign, learning_behind
from tests.system.processes import wait_for


def test_a_client_whose_key_was_refused_gets_in_once_it_is_known(keys, strange, start_server, spec, context):
    keyring = Keyring(keys, "replay")
    with start_server(keyring=keyring) as server, contextlib.ExitStack() as stack:
        rings = {role: Foreign(keys, strange, role) for role in ("actor", "learner")}
        actor = InsertClient(server.actor_endpoint, "new", spec, 1, rings["actor"], context)
        reader = ReplayClient(server.learner_endpoint, "new", {}, 1, rings["learner"], context)
        stack.callback(actor.close)
        stack.callback(reader.close)
        with pytest.raises(PeerError, match="does not accept our key"):
            actor.connect(4.0)
        with pytest.raises(PeerError):
            reader.statistics(2.0)
        for role in rings:
            (keys / f"{role}-new.public").write_bytes((strange / f"{role}.public").read_bytes())
        keyring.read_again()
        actor.connect(60.0)
        assert reader.statistics(60.0).metrics["actors"] == 1


def test_a_client_reads_the_key_of_its_server_again(keys, strange, start_server, spec, context, tmp_path):
    """The server has the keys of one directory, the client first takes it for the owner of another key."""
    own = shutil.copytree(keys, tmp_path / "own")
    (own / "replay.public").write_bytes((strange / "replay.public").read_bytes())
    with start_server(keyring=Keyring(keys, "replay")) as server:
        client = InsertClient(server.actor_endpoint, "new", spec, 1, Keyring(own, "actor"), context)
        with contextlib.closing(client):
            with pytest.raises(PeerError, match="we its public key"):
                client.connect(4.0)
            (own / "replay.public").unlink()
            with pytest.raises(PeerError):
                client.connect(2.0)
            (own / "replay.public").write_bytes((keys / "replay.public").read_bytes())
            client.connect(60.0)


def test_parameters_and_metrics_flow_once_a_refused_key_is_known(keys, strange, context):
    keyring, actor, got = Keyring(keys, "learner"), Foreign(keys, strange, "actor"), []
    with learning_behind(keyring) as (publisher, metrics), contextlib.ExitStack() as stack:
        client = MetricsClient(metrics.endpoint, "new", actor, context)
        client.run = "run"
        subscriber = ParameterSubscriber(publisher.endpoint, actor, context)
        stack.callback(client.close)
        stack.callback(subscriber.close)

        def is_served():
            client.report({"x": 1.0})
            got.append(subscriber.fetch_encoded(20))
            return b"parameters" in got and "x" in metrics.latest()

        for _ in range(50):
            assert not is_served() and got.pop() is None
        (keys / "actor-new.public").write_bytes((strange / "actor.public").read_bytes())
        keyring.read_again()
        wait_for(is_served, 60, "parameters and metrics")
