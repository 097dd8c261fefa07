"""Networks as ONNX: onnxruntime computes what the agents do, from observations as their environments show them."""

import importlib.util
import json
import re
import sys

import gymnasium
import msgspec
import numpy as np
import onnxruntime
import pytest
import torch

from apexrl.agents.contract import Observation
from apexrl.agents.families import family_of, implementation
from apexrl.environments.actions import Actions
from apexrl.errors import ConfigError
from apexrl.networks.checkpoint import load_checkpoint, save_checkpoint
from apexrl.networks.config import (
    ActorCriticConfig,
    DeterministicConfig,
    DuelingConfig,
    GaussianConfig,
    NormalizedConfig,
    to_text,
)
from apexrl.networks.export import graph_of
from apexrl.networks.headers import CheckpointHeader, Counters
from apexrl.networks.policy import Policy
from apexrl.roles.export import export, main, network_of
from apexrl.types import FORBIDDEN, EnvironmentSpec
from tests.agents.impala_parts import algorithm_of
from tests.environments.odd_envs import ACTIONS
from tests.own_agent import OWN

CPU = torch.device("cpu")
ODD = "tests.environments.odd_envs:"
NUM_ENVS, NUM_STEPS = 3, 7
SCREENS = EnvironmentSpec("Screens-v0", (40, 44), "uint8", 4, 6, 4)
COLOURS = EnvironmentSpec("Colours-v0", (10, 5, 3), "uint8", 2, 3, 1)
VECTORS = EnvironmentSpec("Vectors-v0", (4,), "float32", 2, 3, 1, action_names=("left", "stay", "right"))

MASKED = EnvironmentSpec("Doors-v0", (4,), "float32", 2, 3, 1, variant='{"action_mask": "mask"}')
ARMS = EnvironmentSpec("Arm-v0", (4,), "float32", 2, 0, 1, action_bounds=((-2.0, 2.0), (0.0, 1.0)))


@pytest.fixture
def checkpoint(tmp_path):
    """Writes a checkpoint of a new learner's network; its biases are not zero, nor its policy nearly uniform."""

    def write(agent, environment, network, lstm=False, is_normalized=False):
        family = family_of(agent)
        algorithm = algorithm_of(lstm) if agent == "impala" else family.algorithm
        spec = family.stream(algorithm, environment)
        torch.manual_seed(3)
        learner = implementation(family).make_learner(algorithm, network, family.update, spec, CPU)
        tensors = {f"acting.{name}": t + 0.05 * torch.randn_like(t) for name, t in learner.acting_tensors().items()}
        if is_normalized:
            shape = environment.frame_shape
            measure = {"mean": torch.rand(shape), "scale": torch.full(shape, 3.0), "reward_scale": torch.tensor(0.5)}
            tensors |= {f"acting.normalizer.{name}": tensor for name, tensor in measure.items()}
        header = CheckpointHeader(spec, agent, to_text(network), Counters(updates=1234))
        save_checkpoint(tmp_path / "c.safetensors", header, tensors)
        return tmp_path / "c.safetensors"

    return write


def observations(spec, seed=0):
    """Frames [steps, E, *frame] and starts [steps, E] of environments whose episodes begin at other times."""
    rng = np.random.default_rng(seed)
    shape = NUM_STEPS, NUM_ENVS, *spec.frame_shape
    frames = rng.integers(0, 256, shape, np.uint8) if spec.frame_dtype == "uint8" else rng.normal(size=shape)
    starts = rng.random((NUM_STEPS, NUM_ENVS)) < 0.3
    starts[0] = True
    return frames.astype(spec.frame_dtype), starts, rng.normal(size=(NUM_STEPS, NUM_ENVS)).astype(np.float32)


def stacked(stack, frames, starts):
    """The stacks [E, H, *frame] after one more frame each: those from before the episode are zeros."""
    shown = np.where(starts.reshape(-1, *[1] * (stack.ndim - 1)), np.zeros_like(stack), stack)
    return np.concatenate([shown[:, 1:], frames[:, None]], axis=1)


def check_notes(said, session, environment, lstm):
    """The file and the command's output tell how to use the graph."""
    assert said[0].endswith(f"{environment.env}, update 1,234")
    notes = session.get_modelmeta().custom_metadata_map
    assert (notes["env"], notes["updates"]) == (environment.env, "1234")
    assert json.loads(notes["action_names"]) == list(environment.action_names)
    assert json.loads(notes["action_bounds"]) == list(map(list, environment.action_bounds))
    if environment is ARMS:
        own = {"impact": "moments", "sac": "moments", "apex-dpg": "actions"}
        assert session.get_outputs()[0].name == own[notes["agent"]]
    if lstm:
        assert "observation [B, 2, 4] float32, start [B] bool" in said[1]
        own = ["logits", "value"] if notes["agent"] == "impala" else ["q_values"]
        assert [output.name for output in session.get_outputs()] == [*own, "next_state"]


@pytest.mark.parametrize(
    ("agent", "environment", "network", "lstm"),
    [
        ("apex-dqn", SCREENS, DuelingConfig((4, 4, 4), 16), False),
        ("impala", COLOURS, ActorCriticConfig("shallow", (4, 4, 4), 16), False),
        ("impala", VECTORS, ActorCriticConfig("shallow", (4, 4, 4), 16), True),
        ("r2d2", VECTORS, ActorCriticConfig("shallow", (4, 4, 4), 16), True),
        ("apex-dqn", VECTORS, DuelingConfig((4, 4, 4), 16), False),
        ("impact", ARMS, ActorCriticConfig("shallow", (4, 4, 4), 16), False),
        ("apex-dpg", ARMS, DeterministicConfig(hidden_size=16, initial_priorities="critic"), False),
        ("sac", ARMS, GaussianConfig(hidden_size=16), False),
        ("apex-dqn", MASKED, DuelingConfig((4, 4, 4), 16, quantiles=3), False),
        ("impala", MASKED, ActorCriticConfig("shallow", (4, 4, 4), 16), True),
        ("pqn", SCREENS, NormalizedConfig((4, 4, 4), 16), False),
        ("pqn", VECTORS, NormalizedConfig((4, 4, 4), 16), False),
    ],
    ids=[
        "apex-dqn",
        "impala",
        "impala-lstm-normalized",
        "r2d2-normalized",
        "apex-dqn-normalized",
        "impact-vectors",
        "apex-dpg",
        "sac",
        "apex-dqn-masked",
        "impala-masked",
        "pqn",
        "pqn-normalized",
    ],
)
def test_a_graph_gives_what_the_policy_gives(tmp_path, monkeypatch, checkpoint, agent, environment, network, lstm):
    monkeypatch.setattr("apexrl.networks.policy.fastest_dtype", lambda device, spec: torch.float32)
    path = checkpoint(agent, environment, network, lstm, is_normalized=environment is VECTORS)
    said = export(path, tmp_path / "out" / "c.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "out" / "c.onnx")
    check_notes(said, session, environment, lstm)
    algorithm = algorithm_of(lstm) if agent == "impala" else family_of(agent).algorithm
    actor = implementation(family_of(agent)).make_actor(algorithm, load_checkpoint(path).parameters(), CPU)
    values, wanted = Policy.values, []
    monkeypatch.setattr(Policy, "values", lambda *arguments: wanted.append(values(*arguments)) or wanted[-1])
    frames, starts, rewards = observations(environment)
    rng, state = np.random.default_rng(1), actor.initial_state(NUM_ENVS)
    stack, found = np.zeros((NUM_ENVS, *environment.observation_shape), frames.dtype), []
    for step in range(NUM_STEPS):
        stack = stacked(stack, frames[step], starts[step])
        given = {"observation": stack}
        if lstm:
            last_action, core_state = state.last_action.astype(np.int64), found[-1] if step else state.core_state
            given |= {"start": starts[step], "last_action": last_action, "last_reward": rewards[step],
                      "state": core_state}  # fmt: skip
        found = session.run(None, given)
        seen = Observation(frames[step], starts[step], rewards[step])
        _, _, state = actor.act(seen, np.zeros(NUM_ENVS), state, rng)
        together = np.column_stack([array.reshape(NUM_ENVS, -1) for array in found])
        np.testing.assert_allclose(together, wanted[-1], rtol=0, atol=1e-5)
    assert (np.min(wanted) == FORBIDDEN) == (environment is MASKED)
    num_constant = (np.std(wanted, axis=(0, 1)) < 1e-4).sum()
    is_gaussian = agent == "impact"
    assert num_constant == 2 * is_gaussian, "all but a Gaussian's deviations depend on the observation"


@pytest.mark.parametrize(
    ("env_id", "agent", "note"),
    [
        (f"{ODD}Many-actions-v0", "pqn", {"env_actions": [[a, b] for a in (0, 1) for b in range(3)]}),
        (f"{ODD}Shifted-v0", "pqn", {"env_actions": [-1, 0, 1]}),
        (f"{ODD}Matrix-actions-v0", "sac", {"action_shape": [2, 2]}),
        ("nowhere_else:Any-v0", "pqn", {}),
    ],
)
def test_the_notes_lead_from_a_number_to_the_action_of_the_environment(tmp_path, checkpoint, env_id, agent, note):
    space = ACTIONS.get(env_id.rpartition(":")[2], gymnasium.spaces.Discrete(3))
    own = Actions(env_id, space)
    environment = EnvironmentSpec(env_id, (2,), "float32", 1, own.num, 1, own.bounds)
    network = NormalizedConfig((4, 4, 4), 16) if agent == "pqn" else GaussianConfig(hidden_size=16)
    said = export(checkpoint(agent, environment, network), tmp_path / "c.onnx")
    notes = onnxruntime.InferenceSession(tmp_path / "c.onnx").get_modelmeta().custom_metadata_map
    assert {name: json.loads(notes[name]) for name in ("env_actions", "action_shape") if name in notes} == note
    refusal = "it does not tell which actions its environment takes: .* names the module nowhere_else .* --trust"
    assert bool(re.search(refusal, said[-1])) != bool(note)


def test_what_has_no_graph_is_refused(tmp_path, checkpoint, monkeypatch):
    path = checkpoint("apex-dqn", VECTORS, DuelingConfig((4, 4, 4), 16))
    loaded = load_checkpoint(path)
    header = msgspec.structs.replace(loaded.header, agent="tests.own_agent:own", network=to_text(OWN.network))
    own = torch.nn.Linear(VECTORS.frame_size, OWN.network.width).state_dict()
    loaded = loaded._replace(header=header, tensors={f"acting.{name}": tensor for name, tensor in own.items()})
    with pytest.raises(ConfigError, match="Linear has no ONNX graph"):
        graph_of(network_of(loaded), VECTORS)
    with pytest.raises(ConfigError, match="cannot be written"):
        export(path, tmp_path / "c.safetensors" / "c.onnx")
    monkeypatch.setattr(sys, "argv", ["apexrl export", str(path), "--output", str(path)])
    with pytest.raises(ConfigError, match=r"is there, and its name does not end in \.onnx: give another"):
        main()
    assert load_checkpoint(path)
    monkeypatch.setattr(sys, "argv", ["apexrl export", str(path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"onnx is not installed: .*pip install onnx onnxscript"):
        main()
