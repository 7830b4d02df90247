"""Statistics of matrices: of momenta, and of what a step changes."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from curvadion import CurvaDion, FixedPeriod, QuantizedAverage, Replicated
from curvadion.layout.flat_shard import declare_flat_shard
from curvadion.optim import matrix_statistics
from support.runs import distributed, toy


def test_numbers_are_those_of_the_definitions():
    x = nn.Parameter(torch.zeros(12, 7))
    stack = nn.Parameter(torch.zeros(2, 5, 4))
    inner = torch.optim.SGD([x, stack], lr=0.5, momentum=0.9)
    inner.param_groups[0]["param_names"] = ["x", "stack"]
    optimizer = Replicated(inner, replicas="single")
    generator = torch.Generator().manual_seed(0)
    x.grad = torch.randn(12, 7, generator=generator)
    x.grad[3:6] = 0.0
    stack.grad = torch.ones(2, 5, 4)
    with matrix_statistics.of_update(optimizer) as of_update:
        optimizer.step()
    of_momenta = matrix_statistics.of_momenta(optimizer)
    assert of_update.keys() == of_momenta.keys() == {"x", "stack"}
    singular = torch.linalg.svdvals(x.grad)
    for found, length in ((of_update["x"], 0.5), (of_momenta["x"], 1.0)):
        assert found.rms == pytest.approx(length * float(x.grad.square().mean().sqrt()), rel=1e-4)
        wanted = float(singular.square().sum() / singular.max().square())
        assert found.stable_rank == pytest.approx(wanted, rel=0.05)
        assert found.dead_rows == 0.25
    assert of_momenta["stack"] == pytest.approx((1.0, 1.0, 0.0), abs=1e-4)


@distributed.on_ranks(2)
def test_shards_are_gathered(rank):
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for sharded in (False, True):
        model = toy.model()
        if sharded:
            fully_shard(model, mesh=mesh)
        gate, sync = FixedPeriod(1), QuantizedAverage()
        groups = toy.groups(model)
        optimizer = CurvaDion(groups, replicas="single", gate=gate, sync=sync, local_step="dion")
        toy.train(model, optimizer, range(3))
        with matrix_statistics.of_update(optimizer) as of_update:
            toy.train(model, optimizer, [3])
        found.append(
            {**matrix_statistics.of_momenta(optimizer), "update": of_update["linear.weight"]}
        )
    whole, shards = found
    assert whole.keys() == shards.keys() >= {"linear.weight", "embedding.weight"}
    for name, of_whole in whole.items():
        assert shards[name] == pytest.approx(of_whole, rel=0.02, abs=1e-6), name


def test_a_flat_shard_is_an_error():
    x = nn.Parameter(torch.zeros(24))
    declare_flat_shard(x, (4, 6), 0, 24, None)
    inner = torch.optim.SGD([x], lr=0.1)
    optimizer = Replicated(inner, replicas="single", gate=FixedPeriod(1))
    with pytest.raises(ValueError, match="flat shard"):
        matrix_statistics.of_momenta(optimizer)
