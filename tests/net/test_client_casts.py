"""Keys, priorities and headers of other types, at the clients of the replay: the same numbers, or an error at once."""

import msgspec
import numpy as np
import pytest

from apexrl.errors import WireError
from apexrl.net import InsertClient, ReplayClient, wire
from apexrl.net.shards import ShardedReplayClient
from apexrl.types import Episode
from apexrl.unroll import UnrollCodec
from tests.net.peers import block_of
from tests.system.processes import wait_for

NOWHERE = "tcp://127.0.0.1:9"  # nobody has to be there


@pytest.fixture(params=["one", "shards"])
def reader(request, context):
    client = (
        ReplayClient(NOWHERE, "reader", {"transitions": 4}, context=context)
        if request.param == "one"
        else ShardedReplayClient([NOWHERE, NOWHERE], "reader", {"transitions": 4}, context=context)
    )
    yield client
    client.close()


@pytest.mark.parametrize(
    ("keys", "priorities"),
    [
        ([0.5, 1.0], [1, 1]),
        ([np.nan, 1], [1, 1]),
        (np.array([2**63, 1], np.uint64), [1, 1]),
        ([1j, 1], [1, 1]),
        (["0", "1"], [1, 1]),
        ([0, 1], [1j, 1]),
        ([0, 1], ["1", "1"]),
        ([0, 1], [2**24 + 1, 1]),
        ([0, 1], [[1, 1], [1, 1]]),
        ([[0, 1], [2, 3]], [1, 1]),
    ],
)
def test_keys_and_priorities_that_would_be_changed_are_refused_at_the_call(reader, keys, priorities):
    with pytest.raises(ValueError, match=r"where .* needed"):
        reader.update_priorities("transitions", np.asarray(keys), np.asarray(priorities))


def test_the_number_of_an_unroll_is_whole(reader):
    for number in (1.5, "1", -1):
        with pytest.raises(ValueError, match=r"where .* needed"):
            reader.fetch([1, number], 0.1)


@pytest.mark.parametrize(
    "changes",
    [
        {"valid": np.full(8, 0.5)},
        {"valid": np.full(8, 2)},
        {"valid": np.full(8, "1")},
        {"priorities": np.full(8, 1j)},
        {"priorities": np.full(8, 2**24 + 1)},
        {"priorities": np.full(8, "1")},
    ],
)
def test_a_header_of_others_than_truth_values_and_floats_is_refused(header, changes):
    with pytest.raises(WireError, match="valid or priorities of"):
        wire.Insert.of(header()._replace(**changes), 0, "actor")
    same = header()._replace(valid=np.ones(8), priorities=np.ones(8, np.int64))
    assert wire.Insert.of(same, 0, "actor") == wire.Insert.of(header(), 0, "actor")


WHOLE = ("stream", "first_step", "params_version")


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.int16])
def test_numbers_of_numpy_are_as_good_as_those_of_python(server, spec, header, kind):
    numbers = {name: kind(1) for name in WHOLE} | {"exploration": np.float32(0.5)}
    episodes = (Episode(np.float32(0.5), kind(7), np.float64(0.25)),)
    with InsertClient(server.actor_endpoint, "actor", spec, np.int64(2)) as actor:
        actor.connect(100)
        assert actor.insert(header()._replace(episodes=episodes, **numbers), block_of(spec), 100) and actor.flush(100)
    with ReplayClient(server.learner_endpoint, "reader", prefetch_batches=np.int64(2)) as reader:
        (found,) = reader.fetch([0], 100).values()
    assert found.header[:4] == (1, 1, 1, 0.5) and found.header.episodes == (Episode(0.5, 7, 0.25),)


@pytest.mark.parametrize(
    ("name", "value"), [*((name, value) for name in WHOLE for value in (1.5, "1", None)), ("exploration", None)]
)
def test_what_is_no_number_is_refused_by_its_name(spec, header, context, name, value):
    with InsertClient(NOWHERE, "actor", spec, 2, context=context) as actor:
        for changes in ({name: value}, {"episodes": (Episode(1.0, value, 0.0),)}):
            with pytest.raises(WireError, match=f"(steps|{name}) of {value!r}"):
                actor.insert(header()._replace(**changes), block_of(spec), 100)
    with pytest.raises(WireError, match=f"num_streams of {value!r}"):
        InsertClient(NOWHERE, "actor", spec, value, context=context)
    with pytest.raises(WireError, match="numpy"):
        InsertClient(NOWHERE, "actor", msgspec.structs.replace(spec, num_actions=np.int64(4)), 2, context=context)
    with pytest.raises(ValueError, match=f"prefetch_batches {value!r}"):
        ReplayClient(NOWHERE, "reader", prefetch_batches=value, context=context)


def test_what_is_refused_takes_nothing_along(server, spec, header, make_unroll):
    actor, block = InsertClient(server.actor_endpoint, "actor", spec, 4), UnrollCodec(spec).encode(make_unroll(spec))
    actor.connect(100)
    actor.insert(header(), block, 100)
    with pytest.raises(WireError, match="valid or priorities of"):
        actor.insert(header(8)._replace(valid=np.full(8, 0.5)), block, 100)
    for i in range(1, 8):
        actor.insert(header(8 * i), block, 100)
    assert actor.flush(100) and actor.num_dropped == 0
    reader = ReplayClient(server.learner_endpoint, "reader", {"transitions": 16}, 1)
    reader.sample("transitions", 100)
    with pytest.raises(ValueError, match=r"0\.5, where whole numbers"):
        reader.update_priorities("transitions", np.array([0.5]), np.array([9.0]))
    reader.update_priorities("transitions", list(range(64)), [5.0 if key == 9 else 0.0 for key in range(64)])
    wait_for(lambda: set(reader.sample("transitions", 100).keys) == {9}, 100, "batches of the new priorities")
    actor.close()
    reader.close()
