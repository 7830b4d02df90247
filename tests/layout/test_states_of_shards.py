"""States of shards: where they lie, that they load again, and sums that must not overflow."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import distributed
from curvadion import Dion
from curvadion.layout.dtensor import zeros
from curvadion.layout.parameters import place_gradients


def test_row_blocks_of_unequal_size_may_lack_rank():
    torch.manual_seed(0)
    X = nn.Parameter(torch.randn(16, 32))
    optimizer = Dion([{"params": [X], "rank_fraction": 0.5, "row_blocks": [8, 4, 4]}])
    for _ in range(3):
        X.grad = torch.outer(torch.randn(16), torch.randn(32))
        optimizer.step()
    assert X.isfinite().all()


def loads_its_own_state(rank):
    """A square matrix of full rank, whose Q has X's shape, and AdamW's moments of a scalar."""
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Shard(0), Shard(1)):
        X = nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh, [placement]))
        scalar = nn.Parameter(distribute_tensor(torch.ones(()), mesh, [Replicate()]))
        groups = [{"params": [X], "rank_fraction": 1.0}, {"params": [scalar], "algorithm": "adamw"}]
        optimizer = Dion(groups)
        for x in (X, scalar):
            x.grad = distribute_tensor(torch.randn(x.shape), mesh, x.placements)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()


def test_square_matrices_and_scalars_load_their_own_state():
    distributed.run(2, loads_its_own_state)


def of_an_offloaded_shard(rank):
    """Devices of zeros like a shard that is not on its mesh's device."""
    mesh = init_device_mesh("cpu", (2,))
    X = DTensor.from_local(torch.empty(4, 6, device="meta"), mesh, [Shard(0)], run_check=False)
    return str(zeros(X, (8,), [Shard(0)], torch.float32).to_local().device)


def test_states_lie_where_the_shard_does():
    assert distributed.run(2, of_an_offloaded_shard) == ["meta"] * 2


def sum_of_halves(rank):
    """Of 40,000 twice, and less it twice."""
    mesh = init_device_mesh("cpu", (4,))
    X = nn.Parameter(distribute_tensor(torch.ones(3, dtype=torch.float16), mesh, [Replicate()]))
    part = torch.full((3,), 40_000.0 if rank < 2 else -40_000.0, dtype=torch.float16)
    X.grad = DTensor.from_local(part, mesh, [Partial()], run_check=False)
    place_gradients([X], None)
    return X.grad.dtype, X.grad.to_local().tolist()


def test_partial_sums_in_half_precision_do_not_overflow():
    assert distributed.run(4, sum_of_halves) == [(torch.float16, [0.0] * 3)] * 4
