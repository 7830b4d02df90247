"""The fused operations of an optimizer step, each defined in plain PyTorch.

Tensors of a list may differ in size and alignment. Sums are float32 or wider, sums of squares
float64. Plain PyTorch takes any floating dtype and strides, and learning rates that are
tensors.

``moves``, an argument of all that changes weights or states, is a bool on the device, shape
(): where it is false, nothing is written. None writes. So the host need not know whether a
step's gradients are finite. It has no default: a direction that forgot it would step along
what is not finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from curvadion.ops.backends import fused
from curvadion.ops.tensors import Numbers, Tensors, norm_and_sum

NumbersOrTensors = Sequence[float | Tensor]

# float32 holds the squares of norms in this range accurately.
SMALL, LARGE = 1e-12, 1e18
# Rows of a symmetric product that a CPU computes at once: few, to skip most of the part above
# the diagonal, but enough for full speed.
ROWS = 128


def if_moving(new: Tensor, old: Tensor, moves: Tensor | None) -> Tensor:
    """``new``, or ``old`` if the flag is false."""
    return new if moves is None else torch.where(moves, new, old)


def copy_(tensors: Tensors, stacked: Tensor, moves: Tensor | None) -> None:
    """Copy a stack to tensors, unless the flag is false."""
    if moves is not None:  # the tensors' dtypes may differ
        old = torch.stack([t.to(stacked.dtype) for t in tensors])
        stacked = if_moving(stacked, old, moves)
    torch._foreach_copy_(list(tensors), list(stacked))


@contextmanager
def put_back(moves: Tensor | None, *lists: Tensors) -> Iterator[None]:
    """Restore tensors after the block if the flag is false; holds copies meanwhile."""
    if moves is None:
        yield
        return
    before = [(x, x.clone()) for x in chain(*lists)]
    yield
    for x, old in before:
        x.copy_(if_moving(x, old, moves))


def norms(X: Tensors) -> Tensor:
    """Frobenius norms of tensors, (len(X),), float32 or wider; finite if they fit."""
    result: Tensor | None = fused("norms", X)
    return torch.stack([_norm(x) for x in X]) if result is None else result


def momentum_norms(M: Tensors, G: Tensors, mu: Numbers) -> Tensor:
    """Frobenius norms of mu M + G, rounded to M's dtype: (len(M),), float32 or wider."""
    result: Tensor | None = fused("momentum_norms", M, G, mu)
    if result is not None:
        return result
    # One sum is in memory at a time.
    each = zip(M, G, mu, strict=True)
    return torch.stack([_norm(_sum(m, g, decay).to(m.dtype)) for m, g, decay in each])


def accumulate_(M: Tensors, G: Tensors, mu: Numbers, *, moves: Tensor | None) -> None:
    """M <- mu M + G, in place."""
    if fused("accumulate_", M, G, mu, moves, writes=[M]):
        return
    with put_back(moves, M):
        for m, g, decay in zip(M, G, mu, strict=True):
            if g.dtype == m.dtype and _wide(m) is m:  # avoids a second tensor of this size
                m.mul_(decay).add_(g)
            else:
                m.copy_(_sum(m, g, decay))


def look_ahead(M: Tensors, G: Tensors, share: Numbers, out: Tensors) -> None:
    """out <- M + share G, in one pass; out: tensors of the same shapes."""
    if fused("look_ahead", M, G, share, out, writes=[out]):
        return
    for m, g, factor, ahead in zip(M, G, share, out, strict=True):
        torch.add(m.to(ahead.dtype), g.to(ahead.dtype), alpha=factor, out=ahead)


def local_step_(
    X: Tensors,
    G: Tensors,
    step: NumbersOrTensors,
    decay: NumbersOrTensors,
    M: Tensors = (),
    mu: Numbers = (),
    seeds: Sequence[int] | None = None,
    *,
    moves: Tensor | None,
) -> None:
    """X <- decay X - step G and, if M is given, M <- mu M + G; in place, in one pass.

    step, decay: numbers or zero-dimensional tensors. seeds: an integer below 2**32 per
    tensor, with which bfloat16 weights are rounded up or down at random, so that the mean is
    exact; the same bits on every replica. None rounds to nearest.
    """
    if fused("local_step_", X, G, step, decay, M, mu, seeds, moves, writes=[X, M]):
        return
    with put_back(moves, X):
        noise: Sequence[int | None] = seeds or [None] * len(X)
        for x, g, eta, beta, seed in zip(X, G, step, decay, noise, strict=True):
            wide = _wide(x)
            if wide is not x:
                _write(x, wide * beta - g.to(wide.dtype) * eta, seed)
            elif isinstance(eta, Tensor):
                x.mul_(beta).sub_(g.to(x.dtype) * eta)
            else:
                x.mul_(beta).sub_(g.to(x.dtype), alpha=eta)
    if M:
        accumulate_(M, G, mu, moves=moves)


def column_sum_of_squares(R: Tensor) -> Tensor:
    """The sums of squares of columns: (k, n, r) -> (k, r) float64; k > 0."""
    result: Tensor | None = fused("column_sum_of_squares", R)
    if result is not None:
        return result
    # One matrix is held in float64 at a time.
    return torch.stack([one.double().square().sum(dim=0) for one in R])


def column_normalize(R: Tensor, sum_of_squares: Tensor, floor: Tensor) -> Tensor:
    """R / column norms, (k, n, r), in R's dtype.

    sum_of_squares: (k, r) float64, over the rows of all ranks. floor: (k, r) float64; columns
    with norms up to it are rounding errors, and become zero.
    """
    result: Tensor | None = fused("column_normalize", R, sum_of_squares, floor)
    if result is not None:
        return result
    lengths = sum_of_squares.sqrt()
    inverse = torch.where(lengths > floor, lengths.reciprocal(), 0.0)
    Q = torch.empty_like(R, memory_format=torch.contiguous_format)
    for q, r, factors in zip(Q, R, inverse, strict=True):
        q.copy_(r * factors)
    return Q


def low_rank_update_(
    X: Tensors,
    P: Tensors,
    Q: Tensors,
    step: NumbersOrTensors,
    decay: NumbersOrTensors,
    M: Tensors = (),
    R: Tensors = (),
    feedback: Numbers = (),
    seeds: Sequence[int] | None = None,
    *,
    moves: Tensor | None,
) -> None:
    """X <- decay X - step P Q^T and, if M is given, M <- M - feedback P R^T; in place.

    X, M: (m, n), of any strides. P: (m, r). Q, R: (n, r). step, decay, seeds: as in
    :func:`local_step_`.
    """
    if _on_host(step, decay) and fused(
        "low_rank_update_",
        X,
        P,
        Q,
        step,
        decay,
        M,
        R,
        feedback,
        seeds,
        moves,
        writes=[X, M],
    ):
        return
    with put_back(moves, X, M):
        noise: Sequence[int | None] = seeds or [None] * len(X)
        for weights in zip(X, P, Q, step, decay, noise, strict=True):
            _low_rank(*weights)
        for momenta in zip(M, P, R, feedback, strict=True) if M else ():
            _low_rank(*momenta)


def _low_rank(
    x: Tensor,
    p: Tensor,
    q: Tensor,
    eta: float | Tensor,
    beta: float | Tensor = 1.0,
    seed: int | None = None,
) -> None:
    """x <- beta x - eta p q^T, in place.

    Args:
        x: (m, n), of any strides.
        p: (m, r).
        q: (n, r).
        eta: a number or a tensor of shape ().
        beta: likewise.
        seed: of stochastic rounding; None rounds to nearest.
    """
    if isinstance(eta, Tensor) or isinstance(beta, Tensor):
        # The small factor times the step size, which the host need not read.
        if x.dtype == p.dtype:
            x.mul_(beta).addmm_(p, (q * -eta).mT)
        else:
            _write(x, torch.addmm(x.to(p.dtype) * beta, p, (q * -eta).mT), seed)
    elif x.dtype == p.dtype:
        x.addmm_(p, q.mT, beta=beta, alpha=-eta)
    else:
        _write(x, torch.addmm(x.to(p.dtype), p, q.mT, beta=beta, alpha=-eta), seed)


def symmetric_product(A: Tensor, B: Tensor, out: Tensor) -> Tensor:
    """out <- A B, which must be symmetric; computes about half of it. Returns out.

    The part above the diagonal may be mirrored, so rounding errors depend on the backend.
    Float32 numbers are rounded to TensorFloat-32 only where torch.bmm may do so.

    A: (k, n, m). B: (k, m, n). out: (k, n, n), sharing no memory with these; all of one dtype
    and device, and of any strides.
    """
    if fused("symmetric_product", A, B, out, writes=[out]):
        return out
    n = A.shape[1]
    if A.device.type != "cpu" or n < 3 * ROWS:
        torch.bmm(A, B, out=out)
        return out
    # The blocks on and below the diagonal: (1 + ROWS / n) / 2 of the product.
    for a, b, c in zip(A, B, out, strict=True):
        for first in range(0, n, ROWS):
            last = min(n, first + ROWS)
            torch.mm(a[first:last], b[:, :last], out=c[first:last, :last])
            c[:first, first:last] = c[first:last, :first].mT
    return out


def _on_host(*lists: NumbersOrTensors) -> bool:
    """Whether no number is a tensor, for which the host may have to wait."""
    return not any(isinstance(number, Tensor) for numbers in lists for number in numbers)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _sum(m: Tensor, g: Tensor, mu: float) -> Tensor:
    """mu m + g, in float32 or wider."""
    return torch.add(g, _wide(m), alpha=mu)


def _norm(tensor: Tensor) -> Tensor:
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    if tensor.device.type == "cpu":
        norm: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
        size: Any = norm.tolist()  # no wait on the CPU
        if SMALL < size < LARGE:
            return norm
    # float64 holds the squares of tiny and large values.
    return norm_and_sum(tensor)[0].to(dtype)


def _write(x: Tensor, value: Tensor, seed: int | None) -> None:
    if seed is not None and x.dtype == torch.bfloat16:
        value = round_stochastic(value, memory_offsets(x), seed)
    x.copy_(value)


def memory_offsets(x: Tensor) -> Tensor:
    """Offset of each element of x in memory, in elements: int64, x's shape."""
    offsets = torch.zeros((), dtype=torch.int64, device=x.device)
    for size, stride in zip(x.shape, x.stride(), strict=True):
        offsets = offsets.unsqueeze(-1) + torch.arange(size, device=x.device) * stride
    return offsets


def round_stochastic(value: Tensor, offsets: Tensor, seed: int) -> Tensor:
    """Round to bfloat16 at random; the mean over seeds is the value."""
    noise = _mixed(_mixed(offsets & 0xFFFFFFFF) ^ seed) & 0xFFFF
    bits = value.float().view(torch.int32).long()
    rounded = ((bits + noise) & 0xFFFF0000).to(torch.int32).view(torch.float32)
    return torch.where(torch.isfinite(value), rounded, value.float()).to(torch.bfloat16)


def _mixed(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers, with outputs that look random."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)
