"""Codes of a few bits per number: blocks rotated until they look Gaussian, one scale a block."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

BITS = (1, 2, 3, 4, 8)
# A block is a square, so that the rotation of its numbers is two small matrix products.
SIDE = 16
BLOCK = SIDE * SIDE
SCALE_BYTES = 2
CHUNK = 2**22  # numbers coded at once: what this takes beside does not grow with a tensor


def block_bytes(bits: int) -> int:
    """Bytes that a block of ``BLOCK`` numbers takes: its codes and its scale in bfloat16."""
    return BLOCK * bits // 8 + SCALE_BYTES


def coded_share(bits: int) -> float:
    """What codes take, as a share of float32 numbers."""
    return block_bytes(bits) / (4 * BLOCK)


def bits_within(share: float) -> int:
    """Bits of a code that this share of float32 bytes pays for at every second step; 2 at least.

    Fewer openings with more bits are worse below, and openings at every step worse above
    (docs/convergence.md).
    """
    return max(b for b in BITS if b <= 2 or coded_share(b) <= 2 * share)


def encode(x: Tensor, bits: int) -> Tensor:
    """(k * BLOCK,) float32 -> (k, block_bytes(bits)) uint8.

    Each block is rotated by an orthogonal matrix, a Hadamard matrix after fixed random signs:
    whatever the distribution of its numbers, they then are close to normal, for which the levels
    are the best there are. The error is not random: callers keep it and add it to what they send
    next.
    """
    return torch.cat([_encode(chunk, bits) for chunk in x.split(CHUNK)])


def decode(blocks: Tensor, bits: int) -> Tensor:
    """(k, block_bytes(bits)) uint8 -> (k * BLOCK,) float32."""
    return torch.cat([_decode(chunk, bits) for chunk in blocks.split(CHUNK // BLOCK)])


def _encode(x: Tensor, bits: int) -> Tensor:
    y = _rotate(x)
    largest = y.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    y = y / largest  # whose squares neither overflow nor vanish
    size = y.square().mean(1, keepdim=True).sqrt()
    scale = (largest * size).bfloat16()
    y /= size.clamp_min(1 / BLOCK)
    codes = torch.bucketize(y, _midpoints_on(x.device, bits), out_int32=True).to(torch.uint8)
    return torch.cat((_pack(codes, bits), scale.view(torch.uint8)), dim=1)


def _decode(blocks: Tensor, bits: int) -> Tensor:
    codes, scale = blocks.split([BLOCK * bits // 8, SCALE_BYTES], dim=1)
    y = _levels_on(blocks.device, bits)[_unpack(codes, bits).int()]
    return _rotate_back(y * scale.contiguous().view(torch.bfloat16).float())


@lru_cache
def levels(bits: int) -> Tensor:
    """The 2^bits levels that represent a standard normal number with the least mean square error.

    (2^bits,) float32, ascending (Max, "Quantizing for minimum distortion", 1960; Lloyd, 1982).

    Raises:
        ValueError: if ``bits`` is not one of ``BITS``.
    """
    if bits not in BITS:
        raise ValueError(f"bits={bits!r} must be one of {BITS}")
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64, device="cpu"), 1.0)
    count = 2**bits
    # The best levels for many bits lie like normal numbers of variance 3 (Panter and Dite, 1951).
    middle = (torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) / count
    result: Tensor = math.sqrt(3) * normal.icdf(middle)
    infinity = torch.tensor([math.inf], dtype=torch.float64, device="cpu")
    for _ in range(500):
        edges = torch.cat((-infinity, (result[1:] + result[:-1]) / 2, infinity))
        density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
        # The mean of a normal number between two edges.
        result = (density[:-1] - density[1:]) / torch.diff(normal.cdf(edges))
    return result.to(torch.float32)


@lru_cache
def _levels_on(device: torch.device, bits: int) -> Tensor:
    return levels(bits).to(device)


@lru_cache
def _midpoints_on(device: torch.device, bits: int) -> Tensor:
    ascending = levels(bits)
    return ((ascending[1:] + ascending[:-1]) / 2).to(device)


@lru_cache
def _signs_and_hadamard_on(device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cpu").manual_seed(0)
    bits = torch.randint(0, 2, (BLOCK,), generator=generator, device="cpu")
    signs = bits.float() * 2 - 1
    H = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    while len(H) < SIDE:
        H = torch.cat((torch.cat((H, H), 1), torch.cat((H, -H), 1)))
    return signs.to(device), (H / math.sqrt(SIDE)).to(device)


def _rotate(x: Tensor) -> Tensor:
    signs, H = _signs_and_hadamard_on(x.device)
    squares = (x.view(-1, BLOCK) * signs).view(-1, SIDE, SIDE)
    return (H @ squares @ H).view(-1, BLOCK)


def _rotate_back(y: Tensor) -> Tensor:
    signs, H = _signs_and_hadamard_on(y.device)
    squares = H @ y.view(-1, SIDE, SIDE) @ H
    return (squares.view(-1, BLOCK) * signs).view(-1)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """(k, BLOCK) codes -> (k, BLOCK * bits / 8), uint8 both: one plane of bits after the other."""
    planes = (codes.unsqueeze(1) >> _places(bits, codes.device)[:, None]) & 1
    eights = planes.view(len(codes), BLOCK * bits // 8, 8) << _places(8, codes.device)
    return eights.sum(-1, dtype=torch.uint8)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    ones = (packed.unsqueeze(-1) >> _places(8, packed.device)) & 1
    planes = ones.view(len(packed), bits, BLOCK) << _places(bits, packed.device)[:, None]
    return planes.sum(1, dtype=torch.uint8)


@lru_cache
def _places(bits: int, device: torch.device) -> Tensor:
    return torch.arange(bits, device=device, dtype=torch.uint8)
