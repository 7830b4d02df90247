"""Divides items among ranks, in whole numbers only: every rank gets the same result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise


def shares(count: int, ranks: int) -> list[int]:
    """How many of ``count`` items each rank gets; the first ranks may get one more."""
    share, remainder = divmod(count, ranks)
    return [share + 1 if rank < remainder else share for rank in range(ranks)]


def spans(counts: Iterable[int]) -> list[range]:
    """Consecutive ranges of these lengths: 2 and 3 give range(0, 2) and range(2, 5)."""
    return [range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]


def divide(sizes: Sequence[int], count: int) -> list[int]:
    """The part of each item, for at most ``count`` parts of about equal size, none empty.

    The largest items come first, each into the part that is smallest so far.
    """
    parts = [0] * len(sizes)
    part_sizes = [0] * min(count, len(sizes))
    largest_first = sorted(range(len(sizes)), key=lambda item: -sizes[item])
    for item in largest_first:
        smallest_part = min(range(len(part_sizes)), key=part_sizes.__getitem__)
        parts[item] = smallest_part
        # Items of size 0 count as 1, or they would all go to the same part.
        part_sizes[smallest_part] += max(1, sizes[item])
    return parts
