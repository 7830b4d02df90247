"""The fused operations of Newton-Schulz iterations, each defined in plain PyTorch.

Matrices B with equal smaller sides n are iterated together on their Gram matrices G = B^T B,
(n, n), whatever their larger sides are. The result is Z, about G^(-1/2), so that B Z is about
B's polar factor. One iteration is

    W = a I + b G + c G^2,      Z <- Z W,      G <- W G W,

where G has been divided by a bound of its largest eigenvalue before the first one. All of
these are symmetric and commute.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor

from curvadion.ops.backends import fused
from curvadion.ops.operations import copy_, symmetric_product
from curvadion.ops.tensors import Numbers, Tensors, from_host, wide_dtype

Coefficients = tuple[float, float, float]  # a, b and c of one iteration

# The least bound: zero matrices are divided by it. Its root and its inverse are normal float32
# numbers.
TINY = 2.0**-120
# Matrices that have shrunk by this factor have had no gradient for long.
FALLEN = 3e-5
# |(G / |G|)^2|^(1/2) with Frobenius norms is at least n^(-1/4), above this for any n in use.
# For a zero matrix it is zero, by which nothing can be divided.
LEAST = 1e-3


class Bound(Enum):
    """The bound of G's largest eigenvalue by which G is divided."""

    # |G| sqrt(|(G / |G|)^2|) with Frobenius norms: at most n^(1/4) times the eigenvalue.
    TIGHT = auto()
    # G's trace: the square of B's Frobenius norm, as in Muon.
    TRACE = auto()
    # 1, if earlier iterations have brought the eigenvalue there.
    ONE = auto()


class Root(NamedTuple):
    """About G^(-1/2) of k matrices, and what is known of them.

    Attributes:
        Z: (k, n, n).
        bound: (k,) float32 or wider, of G's largest eigenvalues; (0,) if all bounds are 1.
        check: (k,) or (k, parts), float32 or wider: its sum over parts is finite exactly if Z
            is.
    """

    Z: Tensor
    bound: Tensor
    check: Tensor


def most_of_squares(device: torch.device) -> int:
    """The most elements of matrices (n, n) to iterate on at a time, in about six copies."""
    return 2**20 if device.type == "cpu" else 2**27


def margin(dtype: torch.dtype) -> float:
    """A factor above 1: rounding leaves no eigenvalue above a bound times this."""
    return 1 + 4 * torch.finfo(dtype).eps


def grams(B: Tensors, out: Tensors) -> None:
    """out <- B^T B for all stacks, in one pass.

    Args:
        B: stacks (k_i, m_i, n) of one floating dtype and device, of any strides.
        out: stacks (k_i, n, n) of the same dtype and device.

    Raises:
        ValueError: the lists have unequal lengths.
    """
    if fused("grams", B, out, writes=[out]):
        return
    for b, gram in zip(B, out, strict=True):
        symmetric_product(b.mT, b, gram)


def inverse_root(
    G: Tensor,
    coefficients: Sequence[Coefficients],
    kind: Bound = Bound.TIGHT,
    dtype: torch.dtype | None = None,
    trace: Tensor | None = None,
) -> Root:
    """Z such that B Z is about B's polar factor, from G = B^T B.

        G <- G / bound
        W = a I + b G + c G^2,  Z <- Z W,  G <- W G W     by each iteration, from Z = I on
        Z <- Z / sqrt(bound)

    Args:
        G: (k, n, n), of any floating dtype; may be overwritten, and may share its memory with
            the result.
        coefficients: (a, b, c) of each iteration, at least one.
        kind: how G's largest eigenvalues are bounded.
        dtype: of products and of Z; None for G's.
        trace: (k,) float32, the sums of G's diagonals; None if they are not known. Only saves
            a backend their computation.
    """
    result: Root | None = fused("inverse_root", G, coefficients, kind, dtype, trace, writes=[G])
    if result is not None:
        return result
    n = G.shape[-1]
    count = max(1, most_of_squares(G.device) // max(1, n * n))
    roots = [_inverse_root(matrices, coefficients, kind, dtype) for matrices in G.split(count)]
    if len(roots) == 1:
        return roots[0]
    return Root(
        torch.cat([root.Z for root in roots]),
        torch.cat([root.bound for root in roots]),
        torch.cat([root.check for root in roots]),
    )


def _inverse_root(
    G: Tensor,
    coefficients: Sequence[Coefficients],
    kind: Bound,
    dtype: torch.dtype | None,
) -> Root:
    """:func:`inverse_root` of all matrices at once.

    Args:
        G: (k, n, n), of any floating dtype; not written.
        coefficients: (a, b, c) of each iteration.
        kind: how G's largest eigenvalues are bounded.
        dtype: of products and of Z; None for G's.
    """
    dtype = dtype or G.dtype
    # G <- G / bound
    if kind is Bound.ONE:
        bound = G.new_empty(0, dtype=wide_dtype(dtype))
        G = G.to(dtype, copy=True)
    else:
        bound = _norm(G) if kind is Bound.TIGHT else _trace(G)
        bound.clamp_min_(TINY)
        G = torch.div(G, bound[:, None, None], out=torch.empty_like(G, dtype=dtype))
    square = symmetric_product(G, G, torch.empty_like(G))
    if kind is Bound.TIGHT:
        # tighter = |(G / |G|)^2|^(1/2), by which the bound falls to |G| tighter
        tighter = (_norm(square).sqrt() * margin(dtype)).clamp_min_(LEAST)
        G /= tighter[:, None, None]
        square /= tighter.square()[:, None, None]
        bound *= tighter
    Z = _iterate(G, square, coefficients)
    # Z <- Z / sqrt(bound)
    if len(bound):
        Z.div_(bound.sqrt()[:, None, None])
    return Root(Z, bound, Z.sum(dim=(1, 2), dtype=wide_dtype(dtype)))


def _iterate(G: Tensor, square: Tensor, coefficients: Sequence[Coefficients]) -> Tensor:
    """The product of all W, (k, n, n).

    Args:
        G: (k, n, n), overwritten.
        square: G^2, (k, n, n), overwritten.
        coefficients: (a, b, c) of each iteration.
    """
    spare = torch.empty_like(G)
    Z = G  # until the first iteration, whose W replaces it
    for number, (a, b, c) in enumerate(coefficients, 1):
        # W = a I + b G + c G^2, in the memory of the square
        W = torch.add(square.mul_(c), G, alpha=b, out=square)
        W.diagonal(dim1=-2, dim2=-1).add_(a)
        # Z <- Z W
        if number == 1:
            Z = W.clone()
        else:
            product = symmetric_product(Z, W, spare)
            spare = Z
            Z = product
        # G <- W G W, unless nothing reads it any more
        if number < len(coefficients):
            half = symmetric_product(G, W, spare)
            G = symmetric_product(half, W, G)
            spare = half
            square = symmetric_product(G, G, W)
    return Z


def drop_unusable_(
    Z: Tensor,
    check: Tensor,
    bound: Tensor | None = None,
    exponents: Tensor | None = None,
    scales: Tensors = (),
    decays: Numbers = (),
    new_scales: Tensors = (),
    moves: Tensor | None = None,
) -> None:
    """Z <- 0 where it is not finite or its matrix has shrunk; remembers all lengths.

    Iterations may amplify rounding errors of rank-deficient matrices without bound, so finite
    matrices may have roots that are not. With bounds,

        length    = sqrt(bound) 2^e
        scale     = decay scale
        Z         <- 0 where length <= FALLEN scale, or where one of the two is NaN
        new scale <- max(scale, length), or NaN

    Args:
        Z: (k, n, n), the roots that were iterated, of any floating dtype.
        check: (k,) or (k, parts): its sum over parts is finite exactly if Z is.
        bound: (k,), float32 or wider: of the largest eigenvalues of B^T B; None if only Z
            decides.
        exponents: e, (k,) float32 or wider: B is a matrix divided by 2^e; with ``bound``.
        scales: k tensors of shape (), the last lengths; with ``bound``.
        decays: k numbers, by how much scales have shrunk since then; with ``bound``.
        new_scales: k tensors of shape (), which may be those of ``scales``; () remembers none.
        moves: () bool on the device; where it is false, new_scales are not written. None
            writes.
    """
    if fused(
        "drop_unusable_",
        Z,
        check,
        bound,
        exponents,
        scales,
        decays,
        new_scales,
        moves,
        writes=[Z, new_scales],
    ):
        return
    total = check.sum(dim=1) if check.dim() > 1 else check
    usable = total.abs() < torch.inf
    if bound is not None and exponents is not None:
        # length = sqrt(bound) 2^e
        length = bound.sqrt() * torch.exp2(exponents)
        # scale = decay scale, rounded once
        factors = from_host(decays, torch.float64, length.device)
        scale = (torch.stack(list(scales)).double() * factors).to(length.dtype)
        # False where one of the two is NaN.
        usable &= length > FALLEN * scale
        # new scale <- max(scale, length)
        if new_scales:
            copy_(new_scales, torch.maximum(scale, length), moves)
    Z.masked_fill_(~usable[:, None, None], 0.0)


def _norm(G: Tensor) -> Tensor:
    """Frobenius norms of matrices, (k, n, n) -> (k,), float32 or wider."""
    norm: Tensor = torch.linalg.vector_norm(G, dim=(-2, -1), dtype=wide_dtype(G.dtype))
    return norm


def _trace(G: Tensor) -> Tensor:
    """Sums of diagonals, (k, n, n) -> (k,), float32 or wider."""
    return G.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=wide_dtype(G.dtype))
