"""The fused operations of an optimizer step, each defined in plain PyTorch.

Tensors of a list may differ in size and alignment. Lists of one call have equal lengths, or
ValueError is raised. Sums are float32 or wider, sums of squares float64. Plain PyTorch takes any
floating dtype and strides, and learning rates that are tensors.

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
from curvadion.ops.tensors import Numbers, Tensors, norm_and_sum, wide_dtype, widened

NumbersOrTensors = Sequence[float | Tensor]

# float32 holds the squares of norms in this range accurately.
SMALL = 1e-12
LARGE = 1e18
# Rows of a symmetric product that a CPU computes at once: few, to skip most of the part above
# the diagonal, but enough for full speed.
ROWS = 128


def if_moving(new: Tensor, old: Tensor, moves: Tensor | None) -> Tensor:
    """``new``, or ``old`` if the flag is false.

    Args:
        new: of any shape and dtype.
        old: of the same shape and dtype.
        moves: () bool on the device; None for true.
    """
    return new if moves is None else torch.where(moves, new, old)


def copy_(tensors: Tensors, stacked: Tensor, moves: Tensor | None) -> None:
    """Copy a stack to tensors, unless the flag is false.

    Args:
        tensors: k tensors of one shape and any dtypes.
        stacked: (k, *shape), of any dtype.
        moves: () bool on the device; None writes.
    """
    if moves is not None:
        # The tensors' dtypes may differ, and a stack has one.
        old = torch.stack([t.to(stacked.dtype) for t in tensors])
        stacked = if_moving(stacked, old, moves)
    torch._foreach_copy_(list(tensors), list(stacked))


@contextmanager
def put_back(moves: Tensor | None, *lists: Tensors) -> Iterator[None]:
    """Restore the lists' tensors after the block if the flag is false.

    Copies of all of them are in memory during the block, unless the flag is None.
    """
    if moves is None:
        yield
        return
    copies = [(x, x.clone()) for x in chain(*lists)]
    yield
    for x, old in copies:
        x.copy_(if_moving(x, old, moves))


def norms(X: Tensors) -> Tensor:
    """Frobenius norms |X| of tensors; finite if they fit the result's dtype.

    Args:
        X: at least one tensor, of any shapes and floating dtypes.

    Returns:
        (len(X),), float32 or wider.
    """
    result: Tensor | None = fused("norms", X)
    if result is not None:
        return result
    return _norms(X)


def momentum_norms(M: Tensors, G: Tensors, mu: Numbers) -> Tensor:
    """Frobenius norms |mu M + G| of sums that are rounded to M's dtype; writes nothing.

    Args:
        M: at least one momentum, of any shapes and floating dtypes.
        G: gradients, of M's shapes and any floating dtypes.
        mu: a number per tensor.

    Returns:
        (len(M),), float32 or wider.

    Raises:
        ValueError: the lists have unequal lengths.
    """
    result: Tensor | None = fused("momentum_norms", M, G, mu)
    if result is not None:
        return result
    lengths = []
    for m, g, decay in zip(M, G, mu, strict=True):
        # One sum is in memory at a time.
        lengths.append(_norm(_sum(m, g, decay).to(m.dtype)))
    return torch.stack(lengths)


def accumulate_(M: Tensors, G: Tensors, mu: Numbers, *, moves: Tensor | None) -> None:
    """M <- mu M + G, in place.

    Args:
        M: momenta, of any shapes and floating dtypes.
        G: gradients, of M's shapes and any floating dtypes.
        mu: a number per tensor.
        moves: () bool on the device; where it is false, nothing is written. None writes.

    Raises:
        ValueError: the lists have unequal lengths.
    """
    if fused("accumulate_", M, G, mu, moves, writes=[M]):
        return
    with put_back(moves, M):
        for m, g, decay in zip(M, G, mu, strict=True):
            # M <- mu M + G
            if g.dtype == m.dtype and widened(m) is m:  # avoids a second tensor of this size
                m.mul_(decay).add_(g)
            else:
                m.copy_(_sum(m, g, decay))


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

    Args:
        X: weights, of any shapes and floating dtypes.
        G: gradients, of X's shapes and any floating dtypes.
        step: a number or a tensor of shape (), per tensor.
        decay: a number or a tensor of shape (), per tensor.
        M: momenta, of X's shapes and any floating dtypes; () for none.
        mu: a number per momentum.
        seeds: an integer below 2^32 per tensor, with which bfloat16 weights are rounded up or
            down at random, so that the mean is exact; the same bits on every replica. None
            rounds to nearest.
        moves: () bool on the device; where it is false, nothing is written. None writes.

    Raises:
        ValueError: the lists have unequal lengths.
    """
    if fused("local_step_", X, G, step, decay, M, mu, seeds, moves, writes=[X, M]):
        return
    with put_back(moves, X):
        seed_or_none: Sequence[int | None] = seeds or [None] * len(X)
        for x, g, eta, beta, seed in zip(X, G, step, decay, seed_or_none, strict=True):
            # X <- decay X - step G
            wide = widened(x)
            if wide is not x:
                _write(x, wide * beta - g.to(wide.dtype) * eta, seed)
            elif isinstance(eta, Tensor):
                x.mul_(beta).sub_(g.to(x.dtype) * eta)
            else:
                x.mul_(beta).sub_(g.to(x.dtype), alpha=eta)
    # M <- mu M + G
    if M:
        accumulate_(M, G, mu, moves=moves)


def column_sum_of_squares(R: Tensor) -> Tensor:
    """The sums of squares of columns.

    Args:
        R: (k, n, r) with k > 0, of any floating dtype.

    Returns:
        (k, r) float64.
    """
    result: Tensor | None = fused("column_sum_of_squares", R)
    if result is not None:
        return result
    # One matrix at a time is in memory in float64.
    return torch.stack([matrix.double().square().sum(dim=0) for matrix in R])


def column_normalize(R: Tensor, sum_of_squares: Tensor, floor: Tensor) -> Tensor:
    """Q = R / column norms.

    Args:
        R: (k, n, r), of any floating dtype.
        sum_of_squares: of columns, (k, r) float64, over the rows of all ranks.
        floor: (k, r) float64; columns with norms up to it are rounding errors, and become
            zero.

    Returns:
        (k, n, r) in R's dtype, contiguous.
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

    Args:
        X: weights (m_i, n_i), of any floating dtypes and strides.
        P: (m_i, r_i), of any floating dtypes.
        Q: (n_i, r_i), in P's dtypes.
        step: a number or a tensor of shape (), per matrix.
        decay: a number or a tensor of shape (), per matrix.
        M: momenta (m_i, n_i), of any floating dtypes and strides; () for none.
        R: (n_i, r_i), in P's dtypes; with M.
        feedback: a number per matrix; with M.
        seeds: of stochastic rounding of X, as in :func:`local_step_`; None rounds to nearest.
        moves: () bool on the device; where it is false, nothing is written. None writes.

    Raises:
        ValueError: the lists have unequal lengths.
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
        # X <- decay X - step P Q^T
        seed_or_none: Sequence[int | None] = seeds or [None] * len(X)
        for x, p, q, eta, beta, seed in zip(X, P, Q, step, decay, seed_or_none, strict=True):
            _low_rank(x, p, q, eta, beta, seed)
        # M <- M - feedback P R^T
        if M:
            for m, p, r, share in zip(M, P, R, feedback, strict=True):
                _low_rank(m, p, r, share)


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
        x: (m, n), of any floating dtype and strides.
        p: (m, r), of any floating dtype.
        q: (n, r), in p's dtype.
        eta: a number or a tensor of shape ().
        beta: likewise.
        seed: of stochastic rounding; None rounds to nearest.
    """
    if isinstance(eta, Tensor) or isinstance(beta, Tensor):
        # addmm's own factors are host numbers. So that the host need not read the step, the
        # small q is multiplied by it.
        if x.dtype == p.dtype:
            x.mul_(beta).addmm_(p, (q * -eta).mT)
        else:
            _write(x, torch.addmm(x.to(p.dtype) * beta, p, (q * -eta).mT), seed)
    elif x.dtype == p.dtype:
        x.addmm_(p, q.mT, beta=beta, alpha=-eta)
    else:
        _write(x, torch.addmm(x.to(p.dtype), p, q.mT, beta=beta, alpha=-eta), seed)


def symmetric_product(A: Tensor, B: Tensor, out: Tensor) -> Tensor:
    """out <- A B, which must be symmetric; computes about half of it.

    The part above the diagonal may be mirrored, so rounding errors depend on the backend.
    Float32 numbers are rounded to TensorFloat-32 only where torch.bmm may do so.

    Args:
        A: (k, n, m), of any floating dtype and strides.
        B: (k, m, n), of A's dtype and device.
        out: (k, n, n), of A's dtype and device, sharing no memory with A and B.

    Returns:
        out.
    """
    if fused("symmetric_product", A, B, out, writes=[out]):
        return out
    n = A.shape[1]
    if A.device.type != "cpu" or n < 3 * ROWS:
        torch.bmm(A, B, out=out)
        return out
    # Compute the blocks on and below the diagonal, (1 + ROWS / n) / 2 of the product, and
    # mirror those below.
    for a, b, c in zip(A, B, out, strict=True):
        for first in range(0, n, ROWS):
            last = min(n, first + ROWS)
            torch.mm(a[first:last], b[:, :last], out=c[first:last, :last])
            c[:first, first:last] = c[first:last, :first].mT
    return out


def _on_host(*lists: NumbersOrTensors) -> bool:
    """Whether no number is a tensor, for which the host may have to wait."""
    return not any(isinstance(number, Tensor) for numbers in lists for number in numbers)


def _sum(m: Tensor, g: Tensor, mu: float) -> Tensor:
    """mu m + g, in float32 or wider."""
    return torch.add(g, widened(m), alpha=mu)


def _norms(X: Tensors) -> Tensor:
    """The Frobenius norms of at least one tensor, (len(X),), in float32 or wider."""
    dtypes = {wide_dtype(dtype) for dtype in {x.dtype for x in X}}
    if len(dtypes) > 1 or not all(x.is_cpu for x in X):
        return torch.stack([_norm(x) for x in X])
    # One call for all gives the bits of one call for each.
    (dtype,) = dtypes
    sizes = torch.stack(torch._foreach_norm(list(X), 2, dtype=dtype))
    for i, size in enumerate(sizes.tolist()):  # no wait on the CPU
        if not SMALL < size < LARGE:
            sizes[i] = _norm(X[i])
    return sizes


def _norm(tensor: Tensor) -> Tensor:
    """The Frobenius norm of a tensor, (), in float32 or wider."""
    dtype = wide_dtype(tensor.dtype)
    if tensor.device.type == "cpu":
        norm: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
        size: Any = norm.tolist()  # no wait on the CPU
        if SMALL < size < LARGE:
            return norm
    # float64 holds the squares of tiny and large values.
    return norm_and_sum(tensor)[0].to(dtype)


def _write(x: Tensor, value: Tensor, seed: int | None) -> None:
    """x <- value, rounded at random if there is a seed and x is bfloat16."""
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
    """Round to bfloat16 at random; the mean over seeds is the value.

    Args:
        value: of any shape and floating dtype.
        offsets: int64 of this shape: elements with equal offsets are rounded by equal noise.
        seed: an integer below 2^32.

    Returns:
        bfloat16, of this shape.
    """
    noise = random_bits(offsets, seed)
    # bfloat16 numbers are the float32 numbers whose lower 16 bits are zero. Noise in these
    # carries into the upper ones with the right probability.
    bits = value.float().view(torch.int32).long()
    rounded = ((bits + noise) & 0xFFFF0000).to(torch.int32).view(torch.float32)
    # A carry could turn a NaN into a zero.
    return torch.where(torch.isfinite(value), rounded, value.float()).to(torch.bfloat16)


def random_bits(offsets: Tensor, seed: int) -> Tensor:
    """16 bits that look random and follow from offsets and the seed.

    Args:
        offsets: int64, of any shape.
        seed: an integer below 2^32.

    Returns:
        int64, of this shape.
    """
    return _mixed(_mixed(offsets & 0xFFFFFFFF) ^ seed) & 0xFFFF


def _mixed(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers, with outputs that look random."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)
