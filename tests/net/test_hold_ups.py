"""Actors and learners never hold each other up, whatever the tables, their readers and their limits are."""

import random

import pytest

from apexrl.net import wire
from apexrl.net.service import PEER_TIMEOUT_SECONDS
from apexrl.replay.journal import SNAPSHOT_FILE
from apexrl.replay.snapshot import write_snapshot
from tests.net.peers import Peers, only
from tests.net.programs import Actor, Reader, pass_second, run_until_all_wait, standing_of

LASER = ("queue=fifo", "old=uniform:1:4")


def seconds_until_updates(peers, programs, reader, count, most=200):
    """Lets time pass until a reader has made so many further updates; each second everybody does a few things."""
    wanted = reader.num_updates + count
    for second in range(most):
        run_until_all_wait(programs, 40)
        if reader.num_updates >= wanted:
            return second
        pass_second(peers, programs)
    raise AssertionError(f"{reader.num_updates - wanted + count} of {count} updates in {most} s: {reader.told}")


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_learner_goes_on_after_somebody_else_has_emptied_its_queue(spec, tmp_path, restarts, follows):
    peers = Peers(spec, tmp_path, tables=LASER, capacity=4000)
    actor, learner = Actor(peers, b"a"), Reader(peers, b"l", {"queue": 2, "old": 2}, follows=follows)
    seconds_until_updates(peers, [actor, learner], learner, 20)
    thief = Reader(peers, b"t", {"queue": 1}, use="apart")
    for _ in range(10):
        run_until_all_wait([thief, actor, learner], 40)
        pass_second(peers, [actor, learner, thief])
    assert thief.num_updates > 60
    thief.leave()
    if restarts:
        write_snapshot(tmp_path / SNAPSHOT_FILE, peers.service.open_log.replay.snapshot())
        peers.restart()
    seconds_until_updates(peers, [actor, learner], learner, 100)
    old = peers.service.open_log.replay.tables["old"].limiter
    assert abs(old.error) <= old.slack + 10, "nobody has to make up for what the thief took"


@pytest.mark.parametrize(
    ("tables", "sizes"),
    [
        (LASER, {"queue": 2, "old": 2}),
        (("queue=fifo", "old=uniform:7:4"), {"queue": 1, "old": 7}),
        (("queue=fifo", "best=elite:1:4:50"), {"queue": 2, "best": 2}),
        (("queue=fifo", "more=fifo"), {"queue": 2, "more": 2}),
        (("queue=fifo", "near=uniform:1:4", "far=uniform:1:30"), {"queue": 2, "near": 2, "far": 2}),
    ],
)
@pytest.mark.parametrize("stolen", [0, 1])
@pytest.mark.parametrize("use", ["apart", "never"])
def test_another_reader_of_any_table_holds_nobody_up_while_it_stays(spec, tables, sizes, stolen, use):
    peers = Peers(spec, tables=tables, capacity=4000)
    actor, learner = Actor(peers, b"a"), Reader(peers, b"l", sizes)
    seconds_until_updates(peers, [actor, learner], learner, 5)
    other = Reader(peers, b"o", {list(sizes)[stolen]: 3} if use == "apart" else dict(sizes), use=use, prefetch=8)
    seconds_until_updates(peers, [actor, other, learner], learner, 30)


@pytest.mark.parametrize("read", ["a", "b"])
@pytest.mark.parametrize("kinds", [("fifo", "uniform:1:5"), ("priority:2:20", "fifo"), ("elite:1:5:30", "uniform:3:1")])
def test_a_table_that_nobody_reads_holds_up_no_learner_of_another_one(spec, kinds, read):
    peers = Peers(spec, tables=tuple(f"{name}={kind}" for name, kind in zip("ab", kinds, strict=True)), capacity=800)
    actor, learner = Actor(peers, b"a"), Reader(peers, b"l", {read: 4})
    seconds_until_updates(peers, [actor, learner], learner, 50)


def test_actors_wait_for_a_learner_that_is_away(spec):
    peers = Peers(spec, tables=LASER)
    actor, learner = Actor(peers, b"a"), Reader(peers, b"l", {"queue": 2, "old": 2})
    seconds_until_updates(peers, [actor, learner], learner, 20)
    learner.leave()
    for _ in range(30):
        run_until_all_wait([actor])
        pass_second(peers, [actor])
    assert not actor.act() and standing_of(peers, actor) == "learner"
    inserted = actor.sequence
    for _ in range(30):
        pass_second(peers, [actor])
        assert not actor.act()
    assert actor.sequence == inserted


def test_a_fast_learner_keeps_the_pace_of_a_slow_one_that_asks_for_more(spec):
    peers = Peers(spec, tables=("fast=uniform:1:4", "slow=uniform:1:4"))
    actor = Actor(peers, b"a")
    fast, slow = Reader(peers, b"fast", {"fast": 2}), Reader(peers, b"slow", {"slow": 2})
    slow.act()
    for _ in range(100):
        run_until_all_wait([actor, fast])
        slow.act()
        pass_second(peers, [actor, fast])
        slow.demand()
    limiter = peers.service.open_log.replay.tables["slow"].limiter
    assert slow.num_updates >= 90 and limiter.forgiven == 0
    assert limiter.error <= limiter.slack + 6 and fast.num_updates <= slow.num_updates + 20
    assert standing_of(peers, actor) == "learner" and standing_of(peers, fast) == "actors"


def test_priorities_that_are_all_zero_hold_no_queue_up(spec):
    peers = Peers(spec, tables=("some=priority:0:8", "queue=fifo"), capacity=800)
    actor, learner = Actor(peers, b"a"), Reader(peers, b"l", {"some": 4, "queue": 2})
    seconds_until_updates(peers, [actor, learner], learner, 10)
    actor.priorities = [0.0] * 8
    learner.forget(range(8 * 200))
    for _ in range(10):
        run_until_all_wait([actor, learner], 40)
        pass_second(peers, [actor, learner])
    assert learner.lacking == ["some"] and standing_of(peers, learner) == "priorities"
    inserted = actor.sequence
    for _ in range(10):
        run_until_all_wait([actor, learner], 40)
        pass_second(peers, [actor, learner])
    assert actor.sequence > inserted and standing_of(peers, actor) != "learner"
    actor.priorities = None
    seconds_until_updates(peers, [actor, learner], learner, 30)


def test_an_elite_table_that_gave_everything_away_holds_no_queue_up(spec):
    peers = Peers(spec, tables=("best=elite:0:2:20", "queue=fifo"), capacity=800)
    actor, learner = Actor(peers, b"a"), Reader(peers, b"l", {"best": 4, "queue": 2})
    seconds_until_updates(peers, [actor, learner], learner, 10)
    for _ in range(5):
        learner.forget(range(actor.sequence))
        seconds_until_updates(peers, [actor, learner], learner, 3)


def test_two_learners_that_share_a_queue_both_go_on(spec):
    peers = Peers(spec, tables=("queue=fifo", "one=uniform:1:4", "two=uniform:1:4"))
    actor = Actor(peers, b"a")
    one, two = Reader(peers, b"one", {"queue": 2, "one": 2}), Reader(peers, b"two", {"queue": 2, "two": 2}, prefetch=5)
    programs = [actor, one, two]
    for reader in (one, two, one, two):
        seconds_until_updates(peers, programs, reader, 30)
    drawn = sorted(key for reader in (one, two) for batch in reader.keys["queue"] for key in batch)
    assert drawn == list(range(len(drawn))), "a queue gives each unroll once, and leaves none out"


def test_a_learner_is_told_what_it_waits_for_and_nothing_else(spec):
    peers = Peers(spec, tables=("queue=fifo", "old=uniform:1:4"))
    actor, learner = Actor(peers, b"a"), Reader(peers, b"l", {"queue": 2, "old": 2})
    run_until_all_wait([actor, learner], 9)
    while learner.act():
        pass
    pass_second(peers, [learner])
    learner.act()
    lacking = [bool(count) for count in learner.held.values()]
    assert learner.lacking and [reason == "" for reason in learner.told] == lacking
    peers.subscribe(b"other", tables=("queue", "old"), batch_size=50, follows=False)
    peers.say("learner", b"other", wire.Heartbeat())
    (standing,) = only(peers.heard(b"other"), wire.Standing)
    assert standing.waits_for == ("", ""), "it has asked for nothing"


def random_tables(rng):
    """One to four tables of any kinds and limits, as --tables has them."""
    texts = []
    for name in "abcd"[: rng.randint(1, 4)]:
        kind = rng.choice(["fifo", "fifo", "uniform", "elite", "priority"])
        paces = ["0", "0.3", "1", "1"] + ["7"] * (kind != "fifo")  # a fifo gives each unroll once
        pace, least = rng.choice(paces), rng.randint(1, 100 if kind == "priority" else 20)
        capacity = rng.randint(8, 50) if kind == "elite" or (kind == "uniform" and rng.random() < 0.5) else ""
        texts.append(f"{name}={kind}:{pace}:{least}:{capacity}".rstrip(":"))
    return tuple(texts)


def random_reader(rng, peers, peer, use):
    tables = list(peers.service.open_log.replay.tables)
    sizes = {table: rng.randint(1, 4) for table in rng.sample(tables, rng.randint(1, len(tables)))}
    return Reader(peers, peer, sizes, rng.randint(1, 8), use, follows=rng.random() < 0.5)


def disturb(rng, peers, learners, others, number):
    """Does something that may happen to a server and its readers."""
    match rng.choice(["comes", "comes", "comes", "leaves", "leaves", "restarts", "zeros"]):
        case "comes":
            use = rng.choice(["apart", "never", "together"])
            others.append(random_reader(rng, peers, b"other%d" % number, use))
        case "leaves" if others:
            others.pop(rng.randrange(len(others))).leave()
        case "restarts":
            if rng.random() < 0.7:
                write_snapshot(peers.journal_dir / SNAPSHOT_FILE, peers.service.open_log.replay.snapshot())
            peers.restart()
        case "zeros":
            learner, end = rng.choice(learners), peers.log.end_number
            learner.forget(rng.sample(range(8 * end), min(8 * end, 100)))


@pytest.mark.parametrize("seed", range(24))
def test_no_combination_of_tables_readers_and_limits_holds_all_sides_up(spec, tmp_path, seed):
    """Somebody may go on at any time, but for a while in which a reader keeps its batches and asks for nothing."""
    rng = random.Random(seed)
    peers = Peers(spec, tmp_path, tables=random_tables(rng), capacity=rng.randint(400, 4000))
    actors = [Actor(peers, b"actor%d" % i, rng.randint(1, 4)) for i in range(rng.randint(1, 3))]
    learners = [random_reader(rng, peers, b"learner%d" % i, "together") for i in range(rng.randint(1, 3))]
    others, quiet = [], 0
    for second in range(100):
        if second % 12 == 11:
            disturb(rng, peers, learners, others, second)
            quiet = 0
        programs = rng.sample(everybody := [*actors, *learners, *others], len(everybody))
        quiet = 0 if run_until_all_wait(programs, 20) else quiet + 1
        if quiet > 3:
            told = {program.peer: standing_of(peers, program) for program in programs}
            assert any(other.use == "never" for other in others) and quiet < PEER_TIMEOUT_SECONDS + 5, told
            assert all(told[learner.peer] for learner in learners), told
        pass_second(peers, programs)
    for other in others:
        other.leave()
    for learner in learners:
        seconds_until_updates(peers, [*actors, *learners], learner, 3)
