"""States in 8 bits an element, each operation defined in plain PyTorch.

A block is 256 elements x, in their order in memory; the last one is padded with zeros. Its codes
c are integers from -127 to 127, and share a power of two:

    2^e    the smallest power with max |x| <= 127 2^e, and e in [-126, 126]
    c      x / 2^e, rounded to one of its two neighbours

and they stand for the elements c 2^e. These are exact in bfloat16, and encoding them again gives
the same elements: a state that is only decoded and encoded does not change.

Codes of roots are of states that are not negative, such as second moments. They stand for
(c 2^e)^2, where c = 1 is the smallest one of an element that is not zero: a second moment of
zero would make its step infinite. Their e is at least -63, with which squares are normal float32
numbers.

The codes of a tensor are one vector of bytes: 256 for each block, and behind them the e of all
blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from curvadion.ops.backends import fused
from curvadion.ops.operations import random_bits
from curvadion.ops.tensors import Tensors

BLOCK = 256  # elements
LARGEST = 127  # of the codes
LEAST_EXPONENT = -126  # 2^e and 2^-e are normal float32 numbers
LEAST_EXPONENT_OF_ROOTS = -63  # and so is (2^e)^2
# Elements that plain PyTorch encodes at a time, to stay in a CPU's caches.
CHUNK = 2**18
# 127 = 1.984375 * 2^6. This is the fraction's part of its bits in float32.
FRACTION_OF_LARGEST = 0x7E0000


def code_bytes(elements: int) -> int:
    """The bytes of a tensor's codes."""
    return blocks_of(elements) * (BLOCK + 1)


def blocks_of(elements: int) -> int:
    """The number of blocks of a tensor."""
    return -(-elements // BLOCK)


def encode_states_(
    codes: Tensors, values: Tensors, seeds: Sequence[int] | None, *, roots: bool
) -> None:
    """codes <- codes of the values.

    Args:
        codes: vectors of :func:`code_bytes` int8 elements each.
        values: float32, of any shapes, without gaps in memory, below 2^100.
        seeds: an integer below 2^32 per tensor, with which elements (or their roots) are
            rounded up or down at random, so that the mean is exact; None rounds to nearest.
        roots: whether they are codes of roots; the values are then not negative.

    Raises:
        ValueError: the lists have unequal lengths, or codes are of other numbers of elements.
    """
    _check(codes, values)
    if fused("encode_states_", codes, values, seeds, roots, writes=[codes]):
        return
    seed_or_none: Sequence[int | None] = seeds or [None] * len(values)
    for coded, value, seed in zip(codes, values, seed_or_none, strict=True):
        x = _in_memory_order(value)
        c, exponents = _parts(coded)
        for start in range(0, len(x), CHUNK):
            part = x[start : start + CHUNK]
            first = start // BLOCK
            blocks = slice(first, first + blocks_of(len(part)))
            c[blocks], exponents[blocks] = _encode(part, start, seed, roots=roots)


def decode_states(codes: Tensors, like: Tensors, *, roots: bool) -> list[Tensor]:
    """The elements for which codes stand.

    Args:
        codes: vectors of :func:`code_bytes` int8 elements each.
        like: tensors of the shapes and strides of the result.
        roots: whether they are codes of roots.

    Returns:
        Float32 tensors without gaps in memory.

    Raises:
        ValueError: the lists have unequal lengths, or codes are of other numbers of elements.
    """
    _check(codes, like)
    values = [torch.empty_like(x, dtype=torch.float32) for x in like]
    if fused("decode_states_", values, codes, roots, writes=[values]):
        return values
    for value, coded in zip(values, codes, strict=True):
        c, exponents = _parts(coded)
        x = _in_memory_order(value)
        for start in range(0, len(x), CHUNK):
            part = x[start : start + CHUNK]
            first = start // BLOCK
            blocks = slice(first, first + blocks_of(len(part)))
            # c 2^e
            elements = (c[blocks].float() * _power(exponents[blocks])).view(-1)[: len(part)]
            part.copy_(elements.square() if roots else elements)
    return values


def _check(codes: Tensors, values: Tensors) -> None:
    """Raise ValueError for codes of other tensors, beyond which a kernel would write."""
    for coded, value in zip(codes, values, strict=True):
        if len(coded) != code_bytes(value.numel()):
            raise ValueError(
                f"{len(coded)} bytes of codes for a tensor of shape {tuple(value.shape)}, which "
                f"needs {code_bytes(value.numel())}: was a parameter's shape changed?"
            )


def _parts(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, (blocks, 256), and exponents, (blocks, 1); views."""
    blocks = len(codes) // (BLOCK + 1)
    return codes[: blocks * BLOCK].view(blocks, BLOCK), codes[blocks * BLOCK :].view(blocks, 1)


def _in_memory_order(tensor: Tensor) -> Tensor:
    """A vector of a tensor's elements, which lie in memory without gaps; a view."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _encode(x: Tensor, start: int, seed: int | None, *, roots: bool) -> tuple[Tensor, Tensor]:
    """Codes, (blocks, 256) int8, and exponents, (blocks, 1) int8.

    Args:
        x: a vector of float32 elements.
        start: the position of the first one in its tensor.
        seed: of random rounding; None rounds to nearest.
        roots: whether to encode the elements' roots.
    """
    padding = -len(x) % BLOCK
    if roots:
        x = x.sqrt()
    x = torch.nn.functional.pad(x, (0, padding)).view(-1, BLOCK)
    # Floats that are not negative sort like their bits: 8 of the exponent, 23 of the fraction.
    largest = x.abs().amax(1, keepdim=True).view(torch.int32)
    # max |x| = (1 + fraction) 2^exponent <= 127 2^e
    exponents = (largest >> 23) - 127 - 6 + ((largest & 0x7FFFFF) > FRACTION_OF_LARGEST).int()
    least = LEAST_EXPONENT_OF_ROOTS if roots else LEAST_EXPONENT
    exponents = exponents.clamp(least, -LEAST_EXPONENT)
    scaled = x * _power(-exponents)
    if seed is None:
        # Ties, such as half of the means of two replicas' elements, to even: always down, they
        # would move the mean of all elements.
        c = scaled.round()
    else:
        # x / 2^e lies between low and low + 1.
        low = scaled.floor()
        positions = torch.arange(start, start + x.numel(), device=x.device).view_as(x)
        # 16 random bits as a number in [0, 1)
        c = low + (scaled - low > random_bits(positions, seed).float() * 2.0**-16)
    if roots:
        c = torch.where(scaled > 0, c.clamp_min(1), c)
    return c.to(torch.int8), exponents.to(torch.int8)


def _power(exponents: Tensor) -> Tensor:
    """2^e in float32, for integers e from -126 to 126."""
    return ((exponents.int() + 127) << 23).view(torch.float32)
