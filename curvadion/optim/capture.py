"""Steps that are recorded in CUDA graphs and replayed: one launch, and one copy before it.

A closed step of a schedule, or a step of one replica alone, does the same on the device every
time: only the addresses of gradients and the numbers of the groups differ. After three such
steps, with others between them or not, it is recorded, and then replayed with a fresh
:class:`curvadion.ops.page.Page`. The decisions of the host (gate, counters, reports) are
those of any other step.

Collectives are not in a graph. A step on shards has a graph for each part that lies between
two of them, and the host calls them as in any other step. So a rank may replay a step while
others take it eagerly, every backend will do, and timeouts and meters see what is sent.
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from curvadion import checks, ops
from curvadion.agreement.meeting import Meeting
from curvadion.comm.collectives import called_between
from curvadion.layout.dtensor import local
from curvadion.ops.page import LiveGroup, Page
from curvadion.ops.tensors import Tensors
from curvadion.plan.parameter import Matrix, Parameter
from curvadion.plan.plan import Plan
from curvadion.update.registry import DIRECTIONS

# Equal steps before one is recorded, so that kernels are compiled and caches are filled.
EQUAL_STEPS = 3
DEVICES = ("cuda",)
# Operators that take a tensor's shape, dtype and device only.
ALLOCATIONS = ("aten::empty", "aten::new_", "aten::zeros_like", "prim")

# The device's part of a step with the parameters of a plan, and the page of its replays.
Body = Callable[[Plan, Page], Meeting]


class Obstacle(ValueError):
    """Why a step cannot be recorded."""

    def __init__(self, why: str) -> None:
        super().__init__(f"steps cannot be captured in a CUDA graph: {why}")


class Graph(Protocol):
    """What records work on a device."""

    def record(self, body: Callable[[], None]) -> None:
        """Record the body's work, which is not done yet."""

    def between(self, call: Callable[[], None]) -> None:
        """While the body runs: a replay calls this after the work up to here."""

    def replay(self) -> None:
        """Do the recorded work on the current stream."""

    def release(self) -> None:
        """Free what the recording holds."""


class CudaGraph:
    """CUDA graphs with calls between them; they share memory, as they run one after another.

    Their intermediate results stay allocated until they are released.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._calls: list[Callable[[], None]] = []  # one after each graph but the last

    def record(self, body: Callable[[], None]) -> None:
        """Record on a stream of its own: the default one cannot be captured."""
        torch.cuda.synchronize(self._device)
        # While a graph is recorded, the allocator cannot free what it keeps for reuse.
        torch.cuda.empty_cache()
        with torch.cuda.stream(_stream_of(self._device)), _no_collection():
            self._begin()
            try:
                body()
                self._end()
            except BaseException:
                self._abandon()
                raise

    def between(self, call: Callable[[], None]) -> None:
        """End a graph and begin the next one."""
        self._end()
        self._calls.append(call)
        self._begin()

    def _begin(self) -> None:
        self._graphs.append(torch.cuda.CUDAGraph())
        # Other threads, such as a data loader's, may use the device meanwhile.
        self._graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        with warnings.catch_warnings():
            # Between the beginning of a collective and the wait for it there may be no work.
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            self._graphs[-1].capture_end()

    def _abandon(self) -> None:
        """End a recording that has failed, and let the allocator use its memory again."""
        try:
            self._graphs[-1].capture_end()
        except RuntimeError:  # it is invalid, so torch has left the allocator as it was
            index = torch.cuda._utils._get_device_index(self._device, optional=True)
            for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
                with suppress(AttributeError, RuntimeError):
                    getattr(torch._C, name)(index, self._pool)

    def replay(self) -> None:
        """Launch the graphs."""
        for graph, call in zip_longest(self._graphs, self._calls):
            graph.replay()
            if call is not None:
                call()

    def release(self) -> None:
        """Free their memory."""
        self._calls.clear()
        for graph in self._graphs:
            graph.reset()


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """One stream for all recordings: cuBLAS keeps memory for each stream that it has seen."""
    return torch.cuda.Stream(device)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Free no tensors of others meanwhile, for which the allocator would ask the device."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


make_graph: Callable[[torch.device], Graph] = CudaGraph


class Recorded:
    """A recorded step: replays it as long as nothing else than its page has changed."""

    def __init__(self, plan: Plan, body: Body) -> None:
        memory = _Memory(plan)
        tensors = len(plan.parameters) + len(plan.matrices)
        self._page = Page(plan.device, memory.gradients, tensors, plan.elements)
        self._page.same(memory.places)
        self._page.same(memory.strides)
        self._graph = make_graph(plan.device)
        live = live_plan(plan, self._page)
        self._written = [p.local for p in plan.parameters]

        def work() -> None:
            unrecorded = called_between(self._graph.between)
            with self._page.record(), unrecorded, _Recordable(memory.gradients()):
                self._meeting = body(live, self._page)

        try:
            self._graph.record(work)
        except BaseException:
            self.release()
            raise
        self._page.settle()

    def fits(self) -> bool:
        """Whether a replay does what the step would."""
        return self._page.fits()

    def replay(self) -> Meeting:
        """Take the step; return its meeting."""
        self._page.refresh()
        self._graph.replay()
        # Autograd must notice if a weight changes between forward and backward.
        torch.autograd.graph.increment_version(self._written)
        return replace(self._meeting)

    def release(self) -> None:
        """Free the graph and its memory."""
        self._graph.release()
        self._page.forget()


class Captures:
    """When steps of an optimizer are recorded, and the recorded ones.

    Args:
        wanted: None records where it can, True raises where it cannot, False never records.
    """

    def __init__(self, wanted: bool | None) -> None:
        self.wanted = wanted
        self._plan: Plan | None = None
        self._seen: Counter[object] = Counter()
        self._recorded: dict[object, Recorded] = {}

    def replay(self, key: object, plan: Plan, body: Body) -> Meeting | None:
        """Take a step by replaying it, if it is recorded or can be; None: take it eagerly.

        Args:
            key: equal for steps that do the same on the device.
            plan: of the step.
            body: the device's part of it.
        """
        if self.wanted is False or plan.device.type not in DEVICES:
            return None
        if plan.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None  # the step becomes a part of somebody else's graph
        if plan is not self._plan:
            # Steps of another plan do not come back, so their memory is freed.
            self.release()
            self._plan = plan
        key = key, _switches(plan.device)
        recorded = self._recorded.get(key)
        if recorded is not None and not recorded.fits():
            self._recorded.pop(key).release()
            self._seen[key] = 0
            recorded = None
        if recorded is None:
            self._seen[key] += 1
            if self._seen[key] <= EQUAL_STEPS:
                return None
            recorded = self._record(plan, body)
            if recorded is None:
                return None
            self._recorded[key] = recorded
        return recorded.replay()

    def _record(self, plan: Plan, body: Body) -> Recorded | None:
        try:
            check_recordable(plan)
            check_gradients(plan)
            return Recorded(plan, body)
        except Exception as error:
            why = error if isinstance(error, Obstacle) else Obstacle(repr(error))
            if self.wanted:
                raise ValueError(f"capture=True, but {why}: pass capture=None.") from error
            warnings.warn(
                f"{why}. They work, but slower; pass capture=False to silence this.",
                stacklevel=checks.user_stacklevel(),
            )
            self.wanted = False
            return None

    def release(self) -> None:
        """Free all graphs; steps are counted anew."""
        for recorded in self._recorded.values():
            recorded.release()
        self._recorded.clear()
        self._seen.clear()


def check_recordable(plan: Plan) -> None:
    """Raise :class:`Obstacle` if a step of these parameters cannot be recorded."""
    if plan.device.type not in DEVICES:
        raise Obstacle(f"the parameters are on {plan.device}, not on an NVIDIA GPU")
    backend = ops.backend_for(plan.device)
    if backend != "triton":
        raise Obstacle(f"operations run by the backend {backend!r}, not by Triton")
    for p in plan.parameters:
        if p.X.dtype == torch.float64:
            raise Obstacle(f"{p.name} has dtype float64, which Triton's kernels do not take")
        if p.group["algorithm"] == "lion":
            raise Obstacle(f"{p.name} has algorithm='lion', whose step is not one operation")
        if any(isinstance(n, Tensor) and n.device.type != "cpu" for n in p.group.values()):
            raise Obstacle(f"the group of {p.name} has a number that is on the device")
    for m in plan.matrices:
        name = m.parameter.name
        direction = DIRECTIONS[m.parameter.direction]
        # A subclass has to say so itself.
        if not vars(type(direction)).get("capturable", False):
            raise Obstacle(f"direction={m.parameter.direction!r} is not capturable")
        if (why := direction.obstacle(m)) is not None:
            raise Obstacle(f"{name}: {why}")
        if not m.shard.view.is_view:
            raise Obstacle(f"a rank holds parts of rows of {name}")


def check_gradients(plan: Plan) -> None:
    """Raise :class:`Obstacle` if kernels cannot find gradients by their addresses alone."""
    for p in plan.parameters:
        G = p.G
        if G is None or G.dtype != p.X.dtype or G.stride() != p.local.stride():
            raise Obstacle(f"the gradient of {p.name} has another dtype or other strides")


class _Recordable(TorchDispatchMode):
    """Raises :class:`Obstacle` at operators that must not be a part of a graph.

    A gradient would be read where it is now; kernels of this package find it by the page.
    A collective would take part while other ranks do not.
    """

    def __init__(self, gradients: Tensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = {g.untyped_storage()._cdata for g in gradients}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name
        if name.startswith("c10d"):
            raise Obstacle(f"{name} is not called by communicate() of comm/collectives.py")
        result = function(*args, **(kwargs or {}))
        returns = function._schema.returns
        views = any(r.alias_info and not r.alias_info.is_write for r in returns)
        if not views and not name.startswith(ALLOCATIONS):
            for t in tree_leaves((args, kwargs)):
                if isinstance(t, Tensor) and t.untyped_storage()._cdata in self._places:
                    raise Obstacle(f"{name} reads a gradient, which may be elsewhere later")
        return result


def live_plan(plan: Plan, page: Page) -> Plan:
    """The same parameters in groups whose numbers are read again before every replay."""
    groups: dict[int, LiveGroup] = {}

    def live(p: Parameter) -> Parameter:
        group = groups.setdefault(id(p.group), LiveGroup(p.group, page))
        twin = replace(p, group=group, matrices=[])
        twin.matrices.extend(Matrix(twin, m.shard, m.index) for m in p.matrices)
        return twin

    found = replace(
        plan, dion=list(map(live, plan.dion)), elementwise=list(map(live, plan.elementwise))
    )
    found.elements_in_a_batch = plan.elements_in_a_batch
    return found


class _Memory:
    """Where the tensors of a plan are."""

    def __init__(self, plan: Plan) -> None:
        self._X = [p.X for p in plan.parameters]
        self._states = [p.state for p in plan.parameters]
        self._sharded = plan.sharded

    def gradients(self) -> Tensors:
        """This rank's gradients; all exist, or a step has another key."""
        G = [g for x in self._X if (g := x.grad) is not None]
        return list(map(local, G)) if self._sharded else G

    def places(self) -> object:
        """Where weights and states are."""
        weights = [x.data_ptr() for x in (map(local, self._X) if self._sharded else self._X)]
        states = [t for state in self._states for t in state.values()]
        # Numbers of the host among them belong to openings.
        tensors = [t for t in states if isinstance(t, Tensor)]
        return weights, [t.data_ptr() for t in map(local, tensors)]

    def strides(self) -> object:
        """How gradients lie in memory."""
        return [(g.dtype, g.stride()) for g in self.gradients()]


def _switches(device: torch.device) -> tuple[object, ...]:
    """What else decides which kernels a step launches, and where."""
    stream = torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0
    return ops.backend_for(device), stream
