"""Answers what only torch can tell, for `torch_look`: `python -m apexrl.running.torch_answers`, to the input's end."""

import os
import sys
from pathlib import Path

import msgspec
import torch

from apexrl.agents.families import family_of, implementation
from apexrl.errors import MALFORMED, ApexError, ConfigError, reason_of
from apexrl.learning.connections import check_size
from apexrl.learning.record.latest import latest_checkpoint
from apexrl.lifecycle import Stop, end_with_parent
from apexrl.networks.config import from_text
from apexrl.networks.device import choose_device
from apexrl.networks.headers import Identity
from apexrl.networks.own_torso import OwnTorso
from apexrl.running.torch_look import Answer, Question


def answer(question: Question) -> Answer:
    """Returns the answer to a question.

    Raises: ConfigError when the device cannot be used, the network is impossible, or the checkpoint is not sound.
    """
    if question.network is not None:
        check_network(question.network)
    if question.directory:
        checkpoint = latest_checkpoint(Path(question.directory))
        return Answer(header=None if checkpoint is None else checkpoint.header)
    if question.device:
        device = choose_device(question.device)
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
        return Answer(device=str(device), free_bytes=free, num_gpus=torch.cuda.device_count())
    return Answer()


def check_network(identity: Identity) -> None:
    """Raises ConfigError when there is no such network, or its parameters are too large for a message."""
    family = family_of(identity.agent)
    network = from_text(identity.network, type(family.network))
    with torch.device("meta"):  # it takes no memory
        made = implementation(family).make_network(identity.spec, network)
    check_size(made.state_dict())
    own = [part for part in made.modules() if isinstance(part, OwnTorso)]
    if network.network and not own:
        raise ConfigError(f"--agent {identity.agent} takes no --network: it gives `make_torso` no `own`")
    for torso in own:
        torso.check_exportable()


def main() -> None:
    """Answers questions until there are no more."""
    output = os.dup(1)
    os.dup2(2, 1)  # what libraries and modules of others print
    end_with_parent(Stop(), 0.0)
    for line in sys.stdin.buffer:
        try:
            found = answer(msgspec.json.decode(line, type=Question))
        except (ApexError, *MALFORMED) as error:
            found = Answer(fault=str(error))
        except Exception as error:  # of a module of others
            sys.excepthook(*sys.exc_info())
            found = Answer(fault=f"the network cannot be made: {reason_of(error)}")
        try:
            os.write(output, msgspec.json.encode(found) + b"\n")
        except BrokenPipeError:  # whoever asked has ended meanwhile
            return


if __name__ == "__main__":
    main()
