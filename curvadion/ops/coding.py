"""Operations on codes of a few bits, each defined in plain PyTorch, which takes any dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from curvadion.ops.backends import fused
from curvadion.ops.code_format import (
    BLOCK,
    PLANE_BYTES,
    SCALE_BYTES,
    block_bytes,
    blocks_of,
    constants,
    part,
    rows_of,
)
from curvadion.ops.tensors import Tensors

CHUNK = 2**22  # elements at once, which bounds working memory


def encode_difference_(
    codes: Tensor,
    X: Tensors,
    anchors: Tensors = (),
    residuals: Tensors = (),
    *,
    bits: int,
    owned: Tensor | None = None,
    first: int = 0,
) -> None:
    """codes <- codes of z = X - anchor + residual, residual <- z - decoded codes.

    All backends give the same bits. The anchor is rounded to X's dtype, and z is float32.
    Elements are in row-major order, whatever a tensor's strides.

    codes: (rows, block_bytes(bits)) uint8, the rows of all tensors of X. anchors (float32 or
    wider), residuals: of X's shapes; () for zeros, and without residuals the codes' error is
    dropped. bits: one of ``codes.BITS``. owned: (k, 256) float32, gets z of k rows from row
    ``first`` on. ValueError if codes have another shape or dtype.
    """
    _check(codes, bits, X)
    owned = codes.new_empty(0, BLOCK, dtype=torch.float32) if owned is None else owned
    X, anchors = ([t.contiguous() for t in list_] for list_ in (X, anchors))
    with _row_major(residuals) as R:
        writes = (codes, R, owned)
        if fused("encode_difference_", codes, X, anchors, R, bits, owned, first, writes=writes):
            return
        for t, (x, rows) in enumerate(zip(X, rows_of(X), strict=True)):
            anchor, residual = (list_[t].view(-1) if list_ else None for list_ in (anchors, R))
            for chunk, here in _chunks(rows):
                z = x.view(-1)[here]
                if anchor is not None:
                    wide = torch.promote_types(x.dtype, torch.float32)
                    z = z.to(wide) - anchor[here].to(x.dtype).to(wide)
                z, length = z.float(), len(z)
                if residual is not None:
                    z = z + residual[here].float()
                z = torch.nn.functional.pad(z, (0, -length % BLOCK)).view(-1, BLOCK)
                codes[chunk] = _encode(z, bits)
                mine = part(chunk, first, len(owned))
                start = first + mine.start - chunk.start
                owned[mine] = z[start : start + mine.stop - mine.start]
                if residual is not None:
                    lost = z - _decode(codes[chunk], bits)
                    residual[here] = lost.view(-1)[:length].to(residual.dtype)


def decode_add_(X: Tensors, anchors: Tensors, codes: Tensor, bits: int) -> None:
    """anchor <- anchor + decoded codes, X <- anchor; without anchors X <- decoded codes."""
    _check(codes, bits, X)
    with _row_major(X) as Y, _row_major(anchors) as A:
        if fused("decode_add_", Y, A, codes, bits, writes=[Y, A]):
            return
        for t, (y, rows) in enumerate(zip(Y, rows_of(Y), strict=True)):
            flat = y.view(-1)
            for chunk, here in _chunks(rows):
                now = _decode(codes[chunk], bits).view(-1)[: len(flat[here])]
                flat[here] = A[t].view(-1)[here].add_(now) if A else now


def average_codes_(codes: Tensor, own: Tensor, received: Tensor, rank: int, bits: int) -> None:
    """codes <- codes of total / ranks, own <- total - ranks * decoded codes.

    The total is summed in the order of the ranks, in float32. codes: (k, block_bytes(bits))
    uint8. own: (k, 256) float32, this rank's values. received: (ranks, k, block_bytes(bits))
    uint8, the codes of all ranks; those of ``rank`` are not read.
    """
    if fused("average_codes_", codes, own, received, rank, bits, writes=[codes, own]):
        return
    ranks = len(received)
    # Divide by a tensor on this device: GPUs multiply by the inverse of a host number.
    count = torch.full((), float(ranks), device=own.device)
    for chunk, _ in _chunks(range(len(own))):
        total = torch.zeros_like(own[chunk])
        for r in range(ranks):
            total += own[chunk] if r == rank else _decode(received[r, chunk], bits)
        codes[chunk] = _encode(total / count, bits)
        own[chunk] = total - count * _decode(codes[chunk], bits)


def _check(codes: Tensor, bits: int, X: Tensors) -> None:
    shape = sum(blocks_of(x.numel()) for x in X), block_bytes(bits)
    if codes.shape != shape or codes.dtype != torch.uint8:
        raise ValueError(f"codes of shape {codes.shape}, {codes.dtype}: they must be {shape} uint8")


@contextmanager
def _row_major(tensors: Tensors) -> Iterator[list[Tensor]]:
    """Row-major tensors, copies if necessary, whose changes are copied back."""
    copies = [t.contiguous() for t in tensors]
    yield copies
    for t, copy in zip(tensors, copies, strict=True):
        if copy is not t:
            t.copy_(copy)


def _chunks(rows: range) -> Iterator[tuple[slice, slice]]:
    """Chunks of a tensor: rows, and the elements in them."""
    most = CHUNK // BLOCK
    for start in range(rows.start, rows.stop, most):
        chunk = slice(start, min(start + most, rows.stop))
        yield chunk, slice((start - rows.start) * BLOCK, (chunk.stop - rows.start) * BLOCK)


def _encode(x: Tensor, bits: int) -> Tensor:
    """Encode blocks, (k, 256) float32, as rows of codes."""
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
    planes, scale = rows.split([bits * PLANE_BYTES, SCALE_BYTES], dim=1)
    size = scale.contiguous().view(torch.bfloat16).float() * (1 / 16)
    return _hadamard(levels[_unpack(planes, bits)] * size) * signs


def _hadamard(y: Tensor) -> Tensor:
    for _ in range(8):
        even, odd = y.view(-1, BLOCK // 2, 2).unbind(2)
        y = torch.cat((even + odd, even - odd), dim=1)
    return y


def _powers(y: Tensor) -> tuple[Tensor, Tensor]:
    """The powers of two up and down, (k, 1), both of which are normal."""
    largest = (y.view(torch.int32) & 0x7FFFFFFF).amax(1, keepdim=True)
    exponent = (largest >> 23).clamp(1, 253)
    return ((254 - exponent) << 23).view(torch.float32), (exponent << 23).view(torch.float32)


def _sum_in_halves(x: Tensor) -> Tensor:
    while x.shape[1] > 1:
        left, right = x.chunk(2, dim=1)
        x = left + right
    return x


def _count_below(y: Tensor, midpoints: Tensor, size: Tensor) -> Tensor:
    """The number of ascending midpoints, times size, below each element: uint8."""
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
