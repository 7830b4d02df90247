"""One launch for a list of tensors: which block works on what, and where the tensors are.

What follows from sizes and dtypes alone is made once and kept on the device. Addresses and
numbers go there in one small asynchronous copy, when they have changed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from curvadion.tensors import Facts, Sizes
from curvadion_kernels.numbers import INTERPRETED

# Elements per block: enough work to hide its start, and many blocks for a model. The
# interpreter's time goes by the number of operations, not by their size.
CHUNK = 16384
BLOCK = 16384 if INTERPRETED else 2048

# Host copies that a CUDA graph reads at each replay must outlive it.
_captured: list[Tensor] = []


@dataclass(eq=False)
class Launch:
    """Tensors of a list that share a launch.

    Attributes:
        members: their places in the list; empty for all of it.
        count: how many they are.
        blocks: number of blocks; ``of`` and ``chunk`` give, per block, its tensor and which chunk
            of the tensor it works on; ``first`` a tensor's first block. int32, on the device.
        slots: their places in the list, int32, on the device.
        numel: elements of each tensor, int64, on the device.
        tickets: per tensor, how many blocks have finished; zero between launches.
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
    _key: tuple[Any, ...] = ()
    _table: Tensor | None = field(default=None)

    def table(
        self,
        facts: Sequence[Facts],
        numbers: Sequence[Sequence[float] | None],
        seeds: Sequence[int] | None = None,
    ) -> Tensor:
        """Addresses of every list, float32 numbers and seeds, as one int64 tensor.

        Each list takes ``count`` cells, in this order; numbers leave the second half of theirs
        empty, and those that are None leave all.
        """
        key = (*(one.addresses for one in facts), numbers, seeds)
        if self._table is None or self._key != key:
            cells = array("Q")
            for one in facts:
                cells.extend(self._chosen(one.addresses))
            for values in numbers:
                packed = array("f", self._chosen(values or []))
                packed.extend([0.0] * (2 * self.count - len(packed)))
                cells.frombytes(packed.tobytes())
            if seeds is not None:
                cells.extend(self._chosen(seeds))
            self._table = to_device(cells, self.of.device)
            self._key = key
        return self._table

    def _chosen(self, values: Sequence[Any]) -> Sequence[Any]:
        return [values[i] for i in self.members] if self.members and values else values


def launches(facts: Sequence[Facts]) -> list[tuple[Launch, tuple[int, ...]]]:
    """The launches for lists that run in step, each with its lists' dtype codes."""
    device = facts[0].device
    assert device is not None
    stream = torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0
    codes = tuple(one.codes.tobytes() for one in facts)
    return _launches(facts[0].sizes, codes, device, stream)


@lru_cache(maxsize=256)
def _launches(
    sizes: Sizes, codes: tuple[bytes, ...], device: torch.device, stream: int
) -> list[tuple[Launch, tuple[int, ...]]]:
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, combination in enumerate(zip(*codes, strict=True)):
        groups.setdefault(combination, []).append(i)
    return [
        (_launch(sizes, members, device, everything=len(groups) == 1), combination)
        for combination, members in groups.items()
    ]


def _launch(sizes: Sizes, members: list[int], device: torch.device, *, everything: bool) -> Launch:
    numel = torch.tensor([sizes.numel[i] for i in members])
    # An empty tensor gets a block too: someone must write its norm.
    blocks = ((numel + CHUNK - 1) // CHUNK).clamp_min(1)
    first = blocks.cumsum(0) - blocks
    of = torch.repeat_interleave(torch.arange(len(members)), blocks)
    chunk = torch.arange(len(of)) - first[of]
    return Launch(
        [] if everything else members,
        len(members),
        len(of),
        of.int().to(device),
        chunk.int().to(device),
        first.int().to(device),
        torch.tensor(members, dtype=torch.int32).to(device),
        numel.to(device),
        torch.zeros(len(members), dtype=torch.int32, device=device),
    )


def to_device(cells: array[int], device: torch.device) -> Tensor:
    """64-bit cells as an int64 tensor on the device, without waiting for the copy."""
    host = torch.frombuffer(cells, dtype=torch.int64)
    if device.type == "cpu":
        return host.clone()
    pinned = host.pin_memory()
    if torch.cuda.is_current_stream_capturing():
        _captured.append(pinned)
    return pinned.to(device, non_blocking=True)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Launch on this device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
