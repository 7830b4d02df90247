"""Codes, and states in 8 bits, on the CPU, in C++ (csrc/cpu): a call for a list, in one pass.

Other operations would gain nothing from C++: they spend most of their time in matrix
products.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, c_int, c_uint32
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from curvadion.ops import native
from curvadion.ops.code_format import Bits, check_compiled, constants
from curvadion.ops.native import INT, POINTER, addressed, addresses, array, counted, declare
from curvadion.ops.tensors import Tensors, Unsupported

# The C++ functions' arguments, in the order in which calls below pass them.
_SIGNATURES: dict[str, list[Any]] = {
    # count, numel, X, dtypes, A, R, dtypes, codes, owned, first, count, bits, constants,
    # threads
    "curvadion_encode_difference": [
        INT,
        *[POINTER] * 8,
        INT,
        INT,
        c_int,
        *[POINTER] * 3,
        c_int,
    ],
    # count, numel, X, dtypes, A, codes, bits, signs, levels, threads
    "curvadion_decode_add": [INT, *[POINTER] * 5, c_int, *[POINTER] * 2, c_int],
    # codes, own, received, blocks, ranks, rank, bits up, bits down, signs, levels up, midpoints
    # down, levels down, threads
    "curvadion_average_codes": [*[POINTER] * 3, INT, *[c_int] * 4, *[POINTER] * 4, c_int],
    # count, numel, X, codes, seeds, roots, threads
    "curvadion_encode_states": [INT, *[POINTER] * 4, c_int, c_int],
    # count, numel, X, codes, roots, threads
    "curvadion_decode_states": [INT, *[POINTER] * 3, c_int, c_int],
}


@lru_cache
def load() -> CDLL:
    """The library; raises native.Unavailable if it does not exist and cannot be built."""
    return declare(native.library("cpu"), _SIGNATURES, None)


def encode_difference_(
    codes: Tensor,
    X: Tensors,
    anchors: Tensors,
    residuals: Tensors,
    bits: int,
    owned: Tensor,
    first: int,
) -> None:
    """As :func:`curvadion.ops.coding.encode_difference_`.

    Args:
        codes: (rows, block_bytes(bits)) uint8.
        X: weights, contiguous, float32 or bfloat16.
        anchors: contiguous float32 of X's shapes; () for zeros.
        residuals: of X's shapes, contiguous, float32 or bfloat16; () for zeros.
        bits: of a code.
        owned: (k, 256) float32, gets z of k rows; k may be zero.
        first: the first of these rows.
    """
    check_compiled([codes], [owned, *anchors], [*X, *residuals])
    load().curvadion_encode_difference(
        len(X), *counted(X), addresses(anchors), *addressed(residuals), codes.data_ptr(),
        owned.data_ptr(), first, len(owned), bits,
        *map(Tensor.data_ptr, constants(bits, codes.device)), torch.get_num_threads(),
    )  # fmt: skip


def decode_add_(X: Tensors, anchors: Tensors, codes: Tensor, bits: int) -> None:
    """As :func:`curvadion.ops.coding.decode_add_`.

    Args:
        X: weights, contiguous, float32 or bfloat16.
        anchors: contiguous float32 of X's shapes; () for none.
        codes: (rows, block_bytes(bits)) uint8.
        bits: of a code.
    """
    check_compiled([codes], anchors, X)
    signs, _, levels = map(Tensor.data_ptr, constants(bits, codes.device))
    load().curvadion_decode_add(
        len(X), *counted(X), addresses(anchors), codes.data_ptr(), bits, signs, levels,
        torch.get_num_threads(),
    )  # fmt: skip


def average_codes_(codes: Tensor, own: Tensor, received: Tensor, rank: int, bits: Bits) -> None:
    """As :func:`curvadion.ops.coding.average_codes_`.

    Args:
        codes: (k, block_bytes(bits.down)) uint8, contiguous.
        own: (k, 256) float32, contiguous: this rank's values.
        received: (ranks, k, block_bytes(bits.up)) uint8, contiguous: the codes of all ranks.
        rank: this rank.
        bits: of a received code, and of one of the mean.
    """
    check_compiled([codes, received], [own])
    _, _, up_levels = constants(bits.up, codes.device)
    signs, midpoints, down_levels = constants(bits.down, codes.device)
    load().curvadion_average_codes(
        codes.data_ptr(), own.data_ptr(), received.data_ptr(), len(own), len(received), rank,
        bits.up, bits.down, signs.data_ptr(), up_levels.data_ptr(), midpoints.data_ptr(),
        down_levels.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip


def encode_states_(
    codes: Tensors, values: Tensors, seeds: Sequence[int] | None, roots: bool
) -> None:
    """As :func:`curvadion.ops.state_codes.encode_states_`.

    Args:
        codes: vectors of int8.
        values: float32, without gaps in memory.
        seeds: an integer below 2^32 per tensor, or None.
        roots: whether they are codes of roots.
    """
    _check_states(codes, values)
    random = None if seeds is None else array(c_uint32, seeds)
    load().curvadion_encode_states(
        *_sized(values), addresses(codes), random, roots, torch.get_num_threads()
    )


def decode_states_(values: Tensors, codes: Tensors, roots: bool) -> None:
    """values <- what codes stand for.

    Args:
        values: float32, without gaps in memory.
        codes: vectors of int8.
        roots: whether they are codes of roots.
    """
    _check_states(codes, values)
    load().curvadion_decode_states(
        *_sized(values), addresses(codes), roots, torch.get_num_threads()
    )


def _sized(X: Tensors) -> tuple[Any, ...]:
    """The number of tensors, their sizes in elements, and their addresses."""
    return len(X), array(INT, (x.numel() for x in X)), addresses(X)


def _check_states(codes: Tensors, values: Tensors) -> None:
    """Raise Unsupported unless all tensors are on the CPU, of int8 and float32."""
    for tensors, dtype in ((codes, torch.int8), (values, torch.float32)):
        if any(tensor.device.type != "cpu" or tensor.dtype != dtype for tensor in tensors):
            raise Unsupported
