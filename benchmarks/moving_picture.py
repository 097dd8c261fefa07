"""Makes a GIF of a part of a video: `python -m benchmarks.moving_picture VIDEO OUT.gif [--from-seconds S] ...`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import cv2
import tyro
from PIL import Image


@dataclasses.dataclass(frozen=True)
class MovingPicture:
    """A part of a video as a GIF that a page can show."""

    video: Annotated[Path, tyro.conf.Positional]
    """A video, as `apexrl watch` writes it."""
    out: Annotated[Path, tyro.conf.Positional]
    """The GIF."""
    from_seconds: float = 0.0
    """Where the part begins."""
    seconds: float = 12.0
    """Length of the part."""
    keep_every: int = 1
    """Every so many pictures one is kept."""
    height: int = 320
    """Pixels."""


def main(asked: MovingPicture) -> None:
    """Writes the GIF, whose pictures share 32 colours."""
    video = cv2.VideoCapture(str(asked.video))
    rate = video.get(cv2.CAP_PROP_FPS)
    video.set(cv2.CAP_PROP_POS_FRAMES, round(asked.from_seconds * rate))
    pictures = []
    for number in range(round(asked.seconds * rate)):
        is_there, bgr = video.read()
        if not is_there:
            break
        if number % asked.keep_every == 0:
            size = round(bgr.shape[1] * asked.height / bgr.shape[0]), asked.height
            small = cv2.cvtColor(cv2.resize(bgr, size, interpolation=cv2.INTER_AREA), cv2.COLOR_BGR2RGB)
            pictures.append(Image.fromarray(small))
    if not pictures:
        raise SystemExit(f"{asked.video} has no pictures after {asked.from_seconds:g} s")
    colours = pictures[0].quantize(32)
    first, *others = [picture.quantize(palette=colours, dither=Image.Dither.NONE) for picture in pictures]
    duration = 10 * round(100 * asked.keep_every / rate)  # milliseconds; a GIF counts hundredths of a second
    first.save(asked.out, save_all=True, append_images=others, duration=duration, loop=0, optimize=True)


if __name__ == "__main__":
    main(tyro.cli(MovingPicture))
