"""The fields of the log that an LSTM needs: the state, the action and the reward before each unroll. Loads no torch."""

from apexrl.types import Field, StreamSpec

STATE, LAST_ACTION, LAST_REWARD = "core_state", "last_action", "last_reward"


def recurrent_fields(lstm_size: int) -> list[Field]:
    """Returns the fields of a stream whose actors have an LSTM; its state in float16."""
    return [
        Field(STATE, "first", "float16", (2, lstm_size)),
        Field(LAST_ACTION, "first", "int32"),
        Field(LAST_REWARD, "first", "float32"),
    ]


def lstm_size_of(spec: StreamSpec) -> int:
    """Returns the units of the LSTM whose states a stream holds; 0 where there is none."""
    return next((field.shape[1] for field in spec.extras if field.name == STATE), 0)
