"""Several learners on shards of the experience, and guests on the log of a run. Real processes."""

import contextlib
import dataclasses
import signal

import msgspec
import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from apexrl.config.commands import RunCommand
from apexrl.config.flags import default_command, with_preset
from apexrl.config.sections import EnvConfig
from apexrl.lifecycle import PATIENCE_STATUS, PERMANENT_STATUS
from apexrl.networks.checkpoint import load_checkpoint
from apexrl.networks.headers import latest_path
from apexrl.replay.journal import held_numbers, identity_of
from apexrl.running.run_directory import lock_run, save_config
from tests.system.processes import (
    ROOT,
    Process,
    launch,
    read_json,
    refuse,
    updates_of,
    wait_for,
    wires_of,
    words_of,
)

pytestmark = pytest.mark.timeout(1800)  # to end what hangs: whole runs, also on a machine with much else to do

LONG = pytest.mark.long("learners and guests")
FAMILIES = {
    "apex-dqn": ("--env", "CartPole-v1", "--agent", "apex-dqn", "--preset", "small"),
    "impala": ("--env", "Catch-v0", "--agent", "impala", "--batch-size", "8"),
    "impact": ("--env", "Catch-v0", "--agent", "impact"),
    "r2d2": ("--env", "MemoryCatch-v0", "--agent", "r2d2", "--batch-size", "8"),
    "sac": ("--env", "Pendulum-v1", "--agent", "sac", "--preset", "small", "--samples-per-insert", "8",
            "--normalize-observations", "--scale-rewards"),
    "apex-dpg": ("--env", "Pendulum-v1", "--agent", "apex-dpg", "--preset", "small", "--samples-per-insert", "8"),
    "pqn": ("--env", "Catch-v0", "--agent", "pqn"),
    "vectors": ("--env", "Pendulum-v1", "--agent", "impact", "--min-size-to-sample", "2000",
                "--minibatches", "4"),
}  # fmt: skip
GUESTS = {  # of each host: one that has the run's unrolls, and one that cuts them anew
    "impala": {"same": ("--mix", "uniform=1"), "other": ("--agent", "apex-dqn")},
    "r2d2": {"same": ("--batch-size", "4"), "other": ("--agent", "apex-dqn")},
    "sac": {"same": (), "other": ("--agent", "apex-dpg")},
    "apex-dpg": {"same": (), "other": ("--agent", "sac")},
    "pqn": {"same": (), "other": ("--agent", "apex-dqn")},
    "impact": {"same": (), "other": ("--agent", "pqn")},
    "vectors": {"same": (), "other": ("--agent", "sac", "--samples-per-insert", "8")},
}


def ports_of(free_ports, num_shards):
    """Free ports for `launch`, of which the first two begin a block for all shards; and flags with the meeting port."""
    block, found = 2 * num_shards, free_ports(2 * num_shards + 3)
    while found[block - 1] - found[0] != block - 1:
        found = found[1:] + free_ports(1)
    return [*found[:2], *found[block:-1]], ("--meeting-port", found[-1])


def learners_of(run):
    """The learner processes that torchrun has started, by rank."""
    found = {}
    for process in psutil.Process(run.popen.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "RANK" in process.environ() and "learner.py" in " ".join(words_of(process)):
                found[int(process.environ()["RANK"])] = process
    return found


def transitions_of(journal):
    """The starts that the unrolls of a journal could have: at least as many as the transitions."""
    return len(held_numbers(journal)) * identity_of(journal).spec.unroll_starts


def listening(run):
    """The addresses at which the processes of a run listen."""
    found = set()
    for process in psutil.Process(run.popen.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            connections = process.net_connections("tcp")
            found |= {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}
    return found


def test_two_learners_of_one_host_listen_for_this_host_alone(tmp_path, free_ports):
    ports, meeting = ports_of(free_ports, 2)
    with launch(tmp_path, ports, *FAMILIES["apex-dqn"], "--num-learners", 2, *meeting, "--no-evaluator") as run:
        wait_for(lambda: updates_of(tmp_path / "run"), 120, "updates")
        found = listening(run)
        run.signal(signal.SIGINT)
        assert run.popen.wait(300) == 0, run.text()
    assert {ip for ip, _ in found} == {"127.0.0.1"}, found
    assert {ports[0], ports[2], meeting[1]} <= {port for _, port in found}


@pytest.mark.parametrize(
    "family", ["apex-dqn", *(pytest.param(name, marks=LONG) for name in FAMILIES if name != "apex-dqn")]
)
def test_two_learners_train_one_network_and_one_goes_on_with_it(tmp_path, free_ports, family):
    (ports, meeting), directory = ports_of(free_ports, 2), tmp_path / "run"
    flags = (*FAMILIES[family], "--num-learners", 2, *meeting, "--total-frames", 12_000, "--capacity", 50_000)
    with launch(tmp_path, ports, *flags, "--evaluation-period-seconds", 2, "--episodes", 5) as run:
        assert run.popen.wait(900) == 0, run.text()
    summary, checkpoint = read_json(directory / "summary.json"), load_checkpoint(latest_path(directory))
    logs = checkpoint.header.counters.logs
    journals = [directory / "journal" / f"shard-{shard}" for shard in range(2)]
    assert [log.log for log in logs] == [identity_of(journal).log for journal in journals]
    assert summary["frames"] == sum(log.transitions for log in logs) >= 12_000
    for log, journal in zip(logs, journals, strict=True):
        assert 0 < log.transitions <= transitions_of(journal)
    assert summary["updates"] > 10 and summary["roles_restarted"] == 0 and summary["evaluation_episodes"] > 0
    command = read_json(directory / "config.json")["command"]
    if family == "apex-dqn":
        sampled = summary["updates"] * command["update"]["batch_size"]
        assert summary["transitions_sampled"] == sampled
        due = command["replay"]["samples_per_insert"] * (summary["frames"] - command["replay"]["min_size_to_sample"])
        assert sampled == pytest.approx(due, rel=0.3)
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {"learner/updates_per_second", "learner_1/updates_per_second", "actor/return_mean"} <= set(tags)

    status, text = refuse("--resume", directory, "--num-learners", 3)
    assert status == PERMANENT_STATUS and "does not divide --shards 2" in text, text
    more = ("--resume", directory, "--num-learners", 1, "--total-updates", summary["updates"] + 50)
    with launch(tmp_path, ports, *more, name="resumed") as run:
        assert run.popen.wait(900) == 0, run.text()
        assert f"at update {summary['updates']:,}" in run.text()
    resumed = load_checkpoint(latest_path(directory)).header.counters
    assert resumed.updates == summary["updates"] + 50
    assert all(after.transitions >= before.transitions for after, before in zip(resumed.logs, logs, strict=True))
    assert [log.log for log in resumed.logs] == [log.log for log in logs]


@pytest.mark.parametrize(
    "victim", [pytest.param("learner 0", marks=LONG), "learner 1", pytest.param("replay 1", marks=LONG)]
)
def test_a_team_goes_on_when_one_of_its_parts_is_killed(tmp_path, free_ports, victim):
    (ports, meeting), directory = ports_of(free_ports, 2), tmp_path / "run"
    flags = (*FAMILIES["apex-dqn"], "--num-learners", 2, *meeting, "--checkpoint-period-seconds", 1)
    with launch(tmp_path, ports, *flags, "--no-evaluator") as run:
        wait_for(lambda: updates_of(directory) > 30, 100, "updates")
        role, number = victim.split()
        if role == "learner":
            killed = learners_of(run)[int(number)]
        else:
            (killed,) = [
                process
                for process in psutil.Process(run.popen.pid).children()
                if f"{directory}/journal/shard-{number}" in " ".join(words_of(process))
            ]
        killed.kill()
        wait_for(lambda: "restart 1" in run.text(), 100, "a restart")
        before = updates_of(directory)
        wait_for(lambda: updates_of(directory) > before + 30, 100, "updates after it")
        run.signal(signal.SIGINT)
        assert run.popen.wait(300) == 0, run.text()
    assert read_json(directory / "summary.json")["roles_restarted"] == 1
    for log, shard in zip(load_checkpoint(latest_path(directory)).header.counters.logs, range(2), strict=True):
        journal = directory / "journal" / f"shard-{shard}"
        assert log.log == identity_of(journal).log and log.next_number <= held_numbers(journal).stop


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--num-learners", 3, "--shards", 4), "--num-learners 3 does not divide --shards 4"),
        (("--num-learners", 2, "--num-workers", 2, "--shards", 4), "leaves some of 4 shards without actors"),
        (("--num-learners", 3), "--batch-size 128 is not to be divided among 3 learners"),
        (("--num-learners", 2, "--reproducible"), "--num-learners needs a replay server"),
        (("--num-learners", 2, "--learner-devices", "cpu"), "--learner-devices names 1 devices for 2 learners"),
    ],
)
def test_learners_that_cannot_share_are_refused_at_once(tmp_path, flags, said):
    status, text = refuse("--run-dir", tmp_path / "run", "--env", "CartPole-v1", "--preset", "small", *flags)
    assert status == PERMANENT_STATUS and said in text, text
    assert not (tmp_path / "run").exists()


def test_a_guest_ends_when_the_servers_of_its_run_are_away_for_its_patience(tmp_path, free_ports):
    host = with_preset(default_command(RunCommand, "apex-dqn"), "small")
    (tmp_path / "host").mkdir()
    save_config(dataclasses.replace(host, env=EnvConfig("Catch-v0"), run_dir=str(tmp_path / "host")))
    flags = ("--guest", tmp_path / "host", "--patience-seconds", 8, "--no-evaluator")
    with lock_run(str(tmp_path / "host")), launch(tmp_path, free_ports(4), *flags) as run:
        assert run.popen.wait(600) == PATIENCE_STATUS, run.text()
    last = "".join(run.text().splitlines()[-3:])
    assert "learner ended with status 69: the replay server was away for 8 s (--patience-seconds)" in last, last
    assert read_json(tmp_path / "run" / "summary.json")["roles_restarted"] == 0


def test_actors_by_hand_end_when_the_replay_is_away_for_their_patience(tmp_path, free_ports):
    flags = ("--env", "Catch-v0", "--preset", "small", "--num-workers", 2, "--patience-seconds", 2)
    command = [ROOT / "actor.py", *flags, *wires_of(free_ports(4))]
    with Process(command, tmp_path / "actors.txt") as actors:
        assert actors.popen.wait(600) == PATIENCE_STATUS, actors.text()
    last = actors.text().splitlines()[-1]
    assert "worker" in last and "ended with status 69: the replay server at" in last and "restart" not in actors.text()


@LONG
@pytest.mark.parametrize("family", GUESTS)
def test_guests_of_both_families_learn_from_a_run_that_does_not_wait_for_them(tmp_path, free_ports, family):
    host = tmp_path / "run"
    with launch(tmp_path, free_ports(4), *FAMILIES[family], "--capacity", "40000") as run:
        wait_for(lambda: updates_of(host) > 100, 100, "updates")
        for name, flags in GUESTS[family].items():
            directory = tmp_path / name
            guest = ("-m", "apexrl.running.launch", "--guest", host, "--run-dir", directory, "--no-tensorboard")
            limits = ("--total-updates", 150, "--evaluation-period-seconds", 1, "--episodes", 2)
            with Process([*guest, *limits, *flags], tmp_path / f"{name}.txt") as process:
                assert process.popen.wait(600) == 0, process.text()
            summary = read_json(directory / "summary.json")
            assert (summary["updates"], summary["env"]) == (150, FAMILIES[family][1]) and summary["frames"] > 1000
            assert not (directory / "journal").exists()
        status = msgspec.json.decode((host / "status.json").read_bytes())
        before = status["counters"]["updates"]
        wait_for(lambda: updates_of(host) > before + 50, 100, "updates of the host")
        status, text = refuse("--guest", tmp_path / "same")
        assert status == PERMANENT_STATUS and "has no replay server" in text, text
        run.signal(signal.SIGINT)
        assert run.popen.wait(300) == 0, run.text()
    assert read_json(host / "summary.json")["roles_restarted"] == 0
