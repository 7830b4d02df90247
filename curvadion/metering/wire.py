"""Counts the bytes of all collectives in this process, whichever library calls them.

Every ``torch.distributed`` collective, called from Python or from C++ (DDP's reducer, FSDP,
functional collectives), reaches its backend through a dispatcher operator such as
``c10d::allreduce_``. While a meter is active, these operators count each call and pass it on.

A meter misses traffic that bypasses process groups (a backend called directly, symmetric memory,
the store), and the headers that an interface adds (measured by benchmarks/headers.py).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion import checks


@dataclass(frozen=True, slots=True)
class WireCount:
    """The number of calls, and the bytes they sent."""

    calls: int = 0
    bytes: int = 0  # of their payloads
    largest: int = 0  # payload of one call, in bytes
    sent: float = 0.0  # bytes that each rank must send at least, on average over the group

    def __add__(self, other: WireCount) -> WireCount:
        return WireCount(
            self.calls + other.calls,
            self.bytes + other.bytes,
            max(self.largest, other.largest),
            self.sent + other.sent,
        )


class WireMeter:
    """Context manager that counts what this process communicates, by group and collective.

    The payload is the logical message of a call, whichever algorithm moves it. The bytes sent are a
    rank's share of the minimum traffic with which n ranks can perform the call, as a ring does.
    Compare payloads between calls of one kind, and bytes sent between calls of different kinds.

    ==================  ===================================================  ===================
    collective          payload                                              sent, of the payload
    ==================  ===================================================  ===================
    all_reduce          the tensor                                           2 (n - 1) / n
    broadcast, reduce   the tensor                                           (n - 1) / n
    all_gather          the gathered output                                  (n - 1) / n
    reduce_scatter      the unreduced input                                  (n - 1) / n
    all_to_all          the input                                            (n - 1) / n
    gather, scatter     the whole list at the root (n times a rank's tensor) (n - 1) / n^2
    send                the tensor; the matching recv is not counted         1
    barrier             0 bytes, one call                                    0
    ==================  ===================================================  ===================

    In a group of one rank nothing is sent, and its calls count 0 bytes. A coalesced call is one
    call with the sum of its tensors. A call that raises is not counted.

    Meters nest, and each one counts everything while it is active. They can be exited in any order
    and entered again, and then continue counting. Entering an active one raises RuntimeError.
    Counting is thread-safe. Enter the first meter only while no thread of your own is inside a
    collective, because this replaces kernels permanently::

        with WireMeter() as meter:
            train_step()
        meter.bytes_by_collective  # {"all_reduce": 1024}
    """

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], WireCount] = {}
        self._pauses = 0

    def __enter__(self) -> WireMeter:
        with _lock:
            if self in _active:
                raise RuntimeError(
                    "This WireMeter is already active: enter a second WireMeter inside it instead."
                )
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
    def total_bytes(self) -> int:
        """Total payload in bytes."""
        return sum(count.bytes for count in self.records.values())

    @property
    def total_sent(self) -> float:
        """Bytes that each rank must send at least, on average over the ranks."""
        return sum(count.sent for count in self.records.values())

    @property
    def total_calls(self) -> int:
        """Number of calls."""
        return sum(count.calls for count in self.records.values())

    @property
    def largest(self) -> int:
        """Largest payload of a single call, in bytes."""
        return max((count.largest for count in self.records.values()), default=0)

    @property
    def bytes_by_collective(self) -> dict[str, int]:
        """Payload in bytes by collective, over all groups."""
        return {name: count.bytes for name, count in self._by_collective().items()}

    @property
    def calls_by_collective(self) -> dict[str, int]:
        """Number of calls by collective, over all groups."""
        return {name: count.calls for name, count in self._by_collective().items()}

    def between(self, replica_size: int) -> WireCount:
        """The count of all groups, including destroyed ones, that span several replicas.

        A replica is ``replica_size`` consecutive ranks; TypeError or ValueError if that is not a
        positive integer.
        """
        checks.integer("replica_size", replica_size, 1)
        ranks = _ranks_by_group()
        crossing = WireCount()
        for (group, _), count in self.records.items():
            held = ranks.get(group)
            if held is None or len({rank // replica_size for rank in held}) > 1:
                crossing += count
        return crossing

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop counting inside the ``with`` block, on all threads; other meters still count."""
        with _lock:
            self._pauses += 1
        try:
            yield
        finally:
            with _lock:
                self._pauses -= 1

    def _count(self, key: tuple[str, str], call: WireCount) -> None:
        if self._pauses:
            return
        self._records[key] = self._records.get(key, WireCount()) + call

    def _by_collective(self) -> dict[str, WireCount]:
        totals: dict[str, WireCount] = {}
        for (_, collective), count in self.records.items():
            totals[collective] = totals.get(collective, WireCount()) + count
        return totals


class Reading:
    """Counts of the innermost active meter between readings, even if the meter changes."""

    def __init__(self) -> None:
        with _lock:
            self._before = dict(_counted)

    def take(self) -> dict[str, int] | None:
        """Payload bytes since the last reading, by ranks (:func:`_named`); None without a meter."""
        with _lock:
            before, self._before, metered = self._before, dict(_counted), bool(_active)
        if not metered:
            return None
        ranks, sent = _ranks_by_group(), dict[str, int]()
        for group, counted in self._before.items():
            if new := counted - before.get(group, 0):
                key = _named(ranks[group]) if group in ranks else f"group {group}"
                sent[key] = sent.get(key, 0) + new
        return sent


def _named(ranks: list[int]) -> str:
    """Name ranks as "0, 8", "0-7" or "0-56 by 8"."""
    strides = {b - a for a, b in pairwise(ranks)}
    if len(ranks) <= 2 or len(strides) > 1:
        return ", ".join(map(str, ranks))
    (stride,) = strides
    return f"{ranks[0]}-{ranks[-1]}" + (f" by {stride}" if stride != 1 else "")


def _ranks_by_group() -> dict[str, list[int]]:
    """The ranks of every existing process group, by its name."""
    groups = dist.distributed_c10d._world.pg_map
    return {group.group_name: dist.get_process_group_ranks(group) for group in groups}


# One set of kernels serves all active meters, which are listed from the outermost to the innermost.
# The lock is re-entrant, because garbage collection during counting may communicate.
_lock = threading.RLock()
_active: list[WireMeter] = []
_counted: dict[str, int] = {}  # by the group's name


def _count(key: tuple[str, str], call: WireCount) -> None:
    with _lock:
        for meter in _active:
            meter._count(key, call)
        if _active and not _active[-1]._pauses:
            _counted[key[0]] = _counted.get(key[0], 0) + call.bytes


class _Operator(NamedTuple):
    collective: str
    payload: int | None  # position of the argument that is the payload
    times_group_size: bool = False

    def sent(self, payload: int, group_size: int) -> float:
        """Bytes that a rank must send for a payload in bytes, on average over the group."""
        if self.collective == "send":
            return payload
        others = payload * (group_size - 1) / group_size
        if self.times_group_size:
            return others / group_size
        return others * (2 if self.collective == "all_reduce" else 1)


_OPERATORS = {
    "allreduce_": _Operator("all_reduce", 0),
    "allreduce_coalesced_": _Operator("all_reduce", 0),
    "broadcast_": _Operator("broadcast", 0),
    "reduce_": _Operator("reduce", 0),
    "allgather_": _Operator("all_gather", 0),
    "_allgather_base_": _Operator("all_gather", 0),
    "allgather_coalesced_": _Operator("all_gather", 0),
    "allgather_into_tensor_coalesced_": _Operator("all_gather", 0),
    "reduce_scatter_": _Operator("reduce_scatter", 1),
    "_reduce_scatter_base_": _Operator("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": _Operator("reduce_scatter", 1),
    "alltoall_": _Operator("all_to_all", 1),
    "alltoall_base_": _Operator("all_to_all", 1),
    "gather_": _Operator("gather", 1, times_group_size=True),
    "scatter_": _Operator("scatter", 0, times_group_size=True),
    "send": _Operator("send", 0),
    "barrier": _Operator("barrier", None),
    "monitored_barrier_": _Operator("barrier", None),
}


@functools.cache
def install_kernels() -> Any:
    """Install the kernels permanently, before threads communicate while meters start and stop."""
    # The BackendSelect key is dispatched before any backend's kernel, on any device, in any thread
    # and in inference mode. torch itself has no kernel for these operators there.
    library: Any = torch.library.Library("c10d", "IMPL", "BackendSelect")  # its methods are untyped
    for name, operator in _OPERATORS.items():
        overload = getattr(torch.ops.c10d, name).default
        library.impl(name, _counting(overload, operator), with_keyset=True)
    return library


def _counting(overload: Any, operator: _Operator) -> Callable[..., Any]:
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    types = [str(argument.type) for argument in overload._schema.arguments]
    group_position = next(i for i, name in enumerate(types) if name.endswith("c10d.ProcessGroup"))

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        # redispatch releases the GIL, which the backend's threads need to free tensors
        result = overload.redispatch(keyset & below, *args, **kwargs)
        group = dist.ProcessGroup.unbox(args[group_position])
        payload = 0
        if operator.payload is not None and group.size() > 1:
            times = group.size() if operator.times_group_size else 1
            payload = times * _nbytes(args[operator.payload])
        sent = operator.sent(payload, group.size())
        call = WireCount(calls=1, bytes=payload, largest=payload, sent=sent)
        _count((group.group_name, operator.collective), call)
        return result

    return kernel


def _nbytes(tensors: Tensor | list[Any]) -> int:
    if not isinstance(tensors, Tensor):
        return sum(_nbytes(tensor) for tensor in tensors)
    if tensors.is_sparse:
        return _nbytes([tensors._indices(), tensors._values()])
    return tensors.nbytes
