"""Gradients of weights by a second thread beside those of autograd."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from apexrl.agents.engine.gradient import Gradient
from apexrl.learning.updates.side_thread import SideThread
from apexrl.networks.actor_critic import ActorCriticNetwork
from apexrl.networks.config import ActorCriticConfig
from apexrl.networks.recurrent import History
from apexrl.types import EnvironmentSpec

ROWS = 8
SPEC = EnvironmentSpec("Screens-v0", (84, 84), "uint8", 4, 6, 4)


class Late:
    """A thread that begins nothing by itself, or only the first of what is left to it."""

    def __init__(self, num_begun):
        self.num_begun, self.num_left = num_begun, 0

    def spawn(self, work):
        self.num_left += 1
        if self.num_left > self.num_begun:
            return work
        work()
        return lambda: None


class Net(nn.Module):
    """Layers of every kind that a second thread takes, with what each may have; and small ones, which it leaves."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 8, 3)
        self.strided = nn.Conv2d(8, 16, 4, stride=2, padding=1, bias=False)
        self.grouped = nn.Conv2d(16, 16, 3, dilation=2, groups=4)
        self.mirrored = nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect")
        self.wide = nn.Linear(16 * 6 * 6, 256)
        self.bare = nn.Linear(256, 256, bias=False)
        self.last = nn.Linear(256, 3)

    def forward(self, x):
        x = self.grouped(self.strided(self.first(x).relu()).relu()).relu()
        x = self.mirrored(x).relu().flatten(1)
        return self.last(self.bare(self.wide(x).relu().unflatten(0, (2, -1))).flatten(0, 1))


def network():
    torch.manual_seed(0)
    return Net().to(memory_format=torch.channels_last)


def observations():
    return torch.randn(ROWS, 2, 22, 22, generator=torch.Generator().manual_seed(1))


def compute(gradient, net, dtype=torch.float32):
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        outputs = net(observations()).float()
    gradient.compute({"net": outputs.square().sum()}, ROWS)
    return gradient.buffer.clone()


class Masked(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight.tril(), self.bias)


class Noisy(nn.Linear):
    def __init__(self, size):
        super().__init__(size, size)
        self.deviations = nn.Parameter(torch.full((size,), 0.5))

    def forward(self, x):
        return super().forward(x) * self.deviations


class Own(nn.Module):
    """Large layers whose gradients are no plain layer's, and a parameter before those of the torso."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.torso = nn.Sequential(nn.Conv2d(2, 8, 22), nn.Flatten(), nn.Linear(8, 256))
        self.layers = nn.ModuleList([Masked(256, 256), Noisy(256), nn.Linear(256, 256), nn.Linear(256, 256)])
        self.layers[3].weight = self.layers[2].weight
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(256, 256))
        self.plain = nn.Linear(256, 256)

    def forward(self, x):
        x = torch.nn.functional.conv2d(x, self.torso[0].weight * self.scale, self.torso[0].bias)  # as a torso does
        x = self.torso[2](self.torso[1](x))
        for layer in (*self.layers, self.spectral, self.plain):
            x = layer(x.relu())
        return x


def test_layers_that_compute_in_a_way_of_their_own_are_left_to_autograd():
    ours = Own().eval()
    plain = copy.deepcopy(ours)
    gradients = [Gradient({"net": net}, is_mean=False) for net in (ours, plain)]
    gradients[0].parts["net"].use_thread(Late(0).spawn, ours)
    found, expected = (compute(gradient, net) for gradient, net in zip(gradients, (ours, plain), strict=True))
    torch.testing.assert_close(found, expected)
    assert not ours.plain.weight.requires_grad, "by the second thread"


def in_a_thread():
    return SideThread(SimpleNamespace(use_thread=lambda spawn: None)).spawn


@pytest.mark.parametrize("spawn", [in_a_thread(), Late(0).spawn, Late(2).spawn, Late(1_000).spawn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whichever_thread_computes_them_gradients_are_those_of_autograd(spawn, dtype):
    ours, plain = network(), network()
    gradients = [Gradient({"net": net}, is_mean=False) for net in (ours, plain)]
    gradients[0].parts["net"].use_thread(spawn, ours)
    for _ in range(3):  # what was there before does not count
        found, expected = (
            compute(gradient, net, dtype) for gradient, net in zip(gradients, (ours, plain), strict=True)
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert {name for name, parameter in ours.named_parameters() if not parameter.requires_grad} == {
        "strided.weight", "grouped.weight", "grouped.bias", "wide.weight", "wide.bias", "bare.weight",
    }  # fmt: skip


def test_a_pass_without_gradients_leaves_nothing_to_the_thread():
    ours, thread = network(), Late(0)
    Gradient({"net": ours}, is_mean=False).parts["net"].use_thread(thread.spawn, ours)
    with torch.no_grad():
        ours(observations())
    assert not thread.num_left


def test_what_an_author_froze_stays_as_it_is():
    ours, plain = network(), network()
    gradients = [Gradient({"net": net}, is_mean=False) for net in (ours, plain)]
    for net in (ours, plain):
        net.strided.requires_grad_(False)
        net.wide.bias.requires_grad_(False)
    gradients[0].parts["net"].use_thread(in_a_thread(), ours)
    found, expected = (compute(gradient, net) for gradient, net in zip(gradients, (ours, plain), strict=True))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not ours.strided.weight.grad.any() and not ours.wide.bias.grad.any() and ours.wide.weight.grad.any()


def test_layers_learn_behind_ones_that_are_all_frozen():
    ours, plain = network(), network()
    for net in (ours, plain):
        net.requires_grad_(False)
        for layer in (net.wide, net.bare, net.last):
            layer.requires_grad_(True)
    gradients = [Gradient({"net": net}, is_mean=False) for net in (ours, plain)]
    gradients[0].parts["net"].use_thread(in_a_thread(), ours)
    for _ in range(2):
        found, expected = (compute(gradient, net) for gradient, net in zip(gradients, (ours, plain), strict=True))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert ours.wide.weight.grad.any() and ours.wide.bias.grad.any() and not ours.first.weight.grad.any()


def test_a_copy_of_the_network_is_differentiated_into_the_buffer_of_its_origin():
    own = network()
    gradient = Gradient({"net": own}, is_mean=False)
    expected = compute(gradient, own)
    gradient.buffer.zero_()
    other = copy.deepcopy(own)
    gradient.parts["net"].use_thread(in_a_thread(), other)
    gradient.compute({"net": other(observations()).square().sum()}, ROWS, by={"net": list(other.parameters())})
    torch.testing.assert_close(gradient.buffer, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("torso", ["shallow", "deep"])
@pytest.mark.parametrize("lstm_size", [0, 160])
def test_whole_unrolls_of_an_actor_critic_have_the_gradients_of_autograd(torso, lstm_size):
    gradients, (num_steps, num_rows) = [], (3, 2)
    random = torch.Generator().manual_seed(1)
    frames = torch.randint(0, 256, (num_steps, num_rows, 4, 21, 21, 16), generator=random, dtype=torch.uint8)
    zeros = torch.zeros(num_steps, num_rows)
    state = torch.rand(num_rows, 2, lstm_size, generator=random)
    history = History(zeros > 0, zeros.long(), zeros, state)
    for spawn in (None, in_a_thread()):
        torch.manual_seed(0)
        net = ActorCriticNetwork(SPEC, ActorCriticConfig(torso, (4, 8, 8), 256), lstm_size)
        gradient = Gradient({"net": net.to(memory_format=torch.channels_last)}, is_mean=False)
        if spawn is not None:
            gradient.parts["net"].use_thread(spawn, net)
        with torch.no_grad():
            net.unroll(frames, history)  # a burn-in
        output = net.unroll(frames, history)
        loss = output.logits.square().sum() + output.values.square().sum()
        gradient.compute({"net": loss}, num_steps * num_rows)
        gradients.append(gradient.buffer)
    assert not next(net.hidden.parameters()).requires_grad
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("calls", "problem"), [(0, "was not called"), (2, "was called twice")])
def test_a_layer_without_one_call_in_a_pass_ends_it(calls, problem):
    layers = nn.ModuleList([nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 256)])
    gradient = Gradient({"net": layers}, is_mean=False)
    gradient.parts["net"].use_thread(Late(1_000).spawn, layers)
    x = layers[1](layers[0](torch.ones(ROWS, 256)))
    for _ in range(calls):
        x = layers[2](x)
    with pytest.raises(RuntimeError, match=problem):
        gradient.compute({"net": x.sum()}, ROWS)


def test_an_error_in_the_thread_ends_the_pass(monkeypatch):
    ours = network()
    gradient = Gradient({"net": ours}, is_mean=False)
    gradient.parts["net"].use_thread(in_a_thread(), ours)

    def fail(layer, x, output_gradient):
        raise MemoryError("no memory for a gradient")

    monkeypatch.setattr("apexrl.agents.engine.weight_gradients._gradients_of", fail)
    with pytest.raises(MemoryError, match="no memory for a gradient"):
        compute(gradient, ours)
