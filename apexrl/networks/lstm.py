"""An LSTM that begins anew with each episode. Learners run it over whole unrolls, actors step by step.

A state is [B, 2, size] float32: the output and the cell of each row. The log stores the same form, [2, size] a row.
"""

import torch
from torch import Tensor, nn


class EpisodicLSTM(nn.Module):
    """One layer of LSTM, always computed in float32: in bfloat16 a state would lose a little with every step.

    The bias of the forget gate begins at 1, so that a new network remembers. Sources: Neural Computation 9, 1735
    (1997) for the LSTM, arXiv:1802.01561 for its use.
    """

    def __init__(self, input_size: int, size: int):
        super().__init__()
        self.size = size
        self.from_input = nn.Linear(input_size, 4 * size)
        self.from_output = nn.Linear(size, 4 * size, bias=False)
        with torch.no_grad():
            self.from_input.bias[size : 2 * size] += 1

    def step(self, inputs: Tensor, state: Tensor) -> Tensor:
        """Returns the next state [B, 2, size]; its first half is the output [B, size].

        Args:
          inputs: [B, input size] float32.
          state: [B, 2, size] float32, zeros where an episode begins.
        """
        output, cell = state.unbind(1)
        return torch.stack(self._next(self.from_input(inputs), output, cell), dim=1)

    def unroll(
        self, inputs: Tensor, starts: Tensor, state: Tensor, num_steps: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the outputs [T, B, size] of steps in order, and the state after some of them.

        The loop has no branch that depends on data, so a CUDA graph can hold it.

        Args:
          inputs: [T, B, input size] float32.
          starts: [T, B] bool, where an episode begins: the state is zeros there.
          state: [B, 2, size] float32 before the first step.
          num_steps: the returned state is the one after so many steps, 0 to T. None: after all.
        """
        gates = self.from_input(inputs)  # [T, B, 4 size]: all steps in one product
        output, cell = state.unbind(1)
        outputs, states = [], [(output, cell)]
        for gates_t, start_t in zip(gates.unbind(0), starts.unsqueeze(-1).unbind(0), strict=True):
            output, cell = self._next(gates_t, output.masked_fill(start_t, 0), cell.masked_fill(start_t, 0))
            outputs.append(output)
            states.append((output, cell))
        after = states[-1 if num_steps is None else num_steps]
        return torch.stack(outputs), torch.stack(after, dim=1)

    def _next(self, gates: Tensor, output: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        gates = torch.addmm(gates, output, self.from_output.weight.t())
        written, kept, new, shown = gates.chunk(4, dim=1)
        cell = torch.sigmoid(kept) * cell + torch.sigmoid(written) * torch.tanh(new)
        return torch.sigmoid(shown) * torch.tanh(cell), cell
