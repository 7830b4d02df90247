"""Simulated replicas go where real processes go, for the bytes that these send."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median
from unittest import mock

import pytest
import torch

from benchmarks.common.tasks import SIZES, Task
from benchmarks.losses import train_processes
from benchmarks.losses.claim import compared, upper_tail
from benchmarks.losses.planned_runs import Run
from benchmarks.losses.simulation.rivals import OuterMomentum, OuterStep
from benchmarks.losses.simulation.training import (
    SYNCHRONISED,
    TailAverage,
    Training,
    train,
    trained,
)
from benchmarks.losses.simulation.world import World
from curvadion import WireMeter
from curvadion.sync.coded_mean import RESIDUAL_DTYPES
from support.references.tolerance import Rounding, assert_within, worst
from support.runs import distributed

pytestmark = pytest.mark.numeric
STEPS, REPLICAS = 16, 2
TINY = Task(
    layers=1, dim=16, heads=2, context=16, batch_size=4, data_bytes=60_000, validation_tokens=256
)
# Roundings move a few codes to their neighbours.
TOLERANCE = {"ours": 0.02, "coded_gradients": 0.005}
OURS = {"lr": 0.02, "budget": 0.08, "bits": 8, "steps": 8}
SIMULATED = (*SYNCHRONISED, "diloco", "powersgd", "coded_gradients")  # under the names of the cases
# The real method of a simulated one, and its settings.
REAL = {
    "adamw": ("adamw", {"lr": 0.01}, {}),
    "muon with a look-ahead of 2": (
        "muon",
        {"lr": 0.02, "look_ahead": 2.0, "steps": 8},
        {"look_ahead": 2.0},
    ),
    **{
        direction: (
            "muon",
            {"lr": 0.02, "look_ahead": 2.0, "steps": 8},
            {"look_ahead": 2.0, "direction": direction},
        )
        for direction in ("normuon", "dion2", "nordion2")
    },
    "diloco": ("diloco_adamw", {"lr": 0.01, "budget": 3 / 16, "bits": 0}, {"period": 6}),
    "powersgd": ("powersgd", {"lr": 0.01, "budget": 0.3}, {"rank": 2}),
    "ours": ("ours", OURS, {"wire_budget": 0.08, "bits": 8}),
    "1 bit up, 2 down": (
        "ours",
        {**OURS, "budget": 0.03, "bits": 2, "up": 1, "steps": 6},
        {"wire_budget": 0.03, "bits": (1, 2)},
    ),
    "delayed": ("ours", {**OURS, "delay": 2}, {"wire_budget": 0.08, "bits": 8, "delay": 2}),
    "in fragments, spectra over openings": (
        "ours",
        {**OURS, "fragments": 3, "spectrum_decay": 0.8},
        {"wire_budget": 0.08, "bits": 8, "parts": 3, "spectra": 0.8},
    ),
    "coded_gradients": (
        "coded_gradients",
        # Codes at every step: roundings are a thousand times as large after 16 steps as after 4.
        {"lr": 0.02, "budget": 0.4, "bits": 8, "steps": 4},
        {"bits": 8},
    ),
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(SIZES, "tiny", TINY)


def unit_columns(*shape, **_):
    """The first right factors of Dion and PowerSGD, here and there."""
    return torch.eye(*shape[-2:]).repeat(*shape[:-2], 1, 1)


def really_trained(rank, run):
    """Module-level, for the workers: the weights by name, and what was sent."""
    trial = train_processes.Trial(run, torch.device("cpu"))  # DDP sends the weights
    float32 = dict.fromkeys(RESIDUAL_DTYPES, torch.float32)  # as simulated residuals
    with (
        mock.patch("torch.randn", unit_columns),
        mock.patch.dict(RESIDUAL_DTYPES, float32),
        WireMeter() as meter,
    ):
        for step in range(run.steps):
            trial.step(step)
        trial.method.finish()
    weights = {name: X.detach().clone() for name, X in trial.model.named_parameters()}
    return weights, meter.total.sent


@pytest.mark.parametrize("kind", REAL)
def test_a_simulation_follows_real_processes(kind):
    method, own, settings = REAL[kind]
    own = {"steps": STEPS, **own}
    steps = own["steps"]
    run = Run("tiny", TINY, method, own["lr"], 0, steps, dict(settings), replicas=REPLICAS)
    (real, sent), *_ = distributed.run(REPLICAS, really_trained, run)
    training = Training(
        next((name for name in SIMULATED if kind.startswith(name)), "ours"),
        size="tiny",
        batch_size=TINY.batch_size,
        replicas=REPLICAS,
        **own,
    )
    world = World(training.task, 0, REPLICAS)
    with mock.patch("torch.randn", unit_columns):
        result = trained(training, world)
    tolerance = TOLERANCE.get(training.method)
    one_bit = training.up == 1
    errors = {}
    for name, X in result.own.X.items():
        moved = (real[name] - world.initial[name]).norm()
        errors[name] = float((X[0] - real[name]).norm() / moved)
        if tolerance is None:
            condition = float(real[name].norm() / moved)
            amplifying = 1 if "adamw" in method else steps
            rounding = Rounding(torch.float32, TINY.dim, condition, amplifying)
            assert_within(errors[name], rounding, what=name)
    if tolerance is not None:
        # A code of 1 bit that rounding moves is a tenth of a small matrix's movement. Most matrices
        # have no such code, and none has more than three.
        error = median(errors.values()) if one_bit else worst(errors.values())
        assert error < tolerance, errors
        assert worst(errors.values()) < 0.3, errors
    if training.method not in SYNCHRONISED:
        dense = 4 * steps * world.parameters * 2 * (REPLICAS - 1) / REPLICAS
        # Real processes also send checks at the first step. Some owners have one block more than
        # an equal share. Both count for more where openings are small.
        assert result.share == pytest.approx(sent / dense, rel=0.04 if one_bit else 0.03)


def test_rivals_keep_to_their_budget():
    world = World(TINY, 0, REPLICAS)
    for steps, budget, period in ((16, 3 / 16, 6), (16, 2 / 16, 8), (640, 0.01, 107)):
        outer = OuterMomentum.within(budget, steps, OuterStep(1), world)
        assert outer.settings.period == period
    with pytest.raises(ValueError, match="do not reach"):
        OuterMomentum.within(0.01, 16, OuterStep(1), world)


def test_replicas_split_an_uneven_batch():
    """Of five sequences the second of two replicas reads three."""
    world = World(TINY, 0, REPLICAS, sequences=5)
    assert world.counts == [2, 3]
    generator = torch.Generator().manual_seed(1)
    X = {
        name: x + 0.1 * torch.randn(REPLICAS, *x.shape, generator=generator)
        for name, x in world.initial.items()
    }
    gradients = world.gradients(3, X)
    [starts] = world.batches.starts(3, 0)
    for replica, own in enumerate((starts[:2], starts[2:])):
        tokens, targets = world.batches.split.batch(own.tolist(), TINY.context)
        model = TINY.model()
        model.load_state_dict({name: x[replica] for name, x in X.items()}, strict=False)
        model(tokens, targets).backward()
        for name, parameter in model.named_parameters():
            rounding = Rounding(torch.float32, TINY.dim, 1.0, TINY.context)
            error = (gradients[name][replica] - parameter.grad).norm() / parameter.grad.norm()
            assert_within(float(error), rounding, what=name)


def test_a_character_model_has_tied_weights_and_trains():
    task = replace(TINY, characters=True, dropout=0.1)
    SIZES["tiny"] = task
    common = {"size": "tiny", "batch_size": 4, "replicas": REPLICAS, "steps": 30}
    world = World(task, 0, REPLICAS)
    assert "head.weight" not in world.initial
    before = world.loss({name: x[None] for name, x in world.initial.items()})
    for method in ("adamw", "replicated_adamw", "muon"):
        training = Training(method, 0.01, budget=0.2 if "repl" in method else 0.0, **common)
        assert world.loss(trained(training, world).weights) < 0.8 * before


def test_the_average_of_the_last_weights():
    """Compare with the sum that its recursion stands for."""
    tail = TailAverage(0.6, 0.75, steps=25)
    assert tail.first == 5
    values = [torch.tensor([float(step**2)], dtype=torch.float64) for step in range(25)]
    for step, value in enumerate(values):
        tail.update(step, {"x": value})
    ages = range(24 - 5)
    expected = sum(0.25 * 0.75**age * float(values[24 - age]) for age in ages)
    expected = 0.4 * float(values[24]) + 0.6 * (expected + 0.75**19 * float(values[5]))
    assert float(tail.blended({"x": values[24]})["x"]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("overrun", "last"), [(0.0, 1 / 40), (0.06, 7 / 46)])
def test_rates_fall_over_the_last_steps(overrun, last):
    training = Training(
        "muon", 0.02, steps=100, warmdown=0.4, overrun=overrun, elementwise_warmdown=0.2
    )
    matrices, others = zip(*(training.rates(step) for step in range(100)), strict=True)
    assert matrices[60] == others[80] == 1.0
    assert matrices[61] < 1.0
    assert others[81] < 1.0
    assert matrices[99] == pytest.approx(last)


def test_a_gap_its_standard_error_and_its_probability():
    """Of the seeds that both have; Student's t at 9 degrees of freedom from a table."""
    row = compared({0: 1.02, 1: 2.02, 2: 1.03}, {0: 1.0, 1: 2.0, 3: 5.0}, share=0.01)
    assert row.seeds == 2
    assert row.mean == pytest.approx(1.52)
    assert row.gap == pytest.approx(1.5)
    assert row.gap_error == pytest.approx(0.5)
    assert row.p == pytest.approx(2 * math.atan2(1.0, 3.0) / math.pi, rel=1e-3)
    assert upper_tail(4.297, 9) == pytest.approx(0.001, rel=2e-3)
    assert compared({0: 1.0, 1: math.inf}, {0: 1.0, 1: 1.0}, share=0.01).p is None


def test_a_run_that_diverges_is_recorded():
    training = Training("muon", 1e6, size="tiny", batch_size=4, replicas=2, steps=8)
    record = train(replace(training, evaluate_every=1, weight_decay=1.0))
    assert record["loss"] is None
    assert record["curve"][-1] == (8, None)
