"""How well replicas agree: what openings tell while somebody asks."""

import math
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from curvadion import CurvaDion, FixedPeriod, LowRank, QuantizedAverage, Replicated, WireMeter
from curvadion.plan.coded_states import decoded
from support.runs import distributed, toy

RATE = 0.1
PERIOD = 3


@pytest.mark.parametrize(("delay", "residual_dtype"), [(0, "bfloat16"), (1, "int8")])
@distributed.on_ranks(2)
def test_numbers_are_those_of_the_definitions(rank, delay, residual_dtype):
    """One parameter, whose replicas take known steps; the second replica asks for nothing."""
    torch.manual_seed(rank)
    x = nn.Parameter(torch.zeros(700))
    sync = QuantizedAverage(bits=8, delay=delay, residual_dtype=residual_dtype)
    inner = torch.optim.SGD([x], lr=RATE)
    optimizer = Replicated(inner, replicas=dist.group.WORLD, gate=FixedPeriod(PERIOD), sync=sync)
    if rank == 0:
        optimizer.sync.diagnose()
    anchors = [torch.zeros(700)]
    for step in range(3 * PERIOD + delay):
        x.grad = torch.randn(700) + 1.0
        stepped = x.detach() - RATE * x.grad
        optimizer.step()
        found = optimizer.report.diagnostics
        if optimizer.report.gate_open:
            sent = stepped
        if step < PERIOD - 1 + delay or (step - delay + 1) % PERIOD or rank == 1:
            assert found is None
            continue
        anchor = optimizer.state[x]["anchor"].clone()
        D = anchor - anchors[-1]
        movement = sent - anchors[-1]
        residual = optimizer.state[x]["residual"]
        if residual_dtype == "int8":
            residual = decoded("residual", x, residual)
        wanted = {
            "disagreement": (movement - D).norm() / D.norm(),
            "residual": residual.float().norm() / D.norm(),
        }
        if len(anchors) > 1:
            last = anchors[-1] - anchors[-2]
            wanted["progress"] = D.norm() / PERIOD  # L counts steps
            wanted["cosine"] = torch.cosine_similarity(D, last, dim=0)
        anchors.append(anchor)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert math.isclose(found[name], float(value), rel_tol=0.02), name
    assert len(anchors) == (1 if rank else 4)


def diagnosed(rank, mesh, *, sharded, on):
    """The diagnostics of a run, and the bytes that went between replicas."""
    model = toy.model()
    if sharded:
        fully_shard(model, mesh=mesh["shard"])
    replicas = mesh["replicate"].get_group()
    sync = QuantizedAverage(fragments=2)
    optimizer = CurvaDion(toy.groups(model), replicas=replicas, gate=FixedPeriod(2), sync=sync)
    optimizer.sync.diagnose(on)
    with WireMeter() as meter:
        reports = toy.train(model, optimizer, range(10), rank // 2)
    optimizer.sync.diagnose(False)
    [last] = toy.train(model, optimizer, [10], rank // 2)
    assert last.diagnostics is None
    return [report.diagnostics for report in reports], meter.between(2).sent


@distributed.on_ranks(4)
def test_shards_are_added_up_and_nothing_more_is_sent_between_replicas(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    of_shards, sent = diagnosed(rank, mesh, sharded=True, on=True)
    _, sent_without = diagnosed(rank, mesh, sharded=True, on=False)
    of_whole, _ = diagnosed(rank, mesh, sharded=False, on=True)
    assert sent == sent_without
    assert [found is None for found in of_shards] == [True, False] * 5
    one, other = distributed.gathered(of_shards)[rank // 2 * 2 : rank // 2 * 2 + 2]
    assert one == other
    opened = zip(of_shards[1::2], of_whole[1::2], strict=True)
    for shards, whole in opened:
        assert shards.keys() == whole.keys()
        # Shards have blocks of codes of their own, so residuals and means differ a little.
        if "progress" in shards:
            assert math.isclose(shards["progress"], whole["progress"], rel_tol=0.2)
        assert math.isclose(shards["disagreement"], whole["disagreement"], rel_tol=0.3)
    assert max(found["progress"] for found in of_shards[5::2]) < 10  # of directions, not of steps
    cosines = ["cosine" in found for found in of_shards[1::2]]
    assert cosines == [False, False, True, True, True]  # from the fragments' second means on


@distributed.on_ranks(2)
def test_they_change_no_bit(rank):
    weights = []
    for on in (False, True):
        model = toy.model()
        optimizer = CurvaDion(
            toy.groups(model),
            replicas=dist.group.WORLD,
            gate=FixedPeriod(2),
            sync=QuantizedAverage(fragments=2),
        )
        optimizer.sync.diagnose(on)
        toy.train(model, optimizer, range(9), rank)
        optimizer.synchronize()
        weights.append(toy.weights(model))
    for one, other in pairwise(weights):
        toy.assert_bitwise_equal(one, other)


def test_a_sync_without_diagnostics_says_so():
    with pytest.raises(ValueError, match="LowRank.* has no diagnostics"):
        LowRank().diagnose()
    LowRank().diagnose(False)
