"""A look by a process that has torch, which takes a second and 200 MB: the launcher has none. It asks, and waits.

That process is `torch_answers`. It makes contexts on GPUs, half a gigabyte each, and ends before a run begins. It reads
a question and writes its answer, a line of JSON each.
"""

import contextlib
import functools
import importlib
import select
import subprocess
import sys
from collections.abc import Callable, Iterator

import msgspec

from apexrl.children import start_child
from apexrl.errors import ConfigError
from apexrl.networks.headers import CheckpointHeader, Identity

LOOK_SECONDS = 120.0  # a cold disk, and a GPU that wakes up
MODULE = "apexrl.running.torch_answers"


class Question(msgspec.Struct, omit_defaults=True):
    """One of these."""

    device: str = ""  # which device a name means
    network: Identity | None = None  # whether it can be made, and sent to actors
    directory: str = ""  # of a run: from which checkpoint it goes on


class Answer(msgspec.Struct, omit_defaults=True):
    """The answer to a question, as far as it asks for it."""

    fault: str = ""
    device: str = ""
    free_bytes: int = 0  # on it, where it is a GPU
    num_gpus: int = 0  # of this machine
    header: CheckpointHeader | None = None  # of a sound checkpoint


Ask = Callable[[Question], Answer]
"""Returns the answer. Raises ConfigError when the thing that is asked for cannot be had."""


def here(question: Question) -> Answer:
    """Answers in this process, which has torch from then on."""
    found: Answer = importlib.import_module(MODULE).answer(question)
    return found


@contextlib.contextmanager
def asking() -> Iterator[Ask]:
    """Yields a function that asks another process, which has begun to load torch.

    A process that has torch itself, and no GPU, asks none.
    """
    if (torch := sys.modules.get("torch")) is not None and not torch.cuda.is_available():
        yield here
        return
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    process = start_child(["-m", MODULE], {"OMP_NUM_THREADS": "1"}, **pipes)
    with process:
        try:
            yield functools.partial(_ask, process)
        finally:
            process.kill()


def _ask(process: subprocess.Popen[bytes], question: Question) -> Answer:
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended
        process.stdin.write(msgspec.json.encode(question) + b"\n")
    coming = select.poll()
    coming.register(process.stdout, select.POLLIN)
    asked_for = f"device {question.device!r}" if question.device else "the process that looks at the network"
    if not coming.poll(1000 * LOOK_SECONDS):
        raise ConfigError(f"{asked_for} says nothing in {LOOK_SECONDS:.0f} s: look at nvidia-smi")
    if not (line := process.stdout.readline()):
        raise ConfigError(f"{asked_for} cannot be used: the process that looks has ended, its last words are above")
    answer = msgspec.json.decode(line, type=Answer)
    if answer.fault:
        raise ConfigError(answer.fault)
    return answer
