"""`apexrl inspect [inspect|verify|export|summary] DIR` reads the journal of a replay server.

`mirror` copies one, and `import` makes one of a dataset.

It works while a server writes the journal: it takes no lock, mends nothing, and writes nothing into the journal. It
skips a file that is evicted meanwhile. An incomplete last record counts as being written, not as damaged.
"""

import collections
import difflib
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
import tyro

from apexrl.config.fields import check_range, check_ranges
from apexrl.config.flags import REGISTRY
from apexrl.config.sections import MAX_DIGITS, EnvConfig, Range
from apexrl.config.words import gathered, program
from apexrl.errors import ConfigError, WireError, fault_of
from apexrl.extras import missing
from apexrl.files import read_whole, replacing
from apexrl.lifecycle import attempt
from apexrl.lines import say
from apexrl.memory import free_memory_bytes
from apexrl.net import wire
from apexrl.net.insert_checks import InsertSizes
from apexrl.own_modules import Trust
from apexrl.replay.journal import SNAPSHOT_FILE, LogIdentity, held_numbers, identity_of, read_entries, segment_paths
from apexrl.replay.segment import FORMAT, HEADER_MAGIC, UNROLL_MAGIC, Entry, Scan, scan
from apexrl.replay.segment_files import MAX_SEGMENT_BYTES, first_number_of, strays
from apexrl.replay.snapshot import Snapshot, load_snapshot
from apexrl.tools import mirror as mirrors
from apexrl.types import Field, StreamSpec, Unroll
from apexrl.unroll import UnrollCodec

RECORD_BYTES = 24  # bytes of a record before its message
QUANTILES = (0, 10, 50, 90, 100)
Directory = Annotated[Path, tyro.conf.Positional]
NO_PREFIXES = (tyro.conf.OmitArgPrefixes,)


class Segment(NamedTuple):
    """The content of one file of unrolls when it was read."""

    path: Path
    data: bytes
    found: Scan
    is_last: bool
    follows: bool  # the file before it was read too

    @property
    def unfinished_bytes(self) -> int:
        """The number of bytes of an incomplete last record; only the last file may have one."""
        offset = self.found.end_of_records
        rest, magic = self.data[offset:], UNROLL_MAGIC if offset else HEADER_MAGIC
        if not self.is_last or len(self.found.damages) == 0 or self.found.damages[-1].offset != offset:
            return 0
        sizes = int.from_bytes(rest[16:20], "little") + int.from_bytes(rest[20:24], "little")
        is_cut = len(rest) < RECORD_BYTES or len(rest) < RECORD_BYTES + sizes
        return len(rest) if is_cut and magic.startswith(rest[:4]) else 0


def segments(directory: Path) -> Iterator[Segment]:
    """Yields the files of unrolls, oldest first, without those that are evicted meanwhile."""
    paths, follows = segment_paths(directory), False
    for path in paths:
        try:
            data = read_whole(path, MAX_SEGMENT_BYTES)
        except FileNotFoundError:
            follows = False
            continue
        yield Segment(path, data, scan(data, first_number_of(path)), path == paths[-1], follows)
        follows = True


def snapshot_of(directory: Path, identity: LogIdentity) -> tuple[Snapshot | None, str]:
    """Returns the snapshot of the tables and an empty string, or None and its fault (empty when there is no file)."""
    try:
        snapshot = load_snapshot(directory / SNAPSHOT_FILE)
    except FileNotFoundError:
        return None, ""
    except WireError as error:
        return None, f"offset 0: {error}"
    except OSError as error:
        return None, f"offset 0: {fault_of(error)}"
    if snapshot.log != identity.log:
        return None, f"offset 8: of the log {snapshot.log}, not {identity.log}"
    of_all = 4 * (snapshot.end_number - snapshot.first_number) * identity.spec.num_priorities
    for name, table in snapshot.tables.items():
        found, expected = len(table.priorities), len(table.numbers) // 2 if table.numbers else of_all
        if found not in (0, expected):
            return None, f"offset 8: table {name} with {found} bytes of priorities, not {expected}"
    return snapshot, ""


def inspect(directory: Directory) -> int:
    """Prints the name, spec and lives of a journal's log, its files and its snapshot."""
    identity = identity_of(directory)
    lives = ", ".join(f"{life} from unroll {number}" for life, number in enumerate(identity.lives))
    say(f"log       {identity.log}, format {identity.format}")
    for ancestor in identity.ancestors:
        say(f"          goes on from {ancestor}")
    spec = identity.spec
    say(f"holds     {spec.env}, {spec.unroll_starts} starts and {spec.overlap_steps} more steps an unroll")
    say(f"          {spec.unroll_bytes} bytes an unroll, {spec.num_priorities} priorities")
    frames = Field("frame", "observation", spec.frame_dtype, spec.frame_shape)
    for field, entries in ((frames, spec.unroll_frames), *((field, spec.num_entries(field)) for field in spec.fields)):
        shape = ", ".join(map(str, (entries, *field.shape)))
        say(f"field     {field.name}: {field.dtype} [{shape}]{', an extra' if field in spec.extras else ''}")
    say(f"lives     {lives or 'unknown: log.json is missing or damaged'}")
    for segment in segments(directory):
        found, numbers = segment.found, [entry.number for entry in segment.found.entries]
        held = f"unrolls {numbers[0]}..{numbers[-1]} ({len(numbers)})" if numbers else "no unroll"
        life = found.header.life if found.header is not None else "?"
        say(f"file      {segment.path.name}  {held}, {len(segment.data)} bytes, life {life}", end="")
        say(f", {segment.unfinished_bytes} bytes being written" if segment.unfinished_bytes else "", end="")
        say(", damaged" if len(found.damages) > bool(segment.unfinished_bytes) else "")
    for path in sorted([*directory.glob("*.damaged"), *directory.glob("*.aside")]):
        say(f"set aside {path.name}")
    for path in strays(directory):
        say(f"left out  {path.name}")
    snapshot, wrong = snapshot_of(directory, identity)
    if snapshot is None:
        say(f"snapshot  {wrong or 'none'}")
        return 0
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((directory / SNAPSHOT_FILE).stat().st_mtime))
    say(f"snapshot  {when}, log {snapshot.first_number}:{snapshot.end_number}")
    for name, table in snapshot.tables.items():
        of_transitions = table.priorities and not table.numbers and not spec.has_unroll_priorities
        unit = "transitions" if of_transitions else "unrolls"
        say(f"          {name}: {table.inserted} {unit} inserted, {table.sampled} sampled")
    return 0


def verify(directory: Directory, decode: bool = False) -> int:
    """Checks every checksum, the order of the unrolls and the snapshot. The status is 1 when something is damaged.

    Args:
      decode: Decompress and check every block too.
    """
    identity = identity_of(directory)
    codec, sizes = UnrollCodec(identity.spec) if decode else None, InsertSizes(identity.spec)
    damages = [] if identity.lives else ["log.json: missing or damaged"]
    damages += [f"{path.name}: offset 0: this is no file of unrolls" for path in strays(directory)]
    checked: list[int] = []  # the number of unrolls in each file
    expected: int | None = None
    for segment in segments(directory):
        damages += [f"{segment.path.name}: offset {place}: {text}" for place, text in _damages_of(segment, identity)]
        expected = expected if segment.follows else None
        for offset, entry in zip(segment.found.offsets, segment.found.entries, strict=True):
            found = _fault_of(entry, sizes, codec)
            if expected not in (None, entry.number):
                found = f"it comes where unroll {expected} belongs"
            damages += [f"{segment.path.name}: offset {offset}: unroll {entry.number}: {found}"] if found else []
            expected = entry.number + 1
        if segment.unfinished_bytes:
            say(f"{segment.path.name}: {segment.unfinished_bytes} bytes being written, or never finished")
        checked.append(len(segment.found.entries))
    snapshot, wrong = snapshot_of(directory, identity)
    damages += [f"{SNAPSHOT_FILE}: {wrong}"] if wrong else []
    kept = "a snapshot" if snapshot is not None else "no snapshot"
    say(*damages, f"{len(checked)} files, {sum(checked)} unrolls, {kept}: {len(damages)} damages", sep="\n")
    return 1 if damages else 0


def _damages_of(segment: Segment, identity: LogIdentity) -> Iterator[tuple[int, str]]:
    header, unfinished = segment.found.header, segment.unfinished_bytes
    for damage in segment.found.damages[: -1 if unfinished else None]:
        yield damage.offset, f"{damage.num_bytes} bytes are no record"
    if header is None and not (segment.is_last and unfinished == len(segment.data)):
        yield 0, "no header can be read"
    if header is None:
        return
    fits = {"log": header.log in (identity.log, *identity.ancestors), "format": header.format == FORMAT,
            "first unroll": header.first_number == first_number_of(segment.path),
            "spec": header.spec == identity.spec}  # fmt: skip
    if others := [name for name, is_same in fits.items() if not is_same]:
        yield 0, f"its header has another {' and '.join(others)} than log.json and the file's name"


def _fault_of(entry: Entry, sizes: InsertSizes, codec: UnrollCodec | None) -> str:
    try:
        insert = wire.decode_insert(entry.message)
        if codec is not None:
            codec.decode(entry.block)
    except WireError as error:
        return str(error)
    return sizes.why_wrong(insert) or sizes.why_wrong_numbers(insert)


def _readable(entries: Iterable[Entry], spec: StreamSpec, codec: UnrollCodec | None = None) -> Iterator[Entry]:
    """Yields the unrolls without those that `verify` finds faulty, which it names on stderr."""
    sizes = InsertSizes(spec)
    for entry in entries:
        fault = _fault_of(entry, sizes, codec)
        if fault:
            say(f"unroll {entry.number} is left out: {fault}", file=sys.stderr)
        else:
            yield entry


def export(
    directory: Directory,
    out: Path,
    numbers: str = ":",
    format: Literal["numpy", "minari"] = "numpy",
    trust: bool = False,
) -> int:
    """Writes decoded unrolls as NumPy arrays [N, ...], with the fields of their insert messages; or games for Minari.

    Extras are named extra_NAME. A dataset for Minari holds the whole games without their extras, an
    observation being the newest frame, and actions being those that the environment takes, where it can be
    made here.

    Args:
      out: A file.npz, or a directory that gets one file for each unroll; for Minari a directory NAME-vN.
      numbers: The numbers of the unrolls, FIRST:END without END; either may be left out.
      format: numpy, or minari, for which that package has to be installed.
      trust: Import the modules that name the environment and its wrappers, for minari: their code runs here.
    """
    first, _, end = numbers.partition(":")
    if ":" not in numbers or not (first + end + "0").isdecimal() or len(numbers) > MAX_DIGITS:
        raise ConfigError(f"--numbers {numbers}: give FIRST:END, such as 100:200, 100: or :200")
    chosen = range(int(first or 0), int(end or 2**62))
    spec = identity_of(directory).spec
    entries = (entry for entry in read_entries(directory) if entry.number in chosen)
    if format == "minari":
        if lack := missing("minari", "--format minari"):
            raise ConfigError(lack)
        from apexrl.tools.minari_export import export_games  # noqa: PLC0415 - loads gymnasium

        trusted = Trust(is_blind=trust, cure=f"{program()} {shlex.join([*sys.argv[1:], '--trust'])}")
        say(*export_games(directory, entries, spec, out, trusted), sep="\n")
        return 0
    readable = _readable(entries, spec, UnrollCodec(spec))
    in_one = out.suffix == ".npz"
    if in_one:
        held = held_numbers(directory)
        many = len(range(max(held.start, chosen.start), min(held.stop, chosen.stop)))
        if (needed := 2 * many * spec.unroll_bytes) > (free := free_memory_bytes()):  # decoded, and stacked
            raise ConfigError(f"--out {out}: {many} unrolls in one file need {needed / 1e9:.1f} GB of memory, and "
                              f"{free / 1e9:.1f} GB are free: give a directory, or --numbers FIRST:END")  # fmt: skip
    num_unrolls = 0
    for group in [list(readable)] if in_one else ([entry] for entry in readable):
        path = out if in_one else out / f"unroll-{group[0].number:016d}.npz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if group:
                with replacing(path) as temporary, temporary.open("wb") as file:
                    np.savez(file, **_arrays(group, spec))  # type: ignore[arg-type]
        except OSError as error:
            raise ConfigError(f"--out {out} cannot be written ({error.strerror}): give another place") from error
        num_unrolls += len(group)
    if not num_unrolls:
        raise ConfigError(f"--numbers {numbers}: the journal holds none that can be read (`inspect` tells them)")
    say(f"{num_unrolls} unrolls to {out}")
    return 0


def _arrays(entries: list[Entry], spec: StreamSpec) -> dict[str, np.ndarray]:
    codec, inserts = UnrollCodec(spec), [wire.decode_insert(entry.message) for entry in entries]
    unrolls = [codec.decode(entry.block) for entry in entries]
    names = [name for name in Unroll._fields if name != "extras"]
    arrays = {name: np.stack([getattr(unroll, name) for unroll in unrolls]) for name in names}
    for field in spec.extras:
        arrays[f"extra_{field.name}"] = np.stack([unroll.extras[field.name] for unroll in unrolls])
    for name in ("actor", "sequence", "stream", "first_step", "params_version", "exploration"):
        arrays[name] = np.array([getattr(insert, name) for insert in inserts])
    arrays["number"] = np.array([entry.number for entry in entries])
    headers = [insert.header(spec.unroll_starts) for insert in inserts]
    arrays["priorities"] = np.stack([header.priorities for header in headers])
    arrays["valid"] = np.stack([header.valid for header in headers])
    pairs = zip(entries, inserts, strict=True)
    played = [(entry.number, *msgspec.structs.astuple(game)) for entry, insert in pairs for game in insert.episodes]
    # [episodes, 4]: the unroll's number, then the episode's return, steps and exploration.
    return arrays | {"episodes": np.array(played, np.float64).reshape(-1, 4)}


def import_games(
    source: Annotated[str, tyro.conf.Positional],
    out: Path,
    config: EnvConfig = EnvConfig(env=""),
    agent: str = "",
    format: Literal["minari"] = "minari",
) -> int:
    """Writes a dataset's games as a journal, from which --from-journal learns. Nothing is downloaded.

    The flags of the environment are those of the run that will learn; without --env it is the one of the dataset.

    Args:
      source: A directory NAME-vN, or the id of a dataset that Minari holds on this machine.
      out: A new directory.
      agent: The algorithm whose unrolls are written; others that learn from steps alone cut them anew.
      format: minari, for which that package has to be installed.
    """
    check_ranges(config)
    if lack := missing("minari", f"--format {format}"):
        raise ConfigError(lack)
    from apexrl.tools.minari_import import write_journal  # noqa: PLC0415 - loads gymnasium

    say(write_journal(Path(source), out, config, agent))
    return 0


def summary(directory: Directory) -> int:
    """Prints the numbers of a journal: transitions, bytes, versions, episodes, priorities."""
    identity = identity_of(directory)
    totals: collections.Counter[str] = collections.Counter()
    returns: dict[str, list[float]] = collections.defaultdict(list)
    versions, actors = set(), set()
    for entry in _readable(read_entries(directory), identity.spec):
        insert = wire.decode_insert(entry.message)
        transitions = int(insert.header(identity.spec.unroll_starts).valid.sum())
        totals.update(unrolls=1, transitions=transitions, messages=len(entry.message), blocks=len(entry.block))
        versions.add(insert.params_version)
        actors.add(insert.actor)
        for episode in insert.episodes:
            for group in (f"at exploration {episode.exploration:.2g}", "in all"):
                returns[group].append(episode.episode_return)
    num_bytes, decoded_bytes = totals["messages"] + totals["blocks"], totals["unrolls"] * identity.spec.unroll_bytes
    say(f"{totals['unrolls']} unrolls, {totals['transitions']} transitions, {len(actors)} actors")
    say(f"{num_bytes / max(totals['transitions'], 1):.1f} bytes per transition", end=", ")
    say(f"compression ratio {decoded_bytes / max(totals['blocks'], 1):.2f}")
    say(f"params_version {min(versions, default=0)}..{max(versions, default=0)}")
    for group, values in sorted(returns.items()):
        say(f"episodes {group}: {len(values)}, mean return {np.mean(values):.4g}")
    snapshot, _ = snapshot_of(directory, identity)
    for name, table in (snapshot.tables if snapshot is not None else {}).items():
        powers = np.frombuffer(table.priorities, np.float32).astype(np.float64)
        if powers.any() and table.priority_exponent > 0:
            found = np.percentile(powers[powers > 0] ** (1 / table.priority_exponent), QUANTILES)
            text = ", ".join(f"{q} % {value:.4g}" for q, value in zip(QUANTILES, found, strict=True))
            say(f"priorities of {name}: {text}")
    return 0


def mirror(
    directory: Directory, server: str = "127.0.0.1:51002", keys: str = "", max_gb: float = 0.0, log: str = ""
) -> int:
    """Follows a replay server, and writes its log into a journal here, until Ctrl-C or SIGTERM.

    A replay server that is started with this --journal-dir goes on from there, when the other one is lost.

    Args:
      server: HOST:PORT, its port for learners.
      keys: A directory of keys that has a learner's secret.
      max_gb: Gigabytes of unrolls that the copy keeps at most; 0: as many unrolls as the server may hold.
      log: The name of the log, where the server has several.
    """
    check_range("max_gb", max_gb, Range(0))
    return mirrors.run(directory, server, keys, max_gb, log)


def main() -> int:
    """Runs one command of the command line; returns its exit status."""
    commands: dict[str, Callable[..., int]] = {c.__name__: c for c in (inspect, verify, export, summary, mirror)}
    commands["import"] = import_games
    words = gathered(sys.argv[1:], "--wrapper")
    if words and not words[0].startswith("-") and words[0] not in commands:
        meant = difflib.get_close_matches(words[0], commands, 1)
        if meant and not os.path.lexists(words[0]):
            fault = f"there is no {words[0]}, neither a command nor a directory: did you mean {meant[0]}?"
            say(f"inspect: {fault}", file=sys.stderr)
            return 2
        words = ["inspect", *words]
    cli = tyro.extras.subcommand_cli_from_dict
    return attempt("inspect", lambda: cli(commands, args=words, prog=program(), config=NO_PREFIXES, registry=REGISTRY))
