"""`apexrl card [RUN]`: a model card of a run in Markdown, made from its directory. Loads no network."""

import json
import math
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import tyro

from apexrl.config.sections import EnvConfig
from apexrl.config.words import program
from apexrl.errors import ConfigError
from apexrl.files import first_line, replacing
from apexrl.learning.record.run_page import config_of, table, telling_flags
from apexrl.learning.record.status_file import read_status
from apexrl.lifecycle import attempt
from apexrl.lines import say
from apexrl.networks.config import own_network
from apexrl.networks.headers import load_header
from apexrl.runs import CHECKPOINTS, RUNS, evaluation_of, found_checkpoint, newest_run

UNKNOWN = "Unknown: the files of its run are not beside this checkpoint, or cannot be read."
TITLE = re.compile(rb"# .+, played by \S+\s*")  # the first line of a card


def card_of(run: Path) -> str:
    """Returns the card of a run whose directory is given, or of one of its checkpoints.

    Raises: ConfigError when it has no checkpoint, or a file of it cannot be read.
    """
    directory, path = found_checkpoint(run)
    header, config, status = load_header(path), config_of(directory), read_status(directory)
    counters = header.counters
    values = {} if config is None else config.command
    trained = {
        "environment": header.spec.env,
        "algorithm": header.agent,
        "preset": values.get("preset", "unknown"),
        "network": f"`{path.name}`, update {counters.updates:,}",
    }
    if status is not None:
        whole = status.counters
        trained["the whole run"] = (
            f"{status.frames:,} frames, {whole.updates:,} updates, {whole.seconds / 60:,.1f} minutes"
        )
        ratio = whole.transitions_sampled / max(whole.transitions_inserted, 1)
        trained["samples an insert"] = f"{ratio:.2f}"
    what, telling = telling_flags(values)
    flags = {name: value for name, value in telling.items() if name not in ("env", "agent", "preset")}
    played = EnvConfig.of_variant(header.spec.env, header.spec.variant, header.spec.stacked_frames)
    names = [header.agent, own_network(header.network), played.env, *played.wrapper]
    lacking = UNKNOWN if config is None else ""
    parts = {
        "Training": table(trained),
        "Evaluation": _evaluation(directory, counters.updates) or lacking or "This network was not evaluated.",
        what: table(flags) if flags else lacking or "None.",
        "Versions and machine": UNKNOWN if config is None else table({"revision": config.revision} | config.versions),
        "Use": _use(path, names),
    }
    title = f"# {header.spec.env}, played by {header.agent}\n"
    return "\n".join([title, *(f"## {name}\n{text}\n" for name, text in parts.items())])


def _evaluation(directory: Path, updates: int) -> str:
    """Returns the evaluation of an update in words, empty without one: of a run's latest network there may be none."""
    point = evaluation_of(directory, updates)
    if point is None:
        return ""
    rows = {"games": str(point.episodes)}
    rows |= {name: f"{getattr(point, name):.2f}" for name in ("mean", "median", "min", "max")}
    if not math.isnan(point.exploration):  # of an earlier version
        rows["exploration"] = f"{point.exploration:g}"
    rows["frames until then"] = f"{point.frames:,}"
    note = "A run's best network was chosen by these games, so its mean is a little too high: play others to report it."
    return f"{table(rows)}\n\n{note}"


def _use(path: Path, names: Iterable[str]) -> str:
    trust = ", trust=True" if any(":" in name for name in names) else ""
    imports = "It imports modules that the run names: trust whoever made it.\n" if trust else ""
    return f"""{imports}```python
import apexrl

agent = apexrl.load({json.dumps(path.name, ensure_ascii=False)}{trust})
env = agent.make_environment()
observation, info = env.reset(seed=0)
action = agent.act(observation)
```
`apexrl watch {shlex.quote(path.name)} --episodes 100{" --trust" if trust else ""}` plays other games, and films one."""


def main() -> int:
    """Runs the command line; returns the exit status."""
    return attempt("write a card", lambda: tyro.cli(write_card, prog=program()))


def write_card(run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[RUN]")] = "", output: str = "") -> int:
    """Writes a model card, to publish beside a checkpoint: training, evaluation, flags, versions, how to load it.

    Args:
      run: The directory of a run, or a checkpoint; by default the newest run in ./runs that has one.
      output: File to write, a new one or an earlier card; by default the card is printed.
    """
    card = card_of(Path(run) if run else newest_run(RUNS, CHECKPOINTS))
    if not output:
        say(card)
        return 0
    path = Path(output)
    try:
        if path.exists() and not TITLE.fullmatch(first_line(path)):  # of another kind
            raise ConfigError(f"--output {output} is no card of a run: give another file, or remove that")
        with replacing(path) as temporary:
            temporary.write_text(card, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error.strerror}") from error
    return 0
