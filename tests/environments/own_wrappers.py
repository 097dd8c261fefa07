"""Environments and wrappers as people write them: with a state of their own, or with other spaces.

As `--env tests.environments.own_wrappers:Drift-v0 --wrapper tests.environments.own_wrappers:delayed`.
"""

import gymnasium
import numpy as np
from gymnasium import wrappers
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete


class Drift(gymnasium.Env):
    """Three numbers that actions move and chance disturbs, for nine steps."""

    observation_space = Box(-100, 100, (3,), np.float32)
    action_space = Discrete(2)
    length = 9

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.place = 0, self.np_random.normal(50, 1, 3).astype(np.float32)
        return self.place.copy(), {}

    def step(self, action):
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is no action")
        self.steps += 1
        self.place += self.np_random.normal(np.sum(action), 1, 3).astype(np.float32)
        return self.place.copy(), float(self.place[0]), self.steps == self.length, False, {}


class Long(Drift):
    """A game takes longer than others do."""

    length = 150


class FromOne(Drift):
    """Its actions are 1 and 2."""

    action_space = Discrete(2, start=1)


class Many(Drift):
    """Its action is three numbers."""

    action_space = MultiDiscrete([2, 3, 2], start=[1, 0, 0])


class Vector(Drift):
    """Its action is a vector."""

    action_space = Box(np.array([-1, 2], np.float32), np.array([1, 3], np.float32))


class Matrix(Drift):
    """Its action is a matrix of one column."""

    action_space = Box(np.array([[-1], [2]], np.float32), np.array([[1], [3]], np.float32))


class Buttons(Drift):
    """Its action is four buttons."""

    action_space = MultiBinary((2, 2))


class Doubles(Drift):
    """Gives other floats than it says, as many do."""

    def step(self, action):
        place, *others = super().step(action)
        return place.astype(np.float64), *others


class Remembering(Drift):
    """Begins each game where the last one ended: that is the environment's, whatever is around it."""

    start = 0.0

    def reset(self, *, seed=None, options=None):
        place, info = super().reset(seed=seed)
        self.start += 1
        return place + np.float32(self.start), info


class Random(Drift):
    """Heeds no seed."""

    def reset(self, *, seed=None, options=None):
        return super().reset()


class Failing(Drift):
    """Fails in each third step."""

    def step(self, action):
        if self.steps == 2:
            raise RuntimeError("the simulator is gone")
        return super().step(action)


for environment in (Drift, Long, FromOne, Many, Vector, Matrix, Buttons, Doubles, Remembering, Random, Failing):
    gymnasium.register(f"{environment.__name__}-v0", environment, disable_env_checker=True)


def time_aware(env):
    return wrappers.TimeAwareObservation(env)


def share_of_time(env):
    return wrappers.TimeAwareObservation(env, flatten=False, normalize_time=True)


def stacked(env):
    return wrappers.FrameStackObservation(env, 3)


def delayed(env):
    return wrappers.DelayObservation(env, 2)


def skipping(env):
    return wrappers.MaxAndSkipObservation(env, 2)


def sticky(env):
    return wrappers.StickyAction(env, 0.5)


def from_zero(env):
    return wrappers.TransformAction(env, lambda action: action + 1, Discrete(2))


def exchanged(env):
    return wrappers.TransformAction(env, lambda action: 1 - action, Discrete(2))


def one_number(env):
    """Six actions of three numbers each."""
    return wrappers.TransformAction(env, lambda action: np.array([1, action % 3, action // 3]), Discrete(6))


def by_function(env):
    return wrappers.TransformObservation(env, lambda seen: (1 - seen / 50).astype(np.float32), env.observation_space)


class ByClass(gymnasium.ObservationWrapper):
    """Does the same."""

    def observation(self, seen):
        return (1 - seen / 50).astype(np.float32)


class Other(gymnasium.Wrapper):
    """Changes observations and actions, and both spaces."""

    def __init__(self, env):
        super().__init__(env)
        self.observation_space, self.action_space = Box(-100, 100, (2,), np.float32), Discrete(3, start=-1)

    def reset(self, **kwargs):
        seen, info = self.env.reset(**kwargs)
        return seen[:2], info

    def step(self, action):
        seen, *others = self.env.step(int(action > 0))
        return seen[:2], *others


def normalized(env):
    return wrappers.NormalizeObservation(env)


def normalized_inside(env):
    return wrappers.TimeAwareObservation(wrappers.NormalizeObservation(env))


def normalized_rewards(env):
    return wrappers.NormalizeReward(env)


def fixed(env):
    """With statistics that somebody measured before."""
    env = wrappers.NormalizeObservation(env)
    env.obs_rms.mean, env.obs_rms.var = np.full(3, 50.0), np.full(3, 4.0)
    env.update_running_mean = False
    return env


class OwnMean(gymnasium.ObservationWrapper):
    """Subtracts the mean of all that it has seen."""

    def __init__(self, env):
        super().__init__(env)
        self.sum, self.number = np.zeros(3), 0

    def observation(self, seen):
        self.sum, self.number = self.sum + seen, self.number + 1
        return (seen - self.sum / self.number).astype(np.float32)


class LastGame(gymnasium.Wrapper):
    """Shows an observation relative to the last one of the game before."""

    last = np.zeros(3, np.float32)

    def reset(self, **kwargs):
        self.origin = self.last
        seen, info = self.env.reset(**kwargs)
        return seen - self.origin, info

    def step(self, action):
        self.last, *others = self.env.step(action)
        return self.last - self.origin, *others


class AtEnd(gymnasium.ObservationWrapper):
    """Shows observations relative to a number that it learns when a game ends."""

    def __init__(self, env):
        super().__init__(env)
        self.seen = 0

    def step(self, action):
        seen, reward, terminated, *others = super().step(action)
        self.seen += terminated
        return seen, reward, terminated, *others

    def observation(self, observation):
        return observation - self.seen


class Habit(gymnasium.ActionWrapper):
    """Takes each action that was taken often as the other one."""

    def __init__(self, env):
        super().__init__(env)
        self.times = np.zeros(2, int)

    def action(self, action):
        self.times[action] += 1
        return int(action) if self.times[action] < 30 else 1 - int(action)


class Noise(gymnasium.ObservationWrapper):
    """Adds noise that the seed of the environment decides."""

    def observation(self, seen):
        return seen + self.np_random.normal(0, 1, 3).astype(np.float32)


class OtherNoise(gymnasium.ObservationWrapper):
    """Adds noise that nothing decides."""

    def __init__(self, env):
        super().__init__(env)
        self.own = np.random.default_rng()

    def observation(self, seen):
        return seen + self.own.normal(0, 1, 3).astype(np.float32)


class SharedSum(gymnasium.ObservationWrapper):
    """Subtracts something of all that the copies of a process have seen."""

    sum = np.zeros(3)

    def observation(self, seen):
        SharedSum.sum = SharedSum.sum + seen
        return (seen - SharedSum.sum / 100).astype(np.float32)


class Bonus(gymnasium.Wrapper):
    """Rewards what it has seen seldom; observations and actions stay as they are."""

    def __init__(self, env):
        super().__init__(env)
        self.seen = {}

    def step(self, action):
        seen, reward, *others = self.env.step(action)
        place = round(float(seen[0]))
        self.seen[place] = self.seen.get(place, 0) + 1
        return seen, reward + self.seen[place] ** -0.5, *others
