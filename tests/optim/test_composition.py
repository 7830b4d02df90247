"""Gate, sync and group keys compose: each is given by itself, shown, and nobody else's."""

from __future__ import annotations

import itertools
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
)
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
    "plain": {"momentum_rule": "plain", "look_ahead": 1.0, "rank_fraction": 0.5},
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
    """Of each combination: openings, and the drift and weights after a synchronisation."""
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
    ({}, "RMMC(threshold=0.3)", "LowRank(average_weights=True)", 0.25, "column_normalized", 0.0),
    (
        {"wire_budget": 0.1}, "ByteBudget(share=0.1, by='period')",
        "QuantizedAverage(bits=3, fragments=1, align_momentum=True, polar_correction=True, "
        "residual_dtype='bfloat16', delay=0, spectrum_decay=0.8)",
        1.0, "qr", None,
    ),
    (
        {"gate": FixedPeriod(6), "sync": QuantizedAverage(), "rank_fraction": 0.5},
        "FixedPeriod(period=6)",
        "QuantizedAverage(bits=2, fragments=1, align_momentum=True, polar_correction=True, "
        "residual_dtype='bfloat16', delay=0, spectrum_decay=0.8)",
        0.5, "qr", 3.9,
    ),
    (
        {"gate": FixedPeriod(25), "sync": QuantizedAverage(bits=4, fragments=3), "look_ahead": 0.5},
        "FixedPeriod(period=25)",
        "QuantizedAverage(bits=4, fragments=3, align_momentum=True, polar_correction=True, "
        "residual_dtype='bfloat16', delay=0, spectrum_decay=0.8)",
        1.0, "qr", 0.5,
    ),
    (
        {"sync": CodedGradients()}, "AlwaysOpen()",
        "CodedGradients(bits=3, residual_dtype='bfloat16')", 1.0, "qr", 2.0,
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "gate", "sync", "rank_fraction", "right_factor", "look_ahead"), RESOLVED
)
def test_repr_shows_the_choices_and_what_none_stands_for(
    options, gate, sync, rank_fraction, right_factor, look_ahead
):
    text = repr(CurvaDion([matrix()], max_local_steps=None, **options))
    assert f"\n    gate: {gate}\n" in text
    assert f"\n    sync: {sync}\n" in text
    assert f"    rank_fraction: {rank_fraction}\n" in text
    assert f"    right_factor: {right_factor}\n" in text
    (shown,) = re.findall(r"    look_ahead: (.*)\n", text)
    assert float(shown) == look_ahead if look_ahead is not None else float(shown) > 0
    assert "None" not in text.replace("local_lr: None", "").replace("_dtype: None", "")


# ---------------------------------------------------------------- what does not compose


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sync": LowRank}, r"sync=<class .*LowRank'> must be a Sync.*got ABCMeta"),
        ({"gate": 0.3, "sync": LowRank()}, r"gate=0\.3 must be a Gate"),
    ],
    ids=repr,
)
def test_wrong_types_name_the_argument(options, text):
    with pytest.raises(TypeError, match=text):
        CurvaDion([matrix()], **options)


@pytest.mark.parametrize("budget", [{"wire_budget": 0.1}, {"gate": ByteBudget(0.1)}], ids=repr)
@pytest.mark.parametrize("sync", [LowRank(average_weights=False)])
def test_a_budget_needs_a_sync_that_knows_its_costs(budget, sync):
    text = rf"sync=.*{type(sync).__name__}.*with gate=ByteBudget\(share=0\.1.*QuantizedAverage\(\)"
    with pytest.raises(ValueError, match=text):
        CurvaDion([matrix()], sync=sync, **budget)


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
        {"rank_fraction": 0.5, "momentum_dtype": "bfloat16", "q_dtype": "bfloat16"},
    ],
    ids=repr,
)
def test_dion_is_curvadion_with_a_gate_that_is_always_open(options):
    for (weights, states, reports), (again, states_again, reports_again) in distributed.run(
        2, trajectories, options
    ):
        toy.assert_bitwise_equal(weights, again)
        toy.assert_bitwise_equal(states, states_again)
        assert reports == reports_again
        assert {report.reason for report in reports} == {"always"}
