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
TILE_N = 64
TILE_K = 16
OPTIONS = {"num_warps": 8, "num_stages": 4}
# Cells of a matrix in the table, which unlike other lists' has a row for each matrix.
CELLS = tl.constexpr(16)


@triton.jit
def _products(
    p, q, r, row, column, rank,
    HAS_M: tl.constexpr, SWAPPED: tl.constexpr, PRECISION: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """P Q^T of a tile, and P R^T or zeros; where SWAPPED, their transposes Q P^T and R P^T.

    Args:
        p: pointer to P, (m, rank) float32, row-major; (n, rank) where SWAPPED.
        q: pointer to Q, (n, rank) float32, row-major; (m, rank) where SWAPPED.
        r: pointer to R, likewise; used only with HAS_M.
        row: (TILE_M, 1), offsets of the tile's rows in the left factor.
        column: (1, TILE_N), offsets of its columns in the right factor, as rows of that.
        rank: columns of the factors.
        HAS_M: whether to compute P R^T.
        SWAPPED: whether the matrix is a transposed view.
        PRECISION: how float32 factors are rounded, as in ``tl.dot``.
        TILE_M: rows of a tile.
        TILE_N: columns of a tile.
        TILE_K: terms of the sums that are added at a time.

    Returns:
        Both (TILE_M, TILE_N) float32.
    """
    update = tl.zeros((TILE_M, TILE_N), tl.float32)
    momentum_update = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(0, rank.to(tl.int32), TILE_K):
        terms = start + tl.arange(0, TILE_K)
        inside = terms < rank
        if SWAPPED:
            # Q P^T and R P^T, which share the right factor.
            right = tl.load(p + column + terms[:, None], inside[:, None], 0.0)
            left = tl.load(q + row + terms[None, :], inside[None, :], 0.0)
            update = tl.dot(left, right, update, input_precision=PRECISION)
            if HAS_M:
                left = tl.load(r + row + terms[None, :], inside[None, :], 0.0)
                momentum_update = tl.dot(left, right, momentum_update, input_precision=PRECISION)
        else:
            # P Q^T and P R^T, which share the left factor.
            left = tl.load(p + row + terms[None, :], inside[None, :], 0.0)
            right = tl.load(q + column + terms[:, None], inside[:, None], 0.0)
            update = tl.dot(left, right, update, input_precision=PRECISION)
            if HAS_M:
                right = tl.load(r + column + terms[:, None], inside[:, None], 0.0)
                momentum_update = tl.dot(left, right, momentum_update, input_precision=PRECISION)
    return update, momentum_update


@triton.jit
def low_rank_kernel(
    table, tiles, moves,
    X_DTYPE: tl.constexpr, M_DTYPE: tl.constexpr, HAS_M: tl.constexpr, SEEDED: tl.constexpr,
    SWAPPED: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr, GUARDED: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Update one tile of one matrix: X <- decay X - step P Q^T, and M <- M - feedback P R^T.

    Args:
        table: (CELLS matrices,) int64, a row of cells for each matrix, as :func:`_cells` makes it.
        tiles: (programs, 2) int32, for each program its matrix and the tile of it.
        moves: () bool; where it is false nothing is written. Not read unless GUARDED.
        X_DTYPE: of weights.
        M_DTYPE: of momenta.
        HAS_M: whether there are momenta.
        SEEDED: whether bfloat16 weights are rounded up or down at random.
        SWAPPED: whether the matrices are transposed views: rows and columns in the table are then
            those of memory, and the products are transposed.
        ALIGNED: whether all addresses, strides and sizes let loads and stores be 128 bits wide.
        PRECISION: how float32 factors are rounded, as in ``tl.dot``.
        GUARDED: whether there is such a flag.
        TILE_M: rows of a tile.
        TILE_N: columns of a tile.
        TILE_K: terms of the sums that are added at a time.
    """
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
    m = tl.load(cells + 5)
    n = tl.load(cells + 6)
    rank = tl.load(cells + 7)
    x_stride = tl.load(cells + 8)
    m_stride = tl.load(cells + 9)
    # The float32 bits in the first half of a cell.
    step = tl.load(cells + 10).to(tl.uint32).to(tl.float32, bitcast=True)
    decay = tl.load(cells + 11).to(tl.uint32).to(tl.float32, bitcast=True)
    feedback = tl.load(cells + 12).to(tl.uint32).to(tl.float32, bitcast=True)
    seed = tl.load(cells + 13).to(tl.uint32)
    if ALIGNED:
        # Loads and stores are then 128 bits wide.
        x = tl.multiple_of(x, 16)
        momentum = tl.multiple_of(momentum, 16)
        p = tl.multiple_of(p, 16)
        q = tl.multiple_of(q, 16)
        r = tl.multiple_of(r, 16)
        n = tl.multiple_of(n, 8)
        rank = tl.multiple_of(rank, 8)
        x_stride = tl.multiple_of(x_stride, 8)
        m_stride = tl.multiple_of(m_stride, 8)
    across = tl.cdiv(n, TILE_N)
    i = (place // across) * TILE_M + tl.arange(0, TILE_M)
    j = (place % across) * TILE_N + tl.arange(0, TILE_N)
    # Rows beyond the matrix read its last row; they are not stored.
    row = tl.minimum(i, m - 1)[:, None] * rank
    column = tl.minimum(j, n - 1)[None, :] * rank
    update, momentum_update = _products(
        p, q, r, row, column, rank, HAS_M, SWAPPED, PRECISION, TILE_M, TILE_N, TILE_K
    )
    inside = (i[:, None] < m) & (j[None, :] < n)
    offsets = i[:, None] * x_stride + j[None, :]
    # X <- decay X - step P Q^T
    weights = decay * tl.load(x + offsets, inside, 0.0).to(tl.float32) - step * update
    if SEEDED:
        tl.store(x + offsets, stochastically(weights, offsets, seed, X_DTYPE), inside)
    else:
        tl.store(x + offsets, to_nearest(weights, X_DTYPE), inside)
    if HAS_M:
        offsets = i[:, None] * m_stride + j[None, :]
        # M <- M - feedback P R^T
        new_momenta = (
            tl.load(momentum + offsets, inside, 0.0).to(tl.float32) - feedback * momentum_update
        )
        tl.store(momentum + offsets, to_nearest(new_momenta, M_DTYPE), inside)


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
    """See :func:`curvadion.ops.low_rank_update_`.

    Args:
        X: weights (m, n), float32, bfloat16 or float16, row-major or transposed views of such.
        P: (m, rank) float32 for each matrix.
        Q: (n, rank) float32 for each matrix.
        step: a number a matrix.
        decay: a number a matrix.
        M: momenta, of X's shapes and orientation, in any of these dtypes; () if there are none.
        R: (n, rank) float32 for each matrix, if there are momenta.
        feedback: a number a matrix, if there are momenta.
        seeds: an integer below 2**32 a matrix for random rounding; None rounds to nearest.
        moves: () bool on the device, or None to write in any case.
    """
    P = [p.contiguous() for p in P]
    Q = [q.contiguous() for q in Q]
    R = [r.contiguous() for r in R]
    check_supported(X, M, P, Q, R)
    if any(factor.dtype != torch.float32 for factor in (*P, *Q, *R)):
        raise Unsupported
    has_m = bool(M)
    if not has_m:
        # What stands in for momenta is neither read nor written.
        M = X
        R = Q
        feedback = [0.0] * len(X)
    groups: dict[tuple[torch.dtype, torch.dtype, bool], list[int]] = {}
    for i, (x, m) in enumerate(zip(X, M, strict=True)):
        if x.numel():
            if _swapped(m) != _swapped(x):
                raise Unsupported
            groups.setdefault((x.dtype, m.dtype, _swapped(x)), []).append(i)
    # Three products of high and low halves are as exact as float32 arithmetic.
    precision = "tf32" if rounds_float32() else "tf32x3"
    device = X[0].device
    for (x_dtype, m_dtype, swapped), members in groups.items():
        aligned = all(
            _aligned(tensor) for i in members for tensor in (X[i], M[i], P[i], Q[i], R[i])
        )
        shapes = tuple((X[i].mT if swapped else X[i]).shape for i in members)
        [tiles] = kept(_tiles, device)(shapes, TILE_M[aligned], device).on_stream()
        columns: list[Column] = []
        for i in members:
            seed = 0 if seeds is None else seeds[i]
            numbers = [step[i], decay[i], feedback[i]]
            columns += _cells([X[i], M[i], P[i], Q[i], R[i]], swapped, numbers, seed)
        table = table_of(columns, device)
        with on(device):
            run(
                low_rank_kernel, (len(tiles),),
                table, tiles, table if moves is None else moves,
                X_DTYPE=DTYPES[x_dtype], M_DTYPE=DTYPES[m_dtype], HAS_M=has_m,
                SEEDED=seeds is not None, SWAPPED=swapped, ALIGNED=aligned,
                PRECISION=precision, GUARDED=moves is not None,
                TILE_M=TILE_M[aligned], TILE_N=TILE_N, TILE_K=TILE_K, **OPTIONS,
            )  # fmt: skip


def _swapped(x: Tensor) -> bool:
    """Whether a matrix is a transposed view.

    Raises:
        Unsupported: if neither its rows nor its columns are dense in memory.
    """
    rows, columns = x.shape
    down, along = x.stride()
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
    """The row of CELLS cells of a matrix in the table.

        cell     0 ... 4             5        6         7       8, 9             10 ... 12   13
        entry    addresses of        rows     columns   rank    row strides      step,       seed
                 X, M, P, Q and R                               of X and M       decay,
                                                                                 feedback

    Numbers are float32, in the first half of their cells. The last two cells are empty.

    Args:
        matrices: X, M, P, Q and R.
        swapped: whether X and M are transposed views; their sizes and strides are then those of
            what they are views of.
        numbers: step, decay and feedback.
        seed: of random rounding.
    """
    x, m, p, *_ = matrices
    if swapped:
        x = x.mT
        m = m.mT
    rank = p.shape[1]
    sizes = [*x.shape, rank, x.stride(0), m.stride(0)]
    return [
        Column([matrix.data_ptr() for matrix in matrices], None, 5),
        Column(sizes, torch.int64, 5),
        *(Column([number], torch.float32, 1) for number in numbers),
        Column([seed], torch.int64, 3),
    ]


@lru_cache(maxsize=64)
def _tiles(shapes: tuple[torch.Size, ...], height: int, device: torch.device) -> Index:
    """For each tile its matrix and its place in it, (tiles, 2) int32.

    Args:
        shapes: of the matrices in memory.
        height: rows of a tile.
        device: of the launch.
    """
    tiles_by_matrix = [triton.cdiv(m, height) * triton.cdiv(n, TILE_N) for m, n in shapes]
    counts = torch.tensor(tiles_by_matrix, device="cpu")
    matrix = torch.repeat_interleave(torch.arange(len(shapes), device="cpu"), counts)
    place = torch.arange(len(matrix), device="cpu") - (counts.cumsum(0) - counts)[matrix]
    return Index([torch.stack([matrix, place], dim=1).int()], device)
