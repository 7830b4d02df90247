"""Matrices sharded over device meshes in every way, and what a step of them sends."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from curvadion import CurvaDion, Dion, WireMeter
from support.references.polar_reference import reference_of
from support.references.reference import rank_of
from support.references.tolerance import worst
from support.runs import distributed
from support.runs.scheduled import Scheduled
from support.runs.seeded import gradient, weights
from support.runs.shards import piece, shard

SHAPES = [(24, 16), (16, 24), (20, 20), (1, 12), (7, 5)]
FRACTION = 0.3

# Sizes of the mesh, a word for each of its axes (shards.py), the axis of replicas. Column-wise
# tensor parallelism shards as FSDP does, with replicas as HSDP does.
LAYOUTS = {
    "fsdp 4": ((4,), ("0",), None),
    "fsdp 8, with empty shards": ((8,), ("0",), None),
    "hsdp 2x2": ((2, 2), ("r", "0"), 0),
    "tp rowwise 4": ((4,), ("1",), None),
    "dp x tp rowwise": ((2, 2), ("r", "1"), 0),
    "fsdp x tp, different dimensions": ((2, 2), ("0", "1"), None),
    "fsdp x tp, the same dimension, 4x2": ((4, 2), ("0s", "0"), None),
    "fsdp x tp, replicated over tp": ((2, 2), ("0", "r"), None),
    "dp x fsdp x tp, the same dimension": ((2, 2, 2), ("r", "0s", "0"), 0),
    "replicated everywhere": ((2, 2), ("r", "r"), 0),
}


def place(mesh, replica_axis):
    return 0 if replica_axis is None else mesh.get_local_rank(replica_axis)


def sent(rank, sizes, layout, replica_axis, shapes, gate, local_step="gradient"):
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple("abc"[: len(sizes)]))
    group = None if replica_axis is None else mesh.get_group(replica_axis)
    X = [nn.Parameter(shard(weights(shape), layout, mesh)) for shape in shapes]
    optimizer = CurvaDion(
        X, replicas=group, rank_fraction=FRACTION, local_step=local_step,
        **({"threshold": 0.0} if gate else {"threshold": 1e9, "max_local_steps": None}),
    )  # fmt: skip
    for step in range(2):  # the first also verifies the setup
        for x, shape in zip(X, shapes, strict=True):
            full = gradient(shape, step, place(mesh, replica_axis))
            x.grad = shard(full, layout, mesh)
        with WireMeter() as meter:
            optimizer.step()
    sent = meter.total
    return sent.bytes, sent.calls, sent.largest, optimizer.report.gate_open


@functools.cache
def sent_of_layout(name):
    """What each rank of a layout sends at an open gate and at a closed one."""
    sizes, layout, replica_axis = LAYOUTS[name]
    return distributed.run(math.prod(sizes), sent_at_both, sizes, layout, replica_axis)


def sent_at_both(rank, *layout):
    return [sent(rank, *layout, SHAPES, gate) for gate in (True, False)]


def ranks_of(shapes):
    return [rank_of(FRACTION, shape) for shape in shapes]


def train(rank, sizes, layout, replica_axis, shapes, steps, options, seed=0):
    """Distances of the local pieces of X and M from the reference's, relative to its norms."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple("abc"[: len(sizes)]))
    replicas = 1 if replica_axis is None else sizes[replica_axis]
    group = None if replica_axis is None else mesh.get_group(replica_axis)
    gate = options.pop("open_steps", None)
    dtype = options.pop("dtype", torch.float32)
    X = [nn.Parameter(shard(weights(shape, seed).to(dtype), layout, mesh)) for shape in shapes]
    extra = {"gate": Scheduled(gate)} if gate else {}
    make = CurvaDion if gate else Dion
    # Placements may leave every parameter whole on every rank.
    optimizer = make(X, replicas="single" if group is None else group, **options, **extra)
    fraction = options.get("rank_fraction", 0.25)
    references = []
    for shape in shapes:
        r = rank_of(fraction, shape)
        references.append(reference_of(weights(shape, seed), replicas, r, options))
    for step in range(steps):
        for x, shape, reference in zip(X, shapes, references, strict=True):
            each = [gradient(shape, step, replica, seed).to(dtype) for replica in range(replicas)]
            x.grad = shard(each[place(mesh, replica_axis)], layout, mesh)
            reference.step(each, gate is None or step + 1 in gate)
        optimizer.step()
    errors = []
    for x, reference in zip(X, references, strict=True):
        mine = place(mesh, replica_axis)
        for actual, wanted in (
            (x, reference.X[mine]),
            (optimizer.state[x]["momentum"], reference.M[mine]),
        ):
            local = actual.to_local().double()
            errors.append(((local - piece(wanted, layout, mesh)).norm() / wanted.norm()).item())
    return worst(errors)
