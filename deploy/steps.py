"""The bare commands of a step: printed as a person would type them in the root of the repository, then run there."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FINISH_SECONDS = 300.0
READ_SECONDS = 120.0
TOOLS = {
    "terraform": "https://developer.hashicorp.com/terraform/install (1.11 or newer)",
    "packer": "https://developer.hashicorp.com/packer/install, or leave out --images",
    "aws": "https://docs.aws.amazon.com/cli/latest/userguide/getting-started-install.html",
    "session-manager-plugin": "https://docs.aws.amazon.com/systems-manager/latest/userguide/"
    "session-manager-working-with-install-plugin.html, or `up --no-tunnel`",
    "git": "https://git-scm.com/downloads",
}
"""Where to get each program."""


class DeployError(Exception):
    """Something has to be changed first. The message says what."""


class StepError(Exception):
    """A command failed, or a wait was in vain. The message says how to go on; `heard` is what the command has said."""

    heard = ""


def require(*names: str) -> None:
    """Raises DeployError when programs are missing."""
    missing = [f"{name} ({TOOLS[name]})" for name in names if shutil.which(name) is None]
    if missing:
        raise DeployError(f"not installed: {'; '.join(missing)}")


def run(*command: str, seconds: float) -> None:
    """Prints and runs a command, whose output goes to the terminal.

    Raises: StepError, with its errors, when it fails; without them when it takes longer than `seconds`.
    """
    show(*command)
    process = subprocess.Popen(command, cwd=ROOT, env=_environment(), stderr=subprocess.PIPE)
    lines: list[bytes] = []

    def copy() -> None:
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                os.write(sys.stderr.fileno(), line)
                lines.append(line)

    copying = threading.Thread(target=copy, daemon=True)
    copying.start()
    status = _finish(process, seconds)
    copying.join(FINISH_SECONDS)
    if status:
        error = StepError(f"`{shlex.join(command)}` ended with status {status}; see above. The same command goes on")
        error.heard = b"".join(lines).decode(errors="replace")
        raise error


def run_until_interrupted(*command: str) -> int:
    """Prints and runs a command that lasts until Ctrl-C; returns its status, 0 after Ctrl-C."""
    show(*command)
    process = subprocess.Popen(command, cwd=ROOT, env=_environment())
    try:
        return process.wait()
    except KeyboardInterrupt:
        _finish(process, FINISH_SECONDS)
        return 0


def must_read(*command: str) -> str:
    """Runs a command that only looks, without a word; returns what it prints.

    Raises: StepError when it fails, or takes longer than READ_SECONDS.
    """
    given: dict[str, Any] = {"cwd": ROOT, "env": _environment(), "capture_output": True, "text": True}
    try:
        result = subprocess.run(command, **given, timeout=READ_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise StepError(f"`{shlex.join(command)}` did not end within {READ_SECONDS:.0f} s: run it by hand") from error
    if result.returncode:
        reason = " ".join(result.stderr.split())[-300:] or "it said nothing"
        raise StepError(f"`{shlex.join(command)}` ended with status {result.returncode}: {reason}")
    return str(result.stdout)


def show(*command: str) -> None:
    """Prints a command as a person would type it."""
    print(f"\n$ {shlex.join(command)}", flush=True)


def tell(step: str, costs: str, undo: str) -> None:
    """Prints what comes next, what it costs, and how to undo it."""
    print(f"\n# {step}. It costs {costs}. To undo it: {undo}", flush=True)


def _environment() -> dict[str, str]:
    return os.environ | {"AWS_PAGER": ""}


def _finish(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Waits for a process. One that is interrupted gets time to finish: Terraform saves its state and its lock."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired as error:
        process.send_signal(signal.SIGINT)
        _end(process)
        raise StepError(f"the command did not end within {seconds:.0f} s, and was interrupted: see above") from error
    except KeyboardInterrupt:  # the process has got it, too
        _end(process)
        raise


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(FINISH_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
