"""Quantised averages where rates are zero and parameters come or go."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import distributed
import toy
from curvadion import (
    AlwaysOpen,
    CodedGradients,
    CurvaDion,
    FixedPeriod,
    LowRank,
    QuantizedAverage,
)

SHAPES = [(8, 6), (6, 6), (5, 9)]


def weights():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def optimizer_of(X, **options):
    defaults = {"gate": FixedPeriod(3), "sync": QuantizedAverage(), "max_local_steps": None}
    return CurvaDion(X, replicas=dist.group.WORLD, **defaults | options)


def step(X, optimizer, number, rank, missing=()):
    """With random gradients of this rank's own, none where they are missing."""
    generator = torch.Generator().manual_seed(100 * rank + number + 1)
    for i, x in enumerate(X):
        x.grad = torch.randn(x.shape, generator=generator).to(x.dtype)
        if i in missing:
            x.grad = None
    optimizer.step()


def values(X):
    return [x.detach().clone() for x in X]


# ---------------------------------------------------------------------------- learning rates


def fall_to(rank, lr, period):
    X = weights()
    optimizer = optimizer_of(X, gate=FixedPeriod(period))
    for number in range(12):
        if number == 6:
            reached = values(X)
            for group in optimizer.param_groups:
                group["lr"] = lr
        step(X, optimizer, number, rank)
    return [float((x - y).norm() / y.norm()) for x, y in zip(values(X), reached, strict=True)]


@pytest.mark.parametrize(("lr", "period"), [(0.0, 3), (1e-30, 3), (1e-12, 1)])
def test_a_rate_of_next_to_nothing_keeps_weights_where_they_are(lr, period):
    for moved in distributed.run(2, fall_to, lr, period):
        assert max(moved) < 0.05  # no more than what codes make up for


# ------------------------------------------------------------------- parameters come and go


def freeze(rank, at, sync):
    X = weights()
    optimizer = optimizer_of(X, sync=sync)
    for number in range(at):
        step(X, optimizer, number, rank)
    X[0].requires_grad_(False)
    try:
        step(X[1:], optimizer, at, rank)
    except RuntimeError as error:
        X[0].requires_grad_(True)
        optimizer.synchronize()
        X[0].requires_grad_(False)
        step(X[1:], optimizer, at, rank)
        return str(error)
    return ""


def test_freezing_a_parameter_of_which_each_replica_has_its_own_is_an_error():
    sync = QuantizedAverage()
    for message in distributed.run(2, freeze, 4, sync):
        assert "param_groups[0]['params'][0]" in message and "synchronize()" in message
    assert distributed.run(2, freeze, 3, sync) == ["", ""]


def freeze_and_save(rank, sync, gate):
    """All that the optimizer holds after an exact synchronisation with frozen parameters."""
    X = weights()
    groups = [{"params": X[:2]}, {"params": X[2:], "algorithm": "adamw"}]
    optimizer = optimizer_of(groups, sync=sync, gate=gate)
    for number in range(3):
        step(X, optimizer, number, rank)
    optimizer.synchronize()
    X[0].requires_grad_(False)
    before = X[0].detach().clone()
    for number in range(3, 5):
        step(X[1:], optimizer, number, rank)
    optimizer.synchronize(exact=True)
    assert torch.equal(before, X[0])
    held = [{**optimizer.state[x], "weights": x.detach()} for x in X]
    return [{key: torch.as_tensor(value) for key, value in each.items()} for each in held]


@pytest.mark.parametrize(
    ("sync", "gate"), [(QuantizedAverage(), FixedPeriod(3)), (CodedGradients(), AlwaysOpen())]
)
def test_exact_synchronisation_takes_along_the_state_of_frozen_parameters(sync, gate):
    ours, theirs = distributed.run(2, freeze_and_save, sync, gate)
    for one, other in zip(ours, theirs, strict=True):
        toy.assert_bitwise_equal(one, other)


def add_and_agree(rank, change):
    X = weights()
    optimizer = optimizer_of(X, sync=QuantizedAverage(fragments=3))
    for number in range(4):
        step(X, optimizer, number, rank)
    if change == "add":
        more = [nn.Parameter(torch.ones(16, 16)) for _ in range(2)]
        optimizer.add_param_group({"params": more})
    else:
        saved = copy.deepcopy(optimizer.state_dict())
        fragments = {"load with fewer fragments": 2, "load with more fragments": 4}[change]
        optimizer = optimizer_of(X, sync=QuantizedAverage(fragments=fragments))
        optimizer.load_state_dict(saved)
    optimizer.synchronize(exact=False)
    return values(X)


@pytest.mark.parametrize("change", ["add", "load with fewer fragments", "load with more fragments"])
def test_replicas_agree_though_fragments_were_dealt_anew(change):
    ours, theirs = distributed.run(2, add_and_agree, change)
    assert all(x.equal(y) for x, y in zip(ours, theirs, strict=True))


# --------------------------------------------------------------------------- other surprises


@pytest.mark.parametrize("direction", ["low_rank", "polar"])
def test_one_replica_does_what_it_would_do_alone(direction):
    ends = []
    for options in (
        {"gate": FixedPeriod(100), "sync": LowRank(), "max_local_steps": None},
        {"gate": FixedPeriod(2), "sync": QuantizedAverage()},
    ):
        X = [nn.Parameter(x.detach().double()) for x in weights()]
        equal = {"direction": direction, "rank_fraction": 1.0, "right_factor": "qr"}
        optimizer = CurvaDion(X, **options, **equal, look_ahead=1.0)
        for number in range(6):
            step(X, optimizer, number, 0)
        ends.append(values(X))
    assert all(x.equal(y) for x, y in zip(*ends, strict=True))


def train_in_tensor_parallel(rank):
    """A vector that tensor parallelism replicates beside a matrix that it cuts unevenly."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tensor"))
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(25, 20, generator=generator), torch.randn(300, generator=generator)
    places = [Replicate(), Shard(0)], [Replicate(), Replicate()]
    matrix, vector = (
        nn.Parameter(distribute_tensor(x, mesh, p)) for x, p in zip(whole, places, strict=True)
    )
    optimizer = CurvaDion(
        [{"params": [matrix]}, {"params": [vector], "algorithm": "adamw"}],
        replicas=mesh["replicate"], gate=FixedPeriod(2), sync=QuantizedAverage(),
    )  # fmt: skip
    replica = mesh.get_local_rank("replicate")
    for step in range(4):
        for i, x in enumerate((matrix, vector)):
            own = torch.Generator().manual_seed(100 * step + 10 * replica + i)
            noise = torch.randn(x.shape, generator=own)
            x.grad = distribute_tensor(noise, mesh, x.placements, src_data_rank=None)
        optimizer.step()
    state = optimizer.state[vector]
    return vector.to_local().detach(), *(state[key].to_local() for key in ("anchor", "residual"))


def test_ranks_of_a_replica_agree_on_what_they_hold_alike():
    first, *others = distributed.run(4, train_in_tensor_parallel)
    for other in others:
        assert torch.equal(first[0], other[0]) and torch.equal(first[1], other[1])
    # The residual is each replica's own, and the same on its ranks.
    assert torch.equal(first[2], others[0][2]) and torch.equal(others[1][2], others[2][2])
