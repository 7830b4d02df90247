"""Tensors in flat shards, the matrices in them, and what a rank holds of each."""

from __future__ import annotations

import math

import torch
from torch import nn

from curvadion.layout.flat_shard import declare_flat_shard
from support.references import formulas
from support.references.reference import rank_of, sizes_of

FRACTION = 0.3


def matrices_of(full, options):
    """The matrices of a row-major tensor, output features first, in the order of its elements."""
    stack = options.get("stack_dims", 0)
    if options.get("input_first"):
        full = full.mT
    stacked = full.reshape(-1, full.shape[stack], math.prod(full.shape[stack + 1 :]))
    rows = sizes_of(stacked.shape[1], options.get("row_blocks", 1))
    columns = sizes_of(stacked.shape[2], options.get("column_blocks", 1))
    return [
        block for one in stacked for band in one.split(rows) for block in band.split(columns, 1)
    ]


def ranks_of(shape, options):
    return [rank_of(FRACTION, part.shape) for part in matrices_of(torch.empty(shape), options)]


def elements_of(matrices, shape, options):
    """The inverse of matrices_of: all elements in the order of the tensor."""
    count = len(matrices) // math.prod(shape[: options.get("stack_dims", 0)])
    beside = options.get("column_blocks", 1) != 1
    stacked = [
        torch.cat(matrices[i : i + count], dim=1 if beside else 0)
        for i in range(0, len(matrices), count)
    ]
    whole = torch.stack(stacked)
    return (whole.mT if options.get("input_first") else whole).reshape(-1)


def my_range(ends, place):
    return (0, *ends)[place], ends[place]


def declared(values, ends, place, group):
    """This rank's flat shard of a whole tensor, as a parameter."""
    start, stop = my_range(ends, place)
    parameter = nn.Parameter(values.reshape(-1)[start:stop].clone())
    declare_flat_shard(parameter, values.shape, start, stop, group)
    return parameter


def held(shape, ends, options, shards, place, replicas):
    """What a rank holds of each matrix, counted from the boundaries."""
    counts, first = [], 0
    bounds = (0, *ends)
    for part, r in zip(
        matrices_of(torch.empty(shape), options), ranks_of(shape, options), strict=True
    ):
        turned = options.get("input_first", False)
        m, n = part.shape[::-1] if turned else part.shape
        last = first + m * n
        owners = [
            {p for p in range(shards) for e in range(i, i + n) if bounds[p] <= e < bounds[p + 1]}
            for i in range(first, last, n)
        ]
        shared, mine = sum(len(o) > 1 for o in owners), sum(place in o for o in owners)
        upright = m >= n + turned
        counts.append(
            formulas.Held(
                mine if upright else n,
                n if upright else mine,
                r,
                row_ranks=shards if upright else 1,
                column_ranks=1 if upright else shards,
                replicas=replicas,
                shared_rows=shared if upright else 0,
                shared_columns=0 if upright else shared,
            )
        )
        first = last
    return counts
