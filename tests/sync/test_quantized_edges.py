"""Quantised averages where rates are zero and parameters come or go."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from curvadion import AlwaysOpen, CodedGradients, CurvaDion, FixedPeriod, LowRank, QuantizedAverage
from support.runs import distributed, toy

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


@pytest.mark.parametrize(("lr", "period"), [(0.0, 3), (1e-30, 3), (1e-12, 1)])
@distributed.on_ranks(2)
def test_a_rate_of_next_to_nothing_keeps_weights_where_they_are(rank, lr, period):
    X = weights()
    optimizer = optimizer_of(X, gate=FixedPeriod(period))
    for number in range(12):
        if number == 6:
            reached = values(X)
            for group in optimizer.param_groups:
                group["lr"] = lr
        step(X, optimizer, number, rank)
    for x, y in zip(X, reached, strict=True):
        assert (x - y).norm() < 0.05 * y.norm()  # no more than what codes make up for


@pytest.mark.parametrize("at", [3, 4])
@distributed.on_ranks(2)
def test_freezing_a_parameter_of_which_each_replica_has_its_own_is_an_error(rank, at):
    X = weights()
    optimizer = optimizer_of(X)
    for number in range(at):
        step(X, optimizer, number, rank)
    X[0].requires_grad_(False)
    if at == 4:
        with pytest.raises(RuntimeError, match=r"\['params'\]\[0\].*synchronize\(\)"):
            step(X[1:], optimizer, at, rank)
        X[0].requires_grad_(True)
        optimizer.synchronize()
        X[0].requires_grad_(False)
    step(X[1:], optimizer, at, rank)


@pytest.mark.parametrize("sync", [QuantizedAverage(), CodedGradients(), LowRank(False)])
@distributed.on_ranks(2)
def test_exact_synchronisation_takes_along_the_state_of_frozen_parameters(rank, sync):
    """And the weights, if they were frozen while they differed."""
    X, gate = weights(), AlwaysOpen() if sync.every_step else FixedPeriod(3)
    groups = [{"params": X[:2]}, {"params": X[2:], "algorithm": "adamw"}]
    optimizer = optimizer_of(groups, sync=sync, gate=gate)
    for number in range(3):
        step(X, optimizer, number, rank)
    if sync.ends_drift:
        optimizer.synchronize()
    X[0].requires_grad_(False)
    before = X[0].detach().clone()
    for number in range(3, 5):
        step(X[1:], optimizer, number, rank)
    optimizer.synchronize(exact=True)
    assert torch.equal(before, X[0]) == sync.ends_drift
    held = toy.states(optimizer) | {str(i): x.detach() for i, x in enumerate(X)}
    toy.assert_bitwise_equal(*distributed.gathered(held))


@pytest.mark.parametrize("change", ["add", "load with fewer fragments", "load with more fragments"])
@distributed.on_ranks(2)
def test_replicas_agree_though_fragments_were_dealt_anew(rank, change):
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
    assert all(map(torch.equal, *distributed.gathered(X)))


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


@distributed.on_ranks(4)
def test_ranks_of_a_replica_agree_on_what_they_hold_alike(rank):
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
        replicas=mesh["replicate"],
        gate=FixedPeriod(2),
        sync=QuantizedAverage(),
    )
    replica = mesh.get_local_rank("replicate")
    for step in range(4):
        for i, x in enumerate((matrix, vector)):
            own = torch.Generator().manual_seed(100 * step + 10 * replica + i)
            noise = torch.randn(x.shape, generator=own)
            x.grad = distribute_tensor(noise, mesh, x.placements, src_data_rank=None)
        optimizer.step()
    state = optimizer.state[vector]
    held = [x.to_local().detach() for x in (vector, state["anchor"], state["residual"])]
    first, second, third, fourth = distributed.gathered(held)
    for other in (second, third, fourth):
        assert all(map(torch.equal, first[:2], other[:2]))
    # The residual is each replica's own, and the same on its ranks.
    assert torch.equal(first[2], second[2]) and torch.equal(third[2], fourth[2])
