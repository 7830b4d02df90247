"""Codes of a few bits in plain PyTorch, the reference of all other backends.

:mod:`curvadion.ops.codes` has the format, and :mod:`curvadion.ops.operations` what each operation
computes. They take any floating dtype and any strides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from curvadion.ops.codes import (
    BLOCK,
    PLANE_BYTES,
    blocks_of,
    check,
    check_average,
    constants,
    part,
    rows_of,
)
from curvadion.ops.tensors import saturated

CHUNK = 2**22  # numbers worked on at once: what this takes beside does not grow with a tensor


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
    given = [list_ for list_ in (X, anchors, residuals) if list_]
    check(codes, bits, sum(blocks_of(x.numel()) for x in X), *given)
    for t, (x, rows) in enumerate(zip(X, rows_of(X), strict=True)):
        lists = (list_[t : t + 1] for list_ in (X, anchors, residuals))
        flat, anchor, residual = (list_[0].reshape(-1) if list_ else None for list_ in lists)
        assert flat is not None
        for chunk, here in _chunks(rows):
            z = flat[here]
            if anchor is not None:
                wide = torch.promote_types(x.dtype, torch.float32)
                z = z.to(wide) - saturated(anchor[here], x.dtype).to(x.dtype).to(wide)
            z = z.float() if residual is None else z.float() + residual[here].float()
            length = len(z)
            z = torch.nn.functional.pad(z, (0, -length % BLOCK)).view(-1, BLOCK)
            codes[chunk] = _encode(z, bits)
            mine = part(chunk, first, len(owned))
            start = first + mine.start - chunk.start
            owned[mine] = z[start : start + mine.stop - mine.start]
            if residual is not None:
                lost = z - _decode(codes[chunk], bits)
                residual[here] = lost.view(-1)[:length].to(residual.dtype)
        if residual is not None and not residuals[t].is_contiguous():
            residuals[t].copy_(residual.view_as(residuals[t]))


def decode_(X: Sequence[Tensor], codes: Tensor, bits: int) -> None:
    """See :func:`curvadion.ops.decode_`."""
    check(codes, bits, sum(blocks_of(x.numel()) for x in X), X)
    for x, rows in zip(X, rows_of(X), strict=True):
        flat = x.reshape(-1)
        for chunk, here in _chunks(rows):
            flat[here] = _decode(codes[chunk], bits).view(-1)[: len(flat[here])].to(x.dtype)
        if not x.is_contiguous():
            x.copy_(flat.view_as(x))


def decode_add_(X: Sequence[Tensor], anchors: Sequence[Tensor], codes: Tensor, bits: int) -> None:
    """See :func:`curvadion.ops.decode_add_`."""
    check(codes, bits, sum(blocks_of(x.numel()) for x in X), X, anchors)
    for x, anchor, rows in zip(X, anchors, rows_of(X), strict=True):
        flat = anchor.reshape(-1)
        for chunk, here in _chunks(rows):
            flat[here] += _decode(codes[chunk], bits).view(-1)[: len(flat[here])]
        if not anchor.is_contiguous():
            anchor.copy_(flat.view_as(anchor))
        x.copy_(saturated(anchor, x.dtype))


def average_codes_(codes: Tensor, own: Tensor, received: Tensor, rank: int, bits: int) -> None:
    """See :func:`curvadion.ops.average_codes_`."""
    check_average(codes, own, received, bits)
    ranks = len(received)
    # By a tensor of this device: GPUs multiply by the inverse of a number of the host.
    count = torch.full((), float(ranks), device=own.device)
    for rows, _ in _chunks(slice(0, len(own))):
        total = torch.zeros_like(own[rows])
        for r in range(ranks):
            total += own[rows] if r == rank else _decode(received[r, rows], bits)
        codes[rows] = _encode(total / count, bits)
        own[rows] = total - count * _decode(codes[rows], bits)


def _chunks(rows: slice) -> Iterator[tuple[slice, slice]]:
    """Rows of a tensor, and which of its numbers are in them."""
    most = CHUNK // BLOCK
    for start in range(rows.start, rows.stop, most):
        chunk = slice(start, min(start + most, rows.stop))
        yield chunk, slice((start - rows.start) * BLOCK, (chunk.stop - rows.start) * BLOCK)


# ---------------------------------------------------------------- blocks, (k, 256) float32


def _encode(x: Tensor, bits: int) -> Tensor:
    signs, midpoints, _ = constants(bits, x.device)
    y = _hadamard(x * signs)
    up, down = _powers(y)
    y *= up
    size = (_sum_in_halves(y.square()) * (1 / BLOCK)).sqrt()
    scale = (size * (1 / 16) * down).bfloat16()
    codes = _count_below(y, midpoints, size)
    return torch.cat((_pack(codes, bits), scale.view(torch.uint8)), dim=1)


def _decode(rows: Tensor, bits: int) -> Tensor:
    signs, _, levels = constants(bits, rows.device)
    planes, scale = rows.split([bits * PLANE_BYTES, rows.shape[1] - bits * PLANE_BYTES], dim=1)
    size = scale.contiguous().view(torch.bfloat16).float() * (1 / 16)
    return _hadamard(levels[_unpack(planes, bits)] * size) * signs


def _hadamard(y: Tensor) -> Tensor:
    for _ in range(8):
        even, odd = y.view(-1, BLOCK // 2, 2).unbind(2)
        y = torch.cat((even + odd, even - odd), dim=1)
    return y


def _powers(y: Tensor) -> tuple[Tensor, Tensor]:
    """The powers of two up and down, (k, 1), from the exponent of the largest number.

    Both are normal: blocks of subnormal numbers stay below 1.
    """
    largest = (y.view(torch.int32) & 0x7FFFFFFF).amax(1, keepdim=True)
    exponent = (largest >> 23).clamp(1, 253)
    return ((254 - exponent) << 23).view(torch.float32), (exponent << 23).view(torch.float32)


def _sum_in_halves(x: Tensor) -> Tensor:
    while x.shape[1] > 1:
        left, right = x.chunk(2, dim=1)
        x = left + right
    return x


def _count_below(y: Tensor, midpoints: Tensor, size: Tensor) -> Tensor:
    """How many of the ascending midpoints, times size, are below each number: uint8."""
    if len(midpoints) < 16:
        below = torch.zeros_like(y, dtype=torch.uint8)
        for middle in midpoints:
            below += y > middle * size
        return below
    places = torch.zeros_like(y, dtype=torch.int32)
    half = (len(midpoints) + 1) // 2
    while half:
        places += half * (y > midpoints[places + (half - 1)] * size)
        half //= 2
    return places.to(torch.uint8)


def _pack(codes: Tensor, bits: int) -> Tensor:
    eights = codes.view(-1, 1, 8, PLANE_BYTES)
    ones = (eights >> _places(bits, codes.device).view(-1, 1, 1)) & 1
    planes = (ones << _places(8, codes.device).view(-1, 1)).sum(2, dtype=torch.uint8)
    return planes.view(-1, bits * PLANE_BYTES)


def _unpack(planes: Tensor, bits: int) -> Tensor:
    each = planes.reshape(-1, bits, 1, PLANE_BYTES)
    ones = (each >> _places(8, planes.device).view(-1, 1)) & 1
    codes = (ones << _places(bits, planes.device).view(-1, 1, 1)).sum(1, dtype=torch.uint8)
    return codes.view(-1, BLOCK).int()


def _places(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device, dtype=torch.uint8)
