"""Means over a group in a few bits per number; what the code loses is sent with the next mean."""

from __future__ import annotations

from collections.abc import Sequence

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
    sizes = [x.numel() for x in X]
    if group is None or group.size() == 1 or not sum(sizes):
        return [x.float() + _take(residual) for x, residual in zip(X, residuals, strict=True)]
    z = _flat([x.float() + residual for x, residual in zip(X, residuals, strict=True)])
    mean, lost = _exchange(z, bits, group)
    for residual, piece in zip(residuals, lost.split([*sizes, len(z) - sum(sizes)]), strict=False):
        residual.copy_(piece.view_as(residual))
    pieces = mean.split([*sizes, len(z) - sum(sizes)])
    return [piece.view(x.shape) for piece, x in zip(pieces, X, strict=False)]


def message_bytes(numbers: int, bits: int) -> int:
    """Bytes of the codes of so many numbers."""
    return -(-numbers // BLOCK) * block_bytes(bits)


def _take(residual: Tensor) -> Tensor:
    taken = residual.clone()
    residual.zero_()
    return taken


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    flat = torch.cat([t.reshape(-1) for t in tensors])
    return torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK))


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
