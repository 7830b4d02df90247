"""States in 8 bits over a list, in one launch: the format of curvadion.ops.state_codes."""

# Device functions get their types from Triton.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvadion.ops.state_codes import is_coded
from curvadion.ops.tensors import Unsupported, check_lengths
from curvadion_kernels.launch import BLOCK, CHUNK, launches, on, run
from curvadion_kernels.numbers import (
    DTYPES,
    load_float32,
    pointer,
    random_bits,
    store,
    to_nearest,
)

# Blocks that a program works on at a time: as many elements as of other states.
ROWS = BLOCK // 256
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
STATES = tl.constexpr(256)  # elements of a block
# Of states that may be codes, in kernels.
STATE_DTYPES = {**DTYPES, torch.int8: tl.int8}
LEAST_SCALE = tl.constexpr(2.0**-126)
LEAST_SCALE_OF_ROOTS = tl.constexpr(2.0**-63)


@triton.jit
def scales_of(codes, n):
    """A pointer to the scales of a tensor's blocks.

    Args:
        codes: pointer to the tensor's codes.
        n: elements of the tensor, int64.
    """
    return (codes + tl.cdiv(n, STATES) * STATES).to(tl.pointer_type(tl.float32))


@triton.jit
def read_states(codes, scales, rows, n, ROOTS: tl.constexpr, MASKED: tl.constexpr):
    """The elements for which codes stand, (ROWS, 256) float32.

    Args:
        codes: pointer to the tensor's codes.
        scales: pointer to the scales of its blocks.
        rows: (ROWS,) int64, which blocks to read.
        n: elements of the tensor, int64; others are zeros.
        ROOTS: whether they are codes of roots.
        MASKED: whether a block may reach beyond the tensor, or addresses may be unaligned.
    """
    offsets = rows[:, None] * STATES + tl.arange(0, STATES)[None, :]
    if MASKED:
        s = tl.load(scales + rows, rows * STATES < n, 0.0)
        c = tl.load(codes + offsets, offsets < n, 0)
    else:
        s = tl.load(scales + rows)
        c = tl.load(codes + offsets)
    # c s
    x = c.to(tl.float32) * s[:, None]
    return x * x if ROOTS else x


@triton.jit
def write_states(
    codes, scales, rows, x, n, seed,
    ROOTS: tl.constexpr, SEEDED: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store the codes of elements.

    Args:
        codes: pointer to the tensor's codes.
        scales: pointer to the scales of its blocks.
        rows: (ROWS,) int64, which blocks to write.
        x: (ROWS, 256) float32, with zeros beyond the tensor.
        n: elements of the tensor, int64.
        seed: uint32, of the tensor.
        ROOTS: whether codes are of roots.
        SEEDED: whether elements are rounded up or down at random.
        MASKED: whether a block may reach beyond the tensor, or addresses may be unaligned.
        ROWS: blocks.
    """
    offsets = rows[:, None] * STATES + tl.arange(0, STATES)[None, :]
    if ROOTS:
        x = tl.sqrt_rn(x)
    # s = max |x| / 127, rounded to 17 bits
    quotient = tl.div_rn(tl.max(tl.abs(x), axis=1), tl.full((ROWS,), 127.0, tl.float32))
    bits = (quotient.to(tl.int32, bitcast=True) + 0x40) & 0x7FFFFF80
    s = bits.to(tl.float32, bitcast=True)
    s = tl.where(s >= (LEAST_SCALE_OF_ROOTS if ROOTS else LEAST_SCALE), s, 0.0)
    # x / s lies between low and low + 1.
    divisor = tl.where(s > 0, s, 1.0)[:, None] + tl.zeros((ROWS, STATES), tl.float32)
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
    if MASKED:
        # The last block is padded with codes of zero.
        inside = rows * STATES < n
        tl.store(codes + offsets, c.to(tl.int8), inside[:, None])
        tl.store(scales + rows, s, inside)
    else:
        tl.store(codes + offsets, c.to(tl.int8))
        tl.store(scales + rows, s)


# ---------------------------------------------------------------- states that may be codes


@triton.jit
def places(begin, CODED: tl.constexpr, BLOCK: tl.constexpr):
    """The offsets of BLOCK elements in the shape in which states are read, int64.

    Args:
        begin: the first one; of codes a multiple of 256.
        CODED: whether states are codes; the shape is then (BLOCK / 256, 256), else (BLOCK,).
        BLOCK: elements.
    """
    if CODED:
        rows = begin // STATES + tl.arange(0, BLOCK // STATES)
        return rows[:, None] * STATES + tl.arange(0, STATES)[None, :]
    else:
        return begin + tl.arange(0, BLOCK)


@triton.jit
def float64_zeros(CODED: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros in the shape of :func:`places`."""
    if CODED:
        return tl.zeros((BLOCK // STATES, STATES), tl.float64)
    else:
        return tl.zeros((BLOCK,), tl.float64)


@triton.jit
def read_state(
    state, begin, n,
    CODED: tl.constexpr, ROOTS: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The elements [begin, begin + BLOCK) of a state, float32, in the shape of :func:`places`.

    Args:
        state: pointer to its elements, or to its codes.
        begin: the first element.
        n: elements of the tensor, int64; others are zeros.
        CODED: whether it is codes.
        ROOTS: whether these are of roots.
        MASKED: whether the elements may reach beyond the tensor, or addresses may be unaligned.
        BLOCK: elements.
    """
    if CODED:
        rows = begin // STATES + tl.arange(0, BLOCK // STATES)
        return read_states(state, scales_of(state, n), rows, n, ROOTS, MASKED)
    else:
        offsets = begin + tl.arange(0, BLOCK)
        return load_float32(state, offsets, offsets < n, MASKED)


@triton.jit
def as_stored(value, DTYPE: tl.constexpr, CODED: tl.constexpr):
    """float32 elements, rounded to the dtype of a state; those of codes are rounded when written.

    Args:
        value: float32.
        DTYPE: of the state.
        CODED: whether it is codes.
    """
    if CODED:
        return value
    else:
        return to_nearest(value, DTYPE).to(tl.float32)


@triton.jit
def write_state(
    state, begin, value, n, seed, moved,
    DTYPE: tl.constexpr, CODED: tl.constexpr, ROOTS: tl.constexpr, SEEDED: tl.constexpr,
    GUARDED: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the elements [begin, begin + BLOCK) of a state.

    Args:
        state: pointer to its elements, or to its codes.
        begin: the first element; of codes a multiple of 256.
        value: float32, in the shape of :func:`places`; zeros beyond the tensor.
        n: elements of the tensor, int64.
        seed: uint32, of the tensor's codes.
        moved: whether the state may be written, bool.
        DTYPE: of the state.
        CODED: whether it is codes.
        ROOTS: whether these are of roots.
        SEEDED: whether codes are rounded up or down at random.
        GUARDED: whether ``moved`` counts.
        MASKED: whether the elements may reach beyond the tensor, or addresses may be unaligned.
        BLOCK: elements.
    """
    if CODED:
        rows = begin // STATES + tl.arange(0, BLOCK // STATES)
        if moved:
            scales = scales_of(state, n)
            write_states(
                state, scales, rows, value, n, seed, ROOTS, SEEDED, MASKED, BLOCK // STATES
            )
    else:
        offsets = begin + tl.arange(0, BLOCK)
        inside = offsets < n
        stored = to_nearest(value, DTYPE)
        if GUARDED:
            tl.store(state + offsets, stored, (inside & moved) if MASKED else moved)
        else:
            store(state, offsets, stored, inside, MASKED)


# ---------------------------------------------------------------- encoding and decoding


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
    scales = scales_of(codes, n)
    seed = tl.zeros((), tl.uint32)
    if SEEDED:
        seed = tl.load(table + 2 * count + tensor).to(tl.uint32)
    for begin in range(start, tl.minimum(start + CHUNK, n), ROWS * STATES):
        rows = begin // STATES + tl.arange(0, ROWS)
        offsets = rows[:, None] * STATES + tl.arange(0, STATES)[None, :]
        x = tl.load(values + offsets, offsets < n, 0.0)
        write_states(codes, scales, rows, x, n, seed, ROOTS, SEEDED, True, ROWS)


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
    scales = scales_of(codes, n)
    for begin in range(start, tl.minimum(start + CHUNK, n), ROWS * STATES):
        rows = begin // STATES + tl.arange(0, ROWS)
        offsets = rows[:, None] * STATES + tl.arange(0, STATES)[None, :]
        x = read_states(codes, scales, rows, n, ROOTS, True)
        tl.store(values + offsets, x, offsets < n)


def elements_or(like: Sequence[Tensor], states: Sequence[Tensor]) -> list[Tensor]:
    """States, with tensors like their elements in the places of codes.

    Args:
        like: tensors of the shapes and strides of elements.
        states: as many tensors and vectors of codes.
    """
    check_lengths(like, states)
    return [x if is_coded(state) else state for x, state in zip(like, states, strict=True)]


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
    check_lengths(values, codes)
    devices = {tensor.device for tensor in (*values, *codes)}
    if len(devices) > 1 or any(value.dtype != torch.float32 for value in values):
        raise Unsupported
