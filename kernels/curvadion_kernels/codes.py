"""Codes of a few bits over a list: the format and arithmetic of curvadion.ops.code_format.

Each operation is one launch. A program works on ROWS blocks of 256 elements at a time, each of
which becomes a row of bytes: BITS planes of 32 bytes, then a scale of 2 bytes.

Launches ask for no fused multiply-adds, so that codes have the bits of every other backend.
"""

# Device functions get their types from Triton.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from curvadion.ops.code_format import Bits, check_compiled, constants, rows_of
from curvadion_kernels.launch import CHUNK, launches, on, run
from curvadion_kernels.numbers import DTYPES, INTERPRETED, pointer, to_nearest

# Blocks that a program works on at a time.
ROWS = 16 if INTERPRETED else 4
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
N = tl.constexpr(256)  # elements of a block
PLANE = tl.constexpr(32)  # bytes of a plane, which has one bit of each code


@triton.jit
def _hadamard(y, ROWS: tl.constexpr):
    """H y for each row y, without H's factor 1/16.

    Each of eight stages writes the sums of neighbours, and behind them the differences.

    Args:
        y: (ROWS, 256) float32.
        ROWS: of y.
    """
    for _ in tl.static_range(8):
        even, odd = tl.split(tl.reshape(y, (ROWS, N // 2, 2)))
        both = tl.join(even + odd, even - odd)
        y = tl.reshape(tl.permute(both, (0, 2, 1)), (ROWS, N))
    return y


@triton.jit
def _sum_in_halves(x, ROWS: tl.constexpr):
    """Sums over each row, in one order: the second half is added to the first until one is left.

    Args:
        x: (ROWS, 256) float32.
        ROWS: of x.

    Returns:
        (ROWS,) float32.
    """
    for i in tl.static_range(8):
        # A sum of two numbers has one order only.
        x = tl.sum(tl.reshape(x, (ROWS, 2, N // 2 >> i)), axis=1)
    return tl.reshape(x, (ROWS,))


@triton.jit
def _places(ROWS: tl.constexpr):
    """Where the bit of element 32 k + j of a row is in a plane: bit k of byte j.

    Args:
        ROWS: of codes.

    Returns:
        k, (1, 8, 1), and j, (ROWS, 1, 32), int32.
    """
    k = tl.arange(0, 8)[None, :, None]
    return k, tl.zeros((ROWS, 1, 1), tl.int32) + tl.arange(0, PLANE)[None, None, :]


@triton.jit
def _pack(codes, addresses, inside, BITS: tl.constexpr, ROWS: tl.constexpr):
    """Write the planes of rows of codes.

    Args:
        codes: (ROWS, 256) int32.
        addresses: (ROWS,) pointers to the rows' first bytes.
        inside: (ROWS,) bool: rows to write.
        BITS: of a code.
        ROWS: of codes.
    """
    k, _ = _places(ROWS)
    eights = tl.reshape(codes, (ROWS, 8, PLANE))
    j = tl.arange(0, PLANE)[None, :]
    for p in tl.static_range(BITS):
        plane = tl.sum(((eights >> p) & 1) << k, axis=1)
        tl.store(addresses[:, None] + PLANE * p + j, plane.to(tl.uint8), inside[:, None])


@triton.jit
def _unpack(addresses, inside, BITS: tl.constexpr, ROWS: tl.constexpr):
    """Read the planes of rows of codes.

    Args:
        addresses: (ROWS,) pointers to the rows' first bytes.
        inside: (ROWS,) bool: rows to read; codes of the others are zeros.
        BITS: of a code.
        ROWS: of codes.

    Returns:
        Codes, (ROWS, 256) int32.
    """
    k, j = _places(ROWS)
    codes = tl.zeros((ROWS, 8, PLANE), tl.int32)
    for p in tl.static_range(BITS):
        plane = tl.load(addresses[:, None, None] + PLANE * p + j, inside[:, None, None], 0).to(
            tl.int32
        )
        codes += ((plane >> k) & 1) << p
    return tl.reshape(codes, (ROWS, N))


@triton.jit
def _expand(codes, scale, signs, levels, ROWS: tl.constexpr):
    """The numbers that rows of codes stand for: signs (H y) with y = level[code] (scale / 16).

    Args:
        codes: (ROWS, 256) int32.
        scale: (ROWS,) int32, with the bits of a bfloat16 number.
        signs: pointer to (256,) float32.
        levels: pointer to (2^BITS,) float32.
        ROWS: of codes.

    Returns:
        (ROWS, 256) float32.
    """
    # scale / 16
    size = (scale << 16).to(tl.float32, bitcast=True) * 0.0625
    y = _hadamard(tl.load(levels + codes) * size[:, None], ROWS)
    return y * tl.load(signs + tl.arange(0, N))[None, :]


@triton.jit
def _encode(x, addresses, inside, signs, midpoints, BITS: tl.constexpr, ROWS: tl.constexpr):
    """Write the rows of blocks; curvadion.ops.code_format explains each of the steps.

    Args:
        x: (ROWS, 256) float32, one block a row.
        addresses: (ROWS,) pointers to the first bytes of the rows to write.
        inside: (ROWS,) bool: rows to write.
        signs: pointer to (256,) float32.
        midpoints: pointer to (2^BITS - 1,) float32, ascending.
        BITS: of a code.
        ROWS: of x.

    Returns:
        Codes, (ROWS, 256) int32, and scales, (ROWS,) int32 with the bits of bfloat16 numbers.
    """
    # y = H (signs x)
    y = _hadamard(x * tl.load(signs + tl.arange(0, N))[None, :], ROWS)
    # y <- y up, with the power of two by which the largest |y| gets between 1 and 2.
    largest = tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    exponent = tl.minimum(tl.maximum(largest >> 23, 1), 253)
    y = y * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    # size = sqrt(mean (y up)^2)
    size = tl.sqrt_rn(_sum_in_halves(y * y, ROWS) * 0.00390625)
    # scale = size / 16 down, in bfloat16, rounded to nearest even; NaN stays NaN.
    wide_scale = size * 0.0625 * (exponent << 23).to(tl.float32, bitcast=True)
    bits = wide_scale.to(tl.int32, bitcast=True)
    scale = tl.where(wide_scale == wide_scale, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
    # code = the number of midpoints, times size, below y up: a binary search, bit by bit.
    codes = tl.zeros((ROWS, N), tl.int32)
    for i in tl.static_range(BITS):
        half = 1 << (BITS - 1 - i)
        edges = tl.load(midpoints + codes + (half - 1)) * size[:, None]
        codes += tl.where(y > edges, half, 0)
    _pack(codes, addresses, inside, BITS, ROWS)
    # The low byte of the scale comes first.
    tl.store(addresses + PLANE * BITS, (scale & 0xFF).to(tl.uint8), inside)
    tl.store(addresses + PLANE * BITS + 1, (scale >> 8).to(tl.uint8), inside)
    return codes, scale


@triton.jit
def _decode(addresses, inside, signs, levels, BITS: tl.constexpr, ROWS: tl.constexpr):
    """The numbers that rows of bytes stand for.

    Args:
        addresses: (ROWS,) pointers to the rows' first bytes.
        inside: (ROWS,) bool: rows to read.
        signs: pointer to (256,) float32.
        levels: pointer to (2^BITS,) float32.
        BITS: of a code.
        ROWS: of the result.

    Returns:
        (ROWS, 256) float32; what is not inside has any values.
    """
    low = tl.load(addresses + PLANE * BITS, inside, 0).to(tl.int32)
    high = tl.load(addresses + PLANE * BITS + 1, inside, 0).to(tl.int32)
    codes = _unpack(addresses, inside, BITS, ROWS)
    return _expand(codes, low | (high << 8), signs, levels, ROWS)


@triton.jit
def encode_difference_kernel(
    table, numel, of, chunk, count, codes, owned, first_row, owned_rows, signs, midpoints, levels,
    X_DTYPE: tl.constexpr, R_DTYPE: tl.constexpr, HAS_A: tl.constexpr, HAS_R: tl.constexpr,
    BITS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One chunk of one tensor: the codes of z = X - A + R, and R <- z - decoded codes.

    Columns of the table: addresses of X, of the anchors A if HAS_A and of the residuals R if HAS_R;
    then each tensor's first row among those of all, int64.

    Args:
        table: int64 cells on the device, in columns of ``count``; listed above.
        numel: (count,) int64, the number of elements of each tensor.
        of: (blocks,) int32, the tensor that each block works on.
        chunk: (blocks,) int32, which of the tensor's chunks it works on.
        count: tensors of the launch.
        codes: written, (rows of all tensors, bytes of a row) uint8.
        owned: written, (owned_rows, 256) float32: z of some rows.
        first_row: the first of these rows.
        owned_rows: how many they are.
        signs: (256,) float32.
        midpoints: (2^BITS - 1,) float32, ascending.
        levels: (2^BITS,) float32.
        X_DTYPE: of X; the anchors are float32, but rounded to this dtype.
        R_DTYPE: of residuals.
        HAS_A: whether there are anchors; else they are zeros.
        HAS_R: whether there are residuals; else what is lost is dropped.
        BITS: of a code.
        CHUNK: elements of a block.
        ROWS: blocks of 256 elements that a program works on at a time.
    """
    block = tl.program_id(0)
    tensor = tl.load(of + block)
    start = tl.load(chunk + block).to(tl.int64) * CHUNK
    n = tl.load(numel + tensor)
    lists: tl.constexpr = 1 + (1 if HAS_A else 0) + (1 if HAS_R else 0)
    first_row_of_tensor = tl.load(table + lists * count + tensor)
    x = pointer(table, tensor, X_DTYPE)
    a = pointer(table, count + tensor, tl.float32)
    r = pointer(table, (lists - 1) * count + tensor, R_DTYPE)
    for begin in range(start, tl.minimum(start + CHUNK, n), ROWS * N):
        local_rows = begin // N + tl.arange(0, ROWS)
        offsets = local_rows[:, None] * N + tl.arange(0, N)[None, :]
        inside = offsets < n
        # z = X - A + R
        z = tl.load(x + offsets, inside, 0.0).to(tl.float32)
        if HAS_A:
            anchor = to_nearest(tl.load(a + offsets, inside, 0.0), X_DTYPE)
            z = z - anchor.to(tl.float32)
        if HAS_R:
            z = z + tl.load(r + offsets, inside, 0.0).to(tl.float32)
        rows = first_row_of_tensor + local_rows
        owned_places = rows - first_row
        is_owned = (local_rows * N < n) & (owned_places >= 0) & (owned_places < owned_rows)
        tl.store(owned + owned_places[:, None] * N + tl.arange(0, N)[None, :], z, is_owned[:, None])
        addresses = codes + rows * (PLANE * BITS + 2)
        new_codes, scale = _encode(z, addresses, local_rows * N < n, signs, midpoints, BITS, ROWS)
        if HAS_R:
            # R <- z - decoded codes
            lost = z - _expand(new_codes, scale, signs, levels, ROWS)
            tl.store(r + offsets, to_nearest(lost, R_DTYPE), inside)


@triton.jit
def decode_kernel(
    table, numel, of, chunk, count, codes, signs, levels,
    X_DTYPE: tl.constexpr, HAS_A: tl.constexpr, BITS: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One chunk of one tensor: A <- A + decoded codes and X <- A, or X <- decoded codes.

    Columns of the table: addresses of X and of the anchors A if HAS_A; then each tensor's first row
    among those of all, int64.

    Args:
        table: int64 cells on the device, in columns of ``count``; listed above.
        numel: (count,) int64, the number of elements of each tensor.
        of: (blocks,) int32, the tensor that each block works on.
        chunk: (blocks,) int32, which of the tensor's chunks it works on.
        count: tensors of the launch.
        codes: (rows of all tensors, bytes of a row) uint8.
        signs: (256,) float32.
        levels: (2^BITS,) float32.
        X_DTYPE: of X; the anchors are float32.
        HAS_A: whether there are anchors.
        BITS: of a code.
        CHUNK: elements of a block.
        ROWS: blocks of 256 elements that a program works on at a time.
    """
    block = tl.program_id(0)
    tensor = tl.load(of + block)
    start = tl.load(chunk + block).to(tl.int64) * CHUNK
    n = tl.load(numel + tensor)
    first_row_of_tensor = tl.load(table + (2 if HAS_A else 1) * count + tensor)
    x = pointer(table, tensor, X_DTYPE)
    a = pointer(table, (1 if HAS_A else 0) * count + tensor, tl.float32)
    for begin in range(start, tl.minimum(start + CHUNK, n), ROWS * N):
        local_rows = begin // N + tl.arange(0, ROWS)
        offsets = local_rows[:, None] * N + tl.arange(0, N)[None, :]
        inside = offsets < n
        addresses = codes + (first_row_of_tensor + local_rows) * (PLANE * BITS + 2)
        decoded = _decode(addresses, local_rows * N < n, signs, levels, BITS, ROWS)
        if HAS_A:
            # A <- A + decoded codes
            decoded = tl.load(a + offsets, inside, 0.0) + decoded
            tl.store(a + offsets, decoded, inside)
        tl.store(x + offsets, to_nearest(decoded, X_DTYPE), inside)


@triton.jit
def average_codes_kernel(
    codes, own, received, blocks, ranks, rank, signs, up_levels, midpoints, down_levels,
    UP: tl.constexpr, DOWN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Some blocks: the codes of their mean over ranks, and own <- total - ranks decoded codes.

    Args:
        codes: written, (blocks, bytes of a row of DOWN) uint8.
        own: this rank's values, and then what is lost, (blocks, 256) float32.
        received: (ranks, blocks, bytes of a row of UP) uint8, the codes of all ranks.
        blocks: of 256 elements.
        ranks: how many there are.
        rank: this one, whose codes do not count.
        signs: (256,) float32.
        up_levels: (2^UP,) float32.
        midpoints: (2^DOWN - 1,) float32, ascending.
        down_levels: (2^DOWN,) float32.
        UP: bits of a received code.
        DOWN: bits of a code of the mean.
        ROWS: blocks of 256 elements of a program.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < blocks
    offsets = rows[:, None] * N + tl.arange(0, N)[None, :]
    own_values = tl.load(own + offsets, inside[:, None], 0.0)
    total = tl.zeros((ROWS, N), tl.float32)
    # total = sum over ranks, in their order
    for source in range(0, ranks):
        addresses = received + (source * blocks + rows) * (PLANE * UP + 2)
        # This rank's codes are decoded for nothing: its numbers are known.
        decoded = _decode(addresses, inside, signs, up_levels, UP, ROWS)
        total = total + tl.where(source == rank, own_values, decoded)
    divisor = tl.zeros((ROWS, N), tl.float32) + ranks
    mean = tl.div_rn(total, divisor)
    addresses = codes + rows * (PLANE * DOWN + 2)
    new_codes, scale = _encode(mean, addresses, inside, signs, midpoints, DOWN, ROWS)
    # own <- total - ranks decoded codes
    lost = total - divisor * _expand(new_codes, scale, signs, down_levels, ROWS)
    tl.store(own + offsets, lost, inside[:, None])


def encode_difference_(
    codes: Tensor,
    X: Sequence[Tensor],
    anchors: Sequence[Tensor],
    residuals: Sequence[Tensor],
    bits: int,
    owned: Tensor,
    first: int,
) -> None:
    """See :func:`curvadion.ops.encode_difference_`; all tensors are row-major.

    Args:
        codes: written, (rows, bytes of a row) uint8.
        X: float32 or bfloat16.
        anchors: of X's shapes, float32; () for zeros.
        residuals: of X's shapes, float32 or bfloat16, changed; () if there are none.
        bits: of a code.
        owned: written, (k, 256) float32: z of k rows.
        first: the first of these rows.
    """
    check_compiled([codes], [owned, *anchors], [*X, *residuals])
    lists = [X]
    if anchors:
        lists.append(anchors)
    if residuals:
        lists.append(residuals)
    first_rows = [rows.start for rows in rows_of(X)]
    signs, midpoints, levels = constants(bits, codes.device)
    for launch, dtypes in launches(lists):
        table = launch.table(lists, [], first_rows)
        with on(codes.device):
            run(
                encode_difference_kernel, (launch.blocks,),
                table, *launch.index.on_stream()[:3], launch.count, codes, owned, first,
                len(owned), signs, midpoints, levels,
                X_DTYPE=DTYPES[dtypes[0]], R_DTYPE=DTYPES[dtypes[-1]], HAS_A=bool(anchors),
                HAS_R=bool(residuals), BITS=bits, CHUNK=CHUNK, ROWS=ROWS, **OPTIONS,
            )  # fmt: skip


def decode_add_(X: Sequence[Tensor], anchors: Sequence[Tensor], codes: Tensor, bits: int) -> None:
    """See :func:`curvadion.ops.decode_add_`; all tensors are row-major.

    Args:
        X: written, float32 or bfloat16.
        anchors: of X's shapes, float32, changed; () if there are none.
        codes: (rows, bytes of a row) uint8.
        bits: of a code.
    """
    check_compiled([codes], anchors, X)
    lists = [X, anchors] if anchors else [X]
    first_rows = [rows.start for rows in rows_of(X)]
    signs, _, levels = constants(bits, codes.device)
    for launch, dtypes in launches(lists):
        table = launch.table(lists, [], first_rows)
        with on(codes.device):
            run(
                decode_kernel, (launch.blocks,),
                table, *launch.index.on_stream()[:3], launch.count, codes, signs, levels,
                X_DTYPE=DTYPES[dtypes[0]], HAS_A=bool(anchors), BITS=bits,
                CHUNK=CHUNK, ROWS=ROWS, **OPTIONS,
            )  # fmt: skip


def average_codes_(codes: Tensor, own: Tensor, received: Tensor, rank: int, bits: Bits) -> None:
    """See :func:`curvadion.ops.average_codes_`; all tensors are row-major.

    Args:
        codes: written, (k, bytes of a row of bits.down) uint8.
        own: (k, 256) float32, changed.
        received: (ranks, k, bytes of a row of bits.up) uint8.
        rank: this one's number.
        bits: of a received code, and of one of the mean.
    """
    check_compiled([codes, received], [own])
    _, _, up_levels = constants(bits.up, codes.device)
    signs, midpoints, down_levels = constants(bits.down, codes.device)
    if len(own):
        with on(codes.device):
            run(
                average_codes_kernel, (triton.cdiv(len(own), ROWS),),
                codes, own, received, len(own), len(received), rank,
                signs, up_levels, midpoints, down_levels, UP=bits.up, DOWN=bits.down, ROWS=ROWS,
                **OPTIONS,
            )  # fmt: skip
