import gc
import threading
import time

import numpy as np
import pytest
import torch

from apexrl.errors import ApexError
from apexrl.networks.device_stream import DONE, Arrivals, DeviceStream, Staging, capture, wait
from tests.devices import GPU, NEEDS_GPU


class Later:
    """A event that is reached after so many questions."""

    def __init__(self, num_questions):
        self.left = num_questions

    def query(self):
        self.left -= 1
        return self.left < 0


class SlowDeviceStream(DeviceStream):
    """A CPU that seems to work on: its events are reached when they were asked for a few times."""

    def __init__(self, num_questions=3):
        super().__init__(torch.device("cpu"))
        self.num_questions = num_questions
        self.events = []

    @property
    def depth(self):
        return 4

    def event(self):
        self.events.append(Later(self.num_questions))
        return self.events[-1]


def test_a_mark_that_is_never_reached_ends_the_wait():
    with pytest.raises(ApexError, match="did not finish"):
        wait(Later(10**9), 0.01)


def test_staged_memory_is_written_again_only_when_it_was_copied():
    device_stream = SlowDeviceStream()
    staging = Staging(device_stream, 2, ((3,), torch.int64))
    pieces = []
    for _ in range(3):
        (piece,) = staging.next_piece()
        pieces.append(piece.data_ptr())
        staging.sent()
    assert pieces[0] == pieces[2] != pieces[1]
    assert [event.left < 0 for event in device_stream.events] == [True, False, False]


def test_a_piece_that_was_not_sent_is_given_again():
    staging = Staging(SlowDeviceStream(10**9), 2, ((3,), torch.int64))
    assert staging.next_piece()[0] is staging.next_piece()[0]


def test_arrivals_come_in_order_and_no_more_than_some_are_missing():
    arrivals, seen = Arrivals(), []
    events = [Later(2), DONE, Later(10**6), DONE]
    for i, event in enumerate(events):
        arrivals.expect(event, lambda i=i: seen.append(i))
    arrivals.collect(4)
    assert seen == []  # the second is there, but the first is not
    arrivals.collect(3)
    assert seen == [0, 1]
    events[2].left = 5
    arrivals.collect(2)
    assert seen == [0, 1] and len(arrivals) == 2
    arrivals.collect(0)
    assert seen == [0, 1, 2, 3] and len(arrivals) == 0


def test_on_a_cpu_tensors_are_fetched_without_a_copy():
    tensors = {"a": torch.arange(3)}
    fetched, event = DeviceStream(torch.device("cpu")).fetch(tensors)
    assert fetched["a"] is tensors["a"] and event.query()


@pytest.mark.parametrize("device", [pytest.param(GPU, marks=NEEDS_GPU)])
def test_on_a_gpu_tensors_are_fetched_as_they_were_at_their_turn(device):
    device_stream = DeviceStream(device)
    with device_stream.exclusive():
        a = torch.zeros(10**7, device=device)
        fetched = []
        for _ in range(10):
            a += 1
            fetched.append(device_stream.fetch({"a": a}))
    wait(fetched[-1][1])
    assert [np.unique(tensors["a"]).tolist() for tensors, _ in fetched] == [[i + 1.0] for i in range(10)]


@pytest.mark.parametrize("device", [pytest.param(GPU, id="cuda", marks=NEEDS_GPU)])
def test_on_a_gpu_other_threads_work_while_this_one_captures(device):
    device_stream, stop = DeviceStream(device), threading.Event()
    with device_stream.exclusive():
        counter, numbers = torch.zeros(2, 10**6, device=device).unbind()
    added = []

    def keep_adding():
        while not stop.is_set():
            with device_stream.exclusive():
                counter.add_(torch.ones(10**6, device=device))  # fresh memory, as when an unroll is turned into blocks
                added.append(device_stream.event())
            wait(added[-1])

    thread = threading.Thread(target=keep_adding)
    thread.start()
    try:
        graph = torch.cuda.CUDAGraph()
        with device_stream.aside() as stream:
            numbers.add_(1)
            _ = numbers @ numbers  # libraries begin outside of captures
            with capture(graph, None, stream):
                result = numbers @ numbers
        while len(added) < 100:
            assert thread.is_alive()
            time.sleep(1e-3)
    finally:
        stop.set()
        thread.join(10)
    with device_stream.exclusive():
        graph.replay()
        found, event = device_stream.fetch({"result": result, "counter": counter})
    wait(event)
    assert found["result"] == 10**6 and found["counter"].unique().tolist() == [len(added)]


@pytest.mark.parametrize("device", [pytest.param(GPU, id="cuda", marks=NEEDS_GPU)])
def test_an_old_graph_among_the_garbage_spoils_no_capture(device):
    class Holder:
        def __init__(self):
            self.itself, self.graph = self, torch.cuda.CUDAGraph()

    stream, numbers = torch.cuda.Stream(device), torch.zeros(10, device=device)
    for _ in range(2):  # the first one is garbage when the second is captured
        holder = Holder()
        with capture(holder.graph, None, stream):
            cycles = [[] for _ in range(10_000)]
            for cycle in cycles:
                cycle.append(cycle)  # so many would start a collection
            numbers.add_(1)
    assert gc.isenabled()
    holder.graph.replay()
    torch.cuda.synchronize(device)
    assert numbers.unique().tolist() == [1]
