"""The extras of the package: packages that only a part of it needs, and the command that installs a missing one."""

import importlib.util
import shlex
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

PIP_INSTALL = f"{shlex.quote(sys.executable)} -m pip install"  # for the Python that runs this
HOME = Path(__file__).resolve().parents[1]  # site-packages, or a checkout
MODULES: Mapping[str, tuple[str, ...]] = {
    "train": ("torch", "gymnasium", "ale_py", "cv2", "safetensors", "tensorboard", "tensorboardX", "rich"),
    "ray": ("ray",),
    "mujoco": ("mujoco", "imageio", "dm_control"),
    "box2d": ("Box2D",),
    "plot": ("matplotlib",),
    "export": ("onnx", "onnxscript"),
    "minari": ("minari", "h5py"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "deploy": ("boto3",),
}
"""By the name of an extra in pyproject.toml, the modules by whose lack it is known to be missing."""


def missing(extra: str, wanted_by: str) -> str:
    """Returns a line with the cure where a module of an extra is not installed, else nothing."""
    lacking = [module for module in MODULES[extra] if importlib.util.find_spec(module) is None]
    return f"{wanted_by} needs more packages: {_line(extra, lacking[0])}" if lacking else ""


def why_missing(error: BaseException | None) -> str:
    """Returns a line with the cure for an error that comes, by its causes, of a missing extra; of others nothing."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError):
            name = (error.name or "").partition(".")[0]
            return next((_line(extra, name) for extra, modules in MODULES.items() if name in modules), "")
        error = error.__cause__
    return ""


def install(extra: str, home: Path = HOME) -> str:
    """Returns the command that installs an extra: of the installed package, or what a checkout needs."""
    script, project = home / "run.sh", home / "pyproject.toml"
    if not (script.is_file() and project.is_file()):
        return f"{PIP_INSTALL} 'apexrl[{extra}]'"
    if extra == "train":  # it installs all of that
        return f"bash {shlex.quote(str(script))}"
    return f"{PIP_INSTALL} {shlex.join(tomllib.loads(project.read_text())['project']['optional-dependencies'][extra])}"


def _line(extra: str, module: str) -> str:
    return f"{module} is not installed: say `{install(extra)}`"
