"""One learner of a team that makes updates from fixed rows: `python -m tests.learning.team_rank UPDATES DIRECTORY`.

RANK and WORLD_SIZE say which rows are its own. The first learner writes the parameters at the end, a file a case.
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from apexrl.agents import apex_dqn
from apexrl.agents.apex_dqn_config import ApexAlgorithm, ApexUpdate
from apexrl.agents.contract import TransitionBatch
from apexrl.learning.experience.draw import Draw, Gathered
from apexrl.learning.updates.team import Team
from apexrl.learning.updates.updater import Updater
from apexrl.lifecycle import end_at_once
from apexrl.networks.config import DuelingConfig
from apexrl.networks.device_stream import DeviceStream
from apexrl.replay.priority_table import importance_weights
from tests.agents import impala_parts
from tests.learning.updates.test_updater import VECTORS

CPU = torch.device("cpu")
BATCH = 32
CLIP = 0.05  # of a mean; far below the norms, so that every update is clipped
CASES = {
    f"{family}-{optimizer}": (family, optimizer)
    for family in ("apex", "impala-mean", "impala-sum", "laser-mean")
    for optimizer in ("adam", "rmsprop")
}


def make_learner(family, optimizer):
    torch.manual_seed(3)
    if family == "apex":
        update = ApexUpdate(
            BATCH, optimizer, 1e-3, optimizer_epsilon=1e-5, max_gradient_norm=CLIP, target_period_updates=7
        )
        return apex_dqn.make_learner(ApexAlgorithm(), DuelingConfig((4, 4, 4), 16), update, VECTORS, CPU)
    reduction = family.split("-")[1]
    mix = impala_parts.LASER if family.startswith("laser") else ("queue=1",)
    clip = CLIP if reduction == "mean" else CLIP * 100
    update = impala_parts.updates(
        batch_size=BATCH, optimizer=optimizer, learning_rate=1e-3, optimizer_epsilon=1e-5, max_gradient_norm=clip,
        reduction=reduction, mix=mix,
    )  # fmt: skip
    return impala_parts.make_learner(update)


def whole_batches(family, number):
    """Returns the batches of an update by table, and the probabilities of their rows."""
    rng = np.random.default_rng(number)
    if family != "apex":
        sizes = {"queue": BATCH // 4, "uniform": 3 * BATCH // 4} if family.startswith("laser") else {"queue": BATCH}
        return impala_parts.random_batches(number, sizes, weights=(0.0, 0.5, 1.0)), None

    def normal(*shape):
        return torch.from_numpy(rng.normal(size=shape).astype(np.float32))

    stacks = (BATCH, *VECTORS.observation_shape)
    batch = TransitionBatch(
        normal(*stacks), torch.from_numpy(rng.integers(VECTORS.num_actions, size=BATCH)), 5 * normal(BATCH),
        torch.from_numpy(rng.choice([0.0, 0.97], BATCH).astype(np.float32)), normal(*stacks), torch.ones(BATCH),
    )  # fmt: skip
    return {"transitions": batch}, 10.0 ** rng.uniform(-5, -1, BATCH)


def own_rows(batch, rank, size):
    """Returns a rank's rows of a batch."""
    count = len(batch.weight) // size
    rows = slice(rank * count, (rank + 1) * count)
    if isinstance(batch, TransitionBatch):
        return batch._make(tensor[rows] for tensor in batch)
    return impala_parts.rows_of(batch, rows)


def learn(team, family, optimizer, num_updates):
    """Returns the state after some updates."""
    updater = Updater(make_learner(family, optimizer), DeviceStream(CPU), team)
    for number in range(num_updates):
        batches, probabilities = whole_batches(family, number)
        batches = {table: own_rows(batch, team.rank, team.size) for table, batch in batches.items()}
        largest = 1.0
        if probabilities is not None:
            own = probabilities.reshape(team.size, -1)[team.rank]
            weights, largest = importance_weights(own, 0.4)
            batches = {t: batch._replace(weight=torch.from_numpy(weights)) for t, batch in batches.items()}
        of_all = team.gather([largest]).max()
        samples = {t: Gathered(np.arange(len(batch.weight)), batch) for t, batch in batches.items()}
        updater.update(Draw(0, samples), None, largest / of_all)
    team.check_equal(updater.state_dict())
    return updater.state_dict()


def main(num_updates, directory):
    torch.set_num_threads(1)
    team = Team(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    for name, (family, optimizer) in CASES.items():
        state = learn(team, family, optimizer, num_updates)
        if team.is_first:
            tensors = {name: tensor.contiguous() for name, tensor in state.items()}
            save_file(tensors, directory / f"{name}.safetensors")
    team.close()
    end_at_once(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
