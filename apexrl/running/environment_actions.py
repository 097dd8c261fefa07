"""The actions that the environment of a run takes, for those who write them down. It is made in this process."""

from apexrl.apart import Apart, to_be_closed
from apexrl.config.sections import EnvConfig
from apexrl.environments.actions import Actions
from apexrl.environments.vector import make_game
from apexrl.errors import ConfigError, named
from apexrl.types import EnvironmentSpec


def actions_of(config: EnvConfig, spec: EnvironmentSpec) -> Actions:
    """Returns the actions of an environment, which is made for it and closed again, as those of a spec.

    Raises: ConfigError when it cannot be made, or has other actions than the spec.
    """
    with (
        Apart(),
        named(f"environment {config.env!r} cannot be made"),
        to_be_closed(make_game(config), config.env) as env,
    ):
        actions = Actions(config.env, env.action_space)
    if (actions.num, actions.bounds) != (spec.num_actions, spec.action_bounds):
        theirs = spec.action_bounds or f"{spec.num_actions} numbers"
        raise ConfigError(
            f"environment {config.env!r} has actions {actions.space} here, and not {theirs} as were learned from"
        )
    return actions
