"""Pictures of a game: a video that is written during play, and a short picture that moves."""

import contextlib
import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cv2
import numpy as np

from apexrl.errors import ConfigError
from apexrl.lines import is_utf8

logger = logging.getLogger(__name__)

MAX_VIDEO_PICTURES = 4_500  # five minutes of Atari
MAX_FILM_SECONDS = 10.0  # that a run spends on the pictures of a game: without a GPU MuJoCo's take 50 ms each
KEPT_PICTURES = 64  # in the picture that moves
MAX_MOVING_BYTES = 2**19  # so that an event file grows slowly
PICTURE_MILLISECONDS, LAST_MILLISECONDS = 100, 1_500
VIDEOS_KEPT = 20
SMALL_PIXELS = 200  # a shorter side of fewer is doubled, as Atari's 160; it costs three times the CPU time
HARMLESS = b"OpenCV: FFMPEG: tag"  # it wants a tag of codecs, which WebM does not have


class VideoFolder:
    """A directory in which one process keeps its newest VIDEOS_KEPT videos. It never touches files of others."""

    def __init__(self, directory: Path):
        """Makes the directory.

        Raises: ConfigError when it cannot be made.
        """
        self._directory = directory
        self._own: list[Path] = []
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--record-dir {directory} cannot be made ({error.strerror}): give another") from error

    def new_path(self, name: str) -> Path:
        """Returns a free path for a video of this name, or with a number behind it."""
        path = self._directory / name
        paths = itertools.chain([path], (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2)))
        return next(path for path in paths if not path.exists())

    def take(self, video: Path | None) -> None:
        """Adds a written video, if any, and deletes the oldest of this process beyond VIDEOS_KEPT."""
        if video is not None:
            self._own.append(video)
        while len(self._own) > VIDEOS_KEPT:
            self._own.pop(0).unlink(missing_ok=True)

    @property
    def newest(self) -> Path | None:
        """The last video that was written, None before the first."""
        return self._own[-1] if self._own else None


class VideoWriter:
    """Records the pictures of one game. Its memory is bounded however long the game lasts.

    `video` is the file that it writes. It is None when nobody asked for a video or the file cannot be written.
    """

    def __init__(self, video: Path | None, pictures_per_second: float, most_seconds: float = math.inf):
        """Begins a recording, into a WebM file, which browsers play, when there is a path.

        Args:
          most_seconds: that `film` spends on it; the rest of the game is not seen.
        """
        self.video = video
        self._seconds_left = most_seconds
        self._pictures_per_second = pictures_per_second
        self._writer: cv2.VideoWriter | None = None
        self._count = 0
        self._kept: list[np.ndarray] = []
        self._stride = 1

    def film(self, render: Callable[[], np.ndarray | None]) -> None:
        """Adds the picture that is drawn, if any, while there is time."""
        if self._seconds_left > 0:
            started = time.monotonic()
            if (picture := render()) is not None:
                self.add(picture)
            self._seconds_left -= time.monotonic() - started

    def add(self, picture: np.ndarray) -> None:
        """Adds an RGB picture [height, width, 3]; one of another size becomes as large as the first."""
        if self._kept and picture.shape != self._kept[0].shape:
            height, width = self._kept[0].shape[:2]
            picture = cv2.resize(picture, (width, height), interpolation=cv2.INTER_AREA)
        if self._count % self._stride == 0:
            self._kept.append(picture.copy())
            if len(self._kept) > KEPT_PICTURES:
                self._kept = self._kept[::2]
                self._stride *= 2
        if self.video is not None and self._count < MAX_VIDEO_PICTURES:
            self._write(self.video, picture)
        self._count += 1

    def close(self) -> bytes:
        """Finishes the video. Returns a PNG that moves through the game, empty when there was no picture."""
        if self._writer is None:
            self.video = None
        else:
            self._writer.release()
            self._check()
        kept = self._kept
        while kept:
            moving = cv2.Animation()
            moving.frames = [cv2.cvtColor(picture, cv2.COLOR_RGB2BGR) for picture in kept]
            moving.durations = [PICTURE_MILLISECONDS] * (len(kept) - 1) + [LAST_MILLISECONDS]
            encoded, data = cv2.imencodeanimation(".png", moving)
            if encoded and len(data) <= MAX_MOVING_BYTES:
                return data.tobytes()
            kept = kept[1::2]
        return b""

    def _check(self) -> None:
        """Removes a video that cannot be played: OpenCV tells nobody that the disk was full."""
        if self.video is not None and not cv2.VideoCapture(_file_name(self.video)).read()[0]:
            logger.warning("no video: %s was not written whole; see whether its disk has space", self.video)
            self.video.unlink(missing_ok=True)
            self.video = None

    def _write(self, video: Path, picture: np.ndarray) -> None:
        height, width = picture.shape[:2]
        scale = 2 if min(width, height) < SMALL_PIXELS else 1
        size = (scale * width, scale * height)
        if self._writer is None:
            if not is_utf8(_file_name(video)):  # OpenCV would end the process
                logger.warning("no video: %r is not UTF-8; give a --run-dir that is", str(video))
                self.video = None
                return
            with without_lines(HARMLESS):
                codec = cv2.VideoWriter.fourcc(*"VP80")
                writer = cv2.VideoWriter(_file_name(video), codec, self._pictures_per_second, size)
            if not writer.isOpened():
                logger.warning("no video: %s cannot be written; see whether its directory can, and its disk", video)
                self.video = None
                return
            self._writer = writer
        bgr = cv2.cvtColor(picture, cv2.COLOR_RGB2BGR)
        self._writer.write(cv2.resize(bgr, size, interpolation=cv2.INTER_NEAREST))


def _file_name(video: Path) -> str:
    """Returns a file for FFmpeg, which takes what stands before a colon for a protocol, as in pong:1/game.webm."""
    return str(video.absolute())


@contextlib.contextmanager
def without_lines(beginning: bytes) -> Iterator[None]:
    """Leaves out lines of standard error that begin so, which C code writes; all others follow at the end."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    error = os.dup(2)
    os.dup2(writing, 2)
    os.close(writing)
    try:
        yield
    finally:
        os.dup2(error, 2)
        os.close(error)
        with contextlib.suppress(BlockingIOError):  # nothing was written
            lines = os.read(reading, 2**16).splitlines(keepends=True)
            os.write(2, b"".join(line for line in lines if not line.startswith(beginning)))
        os.close(reading)
