"""Means over a group in a few bits per number; what the code loses is sent with the next mean."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from curvadion import checks, ops
from curvadion.comm.collectives import DENSE_BUCKET_BYTES, chunks, shares
from curvadion.layout.parameters import groups_of
from curvadion.ops.codes import BITS, BLOCK, block_bytes, blocks_of, part, rows_of
from curvadion.update.parameter import Parameter
from curvadion.update.sizes import most_together
from curvadion.update.state import RESIDUAL

RESIDUAL_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ONE_BIT_BELOW = 0.003  # as a budget; at 0.01 2 bits are better
ResidualDtype = Literal["bfloat16", "float32"] | torch.dtype


def check_bits(bits: int | None) -> None:
    """Raise for bits that codes cannot have; None is for a budget."""
    if bits is not None:
        checks.integer("bits", bits, 1)
        checks.one_of("bits", bits, BITS)


def coded_share(bits: int) -> float:
    """What codes take, as a share of float32 numbers."""
    return block_bytes(bits) / (4 * BLOCK)


def bits_within(share: float) -> int:
    """Bits of a code that this share of float32 bytes pays for at every step; 2 at least."""
    return max(b for b in BITS if b <= 2 or coded_share(b) <= share)


def bits_of_weights(budget: float, fragments: int) -> int:
    """Bits of a code that suit averages of weights under a byte budget.

    As many as it pays for at every opening, 2 at least. Below 0.3 % 1 bit ended lower with the
    larger of two models (benchmarks/results/convergence), unless fragments are so many that 2 bits
    fit into every step. budget: share of float32 bytes; 0 if there is none.
    """
    share = budget * fragments
    return 1 if 0 < budget < ONE_BIT_BELOW and share < coded_share(2) else bits_within(share)


def check_residual_dtype(residual_dtype: ResidualDtype) -> str:
    """The name of a dtype that residuals can have; raise ValueError for another."""
    name = str(residual_dtype).removeprefix("torch.")
    checks.one_of("residual_dtype", name, tuple(RESIDUAL_DTYPES))
    return name


def coded_together(parameters: Sequence[Parameter], bits: int) -> Iterator[list[Parameter]]:
    """Runs of parameters, sharded over the same ranks, whose codes are one bucket.

    Which replica averages a block depends on the blocks before it.
    """
    by_ranks: dict[tuple[int, ...], list[Parameter]] = {}
    for p in parameters:
        if RESIDUAL in p.state:
            by_ranks.setdefault(tuple(map(id, groups_of(p.X))), []).append(p)
    for alike in by_ranks.values():
        rest = iter(alike)
        for bucket in chunks([p.local for p in alike], DENSE_BUCKET_BYTES * 32 // bits):
            yield list(islice(rest, len(bucket)))


def coded_mean_(
    X: Sequence[Tensor], residuals: Sequence[Tensor], bits: int, group: dist.ProcessGroup | None
) -> Tensor | None:
    """X <- mean over the group of X; the same bits on every rank. Returns the codes of the mean.

    Every rank is the owner of an equal share of all numbers. Each sends its codes to the owners,
    which sum them in float32, so that no sum can overflow, and send the codes of the means back.
    The residuals, float32 or bfloat16 and zero before the first call, hold what these codes have
    lost, and are added to what is sent next: summed over calls, means differ from true means by no
    more than the last call's residuals and their roundings. n ranks send 2 (n - 1) / n times
    :func:`message_bytes`, on average.
    """
    codes = None
    if group is not None and group.size() > 1:
        codes = exchanged(X, (), residuals, bits, group)
    if codes is None:
        for x, residual in zip(X, residuals, strict=True):
            x.add_(residual)
            residual.zero_()
        return None
    rest = codes
    for some in chunks(X, 4 * most_together(codes.device).batch):
        wide = [torch.promote_types(x.dtype, torch.float32) for x in some]
        means = [x.new_empty(x.shape, dtype=d) for x, d in zip(some, wide, strict=True)]
        torch._foreach_zero_(means)
        rows = sum(blocks_of(x.numel()) for x in some)
        with record_function("curvadion.decode"):
            ops.decode_add_(some, means, rest[:rows], bits)
        rest = rest[rows:]
    return codes


def moved_since(anchor: Tensor, x: Tensor) -> Tensor:
    """x - anchor, which is taken as x's dtype holds it: the rounding to it is no movement."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide) - anchor.to(x.dtype).to(wide)


def message_bytes(sizes: Iterable[int], bits: int) -> int:
    """Bytes of the codes of tensors of so many numbers; each has blocks, and scales, of its own."""
    return sum(map(blocks_of, sizes)) * block_bytes(bits)


def exchanged(
    X: Sequence[Tensor],
    anchors: Sequence[Tensor],
    residuals: Sequence[Tensor],
    bits: int,
    group: dist.ProcessGroup,
) -> Tensor | None:
    """The codes of the means of X - anchor over the group; updates residuals.

    None if there is nothing to send. anchors: float32 or wider, of X's shapes, the same bits on
    every rank; () for zeros.
    """
    if not any(r.numel() for r in residuals):
        return None
    message = encode(X, anchors, residuals, bits, group)
    message.exchange_(group)
    message.store_losses_(residuals)
    return message.codes


@dataclass(frozen=True)
class Message:
    """Numbers of this rank in codes, and after the exchange those of their means."""

    codes: Tensor  # (rows, block_bytes(bits)) uint8; :meth:`exchange_` replaces them
    own: Tensor  # (k, 256) float32, the rows that this rank owns, then what their codes have lost
    first: int  # of these rows
    bits: int  # of a code

    @record_function("curvadion.exchange")
    def exchange_(self, group: dist.ProcessGroup) -> None:
        """Replace codes by those of the means, ``own`` by what these lose, times the ranks."""
        ranks, rank = group.size(), group.rank()
        counts = shares(len(self.codes), ranks)
        received = self.codes.new_empty(ranks, *self.codes[: counts[rank]].shape)
        flat = received.view(-1, self.codes.shape[1])
        dist.all_to_all_single(flat, self.codes, [counts[rank]] * ranks, counts, group=group)
        code = torch.empty_like(received[rank])
        ops.average_codes_(code, self.own, received, rank, self.bits)
        received.copy_(code)
        dist.all_to_all_single(self.codes, flat, counts, [counts[rank]] * ranks, group=group)

    def store_losses_(self, residuals: Sequence[Tensor]) -> None:
        """Give the residuals what the codes of means have lost here; after the exchange."""
        for residual, rows in zip(residuals, rows_of(residuals), strict=True):
            mine = part(rows, self.first, len(self.own))
            lost = self.own[mine].view(-1)
            if not len(lost):
                continue
            start = (self.first + mine.start - rows.start) * BLOCK
            numbers = residual.reshape(-1)
            target = numbers[start : start + len(lost)]
            target.copy_(lost[: len(target)])  # the last block may be longer than the residual
            if numbers.data_ptr() != residual.data_ptr():  # reshape had to copy
                residual.copy_(numbers.view_as(residual))


@record_function("curvadion.encode")
def encode(
    X: Sequence[Tensor],
    anchors: Sequence[Tensor],
    residuals: Sequence[Tensor],
    bits: int,
    group: dist.ProcessGroup,
) -> Message:
    """Codes of X - anchor + residual; residuals become what codes have lost here."""
    counts, rank = shares(sum(blocks_of(r.numel()) for r in residuals), group.size()), group.rank()
    first, device = sum(counts[:rank]), residuals[0].device
    codes = torch.empty(sum(counts), block_bytes(bits), dtype=torch.uint8, device=device)
    own = torch.empty(counts[rank], BLOCK, dtype=torch.float32, device=device)
    ops.encode_difference_(codes, X, anchors, residuals, bits=bits, owned=own, first=first)
    return Message(codes, own, first, bits)
