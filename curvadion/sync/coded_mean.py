"""Means over a group in a few bits per number; what the code loses is sent with the next mean."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.sync.codec import BLOCK, block_bytes, decode, encode


def coded_mean(
    X: Iterable[Tensor], residuals: Sequence[Tensor], bits: int, group: dist.ProcessGroup | None
) -> Iterator[Tensor]:
    """The means of X over the group, the same bits on every rank, sent in codes of ``bits`` bits.

    Every rank is the owner of an equal share of all numbers. Each sends its codes to the owners,
    which sum them in float32, so that no sum can overflow, and send the codes of the means back.
    The residuals hold what these codes have lost, and are added to what is sent next: summed over
    calls, means returned differ from true means by no more than the last call's residuals.

    Args:
        X: tensors of the residuals' shapes, the same on every rank; each is taken once, when the
            one before it is in codes.
        residuals: float32 tensors, zero before the first call; updated.
        bits: of a code, one of ``codec.BITS``.
        group: the ranks; None stands for this process alone, whose means are X.

    Yields:
        Float32 tensors of X's shapes. Nothing is sent before the first is asked for, and all is
        sent then. Besides one tensor, the codes and twice a share of the numbers in float32 are
        held meanwhile.

    Sends: 2 (n - 1) / n times the codes of all numbers, as :func:`message_bytes` gives them, on
    average over the n ranks.
    """
    if group is None or group.size() == 1 or not sum(r.numel() for r in residuals):
        for x, residual in zip(X, residuals, strict=True):
            yield x.float() + _take(residual)
        return
    ends = accumulate((_count(r.numel()) for r in residuals), initial=0)
    spans = [range(*span) for span in pairwise(ends)]
    codes, own = _encode(X, residuals, spans, bits, _own_blocks(spans[-1].stop, group))
    _exchange_(codes, own.z, bits, group)
    for residual, span in zip(residuals, spans, strict=True):
        own.store_(residual, span)
        mean = decode(codes[span.start : span.stop], bits)
        yield mean[: residual.numel()].view(residual.shape)


def message_bytes(sizes: Iterable[int], bits: int) -> int:
    """Bytes of the codes of tensors of so many numbers; each has blocks, and scales, of its own."""
    return sum(map(_count, sizes)) * block_bytes(bits)


def _count(numbers: int) -> int:
    return -(-numbers // BLOCK)


def _take(residual: Tensor) -> Tensor:
    taken = residual.clone()
    residual.zero_()
    return taken


def _shares(blocks: int, ranks: int) -> list[int]:
    """How many blocks each rank owns: one after the other, in the order of ranks."""
    return [blocks // ranks + (i < blocks % ranks) for i in range(ranks)]


def _own_blocks(blocks: int, group: dist.ProcessGroup) -> range:
    shares, rank = _shares(blocks, group.size()), group.rank()
    first = sum(shares[:rank])
    return range(first, first + shares[rank])


class _Own(NamedTuple):
    """The blocks that this rank owns: z, (len(blocks), BLOCK), are their numbers in float32."""

    z: Tensor
    blocks: range

    def take(self, z: Tensor, span: range) -> None:
        """Copy what is owned of a tensor's blocks."""
        here, there = self._common(span)
        self.z[here] = z.view(-1, BLOCK)[there]

    def store_(self, residual: Tensor, span: range) -> None:
        """Copy what is owned back to a tensor, whose last block may be longer than it."""
        here, there = self._common(span)
        if here.start == here.stop:
            return
        numbers = residual.reshape(-1)
        target = numbers[there.start * BLOCK : there.stop * BLOCK]
        target.copy_(self.z[here].view(-1)[: target.numel()])
        if numbers.data_ptr() != residual.data_ptr():  # reshape had to copy
            residual.copy_(numbers.view_as(residual))

    def _common(self, span: range) -> tuple[slice, slice]:
        first = max(span.start, self.blocks.start)
        last = max(first, min(span.stop, self.blocks.stop))
        offsets = self.blocks.start, span.start
        here, there = (slice(first - offset, last - offset) for offset in offsets)
        return here, there


def _encode(
    X: Iterable[Tensor],
    residuals: Sequence[Tensor],
    spans: Sequence[range],
    bits: int,
    own_blocks: range,
) -> tuple[Tensor, _Own]:
    """Codes of X and residuals, and of the blocks owned here the numbers; keep what codes lose."""
    device = residuals[0].device
    codes = torch.empty(spans[-1].stop, block_bytes(bits), dtype=torch.uint8, device=device)
    own = _Own(torch.empty(len(own_blocks), BLOCK, dtype=torch.float32, device=device), own_blocks)
    for x, residual, span in zip(X, residuals, spans, strict=True):
        z = (x.float() + residual).reshape(-1)
        z = torch.nn.functional.pad(z, (0, -z.numel() % BLOCK))
        code = codes[span.start : span.stop]
        code.copy_(encode(z, bits))
        own.take(z, span)
        z -= decode(code, bits)
        residual.copy_(z[: residual.numel()].view_as(residual))
    return codes, own


def _exchange_(codes: Tensor, own: Tensor, bits: int, group: dist.ProcessGroup) -> None:
    """Replace codes of what is here by codes of the means, and what is owned by what these lose.

    An owner needs no code of its own numbers. What the code of their mean loses it keeps, times
    the number of ranks, where others keep what the code they sent it has lost.
    """
    ranks, rank = group.size(), group.rank()
    shares = _shares(len(codes), ranks)
    received = codes.new_empty(ranks, *codes[: shares[rank]].shape)
    dist.all_to_all_single(
        received.view(-1, codes.shape[1]), codes, [shares[rank]] * ranks, shares, group=group
    )
    total = torch.zeros_like(own)
    for r in range(ranks):
        total += own if r == rank else decode(received[r], bits).view_as(own)
    code = encode((total / ranks).view(-1), bits)
    copies = code.repeat(ranks, 1)
    dist.all_to_all_single(codes, copies, shares, [shares[rank]] * ranks, group=group)
    own.copy_(total - ranks * decode(code, bits).view_as(own))
