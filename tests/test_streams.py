"""Streams that are cut anew, against the unrolls that the same steps give when they are collected for the new spec."""

import msgspec
import numpy as np
import pytest

import apexrl.streams
from apexrl.agents.families import FAMILIES
from apexrl.config.sections import EnvConfig
from apexrl.environments.vector import make_environment
from apexrl.streams import StreamCutter, why_not_cut
from apexrl.types import Field
from tests.streams import record

NUM_ENVS, NUM_STEPS, SEED = 2, 120, 3


def unrolls_of(starts, overlap, at=None, stacked=4):
    """Returns a spec, and the unrolls of the same steps of Catch by stream, whatever the spec."""
    config = EnvConfig("Catch-v0")
    envs = make_environment(config, NUM_ENVS)
    environment = msgspec.structs.replace(envs.spec, stacked_frames=stacked)
    extras = () if at is None else (Field("value", at, "float32"),)
    spec = environment.streamed(starts, overlap, extras)
    _, unrolls = record(envs, NUM_ENVS, NUM_STEPS, spec, SEED)
    envs.close()
    return spec, [[unroll.stream(e) for unroll in unrolls] for e in range(NUM_ENVS)]


def cut_all(cutter, streams, starts, chosen=lambda number: True):
    """Returns the cut unrolls of each stream by the position of their first step."""
    made = [{} for _ in streams]
    for number in range(len(streams[0])):
        for e, stream in enumerate(streams):
            if chosen(number):
                made[e] |= dict(cutter.add(("actor", e), number * starts, stream[number]))
    return made


def assert_same(unroll, expected):
    for name in ("frames", "actions", "rewards", "discounts", "starts"):
        np.testing.assert_array_equal(getattr(unroll, name), getattr(expected, name), err_msg=name)
    assert unroll.extras.keys() == expected.extras.keys()
    for name in unroll.extras:
        np.testing.assert_array_equal(unroll.extras[name], expected.extras[name], err_msg=name)


@pytest.mark.parametrize("at", ["step", "observation", None])
@pytest.mark.parametrize("wanted", [(8, 2), (8, 0), (20, 3), (3, 7), (1, 1), (30, 0)])
@pytest.mark.parametrize("held", [(8, 0), (8, 5), (5, 12)])
def test_cut_streams_are_those_that_would_have_been_collected(held, wanted, at):
    log, streams = unrolls_of(*held, at="observation" if at is None else at)
    spec, expected = unrolls_of(*wanted, at=at)
    assert not why_not_cut(log, spec)
    made = cut_all(StreamCutter(log, spec), streams, held[0])
    num_steps = (len(streams[0]) - 1) * held[0] + log.unroll_steps
    for e in range(NUM_ENVS):
        assert sorted(made[e]) == list(range(0, num_steps - spec.unroll_steps + 1, wanted[0]))
        for first_step, unroll in made[e].items():
            assert_same(unroll, expected[e][first_step // wanted[0]])
    assert any(unroll.starts[1:].any() for stream in expected for unroll in stream)


@pytest.mark.parametrize("multiple", [1, 2])
def test_extras_of_the_first_observation_stay_with_it(multiple):
    log, streams = unrolls_of(8, 2, at="first")
    spec, expected = unrolls_of(8 * multiple, 3, at="first")
    for e, made in enumerate(cut_all(StreamCutter(log, spec), streams, 8)):
        assert len(made) > 3
        for first_step, unroll in made.items():
            assert_same(unroll, expected[e][first_step // (8 * multiple)])


def test_extras_of_the_first_observation_stay_with_it_when_unrolls_that_overlap_by_more_are_missing():
    log, streams = unrolls_of(4, 9, at="first")
    spec, _ = unrolls_of(8, 2, at="first")
    for stream in streams:
        for number, unroll in enumerate(stream):
            unroll.extras["value"][:] = 4 * number
    made = cut_all(StreamCutter(log, spec), streams, 4, lambda number: number % 7 != 3)
    assert len(made[0]) > 5
    assert all(unroll.extras["value"] == first_step for of in made for first_step, unroll in of.items())


def test_no_unroll_reaches_over_missing_steps():
    log, streams = unrolls_of(8, 2)
    spec, expected = unrolls_of(4, 6)
    made = cut_all(StreamCutter(log, spec), streams, 8, chosen=lambda number: number not in (0, 5))
    for e in range(NUM_ENVS):
        assert all(8 <= first and not (first < 48 and first + spec.unroll_steps > 42) for first in made[e])
        assert {8, 32, 48} <= made[e].keys()
        for first_step, unroll in made[e].items():
            assert_same(unroll, expected[e][first_step // 4])


def test_a_stream_that_is_much_slower_than_others_is_cut_whole():
    log, streams = unrolls_of(8, 2)
    cutter, slow = StreamCutter(log, unrolls_of(30, 0)[0]), []
    for number in range(1200):
        list(cutter.add(("fast", 0), 8 * number, streams[0][0]))
        if number % 40 == 0:
            slow += cutter.add(("slow", 0), 8 * (number // 40), streams[0][0])
    assert [first_step for first_step, _ in slow] == list(range(0, 30 * 8 - 28, 30))


def test_streams_that_ended_are_dropped_beyond_a_bound(monkeypatch):
    """Actors play 24 unrolls and are replaced; one goes on beside them, at a third of their speed."""
    log, streams = unrolls_of(8, 2)
    wanted, _ = unrolls_of(30, 0)
    monkeypatch.setattr(apexrl.streams, "TAILS_BYTES", 4 * (log.unroll_bytes + wanted.unroll_bytes))
    cutter, lasting = StreamCutter(log, wanted), []
    for actor in range(60):
        for number in range(24):
            list(cutter.add((f"actor-{actor}", 0), 8 * number, streams[0][0]))
            if number % 3 == 0:
                lasting += cutter.add(("lasting", 0), 8 * (8 * actor + number // 3), streams[0][0])
    assert [first_step for first_step, _ in lasting] == list(range(0, 60 * 8 * 8 - 28, 30))
    for actor in range(50):  # with the steps that waited, these would complete an unroll
        assert not [*cutter.add((f"actor-{actor}", 0), 8 * 24, streams[0][0])]
        assert not [*cutter.add((f"actor-{actor}", 0), 8 * 25, streams[0][0])]


def test_the_field_that_hinders_is_named():
    log, _ = unrolls_of(8, 2, at="first")
    for changes, reason in (
        ({"env": "Other-v0"}, "its env is Catch-v0, not Other-v0"),
        ({"num_actions": 9}, "its num_actions is 3, not 9"),
        ({"extras": (Field("mu", "step", "float16"),)}, r"it has no field mu (float16 [] at each step)"),
        ({"extras": (Field("value", "step", "float32"),)}, "its field value is float32 [] at each first, not"),
        ({"unroll_starts": 12}, "at the first of each 8 steps: --unroll-starts 12 has to be a multiple"),
    ):
        assert reason in why_not_cut(log, msgspec.structs.replace(log, **changes))
    assert not why_not_cut(log, msgspec.structs.replace(log, unroll_starts=12, overlap_steps=0, extras=()))


def test_ape_x_learns_from_the_log_of_impala_and_impala_misses_its_fields_in_that_of_ape_x():
    environment, _ = unrolls_of(8, 2)
    families = {name: FAMILIES[name] for name in ("apex-dqn", "impala")}
    streams = {name: family.stream(family.algorithm, environment) for name, family in families.items()}
    assert streams["impala"].overlap_steps < streams["apex-dqn"].overlap_steps
    assert not why_not_cut(streams["impala"], streams["apex-dqn"])
    assert "it has no field " in why_not_cut(streams["apex-dqn"], streams["impala"])
