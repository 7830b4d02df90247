"""Newton-Schulz iterations for polar factors, on Gram matrices (Polar Express, arXiv 2505.16932).

The polar factor of B = U S V^T is U V^T = B (B^T B)^(-1/2). An iteration takes every singular value
s to p(s) = a s + b s^3 + c s^5, with products only. With G = B^T B it is

    W = a I + b G + c G^2,      B <- B W,      G <- W G W,

and B Z is computed once at the end, with Z the product of all W. All these matrices are polynomials
in G, so they are symmetric and commute.

In half precision the rounding errors of G hide small singular values, so iterations are split into
passes: after a few of them B <- B Z, whose small singular values are larger, and G <- B^T B.

Each iteration uses the p that minimises max |1 - p(s)| over the interval that then contains s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum, auto
from functools import lru_cache

import torch
from torch import Tensor

from curvadion import ops

Coefficients = tuple[float, float, float]

TINY = 2.0**-120  # its root and its thousandth are normal float32 numbers
# The iterations of Muon (Jordan et al., 2024), all equal: singular values end in [0.7, 1.2].
MUON: Coefficients = (3.4445, -4.7750, 2.0315)
# Few iterations may leave singular values that are not too small this far from 1.
TOLERANCE = 0.2
# The smallest relative singular value above the rounding errors of a float32 Gram matrix.
SMALLEST = 1e-3
SMALLEST_IN_HALF = 3e-3
# Intervals shorter than this share of their end are too narrow for Remez' equations in float64.
NARROW = 0.01
# Singular values are divided by this before an iteration in half precision.
SAFETY = 1.01


@lru_cache
def polar_express(steps: int, least: float = SMALLEST) -> tuple[Coefficients, ...]:
    """The best coefficients of ``steps`` iterations for singular values from ``least`` on.

    Values from :func:`smallest` to 1 end within TOLERANCE of 1: within 0.12 with 5 iterations,
    0.001 with 6, where rounding in float32 may add 0.05. Smaller ones grow by the same factor.
    """
    return tuple(_compose(max(least, smallest(steps)), steps)[0])


@lru_cache
def smallest(steps: int) -> float:
    """The smallest singular value, relative to the largest, that ends near 1."""
    low, high = 1e-16, 1.0
    for _ in range(100):
        middle = math.sqrt(low * high)
        _, error = _compose(middle, steps)
        low, high = (middle, high) if error > TOLERANCE else (low, middle)
    return max(high, SMALLEST)


class Bound(Enum):
    """The bound of G's largest eigenvalue by which G is divided before the iterations."""

    # With f the Frobenius norm of G, f times the square root of the norm of (G / f)^2: at most
    # n^(1/4) times the eigenvalue, without another product. Small singular values begin larger.
    TIGHT = auto()
    TRACE = auto()  # the square of B's norm, as in Muon
    ONE = auto()  # earlier iterations have brought the eigenvalue to about 1


def passes_in_half(coefficients: tuple[Coefficients, ...]) -> tuple[tuple[Coefficients, ...], ...]:
    """Iterations in passes for float16, whose Gram matrices show singular values from 1/40 on.

    The first pass makes the smallest ones grow about thirtyfold.
    """
    # Beyond the end of its interval a polynomial rises steeply, so all but the last shrink singular
    # values a little to keep rounding errors inside (section 3.4).
    *inner, last = coefficients
    safe = (*((a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in inner), last)
    return (safe[:2], safe[2:]) if len(safe) > 2 else (safe,)


def most_of_squares(device: torch.device) -> int:
    """The most elements of n x n matrices to iterate on at a time, in about six copies."""
    return 2**20 if device.type == "cpu" else 2**27


def inverse_root(
    G: Tensor,
    coefficients: Sequence[Coefficients],
    kind: Bound = Bound.TIGHT,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Z (k, n, n) such that B Z approximates the polar factor of B, from G = B^T B; and bounds.

    The squares of G's elements must be finite in float32; zeros give a finite Z. dtype: of the
    products; None takes G's. Bounds are (k,), float32 or wider, or (0,) if all are 1.
    """
    n = G.shape[-1]
    count = max(1, most_of_squares(G.device) // max(1, n * n))
    if len(G) > count:
        roots = (inverse_root(some, coefficients, kind, dtype) for some in G.split(count))
        Z, bounds = map(torch.cat, zip(*roots, strict=True))
        return Z, bounds
    dtype = dtype or G.dtype
    if kind is Bound.ONE:
        bound, G = G.new_empty(0), G.to(dtype, copy=True)
    else:
        if kind is Bound.TIGHT:
            bound = _norm(G)
        else:
            wide = torch.promote_types(G.dtype, torch.float32)
            bound = G.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=wide)
        bound.clamp_min_(TINY)
        G = torch.div(G, bound[:, None, None], out=torch.empty_like(G, dtype=dtype))
    square, spare = ops.symmetric_product(G, G, torch.empty_like(G)), torch.empty_like(G)
    if kind is Bound.TIGHT:
        # Rounding must not leave an eigenvalue above 1. Only a zero matrix is below n^(-1/4).
        tighter = (_norm(square).sqrt() * (1 + 4 * torch.finfo(G.dtype).eps)).clamp_min_(1e-3)
        G /= tighter[:, None, None]
        square /= tighter.square()[:, None, None]
        bound *= tighter
    Z = G  # until the first iteration, whose W it is
    for number, (a, b, c) in enumerate(coefficients, 1):
        W = torch.add(square.mul_(c), G, alpha=b, out=square)
        W.diagonal(dim1=-2, dim2=-1).add_(a)
        if number == 1:
            Z = W.clone()
        else:
            Z, spare = ops.symmetric_product(Z, W, spare), Z
        if number < len(coefficients):
            half = ops.symmetric_product(G, W, spare)
            G, spare = ops.symmetric_product(half, W, G), half
            square = ops.symmetric_product(G, G, W)
    return (Z.div_(bound.sqrt()[:, None, None]) if len(bound) else Z), bound


def _norm(G: Tensor) -> Tensor:
    dtype = torch.promote_types(G.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(G, dim=(-2, -1), dtype=dtype)
    return norm


def _compose(low: float, steps: int) -> tuple[list[Coefficients], float]:
    """The best successive polynomials for [low, 1], and their final distance from 1."""
    high, found, error = 1.0, [], 1.0
    for _ in range(steps):
        best, error = _best(low, high)
        found.append(best)
        low, high = 1 - error, 1 + error
    return found, error


def _best(low: float, high: float) -> tuple[Coefficients, float]:
    """The odd polynomial of degree 5 closest to 1 on [low, high], and its largest error.

    Remez' exchange: the error has equal size and alternating signs at both ends and at the two
    extremes q < r between them.
    """
    if low > (1 - NARROW) * high:  # the limit for narrow intervals, an iteration of order 3
        middle = (low + high) / 2
        a, b, c = 1.875 / middle, -1.25 / middle**3, 0.375 / middle**5
        return (a, b, c), max(abs(1 - (a * s + b * s**3 + c * s**5)) for s in (low, high))
    q, r, error = (3 * low + high) / 4, (low + 3 * high) / 4, math.inf
    for _ in range(100):
        rows = [[s, s**3, s**5, sign] for s, sign in ((low, 1), (q, -1), (r, 1), (high, -1))]
        system = torch.tensor(rows, dtype=torch.float64, device="cpu")
        ones = torch.ones(4, dtype=torch.float64, device="cpu")
        a, b, c, now = torch.linalg.solve(system, ones).tolist()
        # p'(s) = a + 3 b s^2 + 5 c s^4 = 0
        root = math.sqrt(max(0.0, 9 * b * b - 20 * a * c))
        q, r = math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))
        if abs(now - error) < 1e-13:
            break
        error = now
    return (a, b, c), error
