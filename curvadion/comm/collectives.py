"""Collectives on many tensors at once, in flat buckets without padding."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.comm.lost import MemberLost
from curvadion.division import divide, spans

DENSE_BUCKET_BYTES = 64 * 1024 * 1024


def group_size(group: dist.ProcessGroup | None) -> int:
    """Number of ranks in ``group``; None: this process alone."""
    return 1 if group is None else group.size()


def all_ranks_equal(value: object, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether ``value`` has the same repr on all ranks; collective, 16 bytes on ``device``."""
    if group_size(group) == 1:
        return True
    number = checksum(value)
    # The largest number, and minus the smallest one: they cancel if all are equal.
    bounds = torch.tensor([number, -number], device=device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group)
    return int(bounds.sum()) == 0


def checksum(value: object) -> int:
    """A checksum of an object's repr: an integer below 2**32."""
    return zlib.crc32(repr(value).encode())


# What the messages of backends contain if a rank is lost or late.
_SIGNS_OF_LOST_RANKS = (
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
        message = str(error).lower()
        cause = error.__cause__
        backend_error = cause if isinstance(error, MemberLost) else error
        ranks_are_lost = isinstance(backend_error, (dist.DistNetworkError, dist.DistStoreError))
        if any(sign in message for sign in _SIGNS_OF_LOST_RANKS):
            ranks_are_lost = True
        if isinstance(error, MemberLost) and not ranks_are_lost:
            # A fixed group cannot go on without a member, so its own error says more.
            raise (cause or error) from None
        # Other errors with a cause have been explained already.
        explained = cause is not None and not isinstance(error, MemberLost)
        if not ranks_are_lost or explained:
            raise
        raise RuntimeError(
            f"{call} must be called on every rank, but another rank has exited or is late: "
            f"find the first error in all ranks' logs, and restart from a checkpoint. "
            f"({error})"
        ) from error


# Takes a function and its arguments, to call it at each replay of a recorded step, between
# what has been recorded before and after it.
Between = Callable[[Callable[..., None], tuple[Any, ...]], None]
_between: ContextVar[Between | None] = ContextVar("curvadion_between", default=None)


@contextmanager
def called_between(between: Between) -> Iterator[None]:
    """Hand collectives inside the block to ``between``, which does not call them yet."""
    token = _between.set(between)
    try:
        yield
    finally:
        _between.reset(token)


def communicate(collective: Callable[..., Any], *arguments: Any) -> None:
    """Call a collective that works in place, and wait for its results on this stream.

    All collectives of a step go through here or through :func:`begin`, so that a recorded
    step can call them again.

    Args:
        collective: what is called; it returns nothing that anybody needs.
        arguments: of the collective. A recorded step keeps no tensor among them alive.
    """
    between = _between.get()
    if between is None:
        collective(*arguments)
    else:
        between(collective, arguments)


def begin(collective: Callable[..., dist.Work | None], *arguments: Any) -> Callable[[], None]:
    """Call a collective that works in place, with ``async_op=True``.

    Args:
        collective: returns what waits for it; None if there is nothing to wait for.
        arguments: of the collective.

    Returns:
        A function that waits for its results on the current stream. Call it once.
    """
    work: dist.Work | None = None
    kept: list[Any] = list(arguments)

    def start(*arguments: Any) -> None:
        nonlocal work
        work = collective(*arguments, async_op=True)

    def wait() -> None:
        nonlocal work
        if work is not None:
            work.wait()
        work = None

    def end() -> None:
        communicate(wait)
        # Until here nothing that is recorded may use the memory of the arguments.
        kept.clear()

    communicate(start, *arguments)
    return end


class Slot(NamedTuple):
    """The form of a tensor in :class:`Buckets`, and the ranks over which it is reduced."""

    shape: tuple[int, ...]
    group: dist.ProcessGroup | None  # None: this process alone
    dtype: torch.dtype
    device: torch.device

    @property
    def bucket(self) -> Slot:
        """Equal for tensors that share a buffer."""
        return self._replace(shape=())


class Buckets:
    """A flat buffer for each group, dtype and device, and ``views``: a part for each slot.

    One collective for a buffer takes less time than one for each of its tensors.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        lengths_by_bucket: dict[Slot, list[int]] = {}
        for slot in slots:
            lengths_by_bucket.setdefault(slot.bucket, []).append(math.prod(slot.shape))
        self._buffers: dict[Slot, Tensor] = {}
        parts: dict[Slot, Iterator[Tensor]] = {}
        for bucket, lengths in lengths_by_bucket.items():
            buffer = torch.empty(sum(lengths), dtype=bucket.dtype, device=bucket.device)
            self._buffers[bucket] = buffer
            parts[bucket] = iter(buffer.split(lengths))
        self.views: list[Tensor] = []
        for slot in slots:
            # A buffer's parts are in the order of its slots.
            part = next(parts[slot.bucket])
            self.views.append(part.view(slot.shape))

    def all_reduce_(
        self, *, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, divide_by: int = 1
    ) -> None:
        """Reduce every view over its group, in place, then divide it."""
        buffers = []
        groups = []
        for bucket, buffer in self._buffers.items():
            if group_size(bucket.group) > 1 and buffer.numel():
                buffers.append(buffer)
                groups.append(bucket.group)
        if buffers:
            communicate(_all_reduce_together, buffers, groups, op)
        if divide_by != 1:
            for buffer in self._buffers.values():
                buffer.div_(divide_by)


def _all_reduce_together(
    buffers: Sequence[Tensor],
    groups: Sequence[dist.ProcessGroup],
    op: dist.ReduceOp.RedOpType,
) -> None:
    """Reduce each buffer over its group, in place, all at once."""
    works = []
    for buffer, group in zip(buffers, groups, strict=True):
        works.append(dist.all_reduce(buffer, op, group, async_op=True))
    for work in works:
        if work is not None:
            work.wait()


def mean_(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Replace tensors by their means over ``group``, in float32 or wider; bitwise equal."""
    size = group_size(group)
    if size == 1:
        return
    for chunk in chunks(tensors):
        slots = [Slot(tuple(t.shape), group, _sum_dtype(t), t.device) for t in chunk]
        buckets = Buckets(slots)
        torch._foreach_copy_(buckets.views, chunk)
        buckets.all_reduce_(divide_by=size)
        torch._foreach_copy_(chunk, buckets.views)


def chunks(
    tensors: Sequence[Tensor], most_bytes: int = DENSE_BUCKET_BYTES
) -> Iterator[list[Tensor]]:
    """Runs of tensors of at most ``most_bytes`` in float32, or of one larger tensor."""
    chunk: list[Tensor] = []
    chunk_bytes = 0
    for tensor in tensors:
        tensor_bytes = tensor.numel() * _sum_dtype(tensor).itemsize
        if chunk and chunk_bytes + tensor_bytes > most_bytes:
            yield chunk
            chunk = []
            chunk_bytes = 0
        chunk.append(tensor)
        chunk_bytes += tensor_bytes
    if chunk:
        yield chunk


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which tensors are averaged."""
    return torch.promote_types(tensor.dtype, torch.float32)


def all_to_all(
    to: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[tuple[int, ...]]],
    group: dist.ProcessGroup,
    like: Tensor,
) -> list[list[Tensor]]:
    """Send tensors to each rank; return those received from each.

    Args:
        to: by rank, the tensors that it gets, of any shapes.
        shapes: by rank, the shapes of the tensors that it sends here.
        group: the ranks.
        like: a tensor of the dtype and on the device of all these tensors.

    Returns:
        By rank, tensors of ``shapes``.
    """
    sent = [sum(tensor.numel() for tensor in tensors) for tensors in to]
    received = [sum(map(math.prod, shapes_of_rank)) for shapes_of_rank in shapes]
    flat = [tensor.reshape(-1) for tensors in to for tensor in tensors]
    # The empty tensor is there for ranks that send nothing.
    buffer = torch.cat([like.new_empty(0), *flat])
    result = exchange_vectors(buffer, sent, received, group)
    sizes = [math.prod(shape) for shapes_of_rank in shapes for shape in shapes_of_rank]
    parts = iter(result.split(sizes))
    tensors_by_rank = []
    for shapes_of_rank in shapes:
        tensors = []
        for shape in shapes_of_rank:
            tensors.append(next(parts).view(shape))
        tensors_by_rank.append(tensors)
    return tensors_by_rank


def exchange_vectors(
    buffer: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Send a part of a vector to each rank; return what arrives.

    Args:
        buffer: what is sent, (sum of sent,), by rank.
        sent: how many elements each rank gets.
        received: how many elements each rank sends here.
        group: the ranks.

    Returns:
        (sum of received,) elements of buffer's dtype, by rank.
    """
    result = buffer.new_empty(sum(received))
    sizes = list(received), list(sent)
    communicate(dist.all_to_all_single, result, buffer, *sizes, group)
    return result


def begin_exchange_of_vectors(
    buffer: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> Callable[[], Tensor]:
    """Begin :func:`exchange_vectors`; call the result for what arrives.

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
    wait = begin(dist.all_to_all_single, result, buffer, *sizes, group)

    def end() -> Tensor:
        wait()
        return result

    return end


class SharedWork:
    """Divides work on vectors that are sums over ranks; this rank works on ``mine``.

    Every rank has a summand of every vector. One rank, the vector's owner, needs the sum to
    work on it, and in the end all ranks need all results. Owners have about equal work, but
    not equally long vectors. So that all ranks send and sum equally much nevertheless, the
    vectors form one line, ordered by owner, and each rank sums an equal share of the line. A
    share's end may cut through a vector.

    With vectors a, b, c of 6, 2 and 2 elements, of which rank 0 owns a, and rank 1 b and c::

        line     a a a a a a b b c c
        owners   0 0 0 0 0 0 1 1 1 1
        shares   0 0 0 0 0 1 1 1 1 1

    :meth:`sums` takes two exchanges. Each rank sends its summands of elements 0 to 4 to rank
    0, and those of 5 to 9 to rank 1, which add them up. Then each rank sends the sums in its
    share to their owners. Some cross from one rank to another: rank 1 sends one, of the last
    element of a, to rank 0. :meth:`results` goes the same way back: rank 0 sends the result
    for this element to rank 1, and then all ranks gather all shares.

    For both together, a rank sends at most twice the line and its own vectors.

    Args:
        costs: the work on each vector, in any unit.
        group: the ranks.
    """

    def __init__(self, costs: Sequence[int], group: dist.ProcessGroup) -> None:
        self._group = group
        self._vectors_by_owner: list[list[int]] = [[] for _ in range(group.size())]
        for vector, owner in enumerate(divide(costs, group.size())):
            self._vectors_by_owner[owner].append(vector)
        self._order = [vector for vectors in self._vectors_by_owner for vector in vectors]
        self.mine = self._vectors_by_owner[group.rank()]

    def sums(self, summands: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """The sums in ``dtype`` of the vectors in ``mine``; collective.

        Summands are sent in their own dtype, which may be narrower.
        """
        ranks = self._group.size()
        sizes = [len(summand) for summand in summands]
        crossings = self._crossings(sizes)
        # An all-to-all with equal parts needs a line that the ranks divide.
        padding = summands[0].new_zeros(crossings.share_length * ranks - sum(sizes))
        line = torch.cat([*(summands[vector] for vector in self._order), padding])
        received = torch.empty_like(line)
        communicate(dist.all_to_all_single, received, line, None, None, self._group)
        share = received.view(ranks, crossings.share_length).sum(0, dtype=dtype)
        my_sums = share.new_empty(sum(crossings.of_mine))
        communicate(
            dist.all_to_all_single,
            my_sums,
            share[: sum(crossings.of_share)],
            crossings.of_mine,
            crossings.of_share,
            self._group,
        )
        return list(my_sums.split([sizes[vector] for vector in self.mine]))

    def results(self, own: Sequence[Tensor], sizes: Sequence[int], like: Tensor) -> list[Tensor]:
        """The results for all vectors; collective.

        Args:
            own: the results for the vectors in ``mine``, 1-D.
            sizes: the number of elements of every vector's result.
            like: a tensor of the results' dtype and on their device.
        """
        crossings = self._crossings(sizes)
        share = like.new_empty(crossings.share_length)
        communicate(
            dist.all_to_all_single,
            share[: sum(crossings.of_share)],
            torch.cat([like.new_empty(0), *own]),
            crossings.of_share,
            crossings.of_mine,
            self._group,
        )
        line = share.new_empty(self._group.size() * crossings.share_length)
        # Newer versions of torch deprecate the older name.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        communicate(gather, line, share, self._group)
        parts = line[: sum(sizes)].split([sizes[vector] for vector in self._order])
        by_vector = dict(zip(self._order, parts, strict=True))
        return [by_vector[vector] for vector in range(len(sizes))]

    def _crossings(self, sizes: Sequence[int]) -> _Crossings:
        """What passes between this rank and others, for vectors of these sizes."""
        ranks = self._group.size()
        rank = self._group.rank()
        owned_sizes = []
        for vectors in self._vectors_by_owner:
            owned_sizes.append(sum(sizes[vector] for vector in vectors))
        owned = spans(owned_sizes)
        share_length = -(-sum(sizes) // ranks)  # rounded up
        shares = spans([share_length] * ranks)
        return _Crossings(
            share_length,
            [_overlap(shares[rank], part) for part in owned],
            [_overlap(share, owned[rank]) for share in shares],
        )


class _Crossings(NamedTuple):
    """How many elements of a line pass between the rank of a share and the owners in it."""

    share_length: int
    of_share: list[int]  # by owner, those of its vectors in this rank's share
    of_mine: list[int]  # by rank, those of this rank's vectors in its share


def _overlap(part: range, other_part: range) -> int:
    """How many indices two ranges have in common."""
    start = max(part.start, other_part.start)
    stop = min(part.stop, other_part.stop)
    return max(0, stop - start)
