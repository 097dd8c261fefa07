"""Networks, stores and draws of a small Ape-X for tests; `train` gives those of a whole run in lockstep."""

import copy
import tempfile
from unittest import mock

import torch

from apexrl.agents import apex_dqn
from apexrl.agents.apex_dqn_config import ApexAlgorithm, ApexUpdate
from apexrl.agents.contract import Transitions, Want
from apexrl.config.commands import RunCommand
from apexrl.config.sections import ActingConfig, EnvConfig, LearningConfig, ReplayConfig
from apexrl.learning.experience.draw import Draw
from apexrl.learning.updates.updater import Updater
from apexrl.lifecycle import Stop
from apexrl.lockstep.loop import LockstepLoop
from apexrl.networks.config import DuelingConfig, to_text
from apexrl.networks.device_stream import DeviceStream
from apexrl.networks.headers import Identity, ParametersHeader
from apexrl.networks.parameters import Parameters, decode_parameters, encode_parameters

CPU = torch.device("cpu")
TABLE = "transitions"
ALGORITHM = ApexAlgorithm(unroll_starts=8)
UPDATE = ApexUpdate(
    16, "adam", 1e-3, optimizer_epsilon=1e-5, max_gradient_norm=40.0, target_period_updates=20, table=TABLE
)
NETWORK = DuelingConfig(channels=(4, 4, 4), hidden_size=16)
VIEW = Transitions(ALGORITHM.n_steps, ALGORITHM.gamma)
NUM_ENVS = 4


def identity_of(spec):
    return Identity(spec, "apex-dqn", to_text(NETWORK))


def make_updater(spec, update=UPDATE, device_stream=None, algorithm=ALGORITHM):
    """Returns an updater with new networks."""
    device_stream = device_stream or DeviceStream(CPU)
    with device_stream.exclusive():
        learner = apex_dqn.make_learner(algorithm, NETWORK, update, spec, device_stream.device)
    return Updater(learner, device_stream)


def parameters_of(updater, spec, run=""):
    """Returns the parameters of an updater as they reach an actor."""
    tensors, _ = updater.parameters()
    header = ParametersHeader(updater.num_updates, *identity_of(spec), run)
    return decode_parameters(encode_parameters(header, tensors))


def exact_parameters_of(updater, spec):
    return Parameters(ParametersHeader(updater.num_updates, *identity_of(spec)), updater.parameters()[0])


def want(batch_size=16, view=VIEW, table=TABLE):
    return Want(table, batch_size, view)


def hold(store, number, unroll):
    """Stores an unroll."""
    store.commit(store.begin(number), unroll)


def draw_of(store, keys, weights):
    """Returns a draw of one table, gathered."""
    return Draw(store.generation, {TABLE: store.gather(TABLE, keys, weights)})


def results(pending):
    """Returns the priorities of the only table, and the metrics."""
    priorities, metrics = pending.result()
    return priorities[TABLE], metrics | pending.row_metrics()


def train(env: str, num_updates: int, seed: int) -> tuple[Updater, list[Draw]]:
    """Acts and learns in lockstep; returns the updater and copies of the draws that it saw."""
    draws, update = [], Updater.update

    def recorded(updater, draw):
        draws.append(copy.deepcopy(draw))  # its memory is used again
        return update(updater, draw)

    with tempfile.TemporaryDirectory() as directory, mock.patch.object(Updater, "update", recorded):
        loop = LockstepLoop(
            RunCommand(
                seed=seed,
                env=EnvConfig(env),
                algorithm=ALGORITHM,
                acting=ActingConfig(environments_per_worker=NUM_ENVS, parameter_period_frames=1),
                replay=ReplayConfig(1000, 64, 2.0),
                update=UPDATE,
                network=NETWORK,
                learning=LearningConfig(publish_period_updates=5, total_updates=num_updates),
                evaluator=False,
                run_dir=directory,
            ),
            Stop(),
        )
        loop.run()
    return loop.learner.updater, draws
