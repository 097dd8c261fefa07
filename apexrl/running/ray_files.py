"""The directory of a run on Ray, which may be on another node than the driver's: whether it is, and its files."""

import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from apexrl.errors import PeerError
from apexrl.running.ray_groups import CHUNK_BYTES
from apexrl.runs import CONFIG_FILE

ANSWER_SECONDS = 15.0


def sees_directory(learner: Any, directory: Path) -> bool:
    """Returns whether the learner's directory is this machine's, too: one of that name may be of an earlier start."""
    if not (directory / CONFIG_FILE).exists():
        return False
    mark = directory / f"seen-{secrets.token_hex(8)}"
    try:
        mark.touch()
        return bool(ray.get(learner.sees.remote(mark.name), timeout=ANSWER_SECONDS))
    except (ray.exceptions.RayError, OSError):  # there is nothing to fetch from, or nowhere to put it
        return True
    finally:
        with contextlib.suppress(OSError):
            mark.unlink(missing_ok=True)


def fetch(learner: Any, directory: Path, hear: Callable[[], None]) -> str:
    """Copies the run's files from the learner's node, but for the experience; returns what came of it.

    Args:
      learner: the learner's group.
      hear: called whenever the cluster has answered.
    Raises: PeerError when the node names a file outside of the directory.
    """
    try:
        files: list[tuple[str, int]] = ray.get(learner.files.remote(), timeout=ANSWER_SECONDS)
        for name, size in files:
            path = (directory / name).resolve()
            if not path.is_relative_to(directory):
                raise PeerError(f"the learner's node names a file outside the run: {name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for offset in range(0, size, CHUNK_BYTES):
                    file.write(ray.get(learner.read.remote(name, offset), timeout=ANSWER_SECONDS))
                    hear()
    except (ray.exceptions.RayError, OSError) as error:
        return f"ERROR the run's files stay on the learner's node, in {directory}: {error}"
    return f"fetched {len(files)} files into {directory}; the experience stays where it is"
