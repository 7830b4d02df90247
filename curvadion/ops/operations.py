"""The fused operations of an optimizer step.

Each one works on lists of tensors, which may differ in size and alignment and may be empty. Data
may be bfloat16, float16, float32 or float64. Sums are taken in float32 or wider, and sums of
squares in float64. Weights and momenta saturate at the end of their dtype's range
(:func:`curvadion.ops.tensors.largest`), so a result is finite if the arguments are. A list that
stays the same for many steps may be a :class:`curvadion.ops.tensors.Tensors`, which is inspected
only once.

The device of the tensors decides on the backend: Triton kernels on an NVIDIA GPU, or CUDA C++
without Triton; C++ on the CPU. Plain PyTorch does what the others cannot, and is their reference.
``CURVADION_BACKEND=torch|triton|cuda|cpu`` or :class:`use_backend` force a backend. Operations and
dtypes that it does not support still run in plain PyTorch.

Under torch.compile these are operators ``torch.ops.curvadion.<name>``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from curvadion.ops import reference
from curvadion.ops.backends import backend_for, operation
from curvadion.ops.codes import BLOCK, part, rows_of
from curvadion.ops.tensors import Unsupported

Lists = Sequence[Tensor]
Numbers = Sequence[float]
NumbersOrTensors = Sequence[float | Tensor]

# Which arguments hold step sizes and decays. They may be tensors, which only plain PyTorch takes.
_STEPS = {"local_step_": slice(2, 4), "low_rank_update_": slice(3, 5)}
# Which arguments are tensors, or lists of them, that the operation writes.
_WRITES = {
    "accumulate_": (0,),
    "local_step_": (0, 4),
    "column_normalize_": (0,),
    "low_rank_update_": (0, 5),
    "symmetric_product": (2,),
    "encode_difference_": (0, 3, 5),
    "decode_": (0,),
    "decode_add_": (0, 1),
    "average_codes_": (0, 1),
}
_NONE = slice(0, 0)


def _call(name: str, *args: Any) -> Any:
    """Run an operation directly, or as an operator if PyTorch traces or wraps the tensors."""
    first = first_tensor(args)
    if first is None:
        return getattr(reference, name)(*args)
    if torch.compiler.is_compiling() or type(first) not in (Tensor, torch.nn.Parameter):
        if any(isinstance(v, Tensor) for list_ in args[_STEPS.get(name, _NONE)] for v in list_):
            return getattr(reference, name)(*args)
        return getattr(torch.ops.curvadion, name)(*args)
    return run(name, first, args)


def first_tensor(args: tuple[Any, ...]) -> Tensor | None:
    """The first tensor of an operation's first argument; None if this is an empty list."""
    given = args[0]
    return given if isinstance(given, Tensor) else next(iter(given), None)


def run(name: str, first: Tensor, args: tuple[Any, ...]) -> Any:
    """Run an operation on the backend of its first tensor, or else in plain PyTorch."""
    fused = operation(backend_for(first.device), name)
    if fused is not None:
        try:
            result = fused(*args)
        except Unsupported:
            pass
        else:
            for written in _WRITES.get(name, ()):
                if not first.is_inference():
                    # Autograd must notice if a weight changes between forward and backward.
                    torch.autograd.graph.increment_version(args[written])
            return result
    return getattr(reference, name)(*args)


# ---------------------------------------------------------------- the operations


def norms(X: Lists) -> Tensor:
    """Frobenius norms, one per tensor: (len(X),), float32 or wider.

    A norm is finite if the elements are finite and the result's dtype can hold the norm.
    """
    result: Tensor = _call("norms", X)
    return result


def momentum_norms(M: Lists, G: Lists, mu: Numbers) -> Tensor:
    """Frobenius norms of mu M + G, rounded to M's dtype: (len(M),), float32 or wider.

    This writes nothing. A non-finite gradient gives a norm that is NaN or infinite, and a step that
    is skipped because of it leaves nothing to undo. :func:`accumulate_` then writes the sums.

    Args:
        M: momenta.
        G: gradients, of the same shapes.
        mu: a number per tensor.
    """
    result: Tensor = _call("momentum_norms", M, G, mu)
    return result


def accumulate_(M: Lists, G: Lists, mu: Numbers) -> None:
    """M <- mu M + G, in place; the arguments are those of :func:`momentum_norms`."""
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
    """X <- decay X - step G and, if M is given, M <- mu M + G; in place, in one pass.

    Args:
        X: weights.
        G: gradients, of the same shapes.
        step: a number or zero-dimensional tensor per tensor.
        decay: a number or zero-dimensional tensor per tensor.
        M: momenta, of the same shapes; () for none.
        mu: a number per momentum.
        seeds: an integer below 2**32 per tensor. With seeds, bfloat16 weights are rounded up or
            down at random, so that the mean is exact. The same seeds give the same bits on every
            replica. None rounds to nearest.
    """
    _call("local_step_", X, G, step, decay, M, mu, seeds)


def column_sum_of_squares(R: Tensor) -> Tensor:
    """The sums of squares of columns: (..., n, r) -> (..., r) float64.

    Ranks that hold different rows of R add up these sums before :func:`column_normalize_`.
    """
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

    Args:
        Q: k tensors (n, r).
        R: (k, n, r).
        sum_of_squares: (k, r) float64, the squares of the norms over ALL rows, if other ranks hold
            some of the rows; None takes those of R.
        floor: (k, r) float64; columns whose norm is not larger become zero. Without it, columns of
            rounding errors would become updates of full size. None stands for zeros.
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
    """X <- decay X - step P Q^T and, if M is given, M <- M - feedback P R^T; in place.

    X and M may have any strides: a transposed view is updated without a copy.

    Args:
        X: k weights (m, n).
        P: k left factors (m, r).
        Q: k right factors (n, r).
        step: a number or zero-dimensional tensor per matrix.
        decay: a number or zero-dimensional tensor per matrix.
        M: k momenta (m, n); () for none.
        R: k factors (n, r), if M is given.
        feedback: a number per momentum.
        seeds: as in :func:`local_step_`.
    """
    _call("low_rank_update_", X, P, Q, step, decay, M, R, feedback, seeds)


def symmetric_product(A: Tensor, B: Tensor, out: Tensor) -> Tensor:
    """out <- A B, which is known to be symmetric; about half of it is computed. Returns out.

    Such are B^T B, and products of symmetric matrices that commute. Only what is on and below the
    diagonal is sure to be computed, and the rest is its mirror image, so rounding errors, and what
    of A B is not symmetric, depend on the backend. Float32 numbers are rounded to TensorFloat-32
    only where torch.bmm may round them.

    Args:
        A: (k, n, m), of any strides, as are B and out.
        B: (k, m, n).
        out: (k, n, n), of the same dtype; it shares no memory with A or B.
    """
    _call("symmetric_product", A, B, out)
    return out


# ---------------------------------------------------------------- codes of a few bits


def encode_difference_(
    codes: Tensor,
    X: Lists,
    anchors: Lists = (),
    residuals: Lists = (),
    *,
    bits: int,
    owned: Tensor | None = None,
    first: int = 0,
) -> None:
    """codes <- codes of z = X - anchor + residual, residual <- z - what they stand for.

    In one pass. :mod:`curvadion.ops.codes` has the format; all backends give the same bits. The
    anchor is taken as X's dtype holds it, and z in float32. Numbers are in row-major order, however
    a tensor lies in memory.

    Args:
        codes: (rows, block_bytes(bits)) uint8, where the rows of each tensor of X follow those of
            the one before it.
        X: tensors; only read.
        anchors: float32 or wider, of X's shapes, only read; () stands for zeros.
        residuals: of X's shapes; () stands for zeros, and what codes lose is dropped.
        bits: of a code, one of ``codes.BITS``.
        owned: (k, 256) float32, gets z of k rows; None for none.
        first: the first of these rows.
    """
    owned = codes.new_empty(0, BLOCK, dtype=torch.float32) if owned is None else owned
    if _row_major(X, anchors, residuals):
        _call("encode_difference_", codes, X, anchors, residuals, bits, owned, first)
        return
    for i, rows in enumerate(rows_of(X)):
        mine = owned[part(rows, first, len(owned))]
        one = slice(i, i + 1)
        with _copied(residuals[one]) as residual:
            read = [[t.contiguous() for t in list_[one]] for list_ in (X, anchors)]
            begin = max(0, first - rows.start)
            _call("encode_difference_", codes[rows], *read, residual, bits, mine, begin)


def decode_(X: Lists, codes: Tensor, bits: int) -> None:
    """X <- what codes stand for; the arguments are those of :func:`encode_difference_`."""
    if _row_major(X):
        _call("decode_", X, codes, bits)
        return
    for x, rows in zip(X, rows_of(X), strict=True):
        with _copied([x]) as one:
            _call("decode_", one, codes[rows], bits)


def decode_add_(X: Lists, anchors: Lists, codes: Tensor, bits: int) -> None:
    """anchor <- anchor + what codes stand for, X <- anchor, saturated; in one pass.

    The arguments are those of :func:`encode_difference_`; codes are only read.
    """
    if _row_major(X, anchors):
        _call("decode_add_", X, anchors, codes, bits)
        return
    for x, anchor, rows in zip(X, anchors, rows_of(X), strict=True):
        with _copied([x]) as one, _copied([anchor]) as its:
            _call("decode_add_", one, its, codes[rows], bits)


def average_codes_(codes: Tensor, own: Tensor, received: Tensor, rank: int, bits: int) -> None:
    """codes <- codes of total / ranks, own <- total - ranks * what these codes stand for.

    The total over ranks is summed in their order, in float32.

    Args:
        codes: (k, block_bytes(bits)) uint8; written.
        own: (k, 256) float32, the numbers of this rank; they stand for themselves.
        received: (ranks, k, block_bytes(bits)) uint8, the codes of all ranks; this rank's are not
            read.
        rank: this rank.
        bits: of a code.
    """
    _call("average_codes_", codes, own, received, rank, bits)


def _row_major(*lists: Lists) -> bool:
    return all(t.is_contiguous() for list_ in lists for t in list_)


@contextmanager
def _copied(tensors: Lists) -> Iterator[list[Tensor]]:
    """Row-major tensors in their place; what is written to them is copied back."""
    copies = [t.contiguous() for t in tensors]
    yield copies
    for t, copy in zip(tensors, copies, strict=True):
        if copy is not t:
            t.copy_(copy)
