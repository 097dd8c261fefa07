"""Whole games out of a journal, as a dataset of Minari. Minari is an optional package.

An observation is the newest frame of the agent's stack. Rewards are those that were learned from: for Atari, their
signs unless --clip-rewards was no. Actions are those that the environment takes, in its own space, where it can be
made; else they are as the log holds them, which the description of the dataset says. Resets are left out, and so are
games of which steps are missing: the oldest were evicted, or the newest were not played.
"""

import contextlib
import itertools
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from apexrl.environments.actions import Actions
from apexrl.errors import ConfigError, WireError
from apexrl.net import wire
from apexrl.own_modules import Trust
from apexrl.replay.segment import Entry
from apexrl.running.environment_actions import actions_of
from apexrl.running.run_directory import environment_of
from apexrl.streams import SeenSteps, Stream
from apexrl.types import StreamSpec
from apexrl.unroll import UnrollCodec


class Game(NamedTuple):
    """N steps, from the first observation of a game to its last."""

    observations: np.ndarray  # [N + 1, *frame]: the newest frame of each
    actions: np.ndarray  # [N] int32, or [N, action size] float32, as agents have them
    rewards: np.ndarray  # [N] float32, as they were learned from
    terminations: np.ndarray  # [N] bool: the last step, and those whose lost life ended an episode for the learner
    truncations: np.ndarray  # [N] bool: the last step of a game that was cut off


class _Piece(NamedTuple):
    """Some steps of an unroll. It is kept compressed while its game has not ended."""

    block: bytes
    first: int
    end: int


class GameReader:
    """Joins the unrolls of each stream, and gives its games."""

    def __init__(self, spec: StreamSpec):
        self._spec = spec
        self._codec = UnrollCodec(spec)
        self._seen = SeenSteps(spec.unroll_steps)
        self._pieces: dict[Stream, list[_Piece] | None] = {}  # of the current game; None: its first steps are missing

    def games(self, entries: Iterable[Entry]) -> Iterator[Game]:
        """Yields the whole games in the unrolls of a journal, in the order of their ends."""
        for entry in entries:
            try:
                insert, starts = wire.decode_insert(entry.message), self._codec.decode(entry.block).starts
            except WireError:
                continue  # its steps are missing, like those of an unroll that is not there
            stream = insert.actor, insert.stream
            first = self._seen.known(stream, insert.first_step)
            if first is None:
                first, self._pieces[stream] = 0, [] if starts[0] else None
            pieces = self._pieces[stream]
            for reset in np.flatnonzero(starts[1:]):
                if reset < first:
                    continue
                if pieces is not None and (pieces or reset > first):
                    yield self._game([*pieces, _Piece(entry.block, first, int(reset))])
                pieces, first = [], int(reset) + 1
            if pieces is not None and first < self._spec.unroll_steps:
                pieces.append(_Piece(entry.block, first, self._spec.unroll_steps))
            self._pieces[stream] = pieces

    def _game(self, pieces: list[_Piece]) -> Game:
        stacked = self._spec.stacked_frames
        unrolls = [(self._codec.decode(piece.block), slice(piece.first, piece.end)) for piece in pieces]
        first = unrolls[0][0].frames[None, stacked - 1 + pieces[0].first]
        following = [unroll.frames[stacked + steps.start : stacked + steps.stop] for unroll, steps in unrolls]
        ended = np.concatenate([unroll.discounts[steps] for unroll, steps in unrolls]) == 0
        truncations = np.zeros(len(ended), bool)
        truncations[-1] = not ended[-1]
        return Game(
            np.concatenate([first, *following]),
            np.concatenate([unroll.actions[steps] for unroll, steps in unrolls]),
            np.concatenate([unroll.rewards[steps] for unroll, steps in unrolls]),
            ended,
            truncations,
        )


def export_games(journal: Path, entries: Iterable[Entry], spec: StreamSpec, out: Path, trust: Trust) -> list[str]:
    """Writes whole games of a journal with the actions that its environment takes, if it can be made; returns lines.

    Raises: as `write_dataset`.
    """
    actions, lines = None, list[str]()
    try:
        actions = actions_of(environment_of(journal, spec, trust), spec)
    except ConfigError as error:
        lines = [f"its actions are numbered as agents have them, and the environment may take others: {error}"]
    return [write_dataset(entries, spec, out, actions), *lines]


def write_dataset(entries: Iterable[Entry], spec: StreamSpec, out: Path, actions: Actions | None = None) -> str:
    """Writes the whole games in the unrolls of a journal; returns a line about them.

    Args:
      out: the new directory of the dataset; its name is the dataset's id. It is there when the dataset is whole.
      actions: of the environment; None: they are written as the log holds them.
    Raises: ConfigError when Minari does not take that name, or there is no whole game; OSError when the disk does not
      take the dataset.
    """
    from minari.dataset.minari_dataset import parse_dataset_id  # noqa: PLC0415 - optional

    try:
        parse_dataset_id(out.name)
    except (ValueError, TypeError) as error:  # TypeError: a name without -vN
        raise ConfigError(f"{out}: the directory's name is the dataset's id: NAME-vN, such as catch-v0") from error
    with made_whole(out) as partial:
        games = GameReader(spec).games(entries)
        if (first := next(games, None)) is None:
            raise ConfigError("the journal holds no whole game")
        written = _write(itertools.chain([first], games), spec, actions, partial / "data", out.name)
    return f"{out}: {written}"


@contextlib.contextmanager
def made_whole(out: Path) -> Iterator[Path]:
    """Yields the path of a directory to be made, which becomes `out` at the end; where something fails, nothing stays.

    Raises: ConfigError when `out` is there.
    """
    if out.exists():
        raise ConfigError(f"{out} is there already: give another name")
    partial = out.resolve().with_name(f"{out.name}.partial")  # Minari joins a relative path twice
    shutil.rmtree(partial, ignore_errors=True)  # of a program that was killed
    try:
        yield partial
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write(games: Iterable[Game], spec: StreamSpec, actions: Actions | None, data: Path, name: str) -> str:
    """Writes a dataset into a new directory; returns a line about it."""
    import minari  # noqa: PLC0415 - optional
    from minari.data_collector import EpisodeBuffer  # noqa: PLC0415
    from minari.dataset.minari_storage import MinariStorage  # noqa: PLC0415

    data.mkdir(parents=True)
    storage = MinariStorage.new(data, *_spaces(spec, actions), jpeg_encoding=False)
    returns = []

    def episodes() -> Iterator[EpisodeBuffer]:
        for number, game in enumerate(games):
            returns.append(float(game.rewards.sum()))
            taken = game.actions if actions is None else actions.taken(game.actions)
            yield EpisodeBuffer(id=number, **game._replace(actions=taken)._asdict())

    storage.update_episodes(episodes())
    own = "actions as the environment takes them"
    if actions is None:
        own = "actions as apexrl's agents number them, which may be others than the environment takes"
    about = f"Games of {spec.env} from a journal of apexrl: newest frames, rewards as they were learned from, {own}."
    storage.update_metadata({"dataset_id": name, "minari_version": minari.__version__, "description": about})
    return f"{len(returns)} games of {storage.total_steps} steps, mean return {np.mean(returns):.4g}"


def _spaces(spec: StreamSpec, actions: Actions | None) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
    """Returns the spaces of observations and actions."""
    low, high = (0, 255) if spec.frame_dtype == "uint8" else (-np.inf, np.inf)
    frames = spaces.Box(low, high, spec.frame_shape, np.dtype(spec.frame_dtype).type)
    if actions is not None:
        return frames, actions.space
    if spec.num_actions:
        return frames, spaces.Discrete(spec.num_actions)
    bounds = np.array(spec.action_bounds, np.float32)
    return frames, spaces.Box(bounds[:, 0], bounds[:, 1])
