"""Divides items among ranks: whole numbers only, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise


def shares(count: int, ranks: int) -> list[int]:
    """Divide ``count`` items evenly; the first ranks may get one more."""
    return [count // ranks + (i < count % ranks) for i in range(ranks)]


def spans(counts: Iterable[int]) -> list[range]:
    """Consecutive ranges of these lengths."""
    return [range(*ends) for ends in pairwise(accumulate(counts, initial=0))]


def divide(sizes: Sequence[int], count: int) -> list[int]:
    """Assign items to at most ``count`` parts of about equal size, none empty."""
    parts = [0] * len(sizes)
    filled = [0] * min(count, len(sizes))
    largest_first = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    for i in largest_first:
        parts[i] = min(range(len(filled)), key=filled.__getitem__)
        filled[parts[i]] += max(1, sizes[i])
    return parts
