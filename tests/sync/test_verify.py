"""What replicas compare at a first step: their weights, and whether gradients are their own."""

import copy
import os
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from curvadion import AlwaysOpen, CurvaDion, FixedPeriod, WireMeter
from support.runs import distributed
from support.runs.raised import told

SHAPES = [(12, 8), (8, 12), (9, 7), (40,), (40,)]
KINDS = {
    "dion": {"gate": AlwaysOpen()},
    "threshold": {"threshold": 0.3},
    "period": {"gate": FixedPeriod(3)},
    "budget": {"wire_budget": 0.5},
}


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def groups(X):
    matrices = [(f"matrix{i}", x) for i, x in enumerate(X) if x.dim() == 2]
    vectors = [(f"vector{i}", x) for i, x in enumerate(X) if x.dim() < 2]
    return [{"params": matrices}, {"params": vectors, "algorithm": "adamw", "lr": 0.003}]


def optimizer_of(X, kind="threshold", **arguments):
    how = copy.deepcopy(KINDS[kind]) | {"replicas": dist.group.WORLD, "max_local_steps": None}
    return CurvaDion(groups(X), **how | arguments)


def give_gradients(X, step, replica):
    for i, x in enumerate(X):
        generator = torch.Generator().manual_seed(1000 * step + 10 * replica + i)
        x.grad = torch.randn(x.shape, generator=generator)


def train(X, optimizer, rank, steps):
    """What is told of steps on the rank's own gradients."""

    def take(step):
        give_gradients(X, step, rank)
        optimizer.step()

    return told(steps, take)


@pytest.mark.parametrize("kind", ["dion", "period", "budget"])
@distributed.on_ranks(2)
def test_replicas_start_from_the_same_weights(rank, kind):
    X = parameters()
    if kind == "period" and rank:  # of one shape
        X[3].data, X[4].data = X[4].data, X[3].data
    elif kind != "period":
        X[3].data[0] += rank
    optimizer = optimizer_of(X, kind)
    step, text = train(X, optimizer, rank, 2)
    assert step == 0 and "different weights" in text and "the same seed" in text


class Addressed(FixedPeriod):
    """A gate whose repr is another one in every process."""

    def __repr__(self):
        return f"Addressed at {hex(os.getpid())}"


@pytest.mark.parametrize("how", ["gate", "infinite weights", "group of one"])
@distributed.on_ranks(2)
def test_what_is_meant_is_no_error(rank, how):
    X = parameters()
    more = {}
    if how == "gate":
        more["gate"] = Addressed(3)
    if how == "infinite weights":
        with torch.no_grad():
            X[3][0] = -float("inf")
            X[4][0] = float("nan")
    if how == "group of one":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline", "data"))
        more["replicas"] = mesh["data"]
    assert train(X, optimizer_of(X, "period", **more), rank, 3) is None


@pytest.mark.parametrize("kind", ["threshold", "period"])
@distributed.on_ranks(2)
def test_forgotten_replicas_are_an_error_where_the_gate_can_close(rank, kind):
    X = parameters()
    step, text = train(X, optimizer_of(X, kind, replicas=None), rank, 3)
    assert step == 0
    assert "replicas=None" in text and "group.WORLD" in text and "'single'" in text


@pytest.mark.parametrize("kind", ["dion", "period"])
@distributed.on_ranks(2)
def test_a_group_of_one_rank_is_an_error_beside_others(rank, kind):
    """But a mesh of one rank has other dimensions, which say what the others are."""
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    X = parameters()
    step, text = train(X, optimizer_of(X, kind, replicas=alone), rank, 3)
    assert step == 0
    assert f"replicas=a process group of rank {rank} alone" in text and "'single'" in text


@distributed.on_ranks(3)
def test_replicas_that_no_rank_could_use_are_refused(rank):
    pair = dist.new_group([0, 1])
    if rank == 2:
        with pytest.raises(ValueError, match="replicas=-100 is a process group that rank 2 is not"):
            optimizer_of(parameters(), replicas=pair)
    mesh = init_device_mesh("cpu", (3, 1), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ValueError, match=r"(?s)replicas=.*must have one dimension.*'replicate'"):
        optimizer_of(parameters(), replicas=mesh)


@pytest.mark.parametrize(("kind", "replicas"), [("period", "single"), ("dion", None)])
@distributed.on_ranks(2)
def test_single_says_that_a_process_trains_by_itself(rank, kind, replicas):
    """Copies of it too."""
    optimizer = optimizer_of(parameters(), kind, replicas=replicas)
    if replicas == "single":
        optimizer = pickle.loads(pickle.dumps(optimizer))
    X = [x for g in optimizer.param_groups for x in g["params"]]
    with WireMeter() as meter:
        assert train(X, optimizer, rank, 3) is None
    assert meter.total.bytes == 0


@distributed.on_ranks(2)
def test_a_budget_of_one_sharded_replica_is_an_error(rank):
    mesh = init_device_mesh("cpu", (2,))
    X = [nn.Parameter(distribute_tensor(x.detach(), mesh, [Shard(0)])) for x in parameters()]
    optimizer = CurvaDion(groups(X), wire_budget=0.5)
    for x in X:
        x.grad = torch.ones_like(x)
    with pytest.raises(ValueError, match=r"one replica.*use Dion"):
        optimizer.step()


def average_(X, how):
    """Average gradients as something else would; by rounding not quite the same on every rank."""
    ranks = dist.get_world_size()
    for x in X:
        if how == "all_reduce":
            dist.all_reduce(x.grad)
            x.grad /= ranks
            continue
        each = [torch.empty_like(x.grad) for _ in range(ranks)]
        dist.all_gather(each, x.grad)
        shift = dist.get_rank()
        x.grad = sum(each[(i + shift) % ranks] for i in range(ranks)) / ranks


@pytest.mark.parametrize(
    ("how", "zeros"), [("all_reduce", 0), ("rank order", 0), ("all_reduce", 2)]
)
@distributed.on_ranks(3)
def test_gradients_of_matrices_averaged_by_others_are_an_error(rank, how, zeros):
    """At the first step at which gradients tell anything."""
    X = parameters()
    optimizer = optimizer_of(X)

    def take(step):
        give_gradients(X, step, rank)
        average_([x for x in X if x.dim() == 2], how)
        if step < zeros:
            for x in X:
                x.grad.zero_()
        optimizer.step()

    step, text = told(3, take)
    assert step == zeros and "the matrices are identical" in text
    assert "keep_gradients_local" in text


@distributed.on_ranks(4)
def test_ranks_of_one_replica_that_lack_different_gradients_are_an_error(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    X = [
        nn.Parameter(distribute_tensor(torch.ones(12, 8), mesh, [Replicate(), Shard(0)]))
        for _ in range(2)
    ]
    optimizer = CurvaDion(X, replicas=mesh["replicate"], gate=FixedPeriod(2))
    for x in X:
        x.grad = torch.full_like(x, 1.0 + rank)
    if rank == 2:
        X[1].grad = None
    with pytest.raises((RuntimeError, ValueError), match="lack gradients of different parameters"):
        optimizer.step()


@distributed.on_ranks(2)
def test_replicas_own_gradients_are_not_taken_for_averages(rank):
    """Those of labels in another order are equal in size although nobody averages them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 200))
    nn.init.zeros_(net[2].weight)
    nn.init.zeros_(net[2].bias)
    param_groups = [
        {"params": [net[0].weight, net[2].weight]},
        {"params": [net[0].bias, net[2].bias], "algorithm": "adamw", "lr": 0.003},
    ]
    optimizer = CurvaDion(param_groups, replicas=dist.group.WORLD, threshold=0.3)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x = torch.randn(16, 32, generator=generator)
        y = torch.randperm(200, generator=generator)[:16]
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
