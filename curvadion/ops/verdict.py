"""A rank's word in the meeting of a step, and what the words of all ranks decide."""

from __future__ import annotations

import torch
from torch import Tensor

from curvadion.ops.backends import fused

# The bits of float32's NaN: above those of all numbers that are not negative.
NAN_BITS = 0x7FC00000


def verdict(
    norms: Tensor,
    signal: Tensor | None,
    owner: Tensor | None,
    largest_norm: float,
    first: bool,
) -> tuple[Tensor, Tensor]:
    """A rank's word in a meeting, and whether this rank alone would step.

        bits 32 to 63   the signal's, or those of NaN if a norm is not finite or the signal
                        is NaN
        bit 31          at a first step, whether a norm is positive
        bits 0 to 30    the owner

    Non-negative floats sort like their bits, NaN above infinity. So the largest word of all
    ranks holds the largest signal, or NaN if any rank's word does.

    Args:
        norms: (l,) with l > 0, float32 or float64.
        signal: () float32, >= 0 or NaN; None for zero.
        owner: () int64 below 2^31, of the matrix that has the signal; None for zero.
        largest_norm: a float32 number; norms from it on, and NaN, count as not finite.
        first: whether this is a first step.

    Returns:
        The word, (1,) int64, and the flag, () bool.
    """
    result: tuple[Tensor, Tensor] | None = fused(
        "verdict", norms, signal, owner, largest_norm, first
    )
    if result is not None:
        return result
    moves = (norms < largest_norm).all()
    bits = torch.zeros((), dtype=torch.int64, device=norms.device)
    if signal is not None:
        moves = moves & ~torch.isnan(signal)
        bits = signal.view(torch.int32).long()
    word = torch.where(moves, bits, NAN_BITS) << 32
    if owner is not None:
        word = word | owner
    if first:
        word = word | ((norms > 0).any().long() << 31)
    return word.view(1), moves


def heeded(words: Tensor) -> Tensor:
    """Whether ranks that have met step: their numbers are finite and their settings equal.

    Args:
        words: (3,) int64, each the largest of all ranks: :func:`verdict`'s word, w and -w,
            where w is a checksum of the settings. The largest w is the smallest one exactly
            if all are equal.

    Returns:
        () bool.
    """
    result: Tensor | None = fused("heeded", words)
    if result is not None:
        return result
    return ((words[0] >> 32) != NAN_BITS) & (words[1] == -words[2])
