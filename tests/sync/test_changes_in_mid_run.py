"""Parameters, settings and states that change between steps, on all ranks or on one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import distributed
from curvadion import AlwaysOpen, CurvaDion, FixedPeriod, LowRank, QuantizedAverage
from raised import told
from seeded import gradient, weights

SHAPE = (12, 8)


def build(count=2, **options):
    X = [nn.Parameter(weights(SHAPE, i).float()) for i in range(count)]
    return X, CurvaDion(X, replicas=dist.group.WORLD, **options)


def give(X, step, rank):
    for i, x in enumerate(X):
        x.grad = gradient(SHAPE, step, 10 * rank + i).float() if x.requires_grad else None


def warm_up(rank):
    """A first step at a rate of 0 counts, though one replica's batch is masked."""
    X, optimizer = build(lr=0.0, gate=FixedPeriod(2))
    for step in range(3):
        give(X, step, rank)
        if step == 0 and rank == 1:
            for x in X:
                x.grad.zero_()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
    return optimizer.progress.steps


def test_a_first_step_without_a_rate_is_one():
    assert distributed.run(2, warm_up) == [3, 3]


def ask_for_state(rank):
    """What torch's checkpoint tools do with a new optimizer."""
    X, optimizer = build(lr=0.0, gate=FixedPeriod(2))
    for x in X:
        x.grad = torch.zeros_like(x)
    optimizer.step()
    return optimizer.progress.steps, len(optimizer.state)


def test_a_step_that_only_asks_for_state_is_none():
    assert distributed.run(2, ask_for_state) == [(0, 2)] * 2


def uneven_shards(rank):
    """A matrix of which one rank holds too little to tell whether gradients are averaged."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    X = nn.Parameter(distribute_tensor(weights((3, 20)).float(), mesh["shard"], [Shard(0)]))
    optimizer = CurvaDion([X], replicas=mesh["replicate"], gate=FixedPeriod(4))
    for step in range(4):
        local = X.to_local()
        G = torch.zeros_like(local) if step == 0 else torch.full_like(local, 1.0 + rank + step)
        X.grad = X.from_local(G, X.device_mesh, X.placements, shape=X.shape, stride=X.stride())
        optimizer.step()
    return optimizer._verified


def test_all_ranks_know_whether_gradients_could_tell():
    assert len(set(distributed.run(4, uneven_shards, timeout=30))) == 1


def add_while_codes_are_under_way(rank):
    """Weights after an arrival one step after a parameter was added."""
    X, optimizer = build(1, lr=0.01, gate=FixedPeriod(4), sync=QuantizedAverage(2, delay=2))
    for step in range(6):
        if step == 4:
            X.append(nn.Parameter(weights(SHAPE, 5).float()))
            optimizer.add_param_group({"params": X[-1:]})
        give(X, step, rank)
        optimizer.step()
    optimizer.synchronize()
    return [x.detach() for x in X]


def test_a_parameter_is_added_while_codes_are_under_way():
    first, second = distributed.run(2, add_while_codes_are_under_way)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


CHOICES = {
    "low rank": {"gate": AlwaysOpen(), "sync": LowRank()},
    "codes": {"gate": FixedPeriod(2), "sync": QuantizedAverage(bits=2)},
}


def thaw(rank, choice, differ):
    """What is said when a parameter is thawed, whose weights may have been loaded anew."""
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
    loaded = weights(SHAPE, 7).float()
    return said, float((X[1].detach() - loaded).norm() / loaded.norm())


@pytest.mark.parametrize("choice", CHOICES)
def test_weights_of_a_thawed_parameter_are_compared(choice):
    for step, text in (said for said, _ in distributed.run(2, thaw, choice, True)):
        assert step == 4 and "different weights" in text
    for said, distance in distributed.run(2, thaw, choice, False):
        assert said is None and distance < 0.3  # what four steps move, not what was loaded


def freeze_all(rank):
    X, optimizer = build(wire_budget=0.5)
    for step in range(6):
        if step == 3:
            optimizer.synchronize()
            for x in X:
                x.requires_grad_(False)
        give(X, step, rank)
        optimizer.step()
    optimizer.synchronize(exact=True)
    return optimizer.progress.steps, optimizer.progress.steps_since_exact


def test_everything_may_be_frozen():
    assert distributed.run(2, freeze_all) == [(6, 0)] * 2


def test_a_list_that_is_changed_in_place_is_checked():
    X = [nn.Parameter(weights(SHAPE).float())]
    optimizer = CurvaDion(X, betas=[0.9, 0.95])
    X[0].grad = gradient(SHAPE, 0, 0).float()
    optimizer.step()
    optimizer.param_groups[0]["betas"][1] = 1.5
    with pytest.raises(ValueError, match=r"betas\[1\]=1.5"):
        optimizer.step()
