"""Operations on tensors, counted as a device gets them: by kernel, views left out."""

import collections

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NO_KERNELS = ("empty", "_unsafe_view", "profiler")


class Counted(TorchDispatchMode):
    """Counts the operations of this thread by name. Views and fresh memory are none: no kernel runs for them.

    `bytes` are those of the tensors that operations take and give; of a select's source as much as it gives.
    """

    def __init__(self):
        super().__init__()
        self.names = collections.Counter()
        self.bytes = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if not operation.is_view and not any(name in str(operation) for name in NO_KERNELS):
            self.names[str(operation)] += 1
            given = operation(*args, **(kwargs or {}))
            is_select = "index_select" in str(operation)
            taken = given if is_select else (args, kwargs)
            self.bytes += sum(leaf.nbytes for leaf in tree_leaves((taken, given)) if isinstance(leaf, torch.Tensor))
            return given
        return operation(*args, **(kwargs or {}))

    @property
    def total(self):
        return self.names.total()
