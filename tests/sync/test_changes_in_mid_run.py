"""Parameters, settings and states that change between steps, on all ranks or on one."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from curvadion import AlwaysOpen, CurvaDion, FixedPeriod, LowRank, QuantizedAverage
from support.runs import distributed
from support.runs.raised import told
from support.runs.seeded import gradient, weights

SHAPE = (12, 8)


def build(count=2, **options):
    X = [nn.Parameter(weights(SHAPE, i).float()) for i in range(count)]
    return X, CurvaDion(X, replicas=dist.group.WORLD, **options)


def give(X, step, rank):
    for i, x in enumerate(X):
        x.grad = gradient(SHAPE, step, 10 * rank + i).float() if x.requires_grad else None


@distributed.on_ranks(2)
def test_a_first_step_without_a_rate_is_one(rank):
    """Though one replica's batch is masked."""
    X, optimizer = build(lr=0.0, gate=FixedPeriod(2))
    for step in range(3):
        give(X, step, rank)
        if step == 0 and rank == 1:
            for x in X:
                x.grad.zero_()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
    assert optimizer.progress.steps == 3


@distributed.on_ranks(2)
def test_a_step_that_only_asks_for_state_is_none(rank):
    """As torch's checkpoint tools do with a new optimizer."""
    X, optimizer = build(lr=0.0, gate=FixedPeriod(2))
    for x in X:
        x.grad = torch.zeros_like(x)
    optimizer.step()
    assert (optimizer.progress.steps, len(optimizer.state)) == (0, 2)


@distributed.on_ranks(4, timeout=30)
def test_all_ranks_know_whether_gradients_could_tell(rank):
    """Of a matrix of which one rank holds too little to tell whether they are averaged."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    X = nn.Parameter(distribute_tensor(weights((3, 20)).float(), mesh["shard"], [Shard(0)]))
    optimizer = CurvaDion([X], replicas=mesh["replicate"], gate=FixedPeriod(4))
    for step in range(4):
        local = X.to_local()
        G = torch.zeros_like(local) if step == 0 else torch.full_like(local, 1.0 + rank + step)
        X.grad = X.from_local(G, X.device_mesh, X.placements, shape=X.shape, stride=X.stride())
        optimizer.step()
    assert len({*distributed.gathered(optimizer.agreement.verified)}) == 1


@distributed.on_ranks(2)
def test_a_parameter_is_added_while_codes_are_under_way(rank):
    """They arrive one step later."""
    X, optimizer = build(1, lr=0.01, gate=FixedPeriod(4), sync=QuantizedAverage(2, delay=2))
    for step in range(6):
        if step == 4:
            X.append(nn.Parameter(weights(SHAPE, 5).float()))
            optimizer.add_param_group({"params": X[-1:]})
        give(X, step, rank)
        optimizer.step()
    optimizer.synchronize()
    assert all(map(torch.equal, *distributed.gathered(X)))


CHOICES = {
    "low rank": {"gate": AlwaysOpen(), "sync": LowRank()},
    "codes": {"gate": FixedPeriod(2), "sync": QuantizedAverage(bits=2)},
}


@pytest.mark.parametrize("differ", [True, False])
@pytest.mark.parametrize("choice", CHOICES)
@distributed.on_ranks(2)
def test_weights_of_a_thawed_parameter_are_compared(rank, choice, differ):
    X, optimizer = build(**CHOICES[choice])
    X[1].requires_grad_(False)

    def take(step):
        if step == 4:
            with torch.no_grad():
                X[1].copy_(weights(SHAPE, 7 + (rank if differ else 0)))
            X[1].requires_grad_(True)
        give(X, step, rank)
        optimizer.step()

    said = told(8, take)
    if differ:
        assert said[0] == 4 and "different weights" in said[1]
    else:
        loaded = weights(SHAPE, 7).float()
        # What four steps move, not what was loaded.
        assert said is None and (X[1] - loaded).norm() < 0.3 * loaded.norm()


@distributed.on_ranks(2)
def test_everything_may_be_frozen(rank):
    X, optimizer = build(wire_budget=0.5)
    for step in range(6):
        if step == 3:
            optimizer.synchronize()
            for x in X:
                x.requires_grad_(False)
        give(X, step, rank)
        optimizer.step()
    optimizer.synchronize(exact=True)
    assert (optimizer.progress.steps, optimizer.progress.steps_since_exact) == (6, 0)
