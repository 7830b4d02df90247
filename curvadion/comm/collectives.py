"""Collectives on many tensors at once, in flat buckets without padding."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.division import divide, spans

DENSE_BUCKET_BYTES = 64 * 1024 * 1024


def group_size(group: dist.ProcessGroup | None) -> int:
    """Number of ranks in ``group``; None: this process alone."""
    return 1 if group is None else group.size()


def all_ranks_equal(said: object, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether ``said`` has the same repr on all ranks; collective, 16 bytes on ``device``."""
    if group_size(group) == 1:
        return True
    number = checksum(said)
    bounds = torch.tensor([number, -number], device=device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group)
    return int(bounds.sum()) == 0


def checksum(said: object) -> int:
    """A checksum of an object's repr: an integer below 2**32."""
    return zlib.crc32(repr(said).encode())


_OF_LOST_RANKS = (
    "gloo",
    "wait timeout",
    "timed out",
    "connection closed",
    "connection reset",
)


@contextmanager
def explain_lost_ranks(call: str) -> Iterator[None]:
    """Add advice to a backend's errors about lost ranks and timeouts."""
    try:
        yield
    except RuntimeError as error:
        lost = isinstance(error, (dist.DistNetworkError, dist.DistStoreError))
        lost = lost or any(word in str(error).lower() for word in _OF_LOST_RANKS)
        if not lost or error.__cause__ is not None:
            raise
        raise RuntimeError(
            f"{call} must be called on every rank, but another rank has exited or is late: "
            f"find the first error in all ranks' logs, and restart from a checkpoint. "
            f"({error})"
        ) from error


# Takes what a recorded step calls between its parts.
Between = Callable[[Callable[[], None]], None]
_between: ContextVar[Between | None] = ContextVar("curvadion_between", default=None)


@contextmanager
def called_between(between: Between) -> Iterator[None]:
    """Hand all collectives that begin inside to ``between`` instead of calling them.

    A step is recorded so: its collectives are called again between its recorded parts.
    """
    token = _between.set(between)
    try:
        yield
    finally:
        _between.reset(token)


def communicate(collective: Callable[[], Any]) -> None:
    """Call a collective that works in place, and wait for its results on this stream.

    Every collective that a step may call goes through here or through :func:`begin`, so that
    the step can be recorded.
    """
    between = _between.get()
    if between is None:
        collective()
    else:
        between(collective)


def begin(collective: Callable[[], dist.Work | None]) -> Callable[[], None]:
    """Call an asynchronous collective that works in place.

    Args:
        collective: returns what waits for it; None: nothing is to be waited for.

    Returns:
        A function that waits for its results on the current stream. Call it once.
    """
    under_way: list[dist.Work | None] = []

    def start() -> None:
        under_way.append(collective())

    def wait() -> None:
        work = under_way.pop()
        if work is not None:
            work.wait()

    communicate(start)
    return lambda: communicate(wait)


class Slot(NamedTuple):
    """A tensor in a bucket."""

    shape: tuple[int, ...]
    group: dist.ProcessGroup | None
    dtype: torch.dtype
    device: torch.device


class Buckets:
    """A flat buffer for each group, dtype and device; ``views``: a part for each slot."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._flat: dict[Slot, Tensor] = {}
        sizes: dict[Slot, list[int]] = {}
        for slot in slots:
            sizes.setdefault(slot._replace(shape=()), []).append(math.prod(slot.shape))
        parts = {}
        for key, lengths in sizes.items():
            self._flat[key] = torch.empty(sum(lengths), dtype=key.dtype, device=key.device)
            parts[key] = iter(self._flat[key].split(lengths))
        self.views = [next(parts[s._replace(shape=())]).view(s.shape) for s in slots]

    def all_reduce_(
        self, *, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, divide_by: int = 1
    ) -> None:
        """Reduce every view over its group, in place, then divide it."""
        waits = [
            begin(partial(dist.all_reduce, flat, op, key.group, async_op=True))
            for key, flat in self._flat.items()
            if group_size(key.group) > 1 and flat.numel()
        ]
        for wait in waits:
            wait()
        if divide_by != 1:
            for flat in self._flat.values():
                flat.div_(divide_by)


def mean_(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Replace tensors by their means over ``group``, in float32 or wider; bitwise equal."""
    size = group_size(group)
    if size == 1:
        return
    for chunk in chunks(tensors):
        bucket = Buckets([Slot(tuple(t.shape), group, _sum_dtype(t), t.device) for t in chunk])
        torch._foreach_copy_(bucket.views, chunk)
        bucket.all_reduce_(divide_by=size)
        torch._foreach_copy_(chunk, bucket.views)


def chunks(
    tensors: Sequence[Tensor], most_bytes: int = DENSE_BUCKET_BYTES
) -> Iterator[list[Tensor]]:
    """Runs of tensors of at most ``most_bytes`` in float32, or of one larger tensor."""
    chunk: list[Tensor] = []
    held = 0
    for tensor in tensors:
        size = tensor.numel() * _sum_dtype(tensor).itemsize
        if chunk and held + size > most_bytes:
            yield chunk
            chunk, held = [], 0
        chunk.append(tensor)
        held += size
    if chunk:
        yield chunk


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def all_to_all(
    to: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[tuple[int, ...]]],  # of the tensors that each rank sends here
    group: dist.ProcessGroup,
    like: Tensor,  # of their dtype and device
) -> Callable[[], list[list[Tensor]]]:
    """Begin to send tensors to each rank; call the result for those received from each."""
    sent = [sum(t.numel() for t in tensors) for tensors in to]
    received = [sum(map(math.prod, each)) for each in shapes]
    flat = [t.reshape(-1) for tensors in to for t in tensors]
    end = begin_all_to_all(torch.cat([like.new_empty(0), *flat]), sent, received, group)

    def views() -> list[list[Tensor]]:
        sizes = [math.prod(shape) for each in shapes for shape in each]
        parts = iter(end().split(sizes))
        return [[next(parts).view(shape) for shape in each] for each in shapes]

    return views


def begin_all_to_all(
    buffer: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> Callable[[], Tensor]:
    """Begin to send a part of a vector to each rank; call the result for what arrives.

    Args:
        buffer: what is sent, (sum of sent,), by rank.
        sent: how many elements each rank gets.
        received: how many elements each rank sends here.
        group: the ranks.

    Returns:
        A function that waits for (sum of received,) elements of buffer's dtype, by rank.
    """
    result = buffer.new_empty(sum(received))
    sizes = list(received), list(sent)
    exchange = partial(dist.all_to_all_single, result, buffer, *sizes, group, async_op=True)
    wait = begin(exchange)

    def end() -> Tensor:
        wait()
        return result

    return end


class SharedWork:
    """Divides work on vectors that are sums over ranks; this rank works on ``mine``.

    The vectors form one line, ordered by the rank that works on them. Each rank sums an equal
    share of the line, which may cut through vectors, and sends parts of it to the ranks that
    work on them; results return likewise. A rank sends at most twice the line and its own
    vectors.
    """

    def __init__(self, costs: Sequence[int], group: dist.ProcessGroup) -> None:
        self._group = group
        self._by_rank: list[list[int]] = [[] for _ in range(group.size())]
        for i, rank in enumerate(divide(costs, group.size())):
            self._by_rank[rank].append(i)
        self._order = [i for owned in self._by_rank for i in owned]
        self.mine = self._by_rank[group.rank()]

    def sums(self, summands: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """The sums in ``dtype`` of the vectors in ``mine``; collective."""
        sizes = [len(summand) for summand in summands]
        length, to, of = self._crossings(sizes)
        rest = summands[0].new_zeros(length * self._group.size() - sum(sizes))
        line = torch.cat([*(summands[i] for i in self._order), rest])
        received = torch.empty_like(line)
        communicate(partial(dist.all_to_all_single, received, line, group=self._group))
        share = received.view(self._group.size(), length).sum(0, dtype=dtype)
        own = share.new_empty(sum(of))
        sent = share[: sum(to)]
        communicate(partial(dist.all_to_all_single, own, sent, of, to, self._group))
        return list(own.split([sizes[i] for i in self.mine]))

    def results(self, own: Sequence[Tensor], sizes: Sequence[int], like: Tensor) -> list[Tensor]:
        """All results, of these sizes; own: those of ``mine``; collective."""
        length, of, to = self._crossings(sizes)
        share = like.new_empty(length)
        sent = torch.cat([like.new_empty(0), *own])
        received = share[: sum(of)]
        communicate(partial(dist.all_to_all_single, received, sent, of, to, self._group))
        line = share.new_empty(self._group.size() * length)
        # Newer versions of torch deprecate the older name.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        communicate(partial(gather, line, share, group=self._group))
        parts = line[: sum(sizes)].split([sizes[i] for i in self._order])
        by_vector = dict(zip(self._order, parts, strict=True))
        return [by_vector[i] for i in range(len(sizes))]

    def _crossings(self, sizes: Sequence[int]) -> tuple[int, list[int], list[int]]:
        """The length of a share; by rank, its elements in our share, and ours in its."""
        owned = spans(sum(sizes[i] for i in of_rank) for of_rank in self._by_rank)
        length, rank = -(-sum(sizes) // len(owned)), self._group.rank()
        shares = [range(i * length, (i + 1) * length) for i in range(len(owned))]
        return (
            length,
            [_common(shares[rank], of_rank) for of_rank in owned],
            [_common(share, owned[rank]) for share in shares],
        )


def _common(one: range, other: range) -> int:
    return max(0, min(one.stop, other.stop) - max(one.start, other.start))
