"""Gate, sync and group keys compose: each is given by itself, shown, and nobody else's."""

import itertools
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from curvadion import (
    RMMC,
    AlwaysOpen,
    ByteBudget,
    CodedGradients,
    CurvaDion,
    Dion,
    FixedPeriod,
    LowRank,
    Muon,
    QuantizedAverage,
)
from curvadion.update.dion2 import Dion2
from curvadion.update.registry import DIRECTIONS, register
from support.runs import distributed, toy
from support.runs.drifts import drift
from support.runs.pairwise import all_pairs

GATES = {
    "rmmc": lambda: RMMC(0.3),
    "period": lambda: FixedPeriod(2),
    "budget": lambda: ByteBudget(0.1),
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


def impossible(gate, sync):
    """A budget needs a sync that knows what an opening sends, and some need every step."""
    if sync == "gradients":
        return gate != "always"
    return gate == "budget" and sync in ("low rank", "unaveraged")


# Every pair of two of them: of budgets and the syncs that they can pay for, and of the others.
OTHERS = [sync for sync in SYNCS if sync != "gradients"]
CHOICES = [
    *all_pairs([gate for gate in GATES if gate != "budget"], OTHERS, list(KEYS)),
    *all_pairs(["always"], ["gradients"], list(KEYS)),
    *all_pairs(["budget"], ["quantized", "spectra", "fragments"], list(KEYS)),
]


@distributed.on_ranks(2, timeout=110)
def test_every_gate_goes_with_every_sync_and_every_direction(rank):
    for gate, sync, keys in CHOICES:
        model, choices = toy.model(), (gate, sync, keys)
        optimizer = CurvaDion(
            toy.groups(model),
            replicas=dist.group.WORLD,
            lr=0.02,
            gate=GATES[gate](),
            sync=SYNCS[sync](),
            **KEYS[keys],
        )
        reports = toy.train(model, optimizer, range(4), rank)
        opened = [report.gate_open for report in reports]
        optimizer.synchronize()
        assert drift(optimizer) == 0.0, choices
        assert all(x.isfinite().all() for x in model.parameters()), choices
        one, other = distributed.gathered((opened, toy.weights(model)))
        assert one[0] == other[0], choices
        toy.assert_bitwise_equal(one[1], other[1])
        if gate == "always":
            assert all(opened), choices
        if gate == "period":
            assert opened == [False, True] * 2, choices
    possible = {(g, s) for g, s in itertools.product(GATES, SYNCS) if not impossible(g, s)}
    assert {(gate, sync) for gate, sync, _ in CHOICES} == possible


def test_repr_shows_the_choices_and_what_none_stands_for():
    gate, sync = FixedPeriod(6), QuantizedAverage(delay=1)
    text = repr(CurvaDion([matrix()], gate=gate, sync=sync))
    shown = {"gate": gate, "sync": sync, "rank_fraction": 1.0, "right_factor": "qr"}
    for key, value in shown.items():
        assert f"\n    {key}: {value}\n" in text
    assert "delay=1" in text and "period=6" in text
    (look_ahead,) = re.findall(r"    look_ahead: (.*)\n", text)
    assert float(look_ahead) > 0


@pytest.mark.parametrize(
    ("options", "direction"), [({"wire_budget": 0.5}, "polar"), ({"threshold": 0.3}, "low_rank")]
)
def test_repr_and_the_first_report_say_the_direction(options, direction):
    model = toy.model()
    optimizer = CurvaDion(toy.groups(model), replicas="single", **options)
    assert f"\n    direction: {direction}\n" in repr(optimizer)
    [report] = toy.train(model, optimizer, range(1))
    assert report.directions == {direction: 2, "adamw": 4}


@pytest.mark.parametrize("direction", ["polar", "normuon"])
def test_repr_shows_what_has_an_effect(direction):
    groups = [
        {"params": [matrix()], "direction": direction},
        {"params": [matrix()], "algorithm": "adamw", "weight_decay": 0.0, "swa_lr": 0.1},
        {"params": [matrix()], "algorithm": "lion"},
    ]
    matrices, adamw, lion = repr(Dion(groups, lr=0.1)).split("Parameter Group ")[1:]
    for key in ("betas", "eps"):
        assert (f"    {key}: " in matrices) == (direction == "normuon")
    assert "look_ahead: 0" in matrices and "newton_schulz_steps: 4" in matrices
    shown = ["algorithm: adamw", "betas: (0.9, 0.95)", "eps: 1e-08", "lr: 0.1"]
    shown += ["state_dtype: None", "swa_lr: 0.1"]
    assert adamw.split("\n    ")[1:] == [*shown, "weight_decay: 0.0\n\n"]
    shown = ["algorithm: lion", "betas: (0.9, 0.95)", "lr: 0.1", "state_dtype: None"]
    assert lion.split("\n    ")[1:6] == [*shown, "weight_decay: 0.01"]


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"ns_coefficients": 3.0}, ValueError, r"ns_coefficients=3.0 must be"),
        ({"ns_coefficients": (2.0, -1.5, 0.5)}, ValueError, r"ns_coefficients=\(2.0, -1.5, 0.5\)"),
        ({"eps": 1e-8}, ValueError, "eps=1e-08 must be 1e-07"),
        ({"adjust_lr_fn": "spectral"}, ValueError, "adjust_lr_fn='spectral' must be one of"),
        ({"ns_steps": 99}, ValueError, "ns_steps=99 must be <= 20"),
        ({"nesterov": 1}, TypeError, "nesterov=1 must be True or False"),
        ({"momentum": 1.0}, ValueError, "momentum=1.0 must be in"),
        ({"direction": "low_rank"}, TypeError, "Muon sets direction to 'polar': use Dion"),
        ({"look_ahead": 0.5}, TypeError, "Muon sets look_ahead to"),
        ({"wire_budget": 0.1}, TypeError, "unexpected keyword argument 'wire_budget'"),
    ],
)
def test_muon_refuses_what_it_would_not_do(settings, kind, message):
    with pytest.raises(kind, match=message):
        Muon([matrix()], **settings)


@distributed.on_ranks(2)
def test_muon_is_dion_with_torchs_settings(rank):
    """Between replicas, with groups of a model, copied and saved."""
    models = [toy.model(), toy.model()]
    replicas = dist.group.WORLD
    muon = Muon(toy.groups(models[0]), 0.02, 0.1, 0.95, replicas=replicas, betas=(0.8, 0.9))
    options = {"newton_schulz": "muon", "newton_schulz_steps": 5, "update_scale": "original"}
    options |= {"direction": "polar", "weight_decay": 0.1, "betas": (0.8, 0.9)}
    dion = Dion(toy.groups(models[1]), lr=0.02, look_ahead=1 / 0.95, replicas=replicas, **options)
    for model, optimizer in zip(models, (muon, dion), strict=True):
        toy.train(model, optimizer, range(3), rank)
    toy.assert_bitwise_equal(*map(toy.weights, models))
    toy.assert_bitwise_equal(*distributed.gathered(toy.weights(models[0])))
    dion.load_state_dict(muon.state_dict())


@pytest.mark.parametrize(
    ("passed", "explicit"),
    [
        ({}, {"gate": RMMC(0.3), "local_step": "gradient"}),
        (
            {"threshold": 0.2, "local_step": "dion", "lr": 0.01, "max_local_steps": 2},
            {"gate": RMMC(0.2), "local_step": "dion", "lr": 0.01, "max_local_steps": 2},
        ),
    ],
)
@distributed.on_ranks(2)
def test_the_papers_method_is_the_explicit_construction(rank, passed, explicit):
    models = [toy.model(), toy.model()]
    paper = CurvaDion.paper(toy.groups(models[0]), replicas=dist.group.WORLD, **passed)
    explicit = {"replicas": dist.group.WORLD, "sync": LowRank(), **explicit}
    other = CurvaDion(toy.groups(models[1]), **explicit)
    assert repr(paper) == repr(other) and paper.choices == other.choices
    reports = [
        toy.train(model, optimizer, range(8), rank)
        for model, optimizer in zip(models, (paper, other), strict=True)
    ]
    assert reports[0] == reports[1]
    assert {report.gate_open for report in reports[0]} == {True, False}
    toy.assert_bitwise_equal(*map(toy.weights, models))


def test_the_papers_method_passes_arguments_through_and_has_one_gate():
    optimizer = CurvaDion.paper([matrix()], sync=LowRank(average_weights=False), rank_fraction=0.5)
    assert not optimizer.sync.average_weights
    assert optimizer.param_groups[0]["rank_fraction"] == 0.5
    with pytest.raises(ValueError, match=r"threshold=0\.3 and wire_budget=0\.1"):
        CurvaDion.paper([matrix()], wire_budget=0.1)


def test_a_direction_of_ones_own_is_registered_with_its_feedback(monkeypatch):
    monkeypatch.setitem(DIRECTIONS, "mine", Dion2())  # removes it at the end
    register("mine", Dion2())
    models = []
    for direction in ("mine", "dion2"):
        models.append(model := toy.model())
        how = {"direction": direction, "rank_fraction": 0.5, "replicas": "single"}
        toy.train(model, CurvaDion(toy.groups(model), threshold=0.3, **how), range(3))
    assert all(map(torch.equal, *(model.parameters() for model in models)))


def test_wrong_types_name_the_argument():
    with pytest.raises(TypeError, match=r"sync=<class .*LowRank'> must be a Sync"):
        CurvaDion([matrix()], threshold=0.3, sync=LowRank)
    with pytest.raises(TypeError, match=r"gate=0\.3 must be a Gate"):
        CurvaDion([matrix()], gate=0.3)


def test_a_budget_needs_a_sync_that_knows_its_costs():
    text = r"gate=ByteBudget\(share=0\.1.*QuantizedAverage\(\), not LowRank"
    with pytest.raises(ValueError, match=text):
        CurvaDion([matrix()], sync=LowRank(), wire_budget=0.1)


def test_only_one_gate():
    with pytest.raises(ValueError, match=r"each is a gate; pass one of them"):
        CurvaDion([matrix()], threshold=0.1, gate=ByteBudget(0.1))
