"""States in 8 bits over a list, in one launch: the format of curvadion.ops.state_codes."""

# Device functions get their types from Triton.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvadion.ops.tensors import Unsupported
from curvadion_kernels.launch import CHUNK, launches, on, run
from curvadion_kernels.numbers import INTERPRETED, pointer, random_bits

# Blocks that a program works on at a time.
ROWS = 64 if INTERPRETED else 8
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
N = tl.constexpr(256)  # elements of a block
LEAST_SCALE = tl.constexpr(2.0**-126)
LEAST_SCALE_OF_ROOTS = tl.constexpr(2.0**-63)


@triton.jit
def encode_states_kernel(
    table, numel, of, chunk, count,
    ROOTS: tl.constexpr, SEEDED: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One chunk of one tensor: the codes of its values.

    Columns of the table: addresses of the values, float32, and of the codes; then seeds if SEEDED.

    Args:
        table: int64 cells on the device, in columns of ``count``; listed above.
        numel: (count,) int64, the number of elements of each tensor.
        of: (blocks,) int32, the tensor that each block works on.
        chunk: (blocks,) int32, which of the tensor's chunks it works on.
        count: tensors of the launch.
        ROOTS: whether they are codes of roots.
        SEEDED: whether elements are rounded up or down at random.
        CHUNK: elements of a block.
        ROWS: blocks of 256 elements that a program works on at a time.
    """
    block = tl.program_id(0)
    tensor = tl.load(of + block)
    start = tl.load(chunk + block).to(tl.int64) * CHUNK
    n = tl.load(numel + tensor)
    values = pointer(table, tensor, tl.float32)
    codes = pointer(table, count + tensor, tl.int8)
    scales = (codes + tl.cdiv(n, N) * N).to(tl.pointer_type(tl.float32))
    seed = tl.zeros((), tl.uint32)
    if SEEDED:
        seed = tl.load(table + 2 * count + tensor).to(tl.uint32)
    for begin in range(start, tl.minimum(start + CHUNK, n), ROWS * N):
        rows = begin // N + tl.arange(0, ROWS)
        offsets = rows[:, None] * N + tl.arange(0, N)[None, :]
        x = tl.load(values + offsets, offsets < n, 0.0)
        if ROOTS:
            x = tl.sqrt_rn(x)
        # s = max |x| / 127, rounded to 17 bits
        quotient = tl.div_rn(tl.max(tl.abs(x), axis=1), tl.full((ROWS,), 127.0, tl.float32))
        bits = (quotient.to(tl.int32, bitcast=True) + 0x40) & 0x7FFFFF80
        s = bits.to(tl.float32, bitcast=True)
        s = tl.where(s >= (LEAST_SCALE_OF_ROOTS if ROOTS else LEAST_SCALE), s, 0.0)
        # x / s lies between low and low + 1.
        divisor = tl.where(s > 0, s, 1.0)[:, None] + tl.zeros((ROWS, N), tl.float32)
        scaled = tl.where(s[:, None] > 0, tl.div_rn(x, divisor), 0.0)
        low = tl.floor(scaled)
        if SEEDED:
            # 16 random bits as a number in [0, 1)
            up = scaled - low > random_bits(offsets, seed).to(tl.float32) * 0.0000152587890625
        else:
            # Ties to even
            odd = (low.to(tl.int32) & 1) == 1
            up = (scaled - low > 0.5) | ((scaled - low == 0.5) & odd)
        c = low + tl.where(up, 1.0, 0.0)
        c = tl.where(scaled > 126.99, 127.0, tl.where(scaled < -126.99, -127.0, c))
        if ROOTS:
            c = tl.where(scaled > 0, tl.maximum(c, 1.0), c)
        # The last block is padded with codes of zero.
        inside = rows * N < n
        tl.store(codes + offsets, c.to(tl.int8), inside[:, None])
        tl.store(scales + rows, s, inside)


@triton.jit
def decode_states_kernel(
    table, numel, of, chunk, count, ROOTS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr
):
    """One chunk of one tensor: the elements for which its codes stand.

    Columns of the table: addresses of the values, float32, and of the codes.

    Args:
        table: int64 cells on the device, in columns of ``count``; listed above.
        numel: (count,) int64, the number of elements of each tensor.
        of: (blocks,) int32, the tensor that each block works on.
        chunk: (blocks,) int32, which of the tensor's chunks it works on.
        count: tensors of the launch.
        ROOTS: whether they are codes of roots.
        CHUNK: elements of a block.
        ROWS: blocks of 256 elements that a program works on at a time.
    """
    block = tl.program_id(0)
    tensor = tl.load(of + block)
    start = tl.load(chunk + block).to(tl.int64) * CHUNK
    n = tl.load(numel + tensor)
    values = pointer(table, tensor, tl.float32)
    codes = pointer(table, count + tensor, tl.int8)
    scales = (codes + tl.cdiv(n, N) * N).to(tl.pointer_type(tl.float32))
    for begin in range(start, tl.minimum(start + CHUNK, n), ROWS * N):
        rows = begin // N + tl.arange(0, ROWS)
        offsets = rows[:, None] * N + tl.arange(0, N)[None, :]
        s = tl.load(scales + rows, rows * N < n, 0.0)
        # c s
        x = tl.load(codes + offsets, offsets < n, 0).to(tl.float32) * s[:, None]
        if ROOTS:
            x = x * x
        tl.store(values + offsets, x, offsets < n)


def encode_states_(
    codes: Sequence[Tensor],
    values: Sequence[Tensor],
    seeds: Sequence[int] | None,
    roots: bool,
) -> None:
    """See :func:`curvadion.ops.encode_states_`.

    Args:
        codes: written, int8 vectors.
        values: float32, without gaps in memory.
        seeds: an integer below 2**32 per tensor for random rounding; None rounds to nearest.
        roots: whether they are codes of roots.
    """
    _check(values, codes)
    for launch, _ in launches([values, codes]):
        table = launch.table([values, codes], [], seeds)
        with on(table.device):
            run(
                encode_states_kernel, (launch.blocks,),
                table, *launch.index.on_stream()[:3], launch.count,
                ROOTS=roots, SEEDED=seeds is not None, CHUNK=CHUNK, ROWS=ROWS, **OPTIONS,
            )  # fmt: skip


def decode_states_(values: Sequence[Tensor], codes: Sequence[Tensor], roots: bool) -> None:
    """See :func:`curvadion.ops.decode_states`; values: written, float32 without gaps in memory."""
    _check(values, codes)
    for launch, _ in launches([values, codes]):
        table = launch.table([values, codes], [])
        with on(table.device):
            run(
                decode_states_kernel, (launch.blocks,),
                table, *launch.index.on_stream()[:3], launch.count,
                ROOTS=roots, CHUNK=CHUNK, ROWS=ROWS, **OPTIONS,
            )  # fmt: skip


def _check(values: Sequence[Tensor], codes: Sequence[Tensor]) -> None:
    """Raise ValueError for lists of unequal lengths, Unsupported for tensors on two devices."""
    if len(values) != len(codes):
        raise ValueError(f"lists of unequal lengths {len(values)}, {len(codes)}: pass as many")
    devices = {tensor.device for tensor in (*values, *codes)}
    if len(devices) > 1 or any(value.dtype != torch.float32 for value in values):
        raise Unsupported
