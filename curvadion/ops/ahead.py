"""Fused operations of momenta with look-ahead, each defined in plain PyTorch.

Before a step: Frobenius norms of what it will add up. At its beginning: a matrix's momentum, and
what a polar step iterates on, scaled into the range of a half-precision dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from curvadion.ops.backends import fused
from curvadion.ops.operations import accumulate_, norms
from curvadion.ops.state_codes import Opened, check_states, is_coded
from curvadion.ops.tensors import Numbers, Tensors, wide_dtype

# Scaled matrices have lengths in [2^6, 2^7). Elements of their Gram matrices are at most
# 2^14, a quarter of float16's largest number.
LENGTH_EXPONENT = 7
# 2^-126 is a normal float32 number, and so is its inverse.
LARGEST_EXPONENT = 126


def lengths(
    M: Sequence[Tensor | None], G: Tensors, mu: Numbers, share: Numbers
) -> tuple[Tensor, Tensor]:
    """Frobenius norms of what a step will add up, and of G; finite if they fit the dtype.

        M'     = mu M + G, rounded to M's dtype as :func:`ahead_` does, but not written
        length = |M' + (share - 1) G|, or |share G| without a momentum
        norm   = |G|

    Args:
        M: momenta, of any floating dtypes, or vectors of their codes, which are in the order of
            G's elements in memory; None where there is no momentum.
        G: gradients, at least one, of M's shapes and any floating dtypes.
        mu: a number per tensor.
        share: a number per tensor.

    Returns:
        Lengths and norms, both (len(G),), float32 or wider.

    Raises:
        ValueError: the lists have unequal lengths.
    """
    # Backends take tensors only. G stands for a missing momentum, with mu = 0: the product
    # 0 G adds nothing to a finite sum, and NaN to one that is not finite.
    addends = [g if m is None else m for m, g in zip(M, G, strict=True)]
    decays = [0.0 if m is None else decay for m, decay in zip(M, mu, strict=True)]
    check_states(addends, G)
    operation = "coded_lengths" if any(map(is_coded, addends)) else "lengths"
    result: tuple[Tensor, Tensor] | None = fused(operation, addends, G, decays, share)
    if result is not None:
        return result
    gradient_norms = norms(G)
    momentum_lengths = []
    for m, g, decay, factor, norm in zip(M, G, mu, share, gradient_norms, strict=True):
        if m is None:
            momentum_lengths.append(norm.view(1) * abs(factor))
        else:
            # One sum is in memory at a time, and one decoded momentum.
            [elements] = Opened([m], [g], [False]).tensors
            momentum_lengths.append(_length(elements, g, decay, factor))
    return torch.cat(momentum_lengths), gradient_norms


def _length(m: Tensor, g: Tensor, mu: float, share: float) -> Tensor:
    """|m + (share - 1) g| with m <- mu m + g, (1,), in float32 or wider.

    Args:
        m: of g's shape, in any floating dtype.
        g: of any floating dtype.
        mu: the factor of m.
        share: the factor of g.
    """
    wide = wide_dtype(torch.promote_types(m.dtype, g.dtype))
    if wide != m.dtype:
        # m <- mu m + g, rounded
        momentum = torch.add(g, m.to(wide), alpha=mu).to(m.dtype)
        # |m + (share - 1) g|
        return norms([torch.add(momentum.to(wide), g, alpha=share - 1)])
    # The momentum is not rounded, so the length is |mu m + share g|.
    if share == 0:
        # |mu| |m + 0 g|: a g that is not finite makes the length NaN even so.
        return norms([torch.add(m.to(wide), g, alpha=0.0)]) * abs(mu)
    # |share| |g + (mu / share) m|, in one pass over both.
    return norms([torch.add(g, m.to(wide), alpha=mu / share)]) * abs(share)


def exponents(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """e such that 2^-e length is in [2^6, 2^7), and (2^-e length)^2.

    e is cut off at -126 and at 126, and -126 for lengths that are zero or NaN.

    Args:
        lengths: (count,), float32 or float64.

    Returns:
        e and the squares, both (count,), in the dtype of the lengths.
    """
    # frexp(length) = (f, x) with length = f 2^x and f in [1/2, 1), so e = x - 7. Dividing the
    # length by 2^7 instead could underflow.
    shifted = torch.frexp(lengths).exponent - LENGTH_EXPONENT
    clamped = shifted.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    e = clamped.where(lengths > 0, -LARGEST_EXPONENT).to(lengths.dtype)
    return e, (lengths * torch.exp2(-e)).square()


def ahead_(
    M: Tensors,
    G: Tensors,
    mu: Numbers,
    share: Numbers,
    out: Tensors,
    lengths: Tensor | None,
    moves: Tensor | None = None,
    seeds: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """M <- mu M + G, out <- 2^-e (M + share G); in place, in one pass.

    Multiplying by a power of two is exact, so each element of out is rounded to its dtype
    once. If the flag is false, M stays as it is, and out holds any values.

    Args:
        M: momenta, float32 or bfloat16, which are rounded before out is computed; or vectors of
            their codes, in the order of out's elements in memory, which are rounded after it.
        G: gradients of M's shapes, in any floating dtypes.
        mu: a number per tensor.
        share: a number per tensor.
        out: tensors of M's shapes and strides: float32, float64, bfloat16 or float16.
        lengths: (len(M),) float32 or float64, of :func:`lengths` with a share of 1 + share:
            those of M + share G, from which :func:`exponents` gets e. With None e is zero.
        moves: () bool on the device; where it is false, M is not written. None writes.
        seeds: an integer below 2^32 per tensor, with which codes are rounded up or down at
            random; None rounds to nearest.

    Returns:
        e and trace = (2^-e length)^2, the sum of the squares of out, both (len(M),) in the
        dtype of the lengths; both (0,) float32 without lengths.

    Raises:
        ValueError: the lists have unequal lengths.
    """
    check_states(M, out, seeds)
    result: tuple[Tensor, Tensor] | None
    if any(map(is_coded, M)):
        result = fused("coded_ahead_", M, G, mu, share, out, lengths, moves, seeds, writes=[M, out])
    else:
        result = fused("ahead_", M, G, mu, share, out, lengths, moves, writes=[M, out])
    if result is not None:
        return result
    momenta = Opened(M, out, [False] * len(M))
    M = momenta.tensors
    # M <- mu M + G
    accumulate_(M, G, mu, moves=moves)
    scales: Sequence[Tensor | None] = [None] * len(M)
    if lengths is None:
        e = torch.empty(0, dtype=torch.float32, device=M[0].device if M else "cpu")
        trace = torch.empty_like(e)
    else:
        e, trace = exponents(lengths)
        scales = torch.exp2(-e).unbind()
    # out <- 2^-e (M + share G)
    for m, g, factor, ahead, power in zip(M, G, share, out, scales, strict=True):
        _look_ahead(m, g, factor, ahead, power)
    momenta.close(seeds)
    return e, trace


def _look_ahead(m: Tensor, g: Tensor, share: float, out: Tensor, scale: Tensor | None) -> None:
    """out <- scale (m + share g), computed in float32 or wider and rounded once.

    Args:
        m: momentum, of any floating dtype.
        g: gradient of m's shape, of any floating dtype.
        share: the factor of g.
        out: of m's shape, of any floating dtype.
        scale: (), a power of two in float32 or float64; None for 1.
    """
    wide = wide_dtype(out.dtype)
    sums = out if wide == out.dtype else torch.empty_like(out, dtype=wide)
    # sums <- m + share g
    torch.add(m.to(wide), g.to(wide), alpha=share, out=sums)
    if scale is not None:
        sums.mul_(scale)
    if sums is not out:
        out.copy_(sums)


def scale(X: Tensors, out: Tensors, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """out <- 2^-e X, for stacks of matrices, in one pass; rounded to out's dtype once.

    Args:
        X: stacks, (k_i, m_i, n_i) each, of any floating dtypes.
        out: stacks of these shapes and strides, of any floating dtypes; may be X.
        lengths: (sum of k_i,) float32 or float64, the norms of all matrices, from which
            :func:`exponents` gets e.

    Returns:
        e and (2^-e length)^2, both (sum of k_i,) in the dtype of the lengths.

    Raises:
        ValueError: the lists have unequal lengths.
    """
    result: tuple[Tensor, Tensor] | None = fused("scale", X, out, lengths, writes=[out])
    if result is not None:
        return result
    e, trace = exponents(lengths)
    counts = list(map(len, X))
    for x, scaled, powers in zip(X, out, torch.exp2(-e).split(counts), strict=True):
        wide = wide_dtype(x.dtype)
        torch.mul(x, powers.to(wide)[:, None, None], out=scaled)
    return e, trace
