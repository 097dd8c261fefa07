"""Where the package with the provider's schema lies; `fetch` gets it.

It is read, never installed: its dependencies are at odds with our own requirements.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

from tests.deploy.offline_provider.schema import WHEEL
from tests.deploy.rootfs import cache

REQUIREMENT = "cdktf-cdktf-provider-aws==21.22.1"
SHA256 = "603c647c4de622ed0a2b5e0f1518d81a89b31eed84b67d23410840041e7df924"
CURE = ".venv/bin/python -m tests.deploy.tools"


def find_wheel() -> Path:
    """Returns the package.

    Raises: FileNotFoundError when it was not fetched.
    """
    path = cache() / WHEEL
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: {CURE}")
    return path


def fetch() -> Path:
    """Downloads the package (59 MB) with pip, unless it is there.

    Raises: RuntimeError when it is not the one whose hash stands here.
    """
    path = cache() / WHEEL
    if not path.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache()), REQUIREMENT]
        subprocess.run(pip, check=True, timeout=600)
    if hashlib.sha256(path.read_bytes()).hexdigest() != SHA256:
        path.unlink()
        raise RuntimeError(f"{REQUIREMENT} is not the package that was expected: its SHA-256 is another")
    return path
