"""What a person sees of a run: a live table in a terminal, plain lines elsewhere, and a summary at the end."""

import contextlib
import time
from pathlib import Path
from types import TracebackType

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table

from apexrl.checkpoint import Counters
from apexrl.supervise import Supervisor

STATUS_FILE = "status.json"
LINE_PERIOD_SECONDS = 10.0


class Status(msgspec.Struct, frozen=True):
    """What the learner writes to STATUS_FILE for whoever watches the run."""

    env: str
    frames: int
    counters: Counters
    figures: dict[str, float]
    waits_for: str


class Summary(msgspec.Struct, frozen=True):
    """The outcome of a run. `seconds` and `roles_restarted` are of this start, the totals of all its starts."""

    env: str
    seconds: float
    frames: int
    agent_steps: int
    transitions_inserted: int
    updates: int
    transitions_sampled: int
    samples_per_insert: float
    episodes: int
    evaluation_episodes: int
    evaluation_mean_return: float | None
    evaluation_best_return: float | None
    roles_restarted: int


def read_status(directory: Path) -> Status | None:
    """Returns the newest status of a run, None when there is none yet."""
    with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
        return msgspec.json.decode((directory / STATUS_FILE).read_bytes(), type=Status)
    return None


def summary_of(status: Status | None, env: str, seconds: float, restarts: int) -> Summary:
    """Returns the summary of a run that ended after `seconds`."""
    counters = status.counters if status is not None else Counters()
    return Summary(
        env,
        round(seconds, 1),
        status.frames if status is not None else 0,
        counters.transitions_inserted,
        counters.transitions_inserted,
        counters.updates,
        counters.transitions_sampled,
        round(counters.transitions_sampled / max(counters.transitions_inserted, 1), 3),
        counters.episodes,
        counters.evaluation_episodes,
        counters.last_evaluation_return,
        counters.best_evaluation_return,
        restarts,
    )


class Display:
    """Shows a run while it goes on; a context manager."""

    def __init__(self, console: Console, directory: Path, supervisor: Supervisor):
        self._console = console
        self._directory = directory
        self._supervisor = supervisor
        self._started = time.monotonic()
        self._next_line = self._started + LINE_PERIOD_SECONDS
        self._live = Live(console=console, refresh_per_second=2) if console.is_terminal else None

    def __enter__(self) -> "Display":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self) -> None:
        """Shows the newest status, in a terminal at once, elsewhere as a line now and then."""
        if self._live is not None:
            self._live.update(self._table())
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_PERIOD_SECONDS
            self._console.print(
                "  ".join(f"{name} {value}" for name, value in self._rows()), highlight=False, soft_wrap=True
            )

    def _table(self) -> Table:
        table = Table(show_header=False, box=None)
        for row in self._rows():
            table.add_row(*row)
        return table

    def _rows(self) -> list[tuple[str, str]]:
        rows = [("time", time.strftime("%H:%M:%S", time.gmtime(time.monotonic() - self._started)))]
        status = read_status(self._directory)
        if status is None:
            return [*rows, ("state", "starting"), *self._roles()]
        f, counters = status.figures, status.counters
        last, best = _number(counters.last_evaluation_return), _number(counters.best_evaluation_return)
        spi = f.get("replay/samples_per_insert", 0)
        rows += [
            ("frames", f"{status.frames:,} ({f.get('actor/frames_per_second', 0):,.0f}/s)"),
            ("updates", f"{counters.updates:,} ({f.get('learner/updates_per_second', 0):.1f}/s)"),
            ("replay", f"{f.get('replay/fill', 0):.0%} full, {spi:.2f} samples an insert"),
            ("return", f"{last} (best {best}), training {_number(f.get('actor/return_mean'))}"),
            ("waits", ", ".join(self._waits(f)) or "nobody"),
        ]
        return rows + self._roles()

    def _waits(self, figures: dict[str, float]) -> list[str]:
        waits = []
        for tag, share in figures.items():
            role, _, reason = tag.partition("/waits_for/")
            if reason and share >= 0.01:
                waits.append(f"{role} for {reason} {share:.0%}")
        return waits

    def _roles(self) -> list[tuple[str, str]]:
        away = [child.name for child in self._supervisor.children.values() if child.process is None]
        restarted = [
            f"{child.name} {child.restarts}x" for child in self._supervisor.children.values() if child.restarts
        ]
        rows = [("restarting", ", ".join(away))] if away else []
        return rows + ([("restarted", ", ".join(restarted))] if restarted else [])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
