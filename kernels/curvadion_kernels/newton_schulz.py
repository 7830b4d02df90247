"""Newton-Schulz iterations on Gram matrices, a few launches for all matrices with one side n.

One kernel does all products of an iteration. It computes the tiles on and below the diagonal of

    out_k = alpha_k A_k B_k + beta_k C_k + gamma I

and stores each a second time mirrored, so that results are symmetric to the bit. For the next
launch it stores one number a tile. Whoever reads these adds them in a fixed order, so that replicas
keep equal bits.
"""

# Device functions get their types from Triton.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvadion.ops.newton_schulz import (
    FALLEN,
    LEAST,
    TINY,
    Bound,
    Coefficients,
    Root,
    margin,
    most_of_squares,
)
from curvadion.ops.page import Column
from curvadion.ops.tensors import Unsupported
from curvadion_kernels.launch import cells_to_device, on, run, table_of
from curvadion_kernels.numbers import DTYPES, add_product, to_nearest
from curvadion_kernels.symmetric import (
    GROUP,
    TILE,
    TILE_K,
    load_part,
    processors_of,
    store_part,
    tile_of,
    whole,
)

HALF = (torch.float16, torch.bfloat16)
OPTIONS = {"num_warps": 8, "num_stages": 3}
# Elements of a matrix for one program of the elementwise launch, and how many of them at a time.
CHUNK = 8192
BLOCK = 2048
# Elements that a program clears at a time.
CLEARED = 8192
# Stacks for which the kernel of Gram matrices is not compiled again.
STACKS = 16
# Cells of a stack in the table of Gram matrices.
CELLS = tl.constexpr(8)

# Globals that kernels read must be constexprs.
_TINY = tl.constexpr(TINY)
_LEAST = tl.constexpr(LEAST)
_FALLEN = tl.constexpr(FALLEN)
_ALL = tl.constexpr(tl.PropagateNan.ALL)


# ---------------------------------------------------------------- tiles of symmetric matrices


@triton.jit
def _mirrored(tile, row, column, i, j):
    """A tile with the part below the diagonal above it too, if it is on the diagonal.

    Args:
        tile: (TILE, TILE).
        row: its row of tiles.
        column: its column of tiles.
        i: its rows in the matrix, (TILE,).
        j: its columns in the matrix, (TILE,).
    """
    if row == column:
        tile = tl.where(i[:, None] >= j[None, :], tile, tl.trans(tile))
    return tile


@triton.jit
def _store_tile(out, tile, row, column, i, j, n, WHOLE: tl.constexpr, TILE: tl.constexpr):
    """Store a tile of a row-major (n, n) matrix and, below the diagonal, its mirror image.

    Args:
        out: pointer to the matrix.
        tile: (TILE, TILE), in the matrix's dtype.
        row: its row of tiles.
        column: its column of tiles, at most its row.
        i: its rows in the matrix, (TILE,).
        j: its columns in the matrix, (TILE,).
        n: rows and columns of the matrix.
        WHOLE: whether no tile reaches beyond the matrix.
        TILE: rows and columns of a tile.
    """
    # Offsets in a tile fit into int32, which takes half of the registers.
    inner = tl.arange(0, TILE)
    corner = out + row.to(tl.int64) * TILE * n + column * TILE
    offsets = inner[:, None] * n + inner[None, :]
    store_part(corner + offsets, tile, (i[:, None] < n) & (j[None, :] < n), WHOLE)
    if row != column:
        # Transposed in shared memory, so that this store is as wide as the other.
        corner = out + column.to(tl.int64) * TILE * n + row * TILE
        store_part(corner + offsets, tl.trans(tile), (j[:, None] < n) & (i[None, :] < n), WHOLE)


# ---------------------------------------------------------------- Gram matrices


@triton.jit
def _gram_tile(
    b, pitch, i, j, n, m,
    TURNED: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """A tile of B^T B.

    Args:
        b: pointer to B, (m, n), of a half-precision dtype.
        pitch: the stride between B's rows, or between its columns if TURNED.
        i: the tile's rows in B^T B, (TILE,): columns of B.
        j: the tile's columns in B^T B, (TILE,): columns of B.
        n: columns of B.
        m: rows of B.
        TURNED: whether B is column-major, else row-major.
        WHOLE: whether no tile reaches beyond the matrices.
        TILE: rows and columns of a tile.
        TILE_K: terms of the sums that are added at a time.

    Returns:
        (TILE, TILE) float32.
    """
    terms = tl.arange(0, TILE_K)
    wide_i = i.to(tl.int64)
    wide_j = j.to(tl.int64)
    wide_terms = terms.to(tl.int64)
    if TURNED:
        left_at = b + wide_i[:, None] * pitch + terms[None, :]
        right_at = b + wide_j[None, :] * pitch + terms[:, None]
    else:
        left_at = b + wide_terms[None, :] * pitch + i[:, None]
        right_at = b + wide_terms[:, None] * pitch + j[None, :]
    # B^T B
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, m, TILE_K):
        inside = start + terms < m
        left = load_part(left_at, (i[:, None] < n) & inside[None, :], WHOLE)
        right = load_part(right_at, inside[:, None] & (j[None, :] < n), WHOLE)
        total = add_product(total, left, right, "tf32")
        if TURNED:
            left_at += TILE_K
            right_at += TILE_K
        else:
            left_at += TILE_K * pitch
            right_at += TILE_K * pitch
    return total


@triton.jit
def grams_kernel(
    table, count, n, rows,
    DTYPE: tl.constexpr, STACKS: tl.constexpr, WHOLE: tl.constexpr,
    TILE: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile on or below the diagonal of one Gram matrix, and its mirror image.

    Args:
        table: (CELLS count,) int64, a row of cells for each stack, as :func:`_cells` makes it.
        count: stacks of the launch, at most STACKS.
        n: columns of all B.
        rows: of tiles of a Gram matrix.
        DTYPE: of all B and of the results.
        STACKS: a power of two.
        WHOLE: whether no tile reaches beyond the matrices.
        TILE: rows and columns of a tile.
        TILE_K: terms of the sums that are added at a time.
        GROUP: rows of tiles whose programs follow one another column by column.
    """
    program = tl.program_id(0)
    stacks = tl.arange(0, STACKS)
    # Programs of a stack follow one another: the last stack whose first program is not after this.
    first_programs = tl.load(table + stacks * CELLS, stacks < count, 2**31)
    cells = table + (tl.sum((first_programs <= program).to(tl.int32)) - 1) * CELLS
    tiles = rows * (rows + 1) // 2
    program -= tl.load(cells).to(tl.int32)
    batch = (program // tiles).to(tl.int64)
    row, column = tile_of(program % tiles, rows, GROUP)
    # Not in a helper function: hints on its results would be lost when it returns.
    b = tl.multiple_of(tl.load(cells + 1).to(tl.pointer_type(DTYPE)), 16)
    b += batch * tl.multiple_of(tl.load(cells + 2), 8)
    pitch = tl.multiple_of(tl.load(cells + 3), 8)
    out = tl.multiple_of(tl.load(cells + 5).to(tl.pointer_type(DTYPE)), 16)
    out += batch * tl.multiple_of(tl.load(cells + 6), 8)
    i = row * TILE + tl.arange(0, TILE)
    j = column * TILE + tl.arange(0, TILE)
    # Each order of memory has its own loop, in which strides of one are known, so that loads are
    # 128 bits wide. Only one of them runs: the two share registers and shared memory.
    if tl.load(cells + 7) != 0:
        m = tl.multiple_of(tl.load(cells + 4).to(tl.int32), 8)
        total = _gram_tile(b, pitch, i, j, n, m, True, WHOLE, TILE, TILE_K)
    else:
        m = tl.load(cells + 4).to(tl.int32)
        total = _gram_tile(b, pitch, i, j, n, m, False, WHOLE, TILE, TILE_K)
    tile = _mirrored(to_nearest(total, DTYPE), row, column, i, j)
    _store_tile(out, tile, row, column, i, j, n, WHOLE, TILE)


# ---------------------------------------------------------------- iterations


@triton.jit
def _divided(tile, scale, POWER: tl.constexpr):
    """A tile divided by scale^POWER.

    Args:
        tile: (TILE, TILE) float32.
        scale: float32.
        POWER: 0, 0.5, 1 or 2.
    """
    if POWER > 0:
        inverse = tl.div_rn(1.0, scale)
        if POWER == 0.5:
            inverse = tl.sqrt_rn(inverse)
        tile *= inverse
        if POWER == 2:  # one after the other: the square of 1 / TINY is infinite
            tile *= inverse
    return tile


@triton.jit
def _number_of(tile, row, column, SUMS: tl.constexpr):
    """What is kept of a tile and its mirror image, float32.

    Args:
        tile: (TILE, TILE) float32, zeros outside of the matrix.
        row: its row of tiles.
        column: its column of tiles.
        SUMS: "squares" for their sum; "finite" for zero, or NaN if an element is not finite.
    """
    if SUMS == "squares":
        times = tl.where(row == column, 1.0, 2.0)
        number = times * tl.sum(tile * tile)
    else:
        # Zero times a number is zero, or NaN if it is not finite.
        number = tl.sum(tile * 0.0)
    return number


@triton.jit
def product_kernel(
    A, B, C, out, scales, sums, n, rows, alpha, beta, gamma,
    POWER: tl.constexpr, HAS_C: tl.constexpr, SUMS: tl.constexpr, WHOLE: tl.constexpr,
    TILE: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile on or below the diagonal of one symmetric product, and its mirror image.

        out = alpha s^p A B + beta s^(p - 1) C + gamma I,    s = 1 / scale of the matrix, p = POWER

    Args:
        A: (k, n, n) of a half-precision dtype, row-major, as are B, C and out.
        B: (k, n, n).
        C: (k, n, n); read only with HAS_C.
        out: written, (k, n, n); neither A nor B.
        scales: (k,) float32; read only with POWER > 0.
        sums: written if SUMS is not None, (k, tiles of a matrix) float32: :func:`_number_of`.
        n: rows and columns of the matrices.
        rows: of tiles of a matrix.
        alpha: not zero.
        beta: the factor of C.
        gamma: added to the diagonal with HAS_C.
        POWER: 0, 0.5, 1 or 2.
        HAS_C: whether there is C.
        SUMS: what is kept of each tile: "squares", "finite" or None.
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
    in_matrix = (i[:, None] < n) & (j[None, :] < n)
    matrix = batch * n * n
    scale = 1.0
    if POWER > 0:
        scale = tl.maximum(tl.load(scales + batch), _TINY, _ALL)
    # Offsets in a tile fit into int32, which takes half of the registers.
    inner = tl.arange(0, TILE)
    terms = tl.arange(0, TILE_K)
    a = A + matrix + row.to(tl.int64) * TILE * n + (inner[:, None] * n + terms[None, :])
    b = B + matrix + column * TILE + (terms[:, None] * n + inner[None, :])
    if HAS_C:
        # Sums begin with beta / alpha scale C, so that it needs no registers beside them: times
        # alpha s^p it is beta s^(p - 1) C.
        corner = C + matrix + row.to(tl.int64) * TILE * n + column * TILE
        addend = load_part(corner + (inner[:, None] * n + inner[None, :]), in_matrix, WHOLE)
        total = addend.to(tl.float32) * (beta / alpha * scale)
    else:
        total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, n, TILE_K):
        inside = start + terms < n
        left = load_part(a, (i[:, None] < n) & inside[None, :], WHOLE)
        right = load_part(b, inside[:, None] & (j[None, :] < n), WHOLE)
        total = add_product(total, left, right, "tf32")
        a += TILE_K
        b += TILE_K * n
    # alpha s^p A B + beta s^(p - 1) C
    tile = _divided(total * alpha, scale, POWER)
    if HAS_C:
        # + gamma I
        tile = tl.where(i[:, None] == j[None, :], tile + gamma, tile)
    tile = _mirrored(to_nearest(tile, out.dtype.element_ty), row, column, i, j)
    if SUMS is not None:
        wide_tile = tile.to(tl.float32)
        if not WHOLE:
            wide_tile = tl.where(in_matrix, wide_tile, 0.0)
        number = _number_of(wide_tile, row, column, SUMS)
        tl.store(sums + batch * tiles + program % tiles, number)
    _store_tile(out + matrix, tile, row, column, i, j, n, WHOLE, TILE)


@triton.jit
def first_factor_kernel(
    G, S, trace, squares, bound, n, tiles, root_n, margin, a, b, c,
    PARTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some elements of one matrix W = a I + b G / bound + c (G / bound)^2, over S = (G / tau)^2.

        tau = trace / sqrt(n),    bound = tau |S|^(1/2) margin    so that |G^2|^(1/2) <= bound

    Args:
        G: (k, n, n) of a half-precision dtype, row-major.
        S: (k, n, n), row-major; becomes W.
        trace: (k,) float32, sums of G's diagonals.
        squares: (k, tiles) float32, sums of squares of S by tile.
        bound: written, (k,) float32.
        n: rows and columns of the matrices.
        tiles: of a matrix.
        root_n: sqrt(n).
        margin: above 1, for rounding errors.
        a: the factor of I.
        b: the factor of G / bound.
        c: the factor of its square.
        PARTS: a power of two, at least ``tiles``.
        CHUNK: elements of a program.
        BLOCK: elements that it holds in registers at a time.
    """
    blocks = tl.cdiv(n * n, CHUNK)
    program = tl.program_id(0)
    batch = (program // blocks).to(tl.int64)
    block = program % blocks
    parts = tl.arange(0, PARTS)
    norm = tl.sqrt_rn(tl.sum(tl.load(squares + batch * tiles + parts, parts < tiles, 0.0)))
    # tau = trace / sqrt(n)
    tau = tl.div_rn(tl.maximum(tl.load(trace + batch), _TINY, _ALL), root_n)
    # bound = tau |S|^(1/2) margin
    tighter = tl.maximum(tl.sqrt_rn(norm) * margin, _LEAST, _ALL)
    largest = tl.maximum(tau * tighter, _TINY, _ALL)
    if block == 0:
        tl.store(bound + batch, largest)
    # (G / bound)^2 = S (tau / bound)^2, and bound = tau tighter.
    factor_of_G = tl.div_rn(b, largest)
    factor_of_S = tl.div_rn(c, tighter * tighter)
    G += batch * n * n
    S += batch * n * n
    for start in range(0, CHUNK, BLOCK):
        offsets = block * CHUNK + start + tl.arange(0, BLOCK)
        inside = offsets < n * n
        g = tl.load(G + offsets, inside, 0.0).to(tl.float32)
        s = tl.load(S + offsets, inside, 0.0).to(tl.float32)
        # W = a I + b G / bound + c (G / bound)^2
        w = factor_of_G * g + factor_of_S * s
        # The diagonal of a row-major matrix.
        w = tl.where(offsets % (n + 1) == 0, w + a, w)
        tl.store(S + offsets, to_nearest(w, S.dtype.element_ty), inside)


@triton.jit
def drop_kernel(
    Z, check, parts, elements, bound, exponents, table, moves,
    STATE_DTYPE: tl.constexpr, BOUNDED: tl.constexpr, REMEMBERS: tl.constexpr,
    GUARDED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The verdict on one matrix: Z becomes zeros if it is not finite, or if its length has fallen.

    Columns of the table, with a cell a matrix: addresses of scales; addresses of new ones, or
    zeros; decays, float64.

        scale <- decay scale,    length = sqrt(bound) 2^e,    usable if length > FALLEN scale

    Args:
        Z: (k, n, n), row-major; set to zero where it is not usable.
        check: (k, parts) float32, whose sum is finite exactly if Z is.
        parts: of a matrix's check.
        elements: of a matrix, n^2.
        bound: (k,) float32; read only if BOUNDED, as are exponents and table.
        exponents: (k,), e of each matrix, which was divided by 2^e.
        table: (3 k,) int64 cells.
        moves: () bool; where it is false no scale is written. Not read unless GUARDED.
        STATE_DTYPE: of scales.
        BOUNDED: whether lengths are compared with scales.
        REMEMBERS: whether new scales are written: the larger of decay scale and length.
        GUARDED: whether there is such a flag.
        PARTS: a power of two, at least ``parts``.
        BLOCK: elements that are cleared at a time.
    """
    count = tl.num_programs(0)
    matrix = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, PARTS)
    total = tl.sum(tl.load(check + matrix * parts + places, places < parts, 0.0))
    # A comparison with NaN is false.
    usable = tl.abs(total) < float("inf")
    if BOUNDED:
        cells = table + matrix
        last_scale = tl.load(tl.load(cells).to(tl.pointer_type(STATE_DTYPE))).to(tl.float64)
        decay = tl.load((cells + 2 * count).to(tl.pointer_type(tl.float64)))
        # scale <- decay scale
        scale = (last_scale * decay).to(tl.float32)
        exponent = tl.load(exponents + matrix).to(tl.float32)
        # length = sqrt(bound) 2^e
        length = tl.sqrt_rn(tl.load(bound + matrix)) * tl.exp2(exponent)
        usable = usable & (length > scale * _FALLEN)
        if REMEMBERS:
            moved = True
            if GUARDED:
                moved = tl.load(moves) != 0
            # The new scale may have the address of the last one, which all threads read.
            tl.debug_barrier()
            new_scale = tl.load(cells + count).to(tl.pointer_type(STATE_DTYPE))
            tl.store(new_scale, to_nearest(tl.maximum(scale, length, _ALL), STATE_DTYPE), moved)
    if not usable:
        Z += matrix * elements
        for start in range(0, elements, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            tl.store(Z + offsets, tl.zeros((BLOCK,), Z.dtype.element_ty), offsets < elements)


# ---------------------------------------------------------------- launches


def grams(B: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """See :func:`curvadion.ops.grams`.

    Args:
        B: stacks (k_i, m_i, n) of one half-precision dtype, row-major or column-major; n is a
            multiple of 16.
        out: written, (k_i, n, n) by stack, of this dtype.
    """
    n = B[0].shape[-1]
    dtype = B[0].dtype
    device = B[0].device
    if dtype not in HALF or n % 16 or any(t.dtype != dtype for t in (*B, *out)):
        raise Unsupported
    rows = _cdiv(n, TILE)
    cells = array("Q")
    programs = 0
    count = 0
    # Programs begin in the order of the table: the longest do first, so that all end together.
    for b, gram in sorted(zip(B, out, strict=True), key=lambda pair: -pair[0].shape[1]):
        cells_of_stack = _cells(b, gram, programs)
        if len(b):
            cells.extend(cells_of_stack)
            programs += len(b) * _lower(n)
            count += 1
    if not grams_gain([b.shape for b in B], device):
        raise Unsupported
    if programs:
        with on(device):
            run(
                grams_kernel, (programs,),
                cells_to_device(cells, device), count, n, rows,
                DTYPE=DTYPES[dtype], STACKS=max(STACKS, triton.next_power_of_2(count)),
                WHOLE=all(whole(n, b.shape[1], TILE_K[2]) for b in B if len(b)),
                TILE=TILE, TILE_K=TILE_K[2], GROUP=GROUP, **options(device),
            )  # fmt: skip


def _cells(b: Tensor, out: Tensor, first: int) -> list[int]:
    """The row of CELLS cells of a stack in the table of Gram matrices.

        0    the number of the stack's first program
        1    the address of B
        2    the stride between its matrices
        3    the stride between its rows, or between its columns if it is column-major
        4    its rows m
        5    the address of the result
        6    the stride between its matrices
        7    whether B is column-major

    All strides let loads and stores be 128 bits wide; else Unsupported is raised.

    Args:
        b: the stack B, (k, m, n).
        out: (k, n, n).
        first: the number of its first program.
    """
    _, m, n = b.shape
    batch, of_row, of_column = b.stride()
    turned = of_column != 1
    if turned and of_row != 1:
        raise Unsupported
    pitch = of_column if turned else of_row
    # Masks along m must also cover whole groups of eight elements.
    multiples = (batch, pitch, m if turned else 0, out.stride(0))
    if any(number % 8 for number in multiples):
        raise Unsupported
    if out.stride()[1:] != (n, 1):
        raise Unsupported
    if b.data_ptr() % 16 or out.data_ptr() % 16:
        raise Unsupported
    return [first, b.data_ptr(), batch, pitch, m, out.data_ptr(), out.stride(0), int(turned)]


def inverse_root(
    G: Tensor,
    coefficients: Sequence[Coefficients],
    kind: Bound,
    dtype: torch.dtype | None,
    trace: Tensor | None,
) -> Root:
    """See :func:`curvadion.ops.inverse_root`; G is overwritten.

    Args:
        G: (k, n, n), float16 or bfloat16.
        coefficients: (a, b, c) of each iteration.
        kind: how G's largest eigenvalues are bounded.
        dtype: of products; None or G's.
        trace: (k,), the sums of G's diagonals, or None.
    """
    k, n, _ = G.shape
    if G.dtype not in HALF or dtype not in (None, G.dtype) or not G.numel():
        raise Unsupported
    # Sums begin with b / c G. A single iteration has no product to divide by the bound's root.
    if any(c == 0 for _, _, c in coefficients):
        raise Unsupported
    if len(coefficients) < (1 if kind is Bound.ONE else 2):
        raise Unsupported
    if not gains(G, len(coefficients)):
        raise Unsupported
    G = G.contiguous()
    device = G.device
    check = torch.empty(k, _lower(n), dtype=torch.float32, device=device)
    if kind is Bound.ONE:
        bound = torch.empty(0, dtype=torch.float32, device=device)
        trace = bound
    else:
        if trace is None:
            trace = G.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float32)
        trace = trace.to(torch.float32).contiguous()
        # The tight bounds follow from G^2.
        bound = torch.empty_like(trace) if kind is Bound.TIGHT else trace.clamp(min=TINY)
    first_coefficients, *later_coefficients = coefficients
    with on(device):
        if not later_coefficients:
            Z = torch.empty_like(G)
            _polynomial(G, Z, first_coefficients, check=check)
            return Root(Z, bound, check)
        matrices_at_once = max(1, most_of_squares(device) // (n * n))
        for begin in range(0, k, matrices_at_once):
            part = slice(begin, begin + matrices_at_once)
            W = torch.empty_like(G[part])
            scales = None if kind is Bound.ONE else bound[part]
            if kind is Bound.TIGHT:
                _tight_factor(G[part], W, first_coefficients, trace[part], bound[part])
            else:
                _polynomial(G[part], W, first_coefficients, scales)
            _iterate(G[part], W, later_coefficients, scales, check[part])
            del W  # before the next one is made
    return Root(G, bound, check)


def _tight_factor(
    G: Tensor, W: Tensor, coefficients: Coefficients, trace: Tensor, bound: Tensor
) -> None:
    """W <- a I + b G / bound + c (G / bound)^2 and bound <- |G^2|^(1/2), a little larger.

    Args:
        G: (k, n, n).
        W: of the same shape; holds (G / tau)^2 meanwhile, with tau = trace / sqrt(n). Its elements
            are at most n, and 1 / n on the diagonal if all eigenvalues are equal.
        coefficients: a, b and c.
        trace: (k,) float32.
        bound: (k,) float32.
    """
    k, n, _ = G.shape
    tiles = _lower(n)
    squares = trace.new_empty(k, tiles)
    # S = (G / tau)^2
    _product(G, G, W, alpha=n, scales=trace, power=2, sums="squares", partial=squares)
    run(
        first_factor_kernel, (k * _cdiv(n * n, CHUNK),),
        G, W, trace, squares, bound, n, tiles, math.sqrt(n), margin(G.dtype), *coefficients,
        PARTS=triton.next_power_of_2(tiles), CHUNK=CHUNK, BLOCK=BLOCK,
    )  # fmt: skip


def _polynomial(
    G: Tensor,
    W: Tensor,
    coefficients: Coefficients,
    scales: Tensor | None = None,
    check: Tensor | None = None,
) -> None:
    """W <- a I + b G + c G^2, with G divided by scales.

    Args:
        G: (k, n, n).
        W: of the same shape.
        coefficients: a, b and c.
        scales: (k,) float32, or None for ones.
        check: (k, tiles) float32: becomes zeros, or NaN where W is not finite.
    """
    a, b, c = coefficients
    _product(
        G, G, W, alpha=c, C=G, beta=b, gamma=a, scales=scales, power=2, partial=check, sums="finite"
    )


def _iterate(
    G: Tensor,
    W: Tensor,
    coefficients: Sequence[Coefficients],
    scales: Tensor | None,
    check: Tensor,
) -> None:
    """G <- the product of all W, divided by the roots of scales.

    Args:
        G: (k, n, n), not yet divided.
        W: the first one, of the same shape; overwritten.
        coefficients: those of the iterations after the first.
        scales: (k,) float32, by which G is divided, or None for ones.
        check: (k, tiles) float32: becomes zeros, or NaN where the result is not finite.
    """
    Z = W  # the product so far
    half = torch.empty_like(G)
    for remaining in range(len(coefficients), 0, -1):
        # G <- W G W
        _product(G, W, half, scales=scales if Z is W else None, power=1)
        _product(half, W, G)
        # W' = a I + b G + c G^2
        _polynomial(G, half, coefficients[-remaining])
        # Z <- Z W'
        if remaining == 1:
            _product(Z, half, G, scales=scales, power=0.5, partial=check, sums="finite")
            return
        # The first W is Z, too.
        product = torch.empty_like(G) if Z is W else W
        _product(Z, half, product)
        # half becomes the next W, and the memory of the last Z is free for the next half.
        last_Z = Z
        Z = product
        W = half
        half = last_Z


def _product(
    A: Tensor,
    B: Tensor,
    out: Tensor,
    *,
    alpha: float = 1.0,
    C: Tensor | None = None,
    beta: float = 0.0,
    gamma: float = 0.0,
    scales: Tensor | None = None,
    power: float = 0,
    partial: Tensor | None = None,
    sums: str = "",
) -> None:
    """out <- alpha s^power A B + beta s^(power - 1) C + gamma I, with s = 1 / scales.

    Args:
        A: (k, n, n), row-major.
        B: of the same shape; A B is symmetric.
        out: of the same shape, and neither of these.
        alpha: not zero.
        C: of the same shape, or None; it may be A or B.
        beta: the factor of C.
        gamma: added to the diagonal, if there is C.
        scales: (k,) float32, or None for ones.
        power: 0.5, 1 or 2.
        partial: (k, tiles) float32, or None: a number for each tile of out and its mirror image.
        sums: "squares" for sums of these; "finite" for zero, or NaN if an element is not finite.
    """
    k, n, _ = A.shape
    run(
        product_kernel, (k * _lower(n),),
        A, B, out if C is None else C, out, out if scales is None else scales,
        out if partial is None else partial, n, _cdiv(n, TILE),
        float(alpha), float(beta), float(gamma),
        POWER=0 if scales is None else power, HAS_C=C is not None,
        SUMS=None if partial is None else sums, WHOLE=whole(n, n, TILE_K[2]),
        TILE=TILE, TILE_K=TILE_K[2], GROUP=GROUP, **options(A.device),
    )  # fmt: skip


def drop_unusable_(
    Z: Tensor,
    check: Tensor,
    bound: Tensor | None,
    exponents: Tensor | None,
    scales: Sequence[Tensor],
    decays: Sequence[float],
    new_scales: Sequence[Tensor],
    moves: Tensor | None,
) -> None:
    """See :func:`curvadion.ops.drop_unusable_`.

    Args:
        Z: (k, n, n), row-major.
        check: (k,) or (k, parts), float32.
        bound: (k,) float32, or None.
        exponents: (k,), or None.
        scales: k tensors of shape (), of one dtype: float32, bfloat16 or float16.
        decays: k numbers.
        new_scales: k tensors of shape () and of this dtype, or none.
        moves: () bool on the device, or None.
    """
    k = len(Z)
    if not Z.is_contiguous() or check.dtype != torch.float32 or not k:
        raise Unsupported
    check = check.contiguous().view(k, -1)
    bounded = bound is not None and exponents is not None
    table = check
    state = torch.float32
    if bound is not None and exponents is not None:
        state = scales[0].dtype
        if bound.dtype != torch.float32 or state not in DTYPES:
            raise Unsupported
        if any(t.dtype != state for t in (*scales, *new_scales)):
            raise Unsupported
        table = _scale_table(scales, decays, new_scales)
        bound = bound.contiguous()
        exponents = exponents.contiguous()
    with on(Z.device):
        run(
            drop_kernel, (k,),
            Z, check, check.shape[1], Z[0].numel(), check if bound is None else bound,
            check if exponents is None else exponents, table, check if moves is None else moves,
            STATE_DTYPE=DTYPES[state], BOUNDED=bounded, REMEMBERS=bool(bounded and new_scales),
            GUARDED=moves is not None, PARTS=triton.next_power_of_2(check.shape[1]),
            BLOCK=CLEARED, num_warps=8,
        )  # fmt: skip


def _scale_table(
    scales: Sequence[Tensor], decays: Sequence[float], new_scales: Sequence[Tensor]
) -> Tensor:
    """A table with a column each for scales, new scales or none, and float64 decays.

    Args:
        scales: k tensors of shape ().
        decays: k numbers.
        new_scales: k tensors of shape (), or none.
    """
    count = len(scales)
    columns = [
        Column([t.data_ptr() for t in scales], None, count),
        Column([t.data_ptr() for t in new_scales], None, count),
        Column(decays, torch.float64, count),
    ]
    return table_of(columns, scales[0].device)


# ---------------------------------------------------------------- what a launch is worth

# Of a product by torch.bmm, on one processor of an H100 or H200: flop/s. All 132 processors of an
# H200 make 550 TFLOP/s of 12 matrices of 768 rows, 610 of 48, and 740 of 24 of 2048 rows.
RATE = 600e12 / 132
# A tile of these kernels takes this many times as long as one of torch.bmm at this rate: on an H200
# 1.2 to 1.5 times with n = 768, and as long with n = 2048.
SLOWER = 1.4
# Seconds that a GPU loses between two small launches, and bytes/s of elementwise ones, which on an
# H200 are 2.7 to 3.6 TB/s where a copy reaches 4.1.
LAUNCH = 2e-6
BANDWIDTH = 3e12
# Elementwise launches around torch.bmm in one iteration, and bytes they move for an element.
ELEMENTWISE = 7
BYTES = 5


def grams_gain(shapes: Sequence[Sequence[int]], device: torch.device) -> bool:
    """Whether one launch for stacks (k_i, m_i, n) can be faster than torch.bmm for each.

    With t rows of tiles and P processors, torch.bmm takes

        sum over i of k_i t^2 / P seconds(m_i) + LAUNCH,

    because it divides sums, too, where there are too few tiles to keep all processors busy. This
    kernel works in waves of P tiles, and waits for the copy of its table.

    Args:
        shapes: (k_i, m_i, n) of each stack.
        device: of the launch.
    """
    processors = max(1, processors_of(device))
    n = shapes[0][-1]
    all_tiles = _cdiv(n, TILE) ** 2
    plain = sum(k * all_tiles / processors * _seconds(m) + LAUNCH for k, m, _ in shapes)
    # Tiles have different depths m: the launch ends at best when all processors do.
    programs = sum(k * _lower(n) for k, _, _ in shapes)
    work = sum(k * _lower(n) * _seconds(m) for k, m, _ in shapes)
    waves = _cdiv(programs, processors)
    longest = max(_seconds(m) for _, m, _ in shapes)
    together = SLOWER * max(waves * work / max(1, programs), longest) + 2 * LAUNCH
    return together < plain


def gains(G: Tensor, iterations: int) -> bool:
    """Whether the chain of launches can be faster than torch.bmm and elementwise operations.

    With t rows of tiles, P processors and 4 iterations - 3 products, these take

        products ceil(k t^2 / P) seconds(n) + ELEMENTWISE iterations (LAUNCH + bytes / BANDWIDTH),

    and the chain takes SLOWER products ceil(k t (t + 1) / 2 / P) seconds(n).

    Args:
        G: (k, n, n).
        iterations: how many there are.
    """
    k, n, _ = G.shape
    # Loads and stores are 128 bits wide.
    if n % 16 or G.data_ptr() % 16:
        return False
    processors = max(1, processors_of(G.device))
    products = 4 * iterations - 3
    waves = _cdiv(k * _cdiv(n, TILE) ** 2, processors)
    around = ELEMENTWISE * iterations * (LAUNCH + BYTES * G.numel() / BANDWIDTH)
    chain = SLOWER * products * _cdiv(k * _lower(n), processors) * _seconds(n)
    return chain < products * waves * _seconds(n) + around


def _seconds(depth: int) -> float:
    """What a processor needs for one tile of sums of ``depth`` products with torch.bmm."""
    return 2 * TILE * TILE * depth / RATE


def _lower(n: int) -> int:
    """Tiles on and below the diagonal of an (n, n) matrix."""
    rows = _cdiv(n, TILE)
    return rows * (rows + 1) // 2


def _cdiv(a: int, b: int) -> int:
    """a / b, rounded up; on the host triton.cdiv takes many times as long."""
    return -(-a // b)


def options(device: torch.device) -> dict[str, int]:
    """Triton's options for products: on this GPU, and so that the tests can compile for it."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return options_of(10 * capability[0] + capability[1])


def options_of(capability: int) -> dict[str, int]:
    """Triton's options for products.

    Two programs of 256 threads share a processor's 65536 registers if each thread takes 128. Left
    alone, ptxas takes up to 190 for the products with an epilogue. Held to 128 it spills none on an
    H100, but a few on other GPUs, where one program at a time has more.
    """
    return {**OPTIONS, "maxnreg": 128} if capability == 90 else OPTIONS
