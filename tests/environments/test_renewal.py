"""A copy of an environment that fails is made anew, and the others go on."""

import json

import numpy as np
import pytest

from apexrl.config.sections import EnvConfig
from apexrl.environments import renewal
from apexrl.environments.renewal import Failures
from apexrl.environments.vector import make_environment, take_step
from apexrl.errors import ApexError
from apexrl.losses.windows import n_step_windows, valid_starts
from apexrl.running.last_words import FromLog
from apexrl.unroll import UnrollBuilder
from tests.environments import failing_envs
from tests.environments.failing_envs import GAME_STEPS

ENV = "tests.environments.failing_envs:Breakable-v0"


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    """Steps without a step take no time, and no copy was made before."""
    monkeypatch.setattr(renewal, "STILL_SECONDS", 0.0)
    failing_envs.made.clear()


def environment(num_envs, failures, **kwargs):
    return make_environment(EnvConfig(ENV, env_kwargs=json.dumps(kwargs)), num_envs, failures=failures)


def play(num_steps, num_envs=3, seed=0, **kwargs):
    """Returns the first frames, the time steps, and the number of failures; closes the environments."""
    failing_envs.made.clear()
    failures = Failures()
    envs = environment(num_envs, failures, **kwargs)
    try:
        frames = envs.reset(seed=seed)
        steps = [take_step(envs, np.zeros(num_envs, int)) for _ in range(num_steps)]
    finally:
        envs.close()
    assert all(copy.closed == 1 for copy in failing_envs.made if hasattr(copy, "fails_at"))
    return frames, steps, failures.count


def test_the_step_of_a_copy_that_fails_becomes_a_reset_and_the_others_go_on(caplog):
    _, sound, _ = play(20)
    _, steps, num_failures = play(20, steps={"1": GAME_STEPS + 5})
    assert num_failures == 1
    for one, other in zip(steps, sound, strict=True):
        for ours, theirs in zip(one, other, strict=True):
            np.testing.assert_array_equal(ours[[0, 2]], theirs[[0, 2]])
    cut = GAME_STEPS + 5  # the reset between the two games is a step, too
    for i, step in enumerate(steps):
        assert step.frames[1, 0] == (1 if i < cut else 3)
    assert steps[cut].starts[1] and not steps[cut - 1].starts[1]
    assert (steps[cut].rewards[1], steps[cut].discounts[1], steps[cut].frames[1, 2]) == (0, 1, 0)
    assert steps[cut - 1].discounts[1] == 1, "the episode is cut, and did not terminate"
    ends = [i for i, step in enumerate(steps) if step.episode_steps[1]]
    assert ends == [GAME_STEPS - 1, cut + GAME_STEPS]
    assert {(step.episode_steps[1], step.episode_returns[1]) for step in steps if step.episode_steps[1]} == {
        (GAME_STEPS, GAME_STEPS)
    }
    (record,) = caplog.records
    said = f"environment '{ENV}' failed in step 5 of an episode: ConnectionError: simulator 1 is gone; "
    assert record.message.startswith(said)


def test_a_failure_is_told_on_the_screen(tmp_path, caplog):
    play(5, steps={"1": 3})
    words, (line,) = FromLog(tmp_path / "actors.log"), [record.message for record in caplog.records]
    with words.outputs() as (log, _):
        log.write(f"09:00:00 actor: {line}\n09:00:01 actor: plays\n".encode())
    assert words.news() == [line]


def test_no_window_of_an_unroll_reaches_across_a_failure():
    failures = Failures()
    envs = environment(2, failures, steps={"0": 4, "1": 9, "2": 1, "3": 2, "4": 13})
    frames = envs.reset(seed=0)
    spec = envs.spec.streamed(5, overlap_steps=3)
    builder, unrolls = UnrollBuilder(spec, frames), []
    for _ in range(60):
        step = take_step(envs, np.zeros(2, int))
        builder.add(np.zeros(2, np.int32), step)
        if complete := builder.observe({}):
            unrolls.append(complete[0])
    envs.close()
    assert failures.count == 5
    windows = 0
    for unroll in unrolls:
        returns, _, offsets = n_step_windows(unroll.rewards, unroll.discounts, unroll.starts, 1.0, 3)
        for k, i in np.argwhere(valid_starts(unroll.starts, 5)):
            begin, end = unroll.frames[k, i], unroll.frames[k + offsets[k, i], i]
            assert (begin[:2] == end[:2]).all(), "another game, or another copy"
            assert end[2] - begin[2] == offsets[k, i] == returns[k, i]
            windows += 1
    assert windows > 60


@pytest.mark.parametrize("resets", [(), (5,)])
def test_a_copy_that_cannot_be_made_rests_and_the_others_go_on(resets):
    _, steps, num_failures = play(20, steps={"1": 3}, makings=[3, 4], resets=resets)
    without = [i for i, step in enumerate(steps) if not step.frames[1].any()]
    assert without == ([2, 3, 4, 5, 6, 7, 8] if resets else [2, 3, 4]) and num_failures == 3 + len(resets)
    assert all(steps[i].starts[1] and not steps[i].episode_steps[1] for i in without)
    back = without[-1] + 1
    assert steps[back].starts[1] and steps[back].frames[1, 0] == 5 + len(resets) and not steps[back + 1].starts[1]
    assert [step.frames[0, 0] for step in steps] == [0] * 20


def test_a_reset_between_games_that_fails_is_a_failure_too():
    failures = Failures()
    envs = environment(2, failures, resets=[2])
    envs.reset(seed=0)
    for i in range(10):
        failing_envs.made[0].fails_to_reset = i == GAME_STEPS  # where the vector begins the next game
        step = take_step(envs, np.zeros(2, int))
        assert step.starts.tolist() == [i in (GAME_STEPS, GAME_STEPS + 1), i == GAME_STEPS]
    envs.close()
    assert step.frames[0, 0] == 3 and failures.count == 2


def test_a_copy_is_made_anew_with_another_seed_and_the_same_one_in_each_run():
    def games(seed):
        _, steps, _ = play(30, seed=seed, steps={"0": 3, "3": 1, "4": 4})
        return [step.frames[0, 1] for step in steps if step.frames[0].any()]

    played = games(0)
    assert len(set(played)) == 7 and played == games(0)
    assert set(played).isdisjoint(games(5))


@pytest.mark.parametrize("num_envs", [1, 3])
def test_an_environment_that_takes_no_step_any_more_ends_the_process(num_envs):
    copies = {str(i): 4 for i in range(num_envs)}
    last = num_envs + renewal.TRIES * num_envs
    with pytest.raises(
        ApexError, match=f"'{ENV}' has failed 7 times without a step, in each of its .*simulator .* not come"
    ):
        play(1000, num_envs, steps=copies, makings=list(range(num_envs, last)))
    assert len(failing_envs.made) < last
    with pytest.raises(ApexError, match=r"has failed 7 times without a step, .*: simulator \d+ is gone"):
        play(1000, num_envs, steps={str(i): 1 if i >= num_envs else 4 for i in range(last)})


def test_a_copy_that_never_comes_back_ends_nothing_while_another_one_plays():
    _, steps, num_failures = play(200, 2, steps={"1": 2}, makings=list(range(2, 100)))
    assert renewal.TRIES < num_failures < 15 and not steps[-1].frames[1].any() and steps[-1].frames[0].any()


def test_vectors_of_one_process_end_it_only_together():
    failures = Failures()
    vectors = [environment(1, failures, steps={"0": 2}, makings=[*range(2, 99)]) for _ in range(2)]
    for envs in vectors:
        envs.reset(seed=0)
    for _ in range(100):
        steps = [take_step(envs, np.zeros(1, int)) for envs in vectors]
    assert failures.count > renewal.TRIES and not steps[0].frames.any() and steps[1].frames.any()
    failing_envs.made[1].fails_at = failing_envs.made[1].steps + 1
    with pytest.raises(ApexError, match="7 times without a step, in each of its 2 copies"):
        for _ in range(1000):
            for envs in vectors:
                take_step(envs, np.zeros(1, int))
    for envs in vectors:
        envs.close()


@pytest.mark.parametrize("kwargs", [{"steps": {"0": 1}}, {"resets": [0]}])
def test_an_error_before_any_step_is_passed_on_at_once(kwargs):
    with pytest.raises((ConnectionError, TimeoutError)):
        play(3, **kwargs)
    assert len(failing_envs.made) == 3


def test_a_copy_with_another_space_is_refused():
    with pytest.raises(ApexError, match=r"gave a wrong observation_space, .*\(4,\).*, where it had .*\(3,\)"):
        play(5, steps={"0": 3}, space=4)
