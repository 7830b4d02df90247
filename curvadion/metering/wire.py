"""Counts the bytes of all collectives in this process, whichever library calls them.

Every ``torch.distributed`` collective, also of DDP and FSDP, reaches its backend through a
dispatcher operator such as ``c10d::allreduce_``. Kernels for these operators count the calls.

A meter misses traffic that bypasses process groups (a backend called directly, symmetric
memory, the store), and an interface's headers (measured by benchmarks/bytes/interface_bytes.py).
"""

from __future__ import annotations

import functools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class WireCount:
    """Calls, and the bytes they sent.

    Attributes:
        calls: how many there were.
        bytes: of the payloads of all calls.
        largest: the bytes of the largest payload of one call.
        sent: the bytes that a rank must send at least, on average over the group.
    """

    calls: int = 0
    bytes: int = 0
    largest: int = 0
    sent: float = 0.0

    def __add__(self, other: WireCount) -> WireCount:
        return WireCount(
            self.calls + other.calls,
            self.bytes + other.bytes,
            max(self.largest, other.largest),
            self.sent + other.sent,
        )


class Counted(Protocol):
    """An optimizer whose bytes are counted: a CurvaDion, Dion or Replicated."""

    replicas: Any

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As torch's optimizers have it."""


class WireMeter:
    """Context manager that counts what this process communicates, by group and collective.

    The payload is the logical message of a call. The bytes sent are a rank's share of the
    least traffic with which n ranks can perform the call:

    - all_reduce: the tensor; a rank sends 2 (n - 1) / n of it.
    - broadcast, reduce: the tensor. all_gather: the gathered output. reduce_scatter,
      all_to_all: the input. A rank sends (n - 1) / n of it.
    - gather, scatter: the whole list at the root; a rank sends (n - 1) / n^2 of it.
    - send: the tensor, all of which is sent; the matching recv is not counted.
    - barrier: nothing.

    In a group of one rank calls count 0 bytes. A call that raises is not counted.

    Meters nest, and each counts everything while it is active, on all threads. Enter the
    first only while no thread of yours is inside a collective: it replaces kernels::

        with WireMeter() as meter:
            train_step()
        meter.by_collective["all_reduce"].bytes  # 1024
    """

    def __init__(self) -> None:
        self._records: defaultdict[tuple[str, str], WireCount] = defaultdict(WireCount)
        # How many steps optimizers have taken while it counted.
        self._steps: WeakKeyDictionary[Counted, int] = WeakKeyDictionary()
        self._paused = False

    def __enter__(self) -> WireMeter:
        with _lock:
            if self in _active:
                raise RuntimeError("This WireMeter is active: enter a new one.")
            install_kernels()
            _active.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            _active.remove(self)

    @property
    def records(self) -> dict[tuple[str, str], WireCount]:
        """A copy of the counts, by (group name, collective)."""
        with _lock:
            return dict(self._records)

    @property
    def total(self) -> WireCount:
        """The sum of all counts."""
        return sum(self.records.values(), WireCount())

    @property
    def by_collective(self) -> dict[str, WireCount]:
        """The counts by collective, over all groups."""
        totals: defaultdict[str, WireCount] = defaultdict(WireCount)
        for (_, collective), count in self.records.items():
            totals[collective] += count
        return dict(totals)

    def between(self, replica_size: int) -> WireCount:
        """The count of groups that span several replicas of this many consecutive ranks.

        Groups that have been destroyed count too, because nobody knows their ranks.
        """
        ranks_by_group = _ranks_by_group()
        crossing = WireCount()
        for (group, _), count in self.records.items():
            replicas = {rank // replica_size for rank in ranks_by_group.get(group, ())}
            if len(replicas) != 1:
                crossing += count
        return crossing

    def share(self, optimizer: Counted) -> float:
        """What this rank has sent to other replicas, as a share of what DDP would have sent.

        DDP all-reduces all gradients in float32 at every step, which is what a budget is a share
        of: here at the steps that ``optimizer`` has taken while this meter counted. Counted are
        the groups with several ranks of ``optimizer.replicas``, and those that have been
        destroyed, because nobody knows their ranks. So what a second optimizer sends to the same
        replicas counts, too.

        Args:
            optimizer: a CurvaDion, Dion or Replicated.

        Returns:
            The share; 0.0 in a run of one process.

        Raises:
            ValueError: without several replicas in a fixed group, or before the first step.
        """
        group = optimizer.replicas.process_group
        several = group is not None and group.size() > 1
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        if not several and not (alone and optimizer.replicas.fixed):
            raise ValueError(
                "optimizer has no fixed group of several replicas, so there is nothing to compare "
                "with: pass one that was constructed with a process group as replicas=."
            )
        steps = self._steps.get(optimizer, 0)
        if not steps:
            raise ValueError(
                f"optimizer={type(optimizer).__name__} has taken no step while this meter counted: "
                f"call optimizer.step() inside it, and not while it is paused."
            )
        if not several:
            return 0.0
        assert group is not None
        replicas = set(dist.get_process_group_ranks(group))
        ranks_by_group = _ranks_by_group()
        sent = 0.0
        for (name, _), count in self.records.items():
            if len(replicas.intersection(ranks_by_group.get(name, replicas))) > 1:
                sent += count.sent
        elements = 0  # of this rank
        for options in optimizer.param_groups:
            for X in options["params"]:
                if X.requires_grad:
                    shard = X.to_local() if hasattr(X, "to_local") else X
                    elements += shard.numel()
        return sent / (steps * _sent("all_reduce", 4 * elements, group.size()))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count inside the ``with`` block, on any thread; other meters do."""
        # Blocks may be nested.
        was_paused = self._paused
        self._paused = True
        try:
            yield
        finally:
            self._paused = was_paused


def count_step(optimizer: Counted) -> None:
    """Count a step of an optimizer, by all meters that count."""
    with _lock:
        for meter in _active:
            if not meter._paused:
                meter._steps[optimizer] = meter._steps.get(optimizer, 0) + 1


class Reading:
    """Counts of the innermost active meter between readings."""

    def __init__(self) -> None:
        with _lock:
            self._last = _counted.copy()

    def take(self) -> dict[str, int] | None:
        """Payload bytes since the last reading, by ranks; None without a meter."""
        with _lock:
            counted = _counted.copy()
        difference = counted - self._last
        self._last = counted
        if not _active:
            return None
        ranks_by_group = _ranks_by_group()
        bytes_by_ranks: Counter[str] = Counter()
        for group, size in difference.items():
            if group in ranks_by_group:
                name = _named(ranks_by_group[group])
            else:
                name = f"group {group}"  # it has been destroyed
            bytes_by_ranks[name] += size
        return dict(bytes_by_ranks)


def _named(ranks: list[int]) -> str:
    """Name ranks as "0, 8", "0-7" or "0-56 by 8"."""
    strides = {second - first for first, second in pairwise(ranks)}
    if len(ranks) <= 2 or len(strides) > 1:
        return ", ".join(map(str, ranks))
    (stride,) = strides
    span = f"{ranks[0]}-{ranks[-1]}"
    return span if stride == 1 else f"{span} by {stride}"


def _ranks_by_group() -> dict[str, list[int]]:
    """The ranks of every process group, by its name."""
    groups = dist.distributed_c10d._world.pg_map
    return {group.group_name: dist.get_process_group_ranks(group) for group in groups}


# The lock is re-entrant, because garbage collection during counting may communicate.
_lock = threading.RLock()
_active: list[WireMeter] = []  # from the outermost to the innermost
# Payload bytes while a meter is active, by the group's name.
_counted: Counter[str] = Counter()


# torch's operators, by collective.
_OPERATORS = {
    "all_reduce": "allreduce_ allreduce_coalesced_",
    "broadcast": "broadcast_",
    "reduce": "reduce_",
    "all_gather": "allgather_ _allgather_base_ allgather_coalesced_ "
    "allgather_into_tensor_coalesced_",
    "reduce_scatter": "reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_",
    "all_to_all": "alltoall_ alltoall_base_",
    "gather": "gather_",
    "scatter": "scatter_",
    "send": "send",
    "barrier": "barrier monitored_barrier_",
}
# Their payload is the operator's second argument, that of other collectives the first.
_SECOND_IS_PAYLOAD = ("reduce_scatter", "all_to_all", "gather")


@functools.cache
def install_kernels() -> Any:
    """Install the kernels permanently, before threads communicate."""
    # BackendSelect is dispatched before any backend's kernel, on any device, in any thread
    # and in inference mode. torch itself has no kernel for these operators there.
    library: Any = torch.library.Library("c10d", "IMPL", "BackendSelect")
    for collective, names in _OPERATORS.items():
        for name in names.split():
            overload = getattr(torch.ops.c10d, name).default
            library.impl(name, _counting(overload, collective), with_keyset=True)
    return library


def _counting(overload: Any, collective: str) -> Callable[..., Any]:
    """A kernel that calls the backend's one for an operator, and then counts the call."""
    payload_index = 1 if collective in _SECOND_IS_PAYLOAD else 0
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    types = [str(argument.type) for argument in overload._schema.arguments]
    (group_index,) = [i for i, name in enumerate(types) if name.endswith("c10d.ProcessGroup")]

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        # redispatch releases the GIL, which the backend's threads need to free tensors
        result = overload.redispatch(keyset & below, *args, **kwargs)
        group = dist.ProcessGroup.unbox(args[group_index])
        name = group.group_name
        ranks = group.size()
        payload = 0
        if collective != "barrier" and ranks > 1:
            payload = _nbytes(args[payload_index])
        # The argument is one rank's part of the list.
        if collective in ("gather", "scatter"):
            payload *= ranks
        call = WireCount(1, payload, payload, _sent(collective, payload, ranks))
        with _lock:
            for meter in _active:
                if not meter._paused:
                    meter._records[name, collective] += call
            if _active and not _active[-1]._paused:
                _counted[name] += payload
        return result

    return kernel


def _sent(collective: str, payload: int, ranks: int) -> float:
    """Bytes that a rank must send, on average over the group.

    Args:
        collective: a key of ``_OPERATORS``.
        payload: bytes of the logical message.
        ranks: how many the group has.
    """
    if collective == "send":
        return payload
    share_of_other_ranks = payload * (ranks - 1) / ranks
    if collective == "all_reduce":
        return 2 * share_of_other_ranks
    if collective in ("gather", "scatter"):
        return share_of_other_ranks / ranks
    return share_of_other_ranks


def _nbytes(tensors: Tensor | list[Any]) -> int:
    """Bytes of a tensor, or of all tensors of a nested list; of sparse ones what is sent."""
    if not isinstance(tensors, Tensor):
        return sum(_nbytes(tensor) for tensor in tensors)
    if tensors.is_sparse:
        return _nbytes([tensors._indices(), tensors._values()])
    return tensors.nbytes
