"""Means over a group in a few bits per number; what the code loses is sent with the next mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.quantization import BLOCK, block_bytes, decode, encode


def quantized_mean(
    X: Sequence[Tensor], residuals: Sequence[Tensor], bits: int, group: dist.ProcessGroup | None
) -> list[Tensor]:
    """The means of X over the group, the same bits on every rank, sent in codes of ``bits`` bits.

    Every rank is the owner of an equal share of all numbers. Each sends its codes to the owners,
    which sum them in float32, so that no sum can overflow, and send the codes of the means back.
    The residuals hold what these codes have lost, and are added to what is sent next: summed over
    calls, means returned differ from true means by no more than the last call's residuals.

    Args:
        X: tensors of any shapes, the same on every rank.
        residuals: float32 tensors of the same shapes, zero before the first call; updated.
        bits: of a code, one of ``quantization.BITS``.
        group: the ranks; None stands for this process alone, whose means are X.

    Returns:
        Float32 tensors of X's shapes.

    Sends: 2 (n - 1) / n times the codes of all numbers, as :func:`message_bytes` gives them, on
    average over the n ranks.
    """
    if group is None or group.size() == 1 or not sum(x.numel() for x in X):
        return [x.float() + _take(residual) for x, residual in zip(X, residuals, strict=True)]
    z = _blocks([x.float() + residual for x, residual in zip(X, residuals, strict=True)])
    mean, lost = _exchange(z, bits, group)
    padded = [BLOCK * _count(x.numel()) for x in X]
    for residual, piece in zip(residuals, lost.split(padded), strict=True):
        residual.copy_(piece[: residual.numel()].view_as(residual))
    pieces = zip(X, mean.split(padded), strict=True)
    return [piece[: x.numel()].view(x.shape) for x, piece in pieces]


def message_bytes(sizes: Iterable[int], bits: int) -> int:
    """Bytes of the codes of tensors of so many numbers; each has blocks, and scales, of its own."""
    return sum(map(_count, sizes)) * block_bytes(bits)


def _count(numbers: int) -> int:
    return -(-numbers // BLOCK)


def _take(residual: Tensor) -> Tensor:
    taken = residual.clone()
    residual.zero_()
    return taken


def _blocks(tensors: Sequence[Tensor]) -> Tensor:
    flat = [torch.nn.functional.pad(t.reshape(-1), (0, -t.numel() % BLOCK)) for t in tensors]
    return torch.cat(flat)


def _exchange(z: Tensor, bits: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """The mean of z, (k * BLOCK,), over the group, and what this rank's codes have lost of z.

    An owner needs no code of its own numbers. What the code of their mean loses it keeps, times
    the number of ranks, where others keep what the code they sent it has lost.
    """
    ranks, rank = group.size(), group.rank()
    blocks = len(z) // BLOCK
    shares = [blocks // ranks + (i < blocks % ranks) for i in range(ranks)]
    first = sum(shares[:rank])
    own = slice(first * BLOCK, (first + shares[rank]) * BLOCK)

    sent = encode(z, bits)
    lost = z - decode(sent, bits)
    received = sent.new_empty(ranks * shares[rank], sent.shape[1])
    dist.all_to_all_single(received, sent, [shares[rank]] * ranks, shares, group=group)
    summands = decode(received, bits).view(ranks, -1)
    summands[rank] = z[own]
    total = summands.sum(0)

    code = encode(total / ranks, bits)
    codes = torch.empty_like(sent)
    copies = code.repeat(ranks, 1)
    dist.all_to_all_single(codes, copies, shares, [shares[rank]] * ranks, group=group)
    mean = decode(codes, bits)
    lost[own] = total - ranks * mean[own]
    return mean, lost
