"""A log that is bounded by bytes."""

from apexrl.replay.journal import Journal, new_identity
from apexrl.replay.recovery import recover
from apexrl.replay.replay import Replay
from apexrl.replay.segment_files import SegmentFile
from tests.net.peers import Peers
from tests.replay.test_replay import ALL_TABLES, TABLE, config_of, insert, make_replay, recovered


def test_bytes_bound_the_log_and_its_journal_too(spec, tmp_path):
    identity, config = new_identity(spec), config_of(max_gb=60e-9, tables=ALL_TABLES)  # five unrolls of 12 bytes
    replay = Replay(config, identity, 0, Journal(tmp_path, identity, segment_bytes=300))
    held = []
    for _ in range(30):
        insert(replay)
        held.append(len(replay.log))
        replay.tables[TABLE].check_valid()
    assert held == [1, 2, 3, 4] + [5] * 26 and replay.log.num_bytes == 60 and replay.fill == 1
    assert insert(replay, count=25) == 30 and (replay.log.first_number, replay.log.end_number) == (50, 55)
    for _ in range(20):
        insert(replay)
    assert set((replay.sample(TABLE, 64).keys // 8).tolist()) <= set(range(70, 75))
    assert replay.sample("queue", 3).keys.tolist() == [70, 71, 72]
    replay.journal.close()
    found = recover(tmp_path)
    assert 5 <= len(found.entries) < 15 and found.end_number == 75  # files go as a whole
    smaller = Replay(config_of(max_gb=30e-9), found.identity, 0)
    smaller.restore(recovered(range(65, 75)), 75, tmp_path)
    assert len(smaller.log) == 2 and smaller.tables[TABLE].limiter.inserted == 80
    tiny = make_replay(spec, max_gb=1e-9)
    insert(tiny, count=3)
    assert len(tiny.log) == 1 and tiny.log.first_number == 2  # the newest stays, however large it is


def test_a_server_with_less_room_reads_no_more_than_it_keeps(spec, tmp_path, monkeypatch):
    scan, read = SegmentFile.scan, []
    monkeypatch.setattr(SegmentFile, "scan", lambda file: read.append(file.path) or scan(file))
    monkeypatch.setattr(Journal.__init__, "__defaults__", (False, 2_000))  # the size of a file
    peers = Peers(spec, tmp_path)
    peers.hello(b"a", streams=200)
    for sequence in range(200):
        peers.store(b"a", sequence)
    for changes, held in (({"capacity": 8 * 50}, 50), ({"max_gb": 12.5 * peers.log.num_bytes / 200e9}, 12)):
        read.clear()
        peers.restart(**changes)
        numbers = range(peers.log.first_number, peers.log.end_number)
        assert numbers == range(200 - held, 200) and all(peers.log.get(number) for number in numbers)
        assert 0 < len(set(read)) < 200 // 8
        assert len(list(tmp_path.glob("unrolls-*.log"))) <= len(set(read)) + 1


def test_a_bound_of_bytes_that_holds_no_batch_names_its_flag_and_a_value_that_does(spec):
    replay = make_replay(spec, max_gb=60e-9, tables=ALL_TABLES)  # five unrolls of 12 bytes
    insert(replay, count=4)
    assert replay.why_never("unrolls", 9) == ""  # there is room for more
    insert(replay, count=30)
    for table in ("unrolls", "queue"):
        assert "--max-gb 6e-08 holds 5 unrolls" in replay.why_never(table, 9)
        assert "different ones: give 2.16e-07 or more" in replay.why_never(table, 9)
        assert replay.why_never(table, 5) == ""
    assert replay.why_never(TABLE, 9) == ""  # draws one twice
    enough = make_replay(spec, max_gb=2.16e-07, tables=ALL_TABLES)
    insert(enough, count=30)
    assert enough.why_never("unrolls", 9) == enough.why_no_sample("unrolls", 9) == ""
