"""Codes of a few bits per number: what they cost, and how many bits a budget pays for.

The format is that of :mod:`curvadion.ops.codes`: blocks rotated until they look Gaussian, one scale
a block.
"""

from __future__ import annotations

from curvadion import checks
from curvadion.ops.codes import BITS, BLOCK, block_bytes

ONE_BIT_BELOW = 0.003  # as a budget; at 0.01 2 bits are better


def check_bits(bits: int | None) -> None:
    """Raise TypeError or ValueError for bits that codes cannot have; None is for a budget."""
    if bits is not None:
        checks.integer("bits", bits, 1)
        checks.one_of("bits", bits, BITS)


def coded_share(bits: int) -> float:
    """What codes take, as a share of float32 numbers."""
    return block_bytes(bits) / (4 * BLOCK)


def bits_within(share: float) -> int:
    """Bits of a code that this share of float32 bytes pays for at every step; 2 at least.

    Fewer bits than that would synchronise nothing more often.
    """
    return max(b for b in BITS if b <= 2 or coded_share(b) <= share)


def bits_of_weights(budget: float, fragments: int) -> int:
    """Bits of a code that suit averages of weights under a byte budget.

    As many as it pays for at every opening, 2 at least. Below 0.3 %, where 2 bits would synchronise
    a weight at every 22nd step or less often, 1 bit ended lower with the larger of two models
    (benchmarks/results/convergence), unless fragments are so many that 2 bits fit into every step.

    budget: share of float32 bytes; 0 if there is none. fragments: openings of one agreement.
    """
    share = budget * fragments
    return 1 if 0 < budget < ONE_BIT_BELOW and share < coded_share(2) else bits_within(share)
