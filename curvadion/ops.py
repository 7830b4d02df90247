"""The fused operations of an optimizer step, in plain PyTorch.

Each works on lists of tensors of different sizes; data may be bfloat16, float16, float32 or
float64, sums are taken in float32 or wider. These are the reference of every faster backend.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# A column of R shorter than this, relative to the longest, holds rounding errors only.
NEGLIGIBLE_COLUMN = 1e-6


def momentum_norms(M: Sequence[Tensor], G: Sequence[Tensor], mu: Sequence[float]) -> Tensor:
    """Frobenius norms of mu M + G as M's dtype holds it, (len(M),), float32 or wider.

    Reads only: a step that must not happen (a non-finite gradient on some rank) leaves nothing to
    undo.
    """
    return torch.stack(
        [
            _norm(torch.add(g, m, alpha=decay).to(m.dtype))
            for m, g, decay in zip(M, G, mu, strict=True)
        ]
    )


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Frobenius norms, one per tensor: (len(tensors),), float32 or wider."""
    return torch.stack([_norm(t) for t in tensors])


def accumulate_(M: Sequence[Tensor], G: Sequence[Tensor], mu: Sequence[float]) -> None:
    """M <- mu M + G, in place, per tensor; there may be none."""
    if not M:
        return
    if any(decay != 1.0 for decay in mu):
        torch._foreach_mul_(list(M), list(mu))
    torch._foreach_add_(list(M), list(G))


def column_sum_of_squares(R: Tensor) -> Tensor:
    """(..., n, r) -> (..., r): what crosses the column group before a normalisation."""
    return R.square().sum(dim=-2)


def column_normalize(R: Tensor, sum_of_squares: Tensor, epsilon: float) -> Tensor:
    """Q = R / (column norms + epsilon), given the norms' squares over ALL rows.

    R: (..., n, r), sum_of_squares: (..., r) -> Q (..., n, r). Columns of negligible length
    relative to the longest become zero: normalising rounding errors would turn them into
    full-size updates.
    """
    lengths = sum_of_squares.sqrt()
    longest = lengths.amax(dim=-1, keepdim=True)
    inverse = torch.where(lengths > NEGLIGIBLE_COLUMN * longest, 1.0 / (lengths + epsilon), 0.0)
    return R * inverse.unsqueeze(-2)


def low_rank_update_(
    X: Sequence[Tensor],
    P: Sequence[Tensor],
    Q: Sequence[Tensor],
    *,
    step: Sequence[float | Tensor],
    decay: Sequence[float | Tensor],
) -> None:
    """X <- decay X - step P Q^T, in place, per matrix.

    X: k tensors (m, n), any strides and floating dtype. P: k of (m, r), Q: k of (n, r).
    step, decay: k numbers or zero-dimensional tensors.
    """
    for x, p, q, eta, beta in zip(X, P, Q, step, decay, strict=True):
        # The step size goes into the small factor: a tensor lr is then never read by the host.
        small = q * -eta
        if x.dtype == p.dtype:
            x.mul_(beta).addmm_(p, small.mT)
        else:
            x.copy_(torch.addmm(x.to(p.dtype) * beta, p, small.mT))


def error_feedback_(
    M: Sequence[Tensor], P: Sequence[Tensor], R: Sequence[Tensor], c: Sequence[float]
) -> None:
    """M <- M - c P R^T, in place, per matrix; shapes as in low_rank_update_."""
    low_rank_update_(M, P, R, step=c, decay=[1.0] * len(M))


def gradient_step_(
    X: Sequence[Tensor],
    G: Sequence[Tensor],
    *,
    step: Sequence[float | Tensor],
    decay: Sequence[float | Tensor],
) -> None:
    """X <- decay X - step G, in place, per tensor."""
    for x, g, eta, beta in zip(X, G, step, decay, strict=True):
        x.mul_(beta).sub_(g * eta)


def _norm(tensor: Tensor) -> Tensor:
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
    return norm
