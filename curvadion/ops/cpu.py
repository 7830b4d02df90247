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

from curvadion.ops import adamw, ahead, native
from curvadion.ops.code_format import DTYPES, Bits, check_compiled, constants
from curvadion.ops.native import INT, POINTER, Array, addressed, addresses, array, counted, declare
from curvadion.ops.operations import NumbersOrTensors
from curvadion.ops.state_codes import is_coded
from curvadion.ops.tensors import (
    DTYPE_CODES,
    Numbers,
    Tensors,
    Unsupported,
    at,
    check_lengths,
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
# As the dtype of a momentum, codes; csrc/cpu/state_steps.cpp has the same number.
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
        *_sized(values),
        addresses(codes),
        _random(range(len(codes)), seeds),
        roots,
        torch.get_num_threads(),
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


def coded_lengths(M: Tensors, G: Tensors, mu: Numbers, share: Numbers) -> tuple[Tensor, Tensor]:
    """As :func:`curvadion.ops.ahead.lengths`, for lists with codes.

    Args:
        M: vectors of codes, and float32 or bfloat16 tensors.
        G: float32 or bfloat16, without gaps in memory.
        mu: a number per tensor.
        share: a number per tensor.

    Returns:
        Both (len(G),) float32.
    """
    _check_floats(G, G)
    _check_floats([m for m in M if not is_coded(m)], [])
    momenta = []
    dtypes = []
    for m, g, _, _ in zip(M, G, mu, share, strict=True):
        momenta.append(m if is_coded(m) else with_strides_of(g, m))
        dtypes.append(_CODED if is_coded(m) else DTYPE_CODES[m.dtype])
    found, norms = torch.empty(2, len(G), dtype=torch.float32, device="cpu")
    load().curvadion_lengths(
        len(G), array(INT, (g.numel() for g in G)), addresses(momenta), array(c_uint8, dtypes),
        *addressed(G), array(c_float, mu), array(c_float, share), found.data_ptr(),
        norms.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return found, norms


def coded_ahead_(
    M: Tensors,
    G: Tensors,
    mu: Numbers,
    share: Numbers,
    out: Tensors,
    lengths: Tensor | None,
    moves: Tensor | None,
    seeds: Sequence[int] | None,
) -> tuple[Tensor, Tensor]:
    """As :func:`curvadion.ops.ahead.ahead_`, for lists with codes.

    Args:
        M: vectors of codes, and momenta of any dtypes, which PyTorch steps.
        G: gradients; beside codes float32 or bfloat16.
        mu: a number per tensor.
        share: a number per tensor.
        out: beside codes float32 or bfloat16, without gaps in memory.
        lengths: (len(M),) float32 or float64, or None.
        moves: () bool, or None.
        seeds: an integer below 2^32 per tensor, or None.

    Returns:
        Exponents and sums of squares, (len(M),), or (0,) without lengths.
    """
    coded, others = _divided(M)
    lists = (M, G, mu, share, out)
    check_lengths(*lists)
    count = len(M)
    M, G, mu, share, out = at(coded, *lists)
    _check_floats([*G, *out], out)
    scales = [1.0] * count
    e = trace = torch.empty(0, dtype=torch.float32, device="cpu")
    if lengths is not None:
        if len(lengths) != count:
            raise ValueError(f"{len(lengths)} lengths of {count} momenta: pass as many")
        e, trace = ahead.exponents(lengths)
        scales = torch.exp2(-e).tolist()
    if others:
        given = None if lengths is None else lengths[others]
        m, g, decays, shares, outputs = at(others, *lists)
        ahead.ahead_(m, g, decays, shares, outputs, given, moves)
    gradients = [with_strides_of(x, g) for x, g in zip(out, G, strict=True)]
    load().curvadion_ahead(
        len(M), array(INT, (x.numel() for x in out)), addresses(M),
        *addressed(gradients), *addressed(out), array(c_float, mu), array(c_float, share),
        array(c_float, (scales[i] for i in coded)), moves is None or bool(moves),
        _random(coded, seeds), torch.get_num_threads(),
    )  # fmt: skip
    return e, trace


def coded_adamw_(
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
    """As :func:`curvadion.ops.adamw.adamw_`, for lists with codes.

    Args:
        X: weights; beside codes float32 or bfloat16, without gaps in memory.
        G: gradients; beside codes float32 or bfloat16.
        means: vectors of codes, and tensors of any dtypes, which PyTorch steps.
        squares: vectors of codes where the means are.
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
    coded, others = _divided(means)
    if (coded, others) != _divided(squares):
        raise Unsupported
    lists = (X, G, means, squares, counters, lr, weight_decay, beta1, beta2, eps)
    check_lengths(*lists)
    X, G, means, squares, counters, lr, weight_decay, beta1, beta2, eps = at(coded, *lists)
    _check_floats([*X, *G], X)
    if others:
        x, g, m, v, t, rates, decays, b1, b2, epsilons = at(others, *lists)
        adamw.adamw_(x, g, m, v, t, rates, decays, b1, b2, epsilons, moves)
    if moves is not None and not moves:
        return
    steps: list[float] = []
    for i, counter in enumerate(counters):
        t = counter.item() + 1
        rate = float(lr[i])
        steps += [1 - rate * weight_decay[i], rate / (1 - beta1[i] ** t)]
        steps += [beta1[i], 1 - beta1[i], beta2[i], 1 - beta2[i]]
        steps += [1 / math.sqrt(1 - beta2[i] ** t), eps[i]]
    torch._foreach_add_(list(counters), 1)
    gradients = [with_strides_of(x, g) for x, g in zip(X, G, strict=True)]
    load().curvadion_adamw(
        len(X), *counted(X), *addressed(gradients), addresses(means), addresses(squares),
        array(c_float, steps), _random(coded, mean_seeds), _random(coded, square_seeds),
        torch.get_num_threads(),
    )  # fmt: skip


def _divided(states: Tensors) -> tuple[list[int], list[int]]:
    """The places of codes in a list, and those of tensors."""
    coded = [i for i, state in enumerate(states) if is_coded(state)]
    others = [i for i, state in enumerate(states) if not is_coded(state)]
    return coded, others


def _random(places: Sequence[int], seeds: Sequence[int] | None) -> Array:
    """Seeds for random rounding of codes, or a null pointer to round to nearest.

    Args:
        places: of the codes in the list.
        seeds: of the whole list, or None.
    """
    return None if seeds is None else array(c_uint32, (seeds[i] for i in places))


def _sized(X: Tensors) -> tuple[Any, ...]:
    """The number of tensors, their sizes in elements, and their addresses."""
    return len(X), array(INT, (x.numel() for x in X)), addresses(X)


def _check_states(codes: Tensors, values: Tensors) -> None:
    """Raise Unsupported unless all tensors are on the CPU, of int8 and float32."""
    for tensors, dtype in ((codes, torch.int8), (values, torch.float32)):
        if any(tensor.device.type != "cpu" or tensor.dtype != dtype for tensor in tensors):
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
