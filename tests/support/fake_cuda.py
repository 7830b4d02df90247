"""Runs code on fake CUDA tensors on a machine without a GPU, and counts what would cost time there.

    with fake_cuda():
        x = torch.ones(3, device=CUDA)
        with Count() as count:
            x.sum().item()
    assert count.operations.total() == 1 and count.reads == ["test_some.py:12 test_it"]

Fake tensors (torch's FakeTensorMode) have shapes, dtypes and devices, but no numbers. What the host
reads is therefore made up by :class:`Count`, or is what ``answers`` says.

Fused operations run in plain PyTorch: compiled kernels would ask for addresses. They take fewer
operations than are counted here.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import optimizer
from torch.utils import cpp_extension
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from compiler import CXX
from curvadion.layout import dtensor
from curvadion.ops import codes, coding, native, operations
from curvadion.update import newton_schulz

GUARD = Path(__file__).with_name("fake_cuda_guard.cpp")
CUDA = torch.device("cuda", 0)
COPIES = ("aten::_to_copy", "aten::copy_", "aten::_foreach_copy_")
# Operations that wait for the GPU, although nothing in their result is on the host.
CHECKS = ("aten::_linalg_check_errors", "aten::_linalg_eigh", "aten::_linalg_svd")
ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::_unsafe_view")
Answer = Callable[[Mapping[str, Any]], Any]


# -------------------------------------------------------------------- fake tensors on cuda:0


@functools.cache
def _load_guard() -> None:
    """Make fake tensors on cuda:0 possible in a build of torch without CUDA."""
    if not torch.backends.cuda.is_built():
        with native._path_with_ninja():
            cpp_extension.load("curvadion_fake_cuda", [str(GUARD)], is_python_module=False)


needs_fake_cuda = pytest.mark.skipif(
    CXX is None and not torch.backends.cuda.is_built(), reason="no C++ compiler was found"
)


@functools.cache
def _mode() -> FakeTensorMode:
    """One for the whole process: it remembers what it has seen, and tensors of two do not mix."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Make all new tensors fake; those on cuda:0 are allowed."""
    _load_guard()
    foreach = [*optimizer._foreach_supported_types, FakeTensor]
    with ExitStack() as stack:
        for patch in (
            mock.patch.object(FakeTensor, "data_ptr", _address),
            # torch asks for exact types before it takes lists of tensors in one operation.
            mock.patch.object(optimizer, "_foreach_supported_types", foreach),
            # Constants that the host computes and keeps need their numbers.
            mock.patch.object(newton_schulz, "_best", _real(newton_schulz._best)),
            mock.patch.object(codes, "levels", _real(codes.levels)),
            mock.patch.object(dtensor, "_ranks_along", _real(dtensor._ranks_along)),
            mock.patch.object(operations, "fused", _one_launch),
            mock.patch.object(coding, "fused", _one_launch),
            mock.patch.object(torch.cuda, "Event", mock.MagicMock),
            mock.patch.object(torch.cuda, "current_stream", mock.MagicMock()),
            _mode(),
        ):
            stack.enter_context(patch)
        stack.callback(codes.constants.cache_clear)  # it would give fake tensors to others
        yield


def _one_launch(name: str, *args: Any, writes: object = ()) -> Any:
    """A fused operation as a backend runs it: one launch, here without numbers."""
    first = args[0] if isinstance(args[0], Tensor) else next(iter(args[0]), None)
    if not isinstance(first, FakeTensor):
        return None
    launched = first.detach().sum()
    if name == "column_sum_of_squares":
        return first.new_empty(*first.shape[:-2], first.shape[-1], dtype=torch.float64)
    if name == "column_normalize":
        return torch.empty_like(first)
    if name in ("norms", "momentum_norms"):
        wide = torch.promote_types(first.dtype, torch.float32)
        return launched.new_empty(len(args[0]), dtype=wide)
    return True


def _real(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on tensors that have numbers; nothing of it is counted."""

    def call(*args: Any) -> Any:
        with _disable_current_modes():
            return function(*args)

    return call


def _address(tensor: Tensor) -> int:
    """A number for the place in memory, which fake tensors do not have."""
    place: int = tensor.untyped_storage()._cdata
    return place << 40 | tensor.storage_offset() * tensor.element_size()


# -------------------------------------------------------------------- counting


class Count(TorchDispatchMode):
    """Counts what is done with fake CUDA tensors inside a ``with`` block.

    Args:
        answers: what ``tolist()`` and ``item()`` answer, by the name of the function that calls
            them: a function of that function's local variables.

    Attributes:
        operations: dispatched operations by name, each about one kernel launch; views and
            allocations are not counted.
        reads: where the host read from the device, and so waited for it.
        copies: where the device read from unpinned memory of the host, and so the host waited.
    """

    def __init__(self, answers: Mapping[str, Answer] | None = None) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.reads: list[str] = []
        self.copies: list[str] = []
        self._answers = answers or {}
        self._pinned: list[Tensor] = []
        self._patch = mock.patch.object(FakeTensor, "tolist", lambda tensor: self._read(tensor))

    def __enter__(self) -> Count:
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, launches = _known(function)
        if name == "aten::_local_scalar_dense" and isinstance(args[0], FakeTensor):
            return self._read(args[0])
        if name == "aten::_pin_memory":  # fake tensors do not know it
            result = args[0].clone()
            self._pinned.append(result)
            return result
        result = function(*args, **(kwargs or {}))
        every = _tensors((args, kwargs, result))
        if name.startswith("prim") or not any(t.is_cuda for t in every):
            return result
        if name in COPIES:
            self._note_copies(name, args, kwargs or {}, result)
        elif name in CHECKS:
            self.reads.append(_place())
        elif any(not t.is_cuda and t.dim() for t in every):
            self.copies.append(_place(name))  # an index; other mixtures of devices are errors
        if launches:
            self.operations[name] += 1
        return result

    def _note_copies(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        to, sources = (args[0], args[1]) if name.endswith("copy_") else (result, args[0])
        waits = not (kwargs.get("non_blocking") or True in args[2:])
        for target, source in zip(_tensors(to), _tensors(sources), strict=True):
            pinned = any(target is each or source is each for each in self._pinned)
            if source.is_cuda and not target.is_cuda:
                if waits or not pinned:
                    self.reads.append(_place())
            elif target.is_cuda and not source.is_cuda and (waits or not pinned):
                self.copies.append(_place(name))

    def _read(self, tensor: Tensor) -> Any:
        if tensor.is_cuda:
            self.reads.append(_place())
        caller = _caller()
        if answer := self._answers.get(caller.f_code.co_name):
            return answer(caller.f_locals)
        return _numbers(tensor.shape, tensor.dtype)


@functools.cache
def _known(function: Any) -> tuple[str, bool]:
    """An operation's name, and whether it launches a kernel."""
    schema = function._schema
    views = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
    return schema.name, not (views or schema.name.startswith(ALLOCATIONS))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _numbers(shape: Sequence[int], dtype: torch.dtype) -> Any:
    """What the host reads, as ``tolist()`` gives it."""
    if shape:
        return [_numbers(shape[1:], dtype) for _ in range(shape[0])]
    # No zeros among floats: AdamW divides by what follows from its counters.
    return False if dtype is torch.bool else 1.0 if dtype.is_floating_point else 0


def _caller() -> FrameType:
    """The innermost frame outside torch and this module."""
    frame: FrameType | None = sys._getframe()
    inside = (str(Path(torch.__file__).parent), __file__)
    while frame is not None and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back
    assert frame is not None
    return frame


def _place(name: str = "") -> str:
    frame = _caller()
    place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
    return f"{name} {place}".strip()
