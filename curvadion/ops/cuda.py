"""Momentum, norms and the local step on NVIDIA GPUs, in CUDA C++ (csrc/cuda).

:mod:`curvadion.ops.operations` documents what each one computes. The addresses of a list are kernel
parameters, so nothing is copied to the device and CUDA graphs can capture the launches. The
operations raise Unsupported for what only plain PyTorch takes.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from curvadion.ops import native
from curvadion.ops.arguments import (
    INT,
    POINTER,
    addressed,
    counted,
    declare,
    floats,
    host_numbers,
    start,
)
from curvadion.ops.tensors import Facts, elementwise_facts

_SIGNATURES: dict[str, list[Any]] = {
    # count, numel, M, dtypes, G, dtypes, mu, write, norms, partial, tickets, device, stream
    "curvadion_cuda_momentum_norms": [
        *(INT, *[POINTER] * 6, ctypes.c_int, *[POINTER] * 3, ctypes.c_int, POINTER)
    ],
    # count, numel, X, dtypes, G, dtypes, M, dtypes, step, decay, mu, seeds, device, stream
    "curvadion_cuda_local_step": [INT, *[POINTER] * 11, ctypes.c_int, POINTER],
    "curvadion_cuda_capacity": [],
    "curvadion_cuda_devices": [],
}


@lru_cache
def load() -> ctypes.CDLL:
    """The library, with the types of its functions declared.

    Raises:
        native.Unavailable: if it cannot be loaded or built, or there is no CUDA device; the message
            says what is missing.
    """
    library = declare(native.library("cuda"), _SIGNATURES, ctypes.c_int)
    library.curvadion_cuda_blocks.argtypes = [INT, POINTER]
    library.curvadion_cuda_blocks.restype = INT
    library.curvadion_cuda_error.restype = ctypes.c_char_p
    if library.curvadion_cuda_devices() == 0:
        raise native.Unavailable("no CUDA device, or no driver for it")
    return library


def norms(X: Sequence[Tensor]) -> Tensor:
    """See :func:`curvadion.ops.norms`."""
    return _momentum_norms(elementwise_facts([X]), None, write=False)


def momentum_norms(M: Sequence[Tensor], G: Sequence[Tensor], mu: Sequence[float]) -> Tensor:
    """See :func:`curvadion.ops.momentum_norms`."""
    return _momentum_norms(elementwise_facts([M], [G]), floats(mu, len(M)), write=False)


def accumulate_(M: Sequence[Tensor], G: Sequence[Tensor], mu: Sequence[float]) -> None:
    """See :func:`curvadion.ops.accumulate_`."""
    _momentum_norms(elementwise_facts([M], [G]), floats(mu, len(M)), write=True)


def _momentum_norms(facts: list[Facts], mu: array[float] | None, *, write: bool) -> Tensor:
    """Write mu M + G, or return its norms, (count,) float32; without G the norms of M."""
    count, device = len(facts[0].addresses), facts[0].device
    assert device is not None
    library = load()
    blocks = 0 if write else library.curvadion_cuda_blocks(count, start(facts[0].sizes.numel))
    result = torch.empty(0 if write else count, dtype=torch.float32, device=device)
    partial = torch.empty(blocks, dtype=torch.float64, device=device)
    gradients = addressed(facts[1]) if mu else (None, None)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        # The counters of a CUDA graph are its own, and so is what sets them to zero.
        graph = torch.cuda.is_current_stream_capturing()
        tickets = (_tickets.__wrapped__ if graph else _tickets)(device, stream.stream_id)
        code = library.curvadion_cuda_momentum_norms(
            count, *counted(facts[0]), *gradients, start(mu), write,
            None if write else result.data_ptr(), partial.data_ptr(), tickets.data_ptr(),
            device.index, stream.cuda_stream,
        )  # fmt: skip
    _check(code)
    return result


def local_step_(
    X: Sequence[Tensor],
    G: Sequence[Tensor],
    step: Sequence[float | Tensor],
    decay: Sequence[float | Tensor],
    M: Sequence[Tensor] = (),
    mu: Sequence[float] = (),
    seeds: Sequence[int] | None = None,
) -> None:
    """See :func:`curvadion.ops.local_step_`."""
    x, *momenta, g = elementwise_facts([X, M] if M else [X], [G])
    factors = [host_numbers(values, len(X)) for values in (step, decay)]
    momentum_decay = floats(mu, len(X)) if M else None
    noise = None if seeds is None else array("I", seeds)
    kept = addressed(momenta[0]) if M else (None, None)
    assert x.device is not None
    with torch.cuda.device(x.device):
        code = load().curvadion_cuda_local_step(
            len(X), *counted(x), *addressed(g), *kept, *map(start, factors), start(momentum_decay),
            start(noise), x.device.index, torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip
    _check(code)


@lru_cache
def _tickets(device: torch.device, stream: int) -> Tensor:
    """Counters that are zero between launches; a stream's launches use them one after another."""
    capacity = load().curvadion_cuda_capacity()
    return torch.zeros(capacity, dtype=torch.int32, device=device)


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA: {load().curvadion_cuda_error(code).decode()}")
