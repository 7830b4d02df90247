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
from support.references.tolerance import Rounding, assert_within
from support.runs import distributed
from support.runs.flat_shards import (
    BESIDE,
    FRACTION,
    SHARDS_2,
    SHARDS_4,
    STEPS,
    declared,
    groups_of,
    held,
    my_range,
    run,
)
from support.runs.seeded import gradient, weights

pytestmark = pytest.mark.numeric

OPEN_STEPS = (1, 3, 4)


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
