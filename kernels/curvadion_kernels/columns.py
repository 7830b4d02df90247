"""Column norms of R, and Q = R / column norms: one launch each."""

# Device functions get their types from Triton.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvadion.ops.tensors import Unsupported, check_supported
from curvadion_kernels.launch import cells_to_device, on
from curvadion_kernels.numbers import DTYPES, INTERPRETED, pointer, to_nearest

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
    table, R, sums, floors, n, r, Q_DTYPE: tl.constexpr,
    ROWS: tl.constexpr, AT_ONCE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some rows of Q[t] = R[t] diag(1 / sqrt(sums[t])); COLUMNS >= r."""
    t = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, COLUMNS)
    lengths = tl.sqrt(tl.load(sums + t * r + j, j < r, 0.0))
    longer = lengths > tl.load(floors + t * r + j, j < r, 0.0)
    inverse = tl.where(longer, 1.0 / tl.where(longer, lengths, 1.0), 0.0)
    q = pointer(table, t, Q_DTYPE)
    top = tl.program_id(1) * ROWS
    for step in range(0, ROWS, AT_ONCE):
        i = top + step + tl.arange(0, AT_ONCE)
        here = (i[:, None] < n) & (j[None, :] < r)
        at = i[:, None].to(tl.int64) * r + j[None, :]
        values = tl.load(R + t * n * r + at, here, 0.0).to(tl.float64) * inverse[None, :]
        tl.store(q + at, to_nearest(values.to(tl.float32), Q_DTYPE), here)


def column_sum_of_squares(R: Tensor) -> Tensor:
    """See :func:`curvadion.ops.column_sum_of_squares`."""
    k, n, r = _stack(R)
    sums = torch.empty(*R.shape[:-2], r, dtype=torch.float64, device=R.device)
    if sums.numel():
        with on(R.device):
            column_sums_kernel[(k, triton.cdiv(r, COLUMNS))](
                R, sums, n, r, ROWS=ROWS, COLUMNS=COLUMNS
            )
    return sums


def column_normalize_(
    Q: Sequence[Tensor],
    R: Tensor,
    sum_of_squares: Tensor | None = None,
    floor: Tensor | None = None,
) -> None:
    """See :func:`curvadion.ops.column_normalize_`."""
    k, n, r = _stack(R)
    given = [t for t in (sum_of_squares, floor) if t is not None]
    if len(Q) != k or any(q.shape != (n, r) for q in Q) or any(t.shape != (k, r) for t in given):
        raise ValueError(
            f"R has shape {(k, n, r)}: give {k} Q of {(n, r)}, and sums and floors of {(k, r)}"
        )
    if r > MOST_COLUMNS or any(t.dtype != torch.float64 for t in given):
        raise Unsupported
    check_supported(Q)
    if any(q.dtype != Q[0].dtype or not q.is_contiguous() for q in Q) or Q[0].device != R.device:
        raise Unsupported
    if R.numel() == 0:
        return
    sums = column_sum_of_squares(R) if sum_of_squares is None else sum_of_squares.contiguous()
    floors = torch.zeros_like(sums) if floor is None else floor.contiguous()
    columns = triton.next_power_of_2(r)
    at_once = max(1, TILE // columns)
    rows = max(ROWS, at_once)
    table = cells_to_device(array("Q", [q.data_ptr() for q in Q]), R.device)
    with on(R.device):
        normalize_kernel[(k, triton.cdiv(n, rows))](
            table, R, sums, floors, n, r,
            Q_DTYPE=DTYPES[Q[0].dtype], ROWS=rows, AT_ONCE=at_once, COLUMNS=columns,
        )  # fmt: skip


def _stack(R: Tensor) -> tuple[int, int, int]:
    """(k, n, r) of a stack (..., n, r) of k matrices."""
    if R.dtype != torch.float32 or not R.is_contiguous():
        raise Unsupported
    return R.shape[:-2].numel(), R.shape[-2], R.shape[-1]
