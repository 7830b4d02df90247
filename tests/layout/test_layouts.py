"""Every layout takes the trajectory of the whole matrices, and sends low-rank factors only."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.references import formulas
from support.references.tolerance import Rounding, assert_within, worst
from support.runs import distributed
from support.runs.mesh_layouts import (
    FRACTION,
    LAYOUTS,
    SHAPES,
    ranks_of,
    sent,
    sent_of_layout,
    train,
)

pytestmark = pytest.mark.numeric

STEPS, OPEN_STEPS = 5, (1, 3, 4)
FEW_STEPS = 4  # of a gate that is always open


def of_steps(steps):
    """Products over the longest side, whose columns are then divided by their lengths."""
    return Rounding(torch.float32, terms=24, steps=steps)


# The gradient's step takes each element on its own; what differs is where its norms lie.
GRADIENT_STEPS = ["hsdp 2x2", "fsdp x tp, different dimensions", "replicated everywhere"]


@pytest.mark.parametrize(
    ("name", "local_step"),
    [*((name, "dion") for name in LAYOUTS), *((name, "gradient") for name in GRADIENT_STEPS)],
)
def test_a_schedule_of_gates_equals_a_simulation_of_the_replicas(name, local_step):
    sizes, layout, replica_axis = LAYOUTS[name]
    options = {
        "rank_fraction": FRACTION,
        "open_steps": OPEN_STEPS,
        "local_step": local_step,
        "local_lr": 0.005,
    }
    world = torch.Size(sizes).numel()
    arguments = (sizes, layout, replica_axis, SHAPES, STEPS, options)
    assert_within(worst(distributed.run(world, train, *arguments)), of_steps(STEPS))


OPTIONS = [
    {"right_factor": "qr"},
    {"momentum_rule": "plain"},
    {"rank_fraction": 1.0},
    {"look_ahead": 1.5},
]


def test_options_in_layouts():
    sizes, layout, replica_axis = LAYOUTS["fsdp x tp, different dimensions"]
    world = torch.Size(sizes).numel()
    for errors in distributed.run(world, train_with_options, sizes, layout, replica_axis):
        for options, error in errors.items():
            assert_within(error, of_steps(FEW_STEPS), what=options)


def train_with_options(rank, sizes, layout, replica_axis):
    errors = {}
    for options in OPTIONS:
        shapes = SHAPES[:2] if "rank_fraction" in options else SHAPES
        arguments = (sizes, layout, replica_axis, shapes, FEW_STEPS, dict(options))
        errors[str(options)] = train(rank, *arguments)
    return errors


@st.composite
def layouts(draw):
    sizes = draw(st.sampled_from([(2,), (3,), (4,), (2, 2), (2, 2, 2)]))
    layout = [draw(st.sampled_from(["0", "1", "r"])) for _ in sizes]
    replica_axis = draw(st.sampled_from([None, *(a for a, k in enumerate(layout) if k == "r")]))
    for a, kind in enumerate(layout):
        # Only the leftmost of several may come last, as when FSDP wraps what is sharded already.
        leftmost = kind in layout[a + 1 :] and kind not in layout[:a]
        if leftmost and kind != "r" and draw(st.booleans()):
            layout[a] = kind + "s"
    return sizes, tuple(layout), replica_axis


@settings(max_examples=8)
@given(
    sharding=layouts(),
    sizes_of_matrices=st.lists(st.tuples(*2 * [st.integers(1, 19)]), min_size=2, max_size=2),
    rank_fraction=st.floats(0.05, 0.6),
    seed=st.integers(0, 100),
    scheduled=st.booleans(),
)
def test_any_shape_rank_mesh_and_placements(
    sharding, sizes_of_matrices, rank_fraction, seed, scheduled
):
    sizes, layout, replica_axis = sharding
    shapes = [shape for m, n in sizes_of_matrices for shape in ((m, n), (n, m))]
    options = {"rank_fraction": rank_fraction}
    if scheduled:
        options["open_steps"] = (2, 3)
    world = torch.Size(sizes).numel()
    arguments = (sizes, layout, replica_axis, shapes, 3, options, seed)
    assert_within(worst(distributed.run(world, train, *arguments)), of_steps(3))


# -------------------------------------------------------------------- what is sent


def test_number_of_collectives_does_not_depend_on_the_number_of_parameters():
    sizes, layout, replica_axis = LAYOUTS["hsdp 2x2"]
    world = torch.Size(sizes).numel()
    few = distributed.run(world, sent, sizes, layout, replica_axis, SHAPES[:3] * 2, True)
    many = distributed.run(world, sent, sizes, layout, replica_axis, SHAPES[:3] * 4, True)
    assert [calls for _, calls, _, _ in few] == [calls for _, calls, _, _ in many]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_closed_gate_sends_the_gate_and_one_norm_per_matrix(name):
    _, layout, replica_axis = LAYOUTS[name]
    sharded = any(kind != "r" for kind in layout)
    for _, (count, calls, _, gate_open) in sent_of_layout(name):
        gate = formulas.GATE if sharded or replica_axis is not None else 0
        assert not gate_open
        assert count == gate + (8 * len(SHAPES) if sharded else 0)
        assert calls == (2 if sharded else 1 if gate else 0)


def shardings(sizes, layout, rank):
    """The shardings of both dimensions, as formulas.held takes them."""
    places = [rank // math.prod(sizes[a + 1 :]) % sizes[a] for a in range(len(sizes))]
    order = sorted(range(len(sizes)), key=lambda axis: layout[axis].endswith("s"))
    return [
        [(axis, sizes[axis], places[axis]) for axis in order if layout[axis][0] == str(dim)]
        for dim in (0, 1)
    ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_of_every_layout_are_those_of_the_formulas(name):
    sizes, layout, replica_axis = LAYOUTS[name]
    replicas = 1 if replica_axis is None else sizes[replica_axis]
    for rank, ((total, _, largest, gate_open), _) in enumerate(sent_of_layout(name)):
        m_cuts, n_cuts = shardings(sizes, layout, rank)
        everything = [
            formulas.held(shape, r, m_cuts=m_cuts, n_cuts=n_cuts, replicas=replicas)
            for shape, r in zip(SHAPES, ranks_of(SHAPES), strict=True)
        ]
        assert gate_open
        assert total == formulas.open_step(everything, reads_momentum=True)
        assert largest == formulas.largest_message(everything)
