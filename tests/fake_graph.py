"""CUDA graphs on a CPU: they record the operations of a call, and repeat them in the same memory, without its Python.

Numbers that Python computed, branches that it took and tensors that it made anew stay as they were when the call was
recorded, as in a real graph. Operations that a capture does not bear fail.
"""

import contextlib
import threading
from unittest import mock

import torch
import torch._dynamo  # else the first capture imports it, in the middle of which torch is incomplete
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from apexrl.networks.device_stream import DONE, DeviceStream

# They ask a device for a value or a size, take pinned memory, or bring numbers of Python there.
WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique",
    "repeat_interleave.Tensor",
    "equal.",
    "pin_memory",
    "lift_fresh",
)
# They join no capture, or give memory back that others use.
CALLS = ("Stream", "Event", "stream", "synchronize", "current_stream", "empty_cache")
READS = (
    "cpu",
    "numpy",
    "tolist",
    "__array__",
    "to",
)  # of a tensor: they wait for its content; `to`, where it says "cpu"
FORBIDDEN = ((torch.cuda, CALLS), (torch, ("Stream", "Event")), (torch.Tensor, READS))


class FakeGraph(TorchDispatchMode):
    """Stands for a `torch.cuda.CUDAGraph`, and for the context in which one is captured."""

    def __init__(self, *_):
        super().__init__()
        self._operations = []
        self._before = {}  # by address: storages that the call found, and copies of them
        self._own = set()  # addresses of the graph's own memory
        self._forbidden = contextlib.ExitStack()

    def pool(self):
        return self

    def __enter__(self):
        for owner, names in FORBIDDEN:
            for name in names:
                self._forbidden.enter_context(mock.patch.object(owner, name, _refused_here(owner, name)))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._forbidden.close()
        for storage, content in self._before.values():  # a capture computes nothing
            storage.copy_(content)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert not any(name in str(operation) for name in WAITING), f"{operation} in a capture"
        is_mask = [tensor.dtype == torch.bool for tensor in _tensors(args[1:])]
        assert "index" not in str(operation) or not any(is_mask), f"{operation} by a mask in a capture"
        assert not kwargs.get("pin_memory"), f"{operation} takes pinned memory in a capture"
        for tensor in _tensors((args, kwargs)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._before and storage.data_ptr() not in self._own:
                self._before[storage.data_ptr()] = storage, storage.clone()
        results = operation(*args, **kwargs)
        if not operation.is_view:
            addresses = {tensor.untyped_storage().data_ptr() for tensor in _tensors(results)}
            self._own |= addresses - self._before.keys()
            self._operations.append((operation, args, kwargs, results))
        return results

    @torch.no_grad()
    def replay(self):
        for operation, args, kwargs, results in self._operations:
            for place, value in zip(_tensors(results), _tensors(operation(*args, **kwargs)), strict=True):
                if place.data_ptr() != value.data_ptr():
                    place.copy_(value)


class FakeDeviceStream(DeviceStream):
    """A CPU that stands for a GPU: `UpdateGraph` captures and replays."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.cuda = object()
        self.num_captures = 0

    @contextlib.contextmanager
    def exclusive(self):
        with self._lock:
            yield

    @contextlib.contextmanager
    def aside(self):
        def capture(graph, *_, **__):
            self.num_captures += 1
            return graph

        with self.memory_kept(), mock.patch.multiple(torch.cuda, CUDAGraph=FakeGraph, graph=capture):
            yield self.cuda

    def event(self):
        return DONE

    def host_memory(self, shape, dtype):
        return torch.zeros(shape, dtype=dtype)

    def pinned(self, tensor):
        return tensor

    def fetch(self, tensors):
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}, DONE


def _refused_here(owner, name):
    """Returns a function that fails in this thread: others do not take part in its capture."""
    allowed, capturing = getattr(owner, name), threading.get_ident()

    def call(*args, **kwargs):
        refused = name != "to" or "cpu" in [word for word in (*args, *kwargs.values()) if isinstance(word, str)]
        assert threading.get_ident() != capturing or not refused, f"{name} in a capture"
        return allowed(*args, **kwargs)

    return call


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
