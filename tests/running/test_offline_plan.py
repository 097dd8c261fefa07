"""Plans of runs that learn from a journal, without actors."""

import dataclasses

import msgspec
import pytest

from apexrl.config.commands import OfflineCommand, RunCommand
from apexrl.config.flags import Asked, default_command, parse, to_flags
from apexrl.config.sections import EnvConfig
from apexrl.errors import ConfigError
from apexrl.learning.goal import Courses
from apexrl.replay.journal import Journal, identity_of, new_identity
from apexrl.running.launch import roles_of
from apexrl.running.plan import describe, make_plan
from apexrl.running.run_directory import environment_of, save_config
from apexrl.types import StreamSpec

OWN = "tests.own_agent:own"


@pytest.fixture
def journal(tmp_path):
    """The journal of a run on Catch whose unrolls are shorter than ours."""
    directory = tmp_path / "run" / "journal"
    directory.mkdir(parents=True)
    names = ("left", "stay", "right")
    spec = StreamSpec("Catch-v0", (10, 7), "uint8", 1, 3, 1, action_names=names, unroll_starts=20, overlap_steps=0)
    journal = Journal(directory, new_identity(spec))
    journal.append(0, [(b"", b"")] * 700)
    journal.close()
    return directory


def offline(journal, *flags):
    arguments = ["--from-journal", str(journal), "--env", "Catch-v0", "--run-dir", "runs/x", *flags]
    return make_plan(Asked.of(default_command(RunCommand), arguments), None)


def test_a_learner_of_a_journal_has_only_an_evaluator_beside_it(journal):
    made = offline(journal, "--seed", "3")
    assert made.command.replay.capacity == 700 * 20
    roles = roles_of(made.command)
    assert roles.keys() == {"learner", "evaluator"}
    learner = roles["learner"][1]
    assert isinstance(learner, OfflineCommand) and parse(OfflineCommand, to_flags(learner)) == learner
    assert (learner.from_journal, learner.replay.capacity, learner.seed) == (str(journal), 14_000, 3)
    rows = dict(describe(made))
    assert rows["sampling"] == "without actors, nobody waits" and rows["journal"].startswith(str(journal))
    assert offline(journal, "--capacity", "5000").command.replay.capacity == 5000


def test_a_rate_stays_where_nothing_moves_it(journal):
    """A journal's frames are all there from the start."""
    for ends, words in (((), "0.001"), (("--total-updates", "9"), "0.001 falling linearly to 0 over 9 updates")):
        made = offline(journal, "--learning-rate", "1e-3:0", *ends)
        assert dict(describe(made))["update"].endswith(f"adam {words}")
        courses = Courses(roles_of(made.command)["learner"][1])
        numbers = [courses.advance(14_000, courses.late(0.0, updates))["learning_rate"] for updates in (0, 9)]
        assert numbers == [1e-3, 0.0 if ends else 1e-3]


def test_a_journal_of_the_same_environment_with_other_settings_is_refused(journal):
    changes = {"frame_shape": ["--env-kwargs", '{"rows": 12}'], "stacked_frames": ["--frame-stack", "2"]}
    for field, flags in changes.items():
        with pytest.raises(ConfigError, match=field):
            offline(journal, *flags)
    with pytest.raises(
        ConfigError, match=r'its variant is none, not {"wrapper": \["tests.environments.odd_envs:unchanged"\]}'
    ):
        offline(journal, "--wrapper", "tests.environments.odd_envs:unchanged")


def test_a_journal_of_another_environment_is_refused(journal):
    with pytest.raises(ConfigError, match=r"does not fit: its env is Catch-v0, not CartPole-v1"):
        offline(journal, "--env", "CartPole-v1")


def test_a_run_without_actors_keeps_its_journal_when_it_is_resumed(journal, tmp_path):
    before = offline(journal).command
    with pytest.raises(ConfigError, match="a run that is resumed cannot change --from-journal"):
        make_plan(Asked.of(before, ["--from-journal", str(tmp_path)]), before)
    assert make_plan(Asked.of(before, []), before).command == before


def test_the_environment_of_a_journal_is_that_of_its_run(journal):
    held = identity_of(journal).spec
    assert environment_of(journal, held) == EnvConfig("Catch-v0", frame_stack=1)
    varied = msgspec.structs.replace(held, variant='{"env_kwargs": {"rows": 9}}', stacked_frames=4)
    assert environment_of(journal, varied) == EnvConfig("Catch-v0", '{"rows": 9}', frame_stack=4)
    own = EnvConfig("Catch-v0", '{"rows": 8}', clip_rewards="yes", max_episode_frames=77)
    save_config(dataclasses.replace(default_command(RunCommand, OWN), env=own, run_dir=str(journal.parent)))
    assert environment_of(journal, held) == environment_of(journal / "shard-0", held) == own
    assert environment_of(journal.parent / "imported", held) == EnvConfig("Catch-v0", frame_stack=1), "beside a run"
    (journal.parent / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not the configuration of a run"):
        environment_of(journal, held)
