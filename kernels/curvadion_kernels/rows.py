"""Rows of stacks of matrices: their sums, NorMuon's scaling of them, and decay of some of them.

Each is one launch for all stacks of a dtype, which may be row-major or column-major.
"""

# Device functions get their types from Triton.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvadion.ops.rows import TINY
from curvadion.ops.tensors import Unsupported, check_supported
from curvadion_kernels.launch import Index, Launch, kept, on, run
from curvadion_kernels.numbers import DTYPES, INTERPRETED, numbers, pointer, to_nearest

if TYPE_CHECKING:
    from curvadion.ops.rows import Moments

# Rows of a program, and the columns that it reads at a time, where elements of a row are neighbours
# in memory and where elements of a column are. The interpreter's time depends on the number of
# operations, not on their size.
WIDE_ROWS, WIDE_COLUMNS = (64, 512) if INTERPRETED else (8, 512)
TALL_ROWS, TALL_COLUMNS = (64, 256) if INTERPRETED else (64, 32)
TILES = {
    "WIDE_ROWS": WIDE_ROWS,
    "WIDE_COLUMNS": WIDE_COLUMNS,
    "TALL_ROWS": TALL_ROWS,
    "TALL_COLUMNS": TALL_COLUMNS,
}
# A stack's dtype and shape, whether it is tall, the rows of its last tensor, and the strides of
# each of its tensors.
_Stack = tuple[torch.dtype, tuple[int, ...], bool, int, tuple[tuple[int, ...], ...]]
# Rows whose second moments a program averages at a time.
BLOCK = 1024

# Indices among which a program looks for its rows at a time.
AT_A_TIME = 512 if INTERPRETED else 64

# Globals that kernels read must be constexprs.
_TINY = tl.constexpr(TINY)
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
# Numbers of a stack: rows, columns, whether it is tall, rows of its last tensor, and three strides
# of each of its one or two tensors.
CELLS = tl.constexpr(10)
# Elements whose number, as a multiple, makes loads and stores of 128 bits possible.
AT_ONCE = tl.constexpr(8)


# ---------------------------------------------------------------- tiles


@triton.jit
def _aligned(address, batch, stride, length):
    """Whether all lines of a matrix begin at multiples of 16 bytes and have whole such parts."""
    return ((address & 15) == 0) & (((batch | stride | length) % AT_ONCE) == 0)


@triton.jit
def _lines(address, matrix, batch, top, stride, dtype: tl.constexpr, TALL: tl.constexpr,
           ALIGNED: tl.constexpr):  # fmt: skip
    """A pointer to the first element of row ``top`` of a matrix."""
    first = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        # Of a value made in this branch alone; the compiler takes what is said of it for granted.
        first = tl.multiple_of(first, 16)
        batch = batch // AT_ONCE * AT_ONCE
        stride = stride // AT_ONCE * AT_ONCE
        if TALL:
            top = top // AT_ONCE * AT_ONCE
    if TALL:
        return first + (matrix * batch + top)
    return first + (matrix * batch + top * stride)


@triton.jit
def _offsets(left, stride, rows, columns, TALL: tl.constexpr, ALIGNED: tl.constexpr,
             ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Offsets (ROWS, COLUMNS) from the first row of a tile, and which of them are in the matrix."""
    i = tl.arange(0, ROWS)
    j = left + tl.arange(0, COLUMNS)
    if ALIGNED:
        # Multiples, as the compiler now sees; the numbers are the same.
        stride = stride // AT_ONCE * AT_ONCE
        if TALL:
            rows = rows // AT_ONCE * AT_ONCE
        else:
            columns = columns // AT_ONCE * AT_ONCE
    here = (i[:, None] < rows) & (j[None, :] < columns)
    if TALL:
        return i[:, None] + j[None, :] * stride, here
    return i[:, None] * stride + j[None, :], here


@triton.jit
def _tile_of(sizes, of, matrix, first):
    """This program's stack, matrix and first row, and a matrix's rows, columns and order."""
    block = tl.program_id(0)
    t = tl.load(of + block)
    k = tl.load(matrix + block).to(tl.int64)
    top = tl.load(first + block).to(tl.int64)
    rows = tl.load(sizes + CELLS * t)
    columns = tl.load(sizes + CELLS * t + 1).to(tl.int32)
    return t, k, top, rows, columns, tl.load(sizes + CELLS * t + 2) != 0


@triton.jit
def _strides(sizes, t, tensor: tl.constexpr):
    """The strides of matrices, rows and columns in the stack's first or second tensor."""
    cells = sizes + CELLS * t + 4 + 3 * tensor
    return tl.load(cells), tl.load(cells + 1), tl.load(cells + 2)


# ---------------------------------------------------------------- sums of rows


@triton.jit
def _sum(
    address, sums, matrix, batch, top, stride, rows, columns,
    DTYPE: tl.constexpr, POWER: tl.constexpr, TALL: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the sums of some rows."""
    u = _lines(address, matrix, batch, top, stride, DTYPE, TALL, ALIGNED)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for left in range(0, columns, COLUMNS):
        at, here = _offsets(left, stride, rows - top, columns, TALL, ALIGNED, ROWS, COLUMNS)
        values = tl.load(u + at, here, 0.0).to(tl.float32)
        if POWER == 1:
            total += tl.abs(values)
        else:
            total += values * values
    i = top + tl.arange(0, ROWS)
    tl.store(sums + matrix * rows + i, tl.sum(total, axis=1), i < rows)


@triton.jit
def row_sums_kernel(
    table, sizes, of, matrix, first, count,
    DTYPE: tl.constexpr, POWER: tl.constexpr, WIDE_ROWS: tl.constexpr, WIDE_COLUMNS: tl.constexpr,
    TALL_ROWS: tl.constexpr, TALL_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums over some rows of one matrix; table: U, then sums."""
    t, k, top, rows, columns, tall = _tile_of(sizes, of, matrix, first)
    address = tl.load(table + t)
    sums = pointer(table, count + t, tl.float32)
    batch, row, column = _strides(sizes, t, 0)
    if not tall:
        if _aligned(address, batch, row, columns):
            _sum(address, sums, k, batch, top, row, rows, columns, DTYPE, POWER, False, True,
                 WIDE_ROWS, WIDE_COLUMNS)  # fmt: skip
        else:
            _sum(address, sums, k, batch, top, row, rows, columns, DTYPE, POWER, False, False,
                 WIDE_ROWS, WIDE_COLUMNS)  # fmt: skip
    else:
        if _aligned(address, batch, column, rows):
            _sum(address, sums, k, batch, top, column, rows, columns, DTYPE, POWER, True, True,
                 TALL_ROWS, TALL_COLUMNS)  # fmt: skip
        else:
            _sum(address, sums, k, batch, top, column, rows, columns, DTYPE, POWER, True, False,
                 TALL_ROWS, TALL_COLUMNS)  # fmt: skip


# ---------------------------------------------------------------- second moments


@triton.jit
def second_moments_kernel(
    table, sizes, energies, count, moves, GUARDED: tl.constexpr, BLOCK: tl.constexpr
):
    """All rows of one matrix, in one order, so that timing changes no bit of the sums.

    table: v, squares, factors and masks; width, beta2 and eps. sizes: rows, how many of the first
    do not count, and whether there is a mask.
    """
    t = tl.program_id(0)
    rows = tl.load(sizes + 3 * t)
    skipped = tl.load(sizes + 3 * t + 1)
    masked = tl.load(sizes + 3 * t + 2) != 0
    states = pointer(table, t, tl.float32)
    squares = pointer(table, count + t, tl.float32)
    factors = pointer(table, 2 * count + t, tl.float32)
    mask = pointer(table, 3 * count + t, tl.int8)
    width = tl.load(numbers(table, 4 * count) + t)
    beta2 = tl.load(numbers(table, 5 * count) + t)
    eps = tl.load(numbers(table, 6 * count) + t)
    moved = True
    if GUARDED:
        moved = tl.load(moves) != 0
    before_scaling = tl.zeros((BLOCK,), tl.float32)
    after_scaling = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, rows.to(tl.int32), BLOCK):
        i = start + tl.arange(0, BLOCK)
        here = i < rows
        squared = tl.load(squares + i, here, 0.0)
        before = tl.load(states + i, here, 0.0)
        # v <- beta2 v + (1 - beta2) squares / width, from the nearer end, as torch.lerp
        now = tl.div_rn(squared, width)
        near_before = before - (before - now) * (1.0 - beta2)
        v = tl.where(beta2 < 0.5, now + beta2 * (before - now), near_before)
        takes_part = here & (tl.load(mask + i, here & masked, 1) != 0)
        v = tl.where(takes_part, v, before)
        tl.store(states + i, v, takes_part & moved)
        # factor = 1 / (sqrt(v) + eps)
        factor = tl.div_rn(1.0, tl.maximum(tl.sqrt_rn(v) + eps, _TINY))
        tl.store(factors + i, factor, here)
        # energies = sum of squares, sum of squares factor^2. A factor's square may overflow where
        # the row is zero, and infinity times zero is NaN.
        counted = tl.where(i >= skipped, squared, 0.0)
        before_scaling += counted
        after_scaling += counted * tl.minimum(factor * factor, _LARGEST)
    tl.store(energies + 2 * t, tl.sum(before_scaling))
    tl.store(energies + 2 * t + 1, tl.sum(after_scaling))


# ---------------------------------------------------------------- scaling of rows


@triton.jit
def _rescale(
    u_address, out_address, factors, c, matrix, u_batch, out_batch, top, u_stride, out_stride,
    rows, columns, LARGEST: tl.constexpr, DTYPE: tl.constexpr, TALL: tl.constexpr,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out <- c factor u in some rows."""
    u = _lines(u_address, matrix, u_batch, top, u_stride, DTYPE, TALL, ALIGNED)
    out = _lines(out_address, matrix, out_batch, top, out_stride, DTYPE, TALL, ALIGNED)
    i = top + tl.arange(0, ROWS)
    # Finite, because infinity times zero is NaN.
    scale = tl.minimum(tl.load(factors + matrix * rows + i, i < rows, 0.0) * c, _LARGEST)
    rest = rows - top
    for left in range(0, columns, COLUMNS):
        at, here = _offsets(left, u_stride, rest, columns, TALL, ALIGNED, ROWS, COLUMNS)
        product = tl.load(u + at, here, 0.0).to(tl.float32) * scale[:, None]
        product = tl.clamp(product, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        to, here = _offsets(left, out_stride, rest, columns, TALL, ALIGNED, ROWS, COLUMNS)
        tl.store(out + to, to_nearest(product, DTYPE), here)


@triton.jit
def rescaled_rows_kernel(
    table, sizes, of, matrix, first, count,
    DTYPE: tl.constexpr, LARGEST: tl.constexpr, WIDE_ROWS: tl.constexpr,
    WIDE_COLUMNS: tl.constexpr, TALL_ROWS: tl.constexpr, TALL_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some rows of one matrix; table: U, the new stacks, factors, energies."""
    t, k, top, rows, columns, tall = _tile_of(sizes, of, matrix, first)
    u = tl.load(table + t)
    out = tl.load(table + count + t)
    factors = pointer(table, 2 * count + t, tl.float32)
    energies = pointer(table, 3 * count + t, tl.float32) + 2 * k
    # c = sqrt(energies[0] / energies[1])
    c = tl.sqrt_rn(tl.div_rn(tl.load(energies), tl.maximum(tl.load(energies + 1), _TINY)))
    u_batch, u_row, u_column = _strides(sizes, t, 0)
    out_batch, out_row, out_column = _strides(sizes, t, 1)
    batches = u_batch | out_batch
    if not tall:
        if _aligned(u | out, batches, u_row | out_row, columns):
            _rescale(u, out, factors, c, k, u_batch, out_batch, top, u_row, out_row, rows,
                     columns, LARGEST, DTYPE, False, True, WIDE_ROWS, WIDE_COLUMNS)  # fmt: skip
        else:
            _rescale(u, out, factors, c, k, u_batch, out_batch, top, u_row, out_row, rows,
                     columns, LARGEST, DTYPE, False, False, WIDE_ROWS, WIDE_COLUMNS)  # fmt: skip
    else:
        if _aligned(u | out, batches, u_column | out_column, rows):
            _rescale(u, out, factors, c, k, u_batch, out_batch, top, u_column, out_column,
                     rows, columns, LARGEST, DTYPE, True, True, TALL_ROWS,
                     TALL_COLUMNS)  # fmt: skip
        else:
            _rescale(u, out, factors, c, k, u_batch, out_batch, top, u_column, out_column,
                     rows, columns, LARGEST, DTYPE, True, False, TALL_ROWS,
                     TALL_COLUMNS)  # fmt: skip


@triton.jit
def _scale_some(
    address, chosen, factor, top, stride, rows, columns,
    DTYPE: tl.constexpr, TALL: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """x <- factor x in the rows where the mask says so."""
    x = _lines(address, 0, 0, top, stride, DTYPE, TALL, ALIGNED)
    i = top + tl.arange(0, ROWS)
    mask = tl.load(chosen + i, i < rows, 0) != 0
    by_row = tl.where(mask, factor, 1.0)
    for left in range(0, columns, COLUMNS):
        at, here = _offsets(left, stride, rows - top, columns, TALL, ALIGNED, ROWS, COLUMNS)
        if not TALL:
            # Here a row that stays need not be read; there it would make loads narrow.
            here &= mask[:, None]
        product = tl.load(x + at, here, 0.0).to(tl.float32) * by_row[:, None]
        tl.store(x + at, to_nearest(product, DTYPE), here)


@triton.jit
def scale_rows_kernel(
    table, sizes, of, matrix, first, count, moves,
    DTYPE: tl.constexpr, GUARDED: tl.constexpr, WIDE_ROWS: tl.constexpr,
    WIDE_COLUMNS: tl.constexpr, TALL_ROWS: tl.constexpr, TALL_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some rows of one matrix; table: X, masks, factors."""
    if GUARDED:  # noqa: SIM102 - Triton would load in any case
        if tl.load(moves) == 0:
            return
    t, _, top, rows, columns, tall = _tile_of(sizes, of, matrix, first)
    x = tl.load(table + t)
    chosen = pointer(table, count + t, tl.int8)
    factor = tl.load(numbers(table, 2 * count) + t)
    _, row, column = _strides(sizes, t, 0)
    if not tall:
        if _aligned(x, 0, row, columns):
            _scale_some(x, chosen, factor, top, row, rows, columns, DTYPE, False, True,
                        WIDE_ROWS, WIDE_COLUMNS)  # fmt: skip
        else:
            _scale_some(x, chosen, factor, top, row, rows, columns, DTYPE, False, False,
                        WIDE_ROWS, WIDE_COLUMNS)  # fmt: skip
    else:
        if _aligned(x, 0, column, rows):
            _scale_some(x, chosen, factor, top, column, rows, columns, DTYPE, True, True,
                        TALL_ROWS, TALL_COLUMNS)  # fmt: skip
        else:
            _scale_some(x, chosen, factor, top, column, rows, columns, DTYPE, True, False,
                        TALL_ROWS, TALL_COLUMNS)  # fmt: skip


# ---------------------------------------------------------------- some rows


@triton.jit
def _take(
    u, out, indices, top, u_stride, out_stride, rows, columns,
    TALL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[i] <- u[indices[i]] for rows i from ``top`` on."""
    i = top + tl.arange(0, ROWS)
    chosen = tl.load(indices + i, i < rows, 0)
    for left in range(0, columns, COLUMNS):
        j = (left + tl.arange(0, COLUMNS))[None, :]
        here = (i < rows)[:, None] & (j < columns)
        if TALL:
            tl.store(out + i[:, None] + j * out_stride,
                     tl.load(u + chosen[:, None] + j * u_stride, here), here)  # fmt: skip
        else:
            tl.store(out + i[:, None] * out_stride + j,
                     tl.load(u + chosen[:, None] * u_stride + j, here), here)  # fmt: skip


@triton.jit
def take_rows_kernel(
    table, sizes, of, matrix, first, count,
    DTYPE: tl.constexpr, WIDE_ROWS: tl.constexpr, WIDE_COLUMNS: tl.constexpr,
    TALL_ROWS: tl.constexpr, TALL_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some of the rows that are taken from one matrix; table: new stacks, U, indices."""
    t, k, top, rows, columns, tall = _tile_of(sizes, of, matrix, first)
    out_batch, out_row, out_column = _strides(sizes, t, 0)
    u_batch, u_row, u_column = _strides(sizes, t, 1)
    out = pointer(table, t, DTYPE) + k * out_batch
    u = pointer(table, count + t, DTYPE) + k * u_batch
    indices = pointer(table, 2 * count + t, tl.int64) + k * rows
    if tall:
        _take(u, out, indices, top, u_column, out_column, rows, columns, True,
              TALL_ROWS, TALL_COLUMNS)  # fmt: skip
    else:
        _take(u, out, indices, top, u_row, out_row, rows, columns, False,
              WIDE_ROWS, WIDE_COLUMNS)  # fmt: skip


@triton.jit
def _put(
    part, out, indices, taken, top, part_stride, out_stride, rows, columns,
    TALL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AT_A_TIME: tl.constexpr,
):  # fmt: skip
    """out[indices[i]] <- part[i], and zeros elsewhere, for rows of out from ``top`` on."""
    i = top + tl.arange(0, ROWS)
    # The place of each row among the indices, plus one; zero if it is not there.
    place = tl.zeros((ROWS,), tl.int64)
    for start in range(0, taken, AT_A_TIME):
        at = start + tl.arange(0, AT_A_TIME)
        chosen = tl.load(indices + at, at < taken, -1)
        equal = i[:, None] == chosen[None, :]
        place += tl.sum(tl.where(equal, (at + 1)[None, :].to(tl.int64), 0), axis=1)
    source = place[:, None] - 1
    for left in range(0, columns, COLUMNS):
        j = (left + tl.arange(0, COLUMNS))[None, :]
        here = (i < rows)[:, None] & (j < columns)
        if TALL:
            values = tl.load(part + source + j * part_stride, here & (source >= 0), 0.0)
            tl.store(out + i[:, None] + j * out_stride, values, here)
        else:
            values = tl.load(part + source * part_stride + j, here & (source >= 0), 0.0)
            tl.store(out + i[:, None] * out_stride + j, values, here)


@triton.jit
def put_rows_kernel(
    table, sizes, of, matrix, first, count,
    DTYPE: tl.constexpr, AT_A_TIME: tl.constexpr, WIDE_ROWS: tl.constexpr,
    WIDE_COLUMNS: tl.constexpr, TALL_ROWS: tl.constexpr, TALL_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some rows of one new matrix; table: new stacks, parts, indices."""
    t, k, top, rows, columns, tall = _tile_of(sizes, of, matrix, first)
    taken = tl.load(sizes + CELLS * t + 3).to(tl.int32)
    out_batch, out_row, out_column = _strides(sizes, t, 0)
    part_batch, part_row, part_column = _strides(sizes, t, 1)
    out = pointer(table, t, DTYPE) + k * out_batch
    part = pointer(table, count + t, DTYPE) + k * part_batch
    indices = pointer(table, 2 * count + t, tl.int64) + k * taken
    # Both tensors of a row-major stack have dense rows; else the columns of both are dense.
    if tall:
        _put(part, out, indices, taken, top, part_column, out_column, rows, columns, True,
             TALL_ROWS, TALL_COLUMNS, AT_A_TIME)  # fmt: skip
    else:
        _put(part, out, indices, taken, top, part_row, out_row, rows, columns, False,
             WIDE_ROWS, WIDE_COLUMNS, AT_A_TIME)  # fmt: skip


# ---------------------------------------------------------------- launches


def row_sums(U: Sequence[Tensor], power: int) -> list[Tensor]:
    """See :func:`curvadion.ops.row_sums`."""
    plan = _launches([U])
    sums = _by_stack([u.shape[:2] for u in U], U[0].device)
    for dtype, launch in plan:
        table = launch.table([U, sums], [])
        with on(table.device):
            run(
                row_sums_kernel, (launch.blocks,),
                table, *launch.index.on_stream(), launch.count,
                DTYPE=DTYPES[dtype], POWER=power, **TILES,
            )  # fmt: skip
    return sums


def second_moments_(
    squares: Sequence[Tensor], stacks: Sequence[Moments], moves: Tensor | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """See :func:`curvadion.ops.second_moments_`."""
    masks = [stack.mask for stack in stacks if stack.mask is not None]
    states = [v for stack in stacks for v in stack.v]
    dense = all(x.stride(-1) == 1 or x.shape[-1] <= 1 for x in (*squares, *masks, *states))
    if not dense or any(x.dtype != torch.float32 for x in (*squares, *states)):
        raise Unsupported
    device = squares[0].device
    factors = _by_stack([squared.shape for squared in squares], device)
    energies = torch.empty(len(states), 2, dtype=torch.float32, device=device)
    chosen: list[Tensor] = []
    rows = []
    for squared, stack in zip(squares, stacks, strict=True):
        # Without a mask an address is not read.
        chosen += stack.v if stack.mask is None else stack.mask.unbind()
        rows += [(squared.shape[1], stack.skipped, stack.mask is not None)] * len(stack.v)
    launch = kept(_matrices, device)(tuple(rows), device)
    by_matrix = [
        [vector for stack in by_stack for vector in stack.unbind()]
        for by_stack in (squares, factors)
    ]
    hyperparameters = [
        [stack.width for stack in stacks for _ in stack.v],
        [beta2 for stack in stacks for beta2 in stack.beta2],
        [eps for stack in stacks for eps in stack.eps],
    ]
    table = launch.table([states, *by_matrix, chosen], hyperparameters)
    with on(device):
        run(
            second_moments_kernel, (launch.blocks,),
            table, *launch.index.on_stream(), energies, launch.count,
            table if moves is None else moves, GUARDED=moves is not None, BLOCK=BLOCK,
        )  # fmt: skip
    return factors, list(energies.split([len(stack.v) for stack in stacks]))


def rescaled_rows(
    U: Sequence[Tensor], factors: Sequence[Tensor], energies: Sequence[Tensor]
) -> list[Tensor]:
    """See :func:`curvadion.ops.rescaled_rows`."""
    read = [*factors, *energies]
    if any(x.dtype != torch.float32 or not x.is_contiguous() for x in read):
        raise Unsupported
    rescaled = [_empty_like(u) for u in U]
    for dtype, launch in _launches([U, rescaled]):
        table = launch.table([U, rescaled, factors, energies], [])
        with on(table.device):
            run(
                rescaled_rows_kernel, (launch.blocks,),
                table, *launch.index.on_stream(), launch.count,
                DTYPE=DTYPES[dtype], LARGEST=torch.finfo(dtype).max, **TILES,
            )  # fmt: skip
    return rescaled


def scale_rows_(
    X: Sequence[Tensor],
    masks: Sequence[Tensor],
    factors: Sequence[float],
    moves: Tensor | None = None,
) -> None:
    """See :func:`curvadion.ops.scale_rows_`.

    Args:
        X: matrices (rows, columns), float32, bfloat16 or float16.
        masks: (rows,) bool, contiguous.
        factors: a number a matrix.
        moves: () bool on the device, or None.
    """
    if not all(mask.is_contiguous() for mask in masks):
        raise Unsupported
    for dtype, launch in _launches([[x.unsqueeze(0) for x in X]]):
        table = launch.table([X, masks], [factors])
        with on(table.device):
            run(
                scale_rows_kernel, (launch.blocks,),
                table, *launch.index.on_stream(), launch.count,
                table if moves is None else moves,
                DTYPE=DTYPES[dtype], GUARDED=moves is not None, **TILES,
            )  # fmt: skip


def take_columns(B: Sequence[Tensor], K: Sequence[Tensor]) -> list[Tensor]:
    """See :func:`curvadion.ops.take_columns`; in B's order of strides."""
    rows = [b.mT for b in B]
    taken = []
    for u, indices in zip(rows, K, strict=True):
        k, _, columns = u.shape
        r = indices.shape[1]
        tall = _is_tall([u])
        taken.append(u.new_empty(k, columns, r).mT if tall else u.new_empty(k, r, columns))
    K = [indices.contiguous() for indices in K]
    for dtype, launch in _launches([taken, rows]):
        table = launch.table([taken, rows, K], [])
        with on(table.device):
            run(
                take_rows_kernel, (launch.blocks,),
                table, *launch.index.on_stream(), launch.count, DTYPE=DTYPES[dtype], **TILES,
            )  # fmt: skip
    return [u.mT for u in taken]


def put_columns(
    parts: Sequence[Tensor],
    K: Sequence[Tensor],
    sizes: Sequence[int],
    turned: Sequence[bool],
) -> list[Tensor]:
    """See :func:`curvadion.ops.put_columns`.

    Args:
        parts: (k, m, r) by stack, float32, bfloat16 or float16.
        K: (k, r) int64 by stack.
        sizes: n by stack.
        turned: whether columns of the new stack are dense, by stack.
    """
    stacks = []
    for part, n, by_column in zip(parts, sizes, turned, strict=True):
        k, m, _ = part.shape
        stacks.append(part.new_empty(k, n, m) if by_column else part.new_empty(k, m, n).mT)
    rows = [_in_order(part.mT, not columns) for part, columns in zip(parts, turned, strict=True)]
    K = [indices.contiguous() for indices in K]
    for dtype, launch in _launches([stacks, rows]):
        table = launch.table([stacks, rows, K], [])
        with on(table.device):
            run(
                put_rows_kernel, (launch.blocks,),
                table, *launch.index.on_stream(), launch.count,
                DTYPE=DTYPES[dtype], AT_A_TIME=AT_A_TIME, **TILES,
            )  # fmt: skip
    return [stack.mT for stack in stacks]


def _launches(lists: Sequence[Sequence[Tensor]]) -> list[tuple[torch.dtype, Launch]]:
    """A launch for the stacks of each dtype, whose programs share the rows of the first list.

    The lists have stacks of equal dtypes and columns, and of one order.
    """
    check_supported(*lists)
    stacks = []
    for tensors in zip(*lists, strict=True):
        first = tensors[0]
        strides = tuple(stack.stride() for stack in tensors)
        rows = tensors[-1].shape[1]
        stacks.append((first.dtype, tuple(first.shape), _is_tall(tensors), rows, strides))
    device = lists[0][0].device
    return kept(_tiles, device)(tuple(stacks), device)


def _is_tall(stacks: Sequence[Tensor]) -> bool:
    """Whether elements of a column are neighbours in memory, in all of these; else of a row."""
    for tall in (False, True):
        along = 1 if tall else 2
        if all(stack.stride(along) == 1 or stack.shape[along] <= 1 for stack in stacks):
            return tall
    raise Unsupported


@lru_cache(maxsize=256)
def _tiles(stacks: tuple[_Stack, ...], device: torch.device) -> list[tuple[torch.dtype, Launch]]:
    launches = []
    dtypes = dict.fromkeys(dtype for dtype, *_ in stacks)
    for dtype in dtypes:
        members = [i for i, stack in enumerate(stacks) if stack[0] == dtype]
        cells = []
        places = []
        for t, i in enumerate(members):
            _, (k, rows, columns), tall, of_last, strides = stacks[i]
            known = [rows, columns, int(tall), of_last, *itertools.chain(*strides)]
            cells.append(known + [0] * (CELLS.value - len(known)))
            top = torch.arange(0, rows, TALL_ROWS if tall else WIDE_ROWS, device="cpu")
            matrix = torch.arange(k, device="cpu").repeat_interleave(len(top))
            places.append(torch.stack([torch.full_like(matrix, t), matrix, top.repeat(k)]))
        of, matrix, first = torch.cat(places, dim=1).int()
        if len(of):
            index = Index([torch.tensor(cells, device="cpu"), of, matrix, first], device)
            everything = len(dtypes) == 1
            launch = Launch([] if everything else members, len(members), len(of), index)
            launches.append((dtype, launch))
    return launches


@lru_cache(maxsize=256)
def _matrices(rows: tuple[tuple[int, int, bool], ...], device: torch.device) -> Launch:
    """A program a matrix; rows: of each, how many do not count, and whether there is a mask."""
    sizes = torch.tensor(rows, dtype=torch.int64, device="cpu")
    return Launch([], len(rows), len(rows), Index([sizes], device))


def _by_stack(shapes: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Float32 tensors of these shapes, one after another in memory."""
    sizes = [math.prod(shape) for shape in shapes]
    together = torch.empty(sum(sizes), dtype=torch.float32, device=device)
    places = zip(together.split(sizes), shapes, strict=True)
    return [place.view(*shape) for place, shape in places]


def _in_order(stack: Tensor, tall: bool) -> Tensor:
    """The stack with dense columns if it is to be tall, else with dense rows; or a copy."""
    along = 1 if tall else 2
    if stack.stride(along) == 1 or stack.shape[along] <= 1:
        return stack
    return stack.mT.contiguous().mT if tall else stack.contiguous()


def _empty_like(stack: Tensor) -> Tensor:
    """A dense stack whose elements are in the order of this one's."""
    k, rows, columns = stack.shape
    if _is_tall([stack]):
        return stack.new_empty(k, columns, rows).mT
    return stack.new_empty(k, rows, columns)
