"""Torsos of the user's own: their inputs are the parts of an observation, and a fault is a line before the run."""

import contextlib
import dataclasses

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from torch import nn

from apexrl.agents.families import FAMILIES, implementation
from apexrl.config.sections import EnvConfig
from apexrl.environments.observations import parts_of, presented
from apexrl.environments.vector import make_environment
from apexrl.errors import ApexError, ConfigError
from apexrl.networks import policy
from apexrl.networks.config import (
    LATER,
    Activation,
    ActorCriticConfig,
    DuelingConfig,
    from_text,
    own_network,
    to_text,
)
from apexrl.networks.dueling import make_network
from apexrl.networks.headers import Identity
from apexrl.networks.own_torso import OwnTorso
from apexrl.networks.policy import Policy
from apexrl.running.torch_answers import check_network
from tests import own_agent
from tests.devices import CPU
from tests.networks.test_policy import NUM_ENVS, SHAPES, exact_values, spec_of, stream

HERE = "tests.networks.test_own_torso"


class Layers(nn.Module):
    """A layer for each part, which tells newer frames from older ones."""

    def __init__(self, shapes):
        super().__init__()
        self.shapes = shapes
        self.layers = nn.ModuleDict({name: nn.LazyLinear(4) for name in shapes})
        for name, shape in shapes.items():
            self.layers[name](torch.zeros(1, *shape).flatten(1))

    def forward(self, inputs):
        assert {name: tuple(part.shape[1:]) for name, part in inputs.items()} == self.shapes
        assert all(part.dtype == torch.float32 for part in inputs.values())
        return torch.cat([self.layers[name](part.flatten(1) / 255) for name, part in inputs.items()], dim=1)


class Kept(nn.Module):
    """Keeps what it sees."""

    def __init__(self, shapes):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, inputs):
        self.seen = inputs
        return torch.zeros(len(next(iter(inputs.values()))), 3, device=self.weight.device) * self.weight


def config_of(name="Layers", *inputs):
    return DuelingConfig(hidden_size=16, network=f"{HERE}:{name}", inputs=inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "stacked"), SHAPES)
def test_an_actor_shows_it_the_frames_in_their_order(shape, stacked, dtype):
    spec = spec_of(shape, stacked)
    network = make_network(spec, config_of())
    acting = Policy(spec, lambda: make_network(spec, config_of()), CPU, network.state_dict(), dtype)
    stack = acting.frame_stack(NUM_ENVS)
    for frames, starts, observations in stream(spec, 10):
        exact = exact_values(network, spec, observations)
        allowed = policy.TOLERANCE * np.abs(exact).max() if dtype == torch.bfloat16 else 1e-5
        np.testing.assert_allclose(acting.values(frames, starts, stack), exact, atol=allowed)


@pytest.mark.parametrize("shape", [(84, 84), (20, 18, 3), (5,)])
def test_an_observation_without_parts_is_whole(shape):
    spec = spec_of(shape, 2)
    torso = OwnTorso(spec, config_of("Kept"))
    observations = torch.randint(0, 256, (6, *spec.observation_shape)).to(getattr(torch, spec.frame_dtype))
    prepared = torso.layout.prepare(torso.layout.store_stacks(observations), torch.float32)
    torso.features(prepared, torso.kernel())
    assert torso.module.seen.keys() == {"observation"}
    assert torch.equal(torso.module.seen["observation"], observations.float())


def test_the_parts_of_a_dictionary_are_apart_again():
    class Parts(gymnasium.Env):
        observation_space = Dict({"map": Box(0, 255, (3, 2, 3), np.uint8), "wish": Discrete(4), "a=b": Box(-1, 1, ())})

        def reset(self, *, seed=None, options=None):
            return self.observation_space.sample(), {}

    env = presented(Parts(), EnvConfig("x"), set())
    parts = parts_of(env)
    assert sorted(parts) == ["a=b=1", "map=3x2x3", "wish=4"]
    spec = spec_of(env.observation_space.shape, 1)
    torso = OwnTorso(spec, config_of("Kept", *parts))
    inside = [env.env.observation_space.sample() for _ in range(5)]
    vectors = torch.tensor(np.array([env.observation(one) for one in inside]), dtype=torch.float32)
    torso.features(vectors, torso.kernel())
    for i, one in enumerate(inside):
        seen = {name: part[i, 0] for name, part in torso.module.seen.items()}
        assert seen["map"].tolist() == one["map"].tolist() and seen["a=b"].item() == one["a=b"]
        assert seen["wish"].tolist() == np.eye(4)[one["wish"]].tolist()


def test_only_dictionaries_have_parts():
    for env, parts in (("CartPole-v1", ()), ("Catch-v0", ()), ("tests.environments.odd_envs:Mission-v0", None)):
        with contextlib.closing(make_environment(EnvConfig(env), 1)) as envs:
            assert bool(envs.parts) if parts is None else envs.parts == parts


@pytest.mark.parametrize("agent", ["apex-dqn", "pqn", "r2d2", "impala", "impact", "sac", "apex-dpg"])
def test_every_family_takes_it_and_trains_it(agent):
    family = FAMILIES[agent]
    spec = spec_of((77,), 1)
    if agent in ("sac", "apex-dpg"):
        spec = type(spec)(spec.env, (77,), "float32", 1, 0, 1, ((-1.0, 1.0),))
    stream_spec = family.stream(family.algorithm, spec)
    network = dataclasses.replace(family.network, network=f"{HERE}:Layers", inputs=("map=5x5x3", "wish=2"))
    check_network(Identity.of(stream_spec, agent, network))
    learner = implementation(family).make_learner(family.algorithm, network, family.update, stream_spec, CPU)
    own = [name for name in learner.acting_tensors() if "torso.module.layers.wish" in name]
    assert len(own) == 2


def test_its_name_travels_with_the_parameters_and_others_have_no_field_of_it():
    text = to_text(config_of("Layers", "map=3"))
    assert own_network(text) == f"{HERE}:Layers" and '"inputs":["map=3"]' in text
    assert to_text(DuelingConfig()) == '{"channels":[32,64,64],"hidden_size":512,"quantiles":0}'
    assert own_network(to_text(DuelingConfig())) == own_network("no json") == own_network('{"network": 3}') == ""


@dataclasses.dataclass(frozen=True)
class Tanh(ActorCriticConfig):
    """An heir with other defaults than the family's."""

    activation: Activation = "tanh"
    inputs: tuple[str, ...] = dataclasses.field(default=("map=3",), kw_only=True)


@pytest.mark.parametrize("changes", [{}, {"activation": "relu"}, {"inputs": ()}, {"activation": "relu", "inputs": ()}])
def test_a_text_tells_what_differs_from_the_defaults_of_an_authors_own_class(changes):
    config = Tanh(**changes)
    assert from_text(to_text(config), Tanh) == config


def test_texts_of_shipped_families_stay_the_same():
    """Fields that came later are left out where they have their defaults."""
    for family in FAMILIES.values():
        fields = {field.name: field for field in dataclasses.fields(family.network)}
        assert all(fields[name].default == later for name, later in LATER.items() if name in fields)


class Flat(nn.Linear):
    def __init__(self, shapes):
        super().__init__(3, 3)

    def forward(self, inputs):
        return super().forward(inputs["observation"])


class Strange(Flat):
    def forward(self, inputs):
        return super().forward(inputs["picture"])


class Branching(Flat):
    def forward(self, inputs):
        seen = super().forward(inputs).flatten(1)
        return seen if seen.sum() > 0 else -seen


class Normed(Flat):
    def __init__(self, shapes):
        super().__init__(shapes)
        self.norm = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False))


class Counted(Flat):
    def __init__(self, shapes):
        super().__init__(shapes)
        self.register_buffer("fixed", torch.arange(3), persistent=False)
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))


class OfTwoRows(Flat):
    def forward(self, inputs):
        return super().forward(inputs).reshape(2, -1)


def broken(shapes):
    raise KeyError("map")


number = 3


@pytest.mark.parametrize(
    ("name", "inputs", "complaint"),
    [
        ("missing_module:x", (), r"--network missing_module:x: missing_module cannot be imported: ModuleNotFoundError"),
        (f"{HERE}:Missing", (), "has no Missing: give the name"),
        ("Layers", (), "has no colon: give module:name"),
        (f"{HERE}:broken", (), r"broken fails with shapes {'observation': \(1, 3\)}: KeyError: 'map'"),
        (f"{HERE}:number", (), "fails with shapes .*TypeError: 'int' object is not callable"),
        ("builtins:dict", (), r"gives {'observation': \(1, 3\)}: give a torch.nn.Module"),
        (f"{HERE}:Flat", (), r"gives \(2, 1, 3\) torch.float32 for inputs of {'observation': \(2, 1, 3\)}: it takes"),
        (f"{HERE}:Strange", (), "fails with inputs of .*KeyError: 'picture'; it takes {part"),
        (f"{HERE}:Branching", (), "Branching fails with inputs of .*; it takes .* branches on no number"),
        (f"{HERE}:Normed", (), "Normed normalizes batches in norm.0, and actors have none: give LayerNorm"),
        (f"{HERE}:Counted", (), "Counted: calls has int64 numbers, .*: register it with persistent=False"),
        (f"{HERE}:OfTwoRows", (), "OfTwoRows cannot be exported: .*has to take any number of rows"),
        (f"{HERE}:Layers", ("map=2",), r"--inputs map=2: Shape-v0 has observations \(3,\)"),
        (f"{HERE}:Layers", ("map",), "--inputs map: give each part once, as NAME=SHAPE"),
    ],
)
def test_a_fault_is_a_line_before_the_run(name, inputs, complaint):
    family = FAMILIES["apex-dqn"]
    network = DuelingConfig(network=name, inputs=inputs)
    with pytest.raises(ConfigError, match=complaint) as fault:
        check_network(Identity.of(family.stream(family.algorithm, spec_of((3,), 1)), "apex-dqn", network))
    assert "\n" not in str(fault.value)


def test_a_family_without_a_place_for_it_says_so():
    network = dataclasses.replace(own_agent.OWN.network, network=f"{HERE}:Layers")
    spec = own_agent.OWN.stream(own_agent.OWN.algorithm, spec_of((3,), 1))
    with pytest.raises(ConfigError, match=r"--agent tests\.own_agent:own takes no --network"):
        check_network(Identity.of(spec, "tests.own_agent:own", network))


def test_parameters_of_a_missing_module_are_refused_with_its_name():
    spec = spec_of((3,), 1)
    config = DuelingConfig(network="missing_module:x")
    with pytest.raises(ApexError, match=r"impossible network: .*--network missing_module:x: missing_module cannot be"):
        Policy(spec, lambda: make_network(spec, config), CPU, {})
