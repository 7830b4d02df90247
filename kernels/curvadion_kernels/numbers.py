"""What kernels share on the device: loads and stores, rounding and random bits."""

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


@triton.jit
def pointer(table, index, dtype: tl.constexpr):
    """The address in a cell of the table, as a pointer."""
    return tl.load(table + index).to(tl.pointer_type(dtype))


@triton.jit
def numbers(table, index):
    """A pointer to the float32 numbers that begin in cell ``index`` of the table."""
    return (table + index).to(tl.pointer_type(tl.float32))


@triton.jit
def load_float32(address, at, here, MASKED: tl.constexpr):
    """Elements ``at`` as float32; with MASKED, only those that are ``here``, and else zeros."""
    if MASKED:
        return tl.load(address + at, here, 0.0).to(tl.float32)
    return tl.load(address + at).to(tl.float32)


@triton.jit
def store(address, at, values, here, MASKED: tl.constexpr):
    """Store elements ``at``; with MASKED, only those that are ``here``."""
    if MASKED:
        tl.store(address + at, values, here)
    else:
        tl.store(address + at, values)


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
    """
    if _INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision=PRECISION)


@triton.jit
def _mixed(x):
    x = (x ^ (x >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def stochastically(value, offsets, seed, dtype: tl.constexpr):
    """float32 -> dtype; bfloat16 is rounded up or down at random, as ops.operations does."""
    if dtype != tl.bfloat16:
        return to_nearest(value, dtype)
    noise = _mixed(_mixed(offsets.to(tl.uint32)) ^ seed) & 0xFFFF
    bits = value.to(tl.uint32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    bits = tl.where(finite, (bits + noise) & 0xFFFF0000, bits)
    return to_nearest(bits.to(tl.float32, bitcast=True), dtype)
