"""Means over a group in a few bits per element; residuals are sent with the next mean."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from curvadion import checks, ops
from curvadion.comm.collectives import DENSE_BUCKET_BYTES, chunks
from curvadion.comm.groups import Group
from curvadion.comm.lost import may_lose_members
from curvadion.division import shares, spans
from curvadion.layout.dtensor import made_like
from curvadion.layout.placements import groups_of
from curvadion.ops.code_format import BITS, BLOCK, Bits, block_bytes, blocks_of, part, rows_of
from curvadion.ops.tensors import Tensors, wide_dtype
from curvadion.plan.coded_states import CODED, coded_zeros, encoded
from curvadion.plan.opened_states import opened
from curvadion.plan.parameter import Parameter
from curvadion.plan.state import RESIDUAL

# Residuals in int8 are vectors of codes, as other states in 8 bits are.
RESIDUAL_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, CODED: torch.int8}
# Which bits gave the lowest loss, by byte budget: at 0.03 2 on both ways, at 0.01 1 to the owners
# of blocks and 2 back, at 0.0025 1 on both ways (benchmarks/results/convergence/bits.json).
ONE_BIT_UP_BELOW = 0.02
ONE_BIT_BELOW = 0.003
ResidualDtype = Literal["bfloat16", "float32", "int8"] | torch.dtype
decode_add_ = record_function("curvadion.decode")(ops.decode_add_)


def chosen_bits(bits: Any) -> Bits | None:
    """The bits of both ways from a sync's argument: one number, a pair (up, down), or None.

    Raises:
        TypeError: a number is no integer.
        ValueError: there are not two, or there is no such code.
    """
    if bits is None:
        return None
    ways = tuple(bits) if isinstance(bits, (tuple, list)) else (bits, bits)
    wanted = (
        f"bits={bits!r} must be one of {BITS}, or a pair of them: to the owners of blocks and "
        f"back, such as bits=(1, 2)"
    )
    if any(isinstance(b, bool) or not isinstance(b, int) for b in ways):
        raise TypeError(wanted)
    if len(ways) != 2 or not set(ways) <= set(BITS):
        raise ValueError(wanted)
    return Bits(*ways)


def name_of_dtype(residual_dtype: ResidualDtype) -> str:
    """Check a sync's argument; return the dtype's name."""
    name = str(residual_dtype).removeprefix("torch.")
    checks.one_of("residual_dtype", name, tuple(RESIDUAL_DTYPES))
    return name


def empty_residual(X: Tensor, residual_dtype: str) -> Tensor:
    """A residual of zeros for X; residual_dtype: a key of :data:`RESIDUAL_DTYPES`."""
    dtype = RESIDUAL_DTYPES[residual_dtype]
    if dtype == torch.int8:
        return coded_zeros(RESIDUAL, X)
    return made_like(X, partial(torch.zeros_like, dtype=dtype))


def encode_residuals(
    states: Mapping[Tensor, MutableMapping[str, Any]], residual_dtype: str
) -> None:
    """Encode residuals that were loaded, if they are to be in 8 bits.

    Others keep the dtype in which they were saved.

    Args:
        states: by parameter; changed in place.
        residual_dtype: a key of :data:`RESIDUAL_DTYPES`.
    """
    if residual_dtype != CODED:
        return
    for X, state in states.items():
        if RESIDUAL in state:
            state[RESIDUAL] = encoded(RESIDUAL, X, state[RESIDUAL])


def open_residuals(
    parameters: Sequence[Parameter], step: int | None
) -> AbstractContextManager[list[Tensor]]:
    """This rank's shards of residuals, to write.

    Those in 8 bits are float32 copies, which are encoded after the block; after an error they
    stay what they were. Nothing sends what this rounding loses, so it is random: its mean is zero.

    Args:
        parameters: that have residuals.
        step: seeds the rounding, with each parameter; None rounds to nearest, for residuals that
            become zeros or multiples of what they were, which keeps all codes as they are.
    """
    seeds = None if step is None else [p.state_seed(step, RESIDUAL) for p in parameters]
    return opened([(p, RESIDUAL) for p in parameters], seeds)


def bits_within(share: float) -> int:
    """The most bits whose codes fit this share of float32 bytes at every step, at least 2."""
    return max(b for b in BITS if b <= 2 or block_bytes(b) <= share * 4 * BLOCK)


def bits_of_weights(budget: float, fragments: int) -> Bits:
    """The default bits of weight averages under a byte budget, a share of float32 bytes or 0.

    The most that fit if every step is an opening, at least 2. If 2 do not fit, a budget below 0.02
    has 1 to the owners of blocks and 2 back, and one below 0.003 has 1 on both ways.
    """
    share = budget * fragments
    fits = share * 4 * BLOCK >= block_bytes(2)
    if 0 < budget < ONE_BIT_BELOW and not fits:
        return Bits(1, 1)
    if 0 < budget < ONE_BIT_UP_BELOW and not fits:
        return Bits(1, 2)
    bits = bits_within(share)
    return Bits(bits, bits)


def coded_together(parameters: Sequence[Parameter], bits: Bits) -> Iterator[list[Parameter]]:
    """Yield runs of parameters, sharded over the same ranks, whose codes form one bucket.

    The preceding blocks of a bucket decide which replica averages a block.
    """
    by_ranks: dict[tuple[int, ...], list[Parameter]] = {}
    for p in parameters:
        if RESIDUAL in p.state:
            ranks = tuple(map(id, groups_of(p.X)))
            by_ranks.setdefault(ranks, []).append(p)
    for coded in by_ranks.values():
        start = 0
        # The longer one of a bucket's two messages has at most DENSE_BUCKET_BYTES.
        bytes_in_float32 = DENSE_BUCKET_BYTES * 32 // max(bits.up, bits.down)
        for bucket in chunks([p.local for p in coded], bytes_in_float32):
            stop = start + len(bucket)
            yield coded[start:stop]
            start = stop


def coded_mean_(X: Tensors, residuals: Tensors, bits: Bits, group: Group | None) -> Tensor:
    """X <- mean over the group of X, the same bits on all ranks.

    Every rank owns an equal share of all elements. Ranks send codes to the owners, which sum
    them in float32 and send codes of the means back. Residuals hold the codes' errors and are
    added to the next message. n ranks send 2 (n - 1) / n times :func:`mean_message_bytes` on
    average, one alone nothing.

    Args:
        X: any tensors.
        residuals: of X's shapes, zero at first; overwritten.
        bits: of a code on each way.
        group: the ranks; None for one alone.

    Returns:
        The codes of the means, (blocks, block_bytes(bits.down)) uint8; none for one rank alone.
    """
    if group is None or group.size() == 1:
        for x, residual in zip(X, residuals, strict=True):
            x.add_(residual)
            residual.zero_()
        return torch.empty(0)
    codes = exchanged(X, (), residuals, bits, group)
    decode_add_(X, (), codes, bits.down)
    return codes


def moved_since(anchor: Tensor, x: Tensor) -> Tensor:
    """x - anchor, with the anchor rounded to x's dtype: that rounding is not a movement."""
    wide = wide_dtype(x.dtype)
    return x.to(wide) - anchor.to(x.dtype).to(wide)


def message_bytes(sizes: Iterable[int], bits: int) -> int:
    """Bytes of the codes of tensors of these sizes, each in blocks of its own."""
    return sum(map(blocks_of, sizes)) * block_bytes(bits)


def mean_message_bytes(sizes: Iterable[int], bits: Bits) -> float:
    """The mean of the bytes of these tensors' codes on both ways."""
    sizes = list(sizes)
    return (message_bytes(sizes, bits.up) + message_bytes(sizes, bits.down)) / 2


def exchanged(X: Tensors, anchors: Tensors, residuals: Tensors, bits: Bits, group: Group) -> Tensor:
    """The codes of the means of X - anchor + residual over the group; collective.

    Args:
        X: any tensors.
        anchors: float32 or wider, of X's shapes, the same bits on every rank; () for zeros.
        residuals: of X's shapes; become the errors of the codes.
        bits: of a code on each way.
        group: the ranks, at least two.

    Returns:
        (blocks, block_bytes(bits.down)) uint8, the same on every rank.
    """
    message = encode(X, anchors, residuals, bits, group)
    message.exchange_(group)
    message.store_losses_(residuals)
    return message.means


@dataclass(frozen=True)
class Message:
    """This rank's codes, and after the exchange the codes of the means.

    Args:
        codes: this rank's, of all blocks, (blocks, block_bytes(bits.up)) uint8.
        means: the codes of the means, (blocks, block_bytes(bits.down)) uint8; written by
            :meth:`exchange_`.
        values: of the k blocks that this rank averages, (k, 256) float32; after the exchange
            what the codes of their means lack of the sum over all ranks.
        first: the number of the first of these blocks.
        bits: of a code on each way.
    """

    codes: Tensor
    means: Tensor
    values: Tensor
    first: int
    bits: Bits

    @record_function("curvadion.exchange")
    def exchange_(self, group: Group) -> None:
        """Write the codes of the means, and replace values by what these lack."""
        blocks = len(self.codes)
        k = len(self.values)
        ranks = group.size()
        if not blocks:
            return
        sizes = shares(blocks, ranks)  # of each rank's part
        # Each rank gets its blocks from all: (ranks, k, block_bytes(bits.up)).
        received = self.codes.new_empty(ranks, k, block_bytes(self.bits.up))
        with may_lose_members():
            dist.all_to_all_single(
                received.flatten(0, 1), self.codes, [k] * ranks, sizes, group=group
            )
        averaged = self.means.new_empty(k, block_bytes(self.bits.down))
        ops.average_codes_(averaged, self.values, received, group.rank(), self.bits)
        # Each rank sends the means of its blocks to all.
        copies = averaged.repeat(ranks, 1)
        with may_lose_members():
            dist.all_to_all_single(self.means, copies, sizes, [k] * ranks, group=group)

    def store_losses_(self, residuals: Tensors) -> None:
        """Set the residuals of the blocks that this rank averages, after the exchange.

        They replace what encoding left there: this rank's own values entered the mean exactly.
        So the sum of all ranks' residuals is what the exchange has lost.
        """
        for residual, blocks in zip(residuals, rows_of(residuals), strict=True):
            averaged = part(blocks, self.first, len(self.values))
            losses = self.values[averaged].view(-1)
            if not len(losses):
                continue
            start = (self.first + averaged.start - blocks.start) * BLOCK
            elements = residual.reshape(-1)
            target = elements[start : start + len(losses)]
            # The last block may be longer than the residual.
            target.copy_(losses[: len(target)])
            if elements.data_ptr() != residual.data_ptr():  # reshape had to copy
                residual.copy_(elements.view_as(residual))


@record_function("curvadion.encode")
def encode(X: Tensors, anchors: Tensors, residuals: Tensors, bits: Bits, group: Group) -> Message:
    """Encode X - anchor + residual for an exchange; residuals become the errors of the codes.

    Args:
        X: any tensors.
        anchors: float32 or wider, of X's shapes; () for zeros.
        residuals: of X's shapes.
        bits: of a code on each way.
        group: the ranks.
    """
    blocks = sum(blocks_of(residual.numel()) for residual in residuals)
    averaged = spans(shares(blocks, group.size()))[group.rank()]
    like = residuals[0]
    codes = like.new_empty(blocks, block_bytes(bits.up), dtype=torch.uint8)
    means = codes.new_empty(blocks, block_bytes(bits.down))
    values = like.new_empty(len(averaged), BLOCK, dtype=torch.float32)
    first = averaged.start
    ops.encode_difference_(codes, X, anchors, residuals, bits=bits.up, owned=values, first=first)
    return Message(codes, means, values, first, bits)
