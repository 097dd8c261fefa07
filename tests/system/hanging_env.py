"""An environment whose making takes forever, like that of a simulator which does not answer."""

import time
from pathlib import Path

import gymnasium


class HangingEnv(gymnasium.Env):
    """Registered as Hanging-v0. It touches the file `sign` first."""

    def __init__(self, sign: str):
        Path(sign).touch()
        time.sleep(3600)


gymnasium.register("Hanging-v0", HangingEnv)
