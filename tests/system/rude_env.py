"""An environment that takes its whole process for itself, as simulators and their bindings do."""

import logging.config
import os
import signal
import sys
import threading
import time
import warnings

import gymnasium
import numpy as np

SILENT = {"version": 1, "disable_existing_loggers": True, "root": {"level": "ERROR", "handlers": []}}


class RudeEnv(gymnasium.Env):
    """Registered as Rude-v0. It has the directory and the number type that it wants whenever it is called."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        threading.Thread(target=time.sleep, args=(3600,)).start()
        self.take_over()

    def take_over(self):
        os.chdir("/")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        logging.config.dictConfig(SILENT)
        warnings.simplefilter("error")
        if torch := sys.modules.get("torch"):
            torch.set_default_dtype(torch.float64)
            torch.set_default_device("meta")
            torch.set_grad_enabled(False)

    def check(self):
        torch = sys.modules.get("torch")
        if os.getcwd() != "/" or (torch and torch.get_default_dtype() != torch.float64):
            raise RuntimeError("somebody has changed what is mine")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.check()
        self.take_over()
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.check()
        self.steps += 1
        return np.full(2, self.steps / 10, np.float32), float(action), self.steps == 10, False, {}

    def close(self):
        sys.exit(3)


gymnasium.register("Rude-v0", RudeEnv)
