"""The file of a sweep, and the runs that follow from it: every command line is checked before anything starts."""

import math
import random
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from apexrl.config.commands import RunCommand
from apexrl.config.flags import Asked
from apexrl.config.words import Basis, flag_of, flags_in, words_of
from apexrl.errors import UNREADABLE, ConfigError, fault_of
from apexrl.files import read_whole
from apexrl.own_modules import NOBODY
from apexrl.running.plan import make_plan
from apexrl.running.prepare import first_default
from apexrl.running.refusals import check_asked
from apexrl.running.run_directory import CONFIG_FILE
from apexrl.running.torch_look import Ask, asking

# The sweep gives them, or they fit none of its runs.
OWN_FLAGS = ("--seed", "--run-dir", "--resume", "--from-scratch", "--fork", "--at", "--from-journal", "--guest",
             "--smoke", "--name")  # fmt: skip


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The range of a number, both ends included, of which each sample has a value; whole where both ends are."""

    low: int | float
    high: int | float
    log: bool = False  # the logarithms of the values are spread evenly

    def value(self, flag: str, sample: int) -> int | float:
        """Returns the value of a sample: another range, or more samples, change none of them.

        Raises: ConfigError when there is no such range.
        """
        if not -math.inf < self.low < self.high < math.inf or (self.log and self.low <= 0):
            raise ConfigError(f"{flag}: low {self.low} and high {self.high} make no range{' for log' * self.log}")
        generator, low, high = random.Random(f"{flag} {sample}"), self.low, self.high
        found = math.exp(generator.uniform(math.log(low), math.log(high))) if self.log else generator.uniform(low, high)
        if type(low) is type(high) is int:
            return min(max(round(found), low), high) if self.log else generator.randint(low, high)
        return min(max(float(f"{found:.4g}"), low), high)


Value = bool | int | float | str | list[int | float | str]


class SweepFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of FILE.toml."""

    directory: Annotated[str, msgspec.Meta(pattern="^[^\0]*$")]
    seeds: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)], ...], msgspec.Meta(min_length=1)]
    flags: dict[str, Value | Span] = {}
    variants: dict[str, dict[str, Value | Span]] = {}
    samples: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 0  # of each variant with a range
    threshold: float | None = None


class SweepRun(NamedTuple):
    """One run of a sweep."""

    variant: str
    directory: Path
    arguments: list[str]  # from the file and the command line
    command: RunCommand  # that they make here and now, for the variant's first seed

    @property
    def has_begun(self) -> bool:
        """Whether there is something to resume."""
        return (self.directory / CONFIG_FILE).exists()


def read_file(path: Path) -> SweepFile:
    """Returns the content of a sweep's file.

    Raises: ConfigError when it cannot be read, has other fields, or a name or seed cannot be used.
    """
    try:
        file = msgspec.toml.decode(read_whole(path), type=SweepFile)
    except UNREADABLE as error:
        raise ConfigError(f"{path}: {fault_of(error)}") from error
    if file.threshold is not None and not math.isfinite(file.threshold):
        raise ConfigError(f"{path}: threshold {file.threshold} makes no sense: give a mean return")
    if len(set(file.seeds)) < len(file.seeds):
        raise ConfigError(f"{path}: give each seed once")
    file = file if file.variants else msgspec.structs.replace(file, variants={path.stem: {}})
    for name in file.variants:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ConfigError(f"{path}: {name!r} names no directory: take letters, digits, dots, dashes, underscores")
    return file


def runs_of(file: SweepFile, given: list[str]) -> list[SweepRun]:
    """Returns the runs of a sweep, the variants of the first seed first.

    Args:
      given: flags that win over the file's.
    Raises: ConfigError when a command line makes no run that works here and ends.
    """
    plans = {}
    with asking() as ask:
        for name, flags in _samples(file).items():
            arguments = [*(word for flag, value in flags.items() for word in words_of(flag, value)), *given]
            try:
                _check_own(arguments)
                plans[name] = arguments, _planned([*arguments, "--seed", str(file.seeds[0])], ask)
            except ConfigError as error:
                raise ConfigError(f"the variant {name}: {error}") from error
    directory = Path(file.directory)
    return [
        SweepRun(name, directory / f"{name}-seed{seed}", [*arguments, "--seed", str(seed)], command)
        for seed in file.seeds
        for name, (arguments, command) in plans.items()
    ]


def _samples(file: SweepFile) -> dict[str, dict[str, Value]]:
    """Returns the flags of each variant, and of each sample of one that has ranges.

    Raises: ConfigError when there are samples without a range, or the other way round, or two have one name.
    """
    variants: dict[str, dict[str, Value]] = {}
    has_ranges = False
    for name, own in file.variants.items():
        flags = {**_dashed(name, file.flags), **_dashed(name, own)}
        spans = {flag: value for flag, value in flags.items() if isinstance(value, Span)}
        plain = {flag: value for flag, value in flags.items() if not isinstance(value, Span)}
        if spans and not file.samples:
            raise ConfigError(f"the variant {name}: {next(iter(spans))} is a range: give samples = N beside seeds")
        has_ranges |= bool(spans)
        for sample in range(file.samples if spans else 1):
            drawn = {flag: span.value(flag, sample) for flag, span in spans.items()}
            whole = f"{name}-{sample}" if spans else name
            if whole in variants:
                raise ConfigError(f"{whole} is a variant, and a sample of another one: give one of them another name")
            variants[whole] = plain | drawn
    if file.samples and not has_ranges:
        raise ConfigError(f"samples = {file.samples}, and no flag has a range: give e.g. {{low = 1e-5, high = 1e-3}}")
    return variants


def _dashed(variant: str, flags: Mapping[str, Value | Span]) -> dict[str, Value | Span]:
    """Returns values by flag. Raises: ConfigError when two names are one flag, as total-frames and total_frames are."""
    dashed: dict[str, Value | Span] = {}
    for name, value in flags.items():
        if (flag := flag_of(name)) in dashed:
            raise ConfigError(f"the variant {variant}: {flag} stands there twice, once as {name}: give one of them")
        dashed[flag] = value
    return dashed


def _check_own(arguments: list[str]) -> None:
    given = {flag.replace("_", "-") for flag, _ in flags_in(arguments)}
    if taken := [flag for flag in OWN_FLAGS if flag in given]:
        raise ConfigError(
            f"{taken[0]} cannot be given here: a sweep takes seeds and a directory, and resumes by itself"
        )


def _planned(arguments: list[str], ask: Ask) -> RunCommand:
    """Returns the command that a run of these arguments would have now.

    Raises: ConfigError when it would not work, or not end.
    """
    try:
        asked = Asked.of(first_default(Basis.of(arguments), None, NOBODY, arguments), arguments)
    except SystemExit as ended:
        if not ended.code:  # --help
            raise
        raise ConfigError(f"its command line is refused, see above: {shlex.join(arguments)}") from ended
    check_asked(asked)
    command = make_plan(asked, None, ask).command
    if command.replay.journal_dir not in ("auto", "off"):
        raise ConfigError("--journal-dir: each run of a sweep keeps its own experience: leave it out, or say off")
    if not (command.max_seconds or command.learning.total_frames or command.learning.total_updates):
        raise ConfigError("it never ends: give max-seconds, total-frames or total-updates")
    return command
