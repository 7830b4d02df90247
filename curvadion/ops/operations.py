"""The fused operations of an optimizer step.

Each works on lists of tensors of different sizes and alignments, empty ones included. Data may be
bfloat16, float16, float32 or float64; sums are taken in float32 or wider, of squares in float64.
Weights and momenta saturate where they would leave their dtype's range
(:func:`curvadion.ops.tensors.largest`): what is written is finite if what is read is. Lists that
are the same at many steps may be :class:`curvadion.ops.tensors.Tensors`, which saves looking at
them each time.

Backends, chosen by the tensors' device: Triton kernels, else CUDA C++, on an NVIDIA GPU; C++ on
the CPU; plain PyTorch anywhere, for what the others cannot take, and as their reference.
``CURVADION_BACKEND=torch|triton|cuda|cpu`` or :class:`use_backend` force one; operations and
dtypes that it does not have still fall to plain PyTorch.

Under torch.compile these are operators ``torch.ops.curvadion.<name>``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from curvadion.ops import reference
from curvadion.ops.backends import backend_for, operation
from curvadion.ops.tensors import Unsupported

Lists = Sequence[Tensor]
Numbers = Sequence[float]
NumbersOrTensors = Sequence[float | Tensor]

# Which arguments hold step sizes and decays: numbers, or tensors that only plain PyTorch takes.
_STEPS = {"local_step_": slice(2, 4), "low_rank_update_": slice(3, 5)}
# Which lists an operation writes.
_WRITES = {
    "accumulate_": slice(0, 1),
    "local_step_": slice(0, 5, 4),
    "column_normalize_": slice(0, 1),
    "low_rank_update_": slice(0, 6, 5),
}
_NONE = slice(0, 0)


def _call(name: str, *args: Any) -> Any:
    """Run an operation: directly, or as an operator where PyTorch traces or wraps tensors."""
    first = first_tensor(args)
    if first is None:
        return getattr(reference, name)(*args)
    if torch.compiler.is_compiling() or type(first) not in (Tensor, torch.nn.Parameter):
        if any(isinstance(v, Tensor) for list_ in args[_STEPS.get(name, _NONE)] for v in list_):
            return getattr(reference, name)(*args)
        return getattr(torch.ops.curvadion, name)(*args)
    return run(name, first, args)


def first_tensor(args: tuple[Any, ...]) -> Tensor | None:
    """The first tensor of an operation's first argument; None if that is an empty list."""
    given = args[0]
    return given if isinstance(given, Tensor) else next(iter(given), None)


def run(name: str, first: Tensor, args: tuple[Any, ...]) -> Any:
    """Run an operation on the backend of its first tensor, else in plain PyTorch."""
    fused = operation(backend_for(first.device), name)
    if fused is not None:
        try:
            result = fused(*args)
        except Unsupported:
            pass
        else:
            for written in args[_WRITES.get(name, _NONE)]:
                if not first.is_inference():
                    # Autograd must notice a weight that changes between forward and backward.
                    torch.autograd.graph.increment_version(written)
            return result
    return getattr(reference, name)(*args)


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
