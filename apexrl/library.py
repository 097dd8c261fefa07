"""The library: train in a process of its own, and play with a trained agent in a loop of one's own."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Tuple
from gymnasium.vector.utils import batch_space, iterate

from apexrl.agents.contract import Observation
from apexrl.agents.exploration import CHOICES
from apexrl.agents.families import family_of, implementation
from apexrl.apart import Apart, to_be_closed
from apexrl.bounds import clipped
from apexrl.casts import exactly
from apexrl.children import PARENT_VARIABLE, start_child
from apexrl.config.commands import ActorCommand
from apexrl.config.words import flag_of, words_of
from apexrl.environments.actions import Actions
from apexrl.environments.fitting import UnfitError, fitted
from apexrl.environments.observations import presenter
from apexrl.environments.vector import WATCHED, clips_rewards, make_game
from apexrl.errors import ApexError, ConfigError
from apexrl.files import read_json
from apexrl.guard import GUARD, check_not_imported
from apexrl.networks.checkpoint import Checkpoint, load_checkpoint
from apexrl.networks.device import usual_defaults
from apexrl.own_modules import Trust
from apexrl.running.callbacks import LOOK_SECONDS, Callback, News, is_end
from apexrl.running.launch import ENDING_SECONDS
from apexrl.running.run_directory import SUMMARY_FILE, played
from apexrl.runs import (
    CURVE_FILE,
    CurvePoint,
    Which,
    found_checkpoint,
    made_run,
    network_words,
    new_run,
    read_evaluations,
)
from apexrl.types import EnvironmentSpec

if TYPE_CHECKING:
    from apexrl.train_flags import TrainFlags


@dataclasses.dataclass(frozen=True)
class Run:
    """A run by its directory, a path or a text. Raises ConfigError when there is no such directory."""

    directory: Path

    def __post_init__(self) -> None:
        directory = Path(self.directory)
        if not directory.is_dir():
            raise ConfigError(f"{directory}: there is no such directory of a run")
        object.__setattr__(self, "directory", directory)

    @property
    def evaluations(self) -> list[CurvePoint]:
        """The evaluations so far, oldest first.

        Raises: ConfigError when they cannot be read.
        """
        path = self.directory / CURVE_FILE
        return read_evaluations(path) if path.exists() else []

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json; empty while the run goes on for the first time.

        Raises: ConfigError when it cannot be read.
        """
        path = self.directory / SUMMARY_FILE
        return read_json(path, dict[str, Any]) if path.exists() else {}

    @property
    def checkpoint(self) -> Path:
        """The best checkpoint, else the latest one.

        Raises: ConfigError when there is none yet.
        """
        return found_checkpoint(self.directory)[1]


def train(env: str, *, on_status: Callback | None = None, on_evaluation: Callback | None = None,
          **flags: "Unpack[TrainFlags]") -> Run:  # fmt: skip
    """Trains on this machine until the run ends, as `run.sh` does; returns the run.

    An interrupt (Ctrl-C) ends the run with a checkpoint, a second one kills it. The run ends with this process, too.

    Args:
      env: a Gymnasium id.
      on_status: called here with each new `Status` of the run, every few seconds.
      on_evaluation: called here with each new evaluation, a `CurvePoint`. When one of the two returns True, the run
        ends as after an interrupt, and is returned.
      flags: those of `run.sh` with underscores, as in total_frames=200_000, env_kwargs={...}, tensorboard=False. Their
        types are for editors and mypy; an algorithm of your own may have others.
    Raises: ApexError when the run fails; its own output says why. ConfigError inside of a run, which imports a module
      that trains. KeyboardInterrupt after an interrupt. What one of the functions raises, when the run has ended.
    """
    check_not_imported()
    if PARENT_VARIABLE in os.environ:
        raise ConfigError(f"apexrl.train is called inside of a run, by a module that this imports: {GUARD}")
    is_given = bool(flags.get("resume") or flags.get("run_dir"))
    if not is_given:
        flags["run_dir"] = made_run(new_run(env, _command_line(flags)))
        flags["name"] = ""  # the directory has it
    directory = Path(flags.get("resume") or flags["run_dir"]).resolve()  # a callback may go to another one
    words = _command_line({"env": env, **flags})
    process = start_child(["-m", "apexrl", "train", *words], {})
    try:
        status = _followed(process, News(directory), on_status, on_evaluation)
    except BaseException:
        _interrupt(process)
        raise
    finally:
        if not is_given:
            with contextlib.suppress(OSError):  # it is empty where the run never began
                directory.rmdir()
    if status:
        logs = directory / "logs"
        also = f", and {logs}" if logs.exists() else ""
        raise ApexError(f"the run ended with exit status {status}: its output says why{also}")
    return Run(directory)


def _followed(process: subprocess.Popen, news: News, on_status: Callback | None, on_evaluation: Callback | None) -> int:
    """Returns the exit status of a run that has ended, 0 after the end that one of two functions has asked for."""
    if on_status is None and on_evaluation is None:
        return process.wait()
    while not (is_over := process.poll() is not None) and not is_end(news, on_status, on_evaluation):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_SECONDS)
    if is_over:
        is_end(news, on_status, on_evaluation)
        return process.wait()
    _interrupt(process)
    return 0


def _interrupt(process: subprocess.Popen) -> None:
    """Ends a run in order; kills its roles after a second interrupt or when they do not end in time, then itself."""
    for _ in "12":
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
            process.wait(ENDING_SECONDS)
            return
    process.kill()  # its roles notice, and end
    process.wait()


def _command_line(flags: Mapping[str, Any]) -> list[str]:
    return [word for name, value in flags.items() for word in words_of(flag_of(name), value)]


class Agent:
    """A trained agent, for the environment that it was trained on. Used from one thread.

    That is the run's environment with its arguments and its limit, behind its wrappers: `make_environment` makes it.
    `act` takes observations as the outermost wrapper gives them, and gives actions as that one takes them. Observations
    from inside a wrapper are not for it. `act` itself does what the run does behind its wrappers: it turns, scales and
    flattens observations, and stacks them. Games of Atari are frames of 84x84 in gray.

    `act` has to see each observation of an episode once, in order.
    """

    @usual_defaults()
    def __init__(self, checkpoint: Checkpoint, command: ActorCommand, network: str = ""):
        """Takes a checkpoint, the configuration of its run, and words about the network, for people.

        Raises: ConfigError when the environment cannot be made, or is no longer the one that the agent was trained on.
        """
        self.spec, self._env = checkpoint.header.spec, command.env
        self._words = f"{checkpoint.header.agent} on {self.spec.env}: {network}"
        make = implementation(family_of(checkpoint.header.agent)).make_actor
        self._actor = make(command.algorithm, checkpoint.parameters(), torch.device("cpu"))
        with Apart(), to_be_closed(self.make_environment(), command.env.env) as env:
            self.observation_space, self.action_space = env.observation_space, env.action_space
            frames, self._present = presenter(env, command.env)
        self._actions = Actions(command.env.env, self.action_space)
        _check_same(frames, self._actions, self.spec)
        self._boundless = _boundless(self.observation_space)
        behind = f" behind --wrapper {' and '.join(command.env.wrapper)}" if command.env.wrapper else ""
        self._needed = f"those of {command.env.env}{behind} are needed, as make_environment() of the agent makes it"
        self._clips_rewards = clips_rewards(command.env)
        self._rng = np.random.default_rng(np.random.SeedSequence(command.seed, spawn_key=CHOICES))
        self.reset()

    def __repr__(self) -> str:
        """Says which network this is, and by how many games it was evaluated."""
        return f"<{self._words}>"

    def make_environment(self, render_mode: str | None = None, copy: int = WATCHED) -> gymnasium.Env:
        """Makes the environment that the agent was trained on, for whole games with unclipped rewards.

        Args:
          copy: its number, for arguments that ask for it ("{copy}" in --env-kwargs).
        Raises: ConfigError when it cannot be made.
        """
        return make_game(self._env, render_mode, copy)

    def reset(self) -> None:
        """Forgets: the next observation begins an episode."""
        self._state: Any = None

    @usual_defaults()
    def act(
        self, observation: Any, starts: np.ndarray | None = None, rewards: Any = None, exploration: float = 0.0
    ) -> Any:
        """Returns the action for an observation, or the actions [E] for those of a vector of environments.

        Args:
          observation: one of `observation_space`, behind the run's wrappers, or a batch of them.
          starts: [E] bool, whether an observation is the first of its episode; by default those after `reset` are.
          rewards: of the last step, unclipped, for a network with an LSTM; by default 0.
          exploration: in the algorithm's own measure; for Ape-X and IMPALA the probability of a random action.
        Raises: ValueError when the observation is of another space, the number of environments changes, or it is not
          that of `starts` or `rewards`.
        """
        found, is_one = self._observations(_in_dtypes(self.observation_space, observation))
        if not all(map(self.observation_space.contains, found)):  # which environments may leave in training, too
            warnings.warn(f"an observation is out of bounds: {self._needed}", stacklevel=3)  # behind `usual_defaults`
        frames = np.stack([self._present(one) for one in found])
        if self._state is None:
            self._state = self._actor.initial_state(len(frames))
            self._num_envs, first = len(frames), np.ones(len(frames), bool)
        else:
            first = np.zeros(len(frames), bool)
        if len(frames) != self._num_envs:
            raise ValueError(f"{len(frames)} observations came, {self._num_envs} before: say reset() in between")
        first = first if starts is None else first | exactly(starts, np.bool_, first.shape)
        last = np.zeros(len(frames), np.float32) if rewards is None else exactly(rewards, np.float32, first.shape)
        seen = Observation(frames, first, np.sign(last) if self._clips_rewards else last)
        actions, _, self._state = self._actor.act(seen, np.full(len(frames), exploration), self._state, self._rng)
        bounds = self.spec.action_bounds
        actions = self._actions.taken(clipped(actions, bounds) if bounds else actions)
        return actions[0] if is_one else actions

    def _observations(self, given: Any) -> tuple[list[Any], bool]:
        """Returns the observations that were given, and whether that is one alone: in another form, as training has."""
        if self._boundless.contains(given):
            return [given], True
        count = _count(self._boundless, given)
        if count and (batched := batch_space(self._boundless, count)).contains(given):
            return list(iterate(batched, given)), False
        with contextlib.suppress(UnfitError):
            if self._boundless.contains(one := fitted(self._boundless, given)):
                return [one], True
        raise ValueError(f"neither an observation of {self.observation_space} nor a batch of them: {self._needed}")


def load(path: str | Path, trust: bool = False, which: Which = "best") -> Agent:
    """Returns the agent of a run, with its best network or its latest, or of one of its checkpoints.

    Printed, it says which network it has, and the games by which that was evaluated.

    Args:
      path: a run's directory, or a checkpoint in one. A checkpoint alone knows its environment, arguments, wrappers and
        pictures, no other flags: episodes last to the limit with which the environment is registered.
      trust: import the modules of environment, wrappers, algorithm and network that its files name, also those that
        your program has not imported. Their code runs here.
      which: of a run; "best" is the network with the best evaluation, of equal ones the newest.
    Raises: ConfigError or WireError when there is none that can be read, or it names modules that are not trusted.
    """
    directory, file = found_checkpoint(Path(path), which)
    checkpoint = load_checkpoint(file)
    network = f"{file}, {network_words(directory, checkpoint.header.counters.updates)}"
    trusted = Trust(is_blind=trust, cure="load(..., trust=True), or import it before")
    return Agent(checkpoint, played(directory, checkpoint.header, trusted), network)


def _boundless(space: gymnasium.Space) -> gymnasium.Space:
    """Returns a space whose boxes have the bounds of their types."""
    if isinstance(space, Dict):
        return Dict({key: _boundless(inner) for key, inner in space.items()})
    if isinstance(space, Tuple):
        return Tuple(map(_boundless, space))
    if isinstance(space, Box) and np.issubdtype(space.dtype, np.floating):
        return Box(-np.inf, np.inf, space.shape, space.dtype.type)
    if isinstance(space, Box) and np.issubdtype(space.dtype, np.integer):
        limits = np.iinfo(space.dtype)
        return Box(limits.min, limits.max, space.shape, space.dtype.type)
    return space


def _count(space: gymnasium.Space, batch: Any) -> int:
    """Returns how many observations of a space a batch may have; 0 where it is none."""
    if isinstance(space, Dict):
        shared = [key for key in space if isinstance(batch, Mapping) and key in batch]
        return _count(space[shared[0]], batch[shared[0]]) if shared else 0
    if isinstance(space, Tuple):
        return _count(space[0], batch[0]) if isinstance(batch, tuple) and batch and len(space) else 0
    return len(batch) if isinstance(batch, list | tuple) or np.ndim(batch) else 0


def _in_dtypes(space: gymnasium.Space, observation: Any) -> Any:
    """Returns an observation, or a batch of them, whose boxes have the types of their spaces, as training holds them.

    Numbers that this would change by more than their precision stay as they are.
    """
    if isinstance(space, Dict) and isinstance(observation, Mapping) and observation.keys() == space.keys():
        return {key: _in_dtypes(inner, observation[key]) for key, inner in space.items()}
    if isinstance(space, Tuple) and isinstance(observation, tuple) and len(observation) == len(space):
        return tuple(map(_in_dtypes, space, observation))
    try:
        array = np.asarray(observation) if isinstance(space, Box) else np.asarray(None)
    except ValueError:  # of several shapes, such as what `reset` returns
        return np.asarray(None)
    if array.dtype.kind not in "biuf":
        return observation
    with np.errstate(invalid="ignore"):
        cast = array.astype(space.dtype)
    return cast if np.can_cast(array.dtype, cast.dtype, "same_kind") or np.array_equal(cast, array) else observation


def _check_same(frames: Box, actions: Actions, spec: EnvironmentSpec) -> None:
    """Raises ConfigError when the frames or the actions of an environment are not those of a checkpoint."""
    dtype = "uint8" if frames.dtype == np.uint8 else "float32"
    found = frames.shape, dtype, actions.num, actions.bounds
    if found != (spec.frame_shape, spec.frame_dtype, spec.num_actions, spec.action_bounds):
        learned = spec.action_bounds or f"{spec.num_actions} numbers"
        raise ConfigError(
            f"environment {spec.env!r} has frames {frames.shape} of {dtype} and actions {actions.space}; the agent "
            f"learned with frames {spec.frame_shape} of {spec.frame_dtype} and actions {learned}: give it the "
            "environment that it was trained on"
        )
