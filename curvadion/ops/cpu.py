"""Codes on the CPU, in C++ (csrc/cpu): one call for a whole list, one pass over the data.

:mod:`curvadion.ops.operations` documents what each one computes. They raise Unsupported for what
only plain PyTorch takes: float64, and tensors with gaps in memory. Other operations would gain
nothing from C++ here: their time goes into torch's matrix products.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from curvadion.ops import native
from curvadion.ops.arguments import INT, POINTER, addressed, counted, declare, start
from curvadion.ops.codes import check_average, check_floats, coded_facts, constants
from curvadion.ops.tensors import Unsupported

_THREADS = ctypes.c_int

_SIGNATURES: dict[str, list[Any]] = {
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
