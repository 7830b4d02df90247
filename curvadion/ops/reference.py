"""The operations of an optimizer step in plain PyTorch, the reference of all other backends.

:mod:`curvadion.ops.operations` documents what each one computes. They run on any device and take
any floating dtype, any strides, and learning rates that are tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from curvadion.ops.reference_codes import average_codes_ as average_codes_
from curvadion.ops.reference_codes import decode_ as decode_
from curvadion.ops.reference_codes import decode_add_ as decode_add_
from curvadion.ops.reference_codes import encode_difference_ as encode_difference_
from curvadion.ops.tensors import check_product, largest, norm_and_sum, saturated

# Norms in this range have squares that float32 can hold accurately.
SMALL, LARGE = 1e-12, 1e18
# Rows of a symmetric product that a CPU computes at once: few enough to leave out most of what
# is above the diagonal, many enough for a product's full speed. Smaller ones are computed whole.
ROWS = 128
SMALLEST_IN_BLOCKS = 3 * ROWS


def norms(X: Sequence[Tensor]) -> Tensor:
    """See :func:`curvadion.ops.norms`."""
    return _stacked(_norm(x) for x in X)


def momentum_norms(M: Sequence[Tensor], G: Sequence[Tensor], mu: Sequence[float]) -> Tensor:
    """See :func:`curvadion.ops.momentum_norms`."""
    # One after another, so that only one sum takes memory at a time.
    return _stacked(_held_norm(_sum(*one), one[0]) for one in zip(M, G, mu, strict=True))


def accumulate_(M: Sequence[Tensor], G: Sequence[Tensor], mu: Sequence[float]) -> None:
    """See :func:`curvadion.ops.accumulate_`."""
    for m, g, decay in zip(M, G, mu, strict=True):
        if g.dtype == m.dtype and _wide(m) is m:  # needs no second tensor of this size
            most = largest(m.dtype)
            m.mul_(decay).add_(g).clamp_(-most, most)
        else:
            m.copy_(saturated(_sum(m, g, decay), m.dtype))


def local_step_(
    X: Sequence[Tensor],
    G: Sequence[Tensor],
    step: Sequence[float | Tensor],
    decay: Sequence[float | Tensor],
    M: Sequence[Tensor] = (),
    mu: Sequence[float] = (),
    seeds: Sequence[int] | None = None,
) -> None:
    """See :func:`curvadion.ops.local_step_`."""
    for t, (x, g, eta, beta) in enumerate(zip(X, G, step, decay, strict=True)):
        wide = _wide(x)
        if wide is x:
            most = largest(x.dtype)
            if isinstance(eta, Tensor):
                x.mul_(beta).sub_(g.to(x.dtype) * eta).clamp_(-most, most)
            else:
                x.mul_(beta).sub_(g.to(x.dtype), alpha=eta).clamp_(-most, most)
        else:
            _write(x, wide * beta - g.to(wide.dtype) * eta, None if seeds is None else seeds[t])
    if M:
        accumulate_(M, G, mu)


def column_sum_of_squares(R: Tensor) -> Tensor:
    """See :func:`curvadion.ops.column_sum_of_squares`."""
    # One matrix after another, so that only one is held in float64 at a time.
    stack = R.reshape(R.shape[:-2].numel(), *R.shape[-2:])
    sums = [one.double().square().sum(dim=-2) for one in stack]
    shape = *R.shape[:-2], R.shape[-1]
    return torch.stack(sums).view(shape) if sums else R.new_zeros(shape, dtype=torch.float64)


def column_normalize_(
    Q: Sequence[Tensor],
    R: Tensor,
    sum_of_squares: Tensor | None = None,
    floor: Tensor | None = None,
) -> None:
    """See :func:`curvadion.ops.column_normalize_`."""
    lengths = (column_sum_of_squares(R) if sum_of_squares is None else sum_of_squares).sqrt()
    longer = lengths > (0.0 if floor is None else floor)
    inverse = torch.where(longer, lengths.reciprocal(), 0.0)
    for q, r, factors in zip(Q, R, inverse, strict=True):
        q.copy_(r * factors)


def low_rank_update_(
    X: Sequence[Tensor],
    P: Sequence[Tensor],
    Q: Sequence[Tensor],
    step: Sequence[float | Tensor],
    decay: Sequence[float | Tensor],
    M: Sequence[Tensor] = (),
    R: Sequence[Tensor] = (),
    feedback: Sequence[float] = (),
    seeds: Sequence[int] | None = None,
) -> None:
    """See :func:`curvadion.ops.low_rank_update_`."""
    for t, (x, p, q, eta, beta) in enumerate(zip(X, P, Q, step, decay, strict=True)):
        _low_rank(x, p, q, eta, beta, None if seeds is None else seeds[t])
    if M:
        for m, p, r, c in zip(M, P, R, feedback, strict=True):
            _low_rank(m, p, r, c, 1.0, None)


def _low_rank(
    x: Tensor, p: Tensor, q: Tensor, eta: float | Tensor, beta: float | Tensor, seed: int | None
) -> None:
    if isinstance(eta, Tensor) or isinstance(beta, Tensor):
        # Multiply the small factor by the step size: so the host need not read a tensor.
        if x.dtype == p.dtype:
            x.mul_(beta).addmm_(p, (q * -eta).mT)
        else:
            _write(x, torch.addmm(x.to(p.dtype) * beta, p, (q * -eta).mT), seed)
    elif x.dtype == p.dtype:
        x.addmm_(p, q.mT, beta=beta, alpha=-eta)
    else:
        _write(x, torch.addmm(x.to(p.dtype), p, q.mT, beta=beta, alpha=-eta), seed)


def symmetric_product(A: Tensor, B: Tensor, out: Tensor) -> None:
    """See :func:`curvadion.ops.symmetric_product`.

    On a CPU only blocks on and below the diagonal are computed: (1 + ROWS / n) / 2 of the whole
    product.
    """
    _, n, _ = check_product(A, B, out)
    if A.device.type != "cpu" or n < SMALLEST_IN_BLOCKS:
        torch.bmm(A, B, out=out)
        return
    for a, b, c in zip(A, B, out, strict=True):
        for first in range(0, n, ROWS):
            last = min(n, first + ROWS)
            torch.mm(a[first:last], b[:, :last], out=c[first:last, :last])
            c[:first, first:last] = c[first:last, :first].mT


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _sum(m: Tensor, g: Tensor, mu: float) -> Tensor:
    """mu m + g, in float32 or wider."""
    wide = _wide(m)
    return torch.add(g.to(torch.promote_types(g.dtype, wide.dtype)), wide, alpha=mu)


def _stacked(norms: Iterable[Tensor]) -> Tensor:
    found = list(norms)
    return torch.stack(found) if found else torch.empty(0, dtype=torch.float32, device="cpu")


def _norm(tensor: Tensor) -> Tensor:
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    if tensor.device.type == "cpu":
        norm: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
        size: Any = norm.tolist()  # on the CPU the host need not wait
        if SMALL < size < LARGE:
            return norm
    # float64 can hold the squares of tiny and of large numbers.
    return norm_and_sum(tensor)[0].to(dtype)


def _held_norm(value: Tensor, m: Tensor) -> Tensor:
    """The norm of a value after rounding to m's dtype; not finite if the value is not.

    The value is saturated in place.
    """
    norm = _norm(value)
    if value.dtype == m.dtype and value.device.type == "cpu" and norm.item() < largest(m.dtype):
        return norm  # no element is saturated
    held = _norm(value.clamp_(-largest(m.dtype), largest(m.dtype)).to(m.dtype))
    return torch.where(norm.isfinite(), held, norm)


def _write(x: Tensor, value: Tensor, seed: int | None) -> None:
    value = saturated(value, x.dtype)
    if seed is None or x.dtype != torch.bfloat16:
        x.copy_(value)
    else:
        x.copy_(round_stochastic(value, memory_offsets(x), seed))


def memory_offsets(x: Tensor) -> Tensor:
    """Offset of each element of x in memory, in elements from the first: int64, x's shape."""
    offsets = torch.zeros((), dtype=torch.int64, device=x.device)
    for size, stride in zip(x.shape, x.stride(), strict=True):
        offsets = offsets.unsqueeze(-1) + torch.arange(size, device=x.device) * stride
    return offsets


def round_stochastic(value: Tensor, offsets: Tensor, seed: int) -> Tensor:
    """Round to bfloat16, up or down at random; the mean over seeds is the value.

    The direction depends on the seed and the offset alone, so replicas that hold the same value
    round it to the same bits.

    Args:
        value: of any floating dtype; it is rounded to float32 first.
        offsets: int64, value's shape.
        seed: below 2**32.
    """
    noise = _mixed(_mixed(offsets & 0xFFFFFFFF) ^ seed) & 0xFFFF
    bits = value.float().view(torch.int32).long()
    rounded = ((bits + noise) & 0xFFFF0000).to(torch.int32).view(torch.float32)
    return torch.where(torch.isfinite(value), rounded, value.float()).to(torch.bfloat16)


def _mixed(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers, with outputs that look random."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)
