"""Writes the network of a checkpoint as ONNX: `apexrl export [CHECKPOINT] --output FILE`."""

import dataclasses
import json
import logging
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import tyro

from apexrl.config.words import program
from apexrl.errors import ConfigError
from apexrl.extras import missing
from apexrl.lifecycle import attempt
from apexrl.lines import say
from apexrl.own_modules import NOBODY, Trust
from apexrl.runs import CHECKPOINTS, RUNS, found_checkpoint, newest_run

if TYPE_CHECKING:
    from torch import nn

    from apexrl.networks.checkpoint import Checkpoint
    from apexrl.networks.headers import CheckpointHeader


@dataclasses.dataclass(frozen=True)
class ExportCommand:
    """Writes the network of a checkpoint as ONNX, for programs without torch."""

    checkpoint: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[CHECKPOINT]")] = ""
    """A checkpoint, or the directory of a run; by default the newest run in ./runs that has a checkpoint."""
    output: str = ""
    """File to write; by default the checkpoint's name with .onnx."""
    trust: bool = False
    """Import the modules of algorithm, network and environment that the run names: their code runs here."""


def run() -> int:
    """Runs the command line; returns the exit status."""
    return attempt("export", main)


def main() -> int:
    """Exports what the command line says; returns the exit status.

    Raises: ConfigError when a package is missing, or there is no such checkpoint or graph.
    """
    asked = tyro.cli(ExportCommand, prog=program())
    if lack := missing("export", "export"):
        raise ConfigError(lack)
    _, path = found_checkpoint(Path(asked.checkpoint) if asked.checkpoint else newest_run(RUNS, CHECKPOINTS))
    output = Path(asked.output) if asked.output else path.with_suffix(".onnx")
    if output.exists() and output.suffix != ".onnx":
        raise ConfigError(f"--output {output} is there, and its name does not end in .onnx: give another, or remove it")
    typed = shlex.join([*sys.argv[1:], *([] if asked.checkpoint else [str(path)]), "--trust"])
    for line in export(path, output, Trust(is_blind=asked.trust, cure=f"{program()} {typed}")):
        say(line)
    return 0


def export(path: Path, output: Path, trust: Trust = NOBODY) -> list[str]:
    """Writes the network of a checkpoint as ONNX; returns lines about the file.

    Raises: ConfigError when it has no graph or the file cannot be written; WireError when it is no checkpoint.
    """
    from apexrl.networks.checkpoint import load_checkpoint
    from apexrl.networks.config import own_network
    from apexrl.networks.export import graph_of, write_onnx

    for name in ("onnxscript", "onnx_ir", "torch.onnx"):  # they tell their steps
        logging.getLogger(name).setLevel(logging.ERROR)
    checkpoint = load_checkpoint(path)
    header, spec = checkpoint.header, checkpoint.header.spec
    trust.check(path, agent=header.agent, network=own_network(header.network))
    graph = graph_of(network_of(checkpoint), spec)
    taken, lacking = _taken_actions(path, header, trust)
    notes = taken | {
        "env": spec.env, "variant": spec.variant, "agent": header.agent, "updates": str(header.counters.updates),
        "action_names": json.dumps(spec.action_names), "action_bounds": json.dumps(spec.action_bounds),
        "frames_per_step": str(spec.frames_per_step),
    }  # fmt: skip
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_onnx(graph, output, notes)
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error.strerror}") from error
    shapes = {name: ", ".join(map(str, ("B", *example.shape[1:]))) for name, example in graph.inputs.items()}
    takes = [f"{name} [{shapes[name]}] {str(example.dtype)[6:]}" for name, example in graph.inputs.items()]
    return [
        f"wrote {output}: {spec.env}, update {header.counters.updates:,}",
        f"it takes {', '.join(takes)}",
        f"it gives {', '.join(graph.outputs)}",
        *lacking,
    ]


def _taken_actions(path: Path, header: "CheckpointHeader", trust: Trust) -> tuple[dict[str, str], list[str]]:
    """Returns notes about the actions that a checkpoint's environment takes; a line where it cannot be made here."""
    from apexrl.running.environment_actions import actions_of
    from apexrl.running.run_directory import played

    try:
        actions = actions_of(played(found_checkpoint(path)[0], header, trust).env, header.spec)
    except ConfigError as error:
        return {}, [f"it does not tell which actions its environment takes: {error}"]
    if actions.num:
        return {"env_actions": json.dumps(actions.taken(np.arange(actions.num)).tolist())}, []
    return {"action_shape": json.dumps(actions.space.shape)}, []


def network_of(checkpoint: "Checkpoint") -> "nn.Module":
    """Returns the network of a checkpoint, with its parameters.

    Raises: WireError when the tensors are not those of the network that the header describes.
    """
    from apexrl.agents.families import family_of, implementation
    from apexrl.networks.config import from_text
    from apexrl.networks.normalizer import with_normalizer
    from apexrl.networks.policy import check_tensors

    header, tensors = checkpoint.parameters()
    family = family_of(header.agent)
    config, make_network = from_text(header.network, type(family.network)), implementation(family).make_network
    make = with_normalizer(lambda: make_network(header.spec, config), header.spec.frame_shape, tensors)
    check_tensors(make, tensors)
    network = make()
    network.load_state_dict(tensors)
    return network
