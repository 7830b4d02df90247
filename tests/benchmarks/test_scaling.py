"""The cost model sends what the wire meter counts, and its seconds are a ring's."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.bytes import inside_replica
from benchmarks.seconds import cost_model, modelled_steps
from benchmarks.seconds.cost_model import Link, Shapes, Traffic
from curvadion import CurvaDion, Dion, FixedPeriod, QuantizedAverage, WireMeter, ops
from curvadion.agreement.meeting import MEETING_BYTES, WORDS_BYTES
from curvadion.integrations.ddp import keep_gradients_local
from curvadion.ops.code_format import Bits
from curvadion.sync.coded_mean import message_bytes
from support.runs import distributed, toy
from support.runs.seeded import gradient, weights
from support.runs.shards import shard

PERIOD = 3
OPENED_BY_BUDGET = 0.5


def optimizer_of(method, model):
    if method == "ddp":
        return torch.optim.AdamW(model.parameters())
    how = {"replicas": dist.group.WORLD}
    if method == "dion":
        return Dion(toy.groups(model), **how)
    if method == "averaging":
        return CurvaDion(toy.groups(model), gate=FixedPeriod(PERIOD), **how)
    delay = method == "delay"
    sync = QuantizedAverage(bits=2, delay=int(delay))
    return CurvaDion(toy.groups(model), wire_budget=budget(delay=delay), sync=sync, **how)


def budget(*, delay=False):
    """What pays for an opening at every other step."""
    sizes = [p.numel() for p in toy.model().parameters()]
    sent = message_bytes(sizes, bits=2) + (WORDS_BYTES if delay else MEETING_BYTES)
    return (OPENED_BY_BUDGET + 1e-6) * sent / (4 * sum(sizes))


def metered(rank, method):
    """Calls and payload by collective of 6 steps, and what a rank must send."""
    model = toy.model()
    optimizer = optimizer_of(method, model)
    wrapped = DistributedDataParallel(model)
    if method != "ddp":
        keep_gradients_local(wrapped)
    toy.train(wrapped, optimizer, range(24), rank)
    optimizer.state_dict()  # waits for what is under way
    with WireMeter() as meter:
        toy.train(wrapped, optimizer, range(24, 30), rank)
        optimizer.state_dict()
    return meter.by_collective, meter.total.sent


def modelled(method):
    shapes = Shapes.of_groups(toy.groups(toy.model()))
    if method == "averaging":
        return cost_model.averaging(shapes, PERIOD)
    if method in ("wire_budget", "delay"):
        delay = method == "delay"
        share, how = budget(delay=delay), {"bits": Bits(2, 2), "delayed": delay}
        rate = cost_model.openings(shapes, share, **how)
        assert rate == pytest.approx(OPENED_BY_BUDGET, rel=1e-5)
        return cost_model.wire_budget(shapes, share, **how)
    return getattr(cost_model, method)(shapes)


@pytest.mark.parametrize("method", ["ddp", "dion", "averaging", "wire_budget", "delay"])
def test_a_step_sends_what_the_meter_counts(method):
    ranks = 3
    counted = distributed.run(ranks, metered, method)
    expected = modelled(method)
    sent = sum(sent for _, sent in counted) / ranks
    assert 6 * sum(t.sent(ranks) for t in expected) == pytest.approx(sent, rel=1e-5)
    assert {t.kind for t in expected} == set(counted[0][0])
    for t in expected:
        assert 6 * t.calls == pytest.approx(counted[0][0][t.kind].calls, rel=1e-5)
        payload = sum(by_kind[t.kind].bytes for by_kind, _ in counted) / ranks
        assert 6 * t.bytes == pytest.approx(payload, rel=1e-5)


LINK = Link(bandwidth=8e6, latency=0.5)  # a megabyte a second


@pytest.mark.parametrize(
    ("kind", "seconds"), [("all_reduce", 6 * 0.5 + 1.5 * 2), ("all_to_all", 3 * 0.5 + 0.75 * 2)]
)
def test_a_collective_takes_a_rings_time(kind, seconds):
    assert cost_model.collective_seconds(Traffic(kind, 1, 2e6), LINK, 4) == seconds


def test_communication_hides_behind_the_backward_pass_only():
    traffic = [Traffic("all_reduce", 1, 1e6), Traffic("all_gather", 1, 1e6)]

    def step(compute, overlap):
        return cost_model.step_seconds(compute, traffic, LINK, 2, overlap=overlap)

    assert step(3.0, 0.0) == 3.0 + (1.0 + 1.0) + (0.5 + 0.5)
    assert step(3.0, 1.0) == 3.0 + 3.0 - 2.0
    assert step(30.0, 1.0) == 30.0


RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "scaling"


def results(name):
    return json.loads((RESULTS / name).read_text("utf-8"))["records"]


def test_the_document_shows_the_results():
    setting, *found = results("model.json")
    (measured,) = results("link.json")
    document = modelled_steps.DOCUMENT.read_text("utf-8")
    shares = results("optimizer.json")
    default = modelled_steps.Setting()
    tables = modelled_steps.tables(default, found, shares, measured)
    assert modelled_steps.rewritten(document, tables) == document
    assert setting == {"setting": vars(default)}


def test_the_results_are_what_the_model_gives():
    _, *written = results("model.json")
    for old, new in zip(written, modelled_steps.records(modelled_steps.Setting()), strict=True):
        assert old == pytest.approx(new)
    shares = modelled_steps.optimizer_shares(modelled_steps.Setting())
    for old, new in zip(results("optimizer.json"), shares, strict=True):
        assert old["share_of_compute"] == pytest.approx(new["share_of_compute"])
        assert old["products"] == pytest.approx(new["products"])


def test_products_are_those_that_torch_counts():
    """Of a polar step in float32, which takes one pass where a GPU takes two."""
    m, n, iterations = 512, 384, 4
    x = torch.nn.Parameter(torch.randn(m, n))
    optimizer = Dion([x], direction="polar")
    x.grad = torch.randn(m, n)
    optimizer.step()
    with FlopCounterMode(display=False) as counted, ops.use_backend("torch"):
        optimizer.step()
    share = (1 + 128 / n) / 2
    one_pass = 2 * m * n * n * (share + 1) + (4 * iterations - 3) * 2 * n**3 * share
    assert counted.get_total_flops() == pytest.approx(one_pass, rel=1e-6)
    (two_passes,) = cost_model.polar_products(m, n).values()
    saved = (4 * iterations - 3) - (4 * iterations - 6)
    assert two_passes == one_pass + 2 * m * n * n * (share + 1) - saved * 2 * n**3 * share


# -------------------------------------------------------------------- inside a replica

SHAPES = [(24, 16), (16, 28), (20, 20)] * 2
INSIDE = {
    "owners": ({"direction": "polar"}, {}),
    "Gram matrices": ({"direction": "polar", "gather": "never"}, {"gather": False}),
    "Dion2": ({"direction": "dion2", "rank_fraction": 0.25}, {"kept": 0.25}),
    "low rank": ({"direction": "low_rank", "rank_fraction": 0.25}, None),
}


@pytest.mark.parametrize("name", INSIDE)
def test_shards_send_what_the_meter_counts(name):
    options, how = INSIDE[name]
    with inside_replica.ranks(2):
        if how is None:
            wanted = inside_replica.low_rank(SHAPES, 2, 0.25).sent
        else:
            wide = {"sent": torch.float32, "summed": torch.float32, "device": "cpu"}
            wanted = inside_replica.polar(SHAPES, 2, **wide, **how).sent
    distributed.run(2, sent_inside, options, wanted)


def sent_inside(rank, options, wanted):
    mesh = init_device_mesh("cpu", (2,))
    X = [nn.Parameter(shard(weights(shape), ("0",), mesh)) for shape in SHAPES]
    optimizer = Dion(X, **options)
    for step in range(2):  # the first also verifies the set-up
        for x, shape in zip(X, SHAPES, strict=True):
            x.grad = shard(gradient(shape, step, 0), ("0",), mesh)
        with WireMeter() as meter:
            optimizer.step()
    meeting = Traffic("all_reduce", 1, MEETING_BYTES).sent(2)
    each = distributed.gathered(meter.total.sent - meeting)
    assert sum(each) / 2 == pytest.approx(wanted)


def test_inside_a_replica_ours_send_no_more_than_microsofts_muon():
    found = results("inside.json")
    document = inside_replica.DOCUMENT.read_text("utf-8")
    assert inside_replica.table(found) in document
    for old, new in zip(found, inside_replica.records(), strict=True):
        assert old == pytest.approx(new)
    sent = {(r["model"], r["ranks"], r["method"]): r["bytes"] for r in found}
    for model, ranks, _ in sent:
        assert sent[model, ranks, "Dion, polar"] <= 1.01 * sent[model, ranks, "Microsoft's Muon"]
