"""Momentum, norms and the local step on NVIDIA GPUs, in CUDA C++ (csrc/cuda).

The addresses of a list are kernel parameters, so nothing is copied to the device and CUDA graphs
can capture the launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, c_char_p, c_int, c_uint32
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from curvadion.ops import native
from curvadion.ops.native import INT, POINTER, addressed, counted, declare, floats
from curvadion.ops.tensors import Lists, Numbers, elementwise

_SIGNATURES: dict[str, list[Any]] = {
    # count, numel, M, dtypes, G, dtypes, mu, write, norms, partial, tickets, moves, device, stream
    "curvadion_cuda_momentum_norms": [INT, *[POINTER] * 6, c_int, *[POINTER] * 4, c_int, POINTER],
    # count, numel, X, dtypes, G, dtypes, M, dtypes, step, decay, mu, seeds, moves, device, stream
    "curvadion_cuda_local_step": [INT, *[POINTER] * 12, c_int, POINTER],
    "curvadion_cuda_capacity": [],
}


@lru_cache
def load() -> CDLL:
    """The library, or native.Unavailable."""
    library = declare(native.library("cuda"), _SIGNATURES, c_int)
    library.curvadion_cuda_blocks.argtypes = [INT, POINTER]
    library.curvadion_cuda_blocks.restype = INT
    library.curvadion_cuda_error.restype = c_char_p
    return library


def norms(X: Lists) -> Tensor:
    return _momentum_norms(elementwise([X]), None, write=False)


def momentum_norms(M: Lists, G: Lists, mu: Numbers) -> Tensor:
    return _momentum_norms(elementwise([M], [G]), mu, write=False)


def accumulate_(M: Lists, G: Lists, mu: Numbers, moves: Tensor | None = None) -> None:
    _momentum_norms(elementwise([M], [G]), mu, write=True, moves=moves)


def _momentum_norms(
    lists: Sequence[Lists], mu: Numbers | None, *, write: bool, moves: Tensor | None = None
) -> Tensor:
    """Write mu M + G, or return its norms, (count,) float32; without G the norms of M."""
    count, device = len(lists[0]), lists[0][0].device
    library, momenta = load(), counted(lists[0])
    blocks = 0 if write else library.curvadion_cuda_blocks(count, momenta[0])
    result = torch.empty(0 if write else count, dtype=torch.float32, device=device)
    partial = torch.empty(blocks, dtype=torch.float64, device=device)
    gradients = addressed(lists[1]) if mu else (None, None)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        # A CUDA graph has its own counters, and its own launch that zeroes them.
        graph = torch.cuda.is_current_stream_capturing()
        tickets = (_tickets.__wrapped__ if graph else _tickets)(device, stream.stream_id)
        code = library.curvadion_cuda_momentum_norms(
            count, *momenta, *gradients, floats(mu) if mu else None, write,
            None if write else result.data_ptr(), partial.data_ptr(), tickets.data_ptr(),
            None if moves is None else moves.data_ptr(), device.index, stream.cuda_stream,
        )  # fmt: skip
    _check(code)
    return result


def local_step_(
    X: Lists,
    G: Lists,
    step: Numbers,
    decay: Numbers,
    M: Lists = (),
    mu: Numbers = (),
    seeds: Sequence[int] | None = None,
    moves: Tensor | None = None,
) -> None:
    x, *momenta, g = elementwise([X, M] if M else [X], [G])
    noise = None if seeds is None else (c_uint32 * len(X))(*seeds)
    kept = addressed(momenta[0]) if M else (None, None)
    device = x[0].device
    with torch.cuda.device(device):
        code = load().curvadion_cuda_local_step(
            len(X), *counted(x), *addressed(g), *kept, floats(step), floats(decay),
            floats(mu) if M else None, noise, None if moves is None else moves.data_ptr(),
            device.index, torch.cuda.current_stream(device).cuda_stream,
        )  # fmt: skip
    _check(code)


@lru_cache
def _tickets(device: torch.device, stream: int) -> Tensor:
    """Counters that are zero between launches, which a stream's launches use in turn."""
    capacity = load().curvadion_cuda_capacity()
    return torch.zeros(capacity, dtype=torch.int32, device=device)


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA: {load().curvadion_cuda_error(code).decode()}")
