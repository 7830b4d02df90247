"""One launch for a list of tensors: which block works on which chunk, and where the tensors are.

What follows from sizes and dtypes alone is computed once and kept on the device. Addresses and
numbers are sent there when they change, in one small asynchronous copy.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from curvadion.ops.tensors import Facts, Sizes
from curvadion_kernels.numbers import INTERPRETED

# Elements per block: enough to hide the start of a block, and few enough for many blocks per model.
# The interpreter's time depends on the number of operations, not on their size.
CHUNK = 16384
BLOCK = 16384 if INTERPRETED else 2048

# Host copies that CUDA graphs read at each replay; they must exist as long as the graphs.
_captured: list[Tensor] = []


class Table:
    """64-bit cells on the device. They are copied when they change, and nothing waits for the copy.

    One host copy is set aside for a CUDA graph, because memory cannot be pinned while a stream is
    being captured.

    Args:
        size: number of cells.
        device: where the cells are wanted.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        self._cells: array[int] | None = None
        self._on_device = torch.empty(0, dtype=torch.int64, device="cpu")
        self._spare = [self._pinned(size)] if device.type == "cuda" else []

    def write(self, cells: array[int]) -> Tensor:
        """The cells as an int64 tensor on the device."""
        if cells == self._cells:
            return self._on_device
        host = torch.frombuffer(cells, dtype=torch.int64)
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # This copy happens when the graph is replayed; it cannot serve other launches now.
            pinned = self._spare.pop() if self._spare else self._pinned(len(cells))
            _captured.append(pinned.copy_(host))
            return pinned.to(self._device, non_blocking=True)
        if self._device.type == "cuda":
            pinned = self._pinned(len(cells)).copy_(host)
            self._on_device = pinned.to(self._device, non_blocking=True)
        else:
            self._on_device = host.clone()
        self._cells = cells
        return self._on_device

    def _pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=True)


@dataclass(eq=False)
class Launch:
    """Tensors of a list that share a launch. Its tensors are on the device.

    Attributes:
        members: positions in the list; empty if all of the list shares the launch.
        count: number of tensors.
        blocks: number of blocks.
        of: for each block its tensor, int32.
        chunk: for each block the chunk of this tensor that it works on, int32.
        first: for each tensor its first block, int32.
        slots: for each tensor its position in the list, int32.
        numel: for each tensor its number of elements, int64.
        tickets: for each tensor the number of blocks that have finished, int32; zero between
            launches.
        cells: the device's copy of what :meth:`table` returns.
    """

    members: list[int]
    count: int
    blocks: int
    of: Tensor
    chunk: Tensor
    first: Tensor
    slots: Tensor
    numel: Tensor
    tickets: Tensor
    cells: Table

    def table(
        self,
        facts: Sequence[Facts],
        numbers: Sequence[array[float] | None],
        seeds: Sequence[int] | None = None,
    ) -> Tensor:
        """The addresses of all lists, then float32 numbers, then seeds, as one int64 tensor.

        Each list takes ``count`` cells. Numbers fill the first half of their cells, and None leaves
        them all empty.
        """
        cells = array("Q")
        for one in facts:
            cells.extend(self._chosen(one.addresses))
        for values in numbers:
            packed = array("f", [] if values is None else self._chosen(values))
            packed.frombytes(bytes(8 * self.count - 4 * len(packed)))
            cells.frombytes(packed.tobytes())
        if seeds is not None:
            cells.extend(self._chosen(seeds))
        return self.cells.write(cells)

    def _chosen(self, values: Sequence[Any]) -> Sequence[Any]:
        return [values[i] for i in self.members] if self.members else values


def launches(facts: Sequence[Facts]) -> list[tuple[Launch, tuple[int, ...]]]:
    """The launches for lists of equal sizes, each with the dtype codes of its lists."""
    device = facts[0].device
    assert device is not None
    codes = tuple(one.codes.tobytes() for one in facts)
    return _launches(facts[0].sizes, codes, device, stream_of(device))


@lru_cache(maxsize=256)
def _launches(
    sizes: Sizes, codes: tuple[bytes, ...], device: torch.device, stream: int
) -> list[tuple[Launch, tuple[int, ...]]]:
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, combination in enumerate(zip(*codes, strict=True)):
        groups.setdefault(combination, []).append(i)
    # Cells per tensor: addresses, at most three numbers and a seed.
    cells = len(codes) + 4
    return [
        (_launch(sizes, members, device, len(groups) == 1, cells), combination)
        for combination, members in groups.items()
    ]


def _launch(
    sizes: Sizes, members: list[int], device: torch.device, everything: bool, cells: int
) -> Launch:
    numel = torch.tensor([sizes.numel[i] for i in members], device="cpu")
    # An empty tensor gets a block too, which writes its norm.
    blocks = ((numel + CHUNK - 1) // CHUNK).clamp_min(1)
    first = blocks.cumsum(0) - blocks
    of = torch.repeat_interleave(torch.arange(len(members), device="cpu"), blocks)
    chunk = torch.arange(len(of), device="cpu") - first[of]
    return Launch(
        [] if everything else members,
        len(members),
        len(of),
        of.int().to(device),
        chunk.int().to(device),
        first.int().to(device),
        torch.tensor(members, dtype=torch.int32, device="cpu").to(device),
        numel.to(device),
        torch.zeros(len(members), dtype=torch.int32, device=device),
        Table(cells * len(members), device),
    )


def stream_of(device: torch.device) -> int:
    """The stream of the next launch. What is kept between launches is kept for each stream."""
    return torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Launch on this device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
