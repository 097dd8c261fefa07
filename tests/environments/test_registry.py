import gymnasium
import pytest

from apexrl.config.sections import EnvConfig
from apexrl.environments.vector import make_environment
from apexrl.errors import ConfigError


@pytest.mark.parametrize("env", ["zoo_like:tictactoe_v3", "zoo_like.tictactoe_v3:env", "zoo_like.parallel_v0:Any-v0"])
def test_several_agents_in_one_environment_are_refused_by_that_name(env, tmp_path, monkeypatch):
    (tmp_path / "zoo_like").mkdir()
    (tmp_path / "zoo_like" / "__init__.py").write_text("from zoo_like import tictactoe_v3\n")
    (tmp_path / "zoo_like" / "tictactoe_v3.py").write_text("def env(): pass\ndef raw_env(): pass\n")
    (tmp_path / "zoo_like" / "parallel_v0.py").write_text("def parallel_env(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"unknown environment '{env}': .*several agents in one environment"):
        make_environment(EnvConfig(env=env), 1)


def test_only_names_of_a_modules_own_package_are_meant(tmp_path, monkeypatch):
    """There is no way to name Atari's games by another module."""
    (tmp_path / "no_games.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"unknown environment 'no_games:TicTacToe3D-v9' .* or module:Id for one of"):
        make_environment(EnvConfig(env="no_games:TicTacToe3D-v9"), 1)


def test_an_installed_package_registers_the_ids_that_it_announces(tmp_path, monkeypatch):
    (tmp_path / "little_games.py").write_text(
        "from gymnasium.envs.registration import register\n"
        "def register_all():\n"
        "    register('Little/Pole-v0', 'gymnasium.envs.classic_control:CartPoleEnv')\n"
        "def fail():\n"
        "    raise RuntimeError('no licence')\n"
    )
    announced = tmp_path / "little_games-1.0.dist-info"
    announced.mkdir()
    (announced / "METADATA").write_text("Metadata-Version: 2.1\nName: little-games\nVersion: 1.0\n")
    (announced / "entry_points.txt").write_text(
        "[gymnasium.envs]\nLittle = little_games:register_all\nFailing = little_games:fail\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))
    monkeypatch.setattr(gymnasium, "registry", gymnasium.envs.registration.registry)
    envs = make_environment(EnvConfig(env="Little/Pole-v0"), 1)
    assert envs.spec.num_actions == 2
    envs.close()
    with pytest.raises(ConfigError, match=r"little_games:fail of an installed package fails: .*no licence"):
        make_environment(EnvConfig(env="Failing/Pole-v0"), 1)
