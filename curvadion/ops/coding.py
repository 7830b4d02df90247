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
    Bits,
    block_bytes,
    blocks_of,
    constants,
    part,
    rows_of,
)
from curvadion.ops.tensors import Tensors, wide_dtype

# Elements that plain PyTorch encodes or decodes at a time, which bounds its working memory.
CHUNK = 2**22


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
    """Encode how far weights are from their anchors, and keep what the codes lose; in place.

        z        = X - anchor + residual
        codes    <- codes of z
        residual <- z - decoded codes

    All backends give the same bits. The anchor is rounded to X's dtype, and z is float32.
    Elements are in row-major order, whatever a tensor's strides.

    Args:
        codes: (rows, block_bytes(bits)) uint8, the rows of all tensors of X.
        X: weights, of any shapes and floating dtypes.
        anchors: float32 or wider, of X's shapes; () for zeros.
        residuals: of X's shapes, in any floating dtypes; () for zeros, in which case the
            codes' errors are dropped.
        bits: of a code, one of ``code_format.BITS``.
        owned: (k, 256) float32, gets z of k rows, with zeros behind a tensor's last element;
            None if no z is needed.
        first: the first of these k rows.

    Raises:
        ValueError: codes have another shape or dtype.
    """
    _check(codes, bits, X)
    if owned is None:
        owned = codes.new_empty(0, BLOCK, dtype=torch.float32)
    X = [x.contiguous() for x in X]
    anchors = [anchor.contiguous() for anchor in anchors]
    with _row_major(residuals) as R:
        writes = (codes, R, owned)
        if fused("encode_difference_", codes, X, anchors, R, bits, owned, first, writes=writes):
            return
        for t, (x, rows) in enumerate(zip(X, rows_of(X), strict=True)):
            x = x.view(-1)
            anchor = anchors[t].view(-1) if anchors else None
            residual = R[t].view(-1) if R else None
            for chunk, elements in _chunks(rows):
                # z = X - anchor + residual
                z = x[elements]
                if anchor is not None:
                    wide = wide_dtype(x.dtype)
                    z = z.to(wide) - anchor[elements].to(x.dtype).to(wide)
                length = len(z)
                z = z.float()
                if residual is not None:
                    z = z + residual[elements].float()
                z = torch.nn.functional.pad(z, (0, -length % BLOCK)).view(-1, BLOCK)
                # codes <- codes of z
                codes[chunk] = _encode(z, bits)
                overlap = part(chunk, first, len(owned))
                start = first + overlap.start - chunk.start
                owned[overlap] = z[start : start + overlap.stop - overlap.start]
                # residual <- z - decoded codes
                if residual is not None:
                    lost = z - _decode(codes[chunk], bits)
                    residual[elements] = lost.view(-1)[:length].to(residual.dtype)


def decode_add_(X: Tensors, anchors: Tensors, codes: Tensor, bits: int) -> None:
    """Move anchors by decoded codes, and weights to their anchors; in place.

        anchor <- anchor + decoded codes
        X      <- anchor

    and without anchors X <- decoded codes.

    Args:
        X: weights, of any shapes and floating dtypes.
        anchors: float32 or wider, of X's shapes; () for none.
        codes: (rows, block_bytes(bits)) uint8, the rows of all tensors of X.
        bits: of a code, one of ``code_format.BITS``.

    Raises:
        ValueError: codes have another shape or dtype.
    """
    _check(codes, bits, X)
    with _row_major(X) as Y, _row_major(anchors) as A:
        if fused("decode_add_", Y, A, codes, bits, writes=[Y, A]):
            return
        for t, (y, rows) in enumerate(zip(Y, rows_of(Y), strict=True)):
            y = y.view(-1)
            for chunk, elements in _chunks(rows):
                decoded = _decode(codes[chunk], bits).view(-1)[: len(y[elements])]
                if A:
                    # anchor <- anchor + decoded codes
                    y[elements] = A[t].view(-1)[elements].add_(decoded)
                else:
                    y[elements] = decoded


def average_codes_(codes: Tensor, own: Tensor, received: Tensor, rank: int, bits: Bits) -> None:
    """Encode the mean of what all ranks have sent, and keep what the codes lose; in place.

        total  = sum over ranks of decoded codes, or of values on this rank
        codes <- codes of total / ranks
        own   <- total - ranks * decoded codes

    The total is summed in the order of the ranks, in float32.

    Args:
        codes: (k, block_bytes(bits.down)) uint8.
        own: (k, 256) float32, this rank's values, which need not be decoded.
        received: (ranks, k, block_bytes(bits.up)) uint8, the codes of all ranks; those of this
            rank are not read.
        rank: this rank.
        bits: of a received code and of one of the mean, each one of ``code_format.BITS``.
    """
    if fused("average_codes_", codes, own, received, rank, bits, writes=[codes, own]):
        return
    ranks = len(received)
    # Divide by a tensor on this device: GPUs multiply by the inverse of a host number.
    count = torch.full((), float(ranks), device=own.device)
    for chunk, _ in _chunks(range(len(own))):
        total = torch.zeros_like(own[chunk])
        for r in range(ranks):
            total += own[chunk] if r == rank else _decode(received[r, chunk], bits.up)
        # codes <- codes of total / ranks
        codes[chunk] = _encode(total / count, bits.down)
        # own <- total - ranks * decoded codes
        own[chunk] = total - count * _decode(codes[chunk], bits.down)


def _check(codes: Tensor, bits: int, X: Tensors) -> None:
    """Raise ValueError unless codes have the shape and dtype of those of X."""
    shape = sum(blocks_of(x.numel()) for x in X), block_bytes(bits)
    if codes.shape != shape or codes.dtype != torch.uint8:
        raise ValueError(
            f"codes of shape {tuple(codes.shape)}, {codes.dtype}: for bits={bits} they must be "
            f"{shape}, torch.uint8"
        )


@contextmanager
def _row_major(tensors: Tensors) -> Iterator[list[Tensor]]:
    """Row-major tensors, copies if necessary, whose changes are copied back."""
    copies = [t.contiguous() for t in tensors]
    yield copies
    for t, copy in zip(tensors, copies, strict=True):
        if copy is not t:
            t.copy_(copy)


def _chunks(rows: range) -> Iterator[tuple[slice, slice]]:
    """Chunks of a tensor's rows, and the elements of the tensor in them."""
    size = CHUNK // BLOCK
    for start in range(rows.start, rows.stop, size):
        stop = min(start + size, rows.stop)
        elements = slice((start - rows.start) * BLOCK, (stop - rows.start) * BLOCK)
        yield slice(start, stop), elements


def _encode(x: Tensor, bits: int) -> Tensor:
    """Encode blocks as rows of codes; see :mod:`curvadion.ops.code_format`.

    Args:
        x: (k, 256) float32.
        bits: of a code.

    Returns:
        (k, block_bytes(bits)) uint8.
    """
    signs, midpoints, _ = constants(bits, x.device)
    # y = H (signs x) up
    y = _hadamard(x * signs)
    up, down = _powers(y)
    y *= up
    # size = sqrt(mean of y^2)
    size = (_sum_in_halves(y.square()) * (1 / BLOCK)).sqrt()
    # scale = size / 16 down
    scale = (size * (1 / 16) * down).bfloat16()
    codes = _count_below(y, midpoints, size)
    return torch.cat((_pack(codes, bits), scale.view(torch.uint8)), dim=1)


def _decode(rows: Tensor, bits: int) -> Tensor:
    """The elements for which rows of codes stand.

    Args:
        rows: (k, block_bytes(bits)) uint8.
        bits: of a code.

    Returns:
        (k, 256) float32.
    """
    signs, _, levels = constants(bits, rows.device)
    planes, scale = rows.split([bits * PLANE_BYTES, SCALE_BYTES], dim=1)
    size = scale.contiguous().view(torch.bfloat16).float() * (1 / 16)
    # signs (H y), with y = level[code] (scale / 16)
    return _hadamard(levels[_unpack(planes, bits)] * size) * signs


def _hadamard(y: Tensor) -> Tensor:
    """H y of blocks, (k, 256): sums of neighbours and then their differences, eight times."""
    for _ in range(8):
        even, odd = y.view(-1, BLOCK // 2, 2).unbind(2)
        y = torch.cat((even + odd, even - odd), dim=1)
    return y


def _powers(y: Tensor) -> tuple[Tensor, Tensor]:
    """The powers of two up and down of blocks (k, 256), both (k, 1) and normal float32."""
    # Without the sign bit, floats sort like their bits. Bits 23 to 30 are the exponent.
    largest = (y.view(torch.int32) & 0x7FFFFFFF).amax(1, keepdim=True)
    exponent = (largest >> 23).clamp(1, 253)
    up = ((254 - exponent) << 23).view(torch.float32)
    down = (exponent << 23).view(torch.float32)
    return up, down


def _sum_in_halves(x: Tensor) -> Tensor:
    """Sums of blocks, (k, 256) -> (k, 1), in an order that all backends keep."""
    while x.shape[1] > 1:
        left, right = x.chunk(2, dim=1)
        x = left + right
    return x


def _count_below(y: Tensor, midpoints: Tensor, size: Tensor) -> Tensor:
    """The number of midpoints, times size, below each element, by binary search.

    Args:
        y: (k, 256) float32.
        midpoints: (2^bits - 1,) float32, ascending.
        size: (k, 1) float32.

    Returns:
        (k, 256) uint8.
    """
    places = torch.zeros_like(y, dtype=torch.int32)
    half = (len(midpoints) + 1) // 2
    while half:
        places += half * (y > midpoints[places + (half - 1)] * size)
        half //= 2
    return places.to(torch.uint8)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Codes (k, 256) uint8 as planes of bits, (k, 32 bits) uint8."""
    # Element 32 i + j of a block is bit i of byte j.
    elements = codes.view(-1, 1, 8, PLANE_BYTES)
    ones = (elements >> _places(bits, codes.device).view(-1, 1, 1)) & 1
    planes = (ones << _places(8, codes.device).view(-1, 1)).sum(2, dtype=torch.uint8)
    return planes.view(-1, bits * PLANE_BYTES)


def _unpack(planes: Tensor, bits: int) -> Tensor:
    """Planes of bits, (k, 32 bits) uint8, as codes (k, 256) int32."""
    octets = planes.reshape(-1, bits, 1, PLANE_BYTES)
    ones = (octets >> _places(8, planes.device).view(-1, 1)) & 1
    codes = (ones << _places(bits, planes.device).view(-1, 1, 1)).sum(1, dtype=torch.uint8)
    return codes.view(-1, BLOCK).int()


def _places(count: int, device: torch.device) -> Tensor:
    """0, 1, ..., count - 1 in uint8, by which bits are shifted."""
    return torch.arange(count, device=device, dtype=torch.uint8)
