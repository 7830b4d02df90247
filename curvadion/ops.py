"""The fused operations of an optimizer step, and which backend runs them.

Each works on lists of tensors of different sizes and alignments, empty ones included. Data may be
bfloat16, float16, float32 or float64; sums are taken in float32 or wider, of squares in float64.
Weights and momenta saturate where they would leave their dtype's range
(:func:`curvadion.tensors.largest`): what is written is finite if what is read is. Lists that are
the same at many steps may be :class:`curvadion.tensors.Tensors`, which saves looking at them each
time.

Backends, chosen by the tensors' device: Triton kernels, else CUDA C++, on an NVIDIA GPU; C++ on
the CPU; plain PyTorch anywhere, for what the others cannot take, and as their reference.
``CURVADION_BACKEND=torch|triton|cuda|cpu`` or :class:`use_backend` force one; operations and
dtypes that it does not have still fall to plain PyTorch.

Under torch.compile these are operators ``torch.ops.curvadion.<name>``.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from curvadion import plain
from curvadion.native import Unavailable
from curvadion.tensors import Unsupported

Lists = Sequence[Tensor]
Numbers = Sequence[float]
NumbersOrTensors = Sequence[float | Tensor]

# Where each backend's operations are, and the devices whose tensors it takes.
BACKENDS = {
    "torch": "curvadion.plain",
    "cpu": "curvadion.cpu",
    "cuda": "curvadion.cuda",
    "triton": "curvadion_kernels",
}

# Which arguments hold step sizes and decays: numbers, or tensors that only plain PyTorch takes.
_STEPS = {"local_step_": slice(2, 4), "low_rank_update_": slice(3, 5)}
# Which lists an operation writes.
_WRITES = {
    "momentum_norms_": slice(0, 1),
    "accumulate_": slice(0, 1),
    "local_step_": slice(0, 5, 4),
    "column_normalize_": slice(0, 1),
    "low_rank_update_": slice(0, 6, 5),
}
_NONE = slice(0, 0)

logger = logging.getLogger("curvadion")
_forced: str | None = None


class use_backend:
    """Force a backend from here on, or inside a ``with`` block; None chooses by device again.

        curvadion.ops.use_backend("torch")
        with curvadion.ops.use_backend("cpu"): ...

    Raises:
        ValueError: for an unknown name. RuntimeError: if the backend is not available, saying
            what it lacks.
    """

    def __init__(self, name: str | None) -> None:
        global _forced
        if name is not None:
            _check_available(name)
        self._before = _forced
        _forced = name

    def __enter__(self) -> use_backend:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _forced
        _forced = self._before


def backend_for(device: torch.device) -> str:
    """The backend that tensors on ``device`` take.

    Raises:
        ValueError, RuntimeError: if a backend is forced that is unknown, is not available or does
            not take tensors on this device.
    """
    name = _forced or os.environ.get("CURVADION_BACKEND")
    if not name:
        return _automatic(device.type)
    _check_available(name)
    if not _takes(name, device.type):
        raise RuntimeError(
            f"backend {name!r} is forced, but a tensor is on {device}, which it does not take: "
            f"move it, or let the device choose the backend."
        )
    return name


def _check_available(name: str) -> None:
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r} must be one of {tuple(BACKENDS)}")
    lacks = lacking(name)
    if lacks is not None:
        raise RuntimeError(f"backend {name!r} is forced but not available: {lacks}")


@lru_cache
def lacking(name: str) -> str | None:
    """What a backend needs and does not find; None if it can run."""
    if name == "torch":
        return None
    if name == "triton":
        # Kernels are imported where they run and nowhere else: torch needs no triton.
        try:
            kernels = importlib.import_module(BACKENDS[name])
        except ImportError as error:
            return f"{error}: install triton"
        if not (torch.cuda.is_available() or kernels.INTERPRETED):
            return "there is no CUDA device (TRITON_INTERPRET=1 runs the kernels on the CPU)"
        return None
    if name == "cuda" and not torch.cuda.is_available():
        return "there is no CUDA device"
    try:
        importlib.import_module(BACKENDS[name]).load()
    except Unavailable as error:
        return str(error)
    return None


def implements(backend: str, operation: str) -> bool:
    """Whether the backend has an operation of its own, rather than leaving it to PyTorch."""
    return _operation(backend, operation) is not None


def _takes(name: str, device_type: str) -> bool:
    if name == "triton" and importlib.import_module(BACKENDS[name]).INTERPRETED:
        return device_type in ("cpu", "cuda")
    return name == "torch" or device_type == ("cpu" if name == "cpu" else "cuda")


@lru_cache
def _automatic(device_type: str) -> str:
    candidates = {"cpu": ["cpu"], "cuda": [] if torch.version.hip else ["triton", "cuda"]}
    reasons = []
    for name in candidates.get(device_type, []):
        lacks = lacking(name)
        if lacks is None:
            return name
        reasons.append(f"{name}: {lacks}")
    if reasons:
        logger.warning(
            "curvadion runs in plain PyTorch on the %s (%s)", device_type, "; ".join(reasons)
        )
    return "torch"


def _call(name: str, *args: Any) -> Any:
    """Run an operation: directly, or as an operator where PyTorch traces or wraps tensors."""
    first = _first(args)
    if first is None:
        return getattr(plain, name)(*args)
    if torch.compiler.is_compiling() or type(first) not in (Tensor, torch.nn.Parameter):
        if any(isinstance(v, Tensor) for list_ in args[_STEPS.get(name, _NONE)] for v in list_):
            return getattr(plain, name)(*args)
        return getattr(torch.ops.curvadion, name)(*args)
    return _run(name, first, args)


def _first(args: tuple[Any, ...]) -> Tensor | None:
    given = args[0]
    return given if isinstance(given, Tensor) else next(iter(given), None)


def _run(name: str, first: Tensor, args: tuple[Any, ...]) -> Any:
    operation = _operation(backend_for(first.device), name)
    if operation is not None:
        try:
            result = operation(*args)
        except Unsupported:
            pass
        else:
            for written in args[_WRITES.get(name, _NONE)]:
                if not first.is_inference():
                    # Autograd must notice a weight that changes between forward and backward.
                    torch.autograd.graph.increment_version(written)
            return result
    return getattr(plain, name)(*args)


@lru_cache
def _operation(backend: str, name: str) -> Callable[..., Any] | None:
    return getattr(importlib.import_module(BACKENDS[backend]), name, None)


# ---------------------------------------------------------------- the operations


def norms(X: Lists) -> Tensor:
    """Frobenius norms, one per tensor: (len(X),), float32 or wider.

    Finite if the elements are and their dtype, float32 at least, holds the norm.
    """
    result: Tensor = _call("norms", X)
    return result


def momentum_norms(M: Lists, G: Lists, mu: Numbers) -> Tensor:
    """Frobenius norms of mu M + G as M's dtype holds it, (len(M),), float32 or wider.

    Reads only: a step that must not happen (a non-finite gradient on some rank, which gives a
    norm that is NaN or infinite) leaves nothing to undo.
    """
    result: Tensor = _call("momentum_norms", M, G, mu)
    return result


def momentum_norms_(M: Lists, G: Lists, mu: Numbers) -> Tensor:
    """M <- mu M + G, in place, and the norms of the new M as :func:`momentum_norms`: one pass."""
    result: Tensor = _call("momentum_norms_", M, G, mu)
    return result


def accumulate_(M: Lists, G: Lists, mu: Numbers) -> None:
    """M <- mu M + G, in place, per tensor."""
    _call("accumulate_", M, G, mu)


def local_step_(
    X: Lists,
    G: Lists,
    step: NumbersOrTensors,
    decay: NumbersOrTensors,
    M: Lists = (),
    mu: Numbers = (),
    seeds: Sequence[int] | None = None,
) -> None:
    """X <- decay X - step G and, where M is given, M <- mu M + G; in place, in one pass.

    X, G and M are equally long lists; tensors at the same place have the same shape. step, decay
    and mu are a number per tensor; step and decay may be zero-dimensional tensors. With seeds, one
    per tensor and below 2**32, bfloat16 X are rounded up or down with the probabilities that make
    the mean exact; the same seeds give the same bits on every replica.
    """
    _call("local_step_", X, G, step, decay, M, mu, seeds)


def column_sum_of_squares(R: Tensor) -> Tensor:
    """(..., n, r) -> (..., r) float64: what crosses the column group before a normalisation."""
    result: Tensor = _call("column_sum_of_squares", R)
    return result


def column_normalize(
    R: Tensor, sum_of_squares: Tensor | None = None, floor: Tensor | None = None
) -> Tensor:
    """As :func:`column_normalize_`, into a new tensor of R's shape (..., n, r) and dtype."""
    Q = torch.empty_like(R, memory_format=torch.contiguous_format)
    k, n, r = R.shape[:-2].numel(), R.shape[-2], R.shape[-1]
    sums, floors = (None if t is None else t.reshape(k, r) for t in (sum_of_squares, floor))
    column_normalize_(Q.view(k, n, r).unbind(), R.reshape(k, n, r), sums, floors)
    return Q


def column_normalize_(
    Q: Lists, R: Tensor, sum_of_squares: Tensor | None = None, floor: Tensor | None = None
) -> None:
    """Q <- R / column norms, in Q's own dtype.

    Q: k tensors (n, r). R: (k, n, r). sum_of_squares: (k, r) float64, the norms' squares over ALL
    rows, where other ranks hold some of them; None takes those of R. floor: (k, r) float64, columns
    no longer than it become zero, since normalising rounding errors would turn them into
    full-size updates; None stands for zero.
    """
    _call("column_normalize_", Q, R, sum_of_squares, floor)


def low_rank_update_(
    X: Lists,
    P: Lists,
    Q: Lists,
    step: NumbersOrTensors,
    decay: NumbersOrTensors,
    M: Lists = (),
    R: Lists = (),
    feedback: Numbers = (),
    seeds: Sequence[int] | None = None,
) -> None:
    """X <- decay X - step P Q^T and, where M is given, M <- M - feedback P R^T; in place.

    X and M are k tensors (m, n) each, with any strides: a transposed view is updated without a
    copy. P: k of (m, r). Q, R: k of (n, r). step, decay and feedback are a number per matrix; step
    and decay may be zero-dimensional tensors. seeds: as in :func:`local_step_`.
    """
    _call("low_rank_update_", X, P, Q, step, decay, M, R, feedback, seeds)


# ---------------------------------------------------------------- operators for torch.compile

# A process registers operators once. Where this package is imported again, after sys.modules was
# purged of it, the first import's operators stay and call the functions of the last.
_LIBRARY = torch.library.Library("curvadion", "FRAGMENT")


def _sum_dtype(X: Lists) -> torch.dtype:
    dtype = torch.float32
    for x in X:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def _fake_norms(X: Lists, *_: Any) -> Tensor:
    return torch.empty(len(X), dtype=_sum_dtype(X), device=X[0].device if X else "cpu")


def _fake_column_sum_of_squares(R: Tensor) -> Tensor:
    return R.new_empty(*R.shape[:-2], R.shape[-1], dtype=torch.float64)


def _fake_nothing(*_: Any) -> None:
    return None


def _operator(name: str, args: tuple[Any, ...]) -> Any:
    first = _first(args)
    return getattr(plain, name)(*args) if first is None else _run(name, first, args)


def _register(schema: str, fake: Callable[..., Any]) -> None:
    name = schema.split("(")[0]
    if hasattr(torch.ops.curvadion, name):
        return

    def implementation(*args: Any) -> Any:
        newest: Any = sys.modules.get(__name__)
        return (newest._operator if newest else _operator)(name, args)

    _LIBRARY.define(schema)
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"curvadion::{name}", fake, lib=_LIBRARY)


_register("norms(Tensor[] X) -> Tensor", _fake_norms)
_register("momentum_norms(Tensor[] M, Tensor[] G, float[] mu) -> Tensor", _fake_norms)
_register("momentum_norms_(Tensor(a!)[] M, Tensor[] G, float[] mu) -> Tensor", _fake_norms)
_register("accumulate_(Tensor(a!)[] M, Tensor[] G, float[] mu) -> ()", _fake_nothing)
_register(
    "local_step_(Tensor(a!)[] X, Tensor[] G, float[] step, float[] decay, Tensor(b!)[] M, "
    "float[] mu, int[]? seeds) -> ()",
    _fake_nothing,
)
_register("column_sum_of_squares(Tensor R) -> Tensor", _fake_column_sum_of_squares)
_register(
    "column_normalize_(Tensor(a!)[] Q, Tensor R, Tensor? sum_of_squares, Tensor? floor) -> ()",
    _fake_nothing,
)
_register(
    "low_rank_update_(Tensor(a!)[] X, Tensor[] P, Tensor[] Q, float[] step, float[] decay, "
    "Tensor(b!)[] M, Tensor[] R, float[] feedback, int[]? seeds) -> ()",
    _fake_nothing,
)
