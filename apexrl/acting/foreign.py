"""The environments of a process that plays: whatever they change of their process, they change for themselves.

But for signals, which the loops of a role heed again after each round (`Stop.heed_signals`).
"""

import logging
from typing import Any

import numpy as np

from apexrl.apart import Apart
from apexrl.config.sections import EnvConfig
from apexrl.environments.vector import make_environment
from apexrl.errors import ApexError, ConfigError, reason_of
from apexrl.types import TimeSteps

logger = logging.getLogger(__name__)


FIRST_STEPS = 256  # each of which runs apart: most code changes its process when it is first used
LOOKED_STEPS = 16  # of further ones, one in so many: to run apart costs several microseconds
NEVER = (ApexError, ImportError, TypeError)  # causes that make an environment impossible: arguments and packages


class ForeignEnvironment:
    """A `VectorEnvironment` of `make_environment`, whose code runs apart: the process stays as it was before.

    What a later step changes is put back within LOOKED_STEPS. Code with settings of its own has them in each step.
    """

    def __init__(self, config: EnvConfig, num_envs: int, **options: Any):
        """Takes the arguments of `make_environment`.

        Raises: ConfigError when it can never be made, ApexError when it may come up another time, as a simulator does.
        """
        self._apart, self._env, self._steps = Apart(has_signals=False), config.env, 0
        self._is_looked = True  # else a step has run outside of it
        try:
            with self._apart:
                self._envs = envs = make_environment(config, num_envs, **options)
        except ConfigError as error:
            if error.__cause__ is None or isinstance(error.__cause__, NEVER):
                raise
            raise ApexError(str(error)) from error.__cause__
        self.spec, self.pictures_per_second = envs.spec, envs.pictures_per_second

    def reset(self, seed: int) -> np.ndarray:
        """Returns the first frames [E, *frame]."""
        with self._looked():
            return self._envs.reset(seed)

    def send(self, actions: np.ndarray) -> np.ndarray:
        """Begins one step; returns the actions as the environments take them."""
        return self._envs.send(actions)

    def receive(self) -> TimeSteps:
        """Waits for the step that `send` began, and returns it."""
        self._steps += 1
        if self._steps > FIRST_STEPS and not self._apart.has_own and self._steps % LOOKED_STEPS:
            self._is_looked = False
            return self._envs.receive()
        with self._looked():
            return self._envs.receive()

    def render(self) -> np.ndarray | None:
        """Returns the picture [height, width, 3] uint8 (RGB) of the first environment, None if it has none."""
        with self._looked():
            return self._envs.render()

    def close(self) -> None:
        """Frees the environments; says where one cannot be closed, for all that matters is written then."""
        with self._looked():
            try:
                self._envs.close()
                return
            except (Exception, SystemExit) as error:
                reason = reason_of(error)
        logger.warning("environment %r cannot be closed: %s", self._env, reason)

    def _looked(self) -> Apart:
        """Returns the context of a call, once what the steps outside of it have changed is put back."""
        if not self._is_looked:
            self._apart.put_back()
            self._is_looked = True
        return self._apart
