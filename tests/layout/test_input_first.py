"""Matrices stored as (in, out) train exactly as their transposes, which nn.Linear stores."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import distributed
from curvadion import AlwaysOpen, CurvaDion, Dion, FixedPeriod, QuantizedAverage
from flat_shards import declared
from seeded import gradient, weights
from shards import shard
from tolerance import Rounding, assert_close, assert_within

pytestmark = pytest.mark.numeric

SHAPES = [(8, 24), (24, 8), (7, 7), (1, 5), (5, 1)]  # (out, in)
STEPS = 6
ROUNDING = Rounding(torch.float32, terms=24, steps=STEPS)


def pair(make, shapes=SHAPES, **options):
    """Weights after some steps, of (out, in) matrices and of the same ones stored as (in, out)."""
    finals = []
    for turned in (False, True):
        X = [
            nn.Parameter(
                weights(s).mT.clone(memory_format=torch.contiguous_format) if turned else weights(s)
            )
            for s in shapes
        ]
        optimizer = make([{"params": X, "input_first": turned, **options}])
        for step in range(STEPS):
            for x, shape in zip(X, shapes, strict=True):
                G = gradient(shape, step, 0 if not dist.is_initialized() else dist.get_rank())
                x.grad = G.mT.clone(memory_format=torch.contiguous_format) if turned else G
            optimizer.step()
        finals.append([x.detach().mT if turned else x.detach() for x in X])
    return finals


def distance(finals):
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(*finals, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"row_blocks": [1, 3, 4]},
        {"right_factor": "qr", "rank_fraction": 1.0},
        {"momentum_rule": "plain", "nesterov": 1.0},
    ],
    ids=str,
)
def test_a_matrix_and_its_transpose_train_alike(options):
    shapes = [(8, 24), (8, 3)] if "row_blocks" in options else SHAPES
    assert_within(distance(pair(Dion, shapes, **options)), ROUNDING)


def test_scale_is_the_root_of_outputs_over_inputs():
    """||update|| = lr sqrt(out / in) sqrt(r) for r orthonormal directions."""
    x = nn.Parameter(torch.zeros(4, 64))  # 4 inputs, 64 outputs
    x.grad = torch.randn(4, 64)
    options = {"rank_fraction": 1.0, "right_factor": "qr", "input_first": True}
    optimizer = Dion([x], lr=1.0, weight_decay=0.0, **options)
    optimizer.step()
    assert_close(torch.linalg.matrix_norm(x.detach(), 2), 4.0, Rounding(torch.float32, terms=64))


def under_a_budget(rank, options):
    def make(groups):
        return CurvaDion(groups, replicas=dist.group.WORLD, **options)

    return distance(pair(make))


def test_replicas_that_agree_on_codes():
    options = {"gate": FixedPeriod(2), "sync": QuantizedAverage(bits=8)}
    for apart in distributed.run(2, under_a_budget, options):
        assert apart < 1e-2  # codes' blocks run along the other side


def flat_under_a_budget(rank):
    """As above, of matrices whose shards are cut between elements, with the turned momenta."""
    mesh = init_device_mesh("cpu", (2, 2))
    place, group = mesh.get_local_rank(1), mesh.get_group(1)
    ends = (17, 7 * 12)
    finals = []
    for turned in (False, True):
        values = (
            weights((7, 12)).mT.clone(memory_format=torch.contiguous_format)
            if turned
            else weights((7, 12))
        )
        x = declared(values, ends, place, group)
        optimizer = CurvaDion(
            [{"params": [x], "input_first": turned}],
            replicas=mesh.get_group(0),
            gate=FixedPeriod(2),
            sync=QuantizedAverage(bits=8),
        )
        for step in range(STEPS):
            G = gradient((7, 12), step, mesh.get_local_rank(0))
            G = G.mT.clone(memory_format=torch.contiguous_format) if turned else G
            x.grad = G.reshape(-1)[(0, *ends)[place] : ends[place]].clone()
            optimizer.step()
        pieces: list = [None, None]
        dist.all_gather_object(pieces, x.detach(), group=group)
        whole = torch.cat(pieces)
        finals.append([whole.view(12, 7).mT if turned else whole.view(7, 12)])
    return distance(finals)


def test_flat_shards_of_replicas_that_agree_on_codes():
    for apart in distributed.run(4, flat_under_a_budget):
        assert apart < 1e-2


# ---------------------------------------------------------------- state


def trained(groups, steps=3):
    optimizer = CurvaDion(groups, gate=AlwaysOpen())
    for step in range(steps):
        for group in optimizer.param_groups:
            for x in group["params"]:
                x.grad = gradient(tuple(x.shape), step, 0)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("input_first", [False, True])
def test_a_state_saved_before_the_key_existed_loads(input_first):
    def groups():
        x = nn.Parameter(weights((6, 9)))
        return [{"params": [x], "input_first": input_first}]

    saved = copy.deepcopy(trained(groups()).state_dict())
    del saved["param_groups"][0]["input_first"]
    other = CurvaDion(groups(), gate=AlwaysOpen())
    other.load_state_dict(saved)
    assert other.param_groups[0]["input_first"] is input_first
    trained_again = other.param_groups[0]["params"][0]
    trained_again.grad = gradient((6, 9), 3, 0)
    other.step()
    assert other.report.step == 4


def resumed_in_another_layout(rank):
    """Distance of a run whose state moved from one cut to another, from one that went on."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    shape, options = (6, 15), {"input_first": True, "row_blocks": [9, 3, 3]}

    def step(x, optimizer, steps, cut):
        for i in steps:
            x.grad = shard(gradient(shape, i, 0), cut, mesh)
            optimizer.step()

    x = nn.Parameter(shard(weights(shape), ("0",), mesh))
    optimizer = Dion([{"params": [x], **options}])
    step(x, optimizer, range(3), ("0",))
    y = nn.Parameter(shard(x.detach().full_tensor(), ("1",), mesh))
    other = Dion([{"params": [y], **options}])
    step(y, other, range(1), ("1",))  # has its state made
    y.data.copy_(shard(x.detach().full_tensor(), ("1",), mesh))
    for key, tensor in optimizer.state[x].items():
        if isinstance(tensor, DTensor):
            placements = other.state[y][key].placements
            moved = distribute_tensor(tensor.full_tensor(), mesh, placements)
            other.state[y][key] = moved
        else:
            other.state[y][key] = tensor.clone()
    step(x, optimizer, range(3, 6), ("0",))
    step(y, other, range(3, 6), ("1",))
    return distance([[x.detach().full_tensor()], [y.detach().full_tensor()]])


def test_state_moves_between_layouts():
    for apart in distributed.run(2, resumed_in_another_layout):
        assert_within(apart, ROUNDING)
