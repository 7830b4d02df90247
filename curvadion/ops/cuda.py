"""Momentum, norms and the local step on NVIDIA GPUs, in CUDA C++ (csrc/cuda).

A list's addresses are kernel parameters: nothing is copied to the device, and CUDA graphs can
capture the launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, c_char_p, c_float, c_int, c_uint32
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from curvadion.ops import native
from curvadion.ops.native import INT, POINTER, addressed, array, counted, declare
from curvadion.ops.tensors import Numbers, Tensors, Unsupported, elementwise

_SIGNATURES: dict[str, list[Any]] = {
    # count, numel, M, dtypes, G, dtypes, mu, write, norms, partial, tickets, moves, device,
    # stream
    "curvadion_cuda_momentum_norms": [
        INT,
        *[POINTER] * 6,
        c_int,
        *[POINTER] * 4,
        c_int,
        POINTER,
    ],
    # count, numel, X, dtypes, G, dtypes, M, dtypes, step, decay, mu, seeds, moves, device,
    # stream
    "curvadion_cuda_local_step": [INT, *[POINTER] * 12, c_int, POINTER],
}


@lru_cache
def load() -> CDLL:
    """The library, or native.Unavailable."""
    library = declare(native.library("cuda"), _SIGNATURES, c_int)
    library.curvadion_cuda_error.restype = c_char_p
    return declare(library, {"curvadion_cuda_blocks": [INT, POINTER]}, INT)


def norms(X: Tensors) -> Tensor:
    return _momentum_norms(X)


def momentum_norms(M: Tensors, G: Tensors, mu: Numbers) -> Tensor:
    return _momentum_norms(M, G, mu)


def accumulate_(M: Tensors, G: Tensors, mu: Numbers, moves: Tensor | None = None) -> None:
    _momentum_norms(M, G, mu, write=True, moves=moves)


def _momentum_norms(
    M: Tensors,
    G: Tensors = (),
    mu: Numbers = (),
    *,
    write: bool = False,
    moves: Tensor | None = None,
) -> Tensor:
    """Write mu M + G, or return its norms, (count,) float32; without G the norms of M."""
    M, *others = elementwise([M], [G] if G else [])
    count, device = len(M), M[0].device
    library, momenta = load(), counted(M)
    blocks = 0 if write else library.curvadion_cuda_blocks(count, momenta[0])
    result = torch.empty(0 if write else count, dtype=torch.float32, device=device)
    partial = torch.empty(blocks, dtype=torch.float64, device=device)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        # A CUDA graph has its own counters, and its own launch that zeroes them.
        graph = torch.cuda.is_current_stream_capturing()
        tickets = (_tickets.__wrapped__ if graph else _tickets)(device, stream.stream_id)
        code = library.curvadion_cuda_momentum_norms(
            count, *momenta, *addressed(others[0] if G else ()), array(c_float, mu), write,
            None if write else result.data_ptr(), partial.data_ptr(), tickets.data_ptr(),
            None if moves is None else moves.data_ptr(), device.index, stream.cuda_stream,
        )  # fmt: skip
    _check(code)
    return result


def local_step_(
    X: Tensors,
    G: Tensors,
    step: Numbers,
    decay: Numbers,
    M: Tensors = (),
    mu: Numbers = (),
    seeds: Sequence[int] | None = None,
    moves: Tensor | None = None,
) -> None:
    if any(isinstance(number, Tensor) for number in (*step, *decay)):
        raise Unsupported  # the host would wait for it
    x, *momenta, g = elementwise([X, M] if M else [X], [G])
    device = x[0].device
    with torch.cuda.device(device):
        code = load().curvadion_cuda_local_step(
            len(X), *counted(x), *addressed(g), *addressed(momenta[0] if M else ()),
            *(array(c_float, numbers) for numbers in (step, decay, mu)),
            array(c_uint32, seeds or ()), None if moves is None else moves.data_ptr(),
            device.index, torch.cuda.current_stream(device).cuda_stream,
        )  # fmt: skip
    _check(code)


@lru_cache
def _tickets(device: torch.device, stream: int) -> Tensor:
    """Counters that are zero between launches, which a stream's launches use in turn."""
    return torch.zeros(load().curvadion_cuda_capacity(), dtype=torch.int32, device=device)


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA: {load().curvadion_cuda_error(code).decode()}")
