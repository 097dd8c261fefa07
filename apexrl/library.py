"""The library: train in a process of its own, and play with a trained agent in a loop of one's own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.vector.utils import batch_space, iterate

from apexrl.agents.contract import Observation
from apexrl.agents.families import family_of, implementation
from apexrl.config import ActorCommand, EnvConfig
from apexrl.environments.atari import is_atari
from apexrl.environments.observations import presented
from apexrl.environments.registry import registered
from apexrl.errors import ApexError
from apexrl.lifecycle import PARENT_VARIABLE, child_environment
from apexrl.networks.checkpoint import Checkpoint, load_checkpoint
from apexrl.running.launch import ENDING_SECONDS
from apexrl.running.run_directory import SUMMARY_FILE, played
from apexrl.runs import CURVE_FILE, CurvePoint, found_checkpoint, new_run, read_evaluations

GRAY = np.array([0.299, 0.587, 0.114])  # the weights of red, green and blue in ale-py's gray screens


class Run(NamedTuple):
    """A run by its directory."""

    directory: Path

    @property
    def evaluations(self) -> list[CurvePoint]:
        """The evaluations so far, oldest first.

        Raises: ConfigError when they cannot be read.
        """
        path = self.directory / CURVE_FILE
        return read_evaluations(path) if path.exists() else []

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json; empty while the run goes on for the first time."""
        path = self.directory / SUMMARY_FILE
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def checkpoint(self) -> Path:
        """The best checkpoint, else the latest one.

        Raises: ConfigError when there is none yet.
        """
        return found_checkpoint(self.directory)[1]


def train(env: str, **flags: Any) -> Run:
    """Trains on this machine until the run ends, as `run.sh` does; returns the run.

    An interrupt (Ctrl-C) ends the run with a checkpoint, a second one kills it. The run ends with this process, too.

    Args:
      env: a Gymnasium id.
      flags: those of `run.sh` with underscores, as in total_frames=200_000, env_kwargs={...}, tensorboard=False.
    Raises: ApexError when the run fails; its own output says why. KeyboardInterrupt after an interrupt.
    """
    directory = flags.get("resume") or flags.setdefault("run_dir", new_run(env))
    words = [word for flag, value in {"env": env, **flags}.items() for word in _words(flag, value)]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "apexrl", "train", *words],
        env={**child_environment(), PARENT_VARIABLE: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a terminal's Ctrl-C reaches us alone: two would kill the run
    )
    try:
        status = process.wait()
    except KeyboardInterrupt:
        _interrupt(process)
        raise
    if status:
        raise ApexError(f"the run ended with exit status {status}: its output says why, and {directory}/logs")
    return Run(Path(directory).resolve())


def _interrupt(process: subprocess.Popen) -> None:
    """Ends a run in order; kills it after a second interrupt, or when it does not end in time."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
        process.wait(ENDING_SECONDS)
        return
    process.send_signal(signal.SIGINT)
    process.wait(ENDING_SECONDS)


def _words(flag: str, value: Any) -> list[str]:
    """Returns the words of a flag on a command line."""
    name = flag.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, Mapping):
        return [f"--{name}", json.dumps(value)]
    return [f"--{name}", *map(str, value if isinstance(value, list | tuple) else [value])]


class Agent:
    """A trained agent. It takes observations as the environment gives them, and makes screens and stacks itself.

    `act` has to see each observation of an episode once, in order. Used from one thread.
    """

    def __init__(self, checkpoint: Checkpoint, command: ActorCommand):
        """Takes a checkpoint, and the configuration of its run.

        Raises: ConfigError when the environment cannot be made.
        """
        self.spec = checkpoint.header.spec
        make = implementation(family_of(checkpoint.header.agent)).make_actor
        self._actor = make(command.algorithm, checkpoint.parameters(), torch.device("cpu"))
        self._space, self._present, self._first_action = presenter(command.env)
        self._rng = np.random.default_rng(command.seed)
        self.reset()

    def reset(self) -> None:
        """Forgets: the next observation begins an episode."""
        self._state: Any = None

    def act(self, observation: Any, starts: np.ndarray | None = None, rewards: Any = None, epsilon: float = 0.0) -> Any:
        """Returns the action for an observation, or the actions [E] for those of a vector of environments.

        Args:
          observation: one of the environment's observation space, or a batch of them.
          starts: [E] bool, whether an observation is the first of its episode; by default those after `reset` are.
          rewards: of the last step, for a network with an LSTM; by default 0.
          epsilon: probability of a random action; a family with a random policy takes its own.
        Raises: ValueError when the observation is of another space, or the number of environments changes.
        """
        is_one = self._space.contains(observation)
        found = [observation] if is_one else self._batch(observation)
        frames = np.stack([self._present(one) for one in found])
        if self._state is None:
            self._state = self._actor.initial_state(len(frames))
            self._num_envs, first = len(frames), np.ones(len(frames), bool)
        else:
            first = np.zeros(len(frames), bool)
        if len(frames) != self._num_envs:
            raise ValueError(f"{len(frames)} observations came, {self._num_envs} before: say reset() in between")
        first = first if starts is None else first | np.asarray(starts, bool).reshape(-1)
        last = np.zeros(len(frames), np.float32) if rewards is None else np.asarray(rewards, np.float32).reshape(-1)
        seen = Observation(frames, first, last)
        actions, _, self._state = self._actor.act(seen, np.full(len(frames), epsilon), self._state, self._rng)
        actions = actions + self._first_action
        return actions[0] if is_one else actions

    def _batch(self, observations: Any) -> list[Any]:
        leaf = observations
        while isinstance(leaf, Mapping | tuple):
            leaf = next(iter(leaf.values())) if isinstance(leaf, Mapping) else leaf[0]
        batched = batch_space(self._space, len(leaf))
        if not batched.contains(observations):
            raise ValueError(f"an observation of {self._space} is needed, or a batch of them")
        return list(iterate(batched, observations))


def load(path: str | Path) -> Agent:
    """Returns the agent of a run, with its best network, or of one of its checkpoints.

    Args:
      path: a run's directory, or a checkpoint in one.
    Raises: ConfigError or WireError when there is none that can be read.
    """
    directory, file = found_checkpoint(Path(path))
    checkpoint = load_checkpoint(file)
    return Agent(checkpoint, played(directory, checkpoint.header))


def presenter(config: EnvConfig) -> tuple[gymnasium.Space, Callable[[Any], np.ndarray], int]:
    """Returns an environment's observation space, what makes a frame of an observation, and the least action.

    Screens of Atari (210 x 160, RGB) become gray ones of 84 x 84; a single one has no maximum over two frames.

    Raises: ConfigError when the environment cannot be made.
    """
    entry = registered(config.env)
    layers: list[gymnasium.ObservationWrapper] = []
    if is_atari(entry):
        raw: Any = gymnasium.make(entry.id)
        gray = gymnasium.spaces.Box(0, 255, raw.observation_space.shape[:2], np.uint8)
        env: Any = gymnasium.wrappers.TransformObservation(raw, lambda rgb: (rgb @ GRAY + 0.5).astype(np.uint8), gray)
        env = gymnasium.wrappers.ResizeObservation(env, (84, 84))
    else:
        raw = gymnasium.make(entry.id, **config.kwargs)
        env = presented(raw, config, set())
    try:
        while isinstance(env, gymnasium.ObservationWrapper) and type(env).__module__.startswith("gymnasium.wrappers"):
            layers.insert(0, env)
            env = env.env
        first_action = int(getattr(raw.action_space, "start", 0))
        space, dtype = env.observation_space, (layers[-1] if layers else env).observation_space.dtype
    finally:
        raw.close()

    def present(observation: Any) -> np.ndarray:
        for layer in layers:
            observation = layer.observation(observation)
        return np.asarray(observation, np.uint8 if dtype == np.uint8 else np.float32)

    return space, present, first_action
