"""Plans of runs that go on, beside what a command line asks of them."""

import contextlib
import dataclasses
import io

import pytest
from rich.console import Console

from apexrl.config.commands import RunCommand
from apexrl.config.fields import with_values
from apexrl.config.flags import Asked, default_command, with_preset
from apexrl.config.sections import EnvConfig
from apexrl.errors import ConfigError
from apexrl.own_modules import Trust
from apexrl.replay.journal import Journal, new_identity
from apexrl.running.plan import make_plan
from apexrl.running.ports import free_row, from_base
from apexrl.running.prepare import prepare
from apexrl.running.refusals import check_asked
from apexrl.running.run_directory import lock_run, read_config, save_config
from apexrl.runs import CONFIG_FILE


def begun(agent="apex-dqn", **changes):
    command = with_preset(default_command(RunCommand, agent), "small")
    return dataclasses.replace(command, env=EnvConfig(env="Catch-v0"), run_dir="runs/earlier", **changes)


def line(*words, agent="apex-dqn"):
    return from_base(Asked.of(default_command(RunCommand, agent), words))


def test_a_base_of_ports_holds_where_the_actions_choose_the_algorithm():
    command = make_plan(line("--env", "Reacher-v5", "--port-base", "30000"), None).command
    assert command.agent == "sac" and (command.tensorboard_port, command.wires.actor_port) == (30_000, 30_004)


def test_the_preset_of_a_run_that_goes_on_is_its_own():
    """A sweep gives its runs the same flags at each start."""
    assert make_plan(line("--preset", "auto"), begun(preset="small")).command.preset == "small"
    with pytest.raises(ConfigError, match="cannot change --preset"):
        make_plan(line("--preset", "two-cores"), begun(preset="small"))


def test_a_run_that_has_too_little_memory_to_go_on_says_what_it_forgets(caplog):
    before = with_values(begun(), {"capacity": 10**9})
    assert make_plan(line("--memory-gb", "4"), before).command.replay.capacity < 10**9
    assert "of --capacity 1000000000 the newest" in caplog.text
    caplog.clear()
    make_plan(line(), begun())
    assert not caplog.text


@pytest.mark.parametrize(
    ("before", "words", "complaint"),
    [
        ({"evaluator": False}, ["--stop-at-return", "18"], "needs an evaluator beside it: .* or give --evaluator"),
        ({"from_journal": "a/journal"}, ["--num-workers", "3"], "leave out --num-workers"),
        ({"from_journal": "a/journal"}, ["--learning-rate", "1e-3:0:5M"], "leave out --learning-rate"),
        ({"from_journal": "a/journal"}, ["--total-frames", "5M"], "leave out --total-frames"),
    ],
)
def test_flags_that_mean_nothing_for_the_run_that_goes_on_are_refused(before, words, complaint):
    asked = line("--resume", "runs/earlier", *words)
    check_asked(asked, begun())
    with pytest.raises(ConfigError, match=complaint):
        check_asked(asked, begun(**before))
    check_asked(line("--resume", "runs/earlier", "--stop-at-return", "18", "--evaluator"), begun(evaluator=False))


def test_a_package_that_a_person_names_is_trusted_with_its_parts(tmp_path):
    """The table of an environment in presets.toml adds a wrapper of its package, which no command line names."""
    wrapper = ("minigrid.wrappers:OneHotPartialObsWrapper",)
    command = dataclasses.replace(begun(), env=EnvConfig("minigrid:MiniGrid-Empty-5x5-v0", wrapper=wrapper))
    save_config(dataclasses.replace(command, run_dir=str(tmp_path)))
    trust = Trust.of(["--env", "minigrid:MiniGrid-DoorKey-8x8-v0", "--resume", str(tmp_path)], "--trust")
    assert read_config(tmp_path / CONFIG_FILE, trust)[0].env == command.env
    for named in ("mini:X-v0", "minigrid.wrapper:X-v0", "X-v0"):
        with pytest.raises(ConfigError, match="names the module minigrid"):
            read_config(tmp_path / CONFIG_FILE, Trust.of(["--env", named], "--trust"))


def test_a_guest_that_goes_on_follows_its_run_to_other_ports(tmp_path, monkeypatch):
    """Also from another directory: it keeps the whole path of its run."""
    monkeypatch.chdir(tmp_path)
    host = dataclasses.replace(begun(), run_dir=str(tmp_path / "host"))
    (tmp_path / "host").mkdir()
    save_config(host)
    words = ["--guest", "host", "--run-dir", str(tmp_path / "guest"), "--no-tensorboard", "--no-evaluator"]
    with lock_run(host.run_dir), contextlib.ExitStack() as held:
        first = prepare(words, Console(file=io.StringIO()), held).command
    assert (first.guest, first.wires.batch_port) == (str(tmp_path / "host"), host.wires.batch_port)
    save_config(dataclasses.replace(host, wires=dataclasses.replace(host.wires, actor_port=21_001, batch_port=21_003)))
    monkeypatch.chdir("/")
    base = free_row("127.0.0.1", 6)
    for words in (
        ["--resume", str(tmp_path / "guest")],
        ["--resume", str(tmp_path / "guest"), "--port-base", str(base)],
    ):
        with lock_run(host.run_dir), contextlib.ExitStack() as held:
            again = prepare(words, Console(file=io.StringIO()), held).command
        assert (again.wires.actor_port, again.wires.batch_port) == (21_001, 21_003)
    assert again.wires.parameter_port == base + 1
    with pytest.raises(ConfigError, match=f"{host.run_dir} has ended"), contextlib.ExitStack() as held:
        prepare(words, Console(file=io.StringIO()), held)


def test_who_learns_from_the_log_of_a_run_has_its_measures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--env", "Pendulum-v1", "--agent", "sac", "--normalize-observations", "--scale-rewards"]
    plan = make_plan(line(*words, "--run-dir", "host"), None)
    (tmp_path / "host/journal").mkdir(parents=True)
    save_config(plan.command)
    journal = Journal(tmp_path / "host/journal", new_identity(plan.spec))
    journal.append(0, [(b"", b"")])
    journal.close()

    def measures(*words):
        ends = ["--run-dir", f"other-{len(list(tmp_path.iterdir()))}", "--no-tensorboard", "--no-evaluator"]
        with contextlib.ExitStack() as held:
            learning = prepare([*words, *ends], Console(file=io.StringIO()), held).command.learning
        return learning.normalize_observations, learning.scale_rewards

    with lock_run("host"):
        assert measures("--guest", "host") == (True, True)
        assert measures("--guest", "host", "--no-scale-rewards") == (True, False)
    assert measures("--from-journal", "host/journal", "--agent", "sac") == (True, True)
    assert measures("--from-journal", "host/journal", "--agent", "sac", "--no-normalize-observations") == (False, True)
    assert measures("--from-journal", "host/journal") == (True, True)
    assert measures("--from-journal", "host/journal", "--no-scale-rewards") == (True, False)
    save_config(with_values(plan.command, {"normalize_observations": False}))
    assert measures("--from-journal", "host/journal", "--agent", "sac") == (False, True)
    off = ["--no-normalize-observations", "--no-scale-rewards"]  # which IMPACT's preset for vectors has on
    save_config(make_plan(line("--env", "Pendulum-v1", "--agent", "impact", *off, "--run-dir", "off"), None).command)
    with lock_run("off"):
        assert measures("--guest", "off") == (False, False)


@pytest.mark.parametrize(("journal", "cure"), [("auto", ", or .* --from-journal runs/a/journal"), ("off", "")])
def test_a_run_that_has_ended_takes_no_guest(tmp_path, monkeypatch, journal, cure):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a" / "journal").mkdir(parents=True)
    host = dataclasses.replace(begun(), run_dir="runs/a")
    save_config(dataclasses.replace(host, replay=dataclasses.replace(host.replay, journal_dir=journal)))
    with lock_run("runs/a"):
        pass
    with pytest.raises(ConfigError, match=f"runs/a has ended.* resume runs/a`{cure}$"), contextlib.ExitStack() as held:
        prepare(["--guest", "runs/a"], Console(file=io.StringIO()), held)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"a"}
    with pytest.raises(SystemExit), contextlib.ExitStack() as held:
        prepare(["--guest", "runs/a", "--help"], Console(file=io.StringIO()), held)
