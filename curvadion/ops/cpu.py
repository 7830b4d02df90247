"""The operations on the CPU, in C++ (csrc/cpu): one call for a whole list, one pass over the data.

:mod:`curvadion.ops.operations` documents what each one computes. They raise Unsupported for what
only plain PyTorch takes: float64, and tensors with gaps in memory.
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
from curvadion.ops.arguments import INT, POINTER, addressed, counted, declare, floats, start
from curvadion.ops.codes import check_average, check_floats, coded_facts, constants
from curvadion.ops.tensors import Unsupported, elementwise_facts, factors_facts, float32_stack

_THREADS = ctypes.c_int

_SIGNATURES: dict[str, list[Any]] = {
    # count, numel, M, dtypes, G, dtypes, mu, write, norms, threads
    "curvadion_momentum_norms": [INT, *[POINTER] * 6, ctypes.c_int, POINTER, _THREADS],
    # count, numel, X, dtypes, norms, threads
    "curvadion_norms": [INT, *[POINTER] * 4, _THREADS],
    # count, numel, X, dtypes, G, dtypes, M, dtypes, step, decay, mu, seeds, threads
    "curvadion_local_step": [INT, *[POINTER] * 11, _THREADS],
    # R, k, n, r, sums, threads
    "curvadion_column_sum_of_squares": [POINTER, INT, INT, INT, POINTER, _THREADS],
    # Q, dtypes, R, sums, floors, k, n, r, threads
    "curvadion_column_normalize": [*[POINTER] * 5, *[INT] * 3, _THREADS],
    # count, numel, X, dtypes, A, R, dtypes, codes, owned, first, count, bits, constants, threads
    "curvadion_encode_difference": [
        *(INT, *[POINTER] * 8, INT, INT, ctypes.c_int, *[POINTER] * 3, _THREADS)
    ],
    # count, numel, X, dtypes, A, codes, bits, signs, levels, threads
    "curvadion_decode_add": [INT, *[POINTER] * 5, ctypes.c_int, *[POINTER] * 2, _THREADS],
    # codes, own, received, blocks, ranks, rank, bits, constants, threads
    "curvadion_average_codes": [
        *([POINTER] * 3),
        INT,
        *[ctypes.c_int] * 3,
        *[POINTER] * 3,
        _THREADS,
    ],
}


@lru_cache
def load() -> ctypes.CDLL:
    """The library, with the types of its functions declared.

    Raises:
        native.Unavailable: if it cannot be loaded or built; the message says what is missing.
    """
    return declare(native.library("cpu"), _SIGNATURES, None)


def norms(X: Sequence[Tensor]) -> Tensor:
    """See :func:`curvadion.ops.norms`."""
    (x,) = elementwise_facts([X])
    result = torch.empty(len(X), dtype=torch.float32, device="cpu")
    load().curvadion_norms(len(X), *counted(x), result.data_ptr(), torch.get_num_threads())
    return result


def momentum_norms(M: Sequence[Tensor], G: Sequence[Tensor], mu: Sequence[float]) -> Tensor:
    """See :func:`curvadion.ops.momentum_norms`."""
    return _momentum_norms(M, G, mu, write=False)


def accumulate_(M: Sequence[Tensor], G: Sequence[Tensor], mu: Sequence[float]) -> None:
    """See :func:`curvadion.ops.accumulate_`."""
    _momentum_norms(M, G, mu, write=True)


def _momentum_norms(
    M: Sequence[Tensor], G: Sequence[Tensor], mu: Sequence[float], *, write: bool
) -> Tensor:
    m, g = elementwise_facts([M], [G])
    decay = floats(mu, len(M))
    result = torch.empty(len(M), dtype=torch.float32, device="cpu")
    load().curvadion_momentum_norms(
        len(M), *counted(m), *addressed(g), start(decay), write, result.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return result


def local_step_(
    X: Sequence[Tensor],
    G: Sequence[Tensor],
    step: Sequence[float],
    decay: Sequence[float],
    M: Sequence[Tensor] = (),
    mu: Sequence[float] = (),
    seeds: Sequence[int] | None = None,
) -> None:
    """See :func:`curvadion.ops.local_step_`."""
    x, *momenta, g = elementwise_facts([X, M] if M else [X], [G])
    factors = [floats(values, len(X)) for values in (step, decay)]
    momentum_decay = floats(mu, len(X)) if M else None
    noise = None if seeds is None else array("I", seeds)
    load().curvadion_local_step(
        len(X), *counted(x), *addressed(g), *(addressed(momenta[0]) if M else (None, None)),
        *map(start, factors), start(momentum_decay), start(noise), torch.get_num_threads(),
    )  # fmt: skip


def column_sum_of_squares(R: Tensor) -> Tensor:
    """See :func:`curvadion.ops.column_sum_of_squares`."""
    stack = float32_stack(R)
    sums = torch.empty(*R.shape[:-2], R.shape[-1], dtype=torch.float64, device="cpu")
    load().curvadion_column_sum_of_squares(
        R.data_ptr(), *stack, sums.data_ptr(), torch.get_num_threads()
    )
    return sums


def column_normalize_(
    Q: Sequence[Tensor],
    R: Tensor,
    sum_of_squares: Tensor | None = None,
    floor: Tensor | None = None,
) -> None:
    """See :func:`curvadion.ops.column_normalize_`."""
    stack = float32_stack(R)
    q = factors_facts(Q, R, sum_of_squares, floor)
    sums = column_sum_of_squares(R) if sum_of_squares is None else sum_of_squares.contiguous()
    floors = torch.zeros_like(sums) if floor is None else floor.contiguous()
    load().curvadion_column_normalize(
        *addressed(q), R.data_ptr(), sums.data_ptr(), floors.data_ptr(), *stack,
        torch.get_num_threads(),
    )  # fmt: skip


def encode_difference_(
    codes: Tensor,
    X: Sequence[Tensor],
    anchors: Sequence[Tensor],
    residuals: Sequence[Tensor],
    bits: int,
    owned: Tensor,
    first: int,
) -> None:
    """See :func:`curvadion.ops.encode_difference_`."""
    x, *more = coded_facts(codes, bits, X, anchors, residuals)
    check_floats(owned, codes)
    a, r = (more.pop(0) if list_ else None for list_ in (anchors, residuals))
    if a is not None and a.dtypes != {torch.float32}:
        raise Unsupported
    load().curvadion_encode_difference(
        len(X), *counted(x), None if a is None else start(a.pointers),
        *((None, None) if r is None else addressed(r)), codes.data_ptr(), owned.data_ptr(),
        first, len(owned), bits, *_addresses(constants(bits, codes.device)),
        torch.get_num_threads(),
    )  # fmt: skip


def decode_(X: Sequence[Tensor], codes: Tensor, bits: int) -> None:
    """See :func:`curvadion.ops.decode_`."""
    _decode(X, (), codes, bits)


def decode_add_(X: Sequence[Tensor], anchors: Sequence[Tensor], codes: Tensor, bits: int) -> None:
    """See :func:`curvadion.ops.decode_add_`."""
    _decode(X, anchors, codes, bits)


def _decode(X: Sequence[Tensor], anchors: Sequence[Tensor], codes: Tensor, bits: int) -> None:
    x, *more = coded_facts(codes, bits, X, anchors)
    if more and more[0].dtypes != {torch.float32}:
        raise Unsupported
    signs, _, levels = _addresses(constants(bits, codes.device))
    load().curvadion_decode_add(
        len(X), *counted(x), start(more[0].pointers) if more else None, codes.data_ptr(), bits,
        signs, levels, torch.get_num_threads(),
    )  # fmt: skip


def average_codes_(codes: Tensor, own: Tensor, received: Tensor, rank: int, bits: int) -> None:
    """See :func:`curvadion.ops.average_codes_`."""
    check_average(codes, own, received, bits)
    check_floats(own, codes, received)
    load().curvadion_average_codes(
        codes.data_ptr(), own.data_ptr(), received.data_ptr(), len(own), len(received), rank, bits,
        *_addresses(constants(bits, codes.device)), torch.get_num_threads(),
    )  # fmt: skip


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [t.data_ptr() for t in tensors]
