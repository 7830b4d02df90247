"""What lies between the products of Cholesky QR: a launch before Cholesky, and one after each step.

Columns of a matrix that come after the others have another place in its triangles: their places
are found again where they are needed, so that only the triangles are in this order.
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
    return tl.sqrt(tl.sum(values * values))


@triton.jit
def floors_kernel(
    squares, scale, dependent, error, lengths, floors, batch, stride, r,
    ROUNDOFF: tl.constexpr, LEAST: tl.constexpr, HAS_SCALE: tl.constexpr,
    HAS_ERROR: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Lengths and floors of one matrix' columns; COLUMNS >= r."""
    t = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, COLUMNS)
    here = j < r
    length = tl.sqrt(tl.load(squares + t * batch + j * stride, here, 0.0))
    tl.store(lengths + t * r + j, length, here)
    norm = _norm(length)
    # r is a number of the compiler's if it is 1.
    root = tl.sqrt(tl.full((), r, tl.float64))
    # Until the last lines, in units of sqrt(r).
    floor = tl.zeros((COLUMNS,), tl.float64) + norm * tl.full((), ROUNDOFF, tl.float64)
    if HAS_ERROR:
        replaced = tl.load(dependent + t * r + j, here, 0) != 0
        own = tl.load(error + t * r + j, here, 0.0)
        lost = _norm(tl.where(replaced, 0.0, own) * length)
        leak = lost + root * own * norm
        # Not a maximum, which could drop NaN.
        floor = tl.where(replaced & ~(leak <= floor), leak, floor)
    least = tl.full((), LEAST, tl.float64)
    if HAS_SCALE:
        least = tl.maximum(tl.load(scale + t) * _FALLEN, least)
    holds = tl.max(length) > least
    floor = tl.where(holds, floor * (_MARGIN / root), float("inf"))
    tl.store(floors + t * r + j, floor, here)


@triton.jit
def _last_before(flags, before):
    """How many columns of some come last, of those ``before`` each of others."""
    return tl.sum((before & flags[None, :]).to(tl.int32), axis=1)


@triton.jit
def _place(last, at, before, r, flags):
    """The place of column ``at`` if those that are last come after the others."""
    others = r - tl.sum(flags.to(tl.int32))
    preceding = _last_before(flags, before)
    return tl.where(last, others + preceding, at - preceding)


@triton.jit
def _inverse_length(gram, floors, at, here, r, HAS_FLOOR: tl.constexpr):
    """1 / length of a Gram matrix' columns, or zero without a signal; and the floor or zero."""
    length = tl.sqrt(tl.load(gram + at * (r + 1), here, 0.0))
    floor = tl.zeros_like(length)
    if HAS_FLOOR:
        floor = tl.load(floors + at, here, 0.0)
    sound = length > floor
    return tl.where(sound, 1.0 / tl.where(sound, length, 1.0), 0.0), floor


@triton.jit
def unit_kernel(
    gram, floors, dependent, unit, least, r,
    HAS_FLOOR: tl.constexpr, ORDERED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some rows of one Gram matrix of unit columns; and what must be left of columns."""
    t = tl.program_id(0).to(tl.int64)
    gram += t * r * r
    unit += t * r * r
    floors += t * r
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, COLUMNS)
    of_row, floor = _inverse_length(gram, floors, i, i < r, r, HAS_FLOOR)
    of_column, _ = _inverse_length(gram, floors, j, j < r, r, HAS_FLOOR)
    here = (i[:, None] < r) & (j[None, :] < r)
    values = tl.load(gram + i[:, None] * r + j[None, :], here, 0.0)
    both = (of_row[:, None] > 0.0) & (of_column[None, :] > 0.0)
    values = tl.where(both, values * of_row[:, None] * of_column[None, :], 0.0)
    one = 1.0 + tl.full((), _SHIFT, tl.float64) if HAS_FLOOR else tl.full((), 1.0, tl.float64)
    values = tl.where(i[:, None] == j[None, :], one, values)
    row = i
    column = j
    if ORDERED:
        flags = tl.load(dependent + t * r + j, j < r, 0) != 0
        last = tl.load(dependent + t * r + i, i < r, 0) != 0
        row = _place(last, i, j[None, :] < i[:, None], r, flags)
        preceding = tl.cumsum(flags.to(tl.int32), axis=0) - flags.to(tl.int32)
        others = r - tl.sum(flags.to(tl.int32))
        column = tl.where(flags, others + preceding, j - preceding)
    tl.store(unit + row[:, None] * r + column[None, :], values, here)
    threshold = tl.maximum(floor * of_row, tl.full((), _DEPENDENT, tl.float64))
    threshold = tl.where(of_row > 0.0, threshold, float("inf"))
    tl.store(least + t * r + row, threshold, i < r)


@triton.jit
def drop_columns_kernel(
    lower, least, kept, identity, r, batch, down, along,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of one lower triangle become those of I if too little is left of them."""
    t = tl.program_id(0).to(tl.int64)
    lower += t * batch
    j = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, COLUMNS)
    left = tl.load(lower + j * (down + along), j < r, 1.0)
    # A comparison with NaN is false.
    sound = left > tl.load(least + t * r + j, j < r, 0.0)
    tl.store(kept + t * r + j, sound, j < r)
    here = (j[:, None] < r) & (i[None, :] < r)
    of_identity = tl.where(i[None, :] == j[:, None], 1.0, 0.0)
    tl.store(identity + t * r * r + j[:, None] * r + i[None, :], of_identity, here)
    # The diagonal is read before it is written.
    tl.debug_barrier()
    at = lower + i[None, :] * down + j[:, None] * along
    tl.store(at, of_identity.to(tl.float64), here & ~sound[:, None] & (i[None, :] >= j[:, None]))


@triton.jit
def _parts_of_columns(
    inverse, gram, floors, flags, dependent, column, top, r, within,
    HAS_FLOOR: tl.constexpr, ORDERED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows from ``top`` on of some columns of L^-T, and the factors that make them those of W."""
    i = top + tl.arange(0, ROWS)
    row = i
    if ORDERED:
        last = tl.load(dependent + i, i < r, 0) != 0
        j = tl.arange(0, COLUMNS)
        row = _place(last, i, j[None, :] < i[:, None], r, flags)
    here = (i[:, None] < r) & within[None, :]
    values = tl.load(inverse + row[:, None] * r + column[None, :], here, 0.0)
    factor, _ = _inverse_length(gram, floors, i, i < r, r, HAS_FLOOR)
    return values, factor, i, here


@triton.jit
def factor_kernel(
    inverse, gram, floors, dependent, before, kept, W, longest, replaced, error, r,
    DTYPE: tl.constexpr, ROUNDOFF: tl.constexpr, EPS: tl.constexpr, FIRST: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of W from those of L^-T, in the order of P's; dropped ones are zero.

    In the first pass dependent columns are found; in the second they are given, and errors of the
    others are those before.
    """
    t = tl.program_id(0).to(tl.int64)
    inverse += t * r * r
    gram += t * r * r
    W += t * r * r
    floors += t * r
    dependent += t * r
    all_ = tl.arange(0, COLUMNS)
    lengths = tl.sqrt(tl.load(gram + all_ * (r + 1), all_ < r, 0.0))
    flags = all_ < 0
    j = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    within = j < r
    column = j
    if not FIRST:
        flags = tl.load(dependent + all_, all_ < r, 0) != 0
        last = tl.load(dependent + j, within, 0) != 0
        column = _place(last, j, all_[None, :] < j[:, None], r, flags)
    of_inverse = tl.zeros((WIDTH,), tl.float64)
    of_factor = tl.zeros((WIDTH,), tl.float64)
    for top in range(0, r, ROWS):
        values, factor, i, here = _parts_of_columns(
            inverse, gram, floors, flags, dependent, column, top, r, within,
            FIRST, not FIRST, ROWS, COLUMNS,
        )  # fmt: skip
        of_inverse += tl.sum(values * values, axis=0)
        scaled = values * factor[:, None]
        of_factor += tl.sum(scaled * scaled, axis=0)
    # The inverse also amplifies the Gram matrix's errors, relative to the columns' lengths.
    sound = tl.load(kept + t * r + column, within, 0) != 0
    sound = sound & (tl.sqrt(of_inverse) < 1.0 / _DEPENDENT)
    root = tl.sqrt(tl.full((), r, tl.float64))
    norm = _norm(lengths)
    root_mean_square = norm * (tl.full((), ROUNDOFF, tl.float64) / root)
    own = root_mean_square * tl.sqrt(of_factor)
    unit = tl.full((), 1.0, tl.float64)
    if FIRST:
        # Not a maximum, which could drop NaN.
        own = tl.where(own < EPS, tl.full((), EPS, tl.float64), own)
        sound = sound & (own < 1.0 / _MARGIN)
        tl.store(replaced + t * r + j, ~sound, within)
        # A maximum drops NaN, but a norm does not.
        length = tl.where(norm == norm, tl.max(lengths), norm)
        if tl.program_id(1) == 0:
            tl.store(longest + t, length)
        unit = power_of_two(exponent_of(length)).to(tl.float64)
    else:
        own = tl.where(last, tl.where(sound, own, 0.0), tl.load(before + t * r + j, within, 0.0))
    tl.store(error + t * r + j, own, within)
    for top in range(0, r, ROWS):
        values, factor, i, here = _parts_of_columns(
            inverse, gram, floors, flags, dependent, column, top, r, within,
            FIRST, not FIRST, ROWS, COLUMNS,
        )  # fmt: skip
        values = tl.where(sound[None, :], values * factor[:, None] * unit, 0.0)
        tl.store(W + i[:, None] * r + j[None, :], values.to(DTYPE), here)


@triton.jit
def _mixed(x, FACTOR: tl.constexpr):
    x = (_ADDEND + x * FACTOR) % _MODULUS
    return x ^ (x >> _MIXED_BITS)


@triton.jit
def complete_kernel(
    table, numel, of, chunk, count,
    DTYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk of one stack; table: columns and dependent, then m, r and the first row."""
    block = tl.program_id(0)
    t = tl.load(of + block)
    n = tl.load(numel + t)
    columns = tl.load(table + t).to(tl.pointer_type(DTYPE))
    dependent = tl.load(table + count + t).to(tl.pointer_type(tl.int8))
    m = tl.load(table + 2 * count + t)
    r = tl.load(table + 3 * count + t)
    first = tl.load(table + 4 * count + t)
    start = tl.load(chunk + block).to(tl.int64) * CHUNK
    for part in range(0, CHUNK, BLOCK):
        # Among the rows of all matrices. Divisions of 32 bits are faster than those of 64.
        top = (start + part) // r
        at = ((start + part) % r).to(tl.int32) + tl.arange(0, BLOCK)
        down = at // r.to(tl.int32)
        j = at - down * r.to(tl.int32)
        place = (top % m).to(tl.int32) + down
        matrix = top // m + place // m.to(tl.int32)
        here = start + part + tl.arange(0, BLOCK) < n
        lost = tl.load(dependent + matrix * r + j, here, 0) != 0
        if tl.max(lost.to(tl.int32)) > 0:
            row = first + place % m.to(tl.int32)
            x = (j.to(tl.int64) + 1) * _COLUMN_STEP + (row + 1) * _ROW_STEP
            x = _mixed(x, _FIRST_FACTOR)
            x = _mixed(x, _SECOND_FACTOR)
            x = _mixed(x, _THIRD_FACTOR) % _MODULUS
            half = tl.full((), _MODULUS / 2, tl.float64)
            values = x.to(tl.float64) / half - 1.0
            tl.store(columns + start + part + tl.arange(0, BLOCK), values.to(DTYPE), lost)


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
    with on(squares.device):
        run(
            floors_kernel, (k,),
            squares, _given(scale, squares), _given(dependent if has_error else None, squares),
            _given(error if has_error else None, squares), lengths, floors,
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
    """
    gram = gram.contiguous()
    k, r, _ = gram.shape
    W = torch.empty(k, r, r, dtype=dtype, device=gram.device)
    longest = torch.empty(k, dtype=torch.float64, device=gram.device)
    dependent = torch.empty(k, r, dtype=torch.bool, device=gram.device)
    error = torch.empty(k, r, dtype=torch.float64, device=gram.device)
    _factor(gram, roundoff, W, error, floor=floor.contiguous(), longest=longest, found=dependent)
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
    """
    gram = gram.contiguous()
    W = torch.empty(gram.shape, dtype=dtype, device=gram.device)
    errors = torch.empty(gram.shape[:2], dtype=torch.float64, device=gram.device)
    _factor(gram, roundoff, W, errors, dependent=dependent.contiguous(), before=error.contiguous())
    return W, errors


def _factor(
    gram: Tensor,
    roundoff: float,
    W: Tensor,
    error: Tensor,
    *,
    floor: Tensor | None = None,
    longest: Tensor | None = None,
    found: Tensor | None = None,
    dependent: Tensor | None = None,
    before: Tensor | None = None,
) -> None:
    """W and errors of either pass, of as many matrices at a time as float64 may hold.

    Args:
        gram: (k, r, r) float64.
        roundoff: a number.
        W: written, (k, r, r) float32 or float64.
        error: written, (k, r) float64.
        floor: of the first pass, (k, r) float64.
        longest: written by the first pass, (k,) float64.
        found: dependent columns, written by the first pass, (k, r) bool.
        dependent: columns that come last in the second pass, (k, r) bool.
        before: errors of the first pass, for the second one, (k, r) float64.
    """
    k, r, _ = gram.shape
    _check(gram, r)
    if W.dtype not in _DTYPES:
        raise Unsupported
    count = max(1, float64_chunk(gram.device) // r**2)
    for first in range(0, k, count):
        some = slice(first, first + count)
        given = (_part(t, some) for t in (floor, longest, found, dependent, before))
        _factor_of_some(gram[some], W[some], error[some], *given, roundoff=roundoff)


def _part(tensor: Tensor | None, some: slice) -> Tensor | None:
    return None if tensor is None else tensor[some]


def _factor_of_some(
    gram: Tensor,
    W: Tensor,
    error: Tensor,
    floor: Tensor | None,
    longest: Tensor | None,
    found: Tensor | None,
    dependent: Tensor | None,
    before: Tensor | None,
    *,
    roundoff: float,
) -> None:
    """:func:`_factor` of all matrices at once, with the same arguments."""
    k, r, _ = gram.shape
    first = floor is not None
    columns = triton.next_power_of_2(r)
    rows = max(1, TILE // columns)
    blocks = (k, triton.cdiv(r, rows))
    # D G D in the order of columns, and its lower triangle.
    unit = torch.empty_like(gram)
    least = torch.empty(k, r, dtype=torch.float64, device=gram.device)
    with on(gram.device):
        run(
            unit_kernel, blocks,
            gram, _given(floor, gram), _given(dependent, gram), unit, least, r,
            HAS_FLOOR=first, ORDERED=not first, ROWS=rows, COLUMNS=columns,
        )  # fmt: skip
    # cholesky_ex reports failure in a tensor, without a device-to-host read.
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
    rows = max(1, TILE // max(WIDTH, 1 if first else columns))
    with on(gram.device):
        run(
            factor_kernel, (k, triton.cdiv(r, WIDTH)),
            unit, gram, _given(floor, gram), _given(dependent, gram), _given(before, gram), kept, W,
            _given(longest, gram), _given(found, gram), error, r,
            DTYPE=_DTYPES[W.dtype], ROUNDOFF=roundoff, EPS=torch.finfo(W.dtype).eps, FIRST=first,
            ROWS=rows, WIDTH=WIDTH, COLUMNS=columns,
        )  # fmt: skip


def complete_(
    columns: Sequence[Tensor], dependent: Sequence[Tensor], rows: Sequence[range]
) -> None:
    """See :func:`curvadion.ops.complete_`."""
    if any(p.dtype not in _DTYPES or not p.is_contiguous() for p in columns):
        raise Unsupported
    filled = [i for i, p in enumerate(columns) if p.numel()]
    columns, rows = [columns[i] for i in filled], [rows[i] for i in filled]
    flags = [dependent[i].contiguous() for i in filled]
    lists = [columns, flags]
    for launch, (dtype, _) in launches(lists):
        members = launch.members or range(len(columns))
        chosen = [columns[i] for i in members]
        numbers = [
            [p.shape[1] for p in chosen],
            [p.shape[2] for p in chosen],
            [rows[i].start for i in members],
        ]
        addresses = [[list_[i].data_ptr() for i in members] for list_ in lists]
        table = table_of(
            [Column(each, None, launch.count) for each in addresses]
            + [Column(each, torch.int64, launch.count) for each in numbers],
            columns[0].device,
        )
        numel, of, chunk, *_ = launch.index.on_stream()
        with on(table.device):
            run(
                complete_kernel, (launch.blocks,),
                table, numel, of, chunk, launch.count,
                DTYPE=_DTYPES[dtype], CHUNK=CHUNK, BLOCK=BLOCK,
            )  # fmt: skip


_DTYPES = {torch.float32: DTYPES[torch.float32], torch.float64: tl.float64}


def _given(tensor: Tensor | None, other: Tensor) -> Tensor:
    """The tensor, dense; or what stands in for it and is not read."""
    return other if tensor is None else tensor.contiguous()


def _check(tensor: Tensor, r: int) -> None:
    if tensor.dtype != torch.float64 or not 0 < r <= MOST_COLUMNS or not len(tensor):
        raise Unsupported
