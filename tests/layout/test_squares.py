"""The squares of matrices are cut evenly: each number lies on one rank of each copy."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
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
STACKS = [(3, 6, 4), (5, 4, 7)]
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
    copies = math.prod(size for size, cut in zip(sizes, layout, strict=True) if cut == "r")
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


def stacks(rank, cut):
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for shape in STACKS:
        X = nn.Parameter(shard(weights(shape), (cut,), mesh))
        n, local = min(shape[1:]), X.to_local()
        squares = create_squares(X, OPTIONS | {"stack_dims": 1})
        squares.to_local().copy_(
            torch.arange(squares.to_local().numel()).view_as(squares.to_local())
        )
        parts = list(squares_held(X, squares, [n] * len(local)))
        assert torch.equal(torch.cat([p for p, _ in parts]), squares.to_local().flatten())
        found.append((len(local), [(w.start, w.stop) for _, w in parts], tuple(squares.shape)))
    return found


@pytest.mark.parametrize("cut", ["0", "1", "2", "r"])
def test_stacks_are_cut_as_their_parameters_are(cut):
    ranks = distributed.run(2, stacks, cut)
    for i, (count, rows, columns) in enumerate(STACKS):
        n2 = min(rows, columns) ** 2
        for held, parts, shape in (found[i] for found in ranks):
            assert shape == (count, n2)
            assert len(parts) == held
            if cut in "0r":
                assert parts == [(0, n2)] * held
        if cut in "12":
            assert [found[i][1] for found in ranks] == [
                [(0, -(-n2 // 2))] * count, [(-(-n2 // 2), n2)] * count
            ]  # fmt: skip


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 9))
def test_squares_of_an_uncut_flat_tensor_are_whole(rows, columns):
    parameter = nn.Parameter(torch.zeros(sum(rows) * columns))
    declare_flat_shard(parameter, (sum(rows), columns), 0, parameter.numel(), None)
    options = OPTIONS | {"row_blocks": tuple(rows)}
    sides = [min(r, columns) for r in rows]
    squares = create_squares(parameter, options)
    parts = list(squares_held(parameter, squares, sides))
    assert [(w.start, w.stop) for _, w in parts] == [(0, n * n) for n in sides]
    assert [len(part) for part, _ in parts] == [n * n for n in sides]


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
