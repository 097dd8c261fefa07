"""A journal in the place of a replay server: its unrolls, the batches that are drawn over it, and refusals."""

import msgspec
import numpy as np
import pytest

from apexrl.config.sections import ReplayConfig
from apexrl.errors import ConfigError
from apexrl.learning.experience.journal_client import JournalClient
from apexrl.net import wire
from apexrl.net.log_client import LogAppend, LogBatch, LogStart
from apexrl.replay.journal import IDENTITY_FILE, Journal, new_identity
from apexrl.types import Episode, Field
from apexrl.unroll import UnrollCodec

NUM_UNROLLS = 12


@pytest.fixture
def journal(tmp_path, spec, make_unroll):
    """A journal in several files: unrolls 5 to 16 of two streams; start 3 of each is no transition."""
    made = Journal(tmp_path, new_identity(spec), segment_bytes=2000)
    valid = np.arange(spec.unroll_starts) != 3
    for i in range(NUM_UNROLLS):
        insert = wire.Insert(
            i, "actor", i % 2, (i // 2) * spec.unroll_starts, 7, 0.4, np.packbits(valid).tobytes(),
            (valid * np.float32(i + 1)).tobytes(), (Episode(float(i), 9, 0.4),),
        )  # fmt: skip
        made.append(5 + i, [(wire.encode(insert), UnrollCodec(spec).encode(make_unroll(spec, i)))])
    made.close()
    assert len(list(tmp_path.glob("unrolls-*.log"))) > 2
    return tmp_path


def client_of(journal, spec, tables=("transitions=priority",), capacity=10**6, **changes):
    config = ReplayConfig(capacity=capacity, min_size_to_sample=1, tables=tables, **changes)
    return JournalClient(journal, spec, config, {table.partition("=")[0]: 4 for table in tables}, 2, seed=1)


def read(client):
    """Returns the start, the unrolls, and the first batch."""
    start, appends = client.poll(0), []
    while isinstance(event := client.poll(0), LogAppend):
        appends.append(event)
    assert isinstance(start, LogStart)
    return start, appends, event


def keys_of(client, table="transitions", count=50):
    """Returns the keys of batches that are used one after the other."""
    keys = []
    for _ in range(count):
        client.batch_used(table)
        keys.append(client.poll(0).sample.keys)
    return np.concatenate(keys)


def test_every_unroll_comes_once_as_it_is_and_then_batches_of_them(journal, spec, make_unroll):
    before = {path.name: path.read_bytes() for path in journal.iterdir()}
    client = client_of(journal, spec, priority_exponent=1.0)
    start, appends, batch = read(client)
    assert (start.spec, start.continues, start.granularity) == (spec, False, {"transitions": "transitions"})
    assert [append.number for append in appends] == list(range(NUM_UNROLLS))
    for i, append in enumerate(appends):
        assert append.block == UnrollCodec(spec).encode(make_unroll(spec, i)) and append.insert.sequence == i
    assert isinstance(batch, LogBatch) and batch.table == "transitions" and len(batch.sample.keys) == 4
    assert isinstance(client.poll(0), LogBatch) and client.poll(0) is None, "two batches are not used yet"
    keys = keys_of(client, count=2000)
    assert not (keys % spec.unroll_starts == 3).any()
    shares = np.bincount(keys // spec.unroll_starts, minlength=NUM_UNROLLS) / len(keys)
    np.testing.assert_allclose(shares, np.arange(1, 13) / 78, atol=0.02)  # the actors' own priorities
    client.update_priorities(np.arange(8, 96), np.zeros(88, np.float32), "transitions")
    assert set(keys_of(client)) == {0, 1, 2, 4, 5, 6, 7}
    client.close()
    assert {path.name: path.read_bytes() for path in journal.iterdir()} == before


@pytest.mark.parametrize("is_cut", [False, True])
def test_an_unroll_says_its_number_in_the_journal_whatever_was_evicted_before_it(journal, spec, is_cut):
    wanted = msgspec.structs.replace(spec, unroll_starts=spec.unroll_starts // 2) if is_cut else spec
    _, before, _ = read(client_of(journal, wanted))
    min(journal.glob("unrolls-*.log")).unlink()
    _, after, _ = read(client_of(journal, wanted))
    assert 0 < len(after) < len(before) and after[0].number == 0
    numbers = [append.log_number for append in before]
    assert numbers == sorted(set(numbers)) and [append.log_number for append in after] == numbers[-len(after) :]


def test_a_seed_gives_the_same_batches(journal, spec):
    draws = []
    for _ in range(2):
        client = client_of(journal, spec)
        read(client)
        draws.append(keys_of(client))
    np.testing.assert_array_equal(*draws)


def test_unrolls_are_cut_for_the_agent_that_asks(journal, spec):
    wanted = msgspec.structs.replace(spec, unroll_starts=6, overlap_steps=4)
    client = client_of(journal, wanted)
    start, appends, _ = read(client)
    assert start.spec == wanted
    num_steps = 6 * spec.unroll_starts + spec.overlap_steps
    assert len(appends) == 2 * len(range(0, num_steps - wanted.unroll_steps + 1, 6))
    codec = UnrollCodec(wanted)
    for append in appends:
        header = append.insert.header(wanted.unroll_starts)
        assert header.first_step % 6 == 0 and header.priorities.tolist() == [1.0] * 6
        codec.decode(append.block)
    assert sum(len(append.insert.episodes) for append in appends) >= NUM_UNROLLS - 2


def test_only_the_newest_are_kept_where_the_capacity_is_smaller(journal, spec):
    client = client_of(journal, spec, ("transitions=uniform",), capacity=8)
    start, appends, _ = read(client)
    assert (start.ring_unrolls, len(appends)) == (9, NUM_UNROLLS)
    assert set(keys_of(client)) == set(range(3, 12))


def test_a_table_that_hands_out_each_unroll_once_is_uniform_here(journal, spec):
    client = client_of(journal, spec, ("queue=fifo",))
    read(client)
    assert set(keys_of(client, "queue")) == set(range(NUM_UNROLLS))


def test_a_uniform_table_keeps_its_own_capacity(journal, spec):
    client = client_of(journal, spec, ("newest=uniform:0:1:5", "all=uniform"))
    *_, batch = read(client)
    keys = {"newest": [], "all": []}
    for _ in range(200):
        keys[batch.table].extend(batch.sample.keys)
        while isinstance(event := client.poll(0), LogBatch):  # until two batches of each table wait
            batch = event
            keys[batch.table].extend(batch.sample.keys)
        client.batch_used("newest")
        client.batch_used("all")
        batch = client.poll(0)
    assert set(keys["newest"]) == set(range(7, 12)) and set(keys["all"]) == set(range(12))


def test_a_record_that_cannot_be_read_is_left_out(journal, spec):
    path = sorted(journal.glob("unrolls-*.log"))[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert len(read(client_of(journal, spec))[1]) == NUM_UNROLLS - 1


def test_a_journal_that_cannot_be_learned_from_is_refused(journal, spec, tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere is no journal"):
        client_of(tmp_path / "nowhere", spec)
    (tmp_path / "sharded" / "shard-0").mkdir(parents=True)
    (tmp_path / "sharded" / "shard-0" / "log.json").touch()
    with pytest.raises(ConfigError, match=r"holds 1 journals, each in a directory: give one, .*shard-0$"):
        client_of(tmp_path / "sharded", spec)
    lacking = msgspec.structs.replace(spec, extras=(Field("mu", "step", "float16"),))
    with pytest.raises(ConfigError, match=r"the journal in .* does not fit: it has no field mu \(float16"):
        client_of(journal, lacking)
    for path in journal.glob("unrolls-*.log"):
        path.unlink()
    assert (journal / IDENTITY_FILE).exists()
    with pytest.raises(ConfigError, match=r"holds too little for a batch of 4 of table transitions"):
        read(client_of(journal, spec))
