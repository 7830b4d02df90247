"""Codes of a few bits over a list: the arithmetic of curvadion.ops.code_format.

Each operation is one launch.

Launches ask for no fused multiply-adds, so that codes have the bits of every other backend.
"""

# Device functions get their types from Triton.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from curvadion.ops.code_format import check_compiled, constants, rows_of
from curvadion_kernels.launch import CHUNK, launches, on, run
from curvadion_kernels.numbers import DTYPES, INTERPRETED, pointer, to_nearest

# Blocks that a program works on at a time.
ROWS = 64 if INTERPRETED else 4
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
N = tl.constexpr(256)
PLANE = tl.constexpr(32)


@triton.jit
def _hadamard(y, ROWS: tl.constexpr):
    for _ in tl.static_range(8):
        even, odd = tl.split(tl.reshape(y, (ROWS, N // 2, 2)))
        both = tl.join(even + odd, even - odd)
        y = tl.reshape(tl.permute(both, (0, 2, 1)), (ROWS, N))
    return y


@triton.jit
def _sum_in_halves(x, ROWS: tl.constexpr):
    for i in tl.static_range(8):
        # A sum of two numbers has one order only.
        x = tl.sum(tl.reshape(x, (ROWS, 2, N // 2 >> i)), axis=1)
    return tl.reshape(x, (ROWS,))


@triton.jit
def _places(ROWS: tl.constexpr):
    """Which of eight bits, and which byte of a plane."""
    k = tl.arange(0, 8)[None, :, None]
    return k, tl.zeros((ROWS, 1, 1), tl.int32) + tl.arange(0, PLANE)[None, None, :]


@triton.jit
def _pack(codes, row, here, BITS: tl.constexpr, ROWS: tl.constexpr):
    """Write the planes of rows of codes to the addresses ``row``, (ROWS,)."""
    k, _ = _places(ROWS)
    eights = tl.reshape(codes, (ROWS, 8, PLANE))
    j = tl.arange(0, PLANE)[None, :]
    for p in tl.static_range(BITS):
        plane = tl.sum(((eights >> p) & 1) << k, axis=1)
        tl.store(row[:, None] + PLANE * p + j, plane.to(tl.uint8), here[:, None])


@triton.jit
def _unpack(row, here, BITS: tl.constexpr, ROWS: tl.constexpr):
    k, j = _places(ROWS)
    codes = tl.zeros((ROWS, 8, PLANE), tl.int32)
    for p in tl.static_range(BITS):
        plane = tl.load(row[:, None, None] + PLANE * p + j, here[:, None, None], 0).to(tl.int32)
        codes += ((plane >> k) & 1) << p
    return tl.reshape(codes, (ROWS, N))


@triton.jit
def _expand(codes, scale, signs, levels, ROWS: tl.constexpr):
    """The numbers that codes and scales, int32 with the bits of a bfloat16, stand for."""
    size = (scale << 16).to(tl.float32, bitcast=True) * 0.0625
    y = _hadamard(tl.load(levels + codes) * size[:, None], ROWS)
    return y * tl.load(signs + tl.arange(0, N))[None, :]


@triton.jit
def _encode(x, row, here, signs, midpoints, BITS: tl.constexpr, ROWS: tl.constexpr):
    """Write the rows of blocks x, (ROWS, 256); return their codes and scales."""
    y = _hadamard(x * tl.load(signs + tl.arange(0, N))[None, :], ROWS)
    largest = tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    exponent = tl.minimum(tl.maximum(largest >> 23, 1), 253)
    y = y * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    size = tl.sqrt_rn(_sum_in_halves(y * y, ROWS) * 0.00390625)
    wide = size * 0.0625 * (exponent << 23).to(tl.float32, bitcast=True)
    bits = wide.to(tl.int32, bitcast=True)
    scale = tl.where(wide == wide, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
    codes = tl.zeros((ROWS, N), tl.int32)
    for i in tl.static_range(BITS):
        half = 1 << (BITS - 1 - i)
        edges = tl.load(midpoints + codes + (half - 1)) * size[:, None]
        codes += tl.where(y > edges, half, 0)
    _pack(codes, row, here, BITS, ROWS)
    tl.store(row + PLANE * BITS, (scale & 0xFF).to(tl.uint8), here)
    tl.store(row + PLANE * BITS + 1, (scale >> 8).to(tl.uint8), here)
    return codes, scale


@triton.jit
def _decode(row, here, signs, levels, BITS: tl.constexpr, ROWS: tl.constexpr):
    low = tl.load(row + PLANE * BITS, here, 0).to(tl.int32)
    high = tl.load(row + PLANE * BITS + 1, here, 0).to(tl.int32)
    codes = _unpack(row, here, BITS, ROWS)
    return _expand(codes, low | (high << 8), signs, levels, ROWS)


@triton.jit
def encode_difference_kernel(
    table, numel, of, chunk, count, codes, owned, first_row, owned_rows, signs, midpoints, levels,
    X_DTYPE: tl.constexpr, R_DTYPE: tl.constexpr, HAS_A: tl.constexpr, HAS_R: tl.constexpr,
    BITS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One chunk of one tensor. The table holds X, A if any, R if any, and the tensors' rows."""
    block = tl.program_id(0)
    t = tl.load(of + block)
    start = tl.load(chunk + block).to(tl.int64) * CHUNK
    n = tl.load(numel + t)
    lists: tl.constexpr = 1 + (1 if HAS_A else 0) + (1 if HAS_R else 0)
    row_of_tensor = tl.load(table + lists * count + t)
    x = pointer(table, t, X_DTYPE)
    a = pointer(table, count + t, tl.float32)
    r = pointer(table, (lists - 1) * count + t, R_DTYPE)
    for begin in range(start, tl.minimum(start + CHUNK, n), ROWS * N):
        local = begin // N + tl.arange(0, ROWS)
        at = local[:, None] * N + tl.arange(0, N)[None, :]
        here = at < n
        z = tl.load(x + at, here, 0.0).to(tl.float32)
        if HAS_A:
            anchor = to_nearest(tl.load(a + at, here, 0.0), X_DTYPE)
            z = z - anchor.to(tl.float32)
        if HAS_R:
            z = z + tl.load(r + at, here, 0.0).to(tl.float32)
        row = row_of_tensor + local
        mine = row - first_row
        wanted = (local * N < n) & (mine >= 0) & (mine < owned_rows)
        tl.store(owned + mine[:, None] * N + tl.arange(0, N)[None, :], z, wanted[:, None])
        bytes_at = codes + row * (PLANE * BITS + 2)
        made, scale = _encode(z, bytes_at, local * N < n, signs, midpoints, BITS, ROWS)
        if HAS_R:
            lost = z - _expand(made, scale, signs, levels, ROWS)
            tl.store(r + at, to_nearest(lost, R_DTYPE), here)


@triton.jit
def decode_kernel(
    table, numel, of, chunk, count, codes, signs, levels,
    X_DTYPE: tl.constexpr, HAS_A: tl.constexpr, BITS: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One chunk of one tensor. The table holds X, A if any, and the tensors' rows."""
    block = tl.program_id(0)
    t = tl.load(of + block)
    start = tl.load(chunk + block).to(tl.int64) * CHUNK
    n = tl.load(numel + t)
    row_of_tensor = tl.load(table + (2 if HAS_A else 1) * count + t)
    x = pointer(table, t, X_DTYPE)
    a = pointer(table, (1 if HAS_A else 0) * count + t, tl.float32)
    for begin in range(start, tl.minimum(start + CHUNK, n), ROWS * N):
        local = begin // N + tl.arange(0, ROWS)
        at = local[:, None] * N + tl.arange(0, N)[None, :]
        here = at < n
        bytes_at = codes + (row_of_tensor + local) * (PLANE * BITS + 2)
        now = _decode(bytes_at, local * N < n, signs, levels, BITS, ROWS)
        if HAS_A:
            now = tl.load(a + at, here, 0.0) + now
            tl.store(a + at, now, here)
        tl.store(x + at, to_nearest(now, X_DTYPE), here)


@triton.jit
def average_codes_kernel(
    codes, own, received, blocks, ranks, rank, signs, midpoints, levels,
    BITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Some blocks: the codes of their mean over ranks, and what these lose."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < blocks
    at = row[:, None] * N + tl.arange(0, N)[None, :]
    numbers = tl.load(own + at, here[:, None], 0.0)
    total = tl.zeros((ROWS, N), tl.float32)
    stride: tl.constexpr = PLANE * BITS + 2
    for r in range(0, ranks):
        bytes_at = received + (r * blocks + row) * stride
        # This rank's codes are decoded for nothing: its numbers are known.
        theirs = _decode(bytes_at, here, signs, levels, BITS, ROWS)
        total = total + tl.where(r == rank, numbers, theirs)
    factor = tl.zeros((ROWS, N), tl.float32) + ranks
    mean = tl.div_rn(total, factor)
    made, scale = _encode(mean, codes + row * stride, here, signs, midpoints, BITS, ROWS)
    lost = total - factor * _expand(made, scale, signs, levels, ROWS)
    tl.store(own + at, lost, here[:, None])


def encode_difference_(
    codes: Tensor,
    X: Sequence[Tensor],
    anchors: Sequence[Tensor],
    residuals: Sequence[Tensor],
    bits: int,
    owned: Tensor,
    first: int,
) -> None:
    """See :func:`curvadion.ops.encode_difference_`."""
    check_compiled([codes], [owned, *anchors], [*X, *residuals])
    lists = [X, *filter(None, (anchors, residuals))]
    signs, midpoints, levels = constants(bits, codes.device)
    for launch, dtypes in launches(lists):
        table = launch.table(lists, [], [rows.start for rows in rows_of(X)])
        with on(codes.device):
            run(
                encode_difference_kernel, (launch.blocks,),
                table, *launch.index.on_stream()[:3], launch.count, codes, owned, first,
                len(owned), signs, midpoints, levels,
                X_DTYPE=DTYPES[dtypes[0]], R_DTYPE=DTYPES[dtypes[-1]], HAS_A=bool(anchors),
                HAS_R=bool(residuals), BITS=bits, CHUNK=CHUNK, ROWS=ROWS, **OPTIONS,
            )  # fmt: skip


def decode_add_(X: Sequence[Tensor], anchors: Sequence[Tensor], codes: Tensor, bits: int) -> None:
    """See :func:`curvadion.ops.decode_add_`."""
    check_compiled([codes], anchors, X)
    lists = [X, anchors] if anchors else [X]
    signs, _, levels = constants(bits, codes.device)
    for launch, dtypes in launches(lists):
        table = launch.table(lists, [], [rows.start for rows in rows_of(X)])
        with on(codes.device):
            run(
                decode_kernel, (launch.blocks,),
                table, *launch.index.on_stream()[:3], launch.count, codes, signs, levels,
                X_DTYPE=DTYPES[dtypes[0]], HAS_A=bool(anchors), BITS=bits,
                CHUNK=CHUNK, ROWS=ROWS, **OPTIONS,
            )  # fmt: skip


def average_codes_(codes: Tensor, own: Tensor, received: Tensor, rank: int, bits: int) -> None:
    """See :func:`curvadion.ops.average_codes_`."""
    check_compiled([codes, received], [own])
    if len(own):
        with on(codes.device):
            run(
                average_codes_kernel, (triton.cdiv(len(own), ROWS),),
                codes, own, received, len(own), len(received), rank,
                *constants(bits, codes.device), BITS=bits, ROWS=ROWS, **OPTIONS,
            )  # fmt: skip
