"""States of shards: where they lie, that they load again, and sums that must not overflow."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from curvadion import Dion
from curvadion.layout.dtensor import made_like, zeros
from curvadion.layout.placements import place_gradients
from support.runs import distributed
from support.runs.shards import shard


def test_row_blocks_of_unequal_size_may_lack_rank():
    torch.manual_seed(0)
    X = nn.Parameter(torch.randn(16, 32))
    before = X.detach().clone()
    optimizer = Dion([{"params": [X], "rank_fraction": 0.5, "row_blocks": [8, 4, 4]}])
    for _ in range(3):
        X.grad = torch.outer(torch.randn(16), torch.randn(32))
        optimizer.step()
    assert X.isfinite().all() and (before != X).any(1).all()


@pytest.mark.parametrize("layout", [("0", "1"), ("0s", "0"), ("r", "1")], ids=str)
@distributed.on_ranks(4)
def test_what_is_made_like_a_parameter_is_what_torch_makes(rank, layout):
    """Also of a transpose, whose numbers lie in another order, and of uneven shards."""
    X = shard(torch.arange(35.0).view(7, 5), layout, init_device_mesh("cpu", (2, 2)))
    for x in (nn.Parameter(X), X.mT):
        for make in (torch.zeros_like, partial(torch.Tensor.to, dtype=torch.float64, copy=True)):
            ours, theirs = made_like(x, make), make(x.detach())
            assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())
            assert (ours.dtype, ours.placements) == (theirs.dtype, theirs.placements)
            here, there = ours.to_local(), theirs.to_local()
            assert here.equal(there) and here.stride() == there.stride()
            assert not ours.requires_grad and here.data_ptr() != x.to_local().data_ptr()


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)])
@distributed.on_ranks(2)
def test_square_matrices_and_scalars_load_their_own_state(rank, placement):
    """Of full rank, so that Q has X's shape; AdamW's moments of a scalar."""
    mesh = init_device_mesh("cpu", (2,))
    placements = [[placement], [Replicate()]]
    values = [torch.randn(8, 8), torch.ones(())]
    gradients = [[torch.randn(8, 8), torch.randn(())] for _ in range(2)]

    def optimizer_of(values):
        X, scalar = (
            nn.Parameter(distribute_tensor(value, mesh, where))
            for value, where in zip(values, placements, strict=True)
        )
        groups = [{"params": [X], "rank_fraction": 1.0}, {"params": [scalar], "algorithm": "adamw"}]
        return Dion(groups), [X, scalar]

    def step(optimizer, parameters, number):
        for x, gradient in zip(parameters, gradients[number], strict=True):
            x.grad = distribute_tensor(gradient, mesh, x.placements)
        optimizer.step()

    optimizer, parameters = optimizer_of(values)
    step(optimizer, parameters, 0)
    again, same_parameters = optimizer_of([x.detach().full_tensor() for x in parameters])
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.state[parameters[0]]["Q"].shape == (8, 8)
    assert {"exp_avg", "exp_avg_sq", "step"} <= optimizer.state[parameters[1]].keys()
    for number in (None, 1):
        if number is not None:
            step(optimizer, parameters, number)
            step(again, same_parameters, number)
        for x, same in zip(parameters, same_parameters, strict=True):
            assert same.to_local().equal(x.to_local())
            assert_same_state(again.state[same], optimizer.state[x])


def assert_same_state(loaded, saved):
    """Equal keys, placements and shards."""
    assert loaded.keys() == saved.keys()
    for key, value in saved.items():
        found = loaded[key]
        if isinstance(value, DTensor):
            assert found.placements == value.placements, key
            found, value = found.to_local(), value.to_local()
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(value)), key


@distributed.on_ranks(2)
def test_states_lie_where_the_shard_does(rank):
    """Not on its mesh's device."""
    mesh = init_device_mesh("cpu", (2,))
    X = DTensor.from_local(torch.empty(4, 6, device="meta"), mesh, [Shard(0)], run_check=False)
    assert zeros(X, (8,), [Shard(0)], torch.float32).to_local().is_meta


@distributed.on_ranks(4)
def test_partial_sums_in_half_precision_do_not_overflow(rank):
    """Of 40,000 twice, and less it twice."""
    mesh = init_device_mesh("cpu", (4,))
    X = nn.Parameter(distribute_tensor(torch.ones(3, dtype=torch.float16), mesh, [Replicate()]))
    part = torch.full((3,), 40_000.0 if rank < 2 else -40_000.0, dtype=torch.float16)
    X.grad = DTensor.from_local(part, mesh, [Partial()], run_check=False)
    place_gradients([X], None)
    assert X.grad.dtype == torch.float16 and X.grad.to_local().tolist() == [0.0] * 3
