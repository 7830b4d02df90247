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
    """Sums of squares over some columns of one matrix, in float64.

        sums_j = sum over i of R_ij^2

    Args:
        R: (k, n, r) float32, row-major.
        sums: written, (k, r) float64.
        n: rows of a matrix.
        r: columns of a matrix.
        ROWS: rows that the program reads at a time.
        COLUMNS: columns of the program.
    """
    matrix = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    # Summed at the end over rows of the tile: a sum in each step would exchange data in each.
    total = tl.zeros((ROWS, COLUMNS), tl.float64)
    for top in range(0, n, ROWS):
        rows = top + tl.arange(0, ROWS)
        inside = (rows[:, None] < n) & (columns[None, :] < r)
        values = tl.load(
            R + matrix * n * r + rows[:, None].to(tl.int64) * r + columns[None, :], inside, 0.0
        )
        values = values.to(tl.float64)
        total += values * values
    tl.store(sums + matrix * r + columns, tl.sum(total, axis=0), columns < r)


@triton.jit
def normalize_kernel(
    Q, R, sums, floors, n, r,
    ROWS: tl.constexpr, AT_ONCE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some rows of one matrix, with columns divided by their lengths.

        Q = R diag(1 / sqrt(sums)),    and zeros where sqrt(sums) <= floors

    Args:
        Q: written, (k, n, r) float32, row-major.
        R: (k, n, r) float32, row-major.
        sums: (k, r) float64, of squares over columns.
        floors: (k, r) float64, lengths up to which columns hold no signal.
        n: rows of a matrix.
        r: columns of a matrix.
        ROWS: rows of the program.
        AT_ONCE: rows that it holds in registers at a time; divides ROWS.
        COLUMNS: a power of two, at least r.
    """
    matrix = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    lengths = tl.sqrt(tl.load(sums + matrix * r + columns, columns < r, 0.0))
    # NaN is above no floor, and its column becomes zero.
    longer = lengths > tl.load(floors + matrix * r + columns, columns < r, 0.0)
    inverse = tl.where(longer, 1.0 / tl.where(longer, lengths, 1.0), 0.0)
    top = tl.program_id(1) * ROWS
    for step in range(0, ROWS, AT_ONCE):
        rows = top + step + tl.arange(0, AT_ONCE)
        inside = (rows[:, None] < n) & (columns[None, :] < r)
        offsets = matrix * n * r + rows[:, None].to(tl.int64) * r + columns[None, :]
        values = tl.load(R + offsets, inside, 0.0).to(tl.float64) * inverse[None, :]
        tl.store(Q + offsets, values.to(tl.float32), inside)


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
    """See :func:`curvadion.ops.column_normalize`.

    Args:
        R: (k, n, r) float32, row-major.
        sum_of_squares: (k, r) float64.
        floor: (k, r) float64.
    """
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
    """Raise Unsupported unless R is float32 and row-major."""
    if R.dtype != torch.float32 or not R.is_contiguous():
        raise Unsupported
