"""A journal beside the log of a run: one store, batches of both, and priorities that go where they belong."""

import dataclasses

import msgspec
import numpy as np
import pytest
import torch

from apexrl.agents.contract import Transitions, Unrolls
from apexrl.config.commands import LearnerCommand, OfflineCommand
from apexrl.config.flags import parse
from apexrl.errors import ConfigError
from apexrl.learning.experience.keeping import Keeping
from apexrl.learning.experience.mixed_log import MixedLog, Share, mixed_rows, with_journal
from apexrl.learning.experience.replica import Replica
from apexrl.learning.sharing import share_of
from apexrl.lifecycle import Stop
from apexrl.networks.device_stream import DeviceStream
from apexrl.types import LogPosition
from tests.learning.experience.test_journal_client import NUM_UNROLLS, client_of, journal  # noqa: F401 - a fixture
from tests.learning.experience.test_replica import Log, append, batch_of, start
from tests.lockstep import TABLE, want

RING = 4  # unrolls of the run
JOURNAL_ROWS = 4  # of a batch, as `client_of` asks for


class Run(Log):
    """A server of a run, and what is said to it."""

    def __init__(self, *events):
        super().__init__()
        self.events = list(events)


def mixed(run, journal, spec, kind="priority"):  # noqa: F811
    opened = []

    def open_journal(begun):
        opened.append(client_of(journal, begun.spec, tables=(f"{TABLE}={kind}",), priority_exponent=0.0))
        return opened[-1]

    return MixedLog(run, open_journal, (TABLE,)), opened


def replica_of(log, rows, counted=LogPosition(), view=Transitions(2, 0.99)):  # noqa: B008
    keeping = Keeping((want(rows, view),), DeviceStream(torch.device("cpu")), 4)
    return Replica(log, keeping, counted, Stop())


def follow(replica):
    """Follows the logs until nothing comes any more."""
    idle = 0
    while idle < 5:
        idle = 0 if replica.follow(0) else idle + 1


def test_batches_are_of_both_logs_and_the_run_overwrites_nothing_of_the_journal(journal, spec, make_unroll):  # noqa: F811
    laps = 5 * RING
    events = [start("run", spec, RING, 0, False)]
    events += [append(spec, make_unroll(spec, 100 + n), n) for n in range(laps)]
    newest = (laps - 1) * spec.unroll_starts
    run = Run(*events, *(batch_of([newest + i, newest + i + 1], [0.5, 1.0]) for i in range(3)))
    log, _ = mixed(run, journal, spec)
    replica = replica_of(log, 2 + JOURNAL_ROWS)
    follow(replica)
    own = make_unroll(spec, 100 + laps - 1)
    recorded = np.stack([make_unroll(spec, i).frames for i in range(NUM_UNROLLS)])
    stacked = spec.stacked_frames
    for i in range(2):  # of each log, two batches may be ahead
        draw = replica.next_draw(0)
        batch, keys = draw.batches()[TABLE], draw.samples[TABLE].keys
        assert len(keys) == 2 + JOURNAL_ROWS and batch.weight.tolist() == [0.5, 1.0] + [0.75] * JOURNAL_ROWS
        np.testing.assert_array_equal(batch.observation[0], own.frames[i : i + stacked])
        for row in range(2, 2 + JOURNAL_ROWS):
            shown = batch.observation[row].numpy()
            starts = [(n, k) for n in range(NUM_UNROLLS) for k in range(spec.unroll_starts)
                      if (recorded[n, k : k + stacked] == shown).all()]  # fmt: skip
            assert starts, "a row of the journal's share is none of the journal"
    assert replica.counted == LogPosition("run", laps, laps * 8), "frames of the journal are not the run's"
    assert len(replica.drain_episodes()) == laps and set(replica.params_versions) == {5}
    assert replica.selection_metrics == {f"{TABLE}/journal_share": JOURNAL_ROWS / (2 + JOURNAL_ROWS)}


def test_priorities_of_the_run_go_to_its_server_under_its_own_keys(journal, spec, make_unroll):  # noqa: F811
    run = Run(start("run", spec, RING, 6, False), *(append(spec, make_unroll(spec, n), n) for n in range(6, 9)),
              batch_of([8 * 8 + 3, 6 * 8], [1.0, 1.0]))  # fmt: skip
    log, opened = mixed(run, journal, spec)
    replica = replica_of(log, 2 + JOURNAL_ROWS)
    follow(replica)
    draw = replica.next_draw(0)
    keys = draw.samples[TABLE].keys
    told = []
    client = opened[0]
    client.update_priorities = lambda *arguments: told.append(arguments)
    replica.update_priorities(draw.generation, TABLE, keys, np.arange(len(keys), dtype=np.float32))
    replica.follow(0)
    [(own, priorities)] = run.updates
    assert own.tolist() == [8 * 8 + 3, 6 * 8] and priorities.tolist() == [0, 1]
    [(theirs, priorities, table)] = told
    assert table == TABLE and priorities.tolist() == [2, 3, 4, 5]
    assert ((theirs >= 0) & (theirs < NUM_UNROLLS * spec.unroll_starts)).all() and run.num_used == 1
    log.close()


def test_whole_unrolls_of_both_logs_make_a_batch(journal, spec, make_unroll):  # noqa: F811
    run = Run(start("run", spec, RING, 0, False, "unrolls"), *(append(spec, make_unroll(spec, n), n) for n in range(9)),
              batch_of([7, 8], [1.0, 1.0]), batch_of([3, 8], [1.0, 1.0]))  # fmt: skip
    log, _ = mixed(run, journal, spec, "uniform")
    replica = replica_of(log, 2 + JOURNAL_ROWS, view=Unrolls())
    follow(replica)
    batch = replica.next_draw(0).batches()[TABLE]
    assert batch.action.shape == (spec.unroll_steps, 2 + JOURNAL_ROWS)
    rewards = batch.reward.numpy().T
    for row, number in ((0, 7), (1, 8)):
        np.testing.assert_array_equal(rewards[row], make_unroll(spec, number).rewards)
    recorded = [make_unroll(spec, i).rewards for i in range(NUM_UNROLLS)]
    drawn = [next(i for i, theirs in enumerate(recorded) if (theirs == own).all()) for own in rewards[2:]]
    assert len(set(drawn)) == JOURNAL_ROWS, "a uniform table draws no unroll twice"
    sample = replica.next_draw(0).samples[TABLE]
    assert len(sample.keys) == 1 + JOURNAL_ROWS, "unroll 3 is evicted, and those of the journal are not"


def test_the_journal_is_read_again_only_where_the_log_begins_again(journal, spec, make_unroll):  # noqa: F811
    run = Run(start("run", spec, RING, 0, False), append(spec, make_unroll(spec, 0), 0), batch_of([0, 1], [1.0, 1.0]))
    log, opened = mixed(run, journal, spec)
    replica = replica_of(log, 2 + JOURNAL_ROWS)
    follow(replica)
    assert len(opened) == 1 and replica.next_draw(0) is not None
    run.events = [start("run", spec, RING, 1, True), append(spec, make_unroll(spec, 1), 1)]
    follow(replica)
    assert len(opened) == 1 and replica.counted == LogPosition("run", 2, 16)
    run.events = [batch_of([8, 9], [1.0, 1.0])]
    follow(replica)
    assert replica.next_draw(0) is not None
    run.events = [start("other", spec, RING, 0, False), append(spec, make_unroll(spec, 2), 0), batch_of([0], [1.0])]
    follow(replica)
    assert len(opened) == 2 and replica.counted == LogPosition("other", 1, 24)
    keys = replica.next_draw(0).samples[TABLE].keys
    assert len(keys) == 1 + JOURNAL_ROWS


def test_a_learner_that_comes_back_counts_the_run_alone(journal, spec, make_unroll):  # noqa: F811
    run = Run(start("run", spec, RING, 0, False), *(append(spec, make_unroll(spec, n), n) for n in range(9)))
    log, _ = mixed(run, journal, spec)
    replica = replica_of(log, 2 + JOURNAL_ROWS, LogPosition("run", 7, 1000))
    follow(replica)
    assert replica.counted == LogPosition("run", 9, 1016)


def test_a_journal_of_another_stream_is_refused_by_its_difference(journal, spec):  # noqa: F811
    other = msgspec.structs.replace(spec, env="Other-v0")
    log, _ = mixed(Run(start("run", other, RING, 0, False)), journal, spec)
    with pytest.raises(ConfigError, match=f"does not fit: its env is {spec.env}, not Other-v0"):
        log.poll(0)


def command(*flags, kind=LearnerCommand):
    return parse(kind, ["--preset", "small", *flags])


@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        (["--agent", "apex-dqn", "--batch-size", "64"], {"transitions": 32}),
        (["--agent", "sac", "--mix-journal", "a/b=c/journal=1/4", "--batch-size", "64"], {"transitions": 16}),
        (["--agent", "apex-dpg", "--batch-size", "64"], {"transitions": 32}),
        (["--agent", "impala", "--mix", "queue=1/2", "uniform=1/2", "--batch-size", "32"], {"uniform": 8}),
    ],
)
def test_the_share_is_of_what_replays(flags, rows):
    given = command("--mix-journal", "some/journal=1/2", *flags)
    assert mixed_rows(given) == rows
    assert share_of(given, 1).learning == given.learning
    assert mixed_rows(command(*[word for word in flags if "=c/" not in word and word != "--mix-journal"])) == {}


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--mix-journal", "some/journal"], "give DIR=SHARE"),
        (["--mix-journal", "=1/2"], "give DIR=SHARE"),
        (["--mix-journal", "a=1"], "give DIR=SHARE"),
        (["--mix-journal", "a=1/0"], "give DIR=SHARE"),
        (["--mix-journal", "a=1/3", "--batch-size", "64"], "a=1/3: 64 rows cannot be divided so"),
        (["--mix-journal", "a=1/2", "--shards", "2"], "one learner and one replay server"),
        (["--mix-journal", "a=1/2", "--agent", "impala"], "give --mix a part uniform=SHARE"),
        (["--mix-journal", "a=1/2", "--agent", "impala", "--lstm", "--mix", "uniform=1"], "--replay-state than walk"),
        (["--mix-journal", "a=1/2", "--agent", "impala", "--mix", "elite-1=1"], "give --mix a part uniform=SHARE"),
    ],
)
def test_a_share_that_cannot_be_is_refused(flags, why):
    given = command(*flags)
    with pytest.raises(ConfigError, match=why):
        share_of(given, 1)


def test_several_learners_and_learners_without_actors_are_refused(tmp_path):
    given = command("--mix-journal", "a=1/2", "--batch-size", "64")
    with pytest.raises(ConfigError, match="leave out --num-learners"):
        share_of(given, 2)
    offline = command("--mix-journal", "a=1/2", "--from-journal", str(tmp_path), kind=OfflineCommand)
    with pytest.raises(ConfigError, match="leave out --from-journal, --guest"):
        share_of(offline, 1)


def test_the_server_is_asked_for_the_rest_of_a_batch(journal):  # noqa: F811
    asked = []
    given = command("--mix-journal", f"{journal}=1/4", "--batch-size", "64")
    log = with_journal(given, {"transitions": 64}, lambda sizes: asked.append(dict(sizes)) or Run(), (0, 0))
    assert isinstance(log, MixedLog) and asked == [{"transitions": 48}]
    run = Run()
    plain = dataclasses.replace(given, learning=dataclasses.replace(given.learning, mix_journal=""))
    assert with_journal(plain, {"transitions": 64}, lambda sizes: run, (0, 0)) is run
    assert Share.of(given.learning).transitions == NUM_UNROLLS * 8
