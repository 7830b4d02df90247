"""Means over a group in a few bits per element; residuals are sent with the next mean."""

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
from curvadion.comm.collectives import DENSE_BUCKET_BYTES, chunks
from curvadion.comm.groups import Group
from curvadion.division import shares, spans
from curvadion.layout.placements import groups_of
from curvadion.ops.code_format import BITS, BLOCK, block_bytes, blocks_of, part, rows_of
from curvadion.ops.tensors import Tensors
from curvadion.plan.parameter import Parameter
from curvadion.plan.state import RESIDUAL

RESIDUAL_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ONE_BIT_BELOW = 0.003  # a budget; at 0.01 2 bits are better
ResidualDtype = Literal["bfloat16", "float32"] | torch.dtype
decode_add_ = record_function("curvadion.decode")(ops.decode_add_)


def check_codes(bits: int | None, residual_dtype: ResidualDtype) -> str:
    """Check a sync's arguments; return the name of the residuals' dtype."""
    if bits is not None:
        checks.integer("bits", bits, 1)
        checks.one_of("bits", bits, BITS)
    name = str(residual_dtype).removeprefix("torch.")
    checks.one_of("residual_dtype", name, tuple(RESIDUAL_DTYPES))
    return name


def bits_within(share: float) -> int:
    """The most bits whose codes fit this share of float32 bytes at every step, at least 2."""
    return max(b for b in BITS if b <= 2 or block_bytes(b) <= share * 4 * BLOCK)


def bits_of_weights(budget: float, fragments: int) -> int:
    """The default bits of weight averages under a byte budget, a share of float32 bytes or 0.

    The most that fit if every step is an opening, at least 2. Below 0.3 % it is 1 bit, which
    gave a lower loss (benchmarks/results/convergence), unless 2 bits fit every step.
    """
    share = budget * fragments
    one = 0 < budget < ONE_BIT_BELOW and share * 4 * BLOCK < block_bytes(2)
    return 1 if one else bits_within(share)


def coded_together(parameters: Sequence[Parameter], bits: int) -> Iterator[list[Parameter]]:
    """Yield runs of parameters, sharded over the same ranks, whose codes form one bucket.

    The preceding blocks of a bucket decide which replica averages a block.
    """
    by_ranks = dict[tuple[int, ...], list[Parameter]]()
    for p in parameters:
        if RESIDUAL in p.state:
            by_ranks.setdefault(tuple(map(id, groups_of(p.X))), []).append(p)
    for together in by_ranks.values():
        rest = iter(together)
        for bucket in chunks([p.local for p in together], DENSE_BUCKET_BYTES * 32 // bits):
            yield list(islice(rest, len(bucket)))


def coded_mean_(X: Tensors, residuals: Tensors, bits: int, group: Group | None) -> Tensor:
    """X <- mean over the group of X, the same bits on all ranks. Returns the mean's codes.

    Every rank owns an equal share of all elements. Ranks send codes to the owners, which sum
    them in float32 and send codes of the means back. Residuals, zero at first, hold the
    codes' errors and are added to the next message. n ranks send 2 (n - 1) / n times
    :func:`message_bytes` on average, one alone nothing.
    """
    if group is None or group.size() == 1:
        for x, residual in zip(X, residuals, strict=True):
            x.add_(residual)
            residual.zero_()
        return torch.empty(0)
    codes = exchanged(X, (), residuals, bits, group)
    decode_add_(X, (), codes, bits)
    return codes


def moved_since(anchor: Tensor, x: Tensor) -> Tensor:
    """x - anchor, with the anchor rounded to x's dtype: that rounding is not a movement."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide) - anchor.to(x.dtype).to(wide)


def message_bytes(sizes: Iterable[int], bits: int) -> int:
    """Bytes of the codes of tensors of these sizes, each in blocks of its own."""
    return sum(map(blocks_of, sizes)) * block_bytes(bits)


def exchanged(X: Tensors, anchors: Tensors, residuals: Tensors, bits: int, group: Group) -> Tensor:
    """The codes of the means of X - anchor over the group; updates the residuals.

    anchors: float32 or wider, of X's shapes, the same bits on every rank; () for zeros.
    """
    message = encode(X, anchors, residuals, bits, group)
    message.exchange_(group)
    message.store_losses_(residuals)
    return message.codes


@dataclass(frozen=True)
class Message:
    """This rank's codes, and after the exchange the codes of the means."""

    codes: Tensor  # (rows, block_bytes(bits)) uint8; :meth:`exchange_` replaces them
    own: Tensor  # (k, 256) float32, the rows of this rank, then their codes' errors
    first: int  # of these rows
    bits: int  # of a code

    @record_function("curvadion.exchange")
    def exchange_(self, group: Group) -> None:
        """Replace codes by those of the means, and ``own`` by the errors of these."""
        rows, ranks, owned = len(self.codes), group.size(), len(self.own)
        if not rows:
            return
        counts, mine = shares(rows, ranks), [owned] * ranks
        received = self.codes.new_empty(ranks, owned, self.codes.shape[1])
        flat = received.flatten(0, 1)
        dist.all_to_all_single(flat, self.codes, mine, counts, group=group)
        code = torch.empty_like(received[0])
        ops.average_codes_(code, self.own, received, group.rank(), self.bits)
        received.copy_(code)
        dist.all_to_all_single(self.codes, flat, counts, mine, group=group)

    def store_losses_(self, residuals: Tensors) -> None:
        """Add the errors of the means' codes to the residuals, after the exchange."""
        for residual, rows in zip(residuals, rows_of(residuals), strict=True):
            mine = part(rows, self.first, len(self.own))
            lost = self.own[mine].view(-1)
            if not len(lost):
                continue
            start = (self.first + mine.start - rows.start) * BLOCK
            numbers = residual.reshape(-1)
            target = numbers[start : start + len(lost)]
            # The last block may be longer than the residual.
            target.copy_(lost[: len(target)])
            if numbers.data_ptr() != residual.data_ptr():  # reshape had to copy
                residual.copy_(numbers.view_as(residual))


@record_function("curvadion.encode")
def encode(X: Tensors, anchors: Tensors, residuals: Tensors, bits: int, group: Group) -> Message:
    """Encode X - anchor + residual; residuals become the errors of these codes."""
    rows, new = sum(blocks_of(r.numel()) for r in residuals), residuals[0].new_empty
    mine = spans(shares(rows, group.size()))[group.rank()]
    codes = new(rows, block_bytes(bits), dtype=torch.uint8)
    own = new(len(mine), BLOCK, dtype=torch.float32)
    ops.encode_difference_(codes, X, anchors, residuals, bits=bits, owned=own, first=mine.start)
    return Message(codes, own, mine.start, bits)
