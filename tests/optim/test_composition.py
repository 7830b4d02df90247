"""Gate, sync and group keys compose: each is given by itself, shown, and nobody else's."""

from __future__ import annotations

import copy
import itertools
import pickle
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distributed
import toy
from curvadion import (
    RMMC,
    AlwaysOpen,
    ByteBudget,
    CodedGradients,
    CurvaDion,
    Dion,
    FixedPeriod,
    LowRank,
    QuantizedAverage,
    Sync,
)
from curvadion.sync.base import Costs
from curvadion.sync.low_rank import low_rank_open_step
from pairwise import all_pairs

GATES = {
    "rmmc": lambda: RMMC(0.3),
    "period": lambda: FixedPeriod(3),
    "budget": lambda: ByteBudget(0.1),
    "budget by rmmc": lambda: ByteBudget(0.1, "rmmc"),
    "always": AlwaysOpen,
}
SYNCS = {
    "low rank": LowRank,
    "unaveraged": lambda: LowRank(average_weights=False),
    "quantized": QuantizedAverage,
    "spectra": lambda: QuantizedAverage(bits=4, spectrum_decay=0.8),
    "fragments": lambda: QuantizedAverage(bits=3, fragments=2, align_momentum=False),
    "gradients": CodedGradients,
}
KEYS = {
    "default": {},
    "gradient": {"local_step": "gradient", "local_lr": 0.01},
    "plain": {"momentum_rule": "plain", "nesterov": 1.0, "rank_fraction": 0.5},
}


def matrix():
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(6, 4))


# ---------------------------------------------------------------- every two of them together


def impossible(gate, sync):
    """A budget needs a sync that knows what an opening sends, and some need every step."""
    if sync == "gradients":
        return gate != "always"
    return gate.startswith("budget") and sync in ("low rank", "unaveraged")


# Every pair of two of them: of budgets and the syncs that they can pay for, and of the others.
BUDGETS = ["budget", "budget by rmmc"]
OTHERS = [sync for sync in SYNCS if sync != "gradients"]
CHOICES = [
    *all_pairs([gate for gate in GATES if gate not in BUDGETS], OTHERS, list(KEYS)),
    *all_pairs(["always"], ["gradients"], list(KEYS)),
    *all_pairs(BUDGETS, ["quantized", "spectra", "fragments"], list(KEYS)),
]


def train_all(rank):
    """Of each combination: gates, whether replicas can come together, and what they hold then."""
    found = {}
    for gate, sync, keys in CHOICES:
        model = toy.model()
        optimizer = CurvaDion(
            toy.groups(model), replicas=dist.group.WORLD, lr=0.02,
            gate=GATES[gate](), sync=SYNCS[sync](), **KEYS[keys],
        )  # fmt: skip
        reports = toy.train(model, optimizer, range(6), rank)
        opened = [report.gate_open for report in reports]
        optimizer.synchronize()
        found[gate, sync, keys] = (opened, optimizer.drift(), toy.weights(model))
    return found


def test_every_gate_goes_with_every_sync_and_every_direction():
    one, other = distributed.run(2, train_all, timeout=110)
    for choices, (opened, drift, weights) in one.items():
        assert opened == other[choices][0], choices
        assert drift == 0.0, choices
        assert all(torch.isfinite(tensor).all() for tensor in weights.values()), choices
        toy.assert_bitwise_equal(weights, other[choices][2])
    possible = {(g, s) for g, s in itertools.product(GATES, SYNCS) if not impossible(g, s)}
    assert {(gate, sync) for gate, sync, _ in one} == possible
    for (gate, sync, keys), (opened, *_) in one.items():
        if gate == "always":
            assert all(opened), (sync, keys)
        if gate == "period":
            assert opened == [False, False, True] * 2, (sync, keys)


# ---------------------------------------------------------------- what is shown

RESOLVED = [
    ({}, "RMMC(threshold=0.3)", "LowRank(average_weights=True)", 0.25, "column_normalized"),
    (
        {"sync": LowRank(average_weights=False), "gate": FixedPeriod(4)},
        "FixedPeriod(period=4)", "LowRank(average_weights=False)", 0.25, "column_normalized",
    ),
    (
        {"wire_budget": 0.1}, "ByteBudget(share=0.1, by='period')",
        "QuantizedAverage(bits=3, fragments=1, align_momentum=True, polar_correction=True, "
        "residual_dtype='bfloat16', delay=0, spectrum_decay=0.8)",
        1.0, "qr",
    ),
    (
        {"gate": ByteBudget(0.01, "rmmc")}, "ByteBudget(share=0.01, by='rmmc')",
        "QuantizedAverage(bits=2, fragments=1, align_momentum=True, polar_correction=True, "
        "residual_dtype='bfloat16', delay=0, spectrum_decay=0.8)",
        1.0, "qr",
    ),
    (
        {"wire_budget": 0.1, "sync": QuantizedAverage(3, fragments=3, polar_correction=False)},
        "ByteBudget(share=0.1, by='period')",
        "QuantizedAverage(bits=3, fragments=3, align_momentum=True, polar_correction=False, "
        "residual_dtype='bfloat16', delay=0, spectrum_decay=0.8)",
        1.0, "qr",
    ),
    (
        {"gate": FixedPeriod(2), "sync": QuantizedAverage(), "rank_fraction": 0.5},
        "FixedPeriod(period=2)",
        "QuantizedAverage(bits=2, fragments=1, align_momentum=True, polar_correction=True, "
        "residual_dtype='bfloat16', delay=0, spectrum_decay=0.8)",
        0.5, "qr",
    ),
    (
        {"sync": CodedGradients()}, "AlwaysOpen()",
        "CodedGradients(bits=3, residual_dtype='bfloat16')", 1.0, "qr",
    ),
    (
        {"wire_budget": 0.9, "sync": CodedGradients(residual_dtype="float32")},
        "ByteBudget(share=0.9, by='period')",
        "CodedGradients(bits=2, residual_dtype='float32')", 1.0, "qr",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("options", "gate", "sync", "rank_fraction", "right_factor"), RESOLVED)
def test_repr_shows_the_choices_and_what_none_stands_for(
    options, gate, sync, rank_fraction, right_factor
):
    text = repr(CurvaDion([matrix()], max_local_steps=None, **options))
    assert f"\n    gate: {gate}\n" in text
    assert f"\n    sync: {sync}\n" in text
    assert f"    rank_fraction: {rank_fraction}\n" in text
    assert f"    right_factor: {right_factor}\n" in text
    (nesterov,) = re.findall(r"    nesterov: (.*)\n", text)
    assert float(nesterov) >= 0
    assert (float(nesterov) > 0) == ("LowRank" not in sync)
    assert "None" not in text.replace("local_lr: None", "").replace("_dtype: None", "")


def test_repr_of_dion_shows_what_it_is_short_for():
    text = repr(Dion([matrix()]))
    assert text.startswith("Dion (")
    assert "gate: AlwaysOpen()" in text and "sync: LowRank(average_weights=True)" in text


def test_look_ahead_follows_the_period_between_agreements_on_a_weight():
    def look_ahead(**options):
        optimizer = CurvaDion([matrix()], max_local_steps=None, **options)
        return optimizer.param_groups[0]["nesterov"]

    for period, expected in ((1, 1.6), (6, 3.9), (25, 4.1)):
        assert look_ahead(gate=FixedPeriod(period), sync=QuantizedAverage()) == expected
    assert look_ahead(gate=FixedPeriod(6), sync=LowRank()) == 0.0
    assert look_ahead(gate=FixedPeriod(6), sync=QuantizedAverage(), nesterov=0.5) == 0.5


# ---------------------------------------------------------------- whose they are


def test_a_sync_given_to_two_optimizers_is_nobodys():
    sync = QuantizedAverage(fragments=2)
    x, y = [matrix(), matrix()], [matrix(), matrix()]
    first = CurvaDion(x, gate=FixedPeriod(2), sync=sync)
    second = CurvaDion(y, wire_budget=0.1, sync=sync)
    assert len({id(sync), id(first.sync), id(second.sync)}) == 3
    assert (first.sync.bits, second.sync.bits) == (2, 4)
    for each in x:
        each.grad = torch.ones_like(each)
    first.step()
    assert first.sync.fragments_apart == 2
    first.step()
    assert first.sync.next_fragment == 1
    for untouched in (sync, second.sync):
        assert (untouched.fragments_apart, untouched.next_fragment) == (0, 0)
    assert (sync.bits, repr(sync)) == (2, repr(QuantizedAverage(fragments=2)))


def test_copies_of_an_optimizer_take_the_choices_along():
    x = matrix()
    optimizer = CurvaDion([x], gate=FixedPeriod(3), sync=QuantizedAverage(bits=4))
    x.grad = torch.ones_like(x)
    optimizer.step()
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert repr(twin) == repr(optimizer)
        assert twin.sync is not optimizer.sync
        assert twin.progress.local_steps == twin.sync.fragments_apart == 1
        twin.synchronize()
        assert twin.progress.local_steps == twin.sync.fragments_apart == 0
        assert optimizer.progress.local_steps == optimizer.sync.fragments_apart == 1
        assert not (optimizer.apart or twin.apart)  # there is one replica


# ---------------------------------------------------------------- what does not compose


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sync": "quantized"}, r"sync='quantized' must be a Sync.*QuantizedAverage.*got str"),
        ({"sync": LowRank}, r"sync=<class .*LowRank'> must be a Sync.*got ABCMeta"),
        ({"sync": RMMC(0.3)}, r"sync=RMMC\(threshold=0\.3\) must be a Sync.*got RMMC"),
        ({"gate": "rmmc"}, r"gate='rmmc' must be a Gate.*got str"),
        ({"gate": LowRank()}, r"gate=LowRank\(average_weights=True\) must be a Gate.*got LowRank"),
        ({"gate": 0.3, "sync": LowRank()}, r"gate=0\.3 must be a Gate"),
    ],
    ids=repr,
)
def test_wrong_types_name_the_argument(options, text):
    with pytest.raises(TypeError, match=text):
        CurvaDion([matrix()], **options)


class Untold(Sync):
    """Takes the papers' step, and does not say what it costs."""

    def open_step(self, step):
        low_rank_open_step(step)


class Told(Untold):
    def prepare(self, sizes):
        return Costs(opening_bytes=sum(sizes))


@pytest.mark.parametrize("budget", [{"wire_budget": 0.1}, {"gate": ByteBudget(0.1)}], ids=repr)
@pytest.mark.parametrize("sync", [LowRank(), LowRank(average_weights=False), Untold()])
def test_a_budget_needs_a_sync_that_knows_its_costs(budget, sync):
    text = rf"sync=.*{type(sync).__name__}.*with gate=ByteBudget\(share=0\.1.*QuantizedAverage\(\)"
    with pytest.raises(ValueError, match=text):
        CurvaDion([matrix()], sync=sync, **budget)


def test_a_users_sync_that_tells_its_costs_goes_with_a_budget():
    x = nn.Parameter(torch.ones(32, 24))
    optimizer = CurvaDion([x], wire_budget=0.1, sync=Told(), replicas="single")
    x.grad = torch.ones_like(x)
    opened = []
    for _ in range(12):
        optimizer.step()
        opened.append(optimizer.report.gate_open)
    assert optimizer.gate.open_cost == pytest.approx(0.25 + 16 / (4 * x.numel()))
    # Half of what steps earn is kept back until it pays for one more opening.
    assert 0 < sum(opened) <= 12 * 0.1 / 0.25
    assert type(optimizer.sync) is Told


@pytest.mark.parametrize(
    "options",
    [
        {"gate": AlwaysOpen(), "wire_budget": 0.1},
        {"threshold": 0.1, "wire_budget": 0.1},
        {"threshold": 0.1, "gate": ByteBudget(0.1)},
    ],
    ids=repr,
)
def test_only_one_gate(options):
    with pytest.raises(ValueError, match=r"each is a gate; pass one of them"):
        CurvaDion([matrix()], sync=QuantizedAverage(), **options)


# ---------------------------------------------------------------- Dion is CurvaDion, always open


def trajectories(rank, options):
    """Weights, states and reports of both."""
    found = []
    for make, more in ((Dion, {}), (CurvaDion, {"gate": AlwaysOpen()})):
        model = toy.model()
        optimizer = make(toy.groups(model), replicas=dist.group.WORLD, **options, **more)
        reports = toy.train(model, optimizer, range(8), rank)
        found.append((toy.weights(model), toy.states(optimizer), reports))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": 1.0, "momentum_rule": "plain", "right_factor": "qr"},
        {"rank_fraction": 0.5, "momentum_dtype": "bfloat16", "q_dtype": "bfloat16"},
    ],
    ids=repr,
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_dion_is_curvadion_with_a_gate_that_is_always_open(ranks, options):
    for (weights, states, reports), (again, states_again, reports_again) in distributed.run(
        ranks, trajectories, options
    ):
        toy.assert_bitwise_equal(weights, again)
        toy.assert_bitwise_equal(states, states_again)
        assert reports == reports_again
        assert {report.reason for report in reports} == {"always"}


def test_curvadion_is_a_dion():
    assert issubclass(CurvaDion, Dion)
