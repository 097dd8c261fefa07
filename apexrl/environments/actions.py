"""The actions of an agent, as environments take them and the log holds them."""

from typing import Any

import numpy as np

from apexrl.errors import ApexError


def taken(actions: Any, steps: np.ndarray, num_actions: int, bounds: tuple[tuple[float, float], ...]) -> np.ndarray:
    """Returns actions as environments take them: [E] int32, or [E, action size] float32 within their bounds.

    Args:
      steps: [E] steps of the current episodes, for the message.
      num_actions: of a discrete space; 0 where an action is a vector of numbers, which is clipped to its bounds.
    Raises: ApexError when actions have another shape or kind, are beyond a discrete space, or not finite.
    """
    given = np.asarray(actions)
    shape = (len(steps),) if num_actions else (len(steps), len(bounds))
    if given.shape != shape:
        raise ApexError(f"the agent gives actions of shape {given.shape}, not {shape}")
    if given.dtype.kind not in ("biu" if num_actions else "biuf"):
        needed = f"whole numbers from 0 to {num_actions - 1}" if num_actions else "numbers"
        raise ApexError(f"the agent gives actions of {given.dtype}, such as {given[0]}: {needed} are needed")
    if num_actions:
        sound, needed = (given >= 0) & (given < num_actions), f"whole numbers from 0 to {num_actions - 1}"
    else:
        sound, needed = np.isfinite(given).all(axis=1), "finite numbers"
    if not sound.all():
        wrong = int(np.flatnonzero(~sound)[0])
        raise ApexError(f"the agent gives the action {given[wrong]} in step {steps[wrong] + 1} of an episode: "
                        f"{needed} are needed")  # fmt: skip
    return given.astype(np.int32) if num_actions else clipped(given, bounds)


def clipped(actions: np.ndarray, bounds: tuple[tuple[float, float], ...]) -> np.ndarray:
    """Returns vectors of actions [.., action size] as float32 within their bounds."""
    low, high = np.array(bounds, np.float32).T
    return np.clip(actions, low, high).astype(np.float32)
