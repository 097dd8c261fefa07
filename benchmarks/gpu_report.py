"""The parts of `benchmarks/gpu.sh` that read and write its files: `python benchmarks/gpu_report.py WORK ...`.

It needs only the standard library (torch for `machine`), so that it can list missing packages:
  missing                prints the requirements of requirements.txt, and pytest, that this interpreter does not have
  wanted WHEELS          prints the wheels in a directory that have to be installed
  machine FILE           writes the machine and its software, as JSON
  tests XML FILE         writes the outcome of pytest, as JSON; fails unless all tests ran and passed
  faster OUT_DIR         prints whose inference gave most frames while learning: cpu, cuda, or cuda with mps
  summary OUT_DIR        prints all figures and goals
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
MODULES = {"opencv-python-headless": "cv2", "pyzmq": "zmq", "ale-py": "ale_py"}
KEPT = re.compile(r"(torch|nvidia|triton|cuda)", re.IGNORECASE)
LIBRARY = re.compile(r"nvidia-(cublas|cudnn|nccl|cuda-runtime)")
NOT_NEEDED = {"tensorboard"}  # these runs start no TensorBoard
FRAMES_A_STEP = 4
SHOWN_KERNELS = 15
GOAL_ENV = "PongNoFrameskip-v4"
GOAL_UPDATES, GOAL_BATCH = 1000, 512
GOAL_FRAMES, GOAL_FRAMES_UPDATES = 120_000, 19
GOAL_RETURN, GOAL_SECONDS = 18, 90


def missing() -> list[str]:
    """Returns the lines of requirements.txt, and that of pytest, that cannot be imported."""
    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    lines += [line for line in (ROOT / "requirements-dev.txt").read_text().splitlines() if line.startswith("pytest==")]
    names = {line: re.split(r"[<>=~!;\[ ]", line)[0] for line in lines if line and not line.startswith("-")}
    modules = {line: MODULES.get(name, name.replace("-", "_")) for line, name in names.items()}
    wanted = [line for line, name in names.items() if name not in NOT_NEEDED]
    return [line for line in wanted if importlib.util.find_spec(modules[line]) is None]


def wanted_wheels(directory: Path) -> list[Path]:
    """Returns the wheels that are not installed in the same version. Packages of torch stay as they are."""
    wheels = sorted(directory.glob("*.whl"))
    return [wheel for wheel in wheels if not KEPT.match(wheel.name) and not _is_installed(*wheel.name.split("-")[:2])]


def _is_installed(distribution: str, version: str) -> bool:
    try:
        return importlib.metadata.version(distribution) == version
    except importlib.metadata.PackageNotFoundError:
        return False


def machine() -> dict[str, Any]:
    """Returns the machine and its software."""
    import torch

    processor = dict(re.findall(r"^(.+?):\s*(.+)$", _output("lscpu"), re.MULTILINE))
    query = "--query-gpu=name,driver_version,memory.total"
    return {
        "gpu": _output("nvidia-smi", query, "--format=csv,noheader") or "none",
        "cpu": processor.get("Model name", platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "threads_per_core": processor.get("Thread(s) per core", "unknown"),
        "memory_gigabytes": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "cudnn": torch.backends.cudnn.version() or "none",
        "libraries": ", ".join(
            sorted(
                f"{found.name} {found.version}"
                for found in importlib.metadata.distributions()
                if LIBRARY.match(found.name or "")
            )
        ),
        "has_mps": shutil.which("nvidia-cuda-mps-control") is not None,
        "revision": _output("git", "describe", "--always", "--dirty") or "unknown",
        "date": time.strftime("%Y-%m-%d"),
    }


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def outcome_of(xml: Path) -> dict[str, int]:
    """Returns the numbers of passed, failed and skipped tests."""
    suites = list(ElementTree.parse(xml).getroot().iter("testsuite"))
    names = ("tests", "skipped", "failures", "errors")
    counts = {name: sum(int(suite.get(name, 0)) for suite in suites) for name in names}
    tests, *others = counts.values()
    return {"passed": tests - sum(others), **counts}


def read_parts(directory: Path) -> dict[str, Any]:
    """Returns the figures of the parts that have run, by name, also of those that failed halfway."""
    found = {}
    for path in [*sorted(directory.glob("*.part")), *sorted(directory.glob("*.json"))]:
        try:
            found[path.stem] = json.loads(path.read_text())
        except ValueError as error:  # a part that was killed while it wrote
            print(f"{path} is left out: {error}", file=sys.stderr)
    return found


def runs_of(parts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the parts that are whole runs."""
    return {name: part for name, part in parts.items() if "updates_per_second" in part}


def faster(parts: dict[str, Any]) -> str:
    """Returns whose inference gave most frames while learning: cpu, cuda or mps; cpu when that was not measured."""
    rates = {name: parts.get(f"together-{name}", {}).get("frames_per_second", 0.0) for name in ("cpu", "cuda", "mps")}
    return max(rates, key=lambda name: rates[name])


def figures(parts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the measured figures, part by part."""
    if "machine" in parts:
        yield from ((name, str(value)) for name, value in parts["machine"].items())
    if "tests" in parts:
        yield "tests that need the GPU", ", ".join(f"{count} {name}" for name, count in parts["tests"].items())
    for name in ("smoke", "ceilings", "cores"):
        yield from ((f"{name}: {what}", f"{value:,.6g}") for what, value in parts.get(name, {}).items())
    yield from profile_figures(parts.get("profile", {}))
    for row in (row for name in ("learner", "learner-gpu", "gather") for row in parts.get(name, {}).get("rows", [])):
        what = f"{row['kind']}, preset {row['preset']}, batch {row['batch_size']}"
        if "failed" in row:
            yield what, "FAILED"
        elif "gathered_gigabytes_per_second" in row:
            rate = row["gathered_gigabytes_per_second"]
            yield what, f"{row['updates_per_second']:,.0f} batches/s, {rate:,.1f} GB/s of observations"
        else:
            yield f"learner alone, {what}", f"{row['updates_per_second']:,.0f} updates/s"
    for name in ("actor-cpu", "actor-cuda"):
        for row in parts.get(name, {}).get("rows", []):
            rate = row["agent_steps_per_second"]["median"] * FRAMES_A_STEP
            yield f"{name}, one worker alone, {row['system']}", f"{rate:,.0f} frames/s"
    for name, part in runs_of(parts).items():
        updates = f"{part['updates_per_second']:,.1f} updates/s of {part['batch_size']}"
        yield name, f"{part['frames_per_second']:,.0f} frames/s and {updates} over {part['measured_seconds']:.0f} s"
        roles = (f"{role} {cores:.2f}" for role, cores in part.get("cores_by_role", {}).items())
        yield f"{name}: cores in use", ", ".join(roles)


def profile_figures(part: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the seconds of an update, and its first kernels by time, with their number in an update."""
    for name, value in part.items():
        if not isinstance(value, list):
            yield f"profile: {name}", f"{value:,.6g}"
            continue
        for row in value[:SHOWN_KERNELS]:
            yield f"profile: {name}", f"{1e6 * row['seconds']:9.1f} us {row['count']:6.1f} x {row['name'][:70]}"


def goals(parts: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yields for each goal its name, its target and the figure reached."""
    runs = [run for run in runs_of(parts).values() if run["env"] == GOAL_ENV]
    updates = max((run["updates_per_second"] for run in runs if run["batch_size"] == GOAL_BATCH), default=0)
    frames = [run["frames_per_second"] for run in runs if run["updates_per_second"] >= GOAL_FRAMES_UPDATES]
    most = max(frames, default=0)
    pong = parts.get("pong", {})
    seconds = pong.get("return_reached_after_seconds") if pong.get("env") == GOAL_ENV else None
    yield (
        "updates/s of 512, replay service included",
        f">= {GOAL_UPDATES:,}",
        _verdict(updates, updates >= GOAL_UPDATES),
    )
    yield f"frames/s at >= {GOAL_FRAMES_UPDATES} updates/s", f">= {GOAL_FRAMES:,}", _verdict(most, most >= GOAL_FRAMES)
    reached = _verdict(seconds or 0, seconds is not None and seconds <= GOAL_SECONDS)
    if pong and seconds is None:
        reached = f"not reached in {pong['seconds']:.0f} s of {pong['env']}: best {pong['best_return']}"
    yield f"seconds to a mean return of {GOAL_RETURN} on Pong", f"<= {GOAL_SECONDS}", reached


def _verdict(value: float, is_reached: bool) -> str:
    if not value:
        return "not measured"
    return f"{value:,.0f}: {'reached' if is_reached else 'missed'}"


def summary(parts: dict[str, Any], device: str) -> str:
    """Returns all figures and goals as text."""
    lines = [] if device != "cpu" else ["A TRIAL WITHOUT A GPU: no figure here is one of a GPU", ""]
    lines += [f"{what:45} {value}" for what, value in figures(parts)]
    lines += ["", f"{'goal':45} {'asked':>12}  measured"]
    lines += [f"{what:45} {asked:>12}  {value}" for what, asked, value in goals(parts)]
    return "\n".join(lines)


def main(work: str, *arguments: str) -> None:
    """Runs one of the commands above."""
    paths = [Path(argument) for argument in arguments]
    match work:
        case "missing":
            print("\n".join(missing()))
        case "wanted":
            print("\n".join(map(str, wanted_wheels(paths[0]))))
        case "machine":
            paths[0].write_text(json.dumps(machine(), indent=1))
        case "tests":
            outcome = outcome_of(paths[0])
            paths[1].write_text(json.dumps(outcome))
            if not 0 < outcome["passed"] == outcome["tests"]:
                sys.exit(f"on a GPU all tests have to run and to pass, and there have to be some: {outcome}")
        case "faster":
            print(faster(read_parts(paths[0])))
        case "summary":
            print(summary(read_parts(paths[0]), os.environ.get("APEXRL_GPU_DEVICE", "cuda")))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(*(sys.argv[1:] or [""]))
