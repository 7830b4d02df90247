"""The format of codes of a few bits per element, and the arithmetic that all backends share.

A block is 256 elements x; a tensor's last block is padded with zeros. Its row of bytes
follows from

    y      H (signs x), H without its factor 1/16: eight stages, each of which writes the sums
           of neighbours, y0 + y1, y2 + y3, ..., and behind them the differences
    up     the power of two by which the largest |y| gets between 1 and 2; down = 1 / up
    size   the root of the mean of (y up)^2, whose sum adds the second half of the squares to
           the first until one number is left
    scale  size / 16 down, in bfloat16
    codes  the number of midpoints, times size, below each element of y up

and a row stands for signs (H y), where y = level[code] (scale / 16).

All arithmetic is float32, rounded to nearest after each operation, without fused
multiply-adds, so every backend gives the same bits.

A row is a plane of 32 bytes for each bit of a code, then the scale, its low byte first. Bit k
of byte j of plane p is bit p of the code of element 32 k + j, so that all bytes of a plane
are packed by the same shifts.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from curvadion.division import spans
from curvadion.ops.tensors import Tensors, Unsupported

# The dtypes that kernels of codes take: those of weights and residuals.
DTYPES = (torch.float32, torch.bfloat16)
FORMAT = 1  # changes with the format, so that replicas detect a mismatch
BITS = (1, 2, 3, 4, 8)
BLOCK = 256
PLANE_BYTES, SCALE_BYTES = BLOCK // 8, 2


def block_bytes(bits: int) -> int:
    """Bytes of a block: its codes and its scale."""
    return PLANE_BYTES * bits + SCALE_BYTES


def blocks_of(numbers: int) -> int:
    """The number of blocks of a tensor's elements."""
    return -(-numbers // BLOCK)


def rows_of(X: Tensors) -> list[range]:
    """Each tensor's rows among those of all."""
    return spans(blocks_of(x.numel()) for x in X)


def part(rows: range | slice, first: int, count: int) -> slice:
    """The part of ``rows`` in [first, first + count), counted from ``first``."""
    start = min(max(rows.start - first, 0), count)
    return slice(start, max(start, min(rows.stop - first, count)))


@lru_cache
def constants(bits: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Float32 signs (256,), midpoints (2^bits - 1,) and levels (2^bits,) on a device."""
    ascending = levels(bits)
    middle = (ascending[1:] + ascending[:-1]) / 2
    generator = torch.Generator("cpu").manual_seed(0)
    signs = torch.randint(0, 2, (BLOCK,), generator=generator, device="cpu").float() * 2 - 1
    return signs.to(device), middle.to(device), ascending.to(device)


@lru_cache
def levels(bits: int) -> Tensor:
    """Levels of least mean square error for a normal variable, (2^bits,) float32."""
    # Max, "Quantizing for minimum distortion", 1960; Lloyd, 1982.
    count = 2**bits
    middle = (torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) / count
    normal = torch.distributions.Normal(middle.new_zeros(()), 1.0)
    # For many bits the best levels are distributed normally, variance 3 (Panter and Dite,
    # 1951).
    result: Tensor = math.sqrt(3) * normal.icdf(middle)
    infinity = middle.new_tensor([math.inf])
    for _ in range(500):
        edges = torch.cat((-infinity, (result[1:] + result[:-1]) / 2, infinity))
        density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
        # The mean of a normal variable between two edges.
        result = (density[:-1] - density[1:]) / torch.diff(normal.cdf(edges))
    return result.to(torch.float32)


def check_compiled(codes: Tensors, float32: Tensors = (), others: Tensors = ()) -> None:
    """Raise Unsupported unless compiled kernels take codes, float32 and other tensors."""
    every, device = [*codes, *float32, *others], codes[0].device
    fit = all(t.is_contiguous() and t.device == device for t in every)
    wide = all(t.dtype == torch.float32 for t in float32)
    if not (fit and wide and all(t.dtype in DTYPES for t in others)):
        raise Unsupported
