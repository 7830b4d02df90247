"""The squares of matrices are sharded evenly: each number lies on one rank of each copy."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import distributed
from curvadion.layout.flat_shard import declare_flat_shard
from curvadion.layout.squares import create_squares, squares_held
from mesh_layouts import LAYOUTS, SHAPES
from seeded import weights
from shards import shard

OPTIONS = {
    "stack_dims": 0,
    "row_blocks": 1,
    "input_first": False,
    "rank_fraction": 1.0,
    "rank_multiple_of": 1,
}
BLOCKS = (11, 1, 6)


def held_on_mesh(rank, sizes, layout):
    """Of each parameter, where in S the parts of its matrices lie, and the whole state's shape."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple("abc"[: len(sizes)]))
    found = []
    for shape, options in [
        *((shape, OPTIONS) for shape in SHAPES),
        ((sum(BLOCKS), 9), OPTIONS | {"row_blocks": BLOCKS}),
    ]:
        X = nn.Parameter(shard(weights(shape), layout, mesh))
        sides = [min(rows, shape[1]) for rows in (BLOCKS if sum(BLOCKS) == shape[0] else shape[:1])]
        squares = create_squares(X, options)
        parts = list(squares_held(X, squares, sides))
        assert [len(part) for part, _ in parts] == [w.stop - w.start for _, w in parts]
        found.append((sides, [(w.start, w.stop) for _, w in parts], tuple(squares.shape)))
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_number_lies_on_one_rank_of_each_copy(name):
    sizes, layout, _ = LAYOUTS[name]
    ranks = distributed.run(math.prod(sizes), held_on_mesh, sizes, layout)
    copies = math.prod(size for size, kind in zip(sizes, layout, strict=True) if kind == "r")
    for of_one in zip(*ranks, strict=True):
        sides = of_one[0][0]
        total = sum(n * n for n in sides)
        assert all(shape == (total,) for _, _, shape in of_one)
        for matrix, n in enumerate(sides):
            count = torch.zeros(n * n)
            for _, parts, _ in of_one:
                count[slice(*parts[matrix])] += 1
            assert count.eq(copies).all()
        shares = [sum(stop - start for start, stop in parts) for _, parts, _ in of_one]
        even = total * copies / len(ranks)
        assert max(shares) <= even + len(sizes) * 2  # each axis rounds up once


def flat(rank, bounds):
    """Where the squares of two blocks, 5 and 3 of 8 rows of 6 numbers, lie on a rank."""
    start, stop = bounds[rank], bounds[rank + 1]
    parameter = nn.Parameter(torch.zeros(stop - start))
    declare_flat_shard(parameter, (8, 6), start, stop, dist.group.WORLD)
    squares = create_squares(parameter, OPTIONS | {"row_blocks": (5, 3)})
    return [(w.start, w.stop) for _, w in squares_held(parameter, squares, [5, 3])]


def test_flat_shards_have_equal_parts_whatever_rows_they_hold():
    # 34 numbers in four parts: 9, 9, 8, 8. The second rank holds no rows.
    assert distributed.run(4, flat, [0, 20, 20, 31, 48]) == [
        [(0, 9), (0, 0)],
        [(9, 18), (0, 0)],
        [(18, 25), (0, 1)],
        [(26, 26), (1, 9)],  # an empty part lies where this rank's numbers begin
    ]
