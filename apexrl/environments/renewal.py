"""Copies of an environment, each of which is made anew when it fails: a simulator that dies takes no other copy along.

An exception of the environment's own is a failure of that copy: in `reset`, in `step`, or when it is made again. So is
its `sys.exit`, which the `Watchdog` makes an exception. Numbers that are not those of its spaces are no failure. They
would come again, and end the process by name. So does an exception before any copy has taken a step.

A copy that fails is closed and made anew at once. The step that failed becomes a reset: its action counts for nothing,
and a new episode begins. When the copy fails again before it has taken a step, it rests, for 1, 2, 4 and so on up to
LONGEST_REST_STEPS steps of its vector, and its steps are resets to blank frames until then. While all copies of the
process rest, these steps take STILL_SECONDS. When each has failed TRIES times without a step, the process ends: after
about 16 s. Time decides nothing here, so failures that repeat change nothing about a reproducible run.
"""

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from apexrl.environments.fitting import UnfitError, reward_of, truth_of
from apexrl.environments.watchdog import MAKING, Watchdog
from apexrl.errors import ApexError, reason_of
from apexrl.lines import Repeats

logger = logging.getLogger(__name__)

TRIES = 7
LONGEST_REST_STEPS = 1024
STILL_SECONDS = 0.5
SAY_SECONDS = 60.0

Step = tuple[Any, float, bool, bool, dict]


class Copy(gymnasium.Wrapper):
    """One of the copies. It tells a watchdog of its calls, names what does not fit, and keeps its infos for itself.

    Nobody here reads infos, and a vector of environments fails to merge those whose values change their type or shape.
    """

    def __init__(
        self, make: Callable[[], gymnasium.Env], number: int, without_step: list[int], failures: "Failures",
        watchdog: Watchdog,
    ):  # fmt: skip
        """Makes the copy.

        Args:
          without_step: gets the number of this copy at each step that was none.
          failures: of all copies of the process.
        """
        with watchdog.watching(MAKING):
            super().__init__(make())
        self.observation_space, self.action_space = self.env.observation_space, self.env.action_space
        self.is_open = True  # else it rests
        self.num_failures: int | None = None  # since its last step; None before its first step and failure
        self._make, self._number, self._without_step, self._failures = make, number, without_step, failures
        self._env_id, self._call, self._watching = watchdog.env, watchdog.call, watchdog.watching
        self._steps = 0  # of the episode
        self._rest_steps = 0
        self._seed: int | None = None
        self._times_made = 0  # since that seed was given

    def reset(self, **named: Any) -> tuple[Any, dict]:
        """Begins an episode. Raises ApexError when the observation is not of its space."""
        if named.get("seed") is not None:
            self._seed, self._times_made = named["seed"], 0
        self._steps = 0
        if not self.is_open:
            return self._begin_anew(), {}
        try:
            observation, _ = self._call("reset", self.env.reset, **named)
        except UnfitError as error:
            raise self._named(error) from error
        except Exception as error:
            return self._fail(error), {}
        return observation, {}

    def step(self, action: Any) -> Step:
        """Takes a step, or none. Raises ApexError when the observation is not of its space, or a result is none."""
        if not self.is_open:
            self._rest_steps -= 1
            return self._no_step(self._blank() if self._rest_steps > 0 else self._begin_anew())
        self._steps += 1
        try:
            observation, reward, terminated, truncated, _ = self._call("step", self.env.step, action)
            ends = truth_of(terminated, "terminated"), truth_of(truncated, "truncated")
            taken: Step = observation, reward_of(reward), ends[0], ends[1], {}
        except UnfitError as error:
            raise self._named(error) from error
        except Exception as error:
            return self._no_step(self._fail(error))
        self.num_failures = 0
        return taken

    def render(self) -> Any:
        """Returns a picture. Call it only while the copy is open."""
        return self._call("render", self.env.render)

    def close(self) -> None:
        """Closes the environment, once."""
        if self.is_open:
            self.is_open = False
            with self._watching("close"):
                self.env.close()

    def _fail(self, error: Exception) -> Any:
        """Closes the copy, and takes note of its failure; returns the observation that comes next, which may be blank.

        Raises: ApexError or the error when the process has to end.
        """
        with contextlib.suppress(Exception):  # it is broken
            self._call("close", self.close)
        again = self._failures.note(self, error, self._env_id, self._steps)
        if not again:
            return self._begin_anew()
        self._rest_steps = min(2 ** (again - 1), LONGEST_REST_STEPS)
        return self._blank()

    def _begin_anew(self) -> Any:
        """Makes the copy anew; returns the first observation of its next episode, or what `_fail` returns."""
        self._steps = 0
        self._times_made += 1
        try:
            self.env = self._call(MAKING, self._make)
            self.is_open = True
            for name in ("observation_space", "action_space"):
                if (found := getattr(self.env, name)) != (before := getattr(self, name)):
                    raise UnfitError(name, f"{found}, where it had {before} before it failed")
            observation, _ = self._call("reset", self.env.reset, seed=self._next_seed())
        except UnfitError as error:
            raise self._named(error) from error
        except Exception as error:
            return self._fail(error)
        return observation

    def _next_seed(self) -> int | None:
        """Returns a seed of another game than those that were played since the copy got its seed."""
        if self._seed is None:
            return None
        return int(np.random.SeedSequence([self._seed, self._times_made]).generate_state(1)[0] >> 1)

    def _blank(self) -> np.ndarray:
        return np.zeros(self.observation_space.shape or (), self.observation_space.dtype)

    def _no_step(self, observation: Any) -> Step:
        self._without_step.append(self._number)
        return observation, 0.0, False, False, {}

    def _named(self, error: UnfitError) -> ApexError:
        step = f"in step {self._steps} of an episode"
        return ApexError(f"environment {self._env_id!r} gave a wrong {error.name}, {step}: {error.reason}")


class Failures:
    """The failures of all copies of a process, which one thread steps in one vector or in several."""

    def __init__(self) -> None:
        self.count = 0
        self.copies: list[Copy] = []
        self._repeats = Repeats(SAY_SECONDS)

    def note(self, copy: Copy, error: Exception, env: str, step: int) -> int:
        """Counts a failure of a copy; returns how many it had in a row before this one.

        Raises: the error where no copy has taken a step yet, ApexError where none takes a step any more.
        """
        if all(one.num_failures is None for one in self.copies):
            raise error
        before = copy.num_failures or 0
        copy.num_failures = before + 1
        self.count += 1
        if all((one.num_failures or 0) >= TRIES for one in self.copies):
            raise ApexError(
                f"environment {env!r} has failed {TRIES} times without a step, in each of its {len(self.copies)} "
                f"copies: {reason_of(error)}"
            ) from error
        if self._repeats.let_through():
            logger.warning(
                "environment %r failed in step %d of an episode: %s; that copy is made anew (failure %d in %d copies)",
                env, step, reason_of(error), self.count, len(self.copies),
            )  # fmt: skip
        return before

    def pause(self, num_envs: int) -> None:
        """Waits where no copy plays, for the share of one vector of environments."""
        if all(one.num_failures for one in self.copies):
            time.sleep(STILL_SECONDS * num_envs / len(self.copies))
