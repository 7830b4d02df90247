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
from typing import NamedTuple

import torch
from torch import Tensor

from curvadion.division import spans
from curvadion.ops.tensors import Tensors, Unsupported

# The dtypes of weights and residuals that compiled kernels of codes take.
DTYPES = (torch.float32, torch.bfloat16)
FORMAT = 1  # changes with the format, so that replicas detect a mismatch
BITS = (1, 2, 3, 4, 8)  # of a code
BLOCK = 256  # elements
PLANE_BYTES = BLOCK // 8
SCALE_BYTES = 2


class Bits(NamedTuple):
    """Bits of a code on the two ways of a mean over ranks.

    Attributes:
        up: of what each rank sends to the owners of blocks, which average them.
        down: of the means that owners send back.
    """

    up: int
    down: int

    @property
    def written(self) -> int | tuple[int, int]:
        """As users write them: one number if it is that of both ways."""
        return self.up if self.up == self.down else (self.up, self.down)


def block_bytes(bits: int) -> int:
    """Bytes of a block: its codes and its scale."""
    return PLANE_BYTES * bits + SCALE_BYTES


def blocks_of(elements: int) -> int:
    """The number of blocks of a tensor with so many elements."""
    return -(-elements // BLOCK)


def rows_of(X: Tensors) -> list[range]:
    """Each tensor's rows of codes among those of all tensors."""
    return spans(blocks_of(x.numel()) for x in X)


def part(rows: range | slice, first: int, count: int) -> slice:
    """The part of ``rows`` that is in [first, first + count), counted from ``first``."""
    start = min(max(rows.start - first, 0), count)
    return slice(start, max(start, min(rows.stop - first, count)))


@lru_cache
def constants(bits: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Float32 signs (256,), midpoints (2^bits - 1,) and levels (2^bits,) on a device."""
    ascending = levels(bits)
    middle = (ascending[1:] + ascending[:-1]) / 2
    # The seed is a part of the format.
    generator = torch.Generator("cpu").manual_seed(0)
    signs = torch.randint(0, 2, (BLOCK,), generator=generator, device="cpu").float() * 2 - 1
    return signs.to(device), middle.to(device), ascending.to(device)


@lru_cache
def levels(bits: int) -> Tensor:
    """Levels of least mean square error for a normal variable, (2^bits,) float32."""
    # Max, "Quantizing for minimum distortion", 1960; Lloyd, "Least squares quantization in
    # PCM", 1982: the best level is the mean between two edges, and the best edge is halfway
    # between two levels.
    count = 2**bits
    quantiles = (torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) / count
    normal = torch.distributions.Normal(quantiles.new_zeros(()), 1.0)
    # For many bits the best levels are distributed normally, variance 3 (Panter and Dite,
    # 1951).
    result: Tensor = math.sqrt(3) * normal.icdf(quantiles)
    infinity = quantiles.new_tensor([math.inf])
    for _ in range(500):
        edges = torch.cat((-infinity, (result[1:] + result[:-1]) / 2, infinity))
        density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
        # The mean of a normal variable between two edges.
        result = (density[:-1] - density[1:]) / torch.diff(normal.cdf(edges))
    return result.to(torch.float32)


def check_compiled(codes: Tensors, float32: Tensors = (), others: Tensors = ()) -> None:
    """Raise Unsupported unless compiled kernels take these tensors.

    Args:
        codes: at least one tensor of codes; all others must be on its device.
        float32: tensors that must be float32.
        others: tensors that may have any of DTYPES.
    """
    device = codes[0].device
    for tensor in (*codes, *float32, *others):
        if tensor.device != device or not tensor.is_contiguous():
            raise Unsupported
    if any(tensor.dtype != torch.float32 for tensor in float32):
        raise Unsupported
    if any(tensor.dtype not in DTYPES for tensor in others):
        raise Unsupported
