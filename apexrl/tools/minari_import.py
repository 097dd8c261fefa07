"""A dataset of Minari as a journal: its games as one stream, as an actor would have recorded them.

Local files alone are read, one episode after the other, and no module that they name is imported. Infos are left out.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import msgspec
import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector.utils import batch_space, iterate

from apexrl.casts import exactly
from apexrl.config.sections import EnvConfig, WireConfig
from apexrl.environments.actions import Actions
from apexrl.environments.masks import INFO
from apexrl.environments.observations import presenter
from apexrl.environments.vector import clips_rewards
from apexrl.errors import ConfigError, named
from apexrl.files import read_whole
from apexrl.learning.experience.journal_client import agents_for, recorded_stream
from apexrl.losses.windows import valid_starts
from apexrl.memory import free_memory_bytes
from apexrl.net import wire
from apexrl.net.insert_checks import why_impossible, why_too_large
from apexrl.own_modules import NOBODY
from apexrl.replay.journal import Journal, new_identity, sync
from apexrl.replay.priority_table import drawable
from apexrl.running.environment_look import look_at
from apexrl.tools.minari_export import Game, made_whole
from apexrl.types import Episode, StreamSpec, TimeSteps, UnrollHeader
from apexrl.unroll import UnrollBuilder, UnrollCodec

ACTOR, NO_VERSION = "minari", -1
SYNCED_BYTES = 2**28
MEMORY_SHARE = 0.25  # of the free memory, for one array of an episode


class Metadata(msgspec.Struct):
    """The part of `metadata.json` that is needed. Without spaces Minari would make the environment that it names."""

    data_format: str
    minari_version: str
    total_episodes: int
    observation_space: str
    action_space: str
    env_spec: str = "{}"


class _EnvSpec(msgspec.Struct):
    """The environment that made a dataset."""

    id: str = ""
    kwargs: dict[str, Any] = {}


class _Recorded(gymnasium.Env):
    """Stands for the environment of recorded steps, of which nothing but their spaces is known."""

    def __init__(self, storage: Any):
        self.observation_space, self.action_space = storage.observation_space, storage.action_space


def write_journal(source: Path, out: Path, asked: EnvConfig, agent: str) -> str:
    """Writes the games of a dataset as a journal; returns a line about it.

    Args:
      source: a directory, or the id of a dataset among Minari's own on this machine.
      out: the new directory of the journal. It is there when the journal is whole.
      asked: the environment; without an id, the one that the dataset names.
      agent: whose unrolls are written; "": those of the first algorithm that can learn from them.
    Raises: ConfigError when there is no such dataset, it is damaged, or is none of the environment, or when no
      algorithm can learn from it; JournalError when the disk does not take the journal.
    """
    data = _data_of(source)
    with named(str(data)):
        metadata = msgspec.json.decode(read_whole(data / "metadata.json"), type=Metadata)
    config = _config_of(metadata, asked, data)
    environment, _ = look_at(config, WireConfig().patience_seconds)
    spec = recorded_stream(agent, environment)
    while spec.unroll_starts > 1 and why_too_large(spec):
        spec = msgspec.structs.replace(spec, unroll_starts=spec.unroll_starts // 2)
    if fault := why_impossible(spec):
        raise ConfigError(f"{data}: {fault}")
    with made_whole(out) as partial:
        partial.mkdir(parents=True)
        writer = _Writer(partial, spec, clips_rewards(config))
        with contextlib.closing(writer), named(str(data)):
            for game in _games(data, metadata, config, spec):
                writer.add(game)
            writer.end()
    agents = " or ".join(agents_for(spec))
    return f"{out}: {writer.text}; --from-journal {out} learns from it, with --agent {agents}"


def _data_of(source: Path) -> Path:
    """Returns the directory of a dataset's files."""
    from minari.storage.datasets_root_dir import get_dataset_path  # noqa: PLC0415 - optional

    own = get_dataset_path(str(source))
    for place in (source / "data", source, own / "data"):
        if (place / "metadata.json").is_file():
            return place
    raise ConfigError(
        f"{source} is no dataset of Minari: neither it nor {own} has data/metadata.json; `minari download` brings one"
    )


def _config_of(metadata: Metadata, asked: EnvConfig, data: Path) -> EnvConfig:
    """Returns the environment that was asked for, else the one that the dataset names.

    Raises: ConfigError when there is none, or its id names a module that nobody has asked for.
    """
    if asked.env:
        return asked
    with named(f"{data / 'metadata.json'}: env_spec"):
        spec = msgspec.json.decode(metadata.env_spec, type=_EnvSpec)
    if not spec.id:
        raise ConfigError(f"{data} does not name its environment: give --env ID")
    NOBODY._replace(cure=f"--env {spec.id}").check(data, env=spec.id)
    kwargs = asked.env_kwargs or (json.dumps(spec.kwargs) if spec.kwargs else "")
    return dataclasses.replace(asked, env=spec.id, env_kwargs=kwargs)


def _games(data: Path, metadata: Metadata, config: EnvConfig, spec: StreamSpec) -> Iterator[Game]:
    """Yields the games of a dataset, with their own rewards.

    Raises: ConfigError when the dataset is damaged, or none of the environment.
    """
    from minari import supported_dataset_versions  # noqa: PLC0415 - optional
    from minari.dataset.minari_storage import MinariStorage  # noqa: PLC0415

    with named(str(data)):
        if metadata.minari_version not in supported_dataset_versions:
            raise ConfigError(f"{data} is of version {metadata.minari_version}, which the installed Minari cannot read")
        storage = MinariStorage.read(data)
        _check_sizes(data / "main_data.hdf5")
        framed, acted = _frames_of(storage, config, spec), _actions_of(storage, config, spec)
        episodes = iter(storage.get_episodes(range(metadata.total_episodes)))
    for number in range(metadata.total_episodes):
        with named(f"{data}: episode {number}"):
            found = next(episodes)
            length = len(found["rewards"])
            rewards = exactly(found["rewards"], np.float32, (length,))
            ends = (exactly(found[name], np.bool_, (length,)) for name in ("terminations", "truncations"))
            game = Game(framed(found["observations"]), acted(found["actions"]), rewards, *ends)
            if not length or (len(game.observations), len(game.actions)) != (length + 1, length):
                counts = f"{len(game.observations)} observations, {len(game.actions)} actions and {length} rewards"
                raise ConfigError(f"{data}: episode {number} has {counts}")
            if game.truncations[:-1].any():
                raise ConfigError(f"{data}: episode {number} is truncated before its end")
        yield game
    if not metadata.total_episodes:
        raise ConfigError(f"{data} holds no episode")


def _check_sizes(path: Path) -> None:
    """Raises ConfigError when an array of an HDF5 file is larger than memory; a compressed one may be of any size."""
    if not path.exists():
        return
    import h5py  # noqa: PLC0415 - optional

    most = MEMORY_SHARE * free_memory_bytes()

    def check(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and item.nbytes > most:
            raise ConfigError(f"{path}: {name} has {item.nbytes / 1e9:.1f} GB, {most / 1e9:.1f} GB are the most here")

    with h5py.File(path, "r") as file:
        file.visititems(check)


def _frames_of(storage: Any, config: EnvConfig, spec: StreamSpec) -> Callable[[Any], np.ndarray]:
    """Returns the frames [N + 1, *frame] that an agent sees of the observations of a game.

    Raises: ConfigError when they are none of the environment.
    """
    present: Callable[[Any], np.ndarray] | None = None
    shown = space = storage.observation_space
    if space.shape != spec.frame_shape or not isinstance(space, Box):  # else they are frames already
        if config.action_mask.startswith(INFO):
            raise ConfigError(f"--action-mask {config.action_mask} is in infos, which are not read from a dataset")
        shown, present = presenter(_Recorded(storage), config)
    dtype = "uint8" if shown.dtype == np.uint8 else "float32"
    if (shown.shape, dtype) != (spec.frame_shape, spec.frame_dtype):
        raise ConfigError(
            f"the dataset's observations become frames {shown.shape} of {dtype}, and those of {spec.env} are "
            f"{spec.frame_shape} of {spec.frame_dtype}"
        )

    def frames(observations: Any) -> np.ndarray:
        if present is None:
            return exactly(observations, spec.frame_dtype, (len(observations), *spec.frame_shape))
        first = observations
        while isinstance(first, dict | tuple):
            first = next(iter(first.values() if isinstance(first, dict) else first))
        steps = iterate(batch_space(space, len(first)), observations)
        return np.stack([present(observation) for observation in steps])

    return frames


def _actions_of(storage: Any, config: EnvConfig, spec: StreamSpec) -> Callable[[Any], np.ndarray]:
    """Returns the actions as agents have them, of those of a game.

    Raises: ConfigError when they are none of the environment.
    """
    own = Actions(config.env, storage.action_space)
    bounds, expected = np.array(own.bounds, np.float32), np.array(spec.action_bounds, np.float32)
    if own.num != spec.num_actions or not np.array_equal(bounds, expected):
        theirs = spec.action_bounds or f"Discrete({spec.num_actions})"
        raise ConfigError(f"the dataset has actions {storage.action_space}, and {spec.env} has {theirs}")
    return own.had


class _Writer:
    """Writes games into a new journal, one after the other, as one stream of one actor."""

    def __init__(self, directory: Path, spec: StreamSpec, clips: bool):
        self._spec, self._clips = spec, clips
        self._journal, self._codec = Journal(directory, new_identity(spec)), UnrollCodec(spec)
        self._builder: UnrollBuilder | None = None
        self._last = np.zeros(0)  # the last frame
        self._steps = self._unrolls = 0
        self._games: list[Episode] = []  # that ended since the last unroll
        self._returns: list[float] = []
        self._played = 0  # steps of games

    @property
    def text(self) -> str:
        """The games and unrolls that were written, in words."""
        mean = np.mean(self._returns)
        return f"{len(self._returns)} games of {self._played} steps, mean return {mean:.4g}, in {self._unrolls} unrolls"

    def add(self, game: Game) -> None:
        """Writes a game."""
        if self._builder is None:
            self._builder = UnrollBuilder(self._spec, game.observations[:1])
        else:
            self._reset(game.observations[0])
        learned = np.sign(game.rewards) if self._clips else game.rewards
        for t in range(len(learned)):
            self._step(game.actions[t], game.observations[t + 1], learned[t], game.terminations[t])
        self._last, self._action = game.observations[-1], game.actions[-1]
        self._played += len(learned)
        self._returns.append(float(game.rewards.sum(dtype=np.float64)))
        self._games.append(Episode(self._returns[-1], len(learned), 0.0))

    def end(self) -> None:
        """Fills the last unroll up with resets, of which the first ends the last game."""
        needed = self._steps + 1
        while not self._unrolls or self._unrolls * self._spec.unroll_starts + self._spec.overlap_steps < needed:
            self._reset(self._last)
            self._complete()

    def close(self) -> None:
        """Waits until the disk has all."""
        self._journal.close()

    def _reset(self, frame: np.ndarray) -> None:
        """The step that begins a game: its action is ignored."""
        self._step(self._action, frame, 0.0, False, True)

    def _step(self, action: Any, frame: np.ndarray, reward: float, terminated: bool, starts: bool = False) -> None:
        assert self._builder is not None
        self._complete()
        rewards, discounts = np.array([reward], np.float32), np.array([not terminated], np.float32)
        no_game = np.zeros(1), np.zeros(1, np.int64)
        self._builder.add(
            np.asarray(action)[None], TimeSteps(frame[None], rewards, discounts, np.array([starts]), *no_game)
        )
        self._steps += 1

    def _complete(self) -> None:
        """Writes an unroll where one is complete."""
        assert self._builder is not None
        if (complete := self._builder.observe({})) is None:
            return
        unroll, spec = complete[0].stream(0), self._spec
        valid = valid_starts(unroll.starts, spec.unroll_starts)
        priorities = drawable(valid[None], np.ones((1, spec.num_priorities)))[0].astype(np.float32)
        first = self._unrolls * spec.unroll_starts
        header = UnrollHeader(0, first, NO_VERSION, 0.0, valid, priorities, tuple(self._games))
        message = wire.encode(wire.Insert.of(header, self._unrolls, ACTOR))
        self._journal.append(self._unrolls, [(message, self._codec.encode(unroll))])
        self._unrolls, self._games = self._unrolls + 1, []
        if self._journal.unsynced_bytes > SYNCED_BYTES:  # its files stay open until they are synced
            sync(self._journal.take_unsynced())
            self._journal.synced()
