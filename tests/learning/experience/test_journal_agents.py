"""One journal teaches each algorithm of its kind of actions: unrolls of actor-critics, and of SAC, read for others."""

import numpy as np
import pytest

from apexrl.agents.families import family_of
from apexrl.config.commands import OfflineCommand
from apexrl.config.flags import explicit_replay, parse, wants_of
from apexrl.errors import ConfigError
from apexrl.learning.experience.journal_client import JournalClient
from apexrl.learning.experience.keeping import Keeping
from apexrl.learning.experience.replica import Replica
from apexrl.learning.loop import make_updater
from apexrl.learning.record.metric_texts import text_of
from apexrl.learning.sharing import share_of
from apexrl.lifecycle import Stop
from apexrl.net import wire
from apexrl.networks.device_stream import DeviceStream
from apexrl.replay.journal import Journal, new_identity
from apexrl.types import EnvironmentSpec, LogPosition
from apexrl.unroll import UnrollCodec
from tests.devices import CPU
from tests.fields import random_unroll

VECTORS = EnvironmentSpec("Vectors-v0", (4,), "float32", 1, 3, 1)
ARMS = EnvironmentSpec("Arm-v0", (4,), "float32", 1, 0, 1, action_bounds=((-2.0, 2.0), (0.0, 1.0)))
NUM_UNROLLS, NUM_UPDATES = 60, 5


def journal_of(tmp_path, environment, *flags):
    """A journal of two streams, as the actors of an algorithm record it."""
    command = parse(OfflineCommand, [*flags, "--from-journal", str(tmp_path)])
    spec = family_of(command.agent).stream(command.algorithm, environment)
    made = Journal(tmp_path, new_identity(spec))
    valid = np.packbits(np.ones(spec.unroll_starts, bool)).tobytes()
    priorities = np.ones(spec.num_priorities, np.float32).tobytes()
    for i in range(NUM_UNROLLS):
        unroll = random_unroll(spec, i)
        if environment is VECTORS:
            actions = np.random.default_rng(i).integers(0, 3, spec.unroll_steps).astype(np.int32)
            unroll = unroll._replace(actions=actions)
            if "behavior_log_probs" in unroll.extras:
                unroll.extras["behavior_log_probs"][:] = -np.log(3)
        insert = wire.Insert(i, "actor", i % 2, (i // 2) * spec.unroll_starts, 7, 0.4, valid, priorities, ())
        made.append(i, [(wire.encode(insert), UnrollCodec(spec).encode(unroll))])
    made.close()
    return tmp_path


@pytest.mark.parametrize(
    "flags",
    [
        ("--agent", "apex-dqn"),
        ("--agent", "apex-dqn", "--unroll-starts", "33", "--n-steps", "5"),
        ("--agent", "impala", "--mix", "uniform=1"),
        ("--agent", "impala", "--mix", "uniform@20=1/2", "elite-1=1/2", "--unroll-starts", "10"),
        ("--agent", "impact", "--mix", "uniform@20=1", "--minibatches", "2"),
        ("--agent", "pqn", "--mix", "queue=1/2", "uniform@20=1/2"),
    ],
    ids=["apex", "apex-of-other-lengths", "impala", "selected", "impact", "pqn"],
)
def test_an_algorithm_learns_from_the_journal_of_impala(tmp_path, flags):
    learn(journal_of(tmp_path, VECTORS, "--agent", "impala", "--mix", "uniform=1"), VECTORS, flags)


OF_R2D2 = {
    "r2d2": ("--agent", "r2d2", "--sequence-unrolls", "2"),
    "apex": ("--agent", "apex-dqn"),
    "pqn": ("--agent", "pqn", "--mix", "uniform@20=1"),
}


@pytest.mark.parametrize("flags", OF_R2D2.values(), ids=OF_R2D2)
def test_an_algorithm_learns_from_the_journal_of_r2d2(tmp_path, flags):
    learn(journal_of(tmp_path, VECTORS, "--agent", "r2d2", "--preset", "small"), VECTORS, flags)


@pytest.mark.parametrize("agent", ["impact", "sac", "apex-dpg"])
def test_an_algorithm_for_vectors_learns_from_the_journal_of_impact(tmp_path, agent):
    mix = ("--mix", "uniform@20=1") if agent == "impact" else ()
    learn(journal_of(tmp_path, ARMS, "--agent", "impact"), ARMS, ("--agent", agent, *mix))


@pytest.mark.parametrize(
    "flags",
    [
        ("--agent", "sac"),
        ("--agent", "sac", "--critic-norm", "batch", "--n-steps", "3"),
        ("--agent", "apex-dpg"),
        ("--agent", "apex-dpg", "--atoms", "11", "--unroll-starts", "33"),
    ],
    ids=["sac", "crossq", "apex-dpg", "atoms"],
)
def test_an_algorithm_for_vectors_learns_from_the_journal_of_sac(tmp_path, flags):
    learn(journal_of(tmp_path, ARMS, "--agent", "sac"), ARMS, flags)


def learn(journal, environment, flags):
    sizes = ("--batch-size", "8", "--capacity", "1000", "--min-size-to-sample", "200")
    command = parse(OfflineCommand, [*flags, "--preset", "small", *sizes, "--from-journal", str(journal)])
    spec, wants = family_of(command.agent).stream(command.algorithm, environment), wants_of(command)
    batch_sizes = {want.table: want.batch_size for want in wants}
    client = JournalClient(journal, spec, explicit_replay(command), batch_sizes, 2, seed=0)
    stream = DeviceStream(CPU)
    replica = Replica(client, Keeping.of(command, stream), LogPosition(), Stop())
    updater = make_updater(command, spec, stream)
    before = {name: tensor.clone() for name, tensor in updater.state_dict().items()}
    for _ in range(NUM_UPDATES):
        while (draw := replica.next_draw(0)) is None:
            assert replica.follow(0) or replica.follow(0)
        pending = updater.update(draw)
        priorities, metrics = pending.result()
        assert np.isfinite(list(metrics.values())).all()
        assert not [name for name in metrics if text_of(f"learner/{name}") is None], "metrics without a text"
        for table, values in priorities.items():
            replica.update_priorities(draw.generation, table, pending.keys[table], values)
    client.close()
    after = updater.state_dict()
    assert any((after[name] != tensor).any() for name, tensor in before.items() if name.startswith("acting."))


@pytest.mark.parametrize(("num_learners", "shards"), [(2, 2), (1, 2)])
def test_a_journal_is_learned_from_once(num_learners, shards):
    command = parse(OfflineCommand, ["--from-journal", "x", "--shards", str(shards)])
    with pytest.raises(ConfigError, match="--from-journal is one log for one learner: leave out --num-learners and"):
        share_of(command, num_learners)
