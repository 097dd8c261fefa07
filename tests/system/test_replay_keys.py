"""A real replay server with keys, and peers that have others or none."""

import contextlib
import shutil
import subprocess
import sys

import pytest

from apexrl.errors import PeerError
from apexrl.lifecycle import PERMANENT_STATUS
from apexrl.net import InsertClient, ReplayClient, load_keyring
from tests.system.fuzz import HOST, SPEC, GoodPeers, start_replay
from tests.system.processes import ROOT, Process, wait_for


def make_keys(directory):
    """Keys as a person makes them."""
    command = [sys.executable, "-m", "apexrl", "keys", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600)
    return directory


@pytest.fixture
def key_directories(tmp_path):
    """The right keys, made-up ones, and the right server's key beside a foreign actor's."""
    right, foreign = make_keys(tmp_path / "right"), make_keys(tmp_path / "foreign")
    mixed = shutil.copytree(foreign, tmp_path / "mixed")
    shutil.copy(right / "replay.public", mixed)
    return {"none": "", "right": str(right), "foreign": str(foreign), "mixed": str(mixed)}


def told(client, caplog):
    """Connects in vain; returns what the client has said of it."""
    with pytest.raises(PeerError, match="silent"):
        client.connect(1.8)
    return [text for text in caplog.messages if "no connection" in text]


def test_only_owners_of_keys_reach_the_service(tmp_path, free_ports, key_directories, caplog):
    ports = free_ports(2)
    rings = {kind: load_keyring(directory, "actor") for kind, directory in key_directories.items()}
    learner = load_keyring(key_directories["right"], "learner")
    said = {}
    with (
        start_replay(tmp_path, ports, "--keys", key_directories["right"]) as server,
        GoodPeers(ports, (rings["right"], learner)) as good,
    ):
        wait_for(lambda: good.num_samples or good.errors, 30, "a first batch")
        for kind, port in (*((kind, ports[0]) for kind in ("none", "foreign", "mixed")), ("right", ports[1])):
            caplog.clear()
            client = InsertClient(f"tcp://{HOST}:{port}", f"stranger-{kind}", SPEC, 1, rings[kind])
            said[kind] = told(client, caplog)
            if kind != "none" and not said[kind]:  # a busy machine gives the reason later
                said[kind] = wait_for(lambda: told(client, caplog), 30, "a reason")
            client.close()
        reader = ReplayClient(f"tcp://{HOST}:{ports[1]}", "teller", keyring=learner)
        statistics = reader.statistics(10)
        reader.close()
        good.finish()
        text = server.text()
    print(f"\nkeys: good inserts {good.num_inserts}, lost 0, doubled 0; strangers were told {said}")
    assert "stranger" not in text
    assert {peer.name for peer in statistics.peers} == {good.actor.actor, "good-reader", "good-follower"}
    assert not any(value for name, value in statistics.metrics.items() if name.startswith("dropped"))
    assert said["none"] == []
    assert all(any("key" in text for text in said[kind]) for kind in ("foreign", "mixed", "right")), said
    assert any("does not accept our key" in text for text in said["mixed"])
    assert any("does not accept our key" in text for text in said["right"])


def test_a_server_without_good_keys_ends_with_a_cure(tmp_path, free_ports, key_directories):
    broken = {"nowhere": str(tmp_path / "nowhere")}
    for name, text in (("replay.secret", "short"), ("actor.public", "\u00e9" * 40), ("learner.public", "~" * 40)):
        directory = shutil.copytree(key_directories["right"], tmp_path / f"broken-{name}")
        (directory / name).write_text(text)
        broken[name] = str(directory)
    directory = shutil.copytree(key_directories["right"], tmp_path / "open")
    (directory / "replay.secret").chmod(0o644)
    broken["open"] = str(directory)
    ports = free_ports(2)
    with contextlib.ExitStack() as stack:
        servers = {}
        for name, keys in broken.items():
            arguments = ["replay.py", "--keys", keys, "--actor-port", ports[0], "--batch-port", ports[1]]
            servers[name] = stack.enter_context(Process(arguments, tmp_path / f"{name}.txt"))
        for name, server in servers.items():
            assert server.popen.wait(600) == PERMANENT_STATUS, name
            lines = server.text().splitlines()
            print(f"\nkeys {name}: {lines[-1]}")
            assert "Traceback" not in server.text(), name
            assert any(cure in lines[-1] for cure in ("apexrl keys", "chmod 600", "40 characters")), lines[-1]
