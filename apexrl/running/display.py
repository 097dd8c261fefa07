"""The display of a run: a live table in a terminal, plain lines elsewhere, and a summary at the end."""

import collections
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from apexrl.config.commands import RunCommand
from apexrl.config.flags import explicit_replay, wants_of
from apexrl.config.tables import tables_of
from apexrl.learning.record.metrics import PROBABILITY
from apexrl.learning.record.status_file import LAST_EVALUATION, Status, Statuses
from apexrl.lines import printable
from apexrl.networks.headers import Counters
from apexrl.running.supervise import Supervisor
from apexrl.types import StreamSpec

LINE_PERIOD_SECONDS = 10.0
FULL_DISK_BYTES = 16 * 2**20
LEARNER = "learner/"
MOST_SHOWN_ACTIONS = 3
PLANNED_WAITS = {("actor", "learner"), ("learner", "actors")}  # one of the two nearly always: a limiter keeps the ratio
STALE_SECONDS = 15.0  # the learner writes the status every few seconds
PACE_SECONDS = 60.0
BAR_CHARACTERS = 24


class RunConsole(Console):
    """Prints for people; no text controls the terminal, whoever wrote it.

    A reader that goes away, as `tee` does at Ctrl-C, ends no run: the rest is not printed. Nor does a full disk, or a
    terminal that is gone: what cannot be written is left out.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)  # others wrote much of the printed text

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Called by rich for all that is printed; returns it in pieces."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def _check_buffer(self) -> None:
        """Called by rich to write what was rendered."""
        try:
            super()._check_buffer()
        except OSError:
            del self._buffer[:]

    def on_broken_pipe(self) -> None:
        """Called by rich, whose own method ends the process. The interpreter flushes the stream once more."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def say_failed(what: str, error: Exception) -> None:
    """Prints to stderr why a run does not begin, or ends."""
    RunConsole(stderr=True).print(Text.assemble((f"{what}:", "bold red"), f" {error}"), soft_wrap=True)


def redraws(console: Console) -> bool:
    """Returns whether lines that were printed can be overwritten: on a terminal that a person may look at.

    A pipe, such as that of a notebook, keeps all that it gets, even where FORCE_COLOR makes rich treat it as a
    terminal. So do dumb terminals and the logs of continuous integration.
    """
    is_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return console.is_interactive and console.file.isatty() and not is_ci


class Targets(NamedTuple):
    """The numbers that a run goes towards; 0 where it has none."""

    warm_up_transitions: int = 0  # that have to be there before the first update
    total_frames: int = 0
    total_updates: int = 0
    games: int = 0  # of an evaluation
    seconds: float = 0.0  # of the run


NO_TARGETS = Targets()


def targets_of(command: RunCommand, spec: StreamSpec) -> Targets:
    """Returns the targets of a run."""
    tables = tables_of(explicit_replay(command), spec.unroll_starts, spec.has_unroll_priorities)
    least = [0]
    for table in (tables[want.table] for want in wants_of(command)):
        holds_transitions = table.kind == "priority" and not spec.has_unroll_priorities
        least.append(table.min_size_to_sample * (1 if holds_transitions else spec.unroll_starts))
    learning = command.learning
    seconds = 0.0 if command.smoke else command.max_seconds  # a smoke run's time begins with its first frame
    return Targets(max(least), learning.total_frames, learning.total_updates, command.evaluation.episodes, seconds)


class Pace:
    """Estimates when a count will reach a number, by its growth over the last PACE_SECONDS."""

    def __init__(self) -> None:
        self._seen: collections.deque[tuple[float, int]] = collections.deque()  # seconds and counts that differ

    def seconds_left(self, count: int, target: int, now: float) -> float | None:
        """Takes the count of now; returns the seconds until it reaches the target, None while they are not known."""
        if not self._seen or count != self._seen[-1][1]:
            self._seen.append((now, count))
        while len(self._seen) > 2 and self._seen[0][0] < now - PACE_SECONDS:
            self._seen.popleft()
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        if last <= first:
            return None
        return max(target - count, 0) * (ended - began) / (last - first)


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
    evaluation_median_return: float | None = None
    evaluation_exploration: float | None = None  # that its games were played with: epsilon with Ape-X
    ended_by: str = ""  # what ended it before its time: an evaluation as --stop-at-return asks, or a callback


def summary_of(status: Status | None, env: str, seconds: float, restarts: int, ended_by: str = "") -> Summary:
    """Returns the summary of a run that ended after `seconds`."""
    counters = status.counters if status is not None else Counters()
    metrics = status.metrics if status is not None else {}
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
        metrics.get("evaluation/return_median"),
        metrics.get("evaluation/exploration"),
        ended_by,
    )


def probabilities_of(status: Status | None) -> dict[str, float]:
    """Returns the policy's mean probability of each action, as `probability_NAME`; none where the learner gives none.

    Each is the mean over the learner's last updates (`learning.metrics.PROBABILITY_UPDATES`).
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

    def __init__(self, console: Console, directory: Path, supervisor: Supervisor, targets: Targets = NO_TARGETS,
                 clock: Callable[[], float] = time.monotonic):  # fmt: skip
        self._console = console
        self._directory = directory
        self._supervisor = supervisor
        self._targets = targets
        self._clock = clock
        # By unit, and whether learning has begun, which slows the actors down.
        self._paces: dict[tuple[str, bool], Pace] = collections.defaultdict(Pace)
        self._statuses = Statuses(directory, clock)
        self._started = clock()
        self._next_line = self._started + LINE_PERIOD_SECONDS
        self._live = Live(console=console, refresh_per_second=2) if redraws(console) else None

    def __enter__(self) -> "Display":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self) -> None:
        """Shows the newest status: at once where it `redraws`, elsewhere as a line every LINE_PERIOD_SECONDS."""
        if self._live is not None:
            self._live.update(table_of(self.rows(), self._console))
        elif self._clock() >= self._next_line:
            self._next_line = self._clock() + LINE_PERIOD_SECONDS
            self._console.print("  ".join(f"{name} {value}" for name, value in self.rows()), soft_wrap=True)

    def rows(self) -> list[tuple[str, str]]:
        """Returns the shown rows as (name, value)."""
        spent, seconds = self._clock() - self._started, self._targets.seconds
        rows = [("time", duration(spent) + (f" of {duration(seconds)}" if seconds else ""))]
        rows += self._disk()
        status, age_seconds = self._statuses.newest(), self._statuses.age_seconds()
        if status is None:
            return [*rows, ("state", "starting"), *self._beginnings(), *self._roles()]
        if age_seconds > STALE_SECONDS:
            rows.append(("stale", f"the learner has reported nothing for {age_seconds:.0f} s"))
            status = msgspec.structs.replace(status, metrics={})
        return [*rows, *self._way(status), *progress_rows(status, self._targets), *self._roles()]

    def _beginnings(self) -> list[tuple[str, str]]:
        """Returns the newest line of each role that the run needs."""
        children = self._supervisor.children.values()
        return [(c.name, c.newest_line or "loading") for c in children if c.is_needed and c.process is not None]

    def _way(self, status: Status) -> list[tuple[str, str]]:
        """Returns how far the run is on its way to the first update, or to its totals, and how long that takes."""
        counters, targets = status.counters, self._targets
        inserted = counters.transitions_inserted
        if status.waits_for == LAST_EVALUATION:
            return [("state", f"waiting for {LAST_EVALUATION}; Ctrl-C ends the run without it")]
        rows = [
            ("warm-up", inserted, 0 if counters.updates else targets.warm_up_transitions, "transitions"),
            ("progress", status.frames, targets.total_frames, "frames"),
            ("progress", counters.updates, targets.total_updates, "updates"),
        ]
        shown = [
            (name, self._share(count, target, unit, self._paces[unit, counters.updates > 0]))
            for name, count, target, unit in rows
            if target and (count < target or name == "progress")
        ]
        played = int(status.metrics.get("actor/agent_steps_total", 0))
        if counters.updates == 0 and played > inserted:
            shown.append(("playing", f"{played:,} steps; a stream's steps arrive when its unroll is full"))
        return shown

    def _share(self, count: int, target: int, unit: str, pace: Pace) -> str:
        share = min(count / target, 1.0)
        left, seconds = pace.seconds_left(count, target, self._clock()), self._targets.seconds
        if left and seconds and left > self._started + seconds - self._clock():
            left = None  # the time is over before
        text = f"{share:.0%} of {target:,} {unit}" + (f", about {duration(left)} left" if left else "")
        if self._live is None:
            return text
        return f"{bar(share, getattr(self._console.file, 'encoding', None) or 'utf-8')} {text}"

    def _disk(self) -> list[tuple[str, str]]:
        """Returns a row when the disk of the run is about full. The roles cannot write that to their logs there."""
        try:
            free = shutil.disk_usage(self._directory).free
        except OSError:  # the directory was removed
            return []
        if free >= FULL_DISK_BYTES:
            return []
        return [("disk", f"{free / 2**20:.0f} MiB are free for {self._directory}: what is not saved waits for space")]

    def _roles(self) -> list[tuple[str, str]]:
        children = self._supervisor.children.values()
        away = [child.name for child in children if child.process is None and not child.is_given_up]
        restarted = [f"{child.name} {child.restarts}x" for child in children if child.restarts]
        given_up = [child.name for child in children if child.is_given_up]
        rows = {"restarting": away, "restarted": restarted, "given up": given_up}
        return [(state, ", ".join(names)) for state, names in rows.items() if names]


def table_of(rows: Iterable[tuple[str, str]], console: Console) -> Text:
    """Returns names and values as a table without padding, which would wrap into empty lines in a narrower terminal."""
    table = Table(show_header=False, box=None)
    for _ in range(2):
        table.add_column(overflow="fold")  # a long path is told whole
    for row in rows:
        table.add_row(*row)
    lines = console.render_lines(table, pad=False)
    return Text("\n".join("".join(segment.text for segment in line).rstrip() for line in lines))


def bar(share: float, encoding: str) -> str:
    """Returns a bar of BAR_CHARACTERS that is full to a share, in characters of an encoding."""
    full, empty = "█░" if encoding.lower().startswith("utf") else "#."
    length = round(share * BAR_CHARACTERS)
    return full * length + empty * (BAR_CHARACTERS - length)


def duration(seconds: float) -> str:
    """Returns seconds as hours, minutes and seconds."""
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"


def progress_rows(status: Status, targets: Targets = NO_TARGETS) -> list[tuple[str, str]]:
    """Returns a run's progress as rows of (name, value). A metric that no role reports is a dash."""
    counters, metrics = status.counters, status.metrics
    last, best = _number(counters.last_evaluation_return), _number(counters.best_evaluation_return)
    per_second, updates_per_second = metrics.get("actor/frames_per_second"), metrics.get("learner/updates_per_second")
    fill, per_insert = metrics.get("replay/fill"), metrics.get("replay/samples_per_insert")
    median = _number(metrics.get("evaluation/return_median"))
    waits = [
        f"{role} for {reason} {min(share, 1):.0%}{' (as planned)' if (role, reason) in PLANNED_WAITS else ''}"
        for role, _, reason, share in ((*tag.partition("/waits_for/"), share) for tag, share in metrics.items())
        if reason and share >= 0.01
    ]
    games, so_far = metrics.get("evaluation/games_finished"), metrics.get("evaluation/return_so_far")
    of = f" of {targets.games}" if targets.games else ""
    mean = "" if so_far is None else f", mean {_number(so_far)} so far"
    playing = [] if games is None else [("evaluating", f"{games:.0f}{of} games{mean}")]
    probabilities = probabilities_of(status)
    shown = ", ".join(f"{name.removeprefix(PROBABILITY)} {p:.3f}" for name, p in probabilities.items())
    policy = [("policy", shown)] if 0 < len(probabilities) <= MOST_SHOWN_ACTIONS else []
    rate = "" if "learner/learning_rate" not in metrics else f", rate {metrics['learner/learning_rate']:.3g}"
    scheduled = {tag.partition("/scheduled/")[2]: number for tag, number in metrics.items() if "/scheduled/" in tag}
    rate += "".join(f", {name.replace('_', ' ')} {number:.3g}" for name, number in scheduled.items())
    return [
        ("frames", f"{status.frames:,} ({_number(per_second, ',.0f')}/s)"),
        ("updates", f"{counters.updates:,} ({_number(updates_per_second)}/s){rate}"),
        ("replay", f"{_fullness(fill)}, {_number(per_insert, '.2f')} samples an insert"),
        ("return", f"{last} (median {median}, best {best}), training {_number(metrics.get('actor/return_mean'))}"),
        *policy,
        *playing,
        ("waits", printable(", ".join(waits)) or ("nobody" if metrics else "-")),
    ]


def _number(value: float | None, form: str = ".1f") -> str:
    return "-" if value is None else format(value, form)


def _fullness(fill: float | None) -> str:
    """Returns how full the replay is; its capacity is a soft limit."""
    return "at capacity" if fill is not None and fill >= 0.995 else f"{_number(fill, '.0%')} full"
