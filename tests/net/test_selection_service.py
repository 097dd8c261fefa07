"""Selected replay for a learner of somebody else: the server hands out unrolls, `Selector` keeps the relevant ones."""

import itertools

import numpy as np
import pytest

from apexrl.agents.replaying.mix import Selection
from apexrl.agents.replaying.selection import Selector
from apexrl.net.insert_client import InsertClient
from apexrl.net.replay_client import ReplayClient
from apexrl.unroll import UnrollCodec
from tests.replay.records import powers_of
from tests.system.processes import wait_for

NUM_UNROLLS, KEPT, CANDIDATES = 60, 4, 16


@pytest.fixture
def actor_of(spec, header, make_unroll):
    """Connects an actor, and inserts unrolls of known numbers."""

    def start(server):
        actor, codec = InsertClient(server.actor_endpoint, "actor", spec, 4), UnrollCodec(spec)
        actor.connect(10)

        def insert(numbers):
            for number in numbers:
                actor.insert(header(8 * number), codec.encode(make_unroll(spec, number)), 10)
            assert actor.flush(10)

        insert(range(NUM_UNROLLS))
        return actor, insert

    return start


def feature_of(numbers):
    """Unrolls lie on a line, by their numbers."""
    return np.stack([np.asarray(numbers, np.float32), np.ones(len(numbers), np.float32)], axis=1)


@pytest.mark.parametrize(
    ("rule", "distance"),
    [*itertools.product(("elite-1", "elite-2", "elite-3", "elite-4"), ("kl", "l2")), ("attentive", "l2")],
)
def test_each_rule_selects_from_the_candidates_of_a_server(start_server, actor_of, rule, distance):
    """Attentive replay finds those that are near the newest ones; elite replay those near the policy, or the rare."""
    selection = Selection(rule, KEPT, distance, queue="queue")
    with start_server(tables=(f"old=uniform:0:{CANDIDATES}",)) as server:
        actor, _ = actor_of(server)
        client = ReplayClient(server.learner_endpoint, "reader", {"old": CANDIDATES})
        selector, batches = Selector({"old": selection}, ring_unrolls=1000), []
        everything = np.arange(NUM_UNROLLS)
        first = {"distance": everything.astype(np.float32), "feature": feature_of(everything)}
        # A second use moves each feature from its first one by as much as its number says.
        later = {**first, "feature": feature_of(2 * everything)}
        for rows in (first, later):
            selector.add({"other": (everything, rows)})
        newest = np.arange(KEPT)
        selector.add({"queue": (newest, {"distance": np.zeros(KEPT, np.float32), "feature": feature_of(2 * newest)})})
        for update in range(30):
            candidates = client.sample("old", 10).keys
            assert len(set(candidates)) == CANDIDATES
            batches.append((candidates, candidates[selector.keep("old", candidates, update).positions]))
        assert len(client.fetch(batches[-1][1], 10)) == KEPT
        client.close()
        actor.close()
    for candidates, kept in batches:
        assert len(set(kept)) == KEPT and set(kept) <= set(candidates)
        ranks = np.searchsorted(np.sort(candidates), kept)
        if rule in ("elite-1", "attentive"):
            assert sorted(ranks) == list(range(KEPT))
        elif rule == "elite-2":
            assert sorted(ranks // 4) == [0, 1, 2, 3]
            assert not (ranks[ranks >= 4] % 4).any()  # those of the queue may all have distance 0
        elif rule == "elite-3":  # those of the queue were used once more
            old = np.setdiff1d(candidates, newest)
            assert sorted(kept) == sorted(old)[:KEPT]
        else:
            assert sorted(ranks // 4) == [0, 1, 2, 3]
            assert len(set(kept) & set(newest)) <= len(set(candidates) & set(newest)) // 4


def test_elite_insertion_overwrites_those_to_which_a_reader_gives_the_smallest_priorities(start_server, actor_of):
    with start_server(tables=(f"best=elite:0:{KEPT}:{NUM_UNROLLS}",)) as server:
        actor, insert = actor_of(server)
        client = ReplayClient(server.learner_endpoint, "reader", {"best": KEPT})
        table, numbers = server.service.open_log.replay.tables["best"], np.arange(NUM_UNROLLS)
        good = numbers % 6 == 0
        client.sample("best", 10)  # the server knows the reader now
        client.update_priorities("best", numbers, np.where(good, 0.9, 0.01).astype(np.float32))

        def is_heard():
            client.sample("best", 10)  # priorities go with the next demand
            return np.isclose(powers_of(table, 1), 0.9).sum() == good.sum()

        wait_for(is_heard, 60, "the priorities")
        insert(range(NUM_UNROLLS, NUM_UNROLLS + 10))  # each overwrites the worst of 20 drawn ones
        kept = set(np.frombuffer(table.state().numbers, np.int64).tolist())
        client.close()
        actor.close()
    assert len(kept) == NUM_UNROLLS
    assert kept >= {*numbers[good].tolist(), *range(NUM_UNROLLS, NUM_UNROLLS + 10)}
