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
from typing import TYPE_CHECKING, NamedTuple

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

# A matrix is wide if elements of a row are neighbours in memory, and tall if elements of a column
# are. For each order: rows of a program, and columns that it reads at a time. The interpreter's
# time depends on the number of operations, not on their size.
WIDE_ROWS = 64 if INTERPRETED else 8
WIDE_COLUMNS = 512
TALL_ROWS = 64
TALL_COLUMNS = 256 if INTERPRETED else 32
TILES = {
    "WIDE_ROWS": WIDE_ROWS,
    "WIDE_COLUMNS": WIDE_COLUMNS,
    "TALL_ROWS": TALL_ROWS,
    "TALL_COLUMNS": TALL_COLUMNS,
}
# Rows whose second moments a program averages at a time.
BLOCK = 1024

# Indices among which a program looks for its rows at a time.
AT_A_TIME = 512 if INTERPRETED else 64

# Globals that kernels read must be constexprs.
_TINY = tl.constexpr(TINY)
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
# Numbers of a stack, a row of ``sizes``:
#
#     0       1          2                 3                  4, 5, 6               7, 8, 9
#     rows    columns    whether it is     rows of its last   strides of matrices,  the same of
#                        tall              tensor             rows and columns of   its second
#                                                             its first tensor      tensor, if any
CELLS = tl.constexpr(10)
# Elements whose number, as a multiple, makes loads and stores of 128 bits possible.
AT_ONCE = tl.constexpr(8)


class _Stack(NamedTuple):
    """What a launch depends on of the tensors of a stack, one of each list."""

    dtype: torch.dtype  # of all of them
    shape: tuple[int, ...]  # of the first one: (k, rows, columns)
    tall: bool  # whether they are tall
    rows_of_last: int  # rows of the last one
    strides: tuple[tuple[int, ...], ...]  # of each: between matrices, rows and columns


# ---------------------------------------------------------------- tiles


@triton.jit
def _aligned(address, batch, stride, length):
    """Whether all lines of a matrix begin at multiples of 16 bytes and have whole such parts.

    A line is what is dense in memory: a row, or a column of a tall matrix.

    Args:
        address: of the first matrix, int64; of several tensors, their bitwise or.
        batch: the stride between matrices, likewise.
        stride: between lines, likewise.
        length: elements of a line.
    """
    return ((address & 15) == 0) & (((batch | stride | length) % AT_ONCE) == 0)


@triton.jit
def _lines(address, matrix, batch, top, stride, dtype: tl.constexpr, TALL: tl.constexpr,
           ALIGNED: tl.constexpr):  # fmt: skip
    """A pointer to the first element of row ``top`` of a matrix.

    Args:
        address: of the tensor's first matrix, int64.
        matrix: the matrix's number, int64.
        batch: the stride between matrices, in elements.
        top: the program's first row.
        stride: between lines: rows, or columns of a tall matrix.
        dtype: of the elements.
        TALL: whether elements of a column are neighbours in memory, else of a row.
        ALIGNED: whether :func:`_aligned` says so, for loads and stores of 128 bits.
    """
    first = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        # The hint is on a value of this branch alone: the compiler takes it for granted everywhere.
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
    """Where the elements of a tile are.

    Args:
        left: the tile's first column.
        stride: between lines: rows, or columns of a tall matrix.
        rows: of the matrix from the tile's first row on.
        columns: of a matrix.
        TALL: whether elements of a column are neighbours in memory, else of a row.
        ALIGNED: whether :func:`_aligned` says so, for loads and stores of 128 bits.
        ROWS: of the tile.
        COLUMNS: of the tile.

    Returns:
        Offsets from the tile's first row in column 0, in elements, and which of them are in the
        matrix, both (ROWS, COLUMNS).
    """
    i = tl.arange(0, ROWS)
    j = left + tl.arange(0, COLUMNS)
    if ALIGNED:
        # Multiples, as the compiler now sees; the numbers are the same.
        stride = stride // AT_ONCE * AT_ONCE
        if TALL:
            rows = rows // AT_ONCE * AT_ONCE
        else:
            columns = columns // AT_ONCE * AT_ONCE
    inside = (i[:, None] < rows) & (j[None, :] < columns)
    if TALL:
        return i[:, None] + j[None, :] * stride, inside
    return i[:, None] * stride + j[None, :], inside


@triton.jit
def _tile_of(sizes, of, matrix, first):
    """What this program works on.

    Args:
        sizes: (count, CELLS) int64, the numbers of each stack; drawn at CELLS.
        of: (blocks,) int32, the stack of each program.
        matrix: (blocks,) int32, its matrix in the stack.
        first: (blocks,) int32, its first row in the matrix.

    Returns:
        Its stack, its matrix in it and its first row in that; rows and columns of a matrix, and
        whether it is tall.
    """
    block = tl.program_id(0)
    stack = tl.load(of + block)
    number = tl.load(matrix + block).to(tl.int64)
    top = tl.load(first + block).to(tl.int64)
    rows = tl.load(sizes + CELLS * stack)
    columns = tl.load(sizes + CELLS * stack + 1).to(tl.int32)
    return stack, number, top, rows, columns, tl.load(sizes + CELLS * stack + 2) != 0


@triton.jit
def _strides(sizes, stack, tensor: tl.constexpr):
    """The strides between matrices, rows and columns of a tensor of the stack, in elements.

    Args:
        sizes: (count, CELLS) int64.
        stack: its number in the launch.
        tensor: 0 for the first, 1 for the second.
    """
    cells = sizes + CELLS * stack + 4 + 3 * tensor
    return tl.load(cells), tl.load(cells + 1), tl.load(cells + 2)


# ---------------------------------------------------------------- sums of rows


@triton.jit
def _sum(
    address, sums, matrix, batch, top, stride, rows, columns,
    DTYPE: tl.constexpr, POWER: tl.constexpr, TALL: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the sums over some rows of one matrix: of |u|, or of u^2.

    Args:
        address: of the tensor's first matrix, int64.
        sums: written, pointer to the stack's (k, rows) float32.
        matrix: the matrix's number, int64.
        batch: the stride between matrices, in elements.
        top: the program's first row.
        stride: between lines: rows, or columns of a tall matrix.
        rows: of a matrix.
        columns: of a matrix.
        DTYPE: of the elements.
        POWER: 1 or 2.
        TALL: whether elements of a column are neighbours in memory, else of a row.
        ALIGNED: whether :func:`_aligned` says so, for loads and stores of 128 bits.
        ROWS: rows of the program.
        COLUMNS: columns that it reads at a time.
    """
    u = _lines(address, matrix, batch, top, stride, DTYPE, TALL, ALIGNED)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for left in range(0, columns, COLUMNS):
        offsets, inside = _offsets(left, stride, rows - top, columns, TALL, ALIGNED, ROWS, COLUMNS)
        values = tl.load(u + offsets, inside, 0.0).to(tl.float32)
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
    """Sums over some rows of one matrix.

    Columns of the table, with a cell a stack: addresses of U, (k, rows, columns), and of the sums,
    (k, rows) float32.

    Args:
        table: int64 cells on the device, in columns of ``count``; listed above.
        sizes: (count, CELLS) int64, the numbers of each stack; drawn at CELLS.
        of: (blocks,) int32, the stack of each program.
        matrix: (blocks,) int32, its matrix in the stack.
        first: (blocks,) int32, its first row in the matrix.
        count: stacks of the launch.
        DTYPE: of all stacks of the launch.
        POWER: 1 for sums of |u|, 2 for those of u^2.
        WIDE_ROWS: rows of a program in wide matrices.
        WIDE_COLUMNS: columns that it reads at a time there.
        TALL_ROWS: rows of a program in tall matrices.
        TALL_COLUMNS: columns that it reads at a time there.
    """
    stack, number, top, rows, columns, tall = _tile_of(sizes, of, matrix, first)
    address = tl.load(table + stack)
    sums = pointer(table, count + stack, tl.float32)
    batch, row, column = _strides(sizes, stack, 0)
    if not tall:
        if _aligned(address, batch, row, columns):
            _sum(address, sums, number, batch, top, row, rows, columns, DTYPE, POWER, False, True,
                 WIDE_ROWS, WIDE_COLUMNS)  # fmt: skip
        else:
            _sum(address, sums, number, batch, top, row, rows, columns, DTYPE, POWER, False, False,
                 WIDE_ROWS, WIDE_COLUMNS)  # fmt: skip
    else:
        if _aligned(address, batch, column, rows):
            _sum(address, sums, number, batch, top, column, rows, columns, DTYPE, POWER, True, True,
                 TALL_ROWS, TALL_COLUMNS)  # fmt: skip
        else:
            _sum(address, sums, number, batch, top, column, rows, columns, DTYPE, POWER, True,
                 False, TALL_ROWS, TALL_COLUMNS)  # fmt: skip


# ---------------------------------------------------------------- second moments


@triton.jit
def second_moments_kernel(
    table, sizes, energies, count, moves, GUARDED: tl.constexpr, BLOCK: tl.constexpr
):
    """All rows of one matrix, in one order, so that timing changes no bit of the sums.

        v <- beta2 v + (1 - beta2) squares / width     in rows of the mask
        factor = 1 / (sqrt(v) + eps)
        energies = sum of squares, sum of squares factor^2

    Columns of the table, with a cell a matrix: addresses of v, squares and factors, (rows,)
    float32, and of masks, (rows,) bool, not read where there is none; then width, beta2 and eps.

    Args:
        table: int64 cells on the device, in columns of ``count``; listed above.
        sizes: (count, 3) int64: rows; how many of the first do not count in energies; whether
            there is a mask.
        energies: written, (count, 2) float32.
        count: matrices of the launch, one a program.
        moves: () bool; where it is false v stays. Not read unless GUARDED.
        GUARDED: whether there is such a flag.
        BLOCK: rows that are averaged at a time.
    """
    matrix = tl.program_id(0)
    rows = tl.load(sizes + 3 * matrix)
    skipped = tl.load(sizes + 3 * matrix + 1)
    masked = tl.load(sizes + 3 * matrix + 2) != 0
    states = pointer(table, matrix, tl.float32)
    squares = pointer(table, count + matrix, tl.float32)
    factors = pointer(table, 2 * count + matrix, tl.float32)
    mask = pointer(table, 3 * count + matrix, tl.int8)
    width = tl.load(numbers(table, 4 * count) + matrix)
    beta2 = tl.load(numbers(table, 5 * count) + matrix)
    eps = tl.load(numbers(table, 6 * count) + matrix)
    writes = True
    if GUARDED:
        writes = tl.load(moves) != 0
    before_scaling = tl.zeros((BLOCK,), tl.float32)
    after_scaling = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, rows.to(tl.int32), BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < rows
        squared = tl.load(squares + places, inside, 0.0)
        last_v = tl.load(states + places, inside, 0.0)
        # v <- beta2 v + (1 - beta2) squares / width, from the nearer end, as torch.lerp
        new_term = tl.div_rn(squared, width)
        from_last = last_v - (last_v - new_term) * (1.0 - beta2)
        v = tl.where(beta2 < 0.5, new_term + beta2 * (last_v - new_term), from_last)
        takes_part = inside & (tl.load(mask + places, inside & masked, 1) != 0)
        v = tl.where(takes_part, v, last_v)
        tl.store(states + places, v, takes_part & writes)
        # factor = 1 / (sqrt(v) + eps)
        factor = tl.div_rn(1.0, tl.maximum(tl.sqrt_rn(v) + eps, _TINY))
        tl.store(factors + places, factor, inside)
        # energies = sum of squares, sum of squares factor^2. A factor's square may overflow where
        # the row is zero, and infinity times zero is NaN.
        counted = tl.where(places >= skipped, squared, 0.0)
        before_scaling += counted
        after_scaling += counted * tl.minimum(factor * factor, _LARGEST)
    tl.store(energies + 2 * matrix, tl.sum(before_scaling))
    tl.store(energies + 2 * matrix + 1, tl.sum(after_scaling))


# ---------------------------------------------------------------- scaling of rows


@triton.jit
def _rescale(
    u_address, out_address, factors, c, matrix, u_batch, out_batch, top, u_stride, out_stride,
    rows, columns, LARGEST: tl.constexpr, DTYPE: tl.constexpr, TALL: tl.constexpr,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out <- c factor u in some rows of one matrix.

    What the dtype cannot hold becomes its largest number.

    Args:
        u_address: of the first matrix of U, int64.
        out_address: of the first new matrix, int64.
        factors: pointer to the stack's (k, rows) float32.
        c: the factor of the matrix.
        matrix: the matrix's number, int64.
        u_batch: the stride between matrices of U, in elements.
        out_batch: between new matrices.
        top: the program's first row.
        u_stride: between lines of U: rows, or columns of a tall matrix.
        out_stride: between new lines.
        rows: of a matrix.
        columns: of a matrix.
        LARGEST: the dtype's largest number.
        DTYPE: of both stacks.
        TALL: whether elements of a column are neighbours in memory, else of a row.
        ALIGNED: whether :func:`_aligned` says so, for loads and stores of 128 bits.
        ROWS: rows of the program.
        COLUMNS: columns that it reads at a time.
    """
    u = _lines(u_address, matrix, u_batch, top, u_stride, DTYPE, TALL, ALIGNED)
    out = _lines(out_address, matrix, out_batch, top, out_stride, DTYPE, TALL, ALIGNED)
    i = top + tl.arange(0, ROWS)
    # Finite, because infinity times zero is NaN.
    scale = tl.minimum(tl.load(factors + matrix * rows + i, i < rows, 0.0) * c, _LARGEST)
    remaining_rows = rows - top
    for left in range(0, columns, COLUMNS):
        at, inside = _offsets(left, u_stride, remaining_rows, columns, TALL, ALIGNED, ROWS, COLUMNS)
        product = tl.load(u + at, inside, 0.0).to(tl.float32) * scale[:, None]
        product = tl.clamp(product, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        to, inside = _offsets(
            left, out_stride, remaining_rows, columns, TALL, ALIGNED, ROWS, COLUMNS
        )
        tl.store(out + to, to_nearest(product, DTYPE), inside)


@triton.jit
def rescaled_rows_kernel(
    table, sizes, of, matrix, first, count,
    DTYPE: tl.constexpr, LARGEST: tl.constexpr, WIDE_ROWS: tl.constexpr,
    WIDE_COLUMNS: tl.constexpr, TALL_ROWS: tl.constexpr, TALL_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some rows of one matrix: out <- c factor U, with c = sqrt(energies[0] / energies[1]).

    Columns of the table, with a cell a stack: addresses of U and of the new stacks,
    (k, rows, columns), of factors, (k, rows) float32, and of energies, (k, 2) float32.

    Args:
        table: int64 cells on the device, in columns of ``count``; listed above.
        sizes: (count, CELLS) int64, the numbers of each stack; drawn at CELLS.
        of: (blocks,) int32, the stack of each program.
        matrix: (blocks,) int32, its matrix in the stack.
        first: (blocks,) int32, its first row in the matrix.
        count: stacks of the launch.
        DTYPE: of all stacks of the launch.
        LARGEST: the dtype's largest number.
        WIDE_ROWS: rows of a program in wide matrices.
        WIDE_COLUMNS: columns that it reads at a time there.
        TALL_ROWS: rows of a program in tall matrices.
        TALL_COLUMNS: columns that it reads at a time there.
    """
    stack, number, top, rows, columns, tall = _tile_of(sizes, of, matrix, first)
    u = tl.load(table + stack)
    out = tl.load(table + count + stack)
    factors = pointer(table, 2 * count + stack, tl.float32)
    energies = pointer(table, 3 * count + stack, tl.float32) + 2 * number
    # c = sqrt(energies[0] / energies[1])
    c = tl.sqrt_rn(tl.div_rn(tl.load(energies), tl.maximum(tl.load(energies + 1), _TINY)))
    u_batch, u_row, u_column = _strides(sizes, stack, 0)
    out_batch, out_row, out_column = _strides(sizes, stack, 1)
    batches = u_batch | out_batch
    if not tall:
        if _aligned(u | out, batches, u_row | out_row, columns):
            _rescale(u, out, factors, c, number, u_batch, out_batch, top, u_row, out_row, rows,
                     columns, LARGEST, DTYPE, False, True, WIDE_ROWS, WIDE_COLUMNS)  # fmt: skip
        else:
            _rescale(u, out, factors, c, number, u_batch, out_batch, top, u_row, out_row, rows,
                     columns, LARGEST, DTYPE, False, False, WIDE_ROWS, WIDE_COLUMNS)  # fmt: skip
    else:
        if _aligned(u | out, batches, u_column | out_column, rows):
            _rescale(u, out, factors, c, number, u_batch, out_batch, top, u_column, out_column,
                     rows, columns, LARGEST, DTYPE, True, True, TALL_ROWS,
                     TALL_COLUMNS)  # fmt: skip
        else:
            _rescale(u, out, factors, c, number, u_batch, out_batch, top, u_column, out_column,
                     rows, columns, LARGEST, DTYPE, True, False, TALL_ROWS,
                     TALL_COLUMNS)  # fmt: skip


@triton.jit
def _scale_some(
    address, chosen, factor, top, stride, rows, columns,
    DTYPE: tl.constexpr, TALL: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """x <- factor x in those of a program's rows where the mask says so.

    Args:
        address: of the matrix, int64.
        chosen: pointer to the mask, (rows,) int8.
        factor: float32.
        top: the program's first row.
        stride: between lines: rows, or columns of a tall matrix.
        rows: of a matrix.
        columns: of a matrix.
        DTYPE: of the elements.
        TALL: whether elements of a column are neighbours in memory, else of a row.
        ALIGNED: whether :func:`_aligned` says so, for loads and stores of 128 bits.
        ROWS: rows of the program.
        COLUMNS: columns that it reads at a time.
    """
    x = _lines(address, 0, 0, top, stride, DTYPE, TALL, ALIGNED)
    i = top + tl.arange(0, ROWS)
    mask = tl.load(chosen + i, i < rows, 0) != 0
    by_row = tl.where(mask, factor, 1.0)
    for left in range(0, columns, COLUMNS):
        offsets, inside = _offsets(left, stride, rows - top, columns, TALL, ALIGNED, ROWS, COLUMNS)
        if not TALL:
            # A row that stays need not be read. In a tall matrix such a mask makes loads narrow.
            inside &= mask[:, None]
        product = tl.load(x + offsets, inside, 0.0).to(tl.float32) * by_row[:, None]
        tl.store(x + offsets, to_nearest(product, DTYPE), inside)


@triton.jit
def scale_rows_kernel(
    table, sizes, of, matrix, first, count, moves,
    DTYPE: tl.constexpr, GUARDED: tl.constexpr, WIDE_ROWS: tl.constexpr,
    WIDE_COLUMNS: tl.constexpr, TALL_ROWS: tl.constexpr, TALL_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some rows of one matrix: X <- factor X in rows of the mask.

    Columns of the table, with a cell a matrix: addresses of X, (rows, columns), and of masks,
    (rows,) bool; then factors.

    Args:
        table: int64 cells on the device, in columns of ``count``; listed above.
        sizes: (count, CELLS) int64, the numbers of each matrix, a stack of one; drawn at CELLS.
        of: (blocks,) int32, the matrix of each program.
        matrix: (blocks,) int32, zeros.
        first: (blocks,) int32, its first row in the matrix.
        count: matrices of the launch.
        moves: () bool; where it is false nothing is written. Not read unless GUARDED.
        DTYPE: of all stacks of the launch.
        GUARDED: whether there is such a flag.
        WIDE_ROWS: rows of a program in wide matrices.
        WIDE_COLUMNS: columns that it reads at a time there.
        TALL_ROWS: rows of a program in tall matrices.
        TALL_COLUMNS: columns that it reads at a time there.
    """
    if GUARDED:  # noqa: SIM102 - Triton would load in any case
        if tl.load(moves) == 0:
            return
    stack, _, top, rows, columns, tall = _tile_of(sizes, of, matrix, first)
    x = tl.load(table + stack)
    chosen = pointer(table, count + stack, tl.int8)
    factor = tl.load(numbers(table, 2 * count) + stack)
    _, row, column = _strides(sizes, stack, 0)
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
    """out[i] <- u[indices[i]] for a program's rows i of out.

    Args:
        u: pointer to the matrix with all rows.
        out: written, pointer to the one with some of them, of the same dtype.
        indices: pointer to (rows,) int64, rows of u.
        top: the program's first row.
        u_stride: between lines of u: rows, or columns of a tall matrix.
        out_stride: between lines of out.
        rows: of out.
        columns: of both.
        TALL: whether elements of a column are neighbours in memory, else of a row.
        ROWS: rows of the program.
        COLUMNS: columns that it reads at a time.
    """
    i = top + tl.arange(0, ROWS)
    chosen = tl.load(indices + i, i < rows, 0)
    for left in range(0, columns, COLUMNS):
        j = (left + tl.arange(0, COLUMNS))[None, :]
        inside = (i < rows)[:, None] & (j < columns)
        if TALL:
            tl.store(out + i[:, None] + j * out_stride,
                     tl.load(u + chosen[:, None] + j * u_stride, inside), inside)  # fmt: skip
        else:
            tl.store(out + i[:, None] * out_stride + j,
                     tl.load(u + chosen[:, None] * u_stride + j, inside), inside)  # fmt: skip


@triton.jit
def take_rows_kernel(
    table, sizes, of, matrix, first, count,
    DTYPE: tl.constexpr, WIDE_ROWS: tl.constexpr, WIDE_COLUMNS: tl.constexpr,
    TALL_ROWS: tl.constexpr, TALL_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some of the rows that are taken from one matrix.

    Columns of the table, with a cell a stack: addresses of new stacks, (k, rows, columns), of U,
    (k, all rows, columns), and of indices, (k, rows) int64.

    Args:
        table: int64 cells on the device, in columns of ``count``; listed above.
        sizes: (count, CELLS) int64, the numbers of each stack; drawn at CELLS.
        of: (blocks,) int32, the stack of each program.
        matrix: (blocks,) int32, its matrix in the stack.
        first: (blocks,) int32, its first row in the matrix.
        count: stacks of the launch.
        DTYPE: of all stacks of the launch.
        WIDE_ROWS: rows of a program in wide matrices.
        WIDE_COLUMNS: columns that it reads at a time there.
        TALL_ROWS: rows of a program in tall matrices.
        TALL_COLUMNS: columns that it reads at a time there.
    """
    stack, number, top, rows, columns, tall = _tile_of(sizes, of, matrix, first)
    out_batch, out_row, out_column = _strides(sizes, stack, 0)
    u_batch, u_row, u_column = _strides(sizes, stack, 1)
    out = pointer(table, stack, DTYPE) + number * out_batch
    u = pointer(table, count + stack, DTYPE) + number * u_batch
    indices = pointer(table, 2 * count + stack, tl.int64) + number * rows
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
    """out[indices[i]] <- part[i], and zeros elsewhere, for a program's rows of out.

    Args:
        part: pointer to the matrix with some of the rows.
        out: written, pointer to the one with all rows, of the same dtype.
        indices: pointer to (taken,) int64, rows of out, which differ.
        taken: rows of part.
        top: the program's first row.
        part_stride: between lines of part: rows, or columns of a tall matrix.
        out_stride: between lines of out.
        rows: of out.
        columns: of both.
        TALL: whether elements of a column are neighbours in memory, else of a row.
        ROWS: rows of the program.
        COLUMNS: columns that it reads at a time.
        AT_A_TIME: indices that are compared with the rows at a time.
    """
    i = top + tl.arange(0, ROWS)
    # The place of each row among the indices, plus one; zero if it is not there.
    place = tl.zeros((ROWS,), tl.int64)
    for start in range(0, taken, AT_A_TIME):
        positions = start + tl.arange(0, AT_A_TIME)
        chosen = tl.load(indices + positions, positions < taken, -1)
        equal = i[:, None] == chosen[None, :]
        place += tl.sum(tl.where(equal, (positions + 1)[None, :].to(tl.int64), 0), axis=1)
    source = place[:, None] - 1
    for left in range(0, columns, COLUMNS):
        j = (left + tl.arange(0, COLUMNS))[None, :]
        inside = (i < rows)[:, None] & (j < columns)
        if TALL:
            values = tl.load(part + source + j * part_stride, inside & (source >= 0), 0.0)
            tl.store(out + i[:, None] + j * out_stride, values, inside)
        else:
            values = tl.load(part + source * part_stride + j, inside & (source >= 0), 0.0)
            tl.store(out + i[:, None] * out_stride + j, values, inside)


@triton.jit
def put_rows_kernel(
    table, sizes, of, matrix, first, count,
    DTYPE: tl.constexpr, AT_A_TIME: tl.constexpr, WIDE_ROWS: tl.constexpr,
    WIDE_COLUMNS: tl.constexpr, TALL_ROWS: tl.constexpr, TALL_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some rows of one new matrix.

    Each program looks for its rows among the indices, so that it also writes the zeros of the
    others, without another launch.

    Columns of the table, with a cell a stack: addresses of new stacks, (k, rows, columns), of
    parts, (k, taken, columns), and of indices, (k, taken) int64.

    Args:
        table: int64 cells on the device, in columns of ``count``; listed above.
        sizes: (count, CELLS) int64, the numbers of each stack; drawn at CELLS.
        of: (blocks,) int32, the stack of each program.
        matrix: (blocks,) int32, its matrix in the stack.
        first: (blocks,) int32, its first row in the matrix.
        count: stacks of the launch.
        DTYPE: of all stacks of the launch.
        AT_A_TIME: indices that are compared with the rows at a time.
        WIDE_ROWS: rows of a program in wide matrices.
        WIDE_COLUMNS: columns that it reads at a time there.
        TALL_ROWS: rows of a program in tall matrices.
        TALL_COLUMNS: columns that it reads at a time there.
    """
    stack, number, top, rows, columns, tall = _tile_of(sizes, of, matrix, first)
    taken = tl.load(sizes + CELLS * stack + 3).to(tl.int32)
    out_batch, out_row, out_column = _strides(sizes, stack, 0)
    part_batch, part_row, part_column = _strides(sizes, stack, 1)
    out = pointer(table, stack, DTYPE) + number * out_batch
    part = pointer(table, count + stack, DTYPE) + number * part_batch
    indices = pointer(table, 2 * count + stack, tl.int64) + number * taken
    # Rows of both tensors are dense, or columns of both are.
    if tall:
        _put(part, out, indices, taken, top, part_column, out_column, rows, columns, True,
             TALL_ROWS, TALL_COLUMNS, AT_A_TIME)  # fmt: skip
    else:
        _put(part, out, indices, taken, top, part_row, out_row, rows, columns, False,
             WIDE_ROWS, WIDE_COLUMNS, AT_A_TIME)  # fmt: skip


# ---------------------------------------------------------------- launches


def row_sums(U: Sequence[Tensor], power: int) -> list[Tensor]:
    """See :func:`curvadion.ops.row_sums`."""
    # Before memory is allocated: this may raise Unsupported.
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
    """See :func:`curvadion.ops.second_moments_`.

    Args:
        squares: (k, rows) float32 by stack, with dense rows.
        stacks: by stack, with float32 states.
        moves: () bool on the device, or None to write in any case.

    Returns:
        Factors, (k, rows), and energies, (k, 2), by stack, float32.
    """
    masks = [stack.mask for stack in stacks if stack.mask is not None]
    states = [v for stack in stacks for v in stack.v]
    vectors = (*squares, *masks, *states)
    if not all(vector.stride(-1) == 1 or vector.shape[-1] <= 1 for vector in vectors):
        raise Unsupported
    if any(vector.dtype != torch.float32 for vector in (*squares, *states)):
        raise Unsupported
    device = squares[0].device
    factors = _by_stack([squared.shape for squared in squares], device)
    energies = torch.empty(len(states), 2, dtype=torch.float32, device=device)
    masks_by_matrix: list[Tensor] = []
    rows = []
    for squared, stack in zip(squares, stacks, strict=True):
        # Without a mask an address is not read.
        masks_by_matrix += stack.v if stack.mask is None else stack.mask.unbind()
        sizes = (squared.shape[1], stack.skipped, stack.mask is not None)
        rows += [sizes] * len(stack.v)
    launch = kept(_matrices, device)(tuple(rows), device)
    squares_by_matrix = [vector for squared in squares for vector in squared.unbind()]
    factors_by_matrix = [vector for factor in factors for vector in factor.unbind()]
    widths = [stack.width for stack in stacks for _ in stack.v]
    beta2 = [number for stack in stacks for number in stack.beta2]
    eps = [number for stack in stacks for number in stack.eps]
    table = launch.table(
        [states, squares_by_matrix, factors_by_matrix, masks_by_matrix], [widths, beta2, eps]
    )
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
    """See :func:`curvadion.ops.rescaled_rows`.

    Args:
        U: stacks (k, rows, columns), float32, bfloat16 or float16.
        factors: (k, rows) float32 by stack, dense.
        energies: (k, 2) float32 by stack, dense.
    """
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
    # Columns of a stack are rows of its transpose, which is tall where the stack's rows are dense.
    rows = [
        _in_order(part.mT, tall=not by_column)
        for part, by_column in zip(parts, turned, strict=True)
    ]
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

    Args:
        lists: one or two, of stacks (k, rows, columns). Those at one position have equal dtypes and
            columns, and are of one order.
    """
    check_supported(*lists)
    stacks = []
    for tensors in zip(*lists, strict=True):
        first = tensors[0]
        stack = _Stack(
            dtype=first.dtype,
            shape=tuple(first.shape),
            tall=_is_tall(tensors),
            rows_of_last=tensors[-1].shape[1],
            strides=tuple(tensor.stride() for tensor in tensors),
        )
        stacks.append(stack)
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
    """:func:`_launches` from all that they depend on, which is the key of the cache.

    The index of a launch has sizes, (stacks, CELLS) int64, and of, matrix and first, (blocks,)
    int32: the stack, the matrix and the first row of each program.
    """
    launches = []
    dtypes = dict.fromkeys(stack.dtype for stack in stacks)
    for dtype in dtypes:
        members = [i for i, stack in enumerate(stacks) if stack.dtype == dtype]
        cells = []
        places = []
        for t, i in enumerate(members):
            stack = stacks[i]
            k, rows, columns = stack.shape
            strides = itertools.chain(*stack.strides)
            numbers_of_stack = [rows, columns, int(stack.tall), stack.rows_of_last, *strides]
            empty = CELLS.value - len(numbers_of_stack)
            cells.append(numbers_of_stack + [0] * empty)
            height = TALL_ROWS if stack.tall else WIDE_ROWS
            top = torch.arange(0, rows, height, device="cpu")
            matrix = torch.arange(k, device="cpu").repeat_interleave(len(top))
            places.append(torch.stack([torch.full_like(matrix, t), matrix, top.repeat(k)]))
        of, matrix, first = torch.cat(places, dim=1).int()
        if len(of):
            index = Index([torch.tensor(cells, device="cpu"), of, matrix, first], device)
            everything = len(dtypes) == 1
            launch = Launch(
                members=[] if everything else members,
                count=len(members),
                blocks=len(of),
                index=index,
            )
            launches.append((dtype, launch))
    return launches


@lru_cache(maxsize=256)
def _matrices(rows: tuple[tuple[int, int, bool], ...], device: torch.device) -> Launch:
    """A launch with a program a matrix.

    Args:
        rows: of each matrix, how many of the first do not count, and whether there is a mask.
        device: of the launch.
    """
    sizes = torch.tensor(rows, dtype=torch.int64, device="cpu")
    index = Index([sizes], device)
    return Launch(members=[], count=len(rows), blocks=len(rows), index=index)


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
    if tall:
        return stack.mT.contiguous().mT
    return stack.contiguous()


def _empty_like(stack: Tensor) -> Tensor:
    """A dense stack whose elements are in the order of this one's."""
    k, rows, columns = stack.shape
    if _is_tall([stack]):
        return stack.new_empty(k, columns, rows).mT
    return stack.new_empty(k, rows, columns)
