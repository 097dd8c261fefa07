import pytest
import torch
from torch import nn

from apexrl.networks.lstm import EpisodicLSTM

STEPS, BATCH, INPUTS, SIZE = 9, 4, 5, 6


def slow_cell(lstm):
    """Returns torch's own cell with the weights of an LSTM."""
    cell = nn.LSTMCell(INPUTS, SIZE)
    weights = lstm.from_input.weight, lstm.from_output.weight, lstm.from_input.bias, torch.zeros(4 * SIZE)
    for parameter, weight in zip(cell.parameters(), weights, strict=True):
        parameter.data.copy_(weight)
    return cell


@pytest.fixture
def lstm():
    torch.manual_seed(0)
    return EpisodicLSTM(INPUTS, SIZE)


@pytest.fixture
def sequence():
    torch.manual_seed(1)
    return torch.randn(STEPS, BATCH, INPUTS), torch.rand(STEPS, BATCH) < 0.3, torch.randn(BATCH, 2, SIZE)


def test_an_unroll_is_the_loop_of_torchs_cell_that_forgets_where_episodes_begin(lstm, sequence):
    inputs, starts, state = sequence
    cell = slow_cell(lstm)
    outputs, _ = lstm.unroll(inputs, starts, state)
    output, memory = state.clone().unbind(1)
    for t in range(STEPS):
        for row in range(BATCH):
            if starts[t, row]:
                output, memory = output.clone(), memory.clone()
                output[row], memory[row] = 0, 0
        output, memory = cell(inputs[t], (output, memory))
        assert torch.allclose(outputs[t], output, atol=1e-6)


def test_gradients_are_those_of_torchs_layer(lstm, sequence):
    inputs, starts, state = sequence
    layer = nn.LSTM(INPUTS, SIZE)
    layer.load_state_dict({f"{name}_l0": tensor for name, tensor in slow_cell(lstm).state_dict().items()})
    lstm.unroll(inputs, torch.zeros_like(starts), state)[0].square().sum().backward()
    layer(inputs, (state[None, :, 0].contiguous(), state[None, :, 1].contiguous()))[0].square().sum().backward()
    assert torch.allclose(lstm.from_input.weight.grad, layer.weight_ih_l0.grad, atol=1e-5)
    assert torch.allclose(lstm.from_output.weight.grad, layer.weight_hh_l0.grad, atol=1e-5)
    assert torch.allclose(lstm.from_input.bias.grad, layer.bias_ih_l0.grad, atol=1e-5)


def test_a_start_in_an_unroll_is_a_new_unroll(lstm, sequence):
    inputs, starts, state = sequence
    starts[:] = False
    starts[4] = True
    outputs, after = lstm.unroll(inputs, starts, state)
    anew, after_anew = lstm.unroll(inputs[4:], torch.zeros_like(starts[4:]), torch.zeros(BATCH, 2, lstm.size))
    assert torch.equal(outputs[4:], anew) and torch.equal(after, after_anew)


@pytest.mark.parametrize("num_steps", [0, 3, STEPS])
def test_a_state_continues_exactly(lstm, sequence, num_steps):
    inputs, starts, state = sequence
    outputs, after = lstm.unroll(inputs, starts, state, num_steps)
    assert after.requires_grad == (num_steps > 0)
    if num_steps < STEPS:
        continued, _ = lstm.unroll(inputs[num_steps:], starts[num_steps:], after)
        assert torch.allclose(continued, outputs[num_steps:], atol=1e-6)


def test_one_step_is_an_unroll_of_one(lstm, sequence):
    inputs, starts, state = sequence
    outputs, after = lstm.unroll(inputs[:1], torch.zeros_like(starts[:1]), state)
    assert torch.allclose(lstm.step(inputs[0], state), after, atol=1e-6)
    assert torch.equal(after[:, 0], outputs[0])


def test_a_new_lstm_keeps_most_of_its_cell(lstm):
    bias = lstm.from_input.bias.view(4, SIZE).mean(dim=1)
    assert bias[1] > 0.5 and bias[[0, 2, 3]].abs().max() < 0.5
