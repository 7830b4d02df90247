"""Parameters that hold several matrices, or one of more dimensions, train as these on their own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from curvadion import CurvaDion, Dion
from curvadion.layout.flat_shard import declare_flat_shard
from curvadion.layout.matrix_shards import sizes_in_memory
from curvadion.plan import parameter
from curvadion.plan.coded_states import decoded
from support.references.polar_reference import POLAR, reference_of
from support.references.tolerance import Rounding, assert_close, assert_within, worst
from support.runs import distributed
from support.runs.flat_shards import FRACTION, elements_of, matrices_of, ranks_of
from support.runs.scheduled import Watching
from support.runs.seeded import gradient, weights
from support.runs.shards import piece, shard

pytestmark = pytest.mark.numeric

STEPS, OPEN_STEPS = 5, (1, 3, 4)

CASES = {
    "convolution": ((6, 2, 3, 2), {}),
    "experts": ((3, 8, 6), {"stack_dims": 1}),
    "experts of convolutions": ((3, 6, 2, 2), {"stack_dims": 1}),
    "experts of experts": ((2, 3, 5, 4), {"stack_dims": 2}),
    "QKV": ((24, 8), {"row_blocks": 3}),
    "one matrix of the same shape": ((24, 8), {}),
    "grouped-query QKV": ((20, 6), {"row_blocks": [12, 4, 4]}),
    "experts of QKV": ((3, 12, 5), {"stack_dims": 1, "row_blocks": [8, 2, 2]}),
    "input first": ((8, 11), {"input_first": True}),
    "input first, square": ((7, 7), {"input_first": True}),
    "input-first QKV": ((8, 24), {"input_first": True, "row_blocks": 3}),
    "input-first grouped-query QKV": ((4, 19), {"input_first": True, "row_blocks": [13, 3, 3]}),
    "input-first experts": ((3, 8, 6), {"stack_dims": 1, "input_first": True}),
    "input-first experts of two": (
        (3, 6, 10),
        {"stack_dims": 1, "input_first": True, "row_blocks": [7, 3]},
    ),
    "output projection of heads": ((9, 16), {"column_blocks": 4}),
    "wide column blocks": ((5, 24), {"column_blocks": [7, 14, 3]}),
    "experts with column blocks": ((3, 7, 8), {"stack_dims": 1, "column_blocks": 2}),
    "gate and up in turns": ((6, 2, 5), {"column_blocks": 2}),
    "input-first column blocks": ((16, 9), {"input_first": True, "column_blocks": [3, 13]}),
}
# Mesh, shardings, the axis of replicas.
MESHES = {
    "sharded over 4": ((4,), [("0",), ("1",), ("2",)], None),
    "2 replicas sharded over 2": ((2, 2), [("r", "0"), ("r", "1")], 0),
    "2x2": ((2, 2), [("0", "1"), ("1", "2"), ("2", "1"), ("0s", "0"), ("1s", "1")], None),
    "2 replicas, 2x2": ((2, 2, 2), [("r", "0s", "0"), ("r", "0", "1")], 0),
}


def fits(shape, options, layout, sizes):
    """Whether a sharding is one of rows, columns or stacked dimensions; of kernels, an even one."""
    columns = options.get("stack_dims", 0) + 1
    sharding = [(int(word[0]), n) for word, n in zip(layout, sizes, strict=True) if word != "r"]
    pieces = math.prod(n for dim, n in sharding if dim == columns)
    even = columns == len(shape) - 1 or shape[columns] % pieces == 0
    return even and all(dim <= columns for dim, _ in sharding)


def dealt(case, layouts):
    """One of the layouts: neighbouring cases have different ones."""
    return [layouts[list(CASES).index(case) % len(layouts)]]


def replicas_of(name):
    sizes, _, replica_axis = MESHES[name]
    return 1 if replica_axis is None else sizes[replica_axis]


def expected(name, schedule, options, steps, cases):
    """By case and letter what the references hold of X and M, by replica; the RMMC of each step."""
    replicas = replicas_of(name)
    references = {}
    for case in cases:
        shape, own = CASES[case]
        matrices = zip(matrices_of(weights(shape), own), ranks_of(shape, own), strict=True)
        references[case] = [reference_of(matrix, replicas, r, options) for matrix, r in matrices]
    rmmc = []
    for step in range(steps):
        rmmc.append(0.0)
        for case, of_case in references.items():
            shape, own = CASES[case]
            parts = [matrices_of(gradient(shape, step, i), own) for i in range(replicas)]
            for i, reference in enumerate(of_case):
                rmmc[-1] = max(rmmc[-1], reference.rmmc([G[i] for G in parts]))
                reference.step([G[i] for G in parts], not schedule or step + 1 in schedule)
    held = {}
    for case, of_case in references.items():
        shape, own = CASES[case]
        for letter in ("X", "M"):
            by_matrix = [getattr(reference, letter) for reference in of_case]
            by_replica = zip(*by_matrix, strict=True)
            held[case, letter] = [elements_of(M, shape, own).view(shape) for M in by_replica]
    return held, rmmc


def trained(name, schedule, options, steps=STEPS, cases=tuple(CASES), dtype=torch.float32):
    """What each rank of a mesh says of its distances from the references, which it is given."""
    how = (name, schedule, options, steps, cases)
    ranks = math.prod(MESHES[name][0])
    return distributed.run(ranks, train, *how, dtype, *expected(*how))


def train(rank, name, schedule, options, steps, cases, dtype, held, rmmc):
    """Distances of the pieces of X and M from the references', by case and layout; of the RMMC."""
    sizes, layouts, replica_axis = MESHES[name]
    mesh = init_device_mesh("cpu", sizes)
    mine = 0 if replica_axis is None else mesh.get_local_rank(replica_axis)
    X, param_groups = {}, []
    every = mesh.size() < 8 and not {"direction", "state_dtype"} & options.keys()
    for case in cases:
        shape, own = CASES[case]
        fitting = [layout for layout in layouts if fits(shape, own, layout, sizes)]
        for layout in fitting if every else dealt(case, fitting):
            X[case, layout] = nn.Parameter(shard(weights(shape).to(dtype), layout, mesh))
            param_groups.append({"params": [X[case, layout]], **own})
    gate = Watching(schedule or range(1, steps + 1))
    optimizer = CurvaDion(
        param_groups,
        replicas=None if replica_axis is None else mesh.get_group(replica_axis),
        gate=gate,
        **{"rank_fraction": FRACTION, **options},
    )
    for step in range(steps):
        for (case, layout), x in X.items():
            x.grad = shard(gradient(CASES[case][0], step, mine).to(dtype), layout, mesh)
        optimizer.step()
    errors = {}
    for (case, layout), x in X.items():
        momentum = optimizer.state[x]["momentum"]
        if momentum.dtype == torch.int8:
            [group] = [g for g in optimizer.param_groups if g["params"][0] is x]
            momentum = decoded("momentum", x, momentum, group)
        for letter, actual in (("X", x), ("M", momentum)):
            wanted = held[case, letter][mine]
            distance = (actual.to_local() - piece(wanted, layout, mesh)).norm() / wanted.norm()
            errors[letter, case, layout] = distance.item()
    seen = optimizer.gate.seen
    wrong = worst(abs(a - b) / b for a, b in zip(seen[1:], rmmc[1:], strict=True))
    errors["rmmc"] = wrong / 10  # a difference of norms: a digit less is exact
    return errors


def assert_small(errors, steps):
    for which, error in errors.items():
        assert_within(error, Rounding(torch.float32, terms=24, steps=steps), what=which)


# Replicas open the gates of a schedule below.
@pytest.mark.parametrize("name", ["sharded over 4", "2x2"])
def test_open_gate_trains_the_separate_matrices(name):
    for errors in trained(name, None, {}, 3):
        assert_small(errors, 3)


@pytest.mark.parametrize(
    ("name", "local_step", "right_factor"),
    [
        ("2 replicas sharded over 2", "gradient", "qr"),
        ("2 replicas, 2x2", "dion", "column_normalized"),
    ],
)
def test_a_schedule_of_gates_equals_a_simulation_of_the_replicas(name, local_step, right_factor):
    options = {"local_step": local_step, "local_lr": 0.005, "right_factor": right_factor}
    for errors in trained(name, OPEN_STEPS, options):
        assert_small(errors, STEPS)


DIVIDED = {"row_blocks", "column_blocks"}
BLOCKS = tuple(case for case, (_, own) in CASES.items() if DIVIDED & own.keys())


@pytest.mark.parametrize("direction", ["normuon", "dion2"])
def test_other_directions_of_blocks_train_the_separate_matrices(direction):
    options = {**POLAR, "direction": direction, "rank_fraction": 0.3}
    for errors in trained("2x2", None, options, 3, BLOCKS, torch.float64):
        del errors["rmmc"]  # float32
        for which, error in errors.items():
            rounding = Rounding(torch.float64, terms=24, condition=1e6, steps=3)
            assert_within(error, rounding, what=which)


def test_momenta_of_blocks_in_8_bits_stay_within_their_steps():
    """Two roundings move an element by a step each at most, 1 / 127 of its largest neighbour."""
    options = {**POLAR, "state_dtype": "int8"}
    for errors in trained("2x2", None, options, 2, BLOCKS):
        del errors["rmmc"]
        for which, error in errors.items():
            assert error < 0.02, which
        assert max(errors.values()) > 1e-3


def codes_apart(x, **options):
    """The elements of each part of a parameter whose codes are apart, in a Dion of its own."""
    optimizer = Dion([{"params": [x], **options}], direction="polar")
    return sizes_in_memory(x, optimizer.param_groups[0])


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("convolution", [72]),
        ("experts", [48] * 3),
        ("experts of experts", [20] * 6),
        ("grouped-query QKV", [72, 24, 24]),
        ("experts of QKV", [40, 10, 10] * 3),
        ("input first", [88]),
        ("input-first QKV", None),
        ("input-first experts", [48] * 3),
        ("output projection of heads", None),
        ("experts with column blocks", None),
        ("input-first column blocks", [27, 117]),
    ],
)
def test_matrices_that_follow_one_another_in_memory(case, sizes):
    shape, own = CASES[case]
    assert codes_apart(nn.Parameter(torch.ones(shape)), **own) == sizes


def test_ranges_of_flat_shards_that_follow_one_another_in_memory():
    """Blocks of 4 rows of 5 elements; a range that begins within a row holds a part of it."""

    def sizes(start, stop):
        x = nn.Parameter(torch.ones(stop - start))
        declare_flat_shard(x, (12, 5), start, stop, None)
        return codes_apart(x, row_blocks=3)

    assert sizes(0, 60) == [20, 20, 20]
    assert sizes(10, 45) == [10, 20, 5]
    assert sizes(12, 45) is None


@pytest.mark.parametrize("direction", ["polar", "normuon"])
def test_blocks_with_gaps_are_copied_and_follow_the_equations(direction, monkeypatch):
    """As on accelerators, where operations on single elements take no gaps."""
    monkeypatch.setattr(parameter, "WITHOUT_GAPS", ("cpu",))
    options = {**POLAR, "direction": direction, "look_ahead": 1.5}
    X = {case: nn.Parameter(weights(CASES[case][0]).double()) for case in BLOCKS}
    groups = [{"params": [x], **CASES[case][1]} for case, x in X.items()]
    references = {
        case: [
            reference_of(matrix, 1, 0, options)
            for matrix in matrices_of(weights(CASES[case][0]), CASES[case][1])
        ]
        for case in BLOCKS
    }
    optimizer = Dion(groups, replicas="single", **options)
    for step in range(3):
        for case, x in X.items():
            shape, own = CASES[case]
            x.grad = gradient(shape, step, 0).double()
            parts = matrices_of(gradient(shape, step, 0), own)
            for reference, part in zip(references[case], parts, strict=True):
                reference.step([part], True)
        optimizer.step()
    with_gaps = {m.parameter.X for m in optimizer._collective_plan().matrices if m.has_gaps}
    assert X["output projection of heads"] in with_gaps and X["input-first QKV"] in with_gaps
    assert X["QKV"] not in with_gaps
    for case, x in X.items():
        shape, own = CASES[case]
        for letter, actual in (("X", x), ("M", optimizer.state[x]["momentum"])):
            matrices = [getattr(reference, letter)[0] for reference in references[case]]
            wanted = elements_of(matrices, shape, own).view(shape)
            rounding = Rounding(torch.float64, terms=24, condition=1e6, steps=3)
            assert_close(actual.detach(), wanted, rounding, what=(letter, case))


# -------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((8, 4), {"row_blocks": 3}, r"w: row_blocks=3 does not divide 8 rows"),
        ((8, 4), {"stack_dims": 1}, "stack_dims=1 needs parameters of 3 dim"),
        ((4, 8, 3), {"input_first": True}, "input_first=True with stack_dims=0 needs"),
        ((4, 8), {"column_blocks": [5, 4]}, r"w: column_blocks=\[5, 4\] must add up to the 8 col"),
        ((4, 8), {"column_blocks": 2, "row_blocks": 2}, "row_blocks=2 and column_blocks=2: leave"),
        ((4, 3, 2), {"column_blocks": 2}, r"\(4, 3, 2\) and column_blocks=2.*multiple of 2 col"),
    ],
)
def test_views_that_do_not_fit_are_errors(shape, options, message):
    with pytest.raises(ValueError, match=message):
        Dion([{"params": [("w", nn.Parameter(torch.ones(shape)))], **options}])


@distributed.on_ranks(2)
def test_a_convolution_may_not_be_cut_within_an_input_channel(rank):
    """Q's rows would be sharded elsewhere than its columns."""
    mesh = init_device_mesh("cpu", (2,))
    for shape, dim in (((4, 3, 2), 1), ((4, 2, 3), 2)):
        X = nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [Shard(dim)]))
        X.grad = torch.ones_like(X)
        optimizer = Dion([{"params": [("w", X)]}])
        with pytest.raises(ValueError, match="^w: a convolution of shape.*over output channels"):
            optimizer.step()
