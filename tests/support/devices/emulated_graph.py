"""A CUDA graph on a CPU: records operators and kernels with their memory, and does them again.

As in a CUDA graph, addresses and numbers of the host are those of the recording, nothing of Python
runs at a replay, and reading a result during the recording is an error. What was allocated while
it was recorded holds NaN before a replay, since a graph's results share memory. Triton kernels run
in the interpreter, on addresses of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import curvadion_kernels
from curvadion.layout import exchange
from curvadion.ops.page import Page
from curvadion.optim import capture, replica_optimizer
from curvadion.update import newton_schulz, orthonormalize, polar, power_iteration

READS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
NOT_WORK = ("aten::empty", "aten::new_empty", "prim", "profiler")
Memory = Callable[[], list[Tensor]]


class EmulatedGraph(TorchDispatchMode):
    """What :class:`curvadion.optim.capture.CudaGraph` is on a GPU.

    Args:
        memory: returns all weights and states. Recording does the work too, on a CPU, so they
            are restored after it.
    """

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory
        self._work: list[Callable[[], None]] = []
        self._alive: list[object] = []
        self._allocated: list[Tensor] = []
        self.replays = 0

    def record(self, body: Callable[[], None]) -> None:
        before = [(t, t.clone()) for t in self._memory()]
        try:
            with self, _launches_noted(self._work):
                body()
        finally:
            for t, old in before:
                t.copy_(old)

    def between(self, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._work.append(partial(call, *arguments))

    def replay(self) -> None:
        self.replays += 1
        for memory in self._allocated:
            memory.fill_(0xFF)  # NaN, or -1
        with torch.no_grad():
            for work in self._work:
                work()

    def release(self) -> None:
        self._work.clear()
        self._alive.clear()
        self._allocated.clear()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        schema = function._schema
        if schema.name in READS:
            raise RuntimeError(f"the host reads a result by {schema.name} during a recording")
        result = function(*args, **(kwargs or {}))
        # Kernels find tensors by addresses in tables, so all must stay where they are.
        self._alive.append(result)
        views = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
        writes = any(a.alias_info and a.alias_info.is_write for a in schema.arguments)
        if not (views or writes):
            given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
            for t in _tensors(result):
                if not t.is_meta and t.untyped_storage()._cdata not in given:
                    bytes_of = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())
                    self._allocated.append(bytes_of)
        if not views and not schema.name.startswith(NOT_WORK):
            held = [] if writes else _tensors(result)
            self._work.append(lambda: _again(function, args, kwargs or {}, held))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


def _again(function: Any, args: Any, kwargs: Any, held: list[Tensor]) -> None:
    """Call an operator and put its results where the recording has put them."""
    found = tree_leaves(function(*args, **kwargs))
    for place, new in zip(held, [t for t in found if isinstance(t, Tensor)], strict=False):
        if place.numel():
            place.copy_(new)


@contextmanager
def _launches_noted(work: list[Callable[[], None]]) -> Iterator[None]:
    """Note the launches of Triton kernels, and make them."""
    real = curvadion_kernels.launch.run

    def run(kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
        def launch() -> None:
            with _disable_current_modes():
                real(kernel, grid, *arguments, **constants)

        launch()
        work.append(launch)

    with launches_replaced(run):
        yield


@contextmanager
def launches_replaced(run: Callable[..., None]) -> Iterator[None]:
    """Let another function launch the kernels of all modules."""
    with ExitStack() as stack:
        for module in vars(curvadion_kernels).values():
            if hasattr(module, "run"):
                stack.enter_context(mock.patch.object(module, "run", run))
        yield


def _on_the_host(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return method(*args, **kwargs)

    return call


@contextmanager
def graphs_on_cpu(memory: Memory) -> Iterator[list[EmulatedGraph]]:
    """Let optimizers on a CPU step as on a GPU: ahead of the device, captured, in float16.

    Yields the graphs that they make.
    """
    graphs: list[EmulatedGraph] = []

    def make(device: torch.device) -> EmulatedGraph:
        graphs.append(EmulatedGraph(memory))
        return graphs[-1]

    with ExitStack() as stack:
        devices = ("cuda", "cpu")
        for patch in (
            mock.patch.object(capture, "DEVICES", devices),
            mock.patch.object(capture, "make_graph", make),
            mock.patch.object(replica_optimizer, "RUNS_AHEAD", devices),
            mock.patch.object(orthonormalize, "GROUPED", devices),
            mock.patch.object(power_iteration, "GROUPED", devices),
            # Writing a page is work of the host.
            mock.patch.object(Page, "table", _on_the_host(Page.table)),
            mock.patch.object(Page, "fixed", _on_the_host(Page.fixed)),
            *(
                mock.patch.object(module, "dtype_of_products", lambda rows: torch.float16)
                for module in (newton_schulz, polar, exchange)
            ),
        ):
            stack.enter_context(patch)
        yield graphs
