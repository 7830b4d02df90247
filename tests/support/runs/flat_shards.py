"""Tensors in flat shards, the matrices in them, and what a rank holds of each."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from curvadion import CurvaDion
from curvadion.layout.flat_shard import declare_flat_shard
from support.references import formulas
from support.references.polar_reference import reference_of
from support.references.reference import rank_of, sizes_of
from support.references.tolerance import worst
from support.runs import distributed
from support.runs.scheduled import Watching
from support.runs.seeded import gradient, weights

FRACTION = 0.3
STEPS = 5

# Shape, where the ranks' ranges end, group options.
SHARDS_4 = {
    "through rows": ((7, 5), (3, 17, 18, 35), {}),
    "a row over four ranks": ((3, 20), (4, 9, 13, 60), {}),
    "shards smaller than a row": ((2, 9), (1, 2, 4, 18), {}),
    "empty shards": ((6, 4), (0, 11, 11, 24), {}),
    "between rows": ((8, 4), (8, 8, 20, 32), {}),
    "a column": ((9, 1), (2, 3, 5, 9), {}),
    "row blocks of both orientations": ((12, 5), (7, 23, 41, 60), {"row_blocks": [7, 2, 3]}),
    "stacked row blocks": ((2, 6, 4), (5, 24, 27, 48), {"stack_dims": 1, "row_blocks": 2}),
    "convolution": ((6, 2, 3, 2), (5, 24, 51, 72), {}),
    "input first": ((7, 5), (3, 17, 18, 35), {"input_first": True}),
    "input first, square": ((6, 6), (3, 17, 20, 36), {"input_first": True}),
    "input first, stacked": ((3, 6, 4), (5, 24, 51, 72), {"stack_dims": 1, "input_first": True}),
}
# Blocks between whose rows other blocks lie.
BESIDE = {
    "column blocks": ((7, 12), (5, 29, 50, 84), {"column_blocks": 3}),
    "column blocks of both orientations": ((6, 13), (0, 20, 47, 78), {"column_blocks": [9, 4]}),
    "column blocks between rows": ((8, 6), (12, 12, 30, 48), {"column_blocks": 2}),
    "column blocks, a row over four ranks": ((3, 20), (4, 9, 13, 60), {"column_blocks": [2, 18]}),
    "stacked column blocks": ((2, 5, 6), (7, 24, 41, 60), {"stack_dims": 1, "column_blocks": 2}),
    "input-first QKV": ((5, 12), (7, 23, 41, 60), {"input_first": True, "row_blocks": 3}),
    "input-first columns": ((12, 5), (7, 23, 41, 60), {"input_first": True, "column_blocks": 3}),
}
SHARDS_2 = {
    "through a row": ((7, 5), (17, 35), {}),
    "through a row, wide": ((5, 7), (17, 35), {}),
    "nothing on the first": ((4, 6), (0, 24), {}),
    "between rows": ((6, 5), (10, 30), {}),
    "row blocks": ((12, 5), (41, 60), {"row_blocks": [7, 2, 3]}),
}


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


def groups_of(rank, replicas, shards, backwards):
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    place = mesh.get_local_rank("shard")
    replica_group = mesh.get_group("replicate") if replicas > 1 else None
    return (
        shards - 1 - place if backwards else place,
        mesh.get_local_rank("replicate"),
        mesh.get_group("shard") if shards > 1 else None,
        replica_group,
    )


def train(
    rank, replicas, cases, schedule, options, *, backwards=False, steps=STEPS, seed=0,
    dtype=torch.float32,
):  # fmt: skip
    """Distances of the flat pieces of X and M from the reference's, by case; of the RMMC.

    backwards: the first rank holds the last elements.
    """
    shards = len(next(iter(cases.values()))[1])
    place, replica, group, replica_group = groups_of(rank, replicas, shards, backwards)
    X, references, param_groups = {}, {}, []
    for name, (shape, ends, own) in cases.items():
        X[name] = declared(weights(shape, seed).to(dtype), ends, place, group)
        param_groups.append({"params": [(name, X[name])], **own})
        references[name] = [
            reference_of(part, replicas, r, options)
            for part, r in zip(
                matrices_of(weights(shape, seed), own), ranks_of(shape, own), strict=True
            )
        ]
    gate = Watching(schedule or range(1, steps + 1))
    options = {"rank_fraction": FRACTION, **options}
    optimizer = CurvaDion(param_groups, replicas=replica_group, gate=gate, **options)
    rmmc = []
    for step in range(steps):
        rmmc.append(0.0)
        for name, (shape, ends, own) in cases.items():
            each = [gradient(shape, step, i, seed).to(dtype) for i in range(replicas)]
            start, stop = my_range(ends, place)
            X[name].grad = each[replica].reshape(-1)[start:stop].clone()
            parts = [matrices_of(G, own) for G in each]
            for i, reference in enumerate(references[name]):
                rmmc[-1] = max(rmmc[-1], reference.rmmc([G[i] for G in parts]))
                reference.step([G[i] for G in parts], not schedule or step + 1 in schedule)
        optimizer.step()
    errors = {}
    for name, (shape, ends, own) in cases.items():
        start, stop = my_range(ends, place)
        pairs = {
            "X": (X[name], [reference.X[replica] for reference in references[name]]),
            "M": (
                optimizer.state[X[name]]["momentum"],
                [reference.M[replica] for reference in references[name]],
            ),
        }
        for letter, (actual, wanted) in pairs.items():
            whole = elements_of(wanted, shape, own)
            distance = (actual.detach() - whole[start:stop]).norm() / whole.norm()
            errors[f"{letter}, {name}"] = distance.item()
    seen = optimizer.gate.seen
    wrong = worst(abs(a - b) / b for a, b in zip(seen[1:], rmmc[1:], strict=True))
    errors["rmmc"] = wrong / 10  # a difference of norms: a digit less is exact
    return errors


def run(world, replicas, cases, schedule, options, how):
    return distributed.run(world, train_with, replicas, cases, schedule, options, how)


def train_with(rank, replicas, cases, schedule, options, how):
    return train(rank, replicas, cases, schedule, options, **how)
