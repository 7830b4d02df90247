"""The low-rank update: X <- decay X - step P Q^T and M <- M - feedback P R^T, in one pass.

Matrices of one orientation and dtype share a launch, whatever their shapes and ranks. A transposed
view X = W^T is updated as W <- decay W - step Q P^T, so memory is always read along its rows.
"""

# Device functions get their types from Triton.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvadion.ops.arguments import floats, host_numbers
from curvadion.ops.tensors import Facts, Unsupported, check_shapes, facts_of
from curvadion_kernels.launch import Index, Table, kept, on, rounds_float32
from curvadion_kernels.numbers import CODES, saturated, stochastically, to_nearest

# The tallest tiles that do not spill registers. Two accumulators stay in registers during the loop,
# and narrow loads and stores need more registers for addresses.
TILE_M = {True: 128, False: 64}  # by alignment
TILE_N, TILE_K = 64, 16
OPTIONS = {"num_warps": 8, "num_stages": 4}
# Cells of a matrix in the table.
CELLS = tl.constexpr(16)


@triton.jit
def _products(
    p, q, r, row, column, rank,
    HAS_M: tl.constexpr, SWAPPED: tl.constexpr, PRECISION: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """P Q^T of a tile, and P R^T or zeros; where SWAPPED, their transposes."""
    update = tl.zeros((TILE_M, TILE_N), tl.float32)
    fed = tl.zeros((TILE_M, TILE_N), tl.float32)
    for k in range(0, rank.to(tl.int32), TILE_K):
        c = k + tl.arange(0, TILE_K)
        inside = c < rank
        if SWAPPED:
            right = tl.load(p + column + c[:, None], inside[:, None], 0.0)
            left = tl.load(q + row + c[None, :], inside[None, :], 0.0)
            update = tl.dot(left, right, update, input_precision=PRECISION)
            if HAS_M:
                left = tl.load(r + row + c[None, :], inside[None, :], 0.0)
                fed = tl.dot(left, right, fed, input_precision=PRECISION)
        else:
            left = tl.load(p + row + c[None, :], inside[None, :], 0.0)
            right = tl.load(q + column + c[:, None], inside[:, None], 0.0)
            update = tl.dot(left, right, update, input_precision=PRECISION)
            if HAS_M:
                right = tl.load(r + column + c[:, None], inside[:, None], 0.0)
                fed = tl.dot(left, right, fed, input_precision=PRECISION)
    return update, fed


@triton.jit
def low_rank_kernel(
    table, tiles,
    X_DTYPE: tl.constexpr, M_DTYPE: tl.constexpr, HAS_M: tl.constexpr, SEEDED: tl.constexpr,
    SWAPPED: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Update one tile of one matrix; :func:`_cells` describes the table."""
    tile = tl.program_id(0)
    cells = table + tl.load(tiles + 2 * tile).to(tl.int64) * CELLS
    place = tl.load(tiles + 2 * tile + 1)
    # Not in a helper function: hints on its results would be lost when it returns.
    x = tl.load(cells).to(tl.pointer_type(X_DTYPE))
    momentum = tl.load(cells + 1).to(tl.pointer_type(M_DTYPE))
    p = tl.load(cells + 2).to(tl.pointer_type(tl.float32))
    q = tl.load(cells + 3).to(tl.pointer_type(tl.float32))
    r = tl.load(cells + 4).to(tl.pointer_type(tl.float32))
    m, n, rank = tl.load(cells + 5), tl.load(cells + 6), tl.load(cells + 7)
    x_stride, m_stride = tl.load(cells + 8), tl.load(cells + 9)
    step = tl.load(cells + 10).to(tl.uint32).to(tl.float32, bitcast=True)
    decay = tl.load(cells + 11).to(tl.uint32).to(tl.float32, bitcast=True)
    feedback = tl.load(cells + 12).to(tl.uint32).to(tl.float32, bitcast=True)
    seed = tl.load(cells + 13).to(tl.uint32)
    if ALIGNED:
        # Loads and stores are then 128 bits wide.
        x, momentum = tl.multiple_of(x, 16), tl.multiple_of(momentum, 16)
        p, q, r = tl.multiple_of(p, 16), tl.multiple_of(q, 16), tl.multiple_of(r, 16)
        n, rank = tl.multiple_of(n, 8), tl.multiple_of(rank, 8)
        x_stride, m_stride = tl.multiple_of(x_stride, 8), tl.multiple_of(m_stride, 8)
    across = tl.cdiv(n, TILE_N)
    i = (place // across) * TILE_M + tl.arange(0, TILE_M)
    j = (place % across) * TILE_N + tl.arange(0, TILE_N)
    # Rows beyond the matrix read its last row; they are not stored.
    row = tl.minimum(i, m - 1)[:, None] * rank
    column = tl.minimum(j, n - 1)[None, :] * rank
    update, fed = _products(
        p, q, r, row, column, rank, HAS_M, SWAPPED, PRECISION, TILE_M, TILE_N, TILE_K
    )
    here = (i[:, None] < m) & (j[None, :] < n)
    at = i[:, None] * x_stride + j[None, :]
    weights = decay * tl.load(x + at, here, 0.0).to(tl.float32) - step * update
    weights = saturated(weights, X_DTYPE)
    if SEEDED:
        tl.store(x + at, stochastically(weights, at, seed, X_DTYPE), here)
    else:
        tl.store(x + at, to_nearest(weights, X_DTYPE), here)
    if HAS_M:
        at = i[:, None] * m_stride + j[None, :]
        kept = tl.load(momentum + at, here, 0.0).to(tl.float32) - feedback * fed
        tl.store(momentum + at, to_nearest(saturated(kept, M_DTYPE), M_DTYPE), here)


def low_rank_update_(
    X: Sequence[Tensor],
    P: Sequence[Tensor],
    Q: Sequence[Tensor],
    step: Sequence[float | Tensor],
    decay: Sequence[float | Tensor],
    M: Sequence[Tensor] = (),
    R: Sequence[Tensor] = (),
    feedback: Sequence[float] = (),
    seeds: Sequence[int] | None = None,
) -> None:
    """See :func:`curvadion.ops.low_rank_update_`."""
    fed = floats(feedback, len(X)) if M else floats([0.0] * len(X), len(X))
    numbers = [host_numbers(step, len(X)), host_numbers(decay, len(X)), fed]
    P, Q, R = ([t.contiguous() for t in factors] for factors in (P, Q, R))
    x, m = facts_of(X), facts_of(M) if M else facts_of(X)
    factors = [facts_of(P), facts_of(Q), facts_of(R) if M else facts_of(Q)]
    _check(x, m, factors)
    if M:
        check_shapes(X, M)
    groups: dict[tuple[int, int, bool], list[int]] = {}
    for i in range(len(X)):
        if x.sizes.numel[i]:
            orientation = _swapped(x, i)
            if M and _swapped(m, i) != orientation:
                raise Unsupported
            groups.setdefault((x.codes[i], m.codes[i], orientation), []).append(i)
    # Three products of high and low halves are as exact as float32 arithmetic.
    precision = "tf32" if rounds_float32() else "tf32x3"
    for (x_code, m_code, swapped), members in groups.items():
        aligned = all(_aligned(one, members) for one in (x, m, *factors))
        shapes = tuple(_shape(x, i, swapped) for i in members)
        device = X[0].device
        index, cells = kept(_tiles, device)(shapes, TILE_M[aligned], device)
        [tiles] = index.on_stream()
        table = cells.write(_cells(members, swapped, x, m, factors, numbers, seeds))
        with on(device):
            low_rank_kernel[(len(tiles),)](
                table, tiles, X_DTYPE=CODES[x_code], M_DTYPE=CODES[m_code], HAS_M=bool(M),
                SEEDED=seeds is not None, SWAPPED=swapped, ALIGNED=aligned,
                PRECISION=precision,
                TILE_M=TILE_M[aligned], TILE_N=TILE_N, TILE_K=TILE_K, **OPTIONS,
            )  # fmt: skip


def _check(x: Facts, m: Facts, factors: list[Facts]) -> None:
    if not (x.supported and m.supported and m.device == x.device):
        raise Unsupported
    for one in factors:
        if one.dtypes != {torch.float32} or one.device != x.device:
            raise Unsupported
    every = [one.sizes.shapes for one in (x, *factors)]
    for (x_shape, _), (p, _), (q, _), (r, _) in zip(*every, strict=True):
        if (p[0], q[0], q[1], r) != (*x_shape, p[1], q):
            shapes = [tuple(shape) for shape in (x_shape, p, q, r)]
            raise ValueError(f"X, P, Q and R of shapes {shapes} do not fit together")


def _swapped(facts: Facts, i: int) -> bool:
    """Whether the i-th matrix is a transposed view.

    Raises:
        Unsupported: if neither its rows nor its columns are dense in memory.
    """
    (rows, columns), (down, along) = facts.sizes.shapes[i]
    if along == 1 or columns == 1:
        return False
    if down == 1 or rows == 1:
        return True
    raise Unsupported


def _shape(facts: Facts, i: int, swapped: bool) -> tuple[int, int]:
    rows, columns = facts.sizes.shapes[i][0]
    return (columns, rows) if swapped else (rows, columns)


def _stride(facts: Facts, i: int, swapped: bool) -> int:
    return facts.sizes.shapes[i][1][1 if swapped else 0]


def _aligned(facts: Facts, members: list[int]) -> bool:
    """Whether all rows begin at multiples of 16 bytes, which 8 elements are for every dtype."""
    return all(
        facts.addresses[i] % 16 == 0
        and all(stride == 1 or stride % 8 == 0 for stride in facts.sizes.shapes[i][1])
        and all(size % 8 == 0 for size in facts.sizes.shapes[i][0])
        for i in members
    )


def _cells(
    members: list[int],
    swapped: bool,
    x: Facts,
    m: Facts,
    factors: list[Facts],
    numbers: list[array[float]],
    seeds: Sequence[int] | None,
) -> array[int]:
    """The table, 16 cells per matrix.

    These are the addresses of X, M, P, Q and R; rows, columns and rank; the row strides of X and M;
    step, decay and feedback as float32 bits; the seed; two empty cells.
    """
    cells = array("Q")
    for i in members:
        cells.extend(one.addresses[i] for one in (x, m, *factors))
        cells.extend((*_shape(x, i, swapped), factors[0].sizes.shapes[i][0][1]))
        cells.extend((_stride(x, i, swapped), _stride(m, i, swapped)))
        cells.extend(struct.unpack("I", struct.pack("f", values[i]))[0] for values in numbers)
        cells.extend((0 if seeds is None else seeds[i], 0, 0))
    return cells


@lru_cache(maxsize=64)
def _tiles(
    shapes: tuple[tuple[int, int], ...], height: int, device: torch.device
) -> tuple[Index, Table]:
    """For each tile its matrix and its place in it, int32 (tiles, 2); a table for the matrices."""
    each = [triton.cdiv(m, height) * triton.cdiv(n, TILE_N) for m, n in shapes]
    counts = torch.tensor(each, device="cpu")
    matrix = torch.repeat_interleave(torch.arange(len(shapes), device="cpu"), counts)
    place = torch.arange(len(matrix), device="cpu") - (counts.cumsum(0) - counts)[matrix]
    return Index([torch.stack([matrix, place], dim=1).int()], device), Table(device)
