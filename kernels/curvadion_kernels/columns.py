"""Column norms of R, and Q = R / column norms: one launch each."""

# Device functions get their types from Triton.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvadion.ops.tensors import Unsupported
from curvadion_kernels.launch import on, run
from curvadion_kernels.numbers import INTERPRETED

ROWS = 512 if INTERPRETED else 64
COLUMNS = 32
MOST_COLUMNS = 8192
# The elements that a block normalises at a time.
TILE = 65536 if INTERPRETED else 4096


@triton.jit
def column_sums_kernel(R, sums, n, r, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """sums[t, j] = sum over i of R[t, i, j]^2, in float64, for some columns of one matrix."""
    t = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float64)
    for top in range(0, n, ROWS):
        i = top + tl.arange(0, ROWS)
        here = (i[:, None] < n) & (j[None, :] < r)
        values = tl.load(R + t * n * r + i[:, None].to(tl.int64) * r + j[None, :], here, 0.0)
        values = values.to(tl.float64)
        total += values * values
    tl.store(sums + t * r + j, tl.sum(total, axis=0), j < r)


@triton.jit
def normalize_kernel(
    Q, R, sums, floors, n, r,
    ROWS: tl.constexpr, AT_ONCE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some rows of Q[t] = R[t] diag(1 / sqrt(sums[t])); COLUMNS >= r."""
    t = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, COLUMNS)
    lengths = tl.sqrt(tl.load(sums + t * r + j, j < r, 0.0))
    longer = lengths > tl.load(floors + t * r + j, j < r, 0.0)
    inverse = tl.where(longer, 1.0 / tl.where(longer, lengths, 1.0), 0.0)
    top = tl.program_id(1) * ROWS
    for step in range(0, ROWS, AT_ONCE):
        i = top + step + tl.arange(0, AT_ONCE)
        here = (i[:, None] < n) & (j[None, :] < r)
        at = t * n * r + i[:, None].to(tl.int64) * r + j[None, :]
        values = tl.load(R + at, here, 0.0).to(tl.float64) * inverse[None, :]
        tl.store(Q + at, values.to(tl.float32), here)


def column_sum_of_squares(R: Tensor) -> Tensor:
    """See :func:`curvadion.ops.column_sum_of_squares`."""
    _check(R)
    k, n, r = R.shape
    sums = torch.empty(k, r, dtype=torch.float64, device=R.device)
    with on(R.device):
        run(
            column_sums_kernel, (k, triton.cdiv(r, COLUMNS)),
            R, sums, n, r, ROWS=ROWS, COLUMNS=COLUMNS,
        )  # fmt: skip
    return sums


def column_normalize(R: Tensor, sum_of_squares: Tensor, floor: Tensor) -> Tensor:
    """See :func:`curvadion.ops.column_normalize`."""
    _check(R)
    k, n, r = R.shape
    if r > MOST_COLUMNS:
        raise Unsupported
    Q = torch.empty_like(R)
    columns = triton.next_power_of_2(r)
    at_once = max(1, TILE // columns)
    rows = max(ROWS, at_once)
    if Q.numel():
        with on(R.device):
            run(
                normalize_kernel, (k, triton.cdiv(n, rows)),
                Q, R, sum_of_squares.contiguous(), floor.contiguous(), n, r,
                ROWS=rows, AT_ONCE=at_once, COLUMNS=columns,
            )  # fmt: skip
    return Q


def _check(R: Tensor) -> None:
    if R.dtype != torch.float32 or not R.is_contiguous():
        raise Unsupported
