"""The cost model sends what the wire meter counts, and its seconds are a ring's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import cost_model
import distributed
import toy
from cost_model import Cost, Link, Shapes, Traffic
from curvadion import CurvaDion, Dion, FixedPeriod, WireMeter
from curvadion.integrations.ddp import keep_gradients_local

PERIOD = 3
# Codes come in whole blocks, which matters for a model as small as this.
OPENED_BY_BUDGET = 0.5


def optimizer_of(method, model):
    if method == "ddp":
        return torch.optim.AdamW(model.parameters())
    how = {"replicas": dist.group.WORLD}
    if method == "dion":
        return Dion(toy.groups(model), **how)
    if method == "averaging":
        return CurvaDion(toy.groups(model), gate=FixedPeriod(PERIOD), **how)
    return CurvaDion(toy.groups(model), wire_budget=budget(), **how)


def budget():
    """What pays for an opening at every other step."""
    dense = 4 * sum(p.numel() for p in toy.model().parameters())
    return (OPENED_BY_BUDGET + 1e-6) * 66 / 1024 + 16 / dense


def metered(rank, method):
    """Calls and payload by collective of 6 steps, and what a rank must send."""
    model = toy.model()
    optimizer = optimizer_of(method, model)
    wrapped = DistributedDataParallel(model)
    if method != "ddp":
        keep_gradients_local(wrapped)
    toy.train(wrapped, optimizer, range(6), rank)
    with WireMeter() as meter:
        toy.train(wrapped, optimizer, range(6, 12), rank)
    return meter.calls_by_collective, meter.bytes_by_collective, meter.total_sent


def modelled(method):
    shapes = Shapes.of_groups(toy.groups(toy.model()))
    if method == "averaging":
        return cost_model.averaging(shapes, PERIOD)
    if method == "wire_budget":
        assert cost_model.openings(shapes, budget()) == pytest.approx(OPENED_BY_BUDGET, rel=1e-5)
        return cost_model.wire_budget(shapes, budget())
    return getattr(cost_model, method)(shapes)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("method", ["ddp", "dion", "averaging", "wire_budget"])
def test_a_step_sends_what_the_meter_counts(method, ranks):
    counted = distributed.run(ranks, metered, method)
    expected = modelled(method)
    sent = sum(sent for _, _, sent in counted) / ranks
    assert 6 * sum(t.sent(ranks) for t in expected) == pytest.approx(sent, rel=1e-5)
    assert {t.kind for t in expected} == set(counted[0][0])
    for t in expected:
        assert 6 * t.calls == pytest.approx(counted[0][0][t.kind], rel=1e-5)
        payload = sum(by_kind[t.kind] for _, by_kind, _ in counted) / ranks
        assert 6 * t.bytes == pytest.approx(payload, rel=1e-5)


LINK = Link(bandwidth=8e6, latency=0.5)  # a megabyte a second


@pytest.mark.parametrize(
    ("kind", "seconds"), [("all_reduce", 6 * 0.5 + 1.5 * 2), ("all_to_all", 3 * 0.5 + 0.75 * 2)]
)
def test_a_collective_takes_a_rings_time(kind, seconds):
    assert cost_model.collective_seconds(Traffic(kind, 1, 2e6), LINK, 4) == seconds


def test_a_measured_cost_replaces_the_rings():
    t = Traffic("all_reduce", 1, 2e6)
    assert cost_model.collective_seconds(t, LINK, 4, Cost(0.5, 2.0)) == 1.5 + 6.0


def test_communication_hides_behind_the_backward_pass_only():
    traffic = [Traffic("all_reduce", 1, 1e6), Traffic("all_gather", 1, 1e6)]

    def step(compute, overlap):
        return cost_model.step_seconds(compute, traffic, LINK, 2, overlap=overlap)

    assert step(3.0, 0.0) == 3.0 + (1.0 + 1.0) + (0.5 + 0.5)
    assert step(3.0, 1.0) == 3.0 + 3.0 - 2.0
    assert step(30.0, 1.0) == 30.0


def test_one_replica_sends_nothing():
    assert cost_model.collective_seconds(Traffic("all_reduce", 9, 1e9), LINK, 1) == 0


def test_tensors_beyond_a_bucket_travel_apart():
    shapes = Shapes([], [(5000, 5000)] * 3)  # 100 MB each
    (traffic,) = cost_model.ddp(shapes)
    assert (traffic.calls, traffic.bytes) == (3, 3e8)
    gate, codes = cost_model.wire_budget(shapes, 1.0)
    assert (gate.calls, codes.calls) == (1, 6)
