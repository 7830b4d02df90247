"""tests/support/pairwise.py covers what it says, with few combinations."""

from __future__ import annotations

import itertools

import pytest

from pairwise import all_pairs

AXES = {
    "three": (("a", "b"), (0, 1, 2), ([], [1])),
    "five": ("abc", "de", "fgh", "ijkl", "mn"),
    "many of two": ((True, False),) * 9,
    "equal values": ((1, 1), (1, 1), (1, 2)),
    "two": ("ab", "cde"),
    "one": ("abc",),
}


@pytest.mark.parametrize("name", AXES)
def test_every_pair_is_there(name):
    axes = AXES[name]
    rows = all_pairs(*axes)
    assert rows == all_pairs(*axes)
    for a, b in itertools.combinations(range(len(axes)), 2):
        for pair in itertools.product(axes[a], axes[b]):
            assert any((row[a], row[b]) == pair for row in rows)
    for row in rows:
        assert all(value in axis for value, axis in zip(row, axes, strict=True))


def test_they_are_few():
    assert len(all_pairs(*AXES["five"])) <= 16  # of 144; 12 at least
    assert len(all_pairs(*AXES["many of two"])) <= 10  # of 512
    assert len(all_pairs(*AXES["two"])) == 6  # two axes have nothing to spare
    assert all_pairs("abc") == [("a",), ("b",), ("c",)]
