"""Datasets of Minari as journals: against the games that were exported, and those that were played without us."""

import contextlib
import json
import re
import sys

import gymnasium
import h5py
import msgspec
import numpy as np
import pytest
from minari.data_collector import EpisodeBuffer
from minari.dataset.minari_storage import MinariStorage

from apexrl.config.sections import EnvConfig
from apexrl.environments.vector import make_environment
from apexrl.errors import ConfigError
from apexrl.learning.experience.journal_client import agents_for, check_usable, recorded_stream
from apexrl.replay.journal import identity_of, read_entries
from apexrl.tools import minari_import
from apexrl.tools.minari_export import GameReader, write_dataset
from apexrl.tools.minari_import import write_journal
from apexrl.types import Field
from tests.learning.experience.test_journal_client import client_of, read
from tests.tools.test_minari_export import played
from tests.tools.test_replay_tool import tool

FILE = "data/main_data.hdf5"
ROUND_TRIPS = [
    EnvConfig("Catch-v0", frame_stack=3),
    EnvConfig("Catch-v0", max_episode_frames=5, frame_stack=3),
    EnvConfig("CartPole-v1", frame_stack=3),
]


def games_of(directory):
    return list(GameReader(identity_of(directory).spec).games(read_entries(directory)))


def assert_equal(found, expected):
    assert len(found) == len(expected) > 0
    for game, twin in zip(found, expected, strict=True):
        for name in game._fields:
            np.testing.assert_array_equal(getattr(game, name), getattr(twin, name), err_msg=name)


def random_games(env_id, num_games, seed=0):
    """Plays random games; returns the spaces, and buffers as Minari's collector makes them."""
    env, buffers = gymnasium.make(env_id), []
    env.action_space.seed(seed)
    for number in range(num_games):
        observation, info = env.reset(seed=seed + number)
        observations, steps, is_over = [observation], [], False
        while not is_over:
            action = env.action_space.sample(info.get("action_mask"))
            observation, reward, terminated, truncated, info = env.step(action)
            observations.append(observation)
            steps.append((action, float(reward), terminated, truncated))
            is_over = terminated or truncated
        if isinstance(observation, tuple):
            observations = tuple(np.array(part) for part in zip(*observations, strict=True))
        elif isinstance(observation, dict):
            observations = {key: np.array([parts[key] for parts in observations]) for key in observation}
        else:
            observations = np.array(observations)
        actions, rewards, terminations, truncations = map(np.array, zip(*steps, strict=True))
        buffers.append(EpisodeBuffer(number, None, None, observations, actions, rewards, terminations, truncations))
    return env, buffers


def dataset_of(directory, env, buffers, names_environment=False):
    directory.mkdir()
    spec = env.spec if names_environment else None
    storage = MinariStorage.new(directory / "data", env.observation_space, env.action_space, spec)
    storage.update_episodes(buffers)
    storage.update_metadata({"dataset_id": directory.name, "minari_version": "0.5.3"})
    return directory


def change(dataset, **metadata):
    """Changes entries of a dataset's metadata; those that are None go."""
    path = dataset / "data" / "metadata.json"
    changed = json.loads(path.read_text()) | metadata
    path.write_text(json.dumps({name: value for name, value in changed.items() if value is not None}))


@pytest.mark.parametrize("config", ROUND_TRIPS, ids=["catch", "cut", "cartpole"])
def test_an_exported_journal_comes_back_and_goes_out_again_as_it_was(config, tmp_path):
    spec, _, entries = played(config)
    write_dataset(entries, spec, tmp_path / "first-v0")
    text = write_journal(tmp_path / "first-v0", tmp_path / "journal", config, "")
    expected = list(GameReader(spec).games(entries))
    assert_equal(games_of(tmp_path / "journal"), expected)
    assert f"{len(expected)} games of {sum(len(game.rewards) for game in expected)} steps" in text
    assert f"--from-journal {tmp_path / 'journal'} learns from it, with --agent apex-dqn or pqn" in text
    found = identity_of(tmp_path / "journal").spec
    assert found.stacked_frames == 3 and found == recorded_stream("apex-dqn", spec)
    assert tool("verify", tmp_path / "journal", "--decode")[0] == 0
    status, text = tool("export", "--format", "minari", tmp_path / "journal", "--out", tmp_path / "second-v0")
    assert status == 0, text
    files = (h5py.File(tmp_path / name / FILE) for name in ("first-v0", "second-v0"))
    with contextlib.ExitStack() as opened:
        first, second = map(opened.enter_context, files)
        assert set(first) == set(second)
        for name in first:
            for field in first[name]:
                np.testing.assert_array_equal(first[name][field], second[name][field])


def test_vectors_of_actions_are_those_of_the_dataset_and_learned_from(tmp_path):
    env, buffers = random_games("Pendulum-v1", 3)
    dataset_of(tmp_path / "pendulum-v0", env, buffers, names_environment=True)
    status, text = tool("import", tmp_path / "pendulum-v0", "--out", tmp_path / "journal", "--agent", "sac")
    assert status == 0 and "with --agent apex-dpg or sac" in text, text
    games = games_of(tmp_path / "journal")
    for game, buffer in zip(games, buffers, strict=True):
        np.testing.assert_array_equal(game.observations, buffer.observations)
        np.testing.assert_allclose(game.rewards, buffer.rewards, rtol=1e-6)
        np.testing.assert_array_equal(game.actions, buffer.actions)
        assert not game.terminations.any() and game.truncations.tolist() == [False] * 199 + [True]
    config = EnvConfig("Pendulum-v1")
    envs = make_environment(config, 1)
    stream = recorded_stream("sac", envs.spec)
    assert identity_of(tmp_path / "journal").spec == stream
    client = client_of(tmp_path / "journal", stream)
    _, appends, batch = read(client)
    headers = [append.insert.header(stream.unroll_starts) for append in appends]
    assert sum(int(header.valid.sum()) for header in headers) == 600 and len(batch.sample.keys) == 4
    played_games = [game for header in headers for game in header.episodes]
    assert [game.steps for game in played_games] == [200] * 3
    assert [game.episode_return for game in played_games] == pytest.approx([b.rewards.sum() for b in buffers], rel=1e-5)


@pytest.mark.parametrize("env_id", ["Blackjack-v1", "FrozenLake-v1"])
def test_observations_become_the_frames_that_an_agent_sees(env_id, tmp_path):
    env, buffers = random_games(env_id, 40)
    dataset_of(tmp_path / "games-v0", env, buffers)
    write_journal(tmp_path / "games-v0" / "data", tmp_path / "journal", EnvConfig(env_id), "pqn")
    games = games_of(tmp_path / "journal")
    for game, buffer in zip(games, buffers, strict=True):
        parts = buffer.observations
        steps = zip(*parts, strict=True) if isinstance(parts, tuple) else parts
        flat = [gymnasium.spaces.flatten(env.observation_space, step) for step in steps]
        np.testing.assert_array_equal(game.observations, np.float32(flat))
        np.testing.assert_array_equal(game.actions, buffer.actions)
        np.testing.assert_array_equal(game.terminations, buffer.terminations)


def test_a_mask_among_the_parts_of_observations_is_one_again(tmp_path):
    env_id = "tests.environments.masked_envs:Doors-v0"
    env, buffers = random_games(env_id, 5)
    dataset_of(tmp_path / "games-v0", env, buffers)
    masked = EnvConfig(env_id, action_mask="action_mask")
    write_journal(tmp_path / "games-v0", tmp_path / "journal", masked, "apex-dqn")
    with contextlib.closing(make_environment(masked, 1)) as envs:
        assert identity_of(tmp_path / "journal").spec.mask_size == envs.spec.mask_size > 0
    for game, buffer in zip(games_of(tmp_path / "journal"), buffers, strict=True):
        masks = buffer.observations["action_mask"]
        np.testing.assert_array_equal(game.observations[:, -masks.shape[1] :], masks)
    of_infos = EnvConfig(env_id, action_mask="info:action_mask")
    with pytest.raises(ConfigError, match="--action-mask info:action_mask is in infos, which are not read"):
        write_journal(tmp_path / "games-v0", tmp_path / "other", of_infos, "apex-dqn")


@pytest.mark.parametrize("overlap", [0, 3, 30])
def test_the_last_step_is_kept_whatever_the_lengths(overlap, tmp_path, monkeypatch):
    env, buffers = random_games("Blackjack-v1", 7)
    dataset_of(tmp_path / "games-v0", env, buffers)
    monkeypatch.setattr(
        "apexrl.tools.minari_import.recorded_stream", lambda agent, environment: environment.streamed(9, overlap)
    )
    for number in range(1, 4):
        change(tmp_path / "games-v0", total_episodes=number)
        write_journal(tmp_path / "games-v0", tmp_path / f"journal-{number}", EnvConfig("Blackjack-v1"), "")
        assert [len(game.rewards) for game in games_of(tmp_path / f"journal-{number}")] == [
            len(buffer.rewards) for buffer in buffers[:number]
        ]


def test_an_algorithm_that_needs_more_than_steps_is_refused(tmp_path):
    env, buffers = random_games("CartPole-v1", 2)
    dataset_of(tmp_path / "games-v0", env, buffers, names_environment=True)
    for agent, field in (("impala", "behavior_log_probs"), ("r2d2", r"\w+")):
        with pytest.raises(ConfigError, match=f"--agent {agent} cannot .* no field {field}.*; apex-dqn and pqn"):
            write_journal(tmp_path / "games-v0", tmp_path / "journal", EnvConfig(env=""), agent)
    assert not (tmp_path / "journal").exists()
    write_journal(tmp_path / "games-v0", tmp_path / "journal", EnvConfig(env=""), "")
    held = identity_of(tmp_path / "journal").spec
    assert agents_for(held)[:2] == ["apex-dqn", "pqn"]
    wanted = held.streamed(20, 0, (Field("behavior_value", "step", "float16"),))
    with pytest.raises(ConfigError, match=r"no field behavior_value .*; --agent apex-dqn or pqn.* can learn from it"):
        check_usable(tmp_path / "journal", held, wanted)
    with pytest.raises(ConfigError, match=r"its env is CartPole-v1, not Other-v0$"):
        check_usable(tmp_path / "journal", held, msgspec.structs.replace(wanted, env="Other-v0"))
    with pytest.raises(ConfigError, match="is there already"):
        write_journal(tmp_path / "games-v0", tmp_path / "journal", EnvConfig(env=""), "")


def test_a_dataset_of_another_environment_or_of_none_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "own"))
    env, buffers = random_games("CartPole-v1", 2)
    dataset = dataset_of(tmp_path / "games-v0", env, buffers)
    for asked, why in (
        ("", "does not name its environment: give --env ID"),
        ("Pendulum-v1", r"frames \(4,\) of float32, and those of Pendulum-v1 are \(3,\) of float32"),
        ("Catch-v0", r"frames \(4,\) of float32, and those of Catch-v0 are"),
        ("Nothing-v0", "'Nothing-v0'"),
    ):
        status, text = tool("import", dataset, "--out", tmp_path / "journal", "--env", asked)
        assert (status, text.count("\n")) == (2, 1) and re.search(why, text), text
    change(dataset, action_space=json.dumps({"type": "Discrete", "dtype": "int64", "start": 0, "n": 3}))
    status, text = tool("import", dataset, "--out", tmp_path / "journal", "--env", "CartPole-v1")
    assert (status, text.count("\n")) == (2, 1) and "has actions Discrete(3), and CartPole-v1 has Discrete(2)" in text
    status, text = tool("import", "nowhere-v0", "--out", tmp_path / "journal")
    assert (status, text.count("\n")) == (2, 1) and "nowhere-v0 is no dataset of Minari: neither it nor" in text
    assert not (tmp_path / "journal").exists()


def test_an_id_is_one_of_minaris_own_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "own"))
    env, buffers = random_games("CartPole-v1", 2)
    (tmp_path / "own" / "cartpole").mkdir(parents=True)
    dataset_of(tmp_path / "own" / "cartpole" / "random-v0", env, buffers)
    status, text = tool("import", "cartpole/random-v0", "--out", tmp_path / "journal", "--env", "CartPole-v1")
    assert status == 0 and "2 games of" in text, text


def test_the_flags_of_the_environment_are_those_of_training(tmp_path, monkeypatch):
    configs = []
    monkeypatch.setattr(minari_import, "write_journal", lambda source, out, config, agent: configs.append(config) or "")
    command = "import", "games-v0", "--out", tmp_path / "journal"
    wrappers = "--wrapper", "a:One", "--wrapper=b:Two"
    assert tool(*command, "--env", "Catch-v0", "--max-episode-frames", "1e3", *wrappers)[0] == 0
    assert configs == [EnvConfig("Catch-v0", max_episode_frames=1000, wrapper=("a:One", "b:Two"))]
    for flag, number in (("--max-episode-frames", "-5"), ("--repeat-action-probability", "nan")):
        status, text = tool(*command, flag, number)
        assert (status, len(configs)) == (2, 1) and f"{flag} {number} makes no sense" in text


def test_no_module_that_a_dataset_names_is_imported(tmp_path):
    env, buffers = random_games("CartPole-v1", 1)
    dataset = dataset_of(tmp_path / "games-v0", env, buffers, names_environment=True)
    evil = json.loads(env.spec.to_json()) | {"id": "this:Evil-v0", "entry_point": "this:main"}
    change(dataset, env_spec=json.dumps(evil))
    for spaces in ({}, {"observation_space": None}):
        change(dataset, **spaces)
        status, text = tool("import", dataset, "--out", tmp_path / "journal")
        assert (status, text.count("\n")) == (2, 1) and "this" not in sys.modules
        expected = (
            "Object missing required field `observation_space`" if spaces else "names the module this .*say --env"
        )
        assert re.search(expected, text), text


def games(tmp_path, monkeypatch):
    """Returns a dataset of three games; its environment is not played again by a process of its own."""
    env, buffers = random_games("CartPole-v1", 3)
    config = EnvConfig("CartPole-v1")
    seen = make_environment(config, 1).spec
    monkeypatch.setattr("apexrl.tools.minari_import.look_at", lambda config, patience: (seen, ()))
    return dataset_of(tmp_path / "games-v0", env, buffers)


BROKEN = {
    "a cut file": lambda path: (path / FILE).write_bytes((path / FILE).read_bytes()[:3000]),
    "no file": lambda path: (path / FILE).unlink(),
    "no JSON": lambda path: (path / "data/metadata.json").write_text("{"),
    "another format": lambda path: change(path, data_format="pickle"),
    "no pyarrow": lambda path: change(path, data_format="arrow"),
    "another version": lambda path: change(path, minari_version="9.9"),
    "more episodes than there are": lambda path: change(path, total_episodes=10**15),
    "no episodes": lambda path: change(path, total_episodes=0),
    "a space that is none": lambda path: change(path, observation_space="[]"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_dataset_is_one_line(fault, tmp_path, monkeypatch):
    dataset = games(tmp_path, monkeypatch)
    BROKEN[fault](dataset)
    status, text = tool("import", dataset, "--out", tmp_path / "journal", "--env", "CartPole-v1")
    assert (status, text.count("\n")) == (2, 1) and str(dataset) in text, text
    assert [path.name for path in tmp_path.iterdir()] == ["games-v0"]


def edited(**arrays):
    """Changes arrays of the second episode."""

    def edit(path):
        with h5py.File(path / FILE, "a") as file:
            for name, made in arrays.items():
                array = made(file["episode_1"][name][()])
                del file["episode_1"][name]
                file["episode_1"].create_dataset(name, data=array)

    return edit


def put(place, value):
    """Returns what puts a value into a place of a copy."""
    return lambda array: np.array([value if i == place % len(array) else old for i, old in enumerate(array)])


WRONG = {
    "observations": (edited(observations=lambda array: array[:-1]), r"episode 1 has \d+ observations, \d+ actions"),
    "actions": (edited(actions=lambda array: array[1:]), "episode 1 has .* actions and"),
    "an action": (edited(actions=put(2, 2)), "action outside 0..1"),
    "half an action": (edited(actions=put(2, 0.5)), "episode 1: .*0.5"),
    "a reward": (edited(rewards=put(1, np.nan)), "reward that is not finite"),
    "a frame": (edited(observations=lambda array: array[:, :3]), "episode 1: .*shape"),
    "a frame's number": (edited(observations=lambda array: array * np.inf), "frame that is not finite"),
    "an early end": (edited(truncations=put(1, True)), "episode 1 is truncated before its end"),
    "no steps": (edited(**dict.fromkeys(("actions", "rewards", "terminations", "truncations"), lambda a: a[:0])),
                 "episode 1 has .* 0 rewards"),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_an_episode_that_cannot_be_is_refused(fault, tmp_path, monkeypatch):
    dataset = games(tmp_path, monkeypatch)
    spoil, why = WRONG[fault]
    spoil(dataset)
    status, text = tool("import", dataset, "--out", tmp_path / "journal", "--env", "CartPole-v1")
    assert (status, text.count("\n")) == (2, 1) and re.search(why, text), text
    assert [path.name for path in tmp_path.iterdir()] == ["games-v0"]


def test_an_array_larger_than_memory_is_refused_before_it_is_read(tmp_path, monkeypatch):
    dataset = games(tmp_path, monkeypatch)
    with h5py.File(dataset / FILE, "a") as file:
        file.create_dataset("episode_1/infos/zeros", (2**40,), np.float64, chunks=(2**16,), compression="gzip")
    status, text = tool("import", dataset, "--out", tmp_path / "journal", "--env", "CartPole-v1")
    assert (status, text.count("\n")) == (2, 1) and "episode_1/infos/zeros has 8796.1 GB" in text


def test_without_minari_the_line_has_the_command(tmp_path, monkeypatch):
    for package in ("minari", "h5py"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, package, None)
            status, text = tool("import", tmp_path, "--out", tmp_path / "journal", "--env", "CartPole-v1")
            assert (status, text.count("\n")) == (2, 1)
            assert re.search(rf"{package} is not installed: .*python\S* -m pip install 'minari\[hdf5\]'", text)
