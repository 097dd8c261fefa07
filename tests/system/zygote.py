"""Processes of tests that begin as a copy of one which has imported torch: an import costs each role 1.6 s of CPU time.

`Zygote` runs this module once for all tests of a process. For each `ForkedProcess` it copies itself, and the copy runs
the command line as a new interpreter would. In there, the supervisors of the launcher and of actors copy their own
process in the same way. The replay server needs no torch, and is started as always.
"""

import contextlib
import ctypes
import json
import logging
import os
import random
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORDS = "APEXRL_WORDS"  # a directory in which copies write their command lines, by process id
REQUEST_BYTES = 2**18
LOOK_SECONDS = 0.02
SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
LIBRARIES = (
    "ale_py",
    "cv2",
    "gymnasium",
    "msgspec",
    "psutil",
    "rich.live",
    "safetensors.torch",
    "torch",
    "tyro",
    "zmq",
)


class ForkedProcess:
    """The part of subprocess.Popen that tests and supervisors use, for a copy that is no new interpreter."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int):
        self.pid, self.returncode = pid, None

    def _look(self, seconds: float) -> None:
        """Waits so long for the end, and keeps the status. Here for a child of this process."""
        deadline = time.monotonic() + seconds
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() >= deadline:
                return
            else:
                time.sleep(LOOK_SECONDS / 4)

    def poll(self) -> int | None:
        if self.returncode is None:
            self._look(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        while self.returncode is None:
            self._look(10.0 if timeout is None else timeout)
            if self.returncode is None and timeout is not None:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Grandchild(ForkedProcess):
    """A copy that the zygote made; the zygote tells its end."""

    def __init__(self, pid: int, zygote: "Zygote"):
        super().__init__(pid)
        self._zygote = zygote

    def _look(self, seconds: float) -> None:
        self.returncode = self._zygote.status_of(self.pid, seconds)


class Zygote:
    """The process that is copied, for all threads of this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._statuses: dict[int, int] = {}
        self._directory = tempfile.TemporaryDirectory()
        self.words = Path(self._directory.name)
        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.system.zygote", str(its.fileno())],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), WORDS: self._directory.name},
            pass_fds=[its.fileno()],
            start_new_session=True,
        )
        its.close()

    def start(self, words: list[str], directory: Path, environment: dict[str, str], output: int) -> ForkedProcess:
        """Runs Python's command line in a copy with a session of its own, which writes to this file."""
        request = {"words": words, "directory": str(directory), "environment": environment}
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [output, output])
            while "pid" not in (told := self._next(600.0)):
                if not told:
                    raise TimeoutError("the process that is copied does not answer")
        return Grandchild(told["pid"], self)

    def status_of(self, pid: int, seconds: float) -> int | None:
        """Returns the exit status of a copy, None where it has not ended within so long."""
        deadline = time.monotonic() + seconds
        while pid not in self._statuses and (left := deadline - time.monotonic()) >= 0:
            with self._lock:
                self._next(min(left, LOOK_SECONDS))
        with self._lock:
            while pid not in self._statuses and self._next(0.0):
                continue
        return self._statuses.get(pid)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(10)
        self._directory.cleanup()

    def _next(self, seconds: float) -> dict[str, int]:
        """Returns the next thing that the zygote tells, having kept an exit status; nothing when none comes in time."""
        poll = select.poll()  # select() takes no descriptor from 1,024 on
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(1000 * seconds):
            return {}
        if not (message := self._socket.recv(REQUEST_BYTES)):
            raise ConnectionError("the process that is copied has ended")
        told: dict[str, int] = json.loads(message)
        if "ended" in told:
            self._statuses[told["ended"]] = told["status"]
        return told


def copy(outputs: tuple[int, int], words: list[str], environment: dict[str, str], ends_with_us: bool = False) -> int:
    """Runs a command line in a copy of this process, with nothing else of it open; returns its process id.

    Args:
      ends_with_us: the kernel kills the copy when this process is dead; what that has started notices.
    """
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        if ends_with_us:
            ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for target, output in zip((1, 2), [os.dup(output) for output in outputs], strict=True):
            os.dup2(output, target)
        os.closerange(3, 2**20)
        status = run_as_new(words, environment)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def run_as_new(words: list[str], environment: dict[str, str]) -> int:
    """Runs the command line as a new interpreter would; returns its exit status."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", closefd=False)
    logging.root.handlers.clear()
    random.seed()
    sys.modules["numpy"].random.seed()
    for name in [name for name, module in sys.modules.items() if _is_ours(name, module)]:
        del sys.modules[name]
    os.environ.clear()
    os.environ.update(environment)
    (Path(environment[WORDS]) / str(os.getpid())).write_text("\0".join(words))
    from apexrl import children

    children.subprocess = Subprocess
    is_safe = words[0] == "-P"
    words = words[is_safe:]
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    status: object = 0
    try:
        if words[0] == "-m":
            sys.path[:0] = [] if is_safe else [os.getcwd()]
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.path[:0] = [os.getcwd()]
            sys.argv = ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.path[:0] = [] if is_safe else [str(Path(words[0]).parent)]
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        status = ended.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    threading._shutdown()  # as an interpreter does: executors end their threads then, and others are waited for
    return status if isinstance(status, int) else int(status is not None)


def _is_ours(name: str, module: object) -> bool:
    """Returns whether a module is the project's or a user's, and no library's."""
    file = getattr(module, "__file__", None) or sys.prefix
    of_a_user = name != "__main__" and not file.startswith((sys.prefix, sys.base_prefix))
    return name.partition(".")[0] in ("apexrl", "tests") or of_a_user


class Subprocess:
    """Stands for the module subprocess where our processes are started."""

    DEVNULL = subprocess.DEVNULL

    @staticmethod
    def Popen(arguments, *, env, stdout=None, stderr=None, **others):  # noqa: N802 - its name there
        """Copies this process for a role, but for the replay server, which would not have torch."""
        words = [str(word) for word in arguments[1:]]
        if stderr is None or any(word.endswith("replay.py") for word in words):
            return subprocess.Popen(arguments, env=env, stdout=stdout, stderr=stderr, **others)
        reading = writing = None
        if stderr == subprocess.PIPE:
            reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        out = 1 if stdout is None else stdout.fileno()
        err = writing if writing is not None else stderr.fileno()
        process = ForkedProcess(copy((out, err), words, env))
        if reading is not None:
            os.close(writing)
            process.stderr = os.fdopen(reading, "rb", buffering=0)
        return process


def serve(asking: socket.socket) -> None:
    """Makes copies until the other side is gone; tells the end of each."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    selector = selectors.DefaultSelector()  # select.select takes no descriptors from 1,024 on
    for source in (asking, reading):
        selector.register(source, selectors.EVENT_READ)
    while True:
        ready = {key.fileobj for key, _ in selector.select()}
        if reading in ready:
            os.read(reading, 4096)
            with contextlib.suppress(ChildProcessError):
                while (found := os.waitpid(-1, os.WNOHANG))[0]:
                    ended = {"ended": found[0], "status": os.waitstatus_to_exitcode(found[1])}
                    asking.send(json.dumps(ended).encode())
        if asking in ready:
            message, outputs, _, _ = socket.recv_fds(asking, REQUEST_BYTES, 2)
            if not message:
                return
            request = json.loads(message)
            os.chdir(request["directory"])
            environment = request["environment"] | {WORDS: os.environ[WORDS]}
            pid = copy(tuple(outputs), request["words"], environment, ends_with_us=True)
            os.chdir("/")
            for output in outputs:
                os.close(output)
            asking.send(json.dumps({"pid": pid}).encode())


if __name__ == "__main__":
    for library in LIBRARIES:
        __import__(library)
    serve(socket.socket(fileno=int(sys.argv[1])))
