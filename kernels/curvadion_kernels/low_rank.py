"""The low-rank update: X <- decay X - step P Q^T and M <- M - feedback P R^T, in one pass.

Matrices of one orientation and dtype share a launch, whatever their shapes and ranks. A transposed
view X = W^T is updated as W <- decay W - step Q P^T, so memory is always read along its rows.
"""

# Device functions get their types from Triton.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvadion.ops.page import Column
from curvadion.ops.tensors import Unsupported, check_supported
from curvadion_kernels.launch import Index, kept, on, rounds_float32, run, table_of
from curvadion_kernels.numbers import DTYPES, stochastically, to_nearest

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
    table, tiles, moves,
    X_DTYPE: tl.constexpr, M_DTYPE: tl.constexpr, HAS_M: tl.constexpr, SEEDED: tl.constexpr,
    SWAPPED: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr, GUARDED: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Update one tile of one matrix; :func:`_cells` describes the table."""
    if GUARDED:  # noqa: SIM102 - Triton would load in any case
        if tl.load(moves) == 0:
            return
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
    if SEEDED:
        tl.store(x + at, stochastically(weights, at, seed, X_DTYPE), here)
    else:
        tl.store(x + at, to_nearest(weights, X_DTYPE), here)
    if HAS_M:
        at = i[:, None] * m_stride + j[None, :]
        kept = tl.load(momentum + at, here, 0.0).to(tl.float32) - feedback * fed
        tl.store(momentum + at, to_nearest(kept, M_DTYPE), here)


def low_rank_update_(
    X: Sequence[Tensor],
    P: Sequence[Tensor],
    Q: Sequence[Tensor],
    step: Sequence[float],
    decay: Sequence[float],
    M: Sequence[Tensor] = (),
    R: Sequence[Tensor] = (),
    feedback: Sequence[float] = (),
    seeds: Sequence[int] | None = None,
    moves: Tensor | None = None,
) -> None:
    """See :func:`curvadion.ops.low_rank_update_`."""
    P, Q, R = ([t.contiguous() for t in factors] for factors in (P, Q, R))
    check_supported(X, M, P, Q, R)
    if any(t.dtype != torch.float32 for factors in (P, Q, R) for t in factors):
        raise Unsupported
    numbers = step, decay, feedback if M else [0.0] * len(X)
    # What stands in for momenta is neither read nor written.
    lists = [X, M or X, P, Q, R if M else Q]
    groups: dict[tuple[torch.dtype, torch.dtype, bool], list[int]] = {}
    for i, (x, m) in enumerate(zip(*lists[:2], strict=True)):
        if x.numel():
            if _swapped(m) != _swapped(x):
                raise Unsupported
            groups.setdefault((x.dtype, m.dtype, _swapped(x)), []).append(i)
    # Three products of high and low halves are as exact as float32 arithmetic.
    precision, device = "tf32" if rounds_float32() else "tf32x3", X[0].device
    for (x_dtype, m_dtype, swapped), members in groups.items():
        matrices = [[list_[i] for list_ in lists] for i in members]
        aligned = all(_aligned(t) for each in matrices for t in each)
        shapes = tuple((x.mT if swapped else x).shape for x, *_ in matrices)
        [tiles] = kept(_tiles, device)(shapes, TILE_M[aligned], device).on_stream()
        columns: list[Column] = []
        for i, each in zip(members, matrices, strict=True):
            seed = 0 if seeds is None else seeds[i]
            columns += _cells(each, swapped, [values[i] for values in numbers], seed)
        table = table_of(columns, device)
        with on(device):
            run(
                low_rank_kernel, (len(tiles),),
                table, tiles, table if moves is None else moves,
                X_DTYPE=DTYPES[x_dtype], M_DTYPE=DTYPES[m_dtype], HAS_M=bool(M),
                SEEDED=seeds is not None, SWAPPED=swapped, ALIGNED=aligned,
                PRECISION=precision, GUARDED=moves is not None,
                TILE_M=TILE_M[aligned], TILE_N=TILE_N, TILE_K=TILE_K, **OPTIONS,
            )  # fmt: skip


def _swapped(x: Tensor) -> bool:
    """Whether a matrix is a transposed view.

    Raises:
        Unsupported: if neither its rows nor its columns are dense in memory.
    """
    (rows, columns), (down, along) = x.shape, x.stride()
    if along == 1 or columns == 1:
        return False
    if down == 1 or rows == 1:
        return True
    raise Unsupported


def _aligned(x: Tensor) -> bool:
    """Whether all rows begin at multiples of 16 bytes, which 8 elements are for every dtype."""
    return (
        x.data_ptr() % 16 == 0
        and all(stride == 1 or stride % 8 == 0 for stride in x.stride())
        and all(size % 8 == 0 for size in x.shape)
    )


def _cells(
    matrices: Sequence[Tensor], swapped: bool, numbers: Sequence[float], seed: int
) -> list[Column]:
    """The 16 cells of a matrix X in the table.

    These are the addresses of X, M, P, Q and R; rows, columns and rank; the row strides of X and M;
    step, decay and feedback as float32 bits; the seed; two empty cells.
    """
    x, m = (t.mT if swapped else t for t in matrices[:2])
    sizes = [*x.shape, matrices[2].shape[1], x.stride(0), m.stride(0)]
    return [
        Column([t.data_ptr() for t in matrices], None, 5),
        Column(sizes, torch.int64, 5),
        *(Column([number], torch.float32, 1) for number in numbers),
        Column([seed], torch.int64, 3),
    ]


@lru_cache(maxsize=64)
def _tiles(shapes: tuple[torch.Size, ...], height: int, device: torch.device) -> Index:
    """For each tile its matrix and its place in it, int32 (tiles, 2)."""
    each = [triton.cdiv(m, height) * triton.cdiv(n, TILE_N) for m, n in shapes]
    counts = torch.tensor(each, device="cpu")
    matrix = torch.repeat_interleave(torch.arange(len(shapes), device="cpu"), counts)
    place = torch.arange(len(matrix), device="cpu") - (counts.cumsum(0) - counts)[matrix]
    return Index([torch.stack([matrix, place], dim=1).int()], device)
