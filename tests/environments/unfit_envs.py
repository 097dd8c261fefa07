"""Environments that give something else than they declare: `tests.environments.unfit_envs:Unfit-v0`, by a case."""

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, OneOf, Tuple

PICTURE = Box(0, 255, (16, 18, 3), np.uint8)
WHOLE = Box(-10, 10, (2,), np.int64)
FLOATS = Box(-1, 1, (2, 3), np.float32)


def picture(value, dtype=np.uint8):
    return np.full((16, 18, 3), value, dtype)


UNFIT = {  # by name: a space, an observation of it, one that is none, and a part of the complaint
    "floats as bytes": (PICTURE, picture(9), picture(0.5, float), r"observation, in step 2 .*: 0\.5 at 0, 0, 0"),
    "negative bytes": (PICTURE, picture(9), picture(-1, np.int16), r"-1 at 0, 0, 0, where whole numbers from 0 to 255"),
    "great bytes": (PICTURE, picture(9), picture(300, np.uint16), "300 at 0, 0, 0"),
    "bytes in a list": (Box(0, 255, (3,), np.uint8), [1, 2, 3], [1, 2, 256], "256 at 2"),
    "halves": (WHOLE, np.array([1, -3]), np.array([1, -0.4]), "-0.4 at 1"),
    "no number among whole ones": (WHOLE, np.array([1.0, 2.0]), np.array([np.nan, 2.0]), "nan at 0"),
    "beyond 32 bits": (Box(0, 9, (1,), np.int32), np.array([3]), np.array([2**32 + 3]), "4294967299"),
    "another shape": (FLOATS, np.zeros((2, 3)), np.zeros((3, 2)), r"the shape \(3, 2\), where \(2, 3\) is needed"),
    "fewer": (FLOATS, np.zeros((2, 3)), np.zeros((2, 2)), "the shape"),
    "one for all": (FLOATS, np.zeros((2, 3)), np.float32(0), "the shape"),
    "ragged": (FLOATS, np.zeros((2, 3)), [[0, 1, 2], [3]], "inhomogeneous"),
    "nothing": (FLOATS, np.zeros((2, 3)), None, "None, where numbers are needed"),
    "complex": (FLOATS, np.zeros((2, 3)), np.zeros((2, 3)) + 1j, "array of complex128"),
    "the place before": (Discrete(3), 2, -1, "-1, where whole numbers from 0 to 2 are needed"),
    "the place behind": (Discrete(3, start=5), 7, 8, "8, where whole numbers from 5 to 7"),
    "half a place": (Discrete(3), np.int64(1), 1.5, r"1\.5"),
    "two places": (Discrete(3), [1], [1, 2], "the shape"),
    "many places": (MultiDiscrete([2, 3]), [1, 2], [2, 0], "2 at 0, where whole numbers from 0 to 1"),
    "bits": (MultiBinary(3), [1, 0, 1], [1, 0, 2], "2 at 2, where whole numbers from 0 to 1"),
    "half a bit": (MultiBinary(3), [1, 0, 1], [0.5, 0, 1], "0.5 at 0"),
    "a picture in a dictionary": (
        Dict({"image": PICTURE, "way": Discrete(2)}),
        {"image": picture(9), "way": 1},
        {"image": picture(0.83, np.float32), "way": 1},
        r"observation\['image'\], in step 2 of an episode: 0\.8",
    ),
    "turned in a dictionary": (Dict({"x": FLOATS}), {"x": np.zeros((2, 3))}, {"x": np.zeros((3, 2))}, "the shape"),
    "a key too few": (Dict({"a": WHOLE, "b": WHOLE}), {"a": [1, 2], "b": [0, 0]}, {"a": [1, 2]}, r"the keys \['a'\]"),
    "no dictionary": (Dict({"a": WHOLE}), {"a": [1, 2]}, [1, 2], "a list, where the keys"),
    "deep": (Dict({"a": Tuple((WHOLE, Discrete(2)))}), {"a": ([1, 2], 0)}, {"a": ([1, 2], 2)}, r"\['a'\]\[1\]"),
    "a part too few": (Tuple((WHOLE, Discrete(2))), ([1, 2], 0), ([1, 2],), "1 parts, where a tuple of 2"),
    "another choice": (OneOf((WHOLE, Discrete(2))), (0, [1, 2]), (-1, 1), r"observation\[0\]"),
    "another choice's": (OneOf((WHOLE, Discrete(2))), (0, [1, 2]), (1, 5), r"observation\[1\]"),
    "too great for float32": (Box(0, 2**40, (2,), np.int64), [2**24, 1], [2**24 + 1, 1], "16777217 at 0 of"),
}
FIT = {  # the same numbers in another type, and floats beyond their bounds
    "a list": (FLOATS, [[0, 1, 2], [3, 4, 5]], [[0, 1, 2], [3, 4, 5]]),
    "double": (FLOATS, np.full((2, 3), 0.1), np.full((2, 3), np.float32(0.1))),
    "beyond the bounds": (FLOATS, np.full((2, 3), 7.0), np.full((2, 3), 7.0)),
    "whole floats": (WHOLE, np.array([3.0, -4.0]), [3, -4]),
    "bytes as integers": (PICTURE, picture(200, np.int64), picture(200)),
    "truth": (Box(0, 255, (2,), np.uint8), np.array([True, False]), [1, 0]),
    "one more dimension": (WHOLE, np.array([[3, 4]]), [3, 4]),
    "a number alone": (Dict({"speed": Box(0, 1, (1,))}), {"speed": 0.5}, [0.5]),
    "a place in an array": (Discrete(3), np.array([2]), [0, 0, 1]),
    "places": (MultiDiscrete([2, 3], start=[1, 5]), np.array([2, 5]), [0, 1, 1, 0, 0]),
}


class Unfit(gymnasium.Env):
    """Gives an observation of its space, and from the second step on another one; or other results."""

    action_space = Discrete(2)

    def __init__(self, space, observations, results=(0.0, False, False)):
        self.observation_space, self._observations, self._results = space, observations, results

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return self._observations[0], {}

    def step(self, action):
        self._steps += 1
        results = self._results if self._steps > 1 else (0.0, False, False)
        return self._observations[self._steps > 1], *results, {}


def make(case="", results=(0.0, False, False)):
    """Makes an environment of a case; without one its observations are sound."""
    if case in UNFIT:
        space, *observations, _ = UNFIT[case]
    else:
        space, given, _ = FIT[case or "a list"]
        observations = given, given
    return Unfit(space, observations, results)


gymnasium.register("Unfit-v0", entry_point=make, disable_env_checker=True)
