"""A short chaos run, and the proof that its checks notice a loss, a double and a stranger's network."""

import dataclasses

import msgspec
import numpy as np
import pytest

from apexrl.config.commands import RunCommand
from apexrl.config.flags import default_command
from apexrl.files import write_json
from apexrl.learning.record.run_record import CURVE_COLUMNS
from apexrl.learning.record.status_file import Status
from apexrl.net import wire
from apexrl.networks.headers import Counters
from apexrl.replay.segment import Entry
from apexrl.running.display import summary_of
from apexrl.running.run_directory import save_config
from apexrl.unroll import UnrollCodec
from tests.system import chaos, chaos_checks, witness
from tests.system.chaos_world import Sample
from tests.system.foreigners import KINDS

QUICK = ("--min-size-to-sample", "1000", "--episodes", "1", "--evaluation-period-seconds", "2")


@pytest.mark.long("chaos")
@pytest.mark.timeout(1500)
def test_a_run_gets_over_a_kill_a_stop_and_strangers(tmp_path):
    arguments = ["--env", "Catch-v0", "--run-dir", tmp_path / "chaos", "--minutes", 15, "--num-faults", 3]
    arguments += ["--faults", "kill,stop,foreign", "--foreign", "garbage,numbers", "--pause-seconds", 2, *QUICK]
    options, flags = chaos.parse([str(argument) for argument in arguments])
    report = chaos.chaos(options, flags)
    chaos.show(report)
    assert not report.reasons()
    assert {fault.kind for fault in report.faults} == {"kill", "stop", "foreign"}
    assert report.memory.keys() >= {"replay", "learner", "actors", "worker"}


@pytest.fixture
def entries(spec):
    """The journal of a witness's first six inserts."""
    codec, found = UnrollCodec(spec), []
    for i in range(6):
        header = witness.header_of(spec, i)
        insert = wire.Insert(i, f"{witness.PREFIX}-1", header.stream, header.first_step, 0, 0.1,
                             np.packbits(header.valid).tobytes(), header.priorities.tobytes())  # fmt: skip
        found.append(Entry(i, wire.encode(insert), codec.encode(witness.numbered_unroll(spec, i))))
    return found


def test_the_witness_finds_all_of_its_inserts(entries, spec):
    assert witness.faults_of(entries, spec, 6) == ("6 acknowledged, 0 lost, 0 doubled", [])
    assert not witness.faults_of(entries, spec, 5)[1]  # the last one was stored, its acknowledgement is on the way


def test_the_witness_notices_a_loss_a_double_a_change_and_another_order(entries, spec):
    assert (
        "1 of 6 acknowledged inserts are lost, the first is 2"
        in witness.faults_of([*entries[:2], *entries[3:]], spec, 6)[1]
    )
    assert "1 inserts are there twice" in witness.faults_of([*entries, entries[5]], spec, 6)[1]
    assert "inserts are out of order" in witness.faults_of(entries[::-1], spec, 6)[1]
    changed = [*entries[:5], entries[5]._replace(block=entries[4].block)]
    assert "unroll 5: insert 5 is not what the witness inserted" in witness.faults_of(changed, spec, 6)[1]


def streams_of(entries, spec, tmp_path, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: witness.PREFIX)  # these streams are of this host's actors
    return chaos_checks.streams(chaos_checks.Remains(tmp_path, entries, spec))[1]


def test_a_gap_in_a_stream_is_noticed(entries, spec, tmp_path, monkeypatch):
    assert not streams_of(entries, spec, tmp_path, monkeypatch)
    assert len(streams_of([*entries[:2], *entries[3:]], spec, tmp_path, monkeypatch)) == 2
    assert len(streams_of([*entries, entries[5]], spec, tmp_path, monkeypatch)) == 2


def test_an_evaluation_that_the_evaluator_never_told_is_noticed(spec, tmp_path):
    remains = chaos_checks.Remains(tmp_path, [], spec)
    curve, row = tmp_path / chaos_checks.CURVE_FILE, "3,100,5,2,1.00,1.00,1.00,1.00\n"
    summary = summary_of(Status("Known-v0", 0, Counters(best_evaluation_return=1.0), {}, ""), "Known-v0", 1.0, 0)
    write_json(tmp_path / chaos_checks.SUMMARY_FILE, summary)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "evaluator.log").write_text("12:00:00 actor: update 5: 2 games, mean 1.00, median 1.00\n")
    curve.write_text(f"{CURVE_COLUMNS}\n{row}")
    assert not chaos_checks.evaluations(remains)[1]
    curve.write_text(f"{CURVE_COLUMNS}\n{row}{row.replace('1.00', '1e9')}")
    assert "1 evaluations are nobody's" in chaos_checks.evaluations(remains)[1][0]
    splendid = msgspec.structs.replace(summary, evaluation_best_return=1e9)
    write_json(tmp_path / chaos_checks.SUMMARY_FILE, splendid)
    assert "evaluation_best_return 1000000000.0 is nobody's" in chaos_checks.evaluations(remains)[1]


def test_a_role_that_dies_by_itself_is_noticed(tmp_path):
    (tmp_path / "logs").mkdir()
    said = "10:00:00 apexrl.running.supervise: learner ended with signal SIGKILL; restart 1 in 0.5 s\n"

    class World:
        directory = tmp_path

        class launcher:  # noqa: N801 - a value
            @staticmethod
            def text():
                return said

    assert not chaos_checks.deaths(World, killed=1)[1]
    assert "killed by somebody else" in chaos_checks.deaths(World, killed=0)[1][0]
    (tmp_path / "logs" / "actors.log").write_text("10:00:00 actor: actor worker 0 ended with status 1; restart 1\n")
    assert "it was not killed: actor worker 0 ended" in chaos_checks.deaths(World, killed=1)[1][0]


def test_growing_memory_is_told_by_role_without_the_jumps_of_restarts(spec, tmp_path):
    save_config(dataclasses.replace(default_command(RunCommand), run_dir=str(tmp_path)))
    lives = [Sample(5.0 * i, "replay", 1, 100 + i, 0) for i in range(50)]
    lives += [Sample(250 + 5.0 * i, "replay", 2, 50 + i, 0) for i in range(50)]
    found = chaos_checks.memory_of(lives, chaos_checks.Remains(tmp_path, [], spec))
    assert found["replay"].lives == 2 and np.isclose(found["replay"].slope, 12)
    assert not chaos_checks.memory(found)[1]
    huge = [Sample(0.0, "replay", 1, 2000, 0)]
    (reason,) = chaos_checks.memory(chaos_checks.memory_of(huge, chaos_checks.Remains(tmp_path, [], spec)))[1]
    assert "replay took 2000 MB" in reason


def test_unknown_kinds_are_refused_and_flags_of_the_run_are_passed_on(tmp_path, capsys):
    options, flags = chaos.parse(["--run-dir", str(tmp_path / "new"), "--foreign", "names", "--capacity", "5000"])
    assert flags == ["--capacity", "5000"] and options.foreign == ["names"] and options.faults == list(chaos.FAULTS)
    with pytest.raises(SystemExit):
        chaos.parse(["--run-dir", str(tmp_path / "new"), "--foreign", "nobody"])
    assert "choose among " + ",".join(KINDS) in capsys.readouterr().err
