"""What lies between the products of Cholesky QR: a launch before Cholesky, and one after each step.

:mod:`curvadion.ops.cholesky_qr` has the equations. Each pass makes W from Gram matrices G = P^T P:

    unit_kernel            D G D, where D divides columns by their lengths
    torch                  L with L L^T = D G D
    drop_columns_kernel    columns of L become those of I if too little is left of them
    torch                  L^-1
    factor_kernel          W = D L^-T, zero in dependent columns

In the second pass the columns of P that were replaced come after the others in D G D and its
triangles. Kernels find these places again where they need them, so that nothing else is in the
triangles' order.
"""

# Device functions get their types from Triton.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvadion.ops.cholesky_qr import (
    ADDEND,
    COLUMN_STEP,
    DEPENDENT,
    FACTORS,
    MARGIN,
    MIXED_BITS,
    MODULUS,
    ROW_STEP,
    SHIFT,
    SHORTEST,
)
from curvadion.ops.newton_schulz import FALLEN
from curvadion.ops.page import Column
from curvadion.ops.tensors import Unsupported, float64_chunk
from curvadion_kernels.ahead import exponent_of, power_of_two
from curvadion_kernels.launch import BLOCK, CHUNK, launches, on, run, table_of
from curvadion_kernels.numbers import DTYPES, INTERPRETED

MOST_COLUMNS = 4096
# Elements of a matrix that a program has in registers, and the columns of W of one program. The
# interpreter's time depends on the number of operations, not on their size.
TILE = 65536 if INTERPRETED else 2048
WIDTH = 256 if INTERPRETED else 32

# Globals that kernels read must be constexprs.
_FALLEN = tl.constexpr(FALLEN)
_MARGIN = tl.constexpr(MARGIN)
_DEPENDENT = tl.constexpr(DEPENDENT)
_SHIFT = tl.constexpr(SHIFT)
_MODULUS = tl.constexpr(MODULUS)
_ROW_STEP = tl.constexpr(ROW_STEP)
_COLUMN_STEP = tl.constexpr(COLUMN_STEP)
_ADDEND = tl.constexpr(ADDEND)
_FIRST_FACTOR = tl.constexpr(FACTORS[0])
_SECOND_FACTOR = tl.constexpr(FACTORS[1])
_THIRD_FACTOR = tl.constexpr(FACTORS[2])
_MIXED_BITS = tl.constexpr(MIXED_BITS)


@triton.jit
def _norm(values):
    """The Euclidean norm of a vector."""
    return tl.sqrt(tl.sum(values * values))


@triton.jit
def floors_kernel(
    squares, scale, dependent, error, lengths, floors, batch, stride, r,
    ROUNDOFF: tl.constexpr, LEAST: tl.constexpr, HAS_SCALE: tl.constexpr,
    HAS_ERROR: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Lengths of one matrix's columns, and the floors up to which they hold no signal.

        floor = MARGIN / sqrt(r) max(ROUNDOFF |lengths|, leak)    infinite if no column holds one
        leak  = |errors of the others, times lengths| + sqrt(r) error |lengths|
                in replaced columns, else zero

    Args:
        squares: (k, r) float64, squared lengths, of any strides.
        scale: (k,) float64, the longest column's length before; read only with HAS_SCALE.
        dependent: (k, r) bool, replaced columns of P; read only with HAS_ERROR, as is error.
        error: (k, r) float64, rounding errors' lengths in P's columns.
        lengths: written, (k, r) float64.
        floors: written, (k, r) float64.
        batch: the stride between rows of squares, in elements.
        stride: between its columns.
        r: columns of a matrix.
        ROUNDOFF: the relative error of the columns' entries.
        LEAST: the length below which no column holds a signal.
        HAS_SCALE: whether there is a scale.
        HAS_ERROR: whether the columns are those of B^T P.
        COLUMNS: a power of two, at least r.
    """
    matrix = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    inside = columns < r
    length = tl.sqrt(tl.load(squares + matrix * batch + columns * stride, inside, 0.0))
    tl.store(lengths + matrix * r + columns, length, inside)
    norm = _norm(length)
    # Triton takes an r of 1 for a constant, which has no method to convert it.
    root = tl.sqrt(tl.full((), r, tl.float64))
    # Before the factor MARGIN / sqrt(r), which follows at the end: ROUNDOFF |lengths|.
    floor = tl.zeros((COLUMNS,), tl.float64) + norm * tl.full((), ROUNDOFF, tl.float64)
    if HAS_ERROR:
        replaced = tl.load(dependent + matrix * r + columns, inside, 0) != 0
        own_error = tl.load(error + matrix * r + columns, inside, 0.0)
        # A replaced column is orthogonal to the others only up to their errors.
        lost = _norm(tl.where(replaced, 0.0, own_error) * length)
        leak = lost + root * own_error * norm
        # Not a maximum, which could drop NaN.
        floor = tl.where(replaced & ~(leak <= floor), leak, floor)
    # No column of a matrix holds a signal if none is longer than this.
    least = tl.full((), LEAST, tl.float64)
    if HAS_SCALE:
        least = tl.maximum(tl.load(scale + matrix) * _FALLEN, least)
    holds = tl.max(length) > least
    floor = tl.where(holds, floor * (_MARGIN / root), float("inf"))
    tl.store(floors + matrix * r + columns, floor, inside)


@triton.jit
def _last_before(flags, precedes):
    """How many of the columns that come last precede each of some columns in P, (rows,) int32.

    Args:
        flags: (COLUMNS,) bool: columns that come last.
        precedes: (rows, COLUMNS) bool: which columns precede each of some.
    """
    return tl.sum((precedes & flags[None, :]).to(tl.int32), axis=1)


@triton.jit
def _place(last, column, precedes, r, flags):
    """The places of some columns if those with a flag come last, both kinds in P's order.

    Args:
        last: (rows,) bool: flags of these columns.
        column: (rows,), their numbers.
        precedes: (rows, COLUMNS) bool: which columns precede each of them in P.
        r: columns of P.
        flags: (COLUMNS,) bool, of all columns.
    """
    first_flagged = r - tl.sum(flags.to(tl.int32))
    preceding = _last_before(flags, precedes)
    return tl.where(last, first_flagged + preceding, column - preceding)


@triton.jit
def _inverse_length(gram, floors, columns, inside, r, HAS_FLOOR: tl.constexpr):
    """1 / length of some columns, or zero where they hold no signal; and their floors.

    Args:
        gram: pointer to one Gram matrix, (r, r) float64.
        floors: pointer to (r,) float64, lengths up to which columns hold no signal.
        columns: numbers of the columns.
        inside: which of them are below r.
        r: columns of P.
        HAS_FLOOR: whether there are floors; else they are zeros.

    Returns:
        Both float64, in the shape of the numbers.
    """
    length = tl.sqrt(tl.load(gram + columns * (r + 1), inside, 0.0))
    floor = tl.zeros_like(length)
    if HAS_FLOOR:
        floor = tl.load(floors + columns, inside, 0.0)
    sound = length > floor
    return tl.where(sound, 1.0 / tl.where(sound, length, 1.0), 0.0), floor


@triton.jit
def unit_kernel(
    gram, floors, dependent, unit, least, r,
    HAS_FLOOR: tl.constexpr, ORDERED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some rows of one Gram matrix of unit columns, D G D; and what must be left of columns.

    Args:
        gram: G, (k, r, r) float64.
        floors: (k, r) float64; read only with HAS_FLOOR.
        dependent: (k, r) bool, columns that come last; read only if ORDERED.
        unit: written, D G D, (k, r, r) float64, in the triangles' order.
        least: written, (k, r) float64, in this order: the diagonal of L up to which a column
            depends on those before it.
        r: columns of P.
        HAS_FLOOR: whether this is the first pass, which has floors and shifts the diagonal.
        ORDERED: whether this is the second pass, in which some columns come last.
        ROWS: rows of the program.
        COLUMNS: a power of two, at least r.
    """
    matrix = tl.program_id(0).to(tl.int64)
    gram += matrix * r * r
    unit += matrix * r * r
    floors += matrix * r
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, COLUMNS)
    inverse_of_row, floor = _inverse_length(gram, floors, i, i < r, r, HAS_FLOOR)
    inverse_of_column, _ = _inverse_length(gram, floors, j, j < r, r, HAS_FLOOR)
    inside = (i[:, None] < r) & (j[None, :] < r)
    values = tl.load(gram + i[:, None] * r + j[None, :], inside, 0.0)
    # D G D, and zeros where a column holds no signal, whose product may be NaN.
    sound = (inverse_of_row[:, None] > 0.0) & (inverse_of_column[None, :] > 0.0)
    values = tl.where(sound, values * inverse_of_row[:, None] * inverse_of_column[None, :], 0.0)
    if HAS_FLOOR:
        diagonal = 1.0 + tl.full((), _SHIFT, tl.float64)
    else:
        diagonal = tl.full((), 1.0, tl.float64)
    values = tl.where(i[:, None] == j[None, :], diagonal, values)
    row = i
    column = j
    if ORDERED:
        flags = tl.load(dependent + matrix * r + j, j < r, 0) != 0
        last = tl.load(dependent + matrix * r + i, i < r, 0) != 0
        row = _place(last, i, j[None, :] < i[:, None], r, flags)
        # The places of all columns, of which a running sum counts those that precede.
        preceding = tl.cumsum(flags.to(tl.int32), axis=0) - flags.to(tl.int32)
        first_flagged = r - tl.sum(flags.to(tl.int32))
        column = tl.where(flags, first_flagged + preceding, j - preceding)
    tl.store(unit + row[:, None] * r + column[None, :], values, inside)
    # least = max(floor / length, DEPENDENT), and infinity without a signal.
    threshold = tl.maximum(floor * inverse_of_row, tl.full((), _DEPENDENT, tl.float64))
    threshold = tl.where(inverse_of_row > 0.0, threshold, float("inf"))
    tl.store(least + matrix * r + row, threshold, i < r)


@triton.jit
def drop_columns_kernel(
    lower, least, kept, identity, r, batch, down, along,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of one triangle L become those of I if too little is left of them; and I.

    Args:
        lower: L, (k, r, r) float64, of any strides; changed below the diagonal and on it.
        least: (k, r) float64: what must be left, in the order of L's columns.
        kept: written, (k, r) bool, in this order: which columns are kept.
        identity: written, (k, r, r) float64, row-major.
        r: columns of L.
        batch: the stride between matrices L, in elements.
        down: between rows of L.
        along: between columns of L.
        ROWS: columns of the program.
        COLUMNS: a power of two, at least r.
    """
    matrix = tl.program_id(0).to(tl.int64)
    lower += matrix * batch
    j = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, COLUMNS)
    remainder = tl.load(lower + j * (down + along), j < r, 1.0)
    # A comparison with NaN is false.
    sound = remainder > tl.load(least + matrix * r + j, j < r, 0.0)
    tl.store(kept + matrix * r + j, sound, j < r)
    inside = (j[:, None] < r) & (i[None, :] < r)
    of_identity = tl.where(i[None, :] == j[:, None], 1.0, 0.0)
    tl.store(identity + matrix * r * r + j[:, None] * r + i[None, :], of_identity, inside)
    # The diagonal is read before it is written.
    tl.debug_barrier()
    addresses = lower + i[None, :] * down + j[:, None] * along
    tl.store(
        addresses, of_identity.to(tl.float64), inside & ~sound[:, None] & (i[None, :] >= j[:, None])
    )


@triton.jit
def _parts_of_columns(
    inverse, gram, floors, flags, dependent, column, top, r, within,
    HAS_FLOOR: tl.constexpr, ORDERED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some rows of some columns of L^-T, and the factors D that make them those of W.

    Args:
        inverse: pointer to one L^-T, (r, r) float64, row-major, in the triangles' order.
        gram: pointer to its Gram matrix, (r, r) float64, in P's order.
        floors: pointer to (r,) float64; read only with HAS_FLOOR.
        flags: (COLUMNS,) bool: columns that come last.
        dependent: pointer to (r,) bool, these flags; read only if ORDERED.
        column: (WIDTH,), places of the columns in L^-T.
        top: the first row, in P's order.
        r: columns of P.
        within: (WIDTH,) bool: which of the columns there are.
        HAS_FLOOR: whether there are floors.
        ORDERED: whether some columns come last.
        ROWS: how many rows.
        COLUMNS: a power of two, at least r.

    Returns:
        Elements, (ROWS, WIDTH) float64; factors, (ROWS,) float64; the rows, (ROWS,); and which of
        the elements there are, (ROWS, WIDTH) bool.
    """
    i = top + tl.arange(0, ROWS)
    row = i
    if ORDERED:
        last = tl.load(dependent + i, i < r, 0) != 0
        all_columns = tl.arange(0, COLUMNS)
        row = _place(last, i, all_columns[None, :] < i[:, None], r, flags)
    inside = (i[:, None] < r) & within[None, :]
    values = tl.load(inverse + row[:, None] * r + column[None, :], inside, 0.0)
    factor, _ = _inverse_length(gram, floors, i, i < r, r, HAS_FLOOR)
    return values, factor, i, inside


@triton.jit
def factor_kernel(
    inverse, gram, floors, dependent, before, kept, W, longest, replaced, error, r,
    DTYPE: tl.constexpr, ROUNDOFF: tl.constexpr, EPS: tl.constexpr, FIRST: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of W = D L^-T from those of L^-T, in the order of P's; dropped ones are zero.

    The first pass finds dependent columns, and multiplies W by the power of two 2^e with which
    :func:`curvadion.ops.ahead.exponents` scales the longest column. The second one knows which
    columns were replaced; errors of the others are those of the first.

    Args:
        inverse: L^-T, (k, r, r) float64, row-major, in the triangles' order.
        gram: G, (k, r, r) float64, in P's order.
        floors: (k, r) float64; read only in the first pass.
        dependent: (k, r) bool, columns that come last; read only in the second pass.
        before: (k, r) float64, errors of the first pass; read only in the second.
        kept: (k, r) bool, in the triangles' order: which of them drop_columns_kernel has kept.
        W: written, (k, r, r), DTYPE, row-major.
        longest: written by the first pass, (k,) float64, the longest column's length.
        replaced: written by the first pass, (k, r) bool, dependent columns.
        error: written, (k, r) float64: rounding errors' lengths in columns of P W.
        r: columns of P.
        DTYPE: of W.
        ROUNDOFF: the relative error of P's entries.
        EPS: the least error of a column in the first pass.
        FIRST: whether this is the first pass.
        ROWS: rows that the program holds in registers at a time.
        WIDTH: columns of the program.
        COLUMNS: a power of two, at least r.
    """
    matrix = tl.program_id(0).to(tl.int64)
    inverse += matrix * r * r
    gram += matrix * r * r
    W += matrix * r * r
    floors += matrix * r
    dependent += matrix * r
    all_columns = tl.arange(0, COLUMNS)
    lengths = tl.sqrt(tl.load(gram + all_columns * (r + 1), all_columns < r, 0.0))
    flags = all_columns < 0
    j = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    within = j < r
    column = j
    if not FIRST:
        flags = tl.load(dependent + all_columns, all_columns < r, 0) != 0
        last = tl.load(dependent + j, within, 0) != 0
        column = _place(last, j, all_columns[None, :] < j[:, None], r, flags)
    inverse_squares = tl.zeros((WIDTH,), tl.float64)
    factor_squares = tl.zeros((WIDTH,), tl.float64)
    # Squared lengths of columns of L^-T and of W = D L^-T.
    for top in range(0, r, ROWS):
        values, factor, rows, inside = _parts_of_columns(
            inverse, gram, floors, flags, dependent, column, top, r, within,
            FIRST, not FIRST, ROWS, COLUMNS,
        )  # fmt: skip
        inverse_squares += tl.sum(values * values, axis=0)
        scaled = values * factor[:, None]
        factor_squares += tl.sum(scaled * scaled, axis=0)
    # The inverse also amplifies the Gram matrix's errors, relative to the columns' lengths.
    sound = tl.load(kept + matrix * r + column, within, 0) != 0
    sound = sound & (tl.sqrt(inverse_squares) < 1.0 / _DEPENDENT)
    root = tl.sqrt(tl.full((), r, tl.float64))
    norm = _norm(lengths)
    root_mean_square = norm * (tl.full((), ROUNDOFF, tl.float64) / root)
    # error = ROUNDOFF |lengths| / sqrt(r) |column of W|
    own_error = root_mean_square * tl.sqrt(factor_squares)
    unit = tl.full((), 1.0, tl.float64)
    if FIRST:
        # Not a maximum, which could drop NaN.
        own_error = tl.where(own_error < EPS, tl.full((), EPS, tl.float64), own_error)
        sound = sound & (own_error < 1.0 / _MARGIN)
        tl.store(replaced + matrix * r + j, ~sound, within)
        # A maximum drops NaN, but a norm does not.
        length = tl.where(norm == norm, tl.max(lengths), norm)
        if tl.program_id(1) == 0:
            tl.store(longest + matrix, length)
        # 2^e
        unit = power_of_two(exponent_of(length)).to(tl.float64)
    else:
        first_error = tl.load(before + matrix * r + j, within, 0.0)
        own_error = tl.where(last, tl.where(sound, own_error, 0.0), first_error)
    tl.store(error + matrix * r + j, own_error, within)
    # W = D L^-T, in the first pass times 2^e. Read again: registers may not hold a column.
    for top in range(0, r, ROWS):
        values, factor, rows, inside = _parts_of_columns(
            inverse, gram, floors, flags, dependent, column, top, r, within,
            FIRST, not FIRST, ROWS, COLUMNS,
        )  # fmt: skip
        values = tl.where(sound[None, :], values * factor[:, None] * unit, 0.0)
        tl.store(W + rows[:, None] * r + j[None, :], values.to(DTYPE), inside)


@triton.jit
def _mixed(x, FACTOR: tl.constexpr):
    """A round of the generator of :func:`curvadion.ops.cholesky_qr.completing_directions`."""
    x = (_ADDEND + x * FACTOR) % _MODULUS
    return x ^ (x >> _MIXED_BITS)


@triton.jit
def complete_kernel(
    table, numel, of, chunk, count,
    DTYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk of one stack: dependent columns are replaced by directions from global indices.

    Columns of the table, with a cell a stack: addresses of the stacks, (k, m, r), and of the flags
    of dependent columns, (k, r) bool; then m, r and the global index of the first row, int64.

    Args:
        table: int64 cells on the device, in columns of ``count``; listed above.
        numel: (count,) int64, the number of elements of each stack.
        of: (blocks,) int32, the stack that each block works on.
        chunk: (blocks,) int32, which of the stack's chunks it works on.
        count: stacks of the launch.
        DTYPE: of the stacks.
        CHUNK: elements of a block.
        BLOCK: elements of a step, which writes nothing if no column in it is dependent.
    """
    block = tl.program_id(0)
    stack = tl.load(of + block)
    n = tl.load(numel + stack)
    columns = tl.load(table + stack).to(tl.pointer_type(DTYPE))
    dependent = tl.load(table + count + stack).to(tl.pointer_type(tl.int8))
    m = tl.load(table + 2 * count + stack)
    r = tl.load(table + 3 * count + stack)
    first = tl.load(table + 4 * count + stack)
    start = tl.load(chunk + block).to(tl.int64) * CHUNK
    for part in range(0, CHUNK, BLOCK):
        # Among the rows of all matrices. Divisions of 32 bits are faster than those of 64.
        top = (start + part) // r
        offsets = ((start + part) % r).to(tl.int32) + tl.arange(0, BLOCK)
        rows_below = offsets // r.to(tl.int32)
        j = offsets - rows_below * r.to(tl.int32)
        row_in_matrices = (top % m).to(tl.int32) + rows_below
        matrix = top // m + row_in_matrices // m.to(tl.int32)
        inside = start + part + tl.arange(0, BLOCK) < n
        replaced = tl.load(dependent + matrix * r + j, inside, 0) != 0
        if tl.max(replaced.to(tl.int32)) > 0:
            row = first + row_in_matrices % m.to(tl.int32)
            # x = COLUMN_STEP (column + 1) + ROW_STEP (row + 1), mixed, and scaled to [-1, 1)
            x = (j.to(tl.int64) + 1) * _COLUMN_STEP + (row + 1) * _ROW_STEP
            x = _mixed(x, _FIRST_FACTOR)
            x = _mixed(x, _SECOND_FACTOR)
            x = _mixed(x, _THIRD_FACTOR) % _MODULUS
            half = tl.full((), _MODULUS / 2, tl.float64)
            values = x.to(tl.float64) / half - 1.0
            tl.store(columns + start + part + tl.arange(0, BLOCK), values.to(DTYPE), replaced)


def column_floors(
    squares: Tensor,
    roundoff: float,
    dtype: torch.dtype,
    scale: Tensor | None = None,
    dependent: Tensor | None = None,
    error: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`curvadion.ops.column_floors`.

    Args:
        squares: (k, r) float64, of any strides.
        roundoff: a number.
        dtype: float32 or float64.
        scale: (k,) float64, or None.
        dependent: (k, r) bool, or None.
        error: (k, r) float64, or None.

    Returns:
        Both (k, r) float64.
    """
    k, r = squares.shape
    _check(squares, r)
    lengths = torch.empty(k, r, dtype=torch.float64, device=squares.device)
    floors = torch.empty_like(lengths)
    has_error = dependent is not None and error is not None
    flags = _or_stand_in(dependent if has_error else None, squares)
    errors = _or_stand_in(error if has_error else None, squares)
    with on(squares.device):
        run(
            floors_kernel, (k,),
            squares, _or_stand_in(scale, squares), flags, errors, lengths, floors,
            squares.stride(0), squares.stride(1), r,
            ROUNDOFF=roundoff, LEAST=SHORTEST * torch.finfo(dtype).tiny,
            HAS_SCALE=scale is not None, HAS_ERROR=has_error,
            COLUMNS=triton.next_power_of_2(r),
        )  # fmt: skip
    return lengths, floors


def first_factor(
    gram: Tensor, lengths: Tensor, floor: Tensor, roundoff: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`curvadion.ops.first_factor`.

    Args:
        gram: (k, r, r) float64.
        lengths: (k, r) float64; found again from the Gram matrices.
        floor: (k, r) float64.
        roundoff: a number.
        dtype: float32 or float64.

    Returns:
        The fields of :class:`curvadion.ops.cholesky_qr.FirstFactor`.
    """
    gram = gram.contiguous()
    k, r, _ = gram.shape
    W = torch.empty(k, r, r, dtype=dtype, device=gram.device)
    longest = torch.empty(k, dtype=torch.float64, device=gram.device)
    dependent = torch.empty(k, r, dtype=torch.bool, device=gram.device)
    error = torch.empty(k, r, dtype=torch.float64, device=gram.device)
    _factor(gram, roundoff, W, error, floor=floor.contiguous(), longest=longest, replaced=dependent)
    return W, longest, dependent, error


def second_factor(
    gram: Tensor, dependent: Tensor, error: Tensor, roundoff: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See :func:`curvadion.ops.second_factor`.

    Args:
        gram: (k, r, r) float64.
        dependent: (k, r) bool.
        error: (k, r) float64.
        roundoff: a number.
        dtype: float32 or float64.

    Returns:
        W, (k, r, r), and errors of all columns, (k, r) float64.
    """
    gram = gram.contiguous()
    W = torch.empty(gram.shape, dtype=dtype, device=gram.device)
    errors = torch.empty(gram.shape[:2], dtype=torch.float64, device=gram.device)
    _factor(
        gram, roundoff, W, errors, dependent=dependent.contiguous(), first_error=error.contiguous()
    )
    return W, errors


def _factor(
    gram: Tensor,
    roundoff: float,
    W: Tensor,
    error: Tensor,
    *,
    floor: Tensor | None = None,
    longest: Tensor | None = None,
    replaced: Tensor | None = None,
    dependent: Tensor | None = None,
    first_error: Tensor | None = None,
) -> None:
    """W and errors of either pass, of as many matrices at a time as float64 may hold.

    Args:
        gram: (k, r, r) float64.
        roundoff: the relative error of P's entries.
        W: written, (k, r, r) float32 or float64.
        error: written, (k, r) float64.
        floor: (k, r) float64 in the first pass, else None.
        longest: written by the first pass, (k,) float64, else None.
        replaced: dependent columns, written by the first pass, (k, r) bool, else None.
        dependent: columns that come last in the second pass, (k, r) bool, else None.
        first_error: errors of the first pass, for the second one, (k, r) float64, else None.
    """
    k, r, _ = gram.shape
    _check(gram, r)
    if W.dtype not in _DTYPES:
        raise Unsupported
    count = max(1, float64_chunk(gram.device) // r**2)
    for first in range(0, k, count):
        part = slice(first, first + count)
        _factor_part(
            gram[part],
            roundoff,
            W[part],
            error[part],
            floor=_part(floor, part),
            longest=_part(longest, part),
            replaced=_part(replaced, part),
            dependent=_part(dependent, part),
            first_error=_part(first_error, part),
        )


def _part(tensor: Tensor | None, part: slice) -> Tensor | None:
    return None if tensor is None else tensor[part]


def _factor_part(
    gram: Tensor,
    roundoff: float,
    W: Tensor,
    error: Tensor,
    *,
    floor: Tensor | None,
    longest: Tensor | None,
    replaced: Tensor | None,
    dependent: Tensor | None,
    first_error: Tensor | None,
) -> None:
    """:func:`_factor` of all matrices at once.

    Args:
        gram: (k, r, r) float64.
        roundoff: as there, as are the others.
        W: written, (k, r, r).
        error: written, (k, r).
        floor: (k, r), which says that this is the first pass, or None.
        longest: written, (k,), or None.
        replaced: written, (k, r), or None.
        dependent: (k, r), or None.
        first_error: (k, r), or None.
    """
    k, r, _ = gram.shape
    first = floor is not None
    columns = triton.next_power_of_2(r)
    rows = max(1, TILE // columns)
    blocks = (k, triton.cdiv(r, rows))
    # D G D, in the order of the triangles.
    unit = torch.empty_like(gram)
    least = torch.empty(k, r, dtype=torch.float64, device=gram.device)
    with on(gram.device):
        run(
            unit_kernel, blocks,
            gram, _or_stand_in(floor, gram), _or_stand_in(dependent, gram), unit, least, r,
            HAS_FLOOR=first, ORDERED=not first, ROWS=rows, COLUMNS=columns,
        )  # fmt: skip
    # L L^T = D G D. cholesky_ex reports failure in a tensor, without a device-to-host read.
    lower, _ = torch.linalg.cholesky_ex(unit)
    kept = torch.empty(k, r, dtype=torch.bool, device=gram.device)
    with on(gram.device):
        # The memory of D G D is free, and becomes I.
        run(
            drop_columns_kernel, blocks,
            lower, least, kept, unit, r, *lower.stride(), ROWS=rows, COLUMNS=columns,
        )  # fmt: skip
    # L^-1 by columns, whose transpose the memory of D G D holds by rows.
    inverse = unit.mT
    torch.linalg.solve_triangular(lower, inverse, upper=False, out=inverse)
    # In the second pass a program also compares each row of a tile with all columns.
    widest = WIDTH if first else max(WIDTH, columns)
    rows = max(1, TILE // widest)
    with on(gram.device):
        run(
            factor_kernel, (k, triton.cdiv(r, WIDTH)),
            unit, gram, _or_stand_in(floor, gram), _or_stand_in(dependent, gram),
            _or_stand_in(first_error, gram), kept, W, _or_stand_in(longest, gram),
            _or_stand_in(replaced, gram), error, r,
            DTYPE=_DTYPES[W.dtype], ROUNDOFF=roundoff, EPS=torch.finfo(W.dtype).eps, FIRST=first,
            ROWS=rows, WIDTH=WIDTH, COLUMNS=columns,
        )  # fmt: skip


def complete_(
    columns: Sequence[Tensor], dependent: Sequence[Tensor], rows: Sequence[range]
) -> None:
    """See :func:`curvadion.ops.complete_`.

    Args:
        columns: (k, m_i, r) by stack, float32 or float64, row-major, changed.
        dependent: (k, r) bool by stack.
        rows: m_i of each stack, by their global indices.
    """
    if any(stack.dtype not in _DTYPES or not stack.is_contiguous() for stack in columns):
        raise Unsupported
    filled = [i for i, stack in enumerate(columns) if stack.numel()]
    columns = [columns[i] for i in filled]
    rows = [rows[i] for i in filled]
    flags = [dependent[i].contiguous() for i in filled]
    for launch, (dtype, _) in launches([columns, flags]):
        members = launch.members or range(len(columns))
        count = launch.count
        table = table_of(
            [
                Column([columns[i].data_ptr() for i in members], None, count),
                Column([flags[i].data_ptr() for i in members], None, count),
                Column([columns[i].shape[1] for i in members], torch.int64, count),
                Column([columns[i].shape[2] for i in members], torch.int64, count),
                Column([rows[i].start for i in members], torch.int64, count),
            ],
            columns[0].device,
        )
        numel, of, chunk, *_ = launch.index.on_stream()
        with on(table.device):
            run(
                complete_kernel, (launch.blocks,),
                table, numel, of, chunk, count,
                DTYPE=_DTYPES[dtype], CHUNK=CHUNK, BLOCK=BLOCK,
            )  # fmt: skip


_DTYPES = {torch.float32: DTYPES[torch.float32], torch.float64: tl.float64}


def _or_stand_in(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """The tensor, dense; or, without one, what a kernel gets in its place and does not read."""
    return stand_in if tensor is None else tensor.contiguous()


def _check(tensor: Tensor, r: int) -> None:
    """Raise Unsupported unless kernels take a tensor of k matrices.

    Args:
        tensor: must be float64, with k > 0.
        r: columns of P, at most MOST_COLUMNS.
    """
    if tensor.dtype != torch.float64 or not 0 < r <= MOST_COLUMNS or not len(tensor):
        raise Unsupported
