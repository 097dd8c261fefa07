"""A loaded agent plays the policy that was trained: it sees the frames of training, and its actions do the same."""

import contextlib
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest

from apexrl import library
from apexrl.config.commands import ActorCommand
from apexrl.config.flags import parse
from apexrl.environments.vector import make_environment, take_step
from apexrl.errors import ConfigError

OWN = "tests.environments.own_wrappers"
PAINTED = ["--env", "tests.environments.odd_envs:Painted-v0"]


class Scripted:
    """An actor that takes actions from a list, and keeps what it sees."""

    def __init__(self, actions):
        self.actions, self.seen = iter(actions), []

    def initial_state(self, num_envs):
        return None

    def act(self, observation, exploration, state, rng):
        self.seen.append(observation)
        return np.array([next(self.actions)] * len(observation.frames)), {}, state


def own(env, *wrappers):
    return ["--env", f"{OWN}:{env}", *(word for name in wrappers for word in ("--wrapper", f"{OWN}:{name}"))]


@pytest.fixture
def loaded(monkeypatch):
    """Makes an agent for flags that acts as told, and a spec of its environment or another one."""

    def make(flags, actions, spec=None):
        command, actor = parse(ActorCommand, flags), Scripted(actions)
        if spec is None:
            with contextlib.closing(make_environment(command.env, 1)) as envs:
                spec = envs.spec
        made = SimpleNamespace(make_actor=lambda *arguments: actor)
        monkeypatch.setattr(library, "implementation", lambda family: made)
        header = SimpleNamespace(spec=spec, agent="apex-dqn")
        return library.Agent(SimpleNamespace(header=header, parameters=lambda: None), command), actor

    return make


def games_of_training(config, actions, num_games):
    """Plays games as the evaluator does; returns the frames that are acted on, and the returns."""
    frames, returns, actions = [], [], iter(actions)
    with contextlib.closing(make_environment(config, 1, evaluate=True)) as envs:
        frame = envs.reset(seed=3)[0]
        while len(returns) < num_games:
            frames.append(frame.copy())
            action = np.array([next(actions)])
            seen = take_step(envs, action)
            if seen.episode_steps[0]:
                returns.append(float(seen.episode_returns[0]))
                seen = take_step(envs, action)  # the reset, which ignores it
            frame = seen.frames[0]
    return frames, returns


def games_of_a_loop(agent, env, num_games):
    """Plays games as the documentation shows; returns the returns."""
    returns = []
    for game in range(num_games):
        observation, _ = env.reset(seed=None if game else 3)
        agent.reset()
        over, total = False, 0.0
        while not over:
            observation, reward, terminated, truncated, _ = env.step(agent.act(observation))
            over, total = terminated or truncated, total + float(reward)
        returns.append(total)
    return returns


NAMES = ("time_aware", "share_of_time", "stacked", "delayed", "skipping", "sticky", "by_function", "ByClass", "Other",
         "fixed")  # fmt: skip


@pytest.mark.parametrize(
    "flags",
    [
        own("Drift-v0"),
        *(own("Drift-v0", name) for name in NAMES),
        own("Drift-v0", "sticky", "delayed", "stacked", "time_aware"),
        [*own("Drift-v0", "share_of_time", "exchanged"), "--max-episode-frames", "5", "--frame-stack", "2"],
        own("FromOne-v0"),
        own("FromOne-v0", "from_zero"),
        own("Many-v0", "one_number"),
        own("Many-v0"),
        own("Buttons-v0"),
        own("Doubles-v0"),
        own("Vector-v0"),
        own("Matrix-v0"),
        ["--env", "FrozenLake-v1", "--env-kwargs", '{"map_name": "8x8"}'],
        ["--env", "Catch-v0"],
        ["--env", "tests.environments.odd_envs:Painted-v0", "--env-kwargs", '{"is_first": true}', "--grayscale",
         "--resize", "24", "20", "--max-episode-frames", "9"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_loaded_agent_plays_as_in_training(loaded, flags):
    """Its observations are those of the evaluator's games with the same seed and actions, and so are the returns."""
    config = parse(ActorCommand, flags).env
    rng = np.random.default_rng(1)
    is_vector = flags[1].endswith(("Vector-v0", "Matrix-v0"))
    actions = list(rng.uniform(-3, 4, (500, 2)).astype(np.float32) if is_vector else rng.integers(0, 2, 500))
    frames, returns = games_of_training(config, actions, 3)
    agent, actor = loaded(flags, actions)
    with contextlib.closing(agent.make_environment()) as env:
        assert games_of_a_loop(agent, env, 3) == pytest.approx(returns)
    assert len(actor.seen) == len(frames) and len(frames) > 3
    for seen, frame in zip(actor.seen, frames, strict=True):
        assert seen.frames.dtype == frame.dtype and np.array_equal(seen.frames[0], frame)


def test_a_loaded_agent_plays_a_game_of_atari_as_in_training(loaded):
    flags = ["--env", "ALE/Pong-v5", "--max-episode-frames", "600", "--env-kwargs", '{"full_action_space": true}']
    actions = np.random.default_rng(1).integers(0, 18, 200).tolist()
    frames, returns = games_of_training(parse(ActorCommand, flags).env, actions, 1)
    agent, actor = loaded(flags, actions)
    with contextlib.closing(agent.make_environment("rgb_array")) as env:
        assert games_of_a_loop(agent, env, 1) == returns and env.render().shape == (210, 160, 3)
        assert len(actor.seen) == len(frames) > 100
        assert all(np.array_equal(seen.frames[0], frame) for seen, frame in zip(actor.seen, frames, strict=True))
        with pytest.raises(ValueError, match="those of ALE/Pong-v5 are needed, as make_environment"):
            agent.act(env.render())
    with pytest.raises(ConfigError, match="a game of Atari has rgb_array"):
        agent.make_environment("human")


@pytest.mark.parametrize("name", ["time_aware", "stacked", "share_of_time", "Other"])
def test_an_observation_from_inside_a_wrapper_is_refused_by_name(loaded, name):
    agent, _ = loaded(own("Drift-v0", name), [0])
    raw = gymnasium.make(f"{OWN}:Drift-v0")
    with pytest.raises(ValueError, match=f"Drift-v0 behind --wrapper {OWN}:{name} are needed, as make_environment"):
        agent.act(raw.reset()[0])


@pytest.mark.filterwarnings("ignore:.*Casting input")  # of gymnasium, where no numbers come
@pytest.mark.parametrize(
    "observation", [None, 3, "left", (), {}, {"a": 1}, np.zeros((0, 2)), np.full(2, np.nan), [[1, 2, 3]] * 2]
)
def test_what_is_no_observation_is_refused(loaded, observation):
    agent, _ = loaded(own("Drift-v0", "Other"), [0])
    with pytest.raises(ValueError, match=r"neither an observation of Box.* nor a batch of them: those of"):
        agent.act(observation)


@pytest.mark.parametrize("name", ["delayed", "share_of_time"])
def test_an_environment_may_leave_its_bounds_as_in_training(loaded, name):
    """A warning says so, since an observation from inside a wrapper may be the reason."""
    agent, actor = loaded(own("Drift-v0", name), [0, 0])
    seen = {"obs": np.full(3, 101.0), "time": np.zeros(1)} if name == "share_of_time" else np.full(3, 101.0)
    told = f"out of bounds: those of {OWN}:Drift-v0 behind --wrapper {OWN}:{name} are"
    with pytest.warns(UserWarning, match=told) as warned:
        agent.act(seen)
    assert warned[0].filename == __file__, "the line that gave it"
    assert actor.seen[0].frames[0, :3].tolist() == [101] * 3


@pytest.mark.parametrize(
    ("env", "observation", "frame"),
    [
        ("Untrue-bytes-v0", np.uint8([7, 1]), [7, 1]),
        ("Untrue-integers-v0", np.int64([-9, 1]), [-9, 1]),
        ("Scalar-in-dict-v0", {"a": 0.5, "k": np.float32(1)}, [0.5, 0, 1, 0]),
    ],
)
@pytest.mark.filterwarnings("ignore:an observation is out of bounds")
def test_what_training_takes_is_taken(loaded, env, observation, frame):
    """Whole numbers beyond the bounds of their box, and numbers of another form."""
    flags = ["--env", f"tests.environments.odd_envs:{env}"]
    agent, actor = loaded(flags, [0])
    agent.act(observation)
    assert actor.seen[0].frames.tolist() == [frame]


@pytest.mark.parametrize("env", ["Text-first-v0", "One-of-v0"])
def test_a_vector_is_counted_by_its_space(loaded, env):
    """The batch of a text, or of one of several spaces, is a tuple."""
    agent, actor = loaded(["--env", f"tests.environments.odd_envs:{env}"], [0])
    envs = gymnasium.vector.SyncVectorEnv([agent.make_environment] * 2)
    assert agent.act(envs.reset(seed=0)[0]).tolist() == [0, 0]
    assert len(actor.seen[0].frames) == 2
    envs.close()


@pytest.mark.parametrize("name", ["by_function", "ByClass"])
def test_a_change_written_as_function_or_as_class_takes_the_same_observations(loaded, name):
    agent, actor = loaded(own("Drift-v0", name), [0])
    agent.act(np.array([1, 0, -1], np.float32))
    assert actor.seen[0].frames.tolist() == [[1, 0, -1]]


def test_a_vector_of_the_environments_of_training_is_played(loaded):
    flags = own("FromOne-v0", "from_zero", "delayed", "time_aware")
    agent, actor = loaded(flags, [0, 1] * 20)
    envs = gymnasium.vector.SyncVectorEnv([agent.make_environment] * 3)
    observations, _ = envs.reset(seed=0)
    for step in range(8):
        actions = agent.act(observations)
        assert actions.tolist() == [step % 2] * 3
        observations, *_ = envs.step(actions)
    assert actor.seen[-1].frames[:, 3].tolist() == [7, 7, 7]
    envs.close()


@pytest.mark.parametrize(
    ("learned", "played", "complaint"),
    [
        (
            own("Drift-v0"),
            own("Drift-v0", "Other"),
            r"has frames \(2,\) of float32 and actions Discrete\(3, .* frames \(3,\)",
        ),
        (PAINTED, [*PAINTED, "--env-kwargs", '{"dtype": "float32"}'], r"of float32 and .* frames .* of uint8"),
        (own("Many-v0", "one_number"), own("Drift-v0"), "and actions Discrete.2.; .* actions 6 numbers"),
        (own("Vector-v0"), own("Drift-v0"), "actions Discrete.2.; the agent learned .* actions ..-1.0, 1.0"),
    ],
)
def test_another_environment_than_that_of_the_checkpoint_is_refused(loaded, learned, played, complaint):
    agent, _ = loaded(learned, [])
    with pytest.raises(ConfigError, match=complaint):
        loaded(played, [], agent.spec)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([*own("Drift-v0"), "--clip-rewards", "yes"], 1.0),
        (own("Drift-v0"), 0.4),
        (["--env", "ALE/Pong-v5"], 1.0),
        (["--env", "ALE/Pong-v5", "--clip-rewards", "no"], 0.4),
    ],
)
def test_rewards_reach_the_agent_as_it_learned_from_them(loaded, flags, expected):
    agent, actor = loaded(flags, [0])
    agent.act(agent.observation_space.sample(), rewards=0.4)
    assert actor.seen[0].rewards.tolist() == pytest.approx([expected])


def test_choices_are_drawn_apart_from_what_an_environment_of_the_runs_seed_draws(loaded):
    agent, actor = loaded(["--env", "Catch-v0", "--seed", "5"], [])
    drawn = []
    actor.act = lambda observation, exploration, state, rng: (
        np.array([int(drawn.append(rng.random()) or 0)]),
        {},
        state,
    )
    with contextlib.closing(agent.make_environment()) as env:
        observation, _ = env.reset(seed=5)
        for _ in range(3):
            agent.act(observation)
        assert not {env.unwrapped.np_random.random() for _ in range(9)}.intersection(drawn)
