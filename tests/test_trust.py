"""Modules that files of a run name: no command imports them unless a person has named or trusted them."""

import contextlib
import sys

import msgspec
import pytest
import torch
from rich.console import Console

import apexrl
from apexrl.errors import ApexError, ConfigError
from apexrl.lifecycle import Stop
from apexrl.networks.checkpoint import save_checkpoint
from apexrl.networks.headers import BEST, CheckpointHeader, Counters, latest_path
from apexrl.own_modules import import_own
from apexrl.replay.journal import IDENTITY_FILE, new_identity
from apexrl.roles import export, watch
from apexrl.running.prepare import on_saved, prepare
from apexrl.tools import compare, runs
from tests.system.processes import call
from tests.tools.run_directories import write_run

PLACES = ("env", "wrapper", "agent", "network")


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """A current directory with a module that tells when it is imported."""
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "payload.py").write_text("import pathlib\npathlib.Path('imported').touch()\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("foreign"):
            del sys.modules[name]


NAMES = {
    "env": {"env": "foreign.payload:X-v0"},
    "wrapper": {"env": "Catch-v0", "wrapper": ["foreign.payload:x"]},
    "agent": {"env": "Catch-v0"},
    "network": {"env": "Catch-v0"},
}


def header_of(spec, place):
    named = NAMES[place]
    variant = msgspec.json.encode({"wrapper": named["wrapper"]}).decode() if "wrapper" in named else ""
    named_spec = msgspec.structs.replace(spec, env=named["env"], variant=variant)
    agent = "foreign.payload:x" if place == "agent" else "apex-dqn"
    network = '{"network":"foreign.payload:x"}' if place == "network" else "{}"
    return CheckpointHeader(named_spec, agent, network, Counters(updates=3))


@pytest.fixture(params=PLACES)
def hostile(request, foreign, spec):
    """The directory of a run of somebody else's, which names a module of its own."""
    run = write_run(foreign / "runs" / "theirs", [1, 2])
    path = run / "config.json"
    config = msgspec.json.decode(path.read_bytes())
    config["command"]["env"] |= NAMES[request.param]
    if request.param == "agent":
        config["command"]["agent"] = "foreign.payload:x"
    if request.param == "network":
        config["command"]["network"]["network"] = "foreign.payload:x"
    path.write_bytes(msgspec.json.encode(config))
    for name in (BEST, "latest.safetensors"):
        header = header_of(spec, request.param)
        save_checkpoint(latest_path(run).with_name(name), header, {"acting.x": torch.zeros(2)})
    (run / "journal").mkdir()
    (run / "journal" / IDENTITY_FILE).write_bytes(msgspec.json.encode(new_identity(header.spec)))
    return run


def prepared(*words):
    with contextlib.ExitStack() as held:
        return prepare([str(word) for word in words], Console(quiet=True), held, False)


def refuses(foreign, function, *arguments):
    with pytest.raises(
        ConfigError, match=r"names the module foreign\.payload \(--.*whose code would run here"
    ) as fault:
        function(*arguments)
    assert "\n" not in str(fault.value) and not (foreign / "imported").exists()
    return str(fault.value)


def test_no_command_imports_what_a_run_names(hostile, foreign, monkeypatch):
    for flag in ("--resume", "--fork", "--guest"):
        said = refuses(foreign, prepared, flag, hostile, "--no-tensorboard")
        assert said.endswith(f" {flag} {hostile} --no-tensorboard --trust")
    assert call(runs.main, "runs")[0] == call(compare.main, hostile)[0] == 0
    for words in ([str(hostile)], []):
        monkeypatch.setattr(sys, "argv", ["apexrl watch", *words, "--episodes=2"] if words else ["apexrl watch"])
        said = refuses(foreign, watch.main, Stop())
        assert said.endswith(f"say apexrl watch {hostile} --episodes=2 --trust" if words else "runs/theirs --trust")
    assert refuses(foreign, apexrl.load, hostile).endswith("say load(..., trust=True), or import it before")
    words = ["--resume", str(hostile)]
    refuses(foreign, on_saved, words)


@pytest.mark.parametrize("place", PLACES)
def test_a_checkpoint_alone_imports_nothing(foreign, spec, monkeypatch, place):
    path = foreign / "downloads" / "best.safetensors"
    save_checkpoint(path, header_of(spec, place), {"acting.x": torch.zeros(2)})
    refuses(foreign, apexrl.load, path)
    monkeypatch.setattr(sys, "argv", ["apexrl watch", str(path)])
    refuses(foreign, watch.main, Stop())
    if place in ("agent", "network"):
        monkeypatch.setattr(sys, "argv", ["apexrl export", str(path)])
        assert refuses(foreign, export.main).endswith(f"say apexrl export {path} --trust")


@pytest.mark.parametrize("place", ["env", "wrapper"])
def test_a_journal_whose_actors_named_a_module_imports_nothing(foreign, spec, place):
    journal = foreign / "journal"
    journal.mkdir()
    (journal / IDENTITY_FILE).write_bytes(msgspec.json.encode(new_identity(header_of(spec, place).spec)))
    assert refuses(foreign, prepared, "--from-journal", journal).endswith(f"--from-journal {journal} --trust")


def test_a_person_who_names_or_trusts_a_module_gets_it_imported(hostile, foreign, request):
    place = request.node.callspec.params["hostile"]
    named = {"env": ["--env", "foreign.payload:X-v0"], "wrapper": ["--wrapper=foreign.payload:x"]}
    own = named.get(place, [f"--{place}", "foreign.payload:x"])
    for words in (["--resume", hostile, "--trust"], ["--fork", hostile, *own]):
        with pytest.raises(ConfigError, match=r"foreign\.payload") as fault:  # which has nothing in it
            prepared(*words)
        assert "names the module" not in str(fault.value)
        (foreign / "imported").unlink()
        sys.modules.pop("foreign.payload", None)  # a process of its own looks at environments


def test_a_program_may_trust_the_files_that_it_loads(hostile, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["apexrl watch", str(hostile), "--trust"])
    for function, *arguments in ((apexrl.load, hostile, True), (watch.main, Stop())):
        with pytest.raises(ApexError) as fault:  # of a network that is none, or of a module that has nothing in it
            function(*arguments)
        assert "names the module" not in str(fault.value)


def test_a_module_that_the_program_has_imported_needs_no_word(foreign, hostile):
    import_own("foreign.payload", "the test")
    with pytest.raises(ApexError) as fault:
        apexrl.load(hostile)
    assert "names the module" not in str(fault.value)


def test_no_file_says_that_it_is_trusted(foreign, hostile):
    path = hostile / "config.json"
    config = msgspec.json.decode(path.read_bytes())
    config["command"]["trust"] = True
    path.write_bytes(msgspec.json.encode(config))
    refuses(foreign, prepared, "--resume", hostile)
