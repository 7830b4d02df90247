"""Flat shards, ranges of elements as in ZeRO and FSDP1, take the trajectory of whole matrices."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from curvadion import CurvaDion, Dion, WireMeter
from curvadion.layout.flat_shard import declare_flat_shard
from support.references import formulas
from support.references.polar_reference import reference_of
from support.references.tolerance import Rounding, assert_within, worst
from support.runs import distributed
from support.runs.flat_shards import (
    FRACTION,
    declared,
    elements_of,
    held,
    matrices_of,
    my_range,
    ranks_of,
)
from support.runs.scheduled import Watching
from support.runs.seeded import gradient, weights

pytestmark = pytest.mark.numeric

STEPS, OPEN_STEPS = 5, (1, 3, 4)

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


def assert_small(errors_by_rank, steps=STEPS):
    for errors in errors_by_rank:
        for name, error in errors.items():
            assert_within(error, Rounding(torch.float32, terms=20, steps=steps), what=name)


ARRANGEMENTS = {
    "4 shards, the first rank holds the end": (1, SHARDS_4, {"backwards": True}),
    "2 replicas of 2 shards": (2, SHARDS_2, {}),
    "4 shards of blocks beside each other": (1, BESIDE, {}),
}


# Each case, each way of holding it and replicas meet both local steps.
@pytest.mark.parametrize(
    ("name", "local_step"),
    [
        ("4 shards, the first rank holds the end", "gradient"),
        ("2 replicas of 2 shards", "dion"),
        ("4 shards of blocks beside each other", "dion"),
    ],
)
def test_a_schedule_of_gates_equals_a_simulation_of_the_replicas(name, local_step):
    replicas, cases, how = ARRANGEMENTS[name]
    shards = 2 if cases is SHARDS_2 else 4
    options = {"local_step": local_step, "local_lr": 0.005}
    assert_small(run(replicas * shards, replicas, cases, OPEN_STEPS, options, how))


def run(world, replicas, cases, schedule, options, how):
    return distributed.run(world, train_with, replicas, cases, schedule, options, how)


def train_with(rank, replicas, cases, schedule, options, how):
    return train(rank, replicas, cases, schedule, options, **how)


@st.composite
def flat_shards_of(draw, shards):
    """A shape, options that fit it, and boundaries anywhere."""
    blocks = draw(st.integers(1, 3))
    stack = draw(st.sampled_from([(), (), (2,)]))
    shape = (*stack, blocks * draw(st.integers(1, 7)), draw(st.integers(1, 12)))
    own = {"row_blocks": blocks, "stack_dims": len(stack)}
    if draw(st.booleans()):
        shape = (*stack, shape[-1], shape[-2])
        of_columns = {"column_blocks": blocks}
        of_transposes = {"row_blocks": blocks, "input_first": True}
        own = {"stack_dims": len(stack), **draw(st.sampled_from([of_columns, of_transposes]))}
    inner = draw(
        st.lists(st.integers(0, math.prod(shape)), min_size=shards - 1, max_size=shards - 1)
    )
    return shape, (*sorted(inner), math.prod(shape)), own


def several_cases(shards):
    return st.lists(flat_shards_of(shards), min_size=2, max_size=2)


@settings(max_examples=6)
@given(
    shardings=st.sampled_from([2, 3, 4]).flatmap(several_cases),
    replicas=st.sampled_from([1, 1, 2]),
    schedule=st.sampled_from([None, (2, 3)]),
    backwards=st.booleans(),
    seed=st.integers(0, 100),
)
def test_any_shape_and_boundaries(shardings, replicas, schedule, backwards, seed):
    how = {"backwards": backwards, "steps": 3, "seed": seed}
    cases = {f"drawn {i}": each for i, each in enumerate(shardings)}
    world = replicas * len(shardings[0][1])
    assert_small(run(world, replicas, cases, schedule, {}, how), how["steps"])


# -------------------------------------------------------------------- what is sent


def sent(rank, replicas, cases, threshold):
    shards = len(next(iter(cases.values()))[1])
    place, replica, group, replica_group = groups_of(rank, replicas, shards, False)
    X = [declared(weights(shape), ends, place, group) for shape, ends, _ in cases.values()]
    moments = declared(weights((9, 3)), (5,) * (shards - 1) + (27,), place, group)
    optimizer = CurvaDion(
        [{"params": [x], **own} for x, (_, _, own) in zip(X, cases.values(), strict=True)]
        + [{"params": [moments], "algorithm": "adamw"}],
        replicas=replica_group, rank_fraction=FRACTION, threshold=threshold, max_local_steps=None,
        local_step="gradient",
    )  # fmt: skip
    for step in range(2):  # the first also verifies the setup
        for x, (shape, ends, _) in zip(X, cases.values(), strict=True):
            start, stop = my_range(ends, place)
            x.grad = gradient(shape, step, replica).reshape(-1)[start:stop].clone()
        moments.grad = torch.ones_like(moments)
        with WireMeter() as meter:
            optimizer.step()
    everything = [
        x
        for shape, ends, own in cases.values()
        for x in held(shape, ends, own, shards, place, replicas)
    ]
    if optimizer.report.gate_open:
        expected = formulas.open_step(everything, elementwise=moments.numel(), reads_momentum=True)
    else:
        expected = formulas.closed_step(everything)
    return meter.total.bytes, expected, optimizer.report.gate_open


@pytest.mark.parametrize("threshold", [0.0, 1e9])
@pytest.mark.parametrize(("replicas", "cases"), [(1, SHARDS_4), (2, SHARDS_2)], ids=["4", "2x2"])
def test_bytes_are_those_of_the_formulas(replicas, cases, threshold):
    world = replicas * len(next(iter(cases.values()))[1])
    for actual, expected, gate_open in distributed.run(world, sent, replicas, cases, threshold):
        assert gate_open == (threshold == 0)
        assert actual == expected


# -------------------------------------------------------------------- errors


def test_a_range_must_fit_the_tensor_and_the_parameter():
    parameter = nn.Parameter(torch.zeros(6))
    for start, stop in ((-1, 5), (30, 36), (6, 0), (0, 5)):
        with pytest.raises(ValueError, match=r"start, stop\)=\[.*1-D.*\(6,\)"):
            declare_flat_shard(parameter, (7, 5), start, stop, None)
    with pytest.raises(ValueError, match="1-D"):
        declare_flat_shard(nn.Parameter(torch.zeros(2, 3)), (7, 5), 0, 6, None)


@pytest.mark.parametrize(
    ("ends", "replicas", "message"),
    [
        ([(0, 10), (10, 24)] * 2, "shard", r"w of shape \(6, 4\) is sharded"),
        ([(0, 10), (10, 20)] * 2, "replicate", "do not cover its 24 elements"),
        ([(0, 10), (9, 24)] * 2, "replicate", "do not cover its 24 elements"),
        ([(0, 24), (0, 24)] * 2, "replicate", "do not cover its 24 elements"),
        ([(0, 10), (10, 24), (0, 11), (11, 24)], "replicate", "hold different weights"),
    ],
)
@distributed.on_ranks(4)
def test_shards_must_cover_the_tensor_once_and_equally_on_all(rank, ends, replicas, message):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    start, stop = ends[rank]
    x = nn.Parameter(torch.ones(stop - start))
    declare_flat_shard(x, (6, 4), start, stop, mesh.get_group("shard"))
    x.grad = torch.full_like(x, rank + 1.0)
    optimizer = Dion([("w", x)], replicas=mesh.get_group(replicas))
    with pytest.raises((ValueError, RuntimeError), match=message):
        optimizer.step()
