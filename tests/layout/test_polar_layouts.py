"""The polar direction takes the trajectory of whole matrices in every layout, and unshards none."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from curvadion import CurvaDion, Dion, WireMeter
from curvadion.layout import exchange
from curvadion.layout.matrix import Extent, MatrixLayout
from curvadion.layout.owners import MatrixOwners, matrix_cost, runs_of
from curvadion.update import polar
from support.references import formulas
from support.references.polar_reference import POLAR
from support.references.tolerance import Rounding, assert_within, worst
from support.runs import distributed, flat_shards, mesh_layouts
from support.runs.flat_shards import BESIDE, SHARDS_2, SHARDS_4
from support.runs.mesh_layouts import LAYOUTS, SHAPES
from support.runs.pairwise import all_pairs, every_value
from support.runs.scheduled import Watching
from support.runs.seeded import gradient, weights
from support.runs.shards import shard

pytestmark = pytest.mark.numeric

STEPS, OPEN_STEPS = 4, (1, 3, 4)
# Drawn matrices that are square have some small singular values, which become one: what rounding
# loses of them is amplified.
FLOAT64 = Rounding(torch.float64, terms=24, condition=1e6, steps=STEPS)
# Of a few columns the shortest may be shorter still.
OF_CHOSEN = replace(FLOAT64, condition=1e7)


def rounding_of(options):
    return OF_CHOSEN if "dion2" in options.get("direction", "") else FLOAT64


def assert_takes_the_trajectory(sizes, layout, replica_axis, shapes, seed=0, **options):
    options = {**POLAR, "dtype": torch.float64, **options}
    arguments = (sizes, layout, replica_axis, shapes, STEPS, options, seed)
    errors = distributed.run(torch.Size(sizes).numel(), mesh_layouts.train, *arguments)
    assert_within(worst(errors), rounding_of(options))


# Rows, columns, both, one twice; empty shards, replicas, copies of shards.
SHARDED = [
    "fsdp 8, with empty shards",
    "hsdp 2x2",
    "dp x tp rowwise",
    "fsdp x tp, different dimensions",
    "fsdp x tp, replicated over tp",
    "dp x fsdp x tp, the same dimension",
]


@pytest.mark.parametrize("gather", ["auto", "never"])
@pytest.mark.parametrize("name", SHARDED)
def test_a_schedule_of_gates_equals_a_simulation_of_the_replicas(name, gather):
    options = {"open_steps": OPEN_STEPS, "look_ahead": 1.5, "gather": gather}
    assert_takes_the_trajectory(*LAYOUTS[name], SHAPES, **options)


def least_singular_value(shape, seed):
    """The smallest one of all momenta of a run, relative to the largest of the same momentum.

    Iterations do not bring those near rounding errors of Gram matrices to 1.
    """
    M = torch.zeros(shape, dtype=torch.float64)
    least = 1.0
    for step in range(STEPS):
        M = 0.95 * M + gradient(shape, step, 0, seed)
        singular_values = torch.linalg.svdvals(M)
        least = min(least, float(singular_values[-1] / singular_values[0]))
    return least


@settings(max_examples=5)
@given(
    sharding=st.sampled_from(
        [((3,), ("0",)), ((3,), ("1",)), ((4,), ("1",)), ((2, 2), ("0", "1")), ((2, 2), ("1", "1"))]
    ),
    matrices=st.lists(st.tuples(*2 * [st.integers(1, 19)]), min_size=2, max_size=3),
    gather=st.sampled_from(["auto", "never"]),
    seed=st.integers(0, 100),
)
def test_any_shape_and_sharding(sharding, matrices, gather, seed):
    sizes, layout = sharding
    shapes = [shape for m, n in matrices for shape in ((m, n), (n, m), (m, n))]
    assume(all(least_singular_value(shape, seed) > 1e-4 for shape in {*shapes}))
    assert_takes_the_trajectory(sizes, layout, None, shapes, seed, gather=gather)


# -------------------------------------------------------------------- flat shards


def assert_flat_shards_take_the_trajectory(replicas, cases, **options):
    world = replicas * len(next(iter(cases.values()))[1])
    how = {"dtype": torch.float64, "steps": STEPS}
    options = {**POLAR, **options}
    for errors in flat_shards.run(world, replicas, cases, OPEN_STEPS, options, how):
        for name, error in errors.items():
            # The gate's signal is float32.
            narrow = name == "rmmc"
            allowed = Rounding(torch.float32) if narrow else rounding_of(options)
            assert_within(error, allowed, what=name)


@pytest.mark.parametrize("gather", ["auto", "never"])
@pytest.mark.parametrize(
    ("replicas", "cases"),
    [(1, SHARDS_4), (2, SHARDS_2), (1, BESIDE)],
    ids=["4", "2x2", "4, beside each other"],
)
def test_flat_shards_take_the_whole_trajectory(replicas, cases, gather):
    assert_flat_shards_take_the_trajectory(replicas, cases, gather=gather)


# -------------------------------------------------------------------- directions that came later

LATER = {
    "normuon": {"direction": "normuon"},
    "dion2": {"direction": "dion2", "rank_fraction": 0.3},
    "nordion2": {"direction": "nordion2", "rank_fraction": 0.3},
}


@pytest.mark.parametrize(
    ("name", "direction", "gather"),
    all_pairs(
        ["hsdp 2x2", "dp x tp rowwise", "fsdp x tp, different dimensions"],
        list(LATER),
        ["auto", "never"],
    ),
)
def test_later_directions_take_the_whole_trajectory(name, direction, gather):
    options = {"open_steps": OPEN_STEPS, "look_ahead": 0.5, "gather": gather, **LATER[direction]}
    assert_takes_the_trajectory(*LAYOUTS[name], SHAPES, **options)


@pytest.mark.parametrize("direction", LATER)
def test_later_directions_on_flat_shards(direction):
    assert_flat_shards_take_the_trajectory(2, SHARDS_2, **LATER[direction])


# Flat shards that cut columns of X, whose rows they then hold in part.
INPUT_FIRST = {name: case for name, case in SHARDS_4.items() if case[2].get("input_first")}


@pytest.mark.parametrize("direction", ["normuon", "nordion2"])
def test_rows_whose_columns_are_cut_have_one_length(direction):
    cases = {**INPUT_FIRST, **BESIDE}
    assert_flat_shards_take_the_trajectory(1, cases, **LATER[direction])


# -------------------------------------------------------------------- what is sent


def sent(rank, sizes, layout, count, options):
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple("abc"[: len(sizes)]))
    X = [nn.Parameter(shard(weights((24, 16)), layout, mesh)) for _ in range(count)]
    optimizer = CurvaDion(
        X, replicas="single", gate=Watching(range(1, 100)), **{**POLAR, **options}
    )
    for step in range(2):  # the first also verifies the set-up
        for x in X:
            x.grad = shard(gradient((24, 16), step, 0), layout, mesh)
        with WireMeter() as meter:
            optimizer.step()
    return meter.total.bytes, meter.total.calls


# The gate, and the norms that it reads, a matrix.
AGREEMENT, NORM = formulas.GATE, 8


@pytest.mark.parametrize("layout", ["0", "1"])
@pytest.mark.parametrize(("dtype", "size"), [(None, 4), ("bfloat16", 2)])
def test_owners_are_sent_shards_and_send_them_back(layout, dtype, size):
    ranks, count = 4, 8
    shards = 2 * size * 24 * 16 // ranks * count
    # Behind each direction comes the matrix's scale, from its owner to all.
    wanted = [AGREEMENT + NORM * count + shards + 4 * count // ranks * ranks]
    each = distributed.run(ranks, sent, (ranks,), (layout,), count, {"exchange_dtype": dtype})
    assert [total for total, _ in each] == wanted * ranks
    assert [calls for _, calls in each] == [4] * ranks


def test_gram_matrices_send_two_triangles_a_matrix():
    ranks, count, n = 4, 8, 16
    triangle = n * (n + 1) // 2
    # A share of each triangle to every rank, and of all results. A result has one number more,
    # and each rank's rows an exponent.
    triangles = 4 * (1 + 1 / ranks) * count * (triangle + triangle + 1)
    rows = AGREEMENT + (NORM + 4) * count + triangles
    options = {"gather": "never", "newton_schulz": "polar_express", "newton_schulz_steps": 4}
    for total, calls in distributed.run(ranks, sent, (ranks,), ("0",), count, options):
        assert (total, calls) == (rows, 7)
    # Of columns, whole rows are made first.
    for total, calls in distributed.run(ranks, sent, (ranks,), ("1",), count, options):
        assert (total, calls) == (rows + 2 * 4 * count * 24 * 16 // ranks, 9)


@distributed.on_ranks(2)
def test_bfloat16_on_the_wire_rounds_momenta_and_directions(rank):
    mesh = init_device_mesh("cpu", (2,))
    ends = []
    for exchange_dtype in (torch.float32, "bfloat16"):
        X = [nn.Parameter(shard(weights((24, 16)), ("0",), mesh)) for _ in range(2)]
        optimizer = Dion(X, lr=1.0, direction="polar", exchange_dtype=exchange_dtype)
        for x in X:
            x.grad = shard(gradient((24, 16), 0, 0), ("0",), mesh)
        optimizer.step()
        ends.append([x.to_local().detach() for x in X])
    for y, x in zip(*ends, strict=True):
        assert (x - y).norm() > 0  # it is bfloat16 that was sent
        # Directions are of norm 4, by rank half of it; a rounding of M turns them by its
        # condition.
        assert_within((x - y).norm() / 3, Rounding(torch.bfloat16, condition=4))


def test_products_of_directions_that_were_sent_in_a_narrower_dtype():
    """With float64 weights and exchange_dtype="bfloat16" owners send float32 directions."""
    generator = torch.Generator().manual_seed(0)
    U = torch.randn(2, 7, 3, generator=generator)
    M = torch.randn(2, 7, 3, generator=generator, dtype=torch.float64)
    (S,) = exchange.summands_of_columns([U], [M], [MatrixLayout.whole((7, 3))]).views
    assert torch.equal(S, U.double().mT @ M)


def test_owners_have_about_equal_work():
    shapes, counts = [(64, 64), (64, 16), (32, 32)], [7, 9, 2]
    layouts = [MatrixLayout.whole(shape) for shape in shapes]
    costs = list(map(matrix_cost, layouts))
    runs = runs_of(costs, counts, ranks=4)
    for each, count in zip(runs, counts, strict=True):
        assert [i for run in each for i in range(run.start, run.stop)] == list(range(count))
    load = [
        sum(
            matrix_cost(layout) * (each[rank].stop - each[rank].start)
            for layout, each in zip(layouts, runs, strict=True)
        )
        for rank in range(4)
    ]
    largest = max(matrix_cost(layout) for layout in layouts)
    assert max(load) - min(load) <= largest


# -------------------------------------------------------------------- exchanges with owners


def train_turned(rank, *arguments):
    """As on accelerators, where shards are exchanged in the order in which weights lie."""
    with mock.patch.object(polar, "_lies_turned", lambda stack: stack[0].layout.transposed):
        return mesh_layouts.train(rank, *arguments)


# Each layout of few ranks once, and each direction.
FEW = [name for name in SHARDED if torch.Size(LAYOUTS[name][0]).numel() < 8]


@pytest.mark.parametrize(("name", "direction"), every_value(FEW, ["polar", "normuon", "dion2"]))
def test_transposes_are_exchanged_too(name, direction):
    sizes, layout, replica_axis = LAYOUTS[name]
    options = {**POLAR, **LATER.get(direction, {}), "dtype": torch.float64}
    options |= {"open_steps": OPEN_STEPS, "look_ahead": 1.5}
    arguments = (sizes, layout, replica_axis, SHAPES, STEPS, options, 0)
    errors = distributed.run(torch.Size(sizes).numel(), train_turned, *arguments)
    assert_within(worst(errors), rounding_of(options))


WHOLE = range(16)
# Parts of matrices (24, 16) on four ranks: rows and columns of each.
PARTS = {
    "rows": [(range(i, i + 6), WHOLE) for i in range(0, 24, 6)],
    "columns": [(range(24), range(i, i + 4)) for i in range(0, 16, 4)],
    "rows and columns": list(product((range(12), range(12, 24)), (range(8), range(8, 16)))),
    "uneven rows": [
        *((rows, WHOLE) for rows in (range(9), range(9, 18), range(18, 24), range(24, 24)))
    ],
    # Flat shards hold summands of rows that they share.
    "shared rows": [(r, WHOLE) for r in (range(7), range(6, 13), range(12, 19), range(18, 24))],
}


def exchanged(rank, kinds, turned, counts):
    """Whether an owner gets sums of parts, and ranks their parts of what owners return."""
    layouts = []
    whole = []
    for i, (kind, count) in enumerate(zip(kinds, counts, strict=True)):
        rows, columns = map(Extent, PARTS[kind][rank])
        parts = tuple(PARTS[kind])
        layouts.append(MatrixLayout((24, 16), rows, columns, parts=parts))
        # Small integers, whose sums are exact in all dtypes.
        numbers = torch.arange(count * 24 * 16).view(count, 24, 16)
        whole.append((numbers % (13 + i)).float())
    owners = MatrixOwners(layouts, counts, turned, dist.group.WORLD)
    parts = [
        [u[:, r.start : r.stop, c.start : c.stop] for r, c in PARTS[kind]]
        for u, kind in zip(whole, kinds, strict=True)
    ]
    gathered = owners.begin_gather([of_stack[rank] for of_stack in parts], torch.bfloat16)()
    for u, of_stack, mine, got, kind in zip(
        whole, parts, owners.mine, gathered, kinds, strict=True
    ):
        wanted = torch.zeros_like(u)
        for part, (r, c) in zip(of_stack, PARTS[kind], strict=True):
            wanted[:, r.start : r.stop, c.start : c.stop] += part
        assert got.dtype == torch.bfloat16
        assert torch.equal(got.float(), wanted[mine.start : mine.stop])
    mine = [u[run.start : run.stop] for u, run in zip(whole, owners.mine, strict=True)]
    scales = [[100 * i + k + 1 / 3 for k in range(count)] for i, count in enumerate(counts)]
    own = [x for of, run in zip(scales, owners.mine, strict=True) for x in of[run.start : run.stop]]
    returned, numbers = owners.scatter(
        mine, torch.tensor(own, dtype=torch.float32), torch.bfloat16, torch.float32
    )
    for of_stack, shard_of_stack, by_column in zip(parts, returned, turned, strict=True):
        assert torch.equal(shard_of_stack, of_stack[rank])
        # Dense, in the order in which shards have been exchanged.
        assert (shard_of_stack.mT if by_column else shard_of_stack).is_contiguous()
    # Not rounded to the dtype on the wire.
    assert torch.equal(numbers, torch.tensor(owners.by_owner(scales), dtype=torch.float32))


@pytest.mark.parametrize(
    ("kinds", "turned", "counts"),
    all_pairs(
        [
            *((kind,) * 3 for kind in PARTS),
            ("rows", "columns", "rows"),
            ("shared rows", "rows", "rows"),
        ],
        [(False,) * 3, (True,) * 3, (False, True, False)],
        [(5, 3, 8), (1, 1, 1)],
    ),
    ids=str,
)
def test_parts_come_back_as_they_were_sent(kinds, turned, counts):
    distributed.run(4, exchanged, kinds, turned, counts)


def step_with_a_bad_block(rank, bad):
    """Which blocks' lengths are measured; whether a step with a NaN in one of them is skipped."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks = [64, 16, 16]
    X = nn.Parameter(shard(weights((96, 32)), ("0",), mesh))
    optimizer = Dion([{"params": [X], "row_blocks": blocks}], direction="polar")
    skipped = []
    for step in range(2):
        G = gradient((96, 32), step, 0)
        if step:
            G[sum(blocks[:bad]), 0] = float("nan")
        X.grad = shard(G, ("0",), mesh)
        optimizer.step()
        skipped.append(optimizer.report.skipped)
    [batch] = optimizer._collective_plan().batches
    measured = {polar.Polar().measures(stack) for stack in batch.stacks}
    states = [X.detach().to_local(), optimizer.state[X]["momentum"].to_local()]
    return measured, skipped, all(bool(t.isfinite().all()) for t in states)


@pytest.mark.parametrize("bad", range(3))
def test_every_block_of_a_parameter_is_checked(bad):
    """Also if its blocks go different ways over the ranks, and only some are measured."""
    for measured, skipped, finite in distributed.run(2, step_with_a_bad_block, bad):
        assert measured == {False, True}
        assert skipped == [False, True] and finite
