"""One launch for a list of tensors: which block works on which chunk, and where the tensors are.

What follows from sizes and dtypes alone is computed once and kept on the device, for launches on
any stream. Addresses and numbers are sent there at each launch, in one small asynchronous copy.
While a CUDA graph is captured nothing is kept: all of it is made again, on the page of a recorded
step or in memory of somebody else's graph, so that a replay depends on nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from curvadion.ops.page import CELL, Column, recording
from curvadion_kernels.numbers import INTERPRETED

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper

# Elements per block: enough to hide the start of a block, and few enough for many blocks per model.
# The interpreter's time depends on the number of operations, not on their size.
CHUNK = 16384
BLOCK = 16384 if INTERPRETED else 2048

T = TypeVar("T")


class Index:
    """Tensors that are copied to the device once, for launches on any stream.

    Args:
        tensors: on the host.
        device: where they are wanted.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._tensors = to_device(tensors, device)
        self._streams = {stream_of(device)}
        if device.type == "cuda":
            self._copied = torch.cuda.current_stream(device).record_event()

    def on_stream(self) -> list[Tensor]:
        """The tensors, for a launch on the current stream."""
        device = self._tensors[0].device
        if stream_of(device) not in self._streams:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(self._copied)
            # They share this memory, which must not be reused before the stream has read it.
            self._tensors[0].record_stream(stream)
            self._streams.add(stream.stream_id)
        return self._tensors


@dataclass(eq=False)
class Launch:
    """Tensors of a list that share a launch.

    Attributes:
        members: positions in the list; empty if all of the list shares the launch.
        count: number of tensors.
        blocks: number of blocks.
        index: numel, for each tensor its number of elements (int64); of and chunk, for each block
            its tensor and the chunk of it that it works on; first and slots, for each tensor its
            first block and its position in the list (int32).
    """

    members: list[int]
    count: int
    blocks: int
    index: Index
    _tickets: dict[int, Tensor] = field(default_factory=dict)

    def tickets(self, device: torch.device) -> Tensor:
        """For each tensor the number of blocks that have finished, int32; zero between launches.

        Launches share them that follow one another: those of one stream.
        """
        stream = stream_of(device)
        if stream not in self._tickets:
            self._tickets[stream] = torch.zeros(self.count, dtype=torch.int32, device=device)
        return self._tickets[stream]

    def table(
        self,
        lists: Sequence[Sequence[Tensor]],
        numbers: Sequence[Sequence[float] | None],
        seeds: Sequence[int] | None = None,
    ) -> Tensor:
        """The addresses of all lists, then float32 numbers, then seeds, as one int64 tensor.

        Each list takes ``count`` cells. Numbers fill the first half of their cells, and None leaves
        them all empty.
        """
        columns = [
            Column([t.data_ptr() for t in self._chosen(list_)], None, self.count) for list_ in lists
        ]
        columns += [Column(self._chosen(n or ()), torch.float32, self.count) for n in numbers]
        if seeds is not None:
            columns.append(Column(self._chosen(seeds), torch.int64, self.count))
        return table_of(columns, lists[0][0].device)

    def _chosen(self, values: Sequence[Any]) -> Sequence[Any]:
        return [values[i] for i in self.members] if self.members and values else values


def launches(lists: Sequence[Sequence[Tensor]]) -> list[tuple[Launch, tuple[torch.dtype, ...]]]:
    """The launches for lists of equal shapes, each with the dtypes of its lists; none if empty."""
    if not lists[0]:
        return []
    device = lists[0][0].device
    sizes = tuple(t.numel() for t in lists[0])
    dtypes = tuple(zip(*([t.dtype for t in list_] for list_ in lists), strict=True))
    return kept(_launches, device)(sizes, dtypes, device)


@lru_cache(maxsize=256)
def _launches(
    sizes: tuple[int, ...], dtypes: tuple[tuple[torch.dtype, ...], ...], device: torch.device
) -> list[tuple[Launch, tuple[torch.dtype, ...]]]:
    groups: dict[tuple[torch.dtype, ...], list[int]] = {}
    for i, combination in enumerate(dtypes):
        groups.setdefault(combination, []).append(i)
    return [
        (_launch(sizes, members, device, len(groups) == 1), combination)
        for combination, members in groups.items()
    ]


def _launch(
    sizes: tuple[int, ...], members: list[int], device: torch.device, everything: bool
) -> Launch:
    numel = torch.tensor([sizes[i] for i in members], device="cpu")
    # An empty tensor gets a block too, which writes its norm.
    blocks = ((numel + CHUNK - 1) // CHUNK).clamp_min(1)
    first = blocks.cumsum(0) - blocks
    of = torch.repeat_interleave(torch.arange(len(members), device="cpu"), blocks)
    chunk = torch.arange(len(of), device="cpu") - first[of]
    slots = torch.tensor(members, dtype=torch.int32, device="cpu")
    return Launch(
        [] if everything else members,
        len(members),
        len(of),
        Index([numel, of.int(), chunk.int(), first.int(), slots], device),
    )


def kept(make: _lru_cache_wrapper[T], device: torch.device) -> Callable[..., T]:
    """A cached function, without its cache while a CUDA graph is captured.

    The graph must own what its launches read, and nobody else can read what it has not filled yet.
    """
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return make.__wrapped__ if capturing or recording() is not None else make


# By the dtype of a column, how Python's arrays call its numbers; addresses have no dtype.
_TYPES = {None: "Q", torch.int64: "q", torch.float32: "f", torch.float64: "d"}


def table_of(columns: Sequence[Column], device: torch.device) -> Tensor:
    """A table of 64-bit cells on the device, for a launch on the current stream, int64.

    Numbers may be tensors of shape () on the device, such as a learning rate, which the host does
    not read. While a step is recorded, the table is a part of the step's page.
    """
    tensors = [column for column in columns if _hold_tensors(column)]
    on_host = columns
    if tensors:
        on_host = [column._replace(entries=_without_tensors(column)) for column in columns]
    if (page := recording()) is not None:
        table = page.table(*on_host)
    else:
        cells = array("Q")
        for column in on_host:
            numbers = array(_TYPES[column.dtype], column.entries)
            empty = CELL * column.cells - numbers.itemsize * len(numbers)
            cells.frombytes(numbers.tobytes() + bytes(empty))
        table = cells_to_device(cells, device)
    first = 0
    for column in columns if tensors else ():
        if column.dtype is not None and _hold_tensors(column):
            place = table[first : first + column.cells].view(column.dtype)[: len(column.entries)]
            each = [n if _on_device(n) else place.new_full((), float(n)) for n in column.entries]
            place.copy_(torch.stack([number.to(place.dtype) for number in each]))
        first += column.cells
    return table


def _without_tensors(column: Column) -> Sequence[Any]:
    """The same entries, with zeros in the place of numbers on the device."""
    if not _hold_tensors(column):
        return column.entries
    on_host = [0.0 if _on_device(entry) else entry for entry in column.entries]
    return [entry.item() if isinstance(entry, Tensor) else entry for entry in on_host]


def _hold_tensors(column: Column) -> bool:
    """Whether there is a tensor among a column's numbers; nearly always there is none."""
    if column.dtype is None:
        return False
    return any(issubclass(kind, Tensor) for kind in set(map(type, column.entries)))


def _on_device(number: Any) -> bool:
    """Whether the host would have to wait for a number."""
    return isinstance(number, Tensor) and number.device.type != "cpu"


def cells_to_device(cells: array[int], device: torch.device) -> Tensor:
    """64-bit cells as an int64 tensor on the device, for a launch on the current stream."""
    [on_device] = to_device([torch.frombuffer(cells, dtype=torch.int64)], device)
    return on_device


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies on the device, made in one transfer, for which the host does not wait.

    While a step is recorded, the copies lie on its page, which sends them once. While somebody else
    captures a CUDA graph, the transfer is part of it, and the graph owns both ends.
    """
    if (page := recording()) is not None:
        return page.fixed(tensors)
    # Kernels that have seen a multiple of 16 bytes as an address are compiled again for others.
    sizes = [-(-t.nbytes // 16) * 16 for t in tensors]
    pinned = device.type == "cuda"
    host = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=pinned)

    def views(memory: Tensor) -> list[Tensor]:
        places = zip(memory.split(sizes), tensors, strict=True)
        return [place[: t.nbytes].view(t.dtype).view(t.shape) for place, t in places]

    for place, t in zip(views(host), tensors, strict=True):
        place.copy_(t)
    return views(host.to(device, non_blocking=True))


def stream_of(device: torch.device) -> int:
    """The stream of the next launch."""
    return torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0


def rounds_float32() -> bool:
    """Whether float32 factors may be rounded to TensorFloat-32, as torch.bmm rounds them.

    This can be read whichever of torch's two interfaces has set it. The older one's own getters
    (get_float32_matmul_precision, allow_tf32) raise once fp32_precision has been set.
    """
    precision: str = torch.backends.cuda.matmul.fp32_precision
    return precision == "tf32"


def run(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on the current device and stream.

    Every launch of this package goes through here, so that tests can count and record them.

    Args:
        kernel: a function compiled by ``triton.jit``.
        grid: the number of programs along each axis.
        arguments: its tensors and numbers, in order.
        constants: its ``tl.constexpr`` arguments, and Triton's options such as ``num_warps``.
    """
    kernel[grid](*arguments, **constants)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Launch on this device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
