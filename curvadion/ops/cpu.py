"""Codes, and steps of states in 8 bits, on the CPU, in C++ (csrc/cpu): a list in one pass.

Other operations would gain nothing from C++: they spend most of their time in matrix
products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import CDLL, c_float, c_int, c_uint8, c_uint32
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from curvadion.ops import native
from curvadion.ops.ahead import exponents
from curvadion.ops.code_format import DTYPES, Bits, check_compiled, constants
from curvadion.ops.native import INT, POINTER, Array, addressed, addresses, array, counted, declare
from curvadion.ops.operations import NumbersOrTensors
from curvadion.ops.state_codes import is_coded
from curvadion.ops.tensors import (
    DTYPE_CODES,
    Numbers,
    Tensors,
    Unsupported,
    is_dense,
    with_strides_of,
)

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
    # count, numel, M, dtypes, G, dtypes, mu, share, lengths, norms, threads
    "curvadion_lengths": [INT, *[POINTER] * 9, c_int],
    # count, numel, M, G, dtypes, out, dtypes, mu, share, scales, moved, seeds, threads
    "curvadion_ahead": [INT, *[POINTER] * 9, c_int, POINTER, c_int],
    # count, numel, X, dtypes, G, dtypes, means, squares, steps, two lists of seeds, threads
    "curvadion_adamw": [INT, *[POINTER] * 10, c_int],
}
# Beside those of DTYPE_CODES, as the dtype of a momentum: codes.
_CODED = 255


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
    load().curvadion_encode_states(
        *_sized(values), addresses(codes), _random(seeds), roots, torch.get_num_threads()
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


def lengths(M: Tensors, G: Tensors, mu: Numbers, share: Numbers) -> tuple[Tensor, Tensor]:
    """As :func:`curvadion.ops.ahead.lengths`, if there are codes in M.

    Args:
        M: vectors of codes, and float32 or bfloat16 tensors.
        G: float32 or bfloat16, without gaps in memory.
        mu: a number per tensor.
        share: a number per tensor.

    Returns:
        Both (len(G),) float32.
    """
    if not any(map(is_coded, M)):
        raise Unsupported
    _check_floats(G, G)
    momenta = []
    dtypes = []
    for m, g in zip(M, G, strict=True):
        if is_coded(m):
            momenta.append(m)
            dtypes.append(_CODED)
            continue
        _check_floats([m], [g])
        momenta.append(with_strides_of(g, m))
        dtypes.append(DTYPE_CODES[m.dtype])
    _check_codes([m for m in momenta if is_coded(m)])
    ahead, norms = torch.empty(2, len(G), dtype=torch.float32)
    load().curvadion_lengths(
        len(G), array(INT, (g.numel() for g in G)), addresses(momenta), array(c_uint8, dtypes),
        *addressed(G), array(c_float, mu), array(c_float, share), ahead.data_ptr(),
        norms.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return ahead, norms


def ahead_(
    M: Tensors,
    G: Tensors,
    mu: Numbers,
    share: Numbers,
    out: Tensors,
    lengths: Tensor | None,
    moves: Tensor | None,
    seeds: Sequence[int] | None,
) -> tuple[Tensor, Tensor]:
    """As :func:`curvadion.ops.ahead.ahead_`, if all of M are codes.

    Args:
        M: vectors of codes.
        G: float32 or bfloat16.
        mu: a number per tensor.
        share: a number per tensor.
        out: float32 or bfloat16, without gaps in memory.
        lengths: (len(M),) float32 or float64, or None.
        moves: () bool, or None.
        seeds: an integer below 2^32 per tensor, or None.

    Returns:
        Exponents and sums of squares, (len(M),), or (0,) without lengths.
    """
    _check_codes(M)
    _check_floats([*G, *out], out)
    if lengths is None:
        e = torch.empty(0, dtype=torch.float32)
        trace = torch.empty_like(e)
        scales = [1.0] * len(M)
    else:
        e, trace = exponents(lengths)
        scales = torch.exp2(-e).tolist()
    G = [with_strides_of(x, g) for x, g in zip(out, G, strict=True)]
    load().curvadion_ahead(
        len(M), array(INT, (x.numel() for x in out)), addresses(M), *addressed(G),
        *addressed(out), array(c_float, mu), array(c_float, share), array(c_float, scales),
        moves is None or bool(moves), _random(seeds), torch.get_num_threads(),
    )  # fmt: skip
    return e, trace


def adamw_(
    X: Tensors,
    G: Tensors,
    means: Tensors,
    squares: Tensors,
    counters: Tensors,
    lr: NumbersOrTensors,
    weight_decay: Numbers,
    beta1: Numbers,
    beta2: Numbers,
    eps: Numbers,
    moves: Tensor | None,
    mean_seeds: Sequence[int] | None,
    square_seeds: Sequence[int] | None,
) -> None:
    """As :func:`curvadion.ops.adamw.adamw_`, if all moments are codes.

    Args:
        X: weights, float32 or bfloat16, without gaps in memory.
        G: gradients, float32 or bfloat16.
        means: vectors of codes.
        squares: vectors of codes.
        counters: float32 of shape ().
        lr: a number or a tensor of one element, per tensor.
        weight_decay: a number per tensor.
        beta1: the decay of m, per tensor.
        beta2: the decay of v, per tensor.
        eps: a number per tensor.
        moves: () bool, or None.
        mean_seeds: an integer below 2^32 per tensor, or None.
        square_seeds: the same for v.
    """
    _check_codes([*means, *squares])
    _check_floats([*X, *G], X)
    if moves is not None and not moves:
        return
    torch._foreach_add_(list(counters), 1)
    steps: list[float] = []
    for x_lr, decay, b1, b2, x_eps, t in zip(
        lr, weight_decay, beta1, beta2, eps, map(Tensor.item, counters), strict=True
    ):
        step_size = float(x_lr) / (1 - b1**t)
        inverse_root = 1 / math.sqrt(1 - b2**t)
        steps += [1 - float(x_lr) * decay, step_size, b1, 1 - b1, b2, 1 - b2, inverse_root, x_eps]
    G = [with_strides_of(x, g) for x, g in zip(X, G, strict=True)]
    load().curvadion_adamw(
        len(X), *counted(X), *addressed(G), addresses(means), addresses(squares),
        array(c_float, steps), _random(mean_seeds), _random(square_seeds),
        torch.get_num_threads(),
    )  # fmt: skip


def _random(seeds: Sequence[int] | None) -> Array:
    """Seeds for random rounding, or a null pointer to round to nearest."""
    return None if seeds is None else array(c_uint32, seeds)


def _sized(X: Tensors) -> tuple[Any, ...]:
    """The number of tensors, their sizes in elements, and their addresses."""
    return len(X), array(INT, (x.numel() for x in X)), addresses(X)


def _check_states(codes: Tensors, values: Tensors) -> None:
    """Raise Unsupported unless all tensors are on the CPU, of int8 and float32."""
    _check_codes(codes)
    if any(x.device.type != "cpu" or x.dtype != torch.float32 for x in values):
        raise Unsupported


def _check_codes(states: Tensors) -> None:
    """Raise Unsupported unless all states are codes on the CPU."""
    if not all(state.device.type == "cpu" and is_coded(state) for state in states):
        raise Unsupported


def _check_floats(tensors: Tensors, dense: Tensors) -> None:
    """Raise Unsupported unless these are float32 or bfloat16 on the CPU.

    Args:
        tensors: the tensors.
        dense: those that must lie in memory without gaps.
    """
    if any(x.device.type != "cpu" or x.dtype not in DTYPES for x in tensors):
        raise Unsupported
    if not all(map(is_dense, dense)):
        raise Unsupported
