"""One launch for a list of tensors: which block works on which chunk, and where the tensors are.

Tensors of a list are cut into chunks of CHUNK elements, and the launch has one block a chunk. Two
kinds of data tell a block what to do.

The index follows from sizes and dtypes alone. It is computed once and kept on the device, for
launches on any stream. Of three tensors with 40000, 0 and 16384 elements it is

    numel    40000      0   16384         by tensor
    first        0      3       4         by tensor: its first block
    slots        0      1       2         by tensor: its position in the list
    of           0  0   0   1   2         by block: its tensor
    chunk        0  1   2   0   0         by block: the chunk of this tensor

so block 2 works on the elements [2 CHUNK, 40000) of tensor 0.

The table holds addresses and numbers, and is sent to the device at each launch, in one small
asynchronous copy. It consists of 64-bit cells, in columns with one cell for each of the ``count``
tensors. That of a local step on weights X and gradients G, with seeds, is

    first cell      0             count         2 count     3 count     4 count     5 count
    column          X             G             step        decay       mu          seeds
    entries         addresses     addresses     float32     float32     float32     int64

The address of tensor t in column c is in cell c count + t. Numbers of 32 bits lie one after another
from the first cell of their column on, and fill the first half of it, so number t of column c is
the float32 number 2 c count + t of the table. A kernel's docstring lists the columns that it reads.

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

# Elements of a block: enough to hide its start, and few enough for many blocks per model; and how
# many of them it holds in registers at a time. The interpreter's time depends on the number of
# operations more than on their size: it takes a block at once, but few elements of short tensors.
CHUNK = 4096 if INTERPRETED else 16384
BLOCK = CHUNK if INTERPRETED else 2048

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
        index: what kernels need to know of the sizes: numel, of, chunk, first and slots, as the
            module describes them, numel int64 and the others int32. Launches that divide their
            work in another way have tensors of their own.
    """

    members: list[int]
    count: int
    blocks: int
    index: Index
    _tickets: dict[int, Tensor] = field(default_factory=dict)

    def tickets(self, device: torch.device) -> Tensor:
        """How many blocks of each tensor have finished, (count,) int32; zeros between launches.

        A kernel that needs the sum over a tensor's blocks draws a ticket at the end of each. The
        block that draws the last one adds up, and sets the tickets back. Launches of one stream
        follow one another, so they share these.
        """
        stream = stream_of(device)
        if stream not in self._tickets:
            self._tickets[stream] = torch.zeros(self.count, dtype=torch.int32, device=device)
        return self._tickets[stream]

    def table(
        self,
        lists: Sequence[Sequence[Tensor]],
        numbers: Sequence[Sequence[float] | None],
        *seeds: Sequence[int] | None,
    ) -> Tensor:
        """The addresses of all lists, then float32 numbers, then seeds, as one int64 tensor.

        Args:
            lists: of the tensors whose addresses are sent, each as long as the list of all tensors.
            numbers: by column a number a tensor; None leaves the column empty.
            seeds: by column an integer a tensor; None is no column.

        Returns:
            A column of ``count`` cells for each of these; the module draws them.
        """
        columns = []
        for tensors in lists:
            addresses = [tensor.data_ptr() for tensor in self._chosen(tensors)]
            columns.append(Column(addresses, None, self.count))
        for values in numbers:
            columns.append(Column(self._chosen(values or ()), torch.float32, self.count))
        for column in seeds:
            if column is not None:
                columns.append(Column(self._chosen(column), torch.int64, self.count))
        return table_of(columns, lists[0][0].device)

    def _chosen(self, values: Sequence[Any]) -> Sequence[Any]:
        """Of values for the whole list, those of this launch; an empty column stays empty."""
        if self.members and values:
            return [values[i] for i in self.members]
        return values


def launches(lists: Sequence[Sequence[Tensor]]) -> list[tuple[Launch, tuple[torch.dtype, ...]]]:
    """The launches for a list: one for the tensors of each combination of dtypes.

    Args:
        lists: of equal lengths and, at each position, equal shapes, such as X, M and G.

    Returns:
        Each launch with the dtypes of its lists, in their order; none if the lists are empty.
    """
    if not lists[0]:
        return []
    device = lists[0][0].device
    sizes = tuple(t.numel() for t in lists[0])
    by_list = [[tensor.dtype for tensor in tensors] for tensors in lists]
    dtypes = tuple(zip(*by_list, strict=True))
    return kept(_launches, device)(sizes, dtypes, device)


@lru_cache(maxsize=256)
def _launches(
    sizes: tuple[int, ...], dtypes: tuple[tuple[torch.dtype, ...], ...], device: torch.device
) -> list[tuple[Launch, tuple[torch.dtype, ...]]]:
    """:func:`launches` from all that they depend on, which is the key of the cache.

    Args:
        sizes: by tensor its number of elements.
        dtypes: by tensor its dtype in each list.
        device: of the tensors.
    """
    groups: dict[tuple[torch.dtype, ...], list[int]] = {}
    for i, combination in enumerate(dtypes):
        groups.setdefault(combination, []).append(i)
    everything = len(groups) == 1
    return [
        (_launch(sizes, members, device, everything), combination)
        for combination, members in groups.items()
    ]


def _launch(
    sizes: tuple[int, ...], members: list[int], device: torch.device, everything: bool
) -> Launch:
    """The launch for some tensors of a list.

    Args:
        sizes: the number of elements of each tensor of the list.
        members: positions of those that share the launch.
        device: of the tensors.
        everything: whether these are all.
    """
    numel = torch.tensor([sizes[i] for i in members], device="cpu")
    # An empty tensor gets a block too, which writes its norm.
    blocks = ((numel + CHUNK - 1) // CHUNK).clamp_min(1)
    first = blocks.cumsum(0) - blocks
    of = torch.repeat_interleave(torch.arange(len(members), device="cpu"), blocks)
    chunk = torch.arange(len(of), device="cpu") - first[of]
    slots = torch.tensor(members, dtype=torch.int32, device="cpu")
    index = Index([numel, of.int(), chunk.int(), first.int(), slots], device)
    return Launch(
        members=[] if everything else members, count=len(members), blocks=len(of), index=index
    )


def kept(make: _lru_cache_wrapper[T], device: torch.device) -> Callable[..., T]:
    """A cached function, without its cache while a CUDA graph is captured.

    The graph must own what its launches read, and nobody else can read what it has not filled yet.

    Args:
        make: a function with ``lru_cache`` whose results are on the device.
        device: of the launch.
    """
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return make.__wrapped__ if capturing or recording() is not None else make


# By the dtype of a column, how Python's arrays call its numbers; addresses have no dtype.
_TYPES = {None: "Q", torch.int64: "q", torch.float32: "f", torch.float64: "d"}


def table_of(columns: Sequence[Column], device: torch.device) -> Tensor:
    """A table of 64-bit cells on the device, for a launch on the current stream, int64.

    Numbers may be tensors of shape () on the device, such as a learning rate, which the host does
    not read: the table has zeros in their places, into which they are copied on the device. While a
    step is recorded, the table is a part of the step's page.

    Args:
        columns: one after another, each of as many cells as it says.
        device: of the launch.
    """
    has_tensors = any(_hold_tensors(column) for column in columns)
    on_host = columns
    if has_tensors:
        on_host = [column._replace(entries=_without_tensors(column)) for column in columns]
    page = recording()
    if page is not None:
        table = page.table(*on_host)
    else:
        table = cells_to_device(_packed(on_host), device)
    if has_tensors:
        _fill_in_tensors(table, columns)
    return table


def _packed(columns: Sequence[Column]) -> array[int]:
    """The cells of columns whose entries are all on the host, one column after another."""
    cells = array("Q")
    for column in columns:
        numbers = array(_TYPES[column.dtype], column.entries)
        empty_bytes = CELL * column.cells - numbers.itemsize * len(numbers)
        cells.frombytes(numbers.tobytes() + bytes(empty_bytes))
    return cells


def _fill_in_tensors(table: Tensor, columns: Sequence[Column]) -> None:
    """Write the columns that have numbers on the device, without a wait of the host."""
    first_cell = 0
    for column in columns:
        if column.dtype is not None and _hold_tensors(column):
            cells = table[first_cell : first_cell + column.cells]
            place = cells.view(column.dtype)[: len(column.entries)]
            numbers = [
                entry if _on_device(entry) else place.new_full((), float(entry))
                for entry in column.entries
            ]
            place.copy_(torch.stack([number.to(place.dtype) for number in numbers]))
        first_cell += column.cells


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

    Args:
        tensors: on the host.
        device: where they are wanted.

    Returns:
        As many tensors of the same shapes and dtypes, all views of one storage.
    """
    page = recording()
    if page is not None:
        return page.fixed(tensors)
    # Kernels that have seen a multiple of 16 bytes as an address are compiled again for others.
    sizes = [-(-t.nbytes // 16) * 16 for t in tensors]
    pinned = device.type == "cuda"
    host = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=pinned)

    def views(memory: Tensor) -> list[Tensor]:
        """The tensors in this memory, host or device."""
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
