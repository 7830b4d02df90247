"""What kernels share on the device: loads and stores, norms, rounding and random bits."""

# Device functions get their types from Triton.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# A global that kernels read must be a constexpr.
_INTERPRETED = tl.constexpr(INTERPRETED)

# The dtypes of curvadion.ops.tensors.DTYPE_CODES.
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


# Partial sums or norms that one program reads at a time.
SUMS = 1024


@triton.jit
def pointer(table, index, dtype: tl.constexpr):
    """The address in a cell of the table, as a pointer.

    Args:
        table: int64 cells.
        index: of the cell.
        dtype: what the pointer addresses.
    """
    return tl.load(table + index).to(tl.pointer_type(dtype))


@triton.jit
def numbers(table, index):
    """A pointer to the float32 numbers of a column.

    Args:
        table: int64 cells.
        index: the column's first cell. Its numbers follow one another from there on, two a cell.
    """
    return (table + index).to(tl.pointer_type(tl.float32))


@triton.jit
def root_of_sums(partial, begin, blocks, SUMS: tl.constexpr):
    """The root of the sum of a tensor's partial sums, float32; added in their order.

    Args:
        partial: (blocks of the launch,) float64.
        begin: the tensor's first block.
        blocks: how many blocks it has.
        SUMS: partial sums that are added at a time.
    """
    sums = tl.zeros((SUMS,), tl.float64)
    done = 0
    while done < blocks:
        j = done + tl.arange(0, SUMS)
        # From the second cache, where the other processors' sums are.
        sums += tl.load(partial + begin + j, j < blocks, 0.0, cache_modifier=".cg")
        done += SUMS
    return tl.sqrt(tl.sum(sums)).to(tl.float32)


@triton.jit
def load_float32(address, offsets, inside, MASKED: tl.constexpr):
    """Elements of a tensor as float32.

    Args:
        address: a pointer to its first element.
        offsets: of the elements, in elements.
        inside: which of them are the tensor's, in the shape of the offsets.
        MASKED: whether to load only these, and zeros for the others; else all are loaded, by wider
            instructions.
    """
    if MASKED:
        return tl.load(address + offsets, inside, 0.0).to(tl.float32)
    return tl.load(address + offsets).to(tl.float32)


@triton.jit
def store(address, offsets, values, inside, MASKED: tl.constexpr):
    """Store elements of a tensor.

    Args:
        address: a pointer to its first element.
        offsets: of the elements, in elements.
        values: in the tensor's dtype and the shape of the offsets.
        inside: which of them are the tensor's, in this shape.
        MASKED: whether to store only these; else all are stored, by wider instructions.
    """
    if MASKED:
        tl.store(address + offsets, values, inside)
    else:
        tl.store(address + offsets, values)


@triton.jit
def to_nearest(value, dtype: tl.constexpr):
    """float32 -> dtype, rounded to nearest.

    The interpreter truncates to bfloat16; there the rounding is done in software.
    """
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        bits = tl.where((bits & 0x7F800000) == 0x7F800000, bits, rounded)
        return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)
    return value.to(dtype)


@triton.jit
def add_product(total, left, right, PRECISION: tl.constexpr):
    """total + left right, in float32.

    The interpreter takes bfloat16 for the integers of its bits; there the factors are widened.

    Args:
        total: (m, n) float32.
        left: (m, k), of any dtype that tensor cores multiply.
        right: (k, n), of the same dtype.
        PRECISION: how float32 factors are rounded, as in ``tl.dot``: "tf32", "tf32x3" or "ieee".
    """
    if _INTERPRETED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, total, input_precision=PRECISION)


@triton.jit
def _mixed(x):
    """A bijection of 32-bit integers, with outputs that look random."""
    x = (x ^ (x >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def random_bits(offsets, seed):
    """16 random bits of each element, as :func:`curvadion.ops.operations.random_bits` has them.

    Args:
        offsets: of the elements in memory.
        seed: uint32.

    Returns:
        uint32, in the shape of the offsets.
    """
    return _mixed(_mixed(offsets.to(tl.uint32)) ^ seed) & 0xFFFF


@triton.jit
def stochastically(value, offsets, seed, dtype: tl.constexpr):
    """float32 -> dtype; bfloat16 is rounded up or down at random, so that the mean is the value.

    The bits are those of :func:`curvadion.ops.operations.round_stochastic`: 16 random bits are
    added to the 16 that bfloat16 lacks, and a carry rounds up.

    Args:
        value: float32.
        offsets: of the elements in memory, which make their random bits differ; in value's shape.
        seed: uint32, equal on all replicas.
        dtype: of the result; all but bfloat16 are rounded to nearest.
    """
    if dtype != tl.bfloat16:
        return to_nearest(value, dtype)
    noise = random_bits(offsets, seed)
    bits = value.to(tl.uint32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    bits = tl.where(finite, (bits + noise) & 0xFFFF0000, bits)
    return to_nearest(bits.to(tl.float32, bitcast=True), dtype)
