"""Lists of tensors for operations, and tensors from host numbers."""

from __future__ import annotations

from collections.abc import Sequence

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
    """Numbers as a tensor on a device, (k,), without a wait of the host."""
    if (page := recording()) is not None:
        return page.numbers(numbers, dtype)
    if device.type != "cuda" or not numbers:
        return torch.tensor(numbers, dtype=dtype, device=device)
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


def float64_chunk(device: torch.device) -> int:
    """How many elements to convert to float64 at a time, to stay in a CPU's caches."""
    return 2**20 if device.type == "cpu" else 2**26


def norm_and_sum(x: Tensor) -> Tensor:
    """Norm and sum of a tensor, (2,) float64; a chunk is held in float64 at a time."""
    flat = x.mT if x.dim() == 2 and x.mT.is_contiguous() else x  # avoids a copy
    chunks = []
    for chunk in flat.reshape(-1).split(float64_chunk(x.device)):
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
        if not DTYPE_CODES.keys() >= {t.dtype for t in list_}:
            raise Unsupported
        if {t.device for t in list_} - {device}:
            raise Unsupported


def elementwise(written: Sequence[Tensors], read: Sequence[Tensors] = ()) -> list[Tensors]:
    """Lists of equal shapes and strides; those only read may be copied. Or Unsupported."""
    check_supported(*written, *read)
    X, *others = written
    if any(len(list_) != len(X) for list_ in (*others, *read)):
        raise ValueError(f"lists of unequal lengths: {[*map(len, (*written, *read))]}")
    # Lists are compared as a whole: a step checks hundreds of tensors.
    shapes = [x.shape for x in X]
    strides = [x.stride() for x in X]
    contiguous = [x.is_contiguous() for x in X]
    if not all(contiguous) and not all(map(_dense, X)):
        raise Unsupported
    for Y in others:
        if [y.shape for y in Y] != shapes or [y.stride() for y in Y] != strides:
            raise Unsupported
    found = [*written]
    for Y in read:
        if [y.stride() for y in Y] != strides or [y.shape for y in Y] != shapes:
            Y = [_with_strides_of(x, y) for x, y in zip(X, Y, strict=True)]
        found.append(Y)
    return found


def _dense(x: Tensor) -> bool:
    """Whether the tensor has no gaps or overlaps in memory."""
    return x.is_contiguous() or torch.empty_like(x, device="meta").stride() == x.stride()


def _with_strides_of(x: Tensor, y: Tensor) -> Tensor:
    same = (y.shape, y.stride()) == (x.shape, x.stride())
    return y if same else torch.empty_like(x, dtype=y.dtype).copy_(y)
