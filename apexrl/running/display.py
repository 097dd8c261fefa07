"""The display of a run: a live table in a terminal, plain lines elsewhere, and a summary at the end."""

import logging
import shutil
import time
from pathlib import Path
from types import TracebackType

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table

from apexrl.learning.metrics import PROBABILITY
from apexrl.learning.status_file import STATUS_FILE, Status, read_status
from apexrl.networks.checkpoint import Counters
from apexrl.running.supervise import Supervisor

LINE_PERIOD_SECONDS = 10.0
FULL_DISK_BYTES = 16 * 2**20
LEARNER = "learner/"
MOST_SHOWN_ACTIONS = 3
STALE_SECONDS = 15.0  # the learner writes the status every few seconds


class Summary(msgspec.Struct, frozen=True):
    """The outcome of a run. `seconds` and `roles_restarted` count this start only, all other fields every start."""

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


def probabilities_of(status: Status | None) -> dict[str, float]:
    """Returns the policy's mean probability of each action, as `probability_NAME`; none where the learner gives none.

    Each is the mean over the updates of the learner's last 10 seconds (`learning.metrics.PROBABILITY_SECONDS`).
    """
    metrics = status.metrics if status is not None else {}
    return {tag.removeprefix(LEARNER): p for tag, p in metrics.items() if tag.startswith(LEARNER + PROBABILITY)}


class ConsoleHandler(logging.Handler):
    """Prints log records above the live table. The table would overwrite lines written to stderr."""

    def __init__(self, console: Console):
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a record."""
        try:
            self._console.print(self.format(record), soft_wrap=True)
        except Exception:
            self.handleError(record)


class Display:
    """Shows a run while it goes on. Use it as a context manager."""

    def __init__(self, console: Console, directory: Path, supervisor: Supervisor):
        self._console = console
        self._directory = directory
        self._supervisor = supervisor
        self._began_at = time.time()
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
        """Shows the newest status: in a terminal at once, elsewhere as a line every LINE_PERIOD_SECONDS."""
        if self._live is not None:
            self._live.update(self._table())
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_PERIOD_SECONDS
            self._console.print("  ".join(f"{name} {value}" for name, value in self.rows()), soft_wrap=True)

    def rows(self) -> list[tuple[str, str]]:
        """Returns the shown rows as (name, value)."""
        rows = [("time", time.strftime("%H:%M:%S", time.gmtime(time.monotonic() - self._started)))]
        rows += self._disk()
        status, age_seconds = read_status(self._directory), self._status_age()
        if status is None or age_seconds is None:
            return [*rows, ("state", "starting"), *self._roles()]
        if age_seconds > STALE_SECONDS:
            rows.append(("stale", f"the learner has reported nothing for {age_seconds:.0f} s"))
            status = msgspec.structs.replace(status, metrics={})
        return [*rows, *progress_rows(status), *self._roles()]

    def _disk(self) -> list[tuple[str, str]]:
        """Returns a row when the disk of the run is about full. The roles cannot write that to their logs there."""
        try:
            free = shutil.disk_usage(self._directory).free
        except OSError:  # the directory was removed
            return []
        if free >= FULL_DISK_BYTES:
            return []
        return [("disk", f"{free / 2**20:.0f} MiB are free for {self._directory}: what is not saved waits for space")]

    def _status_age(self) -> float | None:
        """Returns the seconds since the status was written, None when it is missing or from an earlier start."""
        try:
            written_at = (self._directory / STATUS_FILE).stat().st_mtime
        except OSError:
            return None
        return time.time() - written_at if written_at >= self._began_at else None

    def _table(self) -> Table:
        table = Table(show_header=False, box=None)
        for row in self.rows():
            table.add_row(*row)
        return table

    def _roles(self) -> list[tuple[str, str]]:
        children = self._supervisor.children.values()
        away = [child.name for child in children if child.process is None and not child.is_given_up]
        restarted = [f"{child.name} {child.restarts}x" for child in children if child.restarts]
        given_up = [child.name for child in children if child.is_given_up]
        rows = {"restarting": away, "restarted": restarted, "given up": given_up}
        return [(state, ", ".join(names)) for state, names in rows.items() if names]


def progress_rows(status: Status) -> list[tuple[str, str]]:
    """Returns a run's progress as rows of (name, value). A metric that no role reports is a dash."""
    counters, metrics = status.counters, status.metrics
    last, best = _number(counters.last_evaluation_return), _number(counters.best_evaluation_return)
    per_second, updates_per_second = metrics.get("actor/frames_per_second"), metrics.get("learner/updates_per_second")
    fill, per_insert = metrics.get("replay/fill"), metrics.get("replay/samples_per_insert")
    waits = [
        f"{role} for {reason} {min(share, 1):.0%}"
        for role, _, reason, share in ((*tag.partition("/waits_for/"), share) for tag, share in metrics.items())
        if reason and share >= 0.01
    ]
    games, so_far = metrics.get("evaluation/games_finished"), metrics.get("evaluation/return_so_far")
    playing = [("evaluating", f"{games:.0f} games so far, mean {_number(so_far)}")] if games else []
    probabilities = probabilities_of(status)
    shown = ", ".join(f"{name.removeprefix(PROBABILITY)} {p:.3f}" for name, p in probabilities.items())
    policy = [("policy", shown)] if 0 < len(probabilities) <= MOST_SHOWN_ACTIONS else []
    return [
        ("frames", f"{status.frames:,} ({_number(per_second, ',.0f')}/s)"),
        ("updates", f"{counters.updates:,} ({_number(updates_per_second)}/s)"),
        ("replay", f"{_number(fill, '.0%')} full, {_number(per_insert, '.2f')} samples an insert"),
        ("return", f"{last} (best {best}), training {_number(metrics.get('actor/return_mean'))}"),
        *policy,
        *playing,
        ("waits", ", ".join(waits) or ("nobody" if metrics else "-")),
    ]


def _number(value: float | None, form: str = ".1f") -> str:
    return "-" if value is None else format(value, form)
