"""The fields of the log that an LSTM needs: the state, the action and the reward before each unroll. Loads no torch.

`burn_in_unrolls` reads the --replay-state of those who replay them.
"""

from collections.abc import Sequence

from apexrl.errors import ConfigError
from apexrl.types import Field, StreamSpec

STATE, LAST_ACTION, LAST_REWARD = "core_state", "last_action", "last_reward"


def recurrent_fields(lstm_size: int) -> tuple[Field, ...]:
    """Returns the fields of a stream whose actors have an LSTM; its state in float16."""
    return (
        Field(STATE, "first", "float16", (2, lstm_size)),
        Field(LAST_ACTION, "first", "int32"),
        Field(LAST_REWARD, "first", "float32"),
    )


def lstm_size_of(spec: StreamSpec) -> int:
    """Returns the units of the LSTM whose states a stream holds; 0 where there is none.

    Raises: ConfigError when actions are vectors, of which it does not know the last one.
    """
    size = next((field.shape[1] for field in spec.extras if field.name == STATE), 0)
    if size and spec.action_bounds:
        raise ConfigError(
            f"environment {spec.env!r} has actions of {len(spec.action_bounds)} numbers, and an LSTM takes as the last "
            "one a choice of several: leave recurrent_fields out of Family.stream"
        )
    return size


def burn_in_unrolls(replay_state: str, unroll_starts: int, kinds: Sequence[str]) -> int:
    """Returns the unrolls before each one that a --replay-state asks for; 0 for one of the other kinds.

    Raises: ConfigError when it is none that is known, or the log holds no state so many steps earlier.
    """
    kind, _, steps_text = replay_state.partition(":")
    steps = int(steps_text) if kind == "burn-in" and steps_text.isdecimal() else 0
    if replay_state not in kinds and (not steps or steps % unroll_starts):
        raise ConfigError(
            f"--replay-state {replay_state}: give {', '.join(kinds)}, or burn-in:N with a multiple of "
            f"--unroll-starts {unroll_starts}, at whose ends the log holds states"
        )
    return steps // unroll_starts
