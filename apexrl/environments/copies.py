"""All environments but Atari's: copies of one, which this process steps one by one."""

import contextlib
import functools
import logging
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

from apexrl.config.sections import EnvConfig
from apexrl.environments.actions import Actions, taken
from apexrl.environments.game_book import GameBook
from apexrl.environments.observations import parts_of, presented
from apexrl.environments.off_screen import creator_of, why_no_pictures
from apexrl.environments.renewal import Copy, Failures
from apexrl.environments.single import longest_episode, make_single, own_render_mode
from apexrl.environments.watchdog import Watchdog
from apexrl.errors import ApexError, ConfigError, reason_of
from apexrl.types import EnvironmentSpec, TimeSteps
from apexrl.unroll import LARGEST_VALUE

FINITE = f"a finite number up to {LARGEST_VALUE:g} is needed"  # NaN is not
EXACT = "a whole number that float32 holds is needed: give a --wrapper module:name that makes it smaller"
USUAL_PICTURES_PER_SECOND, MAX_PICTURES_PER_SECOND = 60.0, 240.0

logger = logging.getLogger(__name__)


class GymnasiumEnvironment:
    """Any other Gymnasium environment whose `Actions` there are. This process steps its copies one by one.

    A class that names its discrete actions does so in its `metadata`, as "action_names". Its
    "render_fps" is the speed of videos.
    """

    def __init__(
        self, config: EnvConfig, registered: EnvSpec, num_envs: int, failures: Failures, *, render: bool,
        first_copy: int = 0, making_seconds: float = 0.0,
    ):  # fmt: skip
        self._failures, variant = failures, config.variant
        _tell_limit(config, longest_episode(config, registered))
        self._renders = render and _can_be_filmed(config, registered)
        self._watchdog = Watchdog(config.env, config.step_deadline_seconds, making_seconds)
        self._watchdog.start()
        with contextlib.ExitStack() as failed:
            failed.callback(self._watchdog.close)
            try:
                self._envs = self._make(config, registered, num_envs, first_copy)
            except Exception as error:  # foreign code, and its games matter more than their pictures
                if not self._renders or isinstance(error, ConfigError):
                    raise
                self._give_up_pictures(error)
                self._envs = self._make(config, registered, num_envs, first_copy)
            try:
                names = self._envs.metadata.get("action_names", ())
                self._own_actions = own = Actions(config.env, self._envs.single_action_space, names)
            except ConfigError:
                with contextlib.suppress(Exception, SystemExit):  # the error says what to do
                    self._envs.close()
                raise
            failed.pop_all()
        self.parts = parts_of(self._copies[0].env)
        box = self._envs.single_observation_space
        self.spec = EnvironmentSpec(
            config.env, tuple(box.shape or ()), "uint8" if box.dtype == np.uint8 else "float32",
            config.frame_stack or 1, own.num, 1, own.bounds, own.names, variant,
        )  # fmt: skip
        speed: Any = self._envs.metadata.get("render_fps")
        is_speed = isinstance(speed, int | float) and 0 < speed <= MAX_PICTURES_PER_SECOND
        self.pictures_per_second = float(speed) if is_speed else USUAL_PICTURES_PER_SECOND
        self._clip = config.clip_rewards == "yes"

    def reset(self, seed: int) -> np.ndarray:
        """Returns the first observations [E, *frame]."""
        observations, _ = self._envs.reset(seed=seed)
        self._games = GameBook(len(observations))
        return self._frames(observations)

    def send(self, actions: np.ndarray) -> np.ndarray:
        """Stores the actions [E] or [E, action size] with which `receive` steps; returns them as they are taken."""
        own = taken(actions, self._games.steps, self.spec.num_actions, self.spec.action_bounds)
        self._actions = self._own_actions.taken(own)  # which an environment may change
        return self._own_actions.rounded(own)

    def receive(self) -> TimeSteps:
        """Takes one step in every environment."""
        observations, rewards, terminated, truncated, _ = self._envs.step(self._actions)
        starts = self._games.starts
        if self._without_step:
            starts[self._without_step] = True
            self._without_step.clear()
            self._failures.pause(len(starts))
        returns, steps = self._games.add(rewards, terminated | truncated)
        self._check("a reward", rewards, np.abs(rewards) <= LARGEST_VALUE, FINITE)
        rewards = np.sign(rewards) if self._clip else rewards
        discounts = np.where(terminated, 0, 1).astype(np.float32)
        return TimeSteps(self._frames(observations), rewards.astype(np.float32), discounts, starts, returns, steps)

    def render(self) -> np.ndarray | None:
        """Returns the picture of the first environment, None unless made with `render` and able to render."""
        if not self._renders:
            return None
        try:
            copy = self._copies[0]
            return _as_picture(copy.render()) if copy.is_open else None
        except Exception as error:  # as above
            self._give_up_pictures(error)
            return None

    def close(self) -> None:
        """Closes the environments, each within the deadline of a step."""
        try:
            self._envs.close()
        finally:
            self._watchdog.close()

    def _make(
        self, config: EnvConfig, registered: EnvSpec, num_envs: int, first_copy: int
    ) -> gymnasium.vector.VectorEnv:
        notes: set[str] = set()
        render_mode = "rgb_array" if self._renders else None
        self._copies: list[Copy] = []
        self._without_step: list[int] = []

        def make(number: int) -> gymnasium.Env:
            return presented(make_single(config, registered, render_mode, number), config, notes)

        def copy() -> Copy:
            place = len(self._copies)
            make_it = functools.partial(make, first_copy + place)
            self._copies.append(Copy(make_it, place, self._without_step, self._failures, self._watchdog))
            return self._copies[place]

        envs = gymnasium.vector.SyncVectorEnv([copy] * num_envs)
        self._failures.copies += self._copies
        for note in sorted(notes):
            logger.warning("%s: %s", config.env, note)
        return envs

    def _give_up_pictures(self, error: Exception) -> None:
        logger.warning("no pictures of this environment: %s", reason_of(error))
        self._renders = False

    def _frames(self, observations: np.ndarray) -> np.ndarray:
        """Returns observations as frames, a copy.

        Raises: ApexError when one holds no finite number, or a whole number that is another one in float32.
        """
        with np.errstate(all="ignore"):
            frames = observations.astype(self.spec.frame_dtype)
        if self.spec.frame_dtype == "float32":
            self._check("an observation", observations, np.abs(frames) <= LARGEST_VALUE, FINITE)
        if observations.dtype.kind not in ("f", frames.dtype.kind):
            self._check("an observation", observations, frames == observations, EXACT)
        return frames

    def _check(self, name: str, values: np.ndarray, sound: np.ndarray, needed: str) -> None:
        """Raises ApexError when a value is not sound, by the first of them."""
        if not sound.all():
            place = tuple(np.argwhere(~sound)[0])
            where = f"at {', '.join(map(str, place[1:]))} of" if len(place) > 1 else "as"
            raise ApexError(
                f"environment {self.spec.env!r} gave {values[place]} {where} {name}, "
                f"in step {self._games.steps[place[0]]} of an episode: {needed}"
            )


def _tell_limit(config: EnvConfig, limit: int) -> None:
    """Says that episodes end before the limit that the flag was given."""
    if limit < config.max_episode_frames != EnvConfig.max_episode_frames:
        logger.info(
            "%s ends its episodes after %d steps, before --max-episode-frames %d; --env-kwargs "
            '\'{"max_episode_steps": %d}\' lets them last',
            config.env, limit, config.max_episode_frames, config.max_episode_frames,
        )  # fmt: skip


def _as_picture(picture: Any) -> np.ndarray:
    """Returns what an environment rendered. Raises ValueError when it is no RGB picture of bytes."""
    array = np.asarray(picture)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or not array.size:
        raise ValueError(f"render() gave {array.shape} of {array.dtype}: [height, width, 3] of uint8 is needed")
    return array


def _can_be_filmed(config: EnvConfig, registered: EnvSpec) -> bool:
    """Returns whether an environment renders pictures, without making one; a line says why it does not."""
    if mode := own_render_mode(config):
        if mode != "rgb_array":
            logger.warning("%s: no pictures; --env-kwargs ask for the render_mode %s", config.env, mode)
        return mode == "rgb_array"
    creator = creator_of(registered)
    if "rgb_array" not in ((getattr(creator, "metadata", None) or {}).get("render_modes") or []):
        needed = 'its class, or the function that makes it, needs metadata = {"render_modes": ["rgb_array"]}'
    else:
        needed = why_no_pictures(creator)
    if needed:
        logger.warning("%s: no pictures; %s", config.env, needed)
    return not needed
