"""Few combinations of many choices: every choice meets every choice of every other axis."""

from __future__ import annotations

import itertools


def all_pairs(*axes):
    """Combinations, one of each axis, that hold every pair of values of two axes at least once.

    Greedy, and the same every time: each combination starts from the first pair that is still to
    come, and takes on every other axis the value that brings most new pairs.
    """
    columns = [range(len(axis)) for axis in axes]
    if len(columns) < 2:
        return list(itertools.product(*axes))
    missing = {
        ((a, i), (b, j)): None
        for a, b in itertools.combinations(range(len(axes)), 2)
        for i, j in itertools.product(columns[a], columns[b])
    }
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for axis in range(len(axes)):
            if axis not in row:
                row[axis] = max(columns[axis], key=lambda i: len(_new((axis, i), row, missing)))
        for pair in itertools.combinations(sorted(row.items()), 2):
            missing.pop(pair, None)
        rows.append(tuple(axes[axis][row[axis]] for axis in range(len(axes))))
    return rows


def every_value(*axes):
    """Combinations, one of each axis, that hold every value of each axis at least once."""
    count = max(len(axis) for axis in axes)
    return [tuple(axis[i % len(axis)] for axis in axes) for i in range(count)]


def _new(chosen, row, missing):
    """The pairs that a value would add to a combination."""
    pairs = (tuple(sorted((chosen, other))) for other in row.items())
    return [pair for pair in pairs if pair in missing]
