"""The polar direction takes the trajectory of whole matrices in every layout, and unshards none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_flat_shards import SHARDS_2, SHARDS_4, declared, groups_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import distributed
import formulas
from curvadion import CurvaDion, WireMeter
from flat_shards import elements_of, matrices_of, my_range
from mesh_layouts import LAYOUTS, SHAPES, place
from polar_reference import PolarReference
from scheduled import Watching
from seeded import gradient, weights
from shards import piece, shard
from tolerance import Rounding, assert_within

pytestmark = pytest.mark.numeric

# As many iterations as bring every singular value to 1.
POLAR = {"direction": "polar", "newton_schulz_steps": 14}
STEPS, OPEN_STEPS = 5, (1, 2, 5)
# Drawn matrices that are square have some small singular values, which become one: what rounding
# loses of them is amplified.
FLOAT64 = Rounding(torch.float64, terms=24, condition=1e6, steps=STEPS)


def optimizer_of(X, replicas, schedule, **options):
    gate = Watching(schedule or range(1, 100))
    return CurvaDion(X, replicas=replicas or "single", gate=gate, **POLAR, **options)


def train(rank, sizes, layout, replica_axis, shapes, schedule, dtype, options, seed=0):
    """Distances of the local pieces of X and M from the reference's, relative to its norms."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple("abc"[: len(sizes)]))
    replicas = 1 if replica_axis is None else sizes[replica_axis]
    group = None if replica_axis is None else mesh.get_group(replica_axis)
    X = [nn.Parameter(shard(weights(shape, seed).to(dtype), layout, mesh)) for shape in shapes]
    optimizer = optimizer_of(X, group, schedule, **options)
    references = [PolarReference(weights(shape, seed), replicas, **options) for shape in shapes]
    mine = place(mesh, replica_axis)
    for step in range(STEPS):
        for x, shape, reference in zip(X, shapes, references, strict=True):
            each = [gradient(shape, step, replica, seed).to(dtype) for replica in range(replicas)]
            x.grad = shard(each[mine], layout, mesh)
            reference.step(each, schedule is None or step + 1 in schedule)
        optimizer.step()
    errors = []
    for x, reference in zip(X, references, strict=True):
        pairs = (x, reference.X[mine]), (optimizer.state[x]["momentum"], reference.M[mine])
        for actual, wanted in pairs:
            local = actual.to_local().double()
            errors.append(((local - piece(wanted, layout, mesh)).norm() / wanted.norm()).item())
    return max(errors)


# Rows, columns, both, one twice; empty shards, replicas, copies of shards.
SHARDED = [
    "fsdp 8, with empty shards",
    "hsdp 2x2",
    "dp x tp rowwise",
    "fsdp x tp, different dimensions",
    "fsdp x tp, replicated over tp",
    "dp x fsdp x tp, the same dimension",
]


@pytest.mark.parametrize("name", SHARDED)
def test_a_schedule_of_gates_equals_a_simulation_of_the_replicas(name):
    sizes, layout, replica_axis = LAYOUTS[name]
    arguments = (
        sizes,
        layout,
        replica_axis,
        SHAPES,
        OPEN_STEPS,
        torch.float64,
        {"look_ahead": 1.5},
    )
    errors = distributed.run(torch.Size(sizes).numel(), train, *arguments)
    assert_within(max(errors), FLOAT64)


@settings(max_examples=5, deadline=None)
@given(
    sharding=st.sampled_from(
        [((3,), ("0",)), ((3,), ("1",)), ((4,), ("1",)), ((2, 2), ("0", "1")), ((2, 2), ("1", "1"))]
    ),
    matrices=st.lists(st.tuples(*2 * [st.integers(1, 19)]), min_size=2, max_size=3),
    seed=st.integers(0, 100),
)
def test_any_shape_and_sharding(sharding, matrices, seed):
    sizes, layout = sharding
    shapes = [shape for m, n in matrices for shape in ((m, n), (n, m), (m, n))]
    arguments = (sizes, layout, None, shapes, None, torch.float64, {}, seed)
    errors = distributed.run(torch.Size(sizes).numel(), train, *arguments)
    assert_within(max(errors), FLOAT64)


# -------------------------------------------------------------------- flat shards


def train_flat(rank, replicas, cases, schedule):
    """Distances of the flat pieces of X and M from the reference's, by case."""
    shards = len(next(iter(cases.values()))[1])
    at, replica, group, replica_group = groups_of(rank, replicas, shards, False)
    X, references, param_groups = {}, {}, []
    for name, (shape, ends, own) in cases.items():
        X[name] = declared(weights(shape).double(), ends, at, group)
        param_groups.append({"params": [(name, X[name])], **own})
        parts = matrices_of(weights(shape), own)
        references[name] = [PolarReference(part, replicas) for part in parts]
    optimizer = optimizer_of(param_groups, replica_group, schedule)
    seen = []
    for step in range(STEPS):
        seen.append(0.0)
        for name, (shape, ends, own) in cases.items():
            each = [gradient(shape, step, i).double() for i in range(replicas)]
            start, stop = my_range(ends, at)
            X[name].grad = each[replica].reshape(-1)[start:stop].clone()
            for i, reference in enumerate(references[name]):
                G = [matrices_of(one, own)[i] for one in each]
                seen[-1] = max(seen[-1], reference.rmmc(G))
                reference.step(G, schedule is None or step + 1 in schedule)
        optimizer.step()
    errors = {}
    for name, (_, ends, own) in cases.items():
        start, stop = my_range(ends, at)
        M = optimizer.state[X[name]]["momentum"]
        for letter, actual in (("X", X[name]), ("M", M)):
            wanted = elements_of([getattr(r, letter)[replica] for r in references[name]], own)
            distance = (actual.detach() - wanted[start:stop]).norm() / wanted.norm()
            errors[f"{letter}, {name}"] = distance.item()
    errors["rmmc"] = max(
        abs(a - b) / b for a, b in zip(optimizer.gate.seen[1:], seen[1:], strict=True)
    )
    return errors


@pytest.mark.parametrize(("replicas", "cases"), [(1, SHARDS_4), (2, SHARDS_2)], ids=["4", "2x2"])
def test_flat_shards_take_the_whole_trajectory(replicas, cases):
    world = replicas * len(next(iter(cases.values()))[1])
    for errors in distributed.run(world, train_flat, replicas, cases, OPEN_STEPS):
        assert_within(errors.pop("rmmc"), Rounding(torch.float32))  # as the gate's signal is
        for name, error in errors.items():
            assert_within(error, FLOAT64, what=name)


# -------------------------------------------------------------------- what is sent


def sent(rank, sizes, layout, count):
    """Bytes and calls of a step of one replica."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple("abc"[: len(sizes)]))
    X = [nn.Parameter(shard(weights((24, 16)), layout, mesh)) for _ in range(count)]
    optimizer = optimizer_of(X, None, None)
    with WireMeter() as meter:
        for step in range(2):  # the first also verifies the set-up
            for x in X:
                x.grad = shard(gradient((24, 16), step, 0), layout, mesh)
            before = meter.snapshot()
            optimizer.step()
            now = meter.since(before)
    return now.bytes, now.calls


def test_rows_send_two_triangles_a_matrix():
    ranks, count, n = 4, 8, 16
    triangle = n * (n + 1) // 2
    # The gate, the norms that it reads, the exponents.
    agreement = formulas.GATE + 8 * count + 4 * count
    # A share of each triangle to every rank, and of all results. A result has one number more.
    wanted = agreement + 4 * (1 + 1 / ranks) * count * (triangle + triangle + 1)
    for total, calls in distributed.run(ranks, sent, (ranks,), ("0",), count):
        assert (total, calls) == (wanted, 7)


def test_columns_also_send_their_shards_to_and_fro():
    ranks, count = 4, 8
    (rows, _), *_ = distributed.run(ranks, sent, (ranks,), ("0",), count)
    for total, calls in distributed.run(ranks, sent, (ranks,), ("1",), count):
        assert (total, calls) == (rows + 2 * 4 * count * 24 * 16 // ranks, 9)
