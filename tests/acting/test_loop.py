"""An actor's loop beside a learner that sends it parameters it cannot use."""

import threading

import msgspec
import numpy as np
import pytest

from apexrl.acting.loop import ActorLoop
from apexrl.acting.player import EnvironmentGroup
from apexrl.agents.apex_dqn_config import FAMILY
from apexrl.config.commands import ActorCommand
from apexrl.config.sections import ActingConfig, EnvConfig, WireConfig
from apexrl.environments.vector import make_environment
from apexrl.errors import ConfigError
from apexrl.lifecycle import Stop
from apexrl.net.parameter_channel import ParameterPublisher
from apexrl.networks.config import DuelingConfig, to_text
from apexrl.networks.dueling import make_network
from apexrl.networks.headers import ParametersHeader
from apexrl.networks.parameters import encode_parameters
from apexrl.types import Field
from tests.system.processes import wait_for

NETWORK, OTHER = DuelingConfig((4, 4, 4), 8), DuelingConfig((8, 4, 4), 8)


@pytest.fixture
def publisher():
    publisher = ParameterPublisher("127.0.0.1", 0)
    thread = threading.Thread(target=publisher.run)
    thread.start()
    yield publisher
    publisher.close()
    thread.join()


def stopped():
    stop = Stop()
    stop.set()
    return stop


@pytest.fixture
def loop(publisher):
    wires = WireConfig(parameter_port=int(publisher.endpoint.rsplit(":", 1)[1]))
    acting = ActingConfig(environments_per_worker=2)
    loop = ActorLoop(ActorCommand(env=EnvConfig("Catch-v0"), wires=wires, acting=acting, algorithm=FAMILY.algorithm))
    yield loop
    loop.run(stopped())  # frees everything


def encoded(spec, version, network=NETWORK, header=NETWORK):
    tensors = make_network(spec, network).state_dict()
    return encode_parameters(ParametersHeader(version, spec, "apex-dqn", to_text(header)), tensors)


def test_parameters_that_do_not_fit_are_dropped_and_counted_and_the_actor_goes_on(publisher, loop):
    parameters = loop.parameters
    publisher.publish(encoded(loop.spec, 1, OTHER))
    waiting = threading.Thread(
        target=lambda: (
            wait_for(lambda: parameters.num_dropped, 100, "a drop") and publisher.publish(encoded(loop.spec, 2))
        )
    )
    waiting.start()
    agent = loop.wait_for_agent(Stop())
    waiting.join()
    assert agent.header.params_version == 2 and parameters.num_dropped >= 1

    foreign = msgspec.structs.replace(loop.spec, num_actions=9)
    absurd = DuelingConfig((2**40, 4, 4), 8)
    for number, bad in enumerate(
        (encoded(loop.spec, 3, OTHER), encoded(foreign, 4), encoded(loop.spec, 5, header=absurd))
    ):
        before = parameters.num_dropped
        publisher.publish(bad)
        wait_for(lambda: loop.fetch(agent) or parameters.num_dropped > before, 100, "a drop")
        assert agent.header.params_version == (2 if number == 0 else 10 + number - 1)
        publisher.publish(encoded(loop.spec, 10 + number, NETWORK))
        wait_for(lambda: loop.fetch(agent) or agent.header.params_version == 10 + number, 100, "the next parameters")
    publisher.publish(encoded(loop.spec, 20, OTHER, OTHER))  # another network that is what it says
    wait_for(lambda: loop.fetch(agent) or agent.header.params_version == 20, 100, "another network")


def test_a_learner_of_another_environment_is_refused_at_the_first_contact(publisher, loop):
    publisher.publish(encoded(msgspec.structs.replace(loop.spec, num_actions=9), 1))
    with pytest.raises(ConfigError, match="do not fit: they are for"):
        loop.wait_for_agent(Stop())


class Numbered:
    """An agent whose parameters have another version at each call; it logs them."""

    def __init__(self, spec, every):
        self.header, self._every, self._calls = ParametersHeader(0, spec, "counting", ""), every, 0

    def initial_state(self, num_envs):
        return None

    def act(self, observation, exploration, state, rng):
        self.header = msgspec.structs.replace(self.header, params_version=self._calls // self._every)
        self._calls += 1
        size = len(observation.starts)
        return np.zeros(size, np.int32), {"version": np.full(size, self.header.params_version, np.float32)}, None

    def priorities(self, unrolls, extras):
        return None


@pytest.mark.parametrize("every", [1, 3, 4])
@pytest.mark.parametrize("overlap", [0, 3])
def test_the_version_of_an_unroll_is_the_one_that_chose_its_first_action(every, overlap):
    """Parameters that arrive just before an unroll is complete chose none of its actions."""
    envs = make_environment(EnvConfig("Catch-v0"), 2)
    extras = (Field("version", "step", "float32"),)
    spec = envs.spec.streamed(4, overlap_steps=overlap, extras=extras)
    group, agent, rounds = EnvironmentGroup(envs, spec, range(2)), Numbered(spec, every), []
    group.reset(agent, 0)
    for _ in range(40):
        if (step := group.receive()) is not None:
            group.add(step)
        if (complete := group.observe(agent, group.act(agent, np.random.default_rng(0)))) is not None:
            rounds.append(complete)
    group.close()
    assert len(rounds) > 5
    assert [made.params_version for made in rounds] == [made.unrolls.extras["version"][0, 0] for made in rounds]
