"""Inserts and specs that a server does not take, and the meaning of `valid`."""

import msgspec
import numpy as np
import pytest

from apexrl.errors import WireError
from apexrl.net import wire
from apexrl.net.arguments import MAX_NUMBER
from apexrl.net.insert_checks import InsertSizes, insert_arrays
from apexrl.types import Field, StreamSpec, UnrollHeader
from tests.net.peers import TABLE, Peers, block_of, insert_of, only


@pytest.mark.parametrize(
    ("priorities", "valid", "reason"),
    [([0, 1, *[1] * 6], [0, 0, *[1] * 6], "where nothing is valid"), ([1] * 8, [0] * 8, "where nothing is valid")],
)
def test_a_priority_where_no_transition_starts_is_malformed(peers, priorities, valid, reason):
    peers.hello(b"a")
    peers.insert(b"a", 0, priorities, valid=valid)
    peers.insert(b"a", 1)
    assert reason in only(peers.heard(b"a"), wire.Dropped)[0].reason
    assert peers.log.end_number == 1 and peers.dropped["malformed"] == 1


def test_bits_behind_the_last_start_are_malformed(spec):
    spec = msgspec.structs.replace(spec, unroll_starts=5)
    peers = Peers(spec)
    peers.hello(b"a")
    for sequence, last in enumerate((0b0000_0001, 0b0000_1000)):
        insert = insert_of(b"a", sequence, [1] * 5)
        insert = msgspec.structs.replace(insert, valid=bytes([insert.valid[0] & ~last | (last & 1)]))
        priorities = np.array([1, 1, 1, 1, 1 - sequence], np.float32).tobytes()
        peers.say("actor", b"a", msgspec.structs.replace(insert, priorities=priorities), block_of(spec))
    assert "behind the last start" in only(peers.heard(b"a"), wire.Dropped)[0].reason
    assert (peers.log.end_number, peers.log.num_transitions) == (1, 4)


def test_valid_says_what_is_a_transition_not_the_priority(peers):
    peers.hello(b"a")
    for sequence in range(3):
        peers.insert(b"a", sequence, [0, 0, *[1] * 6], valid=[0, *[1] * 7])
    peers.service.advance()
    table = peers.service.open_log.replay.tables[TABLE]
    assert peers.log.num_transitions == table.limiter.inserted == 21
    keys = np.concatenate([table.sample(64).keys for _ in range(20)])
    assert set(keys % 8) == set(range(2, 8))  # a valid one of priority 0 is counted, and not drawn


NAMES = ("left", "right", "up", "down")
EXTRA = Field("x", "step", "float32")
BAD_SPECS = [
    ({"num_actions": 0}, "num_actions from 1 or action_bounds"),
    ({"action_bounds": ((0.0, 1.0),)}, "num_actions from 1 or action_bounds"),
    ({"num_actions": 0, "action_bounds": ((0.0, 1.0), (1.0, 1.0))}, "finite bounds, the least below the greatest"),
    ({"num_actions": 0, "action_bounds": ((-1e13, 1e13),)}, "actions need bounds from -1e+12 to 1e+12"),
    ({"num_actions": 0, "action_bounds": ((1e8, 1e8 + 1),)}, "actions need bounds that differ as floats of 32 bits"),
    *(
        ({"action_names": names}, "needs 4 different action_names")
        for names in (NAMES[:3], (*NAMES, "jump"), (*NAMES[:3], "left"), (*NAMES, "left"))
    ),
    ({"num_actions": 0, "action_bounds": ((0.0, 1.0),), "action_names": ("gas",)}, "needs 0 different action_names"),
    *(({"action_names": (*NAMES[:3], name)}, "empty or not printable") for name in ("", "a\u200bb")),
    ({"extras": (EXTRA, EXTRA)}, "all of them distinct"),
    *(
        ({"extras": (msgspec.structs.replace(EXTRA, name=name),)}, "extras need names")
        for name in ("", "frame", "start")
    ),
    ({"extras": (msgspec.structs.replace(EXTRA, shape=(2, 0)),)}, "empty shape"),
    ({"extras": (msgspec.structs.replace(EXTRA, shape=(2**31 - 1,) * 8),)}, "lower --unroll-starts"),
    ({"extras": (msgspec.structs.replace(EXTRA, shape=(2**20,)),)}, "lower --unroll-starts"),
    ({"unroll_starts": 0}, "counts below 1"),
    ({"stacked_frames": 0}, "counts below 1"),
    ({"frame_shape": (2, 0)}, "observations (2, 0), which are no numbers at all"),
]


@pytest.mark.parametrize(("change", "reason"), BAD_SPECS)
def test_a_spec_that_no_log_can_hold_is_refused(peers, spec, change, reason):
    peers.hello(b"a", spec=msgspec.structs.replace(spec, **change))
    assert reason in only(peers.heard(b"a"), wire.Refused)[0].reason
    assert peers.service.open_log is None


def test_a_log_knows_the_names_of_its_actions(peers, spec):
    named = msgspec.structs.replace(spec, action_names=NAMES)
    peers.hello(b"a", spec=named)
    only(peers.heard(b"a"), wire.Welcome)
    assert peers.service.open_log.replay.spec == named
    peers.hello(b"b", spec=msgspec.structs.replace(spec, action_names=NAMES[::-1]))
    only(peers.heard(b"b"), wire.Refused)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("stream", (0, 3), (-1, 4, 2**31, 1.0, True, None)),
        ("first_step", (0, 2**53), (-1, 2**53 + 1, 0.0, False, "1")),
        ("params_version", (-1, 2**53), (-2, 2**53 + 1, 0.0)),
        ("exploration", (-1e300, 1e300), (1.1e300, -np.inf, np.nan)),
    ],
)
def test_numbers_of_an_insert_have_bounds(name, right, wrong):
    spec = StreamSpec("Large-v0", (), "uint8", 1, 1, 1, unroll_starts=wire.MAX_BATCH, overlap_steps=0)
    sizes, ones = InsertSizes(spec), np.ones(wire.MAX_BATCH)
    header = UnrollHeader(0, 0, 0, 0.0, ones.astype(bool), ones.astype(np.float32), ())
    message = wire.Insert.of(header, MAX_NUMBER, "\U0001f600" * 175 + "-" + "f" * 24)

    def is_taken(value):
        encoded = wire.encode(msgspec.structs.replace(message, **{name: value}))
        try:
            return not sizes.why_malformed(wire.decode_insert(encoded), encoded, block_of(spec), 4)
        except WireError:
            return False

    assert all(map(is_taken, right)) and [value for value in wrong if is_taken(value)] == []


@pytest.mark.parametrize("bad", [None, -1.0, -0.0, np.nan, np.inf, -np.inf, 0.0, np.finfo(np.float32).max])
@pytest.mark.parametrize("is_all_valid", [True, False])
def test_numbers_of_one_insert_are_judged_as_those_of_many(spec, bad, is_all_valid):
    sizes, valid = InsertSizes(spec), np.ones(spec.unroll_starts, bool)
    valid[0] = is_all_valid
    priorities = np.where(valid, np.float32(0.5), np.float32(0))[: spec.num_priorities]
    if bad is not None:
        priorities[-1] = bad
    message = wire.Insert.of(UnrollHeader(0, 0, 0, 0.0, valid, priorities, ()), 0, "actor")
    assert sizes.why_wrong_numbers(message) == insert_arrays([message], sizes).faults.get(0, "")
