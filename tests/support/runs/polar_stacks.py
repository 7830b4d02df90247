"""Stacks of matrices whose polar factors are taken."""

from __future__ import annotations

import torch

from curvadion import ops
from curvadion.layout.matrix import Extent, MatrixLayout
from curvadion.ops.newton_schulz import Bound
from curvadion.update.newton_schulz import (
    SMALLEST_IN_HALF,
    RowStack,
    Scaled,
    Scales,
    passes_in_full,
    passes_in_half,
    polar_express,
)


def stack_of(B, rows, group, dtype, steps=5):
    """A stack of which this rank holds some rows, with products in ``dtype``.

    Args:
        B: the whole matrices, (k, m, n).
        rows: that this rank holds.
        group: of the ranks that hold the others; None if this one holds all.
        dtype: of products; those of half precision take two passes.
        steps: the number of iterations.
    """
    _, m, n = B.shape
    half = dtype in (torch.float16, torch.bfloat16)
    coefficients = polar_express(steps, SMALLEST_IN_HALF) if half else polar_express(steps)
    held = B[:, rows.start : rows.stop]
    e, trace = ops.exponents(ops.norms(list(held)))
    states = list(B.new_zeros(len(B)))
    return RowStack(
        MatrixLayout((m, n), Extent(rows, group), Extent(range(n)), shards=group),
        Scaled((held * torch.exp2(-e)[:, None, None]).to(dtype), e, trace),
        Scales(states, [1.0] * len(B), states),
        passes_in_half(coefficients) if half else passes_in_full(coefficients),
        Bound.TIGHT,
    )
