"""Lists of tensors for operations, and tensors from host numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from curvadion.ops.page import recording

Tensors = Sequence[Tensor]
Numbers = Sequence[float]
# The dtypes that compiled list operations take on a GPU, and their codes there.
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Unsupported(Exception):
    """A backend does not support these tensors, but plain PyTorch does."""


def from_host(numbers: Numbers, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers as a tensor on a device, for which the host does not wait.

    Args:
        numbers: k numbers of the host; while a step is recorded they may be live.
        dtype: of the tensor.
        device: of the tensor.

    Returns:
        (k,). While a step is recorded, its place on the page, which a replay writes again.
    """
    page = recording()
    if page is not None:
        return page.numbers(numbers, dtype)
    if device.type != "cuda" or not numbers:
        return torch.tensor(numbers, dtype=dtype, device=device)
    # A kernel's argument instead of a copy from the host.
    if len(set(numbers)) == 1:
        return torch.full((len(numbers),), numbers[0], dtype=dtype, device=device)
    pinned = torch.tensor(numbers, dtype=dtype, device="cpu").pin_memory()
    return pinned.to(device, non_blocking=True)


def adjacent(parts: Tensors) -> Tensor:
    """Vectors one after another: a view if they are neighbours in memory, else a copy."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    storage = first.untyped_storage()._cdata
    end = first.storage_offset()
    for part in parts:
        if part.untyped_storage()._cdata != storage or part.storage_offset() != end:
            return torch.cat(list(parts))
        end += len(part)
    return first.as_strided((end - first.storage_offset(),), (1,))


def joined(parts: Tensors) -> Tensor:
    """The parts, (k, ...) by stack, as one tensor: a view if they are neighbours in memory."""
    if len(parts) == 1:
        return parts[0]
    flat = [part.reshape(-1) for part in parts]
    return adjacent(flat).view(-1, *parts[0].shape[1:])


def is_column_major(x: Tensor) -> bool:
    """Whether neighbours in a column, not in a row, are neighbours in memory; x: (..., m, n)."""
    return x.stride(-2) < x.stride(-1)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def widened(tensor: Tensor) -> Tensor:
    """The tensor in float32 or wider; itself if it is."""
    return tensor.to(wide_dtype(tensor.dtype))


def float64_chunk(device: torch.device) -> int:
    """How many elements to convert to float64 at a time, to stay in a CPU's caches."""
    return 2**20 if device.type == "cpu" else 2**26


def norm_and_sum(x: Tensor) -> Tensor:
    """Norm and sum of a tensor, (2,) float64; one chunk at a time is in memory in float64."""
    if x.dim() == 2 and x.mT.is_contiguous():
        x = x.mT  # reshape would copy x
    chunks = []
    for chunk in x.reshape(-1).split(float64_chunk(x.device)):
        wide = chunk.double()
        chunks.append(torch.stack([torch.linalg.vector_norm(wide), wide.sum()]))
    if len(chunks) == 1:
        return chunks[0]
    norms, sums = torch.stack(chunks, dim=1)
    return torch.stack([torch.linalg.vector_norm(norms), sums.sum()])


def check_supported(*lists: Tensors) -> None:
    """Raise Unsupported unless compiled kernels take all dtypes and there is one device."""
    device = lists[0][0].device
    for list_ in lists:
        dtypes = {t.dtype for t in list_}
        if not dtypes <= DTYPE_CODES.keys():
            raise Unsupported
        devices = {t.device for t in list_}
        if devices - {device}:
            raise Unsupported


def check_lengths(*lists: Sequence[Any]) -> None:
    """Raise ValueError if the lists have unequal lengths."""
    counts = [len(entries) for entries in lists]
    if len(set(counts)) > 1:
        raise ValueError(f"lists of unequal lengths {counts}: pass as many of each")


def at(places: Sequence[int], *lists: Sequence[Any]) -> list[list[Any]]:
    """The entries of each list at these places."""
    return [[entries[i] for i in places] for entries in lists]


def elementwise(written: Sequence[Tensors], read: Sequence[Tensors] = ()) -> list[Tensors]:
    """The lists, for kernels that take equal shapes and strides, without gaps in memory.

    Args:
        written: lists that the operation changes, of at least one tensor; the first one has
            the shapes and strides that all must have.
        read: lists that it only reads; tensors with other strides are copied.

    Returns:
        The lists that are written, then those that are read.

    Raises:
        ValueError: the lists have unequal lengths.
        Unsupported: compiled kernels do not take these dtypes, devices, shapes or strides.
    """
    check_supported(*written, *read)
    X = written[0]
    check_lengths(*written, *read)
    # Lists are compared as a whole: a step checks hundreds of tensors.
    shapes = [x.shape for x in X]
    strides = [x.stride() for x in X]
    contiguous = [x.is_contiguous() for x in X]
    if not all(contiguous) and not all(map(is_dense, X)):
        raise Unsupported
    for Y in written[1:]:
        if [y.shape for y in Y] != shapes or [y.stride() for y in Y] != strides:
            raise Unsupported
    lists = list(written)
    for Y in read:
        if [y.stride() for y in Y] != strides or [y.shape for y in Y] != shapes:
            Y = [with_strides_of(x, y) for x, y in zip(X, Y, strict=True)]
        lists.append(Y)
    return lists


def is_dense(x: Tensor) -> bool:
    """Whether the tensor has no gaps or overlaps in memory."""
    # empty_like keeps the strides of such tensors only.
    return x.is_contiguous() or torch.empty_like(x, device="meta").stride() == x.stride()


def with_strides_of(x: Tensor, y: Tensor) -> Tensor:
    """y in x's shape and strides; a copy if it has others."""
    if y.shape == x.shape and y.stride() == x.stride():
        return y
    return torch.empty_like(x, dtype=y.dtype).copy_(y)
