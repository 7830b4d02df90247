"""Addresses and numbers of a step that is recorded once and replayed with others.

A recorded step (a CUDA graph) repeats its launches as they were. What may differ at a
replay lies in one :class:`Page` of device memory, which kernels read: the addresses of
gradients, and the numbers of the parameter groups, such as learning rates. While a step is
recorded, tables of kernels and small tensors from the host get their places there, and the
page notes how each is computed. :meth:`Page.refresh` computes all of them again and sends
them in one copy.

Numbers of the groups are :class:`Live` while a step is recorded. Arithmetic on them gives
others; a branch that depends on one becomes a condition of the replay; and plain PyTorch
refuses them, so that none can be frozen into a recorded step unnoticed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

Tensors = Sequence[Tensor]

# Bytes of a cell: an address, an integer, or a float in the first bytes.
CELL = 8
# Cells of a page: for any model, and for each of its tensors.
CELLS = 2**15
CELLS_A_TENSOR = 256
# What stays as it is are mostly indices of blocks, a cell for 16384 elements and launch: this
# is enough for 32 launches over all elements.
ELEMENTS_A_CELL = 512

_recording: ContextVar[Page | None] = ContextVar("curvadion_recording", default=None)


def recording() -> Page | None:
    """The page of the step that this thread is recording, if any."""
    return _recording.get()


class PageFull(Exception):
    """A recorded step needs more cells than its page has."""


class Live:
    """A number of a recorded step that is read again before every replay.

    Attributes:
        value: the number while the step is recorded.
        read: computes the number again.
    """

    __slots__ = ("_derived", "_page", "read", "value")

    def __init__(self, page: Page, read: Callable[[], Any]) -> None:
        self._page = page
        # By function and further arguments, so that an expression is one object whenever it is
        # evaluated: == compares a number with itself only.
        self._derived: dict[object, Live] = {}
        self.read = read
        self.value = read()

    def apply(self, function: Callable[..., Any], *others: Any) -> Live:
        """``function(self, *others)`` as a live number; the same one if asked again."""
        if any(isinstance(other, Tensor) for other in others):
            # Tensor's operators return NotImplemented for a Live, so Python calls the reflected
            # ones of this class. Their result would be a tensor, which no page sends before a
            # replay.
            raise TypeError("a live number and a tensor: put the number on the page first")
        key = function, *others
        if key not in self._derived:

            def read() -> Any:
                arguments = [other.read() if isinstance(other, Live) else other for other in others]
                return function(self.read(), *arguments)

            self._derived[key] = Live(self._page, read)
        return self._derived[key]

    def __add__(self, other: Any) -> Live:
        return self.apply(operator.add, other)

    def __radd__(self, other: Any) -> Live:
        return self.apply(_reflected(operator.add), other)

    def __sub__(self, other: Any) -> Live:
        return self.apply(operator.sub, other)

    def __rsub__(self, other: Any) -> Live:
        return self.apply(_reflected(operator.sub), other)

    def __mul__(self, other: Any) -> Live:
        return self.apply(operator.mul, other)

    def __rmul__(self, other: Any) -> Live:
        return self.apply(_reflected(operator.mul), other)

    def __truediv__(self, other: Any) -> Live:
        return self.apply(operator.truediv, other)

    def __and__(self, other: Any) -> Live:
        return self.apply(operator.and_, other)

    def __neg__(self) -> Live:
        return self.apply(operator.neg)

    def __bool__(self) -> bool:
        return bool(self._page.condition(self.apply(bool)))

    def __lt__(self, other: Any) -> bool:
        return bool(self._page.condition(self.apply(operator.lt, other)))

    def __gt__(self, other: Any) -> bool:
        return bool(self._page.condition(self.apply(operator.gt, other)))

    def __eq__(self, other: object) -> bool:
        # Identity would silently take another branch than the number does.
        if self is other:
            return True
        raise TypeError("a live number: compare it by < and >, which are conditions")

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"Live({self.value!r})"


@cache
def _reflected(operation: Callable[..., Any]) -> Callable[..., Any]:
    """The operation with its arguments exchanged; always the same function."""
    return lambda a, b: operation(b, a)


def apply(function: Callable[[Any], Any], number: Any) -> Any:
    """``function(number)``, which is live if the number is."""
    return number.apply(function) if isinstance(number, Live) else function(number)


def now(number: Any) -> Any:
    """The value of a number that may be live."""
    return number.value if isinstance(number, Live) else number


class Column(NamedTuple):
    """A part of a kernel's table of 64-bit cells.

    Attributes:
        entries: addresses, or numbers that may be live.
        dtype: of numbers; None for addresses.
        cells: how many cells the column takes.
    """

    entries: Sequence[Any]
    dtype: torch.dtype | None
    cells: int


class LiveGroup(Mapping[str, Any]):
    """A parameter group whose numbers are live. Others are conditions of a replay."""

    def __init__(self, group: Mapping[str, Any], page: Page) -> None:
        self._group = group
        self._page = page
        self._live: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._live:
            self._live[key] = self._read(key)
        return self._live[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)

    def _read(self, key: str) -> Any:
        """A live number, or a value that becomes a condition of a replay."""
        value = self._group[key]
        if isinstance(value, float):
            # A tensor is read in another way.
            self._page.same(lambda: isinstance(self._group[key], Tensor))
            return Live(self._page, lambda: self._group[key])
        if key == "betas":
            return tuple(Live(self._page, partial(self._beta, i)) for i in range(2))
        if isinstance(value, Tensor) and value.device.type == "cpu":
            return Live(self._page, lambda: float(self._group[key]))
        if key != "params":
            self._page.same(lambda: self._group[key])
        return value

    def _beta(self, i: int) -> float:
        beta: float = self._group["betas"][i]
        return beta


def _on_host(numbers: Iterable[Any], dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers as a tensor on the host, whatever torch's default device is."""
    return torch.tensor(list(numbers), dtype=dtype, device="cpu")


class _Addresses(NamedTuple):
    """k cells with addresses in moving tensors.

    Attributes:
        cells: (k,) int64, indices of cells.
        tensors: (k,) int64, indices of moving tensors.
        distances: (k,) int64, bytes from a tensor's first one to the address.
    """

    cells: Tensor
    tensors: Tensor
    distances: Tensor

    def write(self, host: Tensor, bases: Sequence[int]) -> None:
        """Write the addresses that follow from where the moving tensors are."""
        host[self.cells] = _on_host(bases)[self.tensors] + self.distances


class _Numbers(NamedTuple):
    """Live numbers of a dtype, each of which may stand in several of k places.

    Attributes:
        dtype: in memory.
        reads: compute the numbers.
        indices: (k,) int64, the index of each place's number in ``reads``.
        places: (k,) int64, counted in elements of the dtype.
    """

    dtype: torch.dtype
    reads: list[Callable[[], Any]]
    indices: Tensor
    places: Tensor

    def write(self, host: Tensor, bases: Sequence[int]) -> None:
        """Compute the numbers and write them."""
        values = _on_host([read() for read in self.reads], self.dtype)
        host.view(self.dtype)[self.places] = values[self.indices]


class _Memory:
    """A part of a page: cells on the host, and their copy on the device.

    It is allocated before the recording. A graph's results share memory one after another, so
    what lay there before a replay would be overwritten.

    Args:
        cells: how many there are.
        device: of the copy.
    """

    def __init__(self, cells: int, device: torch.device) -> None:
        self._host = torch.zeros(cells, dtype=torch.int64, device="cpu")
        if device.type == "cpu":
            self.on_device = self._host
        else:
            self.on_device = torch.empty_like(self._host, device=device)
        self._used = 0
        # Of addresses that move: cell, index of the moving tensor, and bytes from its first
        # one to the address.
        self.addresses: list[tuple[int, int, int]] = []
        # The places of each number, by its dtype in memory.
        self._numbers: dict[torch.dtype, dict[Live, list[int]]] = {}
        self._parts: list[_Addresses | _Numbers] = []

    def take(self, count: int) -> slice:
        """Take the next cells, from a multiple of 16 bytes on.

        Kernels that were compiled for such an address would be compiled again for others.

        Raises:
            PageFull: there are not as many cells left.
        """
        place = slice(self._used, self._used + count)
        self._used += count + count % 2
        if self._used > len(self._host):
            raise PageFull(f"tables of a step need more than {len(self._host)} cells")
        return place

    def put_tensor(self, place: slice, tensor: Tensor) -> Tensor:
        """Write a tensor of the host to cells; return its place on the device."""
        _as_tensor(self._host[place], tensor).copy_(tensor)
        return _as_tensor(self.on_device[place], tensor)

    def put(self, dtype: torch.dtype, first: int, numbers: Sequence[Any]) -> None:
        """Write numbers one after another, now and those that are live before every replay.

        Args:
            dtype: of the numbers in memory.
            first: the place of the first one, counted in elements of this dtype.
            numbers: of the host.
        """
        values = _on_host(map(now, numbers), dtype)
        self._host.view(dtype)[first : first + len(numbers)] = values
        for place, number in enumerate(numbers, first):
            if isinstance(number, Live):
                self._numbers.setdefault(dtype, {}).setdefault(number, []).append(place)

    def write(self, bases: Sequence[int]) -> None:
        """Write what may have changed; bases: addresses of the moving tensors."""
        for part in self._parts:
            part.write(self._host, bases)

    def settle(self) -> None:
        """Note that all places are known."""
        self._parts = self._gathered()

    def _gathered(self) -> list[_Addresses | _Numbers]:
        """What is to be written: one operation for addresses, one for numbers of a dtype."""
        parts: list[_Addresses | _Numbers] = []
        if self.addresses:
            cells, tensors, distances = zip(*self.addresses, strict=True)
            parts.append(_Addresses(_on_host(cells), _on_host(tensors), _on_host(distances)))
        for dtype, places_by_number in self._numbers.items():
            reads = [number.read for number in places_by_number]
            indices = []
            places = []
            for i, places_of_number in enumerate(places_by_number.values()):
                indices += [i] * len(places_of_number)
                places += places_of_number
            parts.append(_Numbers(dtype, reads, _on_host(indices), _on_host(places)))
        return parts

    def send(self) -> None:
        """Copy what is used to the device; the host does not wait."""
        if self.on_device is not self._host:
            pinned = self.on_device.device.type == "cuda"
            cells = torch.empty(self._used, dtype=torch.int64, device="cpu", pin_memory=pinned)
            cells.copy_(self._host[: self._used])
            self.on_device[: self._used].copy_(cells, non_blocking=True)


def _as_tensor(cells: Tensor, like: Tensor) -> Tensor:
    """The first cells as a tensor of another one's shape and dtype."""
    return cells.view(like.dtype)[: like.numel()].view(like.shape)


class Page:
    """Device memory with what may change between the replays of a recorded step.

    Args:
        device: of the step.
        moving: returns the tensors whose memory may be elsewhere at each replay; they have no
            gaps in memory and do not overlap.
        tensors: how many parameters and matrices the step has, equal on all ranks.
        elements: how many elements they have on a rank, equal on all ranks.

    Raises:
        ValueError: two of the moving tensors overlap.
    """

    def __init__(
        self,
        device: torch.device,
        moving: Callable[[], Tensors],
        tensors: int = 0,
        elements: int = 0,
    ) -> None:
        self._device = device
        self._moving = moving
        self._ranges = list(map(_range_of, moving()))
        for (_, stop), (start, _) in pairwise(sorted(self._ranges)):
            if start < stop:
                raise ValueError("two gradients share memory: copy one, or pass capture=False")
        cells = CELLS + CELLS_A_TENSOR * tensors
        self._tables = _Memory(cells, device)
        self._still = _Memory(cells + elements // ELEMENTS_A_CELL, device)
        # Numbers on which a branch depended, and what else must not change, with their values.
        self._conditions: list[tuple[Live, Any]] = []
        self._same: list[tuple[Callable[[], Any], Any]] = []

    @contextmanager
    def record(self) -> Iterator[None]:
        """Inside the block, tables and small tensors from the host get places on this page."""
        token = _recording.set(self)
        try:
            yield
        finally:
            _recording.reset(token)

    # --- while a step is recorded

    def table(self, *columns: Column) -> Tensor:
        """The place of a table of columns, (number of cells,) int64."""
        memory = self._tables
        place = memory.take(sum(column.cells for column in columns))
        first = place.start
        for column in columns:
            if column.dtype is None:
                memory.put(torch.int64, first, column.entries)
                for cell, address in enumerate(column.entries, first):
                    origin = self._origin(address)
                    if origin is not None:
                        memory.addresses.append((cell, *origin))
            else:
                first_element = first * CELL // column.dtype.itemsize
                memory.put(column.dtype, first_element, column.entries)
            first += column.cells
        return memory.on_device[place]

    def numbers(self, numbers: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """The place of a small tensor from the host, (number of numbers,)."""
        cells = -(-len(numbers) * dtype.itemsize // CELL)
        return self.table(Column(numbers, dtype, cells)).view(dtype)[: len(numbers)]

    def fixed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Places of tensors on the host that stay as they are; sent after the recording."""
        places = []
        for tensor in tensors:
            cells = self._still.take(-(-tensor.nbytes // CELL))
            places.append(self._still.put_tensor(cells, tensor))
        return places

    def condition(self, number: Live) -> Any:
        """The value of a number on which the recorded step depends."""
        self._conditions.append((number, number.value))
        return number.value

    def same(self, read: Callable[[], Any]) -> None:
        """Replay only while this returns the same object or an equal one."""
        self._same.append((read, read()))

    def _origin(self, address: int) -> tuple[int, int] | None:
        """The index of the moving tensor that holds an address, and the bytes up to there."""
        for index, (start, stop) in enumerate(self._ranges):
            if start <= address < stop:
                return index, address - start
        return None

    # --- before a replay

    def fits(self) -> bool:
        """Whether a replay would do what the step does: no branch would go another way."""
        for read, recorded_value in self._same:
            value = read()
            if value is not recorded_value and value != recorded_value:
                return False
        return all(number.read() == value for number, value in self._conditions)

    def refresh(self) -> None:
        """Compute all addresses and numbers again, and send them to the device."""
        bases = [t.data_ptr() for t in self._moving()]
        self._tables.write(bases)
        self._tables.send()

    def forget(self) -> None:
        """Drop what refers to the groups, which refer to this page: its memory is freed."""
        self._conditions.clear()
        self._same.clear()

    def settle(self) -> None:
        """Send what stays as it is, once the step has been recorded."""
        self._still.send()
        self._tables.settle()


def _range_of(tensor: Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first element up to its end; it has no gaps."""
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.element_size()
