"""Streams and CUDA graphs without a GPU: what streams share, and what a graph owns.

Device memory is host memory here, streams are numbers, and kernels only note what they are given.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from curvadion.ops import cuda

CUDA = torch.device("cuda", 0)


class Stream(torch.Stream):
    def __new__(cls, number):
        return super().__new__(cls, stream_id=number, device_index=0, device_type=1)

    def __init__(self, number):
        self.cuda_stream, self.waited_for = number, []

    def record_event(self):
        return self

    def wait_event(self, event):
        self.waited_for.append(event)


class Device(TorchFunctionMode):
    """A CUDA device whose memory is the host's; also the stream and the graph of the moment."""

    def __init__(self):
        super().__init__()
        self.stream, self.graph = Stream(1), False
        self.transfers, self.zeros, self.recorded, self._pinned = 0, [], [], set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.device.__get__:
            return CUDA
        if func is torch.Tensor.record_stream:
            return self.recorded.append(args)
        if func is torch.Tensor.to:
            assert kwargs == {"non_blocking": True} and args[1] == CUDA, "a copy that blocks"
            assert args[0].data_ptr() in self._pinned, "a copy from memory that is not pinned"
            self.transfers += 1
            return args[0].clone()
        pinned = kwargs.pop("pin_memory", False)
        if kwargs.get("device") == CUDA:
            kwargs["device"] = "cpu"
        made = func(*args, **kwargs)
        if pinned:
            self._pinned.add(made.data_ptr())
        if func is torch.zeros:
            self.zeros.append(made)
        return made

    def transfers_of(self, call, *, stream=None):
        """How many transfers a call makes, from this stream on."""
        self.stream = stream or self.stream
        before = self.transfers
        call()
        return self.transfers - before


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: device.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.graph)
    with device:
        yield device


class Kernel:
    """Notes the memory that each launch is given; keeps it, so that nothing else gets it."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *args, **_: self.launches.append(
            [a for a in args if isinstance(a, torch.Tensor)]
        )

    def memory(self, launch):
        return {t.untyped_storage().data_ptr() for t in self.launches[launch] if t.numel()}


def norms(kernels):
    X = [torch.ones(3), torch.ones(40_000)]
    return kernels.momentum, "momentum_kernel", partial(kernels.norms, X)


def low_rank(kernels):
    X, P, Q = torch.ones(9, 4), torch.ones(9, 2), torch.ones(4, 2)
    step = partial(kernels.low_rank_update_, [X], [P], [Q], [0.1], [1.0])
    return kernels.low_rank, "low_rank_kernel", step


@pytest.fixture(params=[norms, low_rank], ids=lambda operation: operation.__name__)
def operation(request, device, monkeypatch):
    """The kernel, and a call that launches it."""
    kernels = pytest.importorskip("curvadion_kernels")
    caches = kernels.launch._launches, kernels.low_rank._tiles
    for cache in caches:
        cache.cache_clear()
        request.addfinalizer(cache.cache_clear)
    module, name, call = request.param(kernels)
    kernel = Kernel()
    monkeypatch.setattr(module, name, kernel)
    return kernel, call


def test_streams_share_what_follows_from_sizes(operation, device):
    _, call = operation
    first, second = device.stream, Stream(2)
    assert device.transfers_of(call) == 2  # the index and the table of addresses
    assert device.transfers_of(call) == 1
    assert device.transfers_of(call, stream=second) == 1
    assert device.transfers_of(call) == 1
    assert second.waited_for == [first] and first.waited_for == []
    assert [stream for _, stream in device.recorded] == [second]


def test_a_graph_owns_all_that_its_launches_read(operation, device):
    kernel, call = operation
    call()  # a warm-up
    for _ in range(2):
        device.graph = True
        assert device.transfers_of(call, stream=Stream(1)) == 2
        device.graph = False
        assert device.transfers_of(call) == 1  # the index is what the warm-up has left
    eager, graph, _, another, _ = (kernel.memory(launch) for launch in range(5))
    assert graph and not graph & eager and not graph & another
    # The warm-up's launch and later ones share the index.
    assert kernel.memory(2) & eager == kernel.memory(4) & eager != set()


@pytest.fixture(params=["triton", "cuda"])
def norms_with_counters(request, device, monkeypatch):
    """A call of norms that returns the address of its launch's counters."""
    X = [torch.ones(7)]
    if request.param == "cuda":
        given = []
        library = SimpleNamespace(
            curvadion_cuda_blocks=lambda *_: 1,
            curvadion_cuda_capacity=lambda: 8,
            curvadion_cuda_momentum_norms=lambda *args: given.append(args) or 0,
        )
        monkeypatch.setattr(cuda, "load", lambda: library)
        cuda._tickets.cache_clear()
        request.addfinalizer(cuda._tickets.cache_clear)
        return lambda: cuda.norms(X) is not None and given[-1][10]
    momentum = pytest.importorskip("curvadion_kernels.momentum")
    kernel = Kernel()
    monkeypatch.setattr(momentum, "momentum_kernel", kernel)
    return lambda: momentum.norms(X) is not None and kernel.launches[-1][6].data_ptr()


def test_counters_of_finished_blocks_are_those_of_one_stream_or_graph(norms_with_counters, device):
    def counters(stream, *, graph=False):
        """The address of a launch's counters, and how many were set to zero for it."""
        device.stream, device.graph, before = stream, graph, len(device.zeros)
        found, made = norms_with_counters(), device.zeros[before:]
        assert all(zeros.data_ptr() == found for zeros in made)
        return found, len(made)

    first, second = Stream(1), Stream(2)
    one, zeroed = counters(first)
    assert zeroed == 1 and counters(first) == (one, 0)
    other, zeroed = counters(second)
    assert zeroed == 1 and other != one
    # Each graph sets its own to zero, at each replay.
    graphs = [counters(first, graph=True) for _ in range(2)]
    assert [zeroed for _, zeroed in graphs] == [1, 1]
    assert len({one, other, *(found for found, _ in graphs)}) == 4
    assert counters(first) == (one, 0)
