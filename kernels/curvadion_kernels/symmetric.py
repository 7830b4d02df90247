"""Symmetric products: only tiles on and below the diagonal, each stored a second time mirrored."""

# Device functions get their types from Triton.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvadion.ops.tensors import Unsupported
from curvadion_kernels.launch import on, rounds_float32, run
from curvadion_kernels.numbers import add_product, to_nearest

# As large as registers allow for every dtype and precision. Three stages of them leave room for two
# programs in the shared memory of an H100.
TILE = 128
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILE_K = {2: 64, 4: 32}  # by the size of a number
TILE_K_PRECISE = 16  # multiplied without tensor cores, from registers
OPTIONS = {"num_warps": 8, "num_stages": 3}
# Matrices with fewer rows have so few tiles that those on the diagonal, which are computed whole,
# take what the others save.
SMALLEST = 512
# Rows of tiles whose programs follow one another column by column, so that they find in the cache
# what their neighbours have read.
GROUP = 8


@triton.jit
def _row_of(t):
    """The row of number t of a lower triangle, counted row by row; exact for t below 2**30.

    row = floor((sqrt(8 t + 1) - 1) / 2)    because row (row + 1) / 2 numbers lie above it
    """
    # In float32 the root is wrong by less than one; integers say which row it is.
    row = ((tl.sqrt(8.0 * t.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > t, row - 1, row)
    return tl.where((row + 1) * (row + 2) // 2 <= t, row + 1, row)


@triton.jit
def tile_of(t, rows, GROUP: tl.constexpr):
    """Row and column of tile t of a lower triangle.

    GROUP rows at a time, column by column, and row by row in the triangle at the end of them:

        0                        with GROUP = 2 and 4 rows
        1  2
        3  5  7
        4  6  8  9

    Args:
        t: the number of the tile.
        rows: of the triangle.
        GROUP: rows of a group.
    """
    # A group has the same tiles as its rows would have if they were counted one after another: a
    # rectangle left of the column ``first``, and a triangle from there on.
    first = _row_of(t) // GROUP * GROUP
    height = tl.minimum(rows - first, GROUP)
    place = t - first * (first + 1) // 2
    last = tl.maximum(place - first * height, 0)
    last_row = _row_of(last)
    last_column = last - last_row * (last_row + 1) // 2
    in_rectangle = place < first * height
    row = first + tl.where(in_rectangle, place % height, last_row)
    return row, tl.where(in_rectangle, place // height, first + last_column)


@triton.jit
def load_part(address, inside, WHOLE: tl.constexpr):
    """A part of a matrix, with zeros outside of it.

    Args:
        address: pointers to its elements.
        inside: which of them are in the matrix.
        WHOLE: whether all are, so that the load needs no mask.
    """
    if WHOLE:
        return tl.load(address)
    return tl.load(address, inside, 0.0)


@triton.jit
def store_part(address, values, inside, WHOLE: tl.constexpr):
    """Store what is inside of a matrix.

    Args:
        address: pointers to its elements.
        values: in the matrix's dtype.
        inside: which of them are in the matrix.
        WHOLE: whether all are, so that the store needs no mask.
    """
    if WHOLE:
        tl.store(address, values)
    else:
        tl.store(address, values, inside)


@triton.jit
def symmetric_kernel(
    A, B, out, n, m, rows,
    a_batch, a_row, a_column, b_batch, b_row, b_column, out_batch, out_row, out_column,
    PRECISION: tl.constexpr, WHOLE: tl.constexpr,
    TILE: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile on or below the diagonal of one product A B, and its mirror image above it.

    Args:
        A: (k, n, m), of any strides.
        B: (k, m, n), of any strides and A's dtype; A B is symmetric.
        out: written, (k, n, n), of any strides and A's dtype.
        n: rows of A.
        m: columns of A.
        rows: of tiles, each TILE rows of A.
        a_batch: the stride between matrices A, in elements.
        a_row: between rows of A.
        a_column: between columns of A.
        b_batch: between matrices B.
        b_row: between rows of B.
        b_column: between columns of B.
        out_batch: between products.
        out_row: between their rows.
        out_column: between their columns.
        PRECISION: how float32 factors are rounded, as in ``tl.dot``.
        WHOLE: whether no tile reaches beyond the matrices.
        TILE: rows and columns of a tile.
        TILE_K: terms of the sums that are added at a time.
        GROUP: rows of tiles whose programs follow one another column by column.
    """
    tiles = rows * (rows + 1) // 2
    program = tl.program_id(0)
    batch = (program // tiles).to(tl.int64)
    row, column = tile_of(program % tiles, rows, GROUP)
    i = row * TILE + tl.arange(0, TILE)
    j = column * TILE + tl.arange(0, TILE)
    terms = tl.arange(0, TILE_K)
    wide_i = i.to(tl.int64)
    wide_j = j.to(tl.int64)
    wide_terms = terms.to(tl.int64)
    a = A + batch * a_batch + wide_i[:, None] * a_row + wide_terms[None, :] * a_column
    b = B + batch * b_batch + wide_terms[:, None] * b_row + wide_j[None, :] * b_column
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, m, TILE_K):
        inside = start + terms < m
        left = load_part(a, (i[:, None] < n) & inside[None, :], WHOLE)
        right = load_part(b, inside[:, None] & (j[None, :] < n), WHOLE)
        total = add_product(total, left, right, PRECISION)
        a += TILE_K * a_column
        b += TILE_K * b_row
    tile = to_nearest(total, out.dtype.element_ty)
    # Masks with a diagonal in them would make stores narrow, so the two kinds of tiles part here.
    if row == column:
        tile = tl.where(i[:, None] >= j[None, :], tile, tl.trans(tile))
    out += batch * out_batch
    in_matrix = (i[:, None] < n) & (j[None, :] < n)
    address = out + wide_i[:, None] * out_row + wide_j[None, :] * out_column
    store_part(address, tile, in_matrix, WHOLE)
    if row != column:
        # Transposed in shared memory, so that this store is as wide as the other.
        in_matrix = (j[:, None] < n) & (i[None, :] < n)
        mirror = out + wide_j[:, None] * out_row + wide_i[None, :] * out_column
        store_part(mirror, tl.trans(tile), in_matrix, WHOLE)


def symmetric_product(A: Tensor, B: Tensor, out: Tensor) -> None:
    """See :func:`curvadion.ops.symmetric_product`.

    Args:
        A: (k, n, m), float32, bfloat16 or float16.
        B: (k, m, n), of the same dtype.
        out: written, (k, n, n), of the same dtype; shares no memory with these.
    """
    k, n, m = A.shape
    if A.dtype not in DTYPES:
        raise Unsupported
    rows = triton.cdiv(n, TILE)
    programs = k * rows * (rows + 1) // 2
    if not gains(A, B, out, programs):
        raise Unsupported
    precise = A.dtype == torch.float32 and not rounds_float32()
    tile_k = TILE_K_PRECISE if precise else TILE_K[A.itemsize]
    if programs:
        with on(A.device):
            run(
                symmetric_kernel, (programs,),
                A, B, out, n, m, rows, *A.stride(), *B.stride(), *out.stride(),
                PRECISION="ieee" if precise else "tf32", WHOLE=whole(n, m, tile_k),
                TILE=TILE, TILE_K=tile_k, GROUP=GROUP, **OPTIONS,
            )  # fmt: skip


def whole(n: int, m: int, tile_k: int) -> bool:
    """Whether no tile reaches beyond the (n, n) product of matrices with common side m.

    Its kernel then needs no masks, which take up to an eighth of the time of a product.

    Args:
        n: rows and columns of the product.
        m: terms of its sums.
        tile_k: terms that are added at a time.
    """
    return n % TILE == 0 and m % tile_k == 0


def gains(A: Tensor, B: Tensor, out: Tensor, programs: int) -> bool:
    """Whether the kernel can be faster than torch.bmm.

    That takes large matrices, work for all of the GPU, since what part of it leaves idle is not
    saved, and loads and stores of 128 bits.

    Args:
        A: (k, n, m).
        B: (k, m, n).
        out: (k, n, n).
        programs: of the launch, one a tile.
    """
    return (
        out.shape[-1] >= SMALLEST
        and programs >= processors_of(A.device)
        and all(map(_wide, (A, B, out)))
    )


def _wide(t: Tensor) -> bool:
    """Whether Triton sees that 16 numbers next to each other begin at multiples of 16 bytes."""
    batch, *strides = t.stride()
    if 1 not in strides:
        return False
    along = strides.index(1)
    multiples = batch, strides[1 - along], t.shape[1 + along]
    return t.data_ptr() % 16 == 0 and all(number % 16 == 0 for number in multiples)


@lru_cache
def processors_of(device: torch.device) -> int:
    """The GPU's processors, each of which runs some programs at a time; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
