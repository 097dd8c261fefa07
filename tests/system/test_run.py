"""Whole runs through all real processes."""

import json
import os
import re
import signal
import socket
import subprocess
import urllib.request

import psutil
import pytest

from apexrl.learning.record.metric_texts import text_of
from apexrl.lifecycle import INTERRUPTED_STATUS, PERMANENT_STATUS, TEMPORARY_STATUS
from apexrl.net.keyring import ROLES, make_keys
from apexrl.runs import read_evaluations
from tests.system.processes import (
    ROOT,
    Process,
    games_of,
    is_gone,
    launch,
    play_on,
    read_json,
    refuse,
    updates_of,
    wait_for,
    wires_of,
    words_of,
)

pytestmark = pytest.mark.timeout(1800)  # to end what hangs: whole runs, also on a machine with much else to do
SUMMARY_FIELDS = {
    *("env", "seconds", "frames", "agent_steps", "transitions_inserted", "updates", "transitions_sampled"),
    *("samples_per_insert", "episodes", "evaluation_episodes", "evaluation_mean_return", "roles_restarted"),
}
MIXED = ("--agent", "impala", "--env", "Catch-v0", "--preset", "small", "--distance", "l2", "--mix", "queue=1/4",
         "elite-1@500=1/4", "attentive@500=1/4", "uniform@500=1/4")  # fmt: skip
CARTPOLE = ("--env", "CartPole-v1", "--preset", "small", "--evaluation-period-seconds", "5")
FEW = 30  # updates, which take a second
MIX, LSTM = ("--mix", "queue=1/4", "uniform=3/4"), ("--lstm", "--lstm-size", "32")
CATCH = ("--agent", "impala", "--env", "Catch-v0", "--evaluation-period-seconds", "5", "--batch-size", "8", *MIX, *LSTM)
MEMORY = ("--agent", "r2d2", "--env", "MemoryCatch-v0", "--evaluation-period-seconds", "5", "--batch-size", "8")
SOON = ("--min-size-to-sample", "500", "--evaluation-period-seconds", "5")
OTHERS = {
    "apex-dpg": ("--agent", "apex-dpg", "--env", "Pendulum-v1", "--preset", "small", *SOON),
    "sac": ("--agent", "sac", "--env", "Pendulum-v1", "--preset", "small", *SOON),
    "impact": ("--agent", "impact", "--env", "Catch-v0", *SOON),
    "impact-vectors": ("--agent", "impact", "--env", "Pendulum-v1", *SOON),
    "pqn": ("--agent", "pqn", "--env", "Catch-v0", *SOON),
}


def roles_of(run):
    """Process numbers by role, of a running launcher."""
    found = {}
    for process in psutil.Process(run.popen.pid).children():
        words = words_of(process)
        script = next((os.path.basename(w) for w in words if w.endswith(".py")), "")
        role = {"replay.py": "replay", "learner.py": "learner"}.get(script)
        if script == "actor.py":
            role = "evaluator" if "--evaluate" in words else "actors"
        if role:
            found[role] = process.pid
    return found


def test_smoke_run_on_pong(tmp_path, free_ports):
    *ports, board = free_ports(5)
    with launch(tmp_path, ports, "--smoke", "--tensorboard-port", board, is_copy=False) as run:
        url = f"http://127.0.0.1:{board}/data/plugin/custom_scalars/layout"

        def page():
            try:
                return b"who waits" in urllib.request.urlopen(url, timeout=2).read()
            except OSError:
                return False

        wait_for(page, 700, "TensorBoard")
        assert run.popen.wait(800) == 0, run.text()
    summary = read_json(tmp_path / "run" / "summary.json")
    assert summary.keys() >= SUMMARY_FIELDS
    assert summary["env"] == "PongNoFrameskip-v4" and summary["roles_restarted"] == 0
    assert summary["updates"] > 0 and summary["frames"] == 4 * summary["transitions_inserted"] > 8000
    assert summary["evaluation_episodes"] >= 2 and -21 <= summary["evaluation_mean_return"] <= 21
    tags = read_json(tmp_path / "run" / "status.json")["metrics"]
    assert not [tag for tag in tags if text_of(tag) is None], "metrics without a text"
    config = read_json(tmp_path / "run" / "config.json")
    assert config["command"]["env"]["env"] == "PongNoFrameskip-v4" and config["revision"]
    assert list((tmp_path / "run" / "videos").glob("*.webm"))
    assert "cores" in run.text() and "samples an insert" in run.text()


@pytest.mark.parametrize("flags", [
    pytest.param(CARTPOLE, id="apex-dqn"), pytest.param(CATCH, id="laser"), pytest.param(MEMORY, id="r2d2"),
    *(pytest.param(flags, id=name, marks=pytest.mark.long("kills")) for name, flags in OTHERS.items()),
])  # fmt: skip
def test_every_role_may_be_killed_and_the_run_goes_on_then_ends_and_is_resumed(tmp_path, free_ports, flags):
    ports = free_ports(4)
    directory = tmp_path / "run"
    with launch(tmp_path, ports, *flags, "--checkpoint-period-seconds", "1") as run:
        wait_for(lambda: updates_of(directory) > FEW, 300, "updates")
        for role in ("actors", "replay", "learner", "evaluator"):
            victim = wait_for(lambda: roles_of(run).get(role), 300, role)
            os.kill(victim, signal.SIGKILL)
            wait_for(lambda: roles_of(run).get(role, victim) != victim, 300, f"a new {role}")
            before = updates_of(directory)
            wait_for(lambda: updates_of(directory) > before + FEW, 300, f"updates after the death of {role}")
            assert f"{role} ended with signal SIGKILL; restart 1" in run.text()
        wait_for(lambda: games_of(directory) >= 10, 300, "an evaluation that the learner has kept")
        assert (directory / "checkpoints" / "best.safetensors").exists()
        children = run.descendants()
        run.signal(signal.SIGINT)
        assert run.popen.wait(300) == 0
        assert all(is_gone(child.pid) for child in children)
    summary = read_json(directory / "summary.json")
    assert summary["roles_restarted"] == 4 and summary["evaluation_episodes"] >= 10
    if "Catch" in str(flags):  # the others need pygame to be drawn
        assert list((directory / "videos").glob("*.webm"))
    latest = directory / "checkpoints" / "latest.safetensors"
    assert f"checkpoint written: {latest}, update {summary['updates']:,}\n" in run.text()
    with launch(tmp_path, ports, "--resume", directory, name="again") as run:
        play_on(run, directory, summary)
        assert f"at update {summary['updates']:,}" in run.text()
    replay_log = (directory / "logs" / "replay.log").read_text()
    recovered = [int(found) for found in re.findall(r"recovered \d+ unrolls \((\d+) transitions\)", replay_log)]
    assert len(recovered) == 2, "after the kill, and when the run was resumed"
    capacity = 100_000  # the preset's
    assert recovered[1] >= min(summary["transitions_inserted"], 0.9 * capacity)
    resumed = read_json(directory / "summary.json")
    assert resumed["updates"] > summary["updates"] and resumed["frames"] > summary["frames"]


def test_roles_end_when_their_launcher_is_killed(tmp_path, free_ports):
    *ports, board = free_ports(5)
    with launch(tmp_path, ports, *CARTPOLE, "--tensorboard-port", board) as run:
        wait_for(lambda: updates_of(tmp_path / "run") > 50, 300, "updates")
        children = run.descendants()
        assert len(children) >= 5
        run.kill()
        wait_for(lambda: all(is_gone(child.pid) for child in children), 300, "the end of all roles")


@pytest.mark.parametrize(
    ("agent", "network", "mix", "tables"),
    [("apex-dqn", (), (), ()), ("impala", LSTM, MIX, ("--tables", "queue=fifo", "uniform=uniform:0:24"))],
    ids=["apex-dqn", "laser"],
)
def test_roles_started_by_hand_in_any_order_find_each_other_with_keys(
    tmp_path, free_ports, agent, network, mix, tables
):
    make_keys(tmp_path / "keys", ROLES)
    wires = wires_of(free_ports(4))
    small = ["--agent", agent, "--preset", "small", *wires, "--keys", tmp_path / "keys"]
    directory = tmp_path / "by-hand"
    actor = ["--env", "CartPole-v1", "--num-workers", "2", "--environments-per-worker", "4", *network, *small]
    learner = ["--run-dir", directory, "--total-updates", "100", *network, *mix, *small]
    with (
        Process([ROOT / "actor.py", *actor], tmp_path / "actor.txt") as actors,
        Process([ROOT / "learner.py", *learner], tmp_path / "learner.txt") as learning,
        Process([ROOT / "replay.py", *tables, *small], tmp_path / "replay.txt") as replay,
    ):
        assert learning.popen.wait(300) == 0
        assert read_json(directory / "status.json")["counters"]["updates"] == 100
        assert replay.text().count("joined with 4 environments") == 2
        actors.signal(signal.SIGTERM)
        assert actors.popen.wait(300) == 0
    checkpoint = directory / "checkpoints" / "latest.safetensors"
    play = [ROOT / "actor.py", "--env", "CartPole-v1", "--evaluate", "--episodes", "3", "--checkpoint", checkpoint]
    with Process([*play, "--agent", agent, *network, "--preset", "small"], tmp_path / "play.txt") as playing:
        assert playing.popen.wait(300) == 0
        assert "CartPole-v1, update 100: 3 games, mean" in playing.text()


def test_a_checkpoint_of_a_screen_game_is_played_and_filmed(tmp_path):
    from apexrl.networks.checkpoint import save_checkpoint
    from apexrl.networks.headers import CheckpointHeader, Counters
    from apexrl.types import StreamSpec
    from tests.lockstep import identity_of, make_updater

    names = ("noop", "fire", "right", "left", "rightfire", "leftfire")
    spec = StreamSpec("PongNoFrameskip-v4", (84, 84), "uint8", 4, 6, 4, action_names=names)
    header = CheckpointHeader(*identity_of(spec), Counters())
    save_checkpoint(tmp_path / "c.safetensors", header, make_updater(spec).state_dict())
    arguments = ["--checkpoint", tmp_path / "c.safetensors", "--episodes", "2", "--max-episode-frames", "800"]
    with Process([ROOT / "actor.py", *arguments, "--record-dir", tmp_path / "videos"], tmp_path / "out.txt") as playing:
        assert playing.popen.wait(300) == 0, playing.text()
    import cv2

    video = cv2.VideoCapture(str(next((tmp_path / "videos").glob("*.webm"))))
    assert video.get(cv2.CAP_PROP_FRAME_COUNT) > 150
    found, picture = video.read()
    assert found and picture.shape == (420, 320, 3) and picture.std() > 5


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--env", "Pogn-v4"), "unknown environment 'Pogn-v4'"),
        (("--env", "Pendulum-v1", "--agent", "impala"), "give --agent sac, apex-dpg or impact"),
        (("--capacity", "900000000"), "the largest that does is --capacity"),
        (("--capacity", "1000"), "--min-size-to-sample 15000 is more than --capacity 1000"),
        (("--optimizer", "sgdd", "--env", "CartPole-v1"), "adam"),
        (("--device", "cuda:99"), "device 'cuda:99' cannot be used"),
        (("--learning-rate", "-1"), "--learning-rate -1.0 makes no sense"),
        (("--actor-port", "6006", "--batch-port", "6006"), "each has to be another one"),
        (
            ("--resume", "/nonexistent[box2d]"),
            "/nonexistent[box2d] has no config.json: --resume and --fork take the directory",
        ),
        (("--checkpoint", "x.safetensors"), "say `python -m apexrl watch x.safetensors`"),
        (
            ("--evaluation-period-updates", "5"),
            "without --reproducible these mean nothing: leave out --evaluation-period",
        ),
        (("--replay-host", "elsewhere"), "--replay-host and --learner-host are for roles on several hosts"),
        (("--from-scratch",), "give its --resume DIR or --fork DIR, too"),
        (("--smoke", "--no-evaluator"), "--smoke tries everything once"),
        (("--batch-sise", "3"), "--batch-size"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(tmp_path, flags, complaint):
    status, text = refuse("--run-dir", tmp_path / "run", *flags)
    assert status == PERMANENT_STATUS and complaint in text, text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flags", [("--env", "Pogn-v4"), ("--batch-sise", "3")])
def test_a_refusal_is_the_exit_status_of_the_process(tmp_path, flags):
    with launch(tmp_path, (1, 2, 3, 4), *flags, is_copy=False) as run:
        assert run.popen.wait(300) == PERMANENT_STATUS
        assert flags[1] in run.text() or flags[0] in run.text()
        assert "Traceback" not in run.text()


def test_a_port_in_use_is_named(tmp_path, free_ports):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        flags = ("--no-tensorboard", *wires_of(free_ports(4)), "--batch-port", port)
        status, text = refuse("--env", "CartPole-v1", "--run-dir", tmp_path / "run", *flags)
    assert status == TEMPORARY_STATUS, text
    assert f"port {port} on 127.0.0.1 cannot be used" in text and "give another --batch-port" in text


@pytest.mark.parametrize(("name", "complaint"), [("run", "is not empty"), ("run/status.json", "cannot be written")])
def test_a_directory_with_something_else_is_not_written_over(tmp_path, free_ports, name, complaint):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_text("{}")
    flags = ("--no-tensorboard", *wires_of(free_ports(4)))
    status, text = refuse("--env", "CartPole-v1", "--run-dir", tmp_path / name, *flags)
    assert status == PERMANENT_STATUS and complaint in text, text
    assert "Traceback" not in text and (tmp_path / "run" / "status.json").read_text() == "{}"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["status.json"]


def contents(directory):
    return {name: (directory / name).read_bytes() for name in ("config.json", "summary.json")}


def test_a_run_has_its_directory_alone_and_is_trained_from_scratch(tmp_path, free_ports):
    """One run with a mix of all kinds of replay, continued while a second start is tried, then from scratch."""
    directory, ports, others = tmp_path / "run", free_ports(4), free_ports(4)
    with launch(tmp_path, ports, *MIXED, "--total-updates", "50", "--episodes", "2") as run:
        assert run.popen.wait(300) == 0, run.text()
    assert (read_evaluations(directory / "evaluations.csv")[-1].updates, updates_of(directory)) == (50, 50)
    assert f"python -m apexrl watch {directory}\n" in run.text() and "video: " in run.text()
    metrics = read_json(directory / "status.json")["metrics"]
    kept, given = (metrics[f"learner/selection/elite-1@500/distance_{which}"] for which in ("kept", "candidates"))
    assert kept < given and metrics["learner/selection/attentive@500/uses_kept"] > 0
    summary = read_json(directory / "summary.json")
    before = contents(directory)
    with launch(tmp_path, ports, "--resume", directory, name="again") as run:
        wait_for(lambda: updates_of(directory) > summary["updates"], 300, "updates")
        before["config.json"] = contents(directory)["config.json"]
        with launch(tmp_path, others, "--resume", directory, "--seed", "5", name="second") as second:
            assert second.popen.wait(300) == TEMPORARY_STATUS
            assert f"{directory} belongs to a run that goes on" in second.text()
        flags = ["--parameter-port", others[0], "--metrics-port", others[1], "--preset", "small"]
        with Process([ROOT / "learner.py", "--run-dir", directory, *flags], tmp_path / "learner.txt") as learner:
            assert learner.popen.wait(300) == TEMPORARY_STATUS
            assert f"{directory} belongs to a learner that runs" in learner.text()
        assert contents(directory) == before
        run.signal(signal.SIGINT)
        assert run.popen.wait(300) == 0
    latest = directory / "checkpoints" / "latest.safetensors"
    latest.unlink()
    (directory / "evaluations.csv").touch()
    status, text = refuse("--resume", directory, "--no-tensorboard")
    assert status == PERMANENT_STATUS and f"{latest} is missing" in text and "--from-scratch" in text
    flags = ("--from-scratch", "--total-updates", "20")
    with launch(tmp_path, ports, "--resume", directory, *flags, name="scratch") as run:
        assert run.popen.wait(300) == 0, run.text()
        assert f"the earlier results are in {directory / 'earlier-1'}\n" in run.text()
    assert read_json(directory / "earlier-1" / "summary.json")["updates"] > 50
    summary = read_json(directory / "summary.json")
    assert summary["updates"] == 20 and summary["transitions_inserted"] > 2000
    assert latest.exists() and "recovered" in (directory / "logs" / "replay.log").read_text()


def test_an_error_that_comes_again_ends_the_run_and_is_said(tmp_path, free_ports):
    kwargs = json.dumps({"marker": str(tmp_path / "marker")})
    flags = ("--env", "tests.system.raising_env:Raising-v0", "--env-kwargs", kwargs)
    with launch(tmp_path, free_ports(4), *flags, "--no-evaluator", "--max-restarts", "3") as run:
        assert run.popen.wait(500) == 1
        fault = "actors ended with status 1: ValueError: the [robot] arm is stuck"
        assert run.text().count(fault) >= 3 and fault in run.text().splitlines()[-1]


def test_a_worker_that_cannot_work_ends_the_actors(tmp_path):
    flags = ["--env", "Catch-v0", "--num-workers", "2", "--device", "cuda:99", "--preset", "small"]
    with Process([ROOT / "actor.py", *flags], tmp_path / "actor.txt") as actors:
        assert actors.popen.wait(300) == PERMANENT_STATUS
        last = actors.text().splitlines()[-1]
        assert "ended with status 2: device 'cuda:99' cannot be used" in last


def test_a_smoke_run_that_has_not_done_everything_fails(tmp_path, free_ports):
    flags = ("--smoke", "--env", "Catch-v0", "--min-size-to-sample", "20000")
    with launch(tmp_path, free_ports(4), *flags) as run:
        wait_for((tmp_path / "run" / "logs").exists, 300, "the start")
        run.signal(signal.SIGINT)
        assert run.popen.wait(300) == 1
        assert re.search(r"the smoke run failed: in \d+ s nothing was .*learned", run.text())


def test_a_second_signal_kills_what_has_not_ended(tmp_path, free_ports):
    with launch(tmp_path, free_ports(4), *CARTPOLE) as run:
        log = tmp_path / "run" / "logs" / "replay.log"
        wait_for(lambda: log.exists() and "joined with" in log.read_text(), 300, "actors")
        victim = roles_of(run)["actors"]
        os.kill(victim, signal.SIGSTOP)
        run.signal(signal.SIGINT)
        wait_for(lambda: "ending the run" in run.text(), 300, "the end")
        run.signal(signal.SIGINT)
        assert run.popen.wait(300) == 0
        assert re.search(r"actors.*: killed", run.text())
        assert not psutil.pid_exists(victim)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, INTERRUPTED_STATUS), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_run_whose_environment_hangs_can_be_stopped(tmp_path, free_ports, number, status):
    sign = tmp_path / "sign"
    flags = ("--env", "tests.system.hanging_env:Hanging-v0", "--env-kwargs", json.dumps({"sign": str(sign)}))
    with launch(tmp_path, free_ports(4), *flags) as run:
        wait_for(sign.exists, 30, "the making of the environment")
        run.signal(number)
        assert run.popen.wait(300) == status
        assert not (tmp_path / "run").exists()


def test_a_run_ends_in_order_when_the_reader_of_its_output_goes_first(tmp_path, free_ports):
    """As in `bash run.sh | tee log`, where Ctrl-C ends tee at once."""
    with launch(tmp_path, free_ports(4), *CARTPOLE, "--no-evaluator", output=subprocess.PIPE) as run:
        wait_for(lambda: updates_of(tmp_path / "run"), 300, "updates")
        run.popen.stdout.close()
        run.signal(signal.SIGINT)
        assert run.popen.wait(300) == 0
    assert read_json(tmp_path / "run" / "summary.json")["updates"]


CALLBACK = "tests.running.test_callbacks:Once"


def test_a_run_ends_at_a_return_or_where_a_callback_asks(tmp_path, free_ports):
    catch = ("--env", "Catch-v0", "--preset", "small", "--no-tensorboard")
    with launch(tmp_path, free_ports(4), *catch, "--stop-at-return", "-1") as run:
        assert run.popen.wait(300) == 0
        assert "an evaluation's mean return is at least -1" in run.text()
    with launch(tmp_path, free_ports(4), *catch, "--callback", CALLBACK, name="again") as run:
        assert run.popen.wait(300) == 0
        assert f"callback {CALLBACK} asks for it" in run.text()
