"""Pictures of a game: a video, written while it is played, and a strip of a few. The only importer of OpenCV."""

from pathlib import Path

import cv2
import numpy as np

MAX_VIDEO_PICTURES = 4_500  # five minutes of Atari
KEPT_PICTURES = 64
STRIP_PICTURES = 6
VIDEOS_KEPT = 20


class Recorder:
    """Takes the pictures of one game; its memory is bounded however long the game lasts."""

    def __init__(self, video: Path | None, pictures_per_second: float):
        """Records into an mp4 file when there is a path; the newest VIDEOS_KEPT files of its directory stay."""
        self.video = video
        self._pictures_per_second = pictures_per_second
        self._writer: cv2.VideoWriter | None = None
        self._count = 0
        self._kept: list[np.ndarray] = []
        self._stride = 1

    def add(self, picture: np.ndarray) -> None:
        """Takes an RGB picture [height, width, 3]."""
        if self._count % self._stride == 0:
            self._kept.append(picture.copy())
            if len(self._kept) > KEPT_PICTURES:
                self._kept = self._kept[::2]
                self._stride *= 2
        if self.video is not None and self._count < MAX_VIDEO_PICTURES:
            self._write(self.video, picture)
        self._count += 1

    def close(self) -> bytes:
        """Finishes the video; returns a PNG of pictures side by side, empty when there were none."""
        if self._writer is not None:
            self._writer.release()
        if not self._kept:
            return b""
        chosen = np.linspace(0, len(self._kept) - 1, STRIP_PICTURES).astype(int)
        strip = np.concatenate([self._kept[i] for i in chosen], axis=1)
        encoded, data = cv2.imencode(".png", cv2.cvtColor(strip, cv2.COLOR_RGB2BGR))
        return data.tobytes() if encoded else b""

    def _write(self, video: Path, picture: np.ndarray) -> None:
        height, width = picture.shape[:2]
        size = (2 * width, 2 * height)
        if self._writer is None:
            video.parent.mkdir(parents=True, exist_ok=True)
            for old in sorted(video.parent.glob("game-*.mp4"))[: -VIDEOS_KEPT + 1]:
                old.unlink()
            self._writer = cv2.VideoWriter(str(video), cv2.VideoWriter.fourcc(*"mp4v"), self._pictures_per_second, size)
        bgr = cv2.cvtColor(picture, cv2.COLOR_RGB2BGR)
        self._writer.write(cv2.resize(bgr, size, interpolation=cv2.INTER_NEAREST))
