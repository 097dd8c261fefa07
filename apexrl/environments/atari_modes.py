"""Games of Atari in another mode or difficulty, which ale-py's vector environment does not have.

`ModeGames` plays them as that environment does: the same frames, and the same ends. One thread of this process plays
them one after the other.
"""

from typing import Any, NamedTuple

import ale_py
import cv2
import numpy as np
from ale_py import Action, roms

from apexrl.errors import ConfigError

FRAMES_PER_STEP = 4


class Played(NamedTuple):
    """One game after a step, or at its beginning."""

    screen: np.ndarray  # [height, width], or [height, width, 3]
    reward: float
    terminated: bool
    truncated: bool
    lives: int


class ModeGame:
    """One game; after its end the next step begins another."""

    def __init__(self, game: str, mode: int | None, difficulty: int | None, options: dict[str, Any]):
        """Loads the game; `options` are those of ale-py's vector environment.

        Raises: ConfigError when the game has no such mode or difficulty.
        """
        rom = roms.get_rom_path(game)
        if rom is None:
            raise ConfigError(f"ale-py has no ROM of {game!r}")
        self._rom, self._options = rom, options
        self._chosen = {"mode": mode, "difficulty": difficulty}
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # else it tells of each game that it loads
        self._ale = ale_py.ALEInterface()
        self._ale.setFloat("repeat_action_probability", options["repeat_action_probability"])
        self._load(0)
        for name, offered in (("mode", self._ale.getAvailableModes()),
                              ("difficulty", self._ale.getAvailableDifficulties())):  # fmt: skip
            chosen = self._chosen[name]
            if chosen is not None and (type(chosen) is not int or chosen not in offered):
                numbers = ", ".join(map(str, offered))
                raise ConfigError(f"--env-kwargs: {name} is {chosen!r}, and {game} has {numbers}")
        full = options["full_action_space"]
        self.actions: list[Action] = self._ale.getLegalActionSet() if full else self._ale.getMinimalActionSet()
        self._fires = options["use_fire_reset"] and Action.FIRE in self.actions

    def _load(self, seed: int) -> None:
        self._ale.setInt("random_seed", seed)
        self._ale.loadROM(self._rom)

    def seed(self, seed: int) -> Played:
        """Begins the first game of a seed."""
        self._load(seed % 2**31)
        if self._chosen["mode"] is not None:
            self._ale.setMode(self._chosen["mode"])
        if self._chosen["difficulty"] is not None:
            self._ale.setDifficulty(self._chosen["difficulty"])
        self._rng = np.random.default_rng(seed)
        return self.begin()

    def begin(self) -> Played:
        """Begins a game: with FIRE, where it has that, and no-ops."""
        ale = self._ale
        ale.reset_game()
        if self._fires:
            ale.act(Action.FIRE)
        for _ in range(int(self._rng.integers(max(self._options["noop_max"], 1))) - self._fires):
            ale.act(Action.NOOP)
            if ale.game_over():
                ale.reset_game()
        self._frames, self._is_over = 0, False
        self._last = [self._screen()] * 2  # the last two of a step, but for the one with which a game ends
        return self._seen(0.0, False, False)

    def step(self, action: int) -> Played:
        """Takes a step of four frames, or begins the next game where one has ended."""
        if self._is_over:
            return self.begin()
        reward, most = 0.0, self._options["max_num_frames_per_episode"]
        for left in reversed(range(FRAMES_PER_STEP)):
            reward += self._ale.act(self.actions[action])
            self._frames += 1
            self._is_over = self._ale.game_over() or self._frames >= most
            if self._is_over:
                break
            if left < 2:
                self._last[left] = self._screen()
        terminated = self._ale.game_over()
        return self._seen(reward, terminated, self._is_over and not terminated)

    def _screen(self) -> np.ndarray:
        return self._ale.getScreenGrayscale() if self._options["grayscale"] else self._ale.getScreenRGB()

    def _seen(self, reward: float, terminated: bool, truncated: bool) -> Played:
        screen, size = np.maximum(*self._last), (self._options["img_width"], self._options["img_height"])
        self._last[0] = screen  # as ale-py, which shows it again where a game is over before its step is
        if screen.shape[1::-1] != size:
            screen = cv2.resize(screen, size, interpolation=cv2.INTER_AREA)
        return Played(screen, reward, terminated, truncated, self._ale.lives())


class ModeGames:
    """Games that step together, with the methods that we use of ale-py's vector environment. One thread owns them."""

    def __init__(self, game: str, num_envs: int, *, mode: int | None, difficulty: int | None, **options: Any):
        """Loads the games.

        Raises: ConfigError when the game has no such mode or difficulty.
        """
        usual = {"img_height": 84, "img_width": 84, "grayscale": True}
        self._games = [ModeGame(game, mode, difficulty, usual | options) for _ in range(num_envs)]

    def get_action_set(self) -> list[Action]:
        """Returns the actions of the game."""
        return self._games[0].actions

    @property
    def ale(self) -> "ModeGames":
        """The interface of the emulator; ale-py keeps it apart."""
        return self

    def reset(self, seed: int) -> tuple[np.ndarray, dict[str, Any]]:
        """Begins all games, each with a seed of its own; returns [E, 1, height, width] and `lives`."""
        screens, _, _, _, info = _together([game.seed(seed + i) for i, game in enumerate(self._games)])
        return screens, info

    def send(self, actions: np.ndarray) -> None:
        """Takes the actions [E] with which `recv` steps."""
        self._actions = actions.tolist()

    def recv(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Takes the step: screens, rewards, terminated, truncated [E], and `lives`."""
        return _together([game.step(a) for game, a in zip(self._games, self._actions, strict=True)])

    def close(self) -> None:
        """Does nothing: the games have no threads."""


def _together(played: list[Played]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
    screens, rewards, terminated, truncated, lives = zip(*played, strict=True)
    return (
        np.stack(screens)[:, None],
        np.array(rewards),
        np.array(terminated),
        np.array(truncated),
        {"lives": np.array(lives)},
    )
