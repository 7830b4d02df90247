"""Whole numbers of items divided among ranks: all of them, evenly, the same everywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from curvadion.division import divide, shares, spans

SIZES = st.lists(st.integers(0, 1000), min_size=1, max_size=30)


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_shares_are_all_items_and_the_first_ranks_have_one_more(count, ranks):
    of_ranks = shares(count, ranks)
    assert len(of_ranks) == ranks
    assert sum(of_ranks) == count
    assert max(of_ranks) - min(of_ranks) <= 1
    assert of_ranks == sorted(of_ranks, reverse=True)


@given(st.lists(st.integers(0, 50), max_size=20))
def test_spans_follow_each_other(counts):
    ranges = spans(counts)
    assert [len(of_rank) for of_rank in ranges] == counts
    assert [index for of_rank in ranges for index in of_rank] == [*range(sum(counts))]


def test_spans_of_an_iterator_and_of_nothing():
    assert spans(iter([2, 0, 3])) == [range(0, 2), range(2, 2), range(2, 5)]
    assert spans([]) == []


@given(SIZES, st.integers(1, 40))
def test_parts_are_not_empty_and_about_equal(sizes, count):
    """Two parts differ by no more than one item: the last one of the larger part."""
    parts = divide(sizes, count)
    assert len(parts) == len(sizes)
    assert {*parts} == {*range(min(count, len(sizes)))}
    # An item of size 0 counts as 1.
    counted = [max(1, size) for size in sizes]
    for part in {*parts}:
        items = [size for size, of in zip(counted, parts, strict=True) if of == part]
        others = [
            sum(size for size, of in zip(counted, parts, strict=True) if of == other)
            for other in {*parts}
        ]
        assert sum(items) - min(items) <= min(others)


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ([1, 2, 3, 4], 2, [0, 1, 1, 0]),  # 4 + 1 and 3 + 2, where another order gives 6 and 4
        ([3, 3, 2, 2, 2], 2, [0, 1, 0, 1, 0]),
        ([5, 5, 5], 2, [0, 1, 0]),  # equal sizes keep their order
        ([0, 0, 0, 0], 2, [0, 1, 0, 1]),
        ([7, 1], 5, [0, 1]),
        ([], 3, []),
    ],
)
def test_the_largest_items_come_first(sizes, count, expected):
    assert divide(sizes, count) == expected
