"""Games out of unrolls, against the steps that were played, and against Minari's own reader."""

import contextlib
import re
import sys
from pathlib import Path

import gymnasium
import msgspec
import numpy as np
import pytest
from minari import MinariDataset

from apexrl.agents.families import FAMILIES
from apexrl.bounds import clipped
from apexrl.config.sections import EnvConfig
from apexrl.environments.vector import make_environment, make_game
from apexrl.errors import ConfigError
from apexrl.net import wire
from apexrl.own_modules import NOBODY
from apexrl.replay.journal import Journal, identity_of, new_identity, read_entries
from apexrl.replay.segment import Entry
from apexrl.tools.minari_export import GameReader, export_games, write_dataset
from apexrl.tools.minari_import import write_journal
from apexrl.types import EnvironmentSpec, StreamSpec, StreamUnrolls
from apexrl.unroll import UnrollCodec
from tests.fields import random_unroll
from tests.streams import record
from tests.tools.test_replay_tool import tool

NUM_ENVS, NUM_STEPS = 3, 90
CONFIGS = [EnvConfig("Catch-v0"), EnvConfig("Catch-v0", max_episode_frames=5), EnvConfig("CartPole-v1")]
CHOICES = EnvironmentSpec("Vectors-v0", (4,), "float32", 1, 3, 1)
ARMS = EnvironmentSpec("Arm-v0", (4,), "float32", 1, 0, 1, action_bounds=((-2.0, 2.0), (0.0, 1.0)))


def played(config, starts=8, overlap=3):
    """Returns a spec, the steps of each stream, and the entries of a journal of them."""
    envs = make_environment(config, NUM_ENVS)
    spec = msgspec.structs.replace(envs.spec, stacked_frames=3).streamed(starts, overlap)
    streams, unrolls = record(envs, NUM_ENVS, NUM_STEPS, spec, seed=1)
    envs.close()
    return spec, streams, entries_of(spec, unrolls)


def entries_of(spec: StreamSpec, unrolls: list[StreamUnrolls]):
    codec, entries = UnrollCodec(spec), []
    for i, unroll in enumerate(unrolls):
        for e in range(NUM_ENVS):
            insert = wire.Insert(i, "actor", e, i * spec.unroll_starts, 0, 0.1, b"", b"")
            entries.append(Entry(len(entries), wire.encode(insert), codec.encode(unroll.stream(e))))
    return entries


def slow_games(stream, present):
    """Yields the steps of each game of a stream whose steps, its reset among them, are all present."""
    steps, is_whole = [], True
    for number, step in enumerate(stream):
        is_whole = is_whole and present(number)
        if step.is_reset:
            if is_whole:
                yield steps
            steps, is_whole = [], True  # the first unroll that has the next step says that a game begins
        else:
            steps.append(step)


def assert_game(game, steps):
    expected = [steps[0].observation[-1], *(step.next_observation[-1] for step in steps)]
    np.testing.assert_array_equal(game.observations, expected)
    np.testing.assert_array_equal(game.actions, [step.action for step in steps])
    np.testing.assert_array_equal(game.rewards, np.float32([step.reward for step in steps]))
    assert game.terminations.tolist() == [step.terminated for step in steps]
    assert game.truncations.tolist() == [False] * (len(steps) - 1) + [not steps[-1].terminated]


def assert_games(spec, streams, entries, present):
    games = list(GameReader(spec).games(entries))
    expected = [steps for stream in streams for steps in slow_games(stream, present)]
    assert len(games) == len(expected) > 0
    for steps in expected:  # games come in the order of their ends, those of the streams among each other
        actions = [step.action for step in steps]
        found = next(
            i for i, game in enumerate(games)
            if game.actions.tolist() == actions and (game.observations[0] == steps[0].observation[-1]).all()
        )  # fmt: skip
        assert_game(games.pop(found), steps)


@pytest.mark.parametrize("lengths", [(8, 3), (8, 0), (5, 9), (40, 1)])
@pytest.mark.parametrize("config", CONFIGS)
def test_games_are_those_that_were_played(config, lengths):
    spec, streams, entries = played(config, *lengths)
    num_steps = (len(entries) // NUM_ENVS - 1) * spec.unroll_starts + spec.unroll_steps
    assert_games(spec, streams, entries, lambda number: number < num_steps)


@pytest.mark.parametrize("missing", [{0}, {0, 1}, {4}, {2, 6}])
@pytest.mark.parametrize("config", CONFIGS)
def test_games_of_which_steps_are_missing_are_left_out(config, missing):
    spec, streams, entries = played(config)
    num_unrolls = len(entries) // NUM_ENVS
    held = {
        number * spec.unroll_starts + i
        for number in range(num_unrolls) if number not in missing for i in range(spec.unroll_steps)
    }  # fmt: skip
    damaged = min(missing)
    kept = []
    for i, entry in enumerate(entries):
        if i // NUM_ENVS == damaged:
            kept.append(entry._replace(block=b"damaged"))
        elif i // NUM_ENVS not in missing:
            kept.append(entry)
    assert_games(spec, streams, kept, held.__contains__)


@pytest.mark.parametrize("environment", [CHOICES, ARMS], ids=["choices", "vectors"])
@pytest.mark.parametrize("agent", FAMILIES)
def test_games_are_read_from_the_log_of_each_algorithm(agent, environment):
    family = FAMILIES[agent]
    try:
        spec = family.stream(family.algorithm, environment)
    except ConfigError:  # it is for the other kind of actions
        return
    unroll = random_unroll(spec, 1)
    plain = environment.streamed(spec.unroll_starts, spec.overlap_steps)
    message = wire.encode(wire.Insert(0, "a", 0, 0, 0, 0.1, b"", b""))
    found, expected = (
        list(GameReader(own).games([Entry(0, message, UnrollCodec(own).encode(unroll._replace(extras=extras)))]))
        for own, extras in ((spec, unroll.extras), (plain, {}))
    )
    assert len(found) == len(expected) > 0
    for game, twin in zip(found, expected, strict=True):
        for name in game._fields:
            np.testing.assert_array_equal(getattr(game, name), getattr(twin, name))


@pytest.fixture
def journal(tmp_path):
    spec, streams, entries = played(CONFIGS[0])
    directory = tmp_path / "journal"
    directory.mkdir()
    made = Journal(directory, new_identity(spec))
    made.append(0, [(entry.message, entry.block) for entry in entries])
    made.close()
    return directory, spec, streams, entries


def test_minari_reads_the_dataset(journal, tmp_path):
    directory, spec, _, entries = journal
    status, text = tool("export", "--format", "minari", directory, "--out", tmp_path / "catch-v3")
    assert status == 0, text
    dataset = MinariDataset(tmp_path / "catch-v3" / "data")
    assert (dataset.spec.dataset_id, dataset.spec.version) == ("catch-v3", 3)
    games = list(GameReader(spec).games(entries))
    assert f"{len(games)} games of {sum(len(game.rewards) for game in games)} steps" in text
    assert dataset.total_episodes == len(games) and dataset.total_steps == sum(len(game.rewards) for game in games)
    for episode, game in zip(dataset.iterate_episodes(), games, strict=True):
        for name in game._fields:
            np.testing.assert_array_equal(getattr(episode, name), getattr(game, name))
        assert all(frame in dataset.observation_space for frame in episode.observations)
        assert all(action in dataset.action_space for action in episode.actions)


@pytest.mark.parametrize("out", ["catch-v1", "./sub/catch-v1"])
def test_a_relative_path_is_one_of_the_current_directory(journal, out, tmp_path, monkeypatch):
    directory, spec, _, entries = journal
    monkeypatch.chdir(tmp_path)
    status, text = tool("export", "--format", "minari", directory, "--out", out)
    assert status == 0 and text.startswith(f"{Path(out)}: "), text
    assert MinariDataset(tmp_path / out / "data").total_episodes == len(list(GameReader(spec).games(entries)))


def test_an_export_that_fails_leaves_nothing_and_can_be_made_again(journal, tmp_path):
    _, spec, _, entries = journal

    def failing():
        yield from entries
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_dataset(failing(), spec, tmp_path / "catch-v1")
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]
    (tmp_path / "catch-v1.partial" / "data").mkdir(parents=True)  # an export was killed
    write_dataset(entries, spec, tmp_path / "catch-v1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["catch-v1", "journal"]


def test_pictures_and_actions_of_several_numbers_come_back_exactly(tmp_path):
    spec = StreamSpec("Any-v0", (32, 32), "uint8", 1, 0, 1, ((-1.0, 2.0), (0.0, 4.0)), unroll_starts=3, overlap_steps=0)
    starts = np.array([[True], [False], [False], [True]])
    rng = np.random.default_rng(0)
    actions = rng.random((3, 1, 2)).astype(np.float32)
    frames = rng.integers(0, 256, (4, 1, 32, 32), np.uint8)
    unroll = StreamUnrolls(frames, actions, np.ones((3, 1), np.float32), np.ones((3, 1), np.float32), starts)
    entry = Entry(
        0, wire.encode(wire.Insert(0, "a", 0, 0, 0, 0.1, b"", b"")), UnrollCodec(spec).encode(unroll.stream(0))
    )
    assert write_dataset([entry], spec, tmp_path / "any-v0").endswith(": 1 games of 2 steps, mean return 2")
    dataset = MinariDataset(tmp_path / "any-v0" / "data")
    assert dataset.action_space.low.tolist() == [-1, 0] and dataset.action_space.high.tolist() == [2, 4]
    np.testing.assert_array_equal(dataset[0].actions, actions[:2, 0])
    np.testing.assert_array_equal(dataset[0].observations, frames[:3, 0])  # no JPEG
    assert dataset[0].truncations.tolist() == [False, True]


def recorded(env_id, directory):
    """Writes a journal of random actions; returns the configuration of its environment, its spec and its games."""
    config = EnvConfig(env_id)
    with contextlib.closing(make_environment(config, 1)) as envs:
        spec = envs.spec.streamed(12, 0)
    rng, low_high = np.random.default_rng(0), np.array(spec.action_bounds, np.float32).T
    size = 12, len(spec.action_bounds)
    actions = rng.integers(0, spec.num_actions, 12) if spec.num_actions else rng.uniform(*low_high, size)
    unroll, starts = random_unroll(spec, 0), np.arange(13) % 6 == 0
    own = np.int32(actions) if spec.num_actions else clipped(actions, spec.action_bounds)
    unroll = unroll._replace(actions=own, starts=starts, discounts=np.ones(12, np.float32))
    directory.mkdir()
    message = wire.encode(wire.Insert(0, "a", 0, 0, 0, 0.1, b"", b""))
    entry = Entry(0, message, UnrollCodec(spec).encode(unroll))
    with contextlib.closing(Journal(directory, new_identity(spec))) as journal:
        journal.append(0, [(entry.message, entry.block)])
    return config, spec, list(GameReader(spec).games([entry]))


@pytest.mark.parametrize("env_id", ["Many-actions", "Steps", "Shifted", "Few-switches", "Matrix-actions", "Six"])
def test_actions_are_those_that_the_environment_takes_and_come_back(env_id, tmp_path, monkeypatch):
    config, spec, games = recorded(f"tests.environments.odd_envs:{env_id}-v0", tmp_path / "journal")
    status, text = tool("export", "--format", "minari", tmp_path / "journal", "--out", tmp_path / "own-v0")
    assert status == 0 and text.count("\n") == 1, text
    dataset, space = MinariDataset(tmp_path / "own-v0" / "data"), make_game(config).action_space
    assert dataset.action_space == space and "the environment takes" in dataset.storage.metadata["description"]
    assert len(games) == dataset.total_episodes == 2
    for episode in dataset.iterate_episodes():
        assert all(action in space for action in episode.actions)
    monkeypatch.setattr("apexrl.tools.minari_import.look_at", lambda config, patience: (spec, ()))
    write_journal(tmp_path / "own-v0", tmp_path / "again", config, "")
    again = GameReader(identity_of(tmp_path / "again").spec).games(read_entries(tmp_path / "again"))
    for game, back in zip(games, again, strict=True):
        np.testing.assert_array_equal(game.actions, back.actions)
        assert game.actions.dtype == back.actions.dtype


def test_actions_of_an_environment_that_is_not_here_are_the_agents_and_said_to_be(tmp_path):
    _, spec, games = recorded("tests.environments.odd_envs:Shifted-v0", tmp_path / "journal")
    gone = msgspec.structs.replace(spec, env="nowhere_else:Shifted-v0")
    other = msgspec.structs.replace(spec, num_actions=4)
    for number, (held, why) in enumerate(((gone, "whose code would run here: .* --trust"), (other, "not 4 numbers"))):
        lines = export_games(tmp_path / "journal", read_entries(tmp_path / "journal"), held,
                             tmp_path / f"own-v{number}", NOBODY)  # fmt: skip
        assert len(lines) == 2 and re.search(f"as agents have them.*{why}", lines[1]), lines
        dataset = MinariDataset(tmp_path / f"own-v{number}" / "data")
        assert "as apexrl's agents number them" in dataset.storage.metadata["description"]
        assert dataset.action_space == gymnasium.spaces.Discrete(held.num_actions)
        np.testing.assert_array_equal(dataset[0].actions, games[0].actions)


def test_a_dataset_that_cannot_be_written_is_refused_in_one_line(journal, tmp_path, monkeypatch):
    directory, spec, _, entries = journal
    status, text = tool("export", "--format", "minari", directory, "--out", tmp_path / "catch")
    assert (status, text.count("\n")) == (2, 1) and "catch: the directory's name is the dataset's id: NAME-vN" in text
    with pytest.raises(ConfigError, match="holds no whole game"):
        write_dataset([], spec, tmp_path / "catch-v0")
    (tmp_path / "catch-v0").mkdir()
    with pytest.raises(ConfigError, match="is there already"):
        write_dataset(entries, spec, tmp_path / "catch-v0")
    for package in ("minari", "h5py"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, package, None)
            status, text = tool("export", "--format", "minari", directory, "--out", tmp_path / "catch-v1")
            assert (status, text.count("\n")) == (2, 1)
            assert re.search(rf"{package} is not installed: .*python\S* -m pip install 'minari\[hdf5\]'", text)
