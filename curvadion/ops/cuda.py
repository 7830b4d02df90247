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

# The C++ functions' arguments, in the order in which calls below pass them.
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
    """The library; raises native.Unavailable if it does not exist and cannot be built."""
    library = declare(native.library("cuda"), _SIGNATURES, c_int)
    library.curvadion_cuda_error.restype = c_char_p
    return declare(library, {"curvadion_cuda_blocks": [INT, POINTER]}, INT)


def norms(X: Tensors) -> Tensor:
    return _momentum_norms(X)


def momentum_norms(M: Tensors, G: Tensors, mu: Numbers) -> Tensor:
    return _momentum_norms(M, G, mu)


def accumulate_(M: Tensors, G: Tensors, mu: Numbers, moves: Tensor | None = None) -> None:
    """As :func:`curvadion.ops.operations.accumulate_`.

    Args:
        M: momenta: float32, bfloat16 or float16, without gaps in memory.
        G: gradients of M's shapes, in these dtypes.
        mu: a number per tensor.
        moves: () bool on the device; None writes.
    """
    _momentum_norms(M, G, mu, write=True, moves=moves)


def _momentum_norms(
    M: Tensors,
    G: Tensors = (),
    mu: Numbers = (),
    *,
    write: bool = False,
    moves: Tensor | None = None,
) -> Tensor:
    """M <- mu M + G, or the norms of mu M + G.

    Args:
        M: momenta: float32, bfloat16 or float16, without gaps in memory.
        G: gradients of M's shapes, in these dtypes; () for the norms of M.
        mu: a number per tensor; () with G.
        write: whether to write M; else its norms are returned.
        moves: () bool on the device; where it is false, nothing is written. None writes.

    Returns:
        (len(M),) float32; (0,) if M is written.
    """
    if G:
        M, G = elementwise([M], [G])
    else:
        (M,) = elementwise([M])
    count = len(M)
    device = M[0].device
    library = load()
    momenta = counted(M)
    # Each block sums squares in float64, and the last one of a tensor adds up the sums.
    blocks = 0 if write else library.curvadion_cuda_blocks(count, momenta[0])
    result = torch.empty(0 if write else count, dtype=torch.float32, device=device)
    partial = torch.empty(blocks, dtype=torch.float64, device=device)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        if torch.cuda.is_current_stream_capturing():
            # A graph must own what its launches read: it sets these to zero at each replay.
            tickets = _new_tickets(device)
        else:
            tickets = _tickets(device, stream.stream_id)
        code = library.curvadion_cuda_momentum_norms(
            count, *momenta, *addressed(G), array(c_float, mu), write,
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
    """As :func:`curvadion.ops.operations.local_step_`.

    Args:
        X: weights: float32, bfloat16 or float16, without gaps in memory.
        G: gradients of X's shapes, in these dtypes.
        step: a number per tensor.
        decay: a number per tensor.
        M: momenta of X's shapes and strides, in these dtypes; () for none.
        mu: a number per momentum.
        seeds: an integer below 2^32 per tensor; None rounds to nearest.
        moves: () bool on the device; None writes.
    """
    if any(isinstance(number, Tensor) for number in (*step, *decay)):
        raise Unsupported  # the host would wait for it
    if M:
        X, M, G = elementwise([X, M], [G])
    else:
        X, G = elementwise([X], [G])
    device = X[0].device
    with torch.cuda.device(device):
        code = load().curvadion_cuda_local_step(
            len(X), *counted(X), *addressed(G), *addressed(M),
            array(c_float, step), array(c_float, decay), array(c_float, mu),
            array(c_uint32, seeds or ()), None if moves is None else moves.data_ptr(),
            device.index, torch.cuda.current_stream(device).cuda_stream,
        )  # fmt: skip
    _check(code)


@lru_cache
def _tickets(device: torch.device, stream: int) -> Tensor:
    """The counters of a stream, whose launches use them in turn."""
    return _new_tickets(device)


def _new_tickets(device: torch.device) -> Tensor:
    """Counters of finished blocks, int32, one per tensor of a launch.

    By them a block knows that it is a tensor's last. They are zero before and after a launch.
    """
    capacity = load().curvadion_cuda_capacity()
    return torch.zeros(capacity, dtype=torch.int32, device=device)


def _check(code: int) -> None:
    """Raise RuntimeError unless a cudaError_t is that of success."""
    if code:
        raise RuntimeError(f"CUDA: {load().curvadion_cuda_error(code).decode()}")
