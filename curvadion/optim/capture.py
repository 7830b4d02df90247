"""Steps that are recorded in CUDA graphs and replayed: a copy, and a launch of each graph.

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
from functools import partial
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from curvadion import checks, ops
from curvadion.agreement.meeting import Meeting
from curvadion.comm.collectives import called_between
from curvadion.layout.dtensor import is_dtensor, local
from curvadion.ops.page import LiveGroup, Page
from curvadion.ops.tensors import Tensors
from curvadion.plan.parameter import Matrix, Parameter
from curvadion.plan.plan import Plan
from curvadion.update.registry import DIRECTIONS

# Equal steps before one is recorded, so that kernels are compiled and caches are filled.
EQUAL_STEPS = 3
DEVICES = ("cuda",)
COLLECTIVES = ("c10d::", "_c10d_functional::")
# Operators that take a tensor's shape, dtype and device only.
ALLOCATIONS = ("aten::empty", "aten::new_", "aten::zeros_like", "prim")

# The device's part of a step with the parameters of a plan, and the page of its replays.
Body = Callable[[Plan, Page], Meeting]


class Obstacle(ValueError):
    """Why a step cannot be recorded.

    Args:
        why: the reason, which ends the error's message.
    """

    def __init__(self, why: str) -> None:
        super().__init__(f"steps cannot be captured in a CUDA graph: {why}")


class Graph(Protocol):
    """Records work on a device, and repeats it."""

    def record(self, body: Callable[[], None]) -> None:
        """Record the body's work, which is not done yet."""

    def between(self, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """While the body runs: a replay makes this call after the work up to here."""

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
        # The default stream cannot be captured. Graphs that live at the same time need
        # different ones: cuBLAS has one workspace for each stream, in the memory of the graph
        # that came first, and newer versions of torch free it with that graph.
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._calls: list[Callable[[], None]] = []  # one after each graph but the last
        self._recording = False

    def record(self, body: Callable[[], None]) -> None:
        torch.cuda.synchronize(self._device)
        # While a graph is recorded, the allocator cannot free what it keeps for reuse.
        torch.cuda.empty_cache()
        with (
            torch.cuda.stream(self._stream),
            _no_collection(),
            warnings.catch_warnings(),
        ):
            # Between the beginning of a collective and the wait for it there may be no work.
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            try:
                self._begin()
                body()
                self._end()
            except BaseException:
                self._abandon()
                raise

    def between(self, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._end()
        borrowed = tree_map_only(Tensor, _borrowed, arguments)
        self._calls.append(partial(call, *borrowed))
        self._begin()

    def _begin(self) -> None:
        self._graphs.append(torch.cuda.CUDAGraph())
        # Other threads, such as a data loader's, may use the device meanwhile.
        self._graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._recording = True

    def _end(self) -> None:
        self._graphs[-1].capture_end()
        self._recording = False

    def _abandon(self) -> None:
        """End a recording that has failed, and let the allocator use its memory again."""
        if not self._recording:
            return
        with suppress(RuntimeError):
            self._end()
        with suppress(RuntimeError):
            self._graphs[-1].pool()
            return  # torch has ended it, and reset() frees its memory
        # The recording was invalid, and torch has left the allocator as it was.
        index = torch.cuda._utils._get_device_index(self._device, optional=True)
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            with suppress(AttributeError, RuntimeError):
                getattr(torch._C, name)(index, self._pool)

    def replay(self) -> None:
        for graph, call in zip_longest(self._graphs, self._calls):  # no call follows the last
            graph.replay()
            if call is not None:
                call()

    def release(self) -> None:
        self._calls.clear()
        for graph in self._graphs:
            graph.reset()


class _Address:
    """The address of a tensor, as other libraries tell torch of theirs."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _borrowed(tensor: Tensor) -> Tensor:
    """A tensor in the same memory that does not keep it.

    Later graphs may reuse the memory for results of their own, because they run afterwards.
    """
    if not tensor.nbytes:
        return tensor
    if not tensor.is_contiguous():
        raise Obstacle("a collective has a tensor that is not contiguous")
    elements = torch.as_tensor(_Address(tensor), device=tensor.device)
    return elements.view(tensor.dtype).view(tensor.shape)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage inside the block.

    To free a tensor that another stream has used, the allocator may query the device, which
    breaks a recording.
    """
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
    """A recorded step: replays it while only what its page holds changes.

    Args:
        plan: of the step.
        body: the device's part of it, which is recorded at once.
    """

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
            # Collectives are called between the graphs.
            collectives_between = called_between(self._graph.between)
            recordable = _Recordable(memory.gradients())
            with self._page.record(), collectives_between, recordable:
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
    """The recorded steps of an optimizer, and what decides when one is recorded.

    Args:
        wanted: None records steps that can be recorded, True raises ValueError if one cannot,
            False records none.
    """

    def __init__(self, wanted: bool | None) -> None:
        self.wanted = wanted
        self._plan: Plan | None = None
        # By a step's key: how often it was taken without a recording, and its recording.
        self._seen: Counter[object] = Counter()
        self._recorded: dict[object, Recorded] = {}

    def replay(self, key: object, plan: Plan, body: Body) -> Meeting | None:
        """Take a step by replaying it, if it is recorded or can be.

        Args:
            key: equal for steps that do the same on the device.
            plan: of the step.
            body: the device's part of it.

        Returns:
            The step's meeting; None if the caller must take the step eagerly.

        Raises:
            ValueError: recording is wanted, but the step cannot be recorded.
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
            # What the recording depends on has changed, so steps are counted anew.
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
        """Record a step; None, with a warning, if that is impossible and not wanted."""
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
        for key, value in p.group.items():
            if isinstance(value, Tensor) and value.device.type != "cpu":
                raise Obstacle(f"the group of {p.name} has a number that is on the device: {key}")
    for m in plan.matrices:
        name = m.parameter.name
        direction = DIRECTIONS[m.parameter.direction]
        # A subclass has to say so itself.
        if not vars(type(direction)).get("capturable", False):
            raise Obstacle(f"direction={m.parameter.direction!r} is not capturable")
        why = direction.obstacle(m)
        if why is not None:
            raise Obstacle(f"{name}: {why}")
        if not m.shard.view.is_view:
            raise Obstacle(f"a rank holds parts of rows of {name}")


def check_gradients(plan: Plan) -> None:
    """Raise :class:`Obstacle` if kernels cannot find gradients by their addresses alone."""
    for p in plan.parameters:
        G = p.G
        if G is None or G.dtype != p.X.dtype or G.stride() != p.local.stride():
            raise Obstacle(
                f"the gradient of {p.name} has another dtype or other strides than its weights"
            )


class _Recordable(TorchDispatchMode):
    """Raises :class:`Obstacle` at operators that must not be a part of a graph.

    A graph would read a gradient where it is now; kernels of this package find it by the page.
    A collective in a graph has no timeout, and waits for ranks that take the step eagerly.

    Args:
        gradients: of the step, which no other operator may read.
    """

    def __init__(self, gradients: Tensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = {g.untyped_storage()._cdata for g in gradients}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call an operator, unless it must not be recorded.

        Args:
            function: the operator.
            types: of the tensor subclasses among its arguments; torch passes them to all modes.
            args: its arguments.
            kwargs: its keyword arguments; None: there are none.
        """
        name = function._schema.name
        if name.startswith(COLLECTIVES) and name != "_c10d_functional::wait_tensor":
            raise Obstacle(f"{name} is not called by communicate() of comm/collectives.py")
        result = function(*args, **(kwargs or {}))
        # A view reads nothing, and nor does an allocation in the shape of a gradient.
        aliases = [value.alias_info for value in function._schema.returns]
        is_view = any(alias and not alias.is_write for alias in aliases)
        if is_view or name.startswith(ALLOCATIONS):
            return result
        for argument in tree_leaves((args, kwargs)):
            if not isinstance(argument, Tensor):
                continue
            if is_dtensor(argument):  # whose collectives would not be seen here
                raise Obstacle(f"{name} takes a DTensor, not this rank's shard")
            if argument.untyped_storage()._cdata in self._places:
                raise Obstacle(f"{name} reads a gradient, which may be elsewhere later")
        return result


def live_plan(plan: Plan, page: Page) -> Plan:
    """The same parameters in groups whose numbers are read again before every replay."""
    groups: dict[int, LiveGroup] = {}

    def live(p: Parameter) -> Parameter:
        # Parameters of one group share one live group.
        group = groups.setdefault(id(p.group), LiveGroup(p.group, page))
        twin = replace(p, group=group, matrices=[])
        twin.matrices.extend(Matrix(twin, m.shard, m.index) for m in p.matrices)
        return twin

    twins = replace(
        plan, dion=list(map(live, plan.dion)), elementwise=list(map(live, plan.elementwise))
    )
    twins.elements_in_a_batch = plan.elements_in_a_batch
    return twins


class _Memory:
    """Where the tensors of a plan are."""

    def __init__(self, plan: Plan) -> None:
        self._X = [p.X for p in plan.parameters]
        self._states = [p.state for p in plan.parameters]
        self._sharded = plan.sharded

    def gradients(self) -> Tensors:
        """This rank's gradients; all exist, or a step has another key."""
        G = []
        for x in self._X:
            g = x.grad
            if g is not None:
                G.append(local(g) if self._sharded else g)
        return G

    def places(self) -> object:
        """Where weights and states are."""
        weights = []
        for x in self._X:
            shard = local(x) if self._sharded else x
            weights.append(shard.data_ptr())
        states = []
        for state in self._states:
            for value in state.values():
                # A state that is a number of the host is for openings, which are not recorded.
                if isinstance(value, Tensor):
                    states.append(local(value).data_ptr())
        return weights, states

    def strides(self) -> object:
        """How gradients lie in memory."""
        return [(g.dtype, g.stride()) for g in self.gradients()]


def _switches(device: torch.device) -> tuple[object, ...]:
    """What else decides which kernels a step launches: the backend and the stream."""
    stream = 0
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device).stream_id
    return ops.backend_for(device), stream
