"""When replicas talk: what each gate sees, decides and remembers, the same on all of them."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from curvadion import RMMC, AlwaysOpen, ByteBudget, CurvaDion, FixedPeriod, Gate, LowRank
from support.references.tolerance import Rounding, assert_close
from support.runs import distributed

pytestmark = pytest.mark.numeric

SHAPES = {"tall": (10, 4), "wide": (4, 9), "square": (6, 6)}


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [
        (name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
        for name, shape in SHAPES.items()
    ]


def give_gradients(X, step, rank=0):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    for _, x in X:
        x.grad = torch.randn(x.shape, generator=generator).to(x.dtype)


RULES = {
    "dion": {"local_step": "dion"},
    "gradient": {"local_step": "gradient", "local_lr": 0.01},
    "plain dion": {"local_step": "dion", "momentum_rule": "plain", "momentum": 0.8},
    "plain gradient": {"local_step": "gradient", "momentum_rule": "plain"},
    "qr": {"right_factor": "qr", "rank_fraction": 0.5, "momentum": 0.5},
    "no averaging": {"sync": LowRank(average_weights=False)},
}


def momentum(optimizer, x):
    held = optimizer.state[x].get("momentum") if x in optimizer.state else None
    return torch.zeros_like(x, dtype=torch.float64) if held is None else held.double()


# Changes are small differences of norms, relative to these; signals are float32.
ROUNDINGS = {
    torch.float64: Rounding(torch.float32),
    torch.float32: Rounding(torch.float32, terms=40, condition=4),
    torch.bfloat16: Rounding(torch.bfloat16),
}


@pytest.mark.parametrize(
    ("rule", "threshold", "dtype"),
    [
        ("dion", 0.5, torch.float32),
        ("plain dion", 0.5, torch.float32),
        ("gradient", 0.5, torch.float32),
        ("no averaging", 0.5, torch.float32),
        ("qr", 0.45, torch.float64),
        ("plain gradient", 0.45, torch.bfloat16),
    ],
)
@distributed.on_ranks(2)
def test_rmmc_is_by_its_definition_the_largest_of_all_replicas(rank, rule, threshold, dtype):
    X, rounding, opened = parameters(dtype), ROUNDINGS[dtype], set()
    optimizer = CurvaDion(X, replicas=dist.group.WORLD, threshold=threshold, **RULES[rule])
    decay = RULES[rule].get("momentum", 0.95) if "plain" in rule else 1.0
    for step in range(8):
        give_gradients(X, step, rank)
        own = {}
        for name, x in X:
            M = momentum(optimizer, x)
            after = (decay * M + x.grad.double()).norm()
            x.grad, after = (None, M.norm()) if step == 6 else (x.grad, after)
            own[name] = ((after - M.norm()).abs() / M.norm()).item()
        optimizer.step()
        report, each = optimizer.report, distributed.gathered(own)
        by_matrix = {name: max(changes[name] for changes in each) for name in SHAPES}
        largest = max(by_matrix.values())
        if step:
            scale = max(1.0, largest)
            assert_close(report.rmmc, largest, rounding, scale=scale)
            assert_close(by_matrix[report.rmmc_parameter], largest, rounding, scale=scale)
        else:
            assert report.rmmc == math.inf
        assert distributed.gathered(report) == [report] * 2
        assert report.gate_open == (report.rmmc > threshold)
        opened.add(report.gate_open)
        for _, x in X:
            kept = optimizer.state[x]["momentum_norm"]
            assert_close(kept, momentum(optimizer, x).norm(), rounding)
            assert kept.dtype == torch.promote_types(dtype, torch.float32)
    assert opened == {True, False}


def test_signal_of_rmmc():
    before = torch.tensor([2.0, 2.0, 0.0, 0.0, 4.0])
    after = torch.tensor([3.0, 1.0, 1.0, 0.0, 4.0])
    assert RMMC(0.1).signal(before, after).tolist() == [0.5, 0.5, math.inf, 0.0, 0.0]


def gate_history(steps=24, **arguments):
    X = parameters()
    optimizer = CurvaDion(X, **arguments)
    history = []
    for step in range(steps):
        give_gradients(X, step)
        optimizer.step()
        history.append((optimizer.report.gate_open, optimizer.report.reason))
    return history


def open_steps(history):
    """Numbers, from 1, of the steps at which the gate was open."""
    return [i for i, (is_open, _) in enumerate(history, start=1) if is_open]


@pytest.mark.parametrize(
    ("arguments", "steps", "reasons"),
    [
        ({"gate": FixedPeriod(3)}, range(3, 25, 3), {"period"}),
        ({"gate": AlwaysOpen()}, range(1, 25), {"always"}),
        ({"threshold": math.inf, "max_local_steps": 4}, (5, 10, 15, 20), {"longest local run"}),
        ({"gate": FixedPeriod(9), "warmup_steps": 4}, (1, 2, 3, 4, 13, 22), {"warm-up", "period"}),
    ],
)
def test_when_and_why_replicas_synchronise(arguments, steps, reasons):
    history = gate_history(**arguments)
    assert open_steps(history) == list(steps)
    assert {reason for is_open, reason in history if is_open} == reasons
    assert all(reason == "closed" for is_open, reason in history if not is_open)


def test_the_longest_local_run_by_default_and_without_a_bound():
    assert open_steps(gate_history(steps=60, threshold=math.inf)) == [51]
    assert open_steps(gate_history(steps=61, gate=FixedPeriod(60), max_local_steps=None)) == [60]


def test_skipped_steps_neither_open_nor_prolong_a_run():
    X = parameters()
    optimizer = CurvaDion(X, gate=FixedPeriod(4))
    opened = []
    for step in range(12):
        give_gradients(X, step)
        if step in (1, 2, 6):
            X[0][1].grad.fill_(torch.inf)
        optimizer.step()
        opened.append(optimizer.report.gate_open)
        assert optimizer.report.skipped == (step in (1, 2, 6))
    assert [i for i, is_open in enumerate(opened, start=1) if is_open] == [6, 11]


def test_a_gate_is_asked_at_every_step_even_while_others_decide():
    signals = []

    class Asked(Gate):
        def signal(self, before, after):
            assert before.shape == after.shape == (3,)
            return after

        def opens(self, signal, local_steps):
            signals.append(signal)
            return False

    gate_history(steps=10, gate=Asked(), warmup_steps=5, max_local_steps=1)
    assert len(signals) == 10 and all(signal > 0 for signal in signals)


def test_optimizers_may_be_given_one_gate():
    """Each has a copy, whose costs are its own; another may still be assigned."""
    gate = ByteBudget(0.5)
    large = CurvaDion([nn.Parameter(torch.ones(64, 64))], gate=gate, max_local_steps=None)
    cost = large.gate.open_cost
    small = CurvaDion([nn.Parameter(torch.ones(5, 3))], gate=gate, max_local_steps=None)
    assert large.gate.open_cost == cost < small.gate.open_cost
    small.gate = other = FixedPeriod(2)
    assert small.gate is other


def test_a_gate_that_reads_no_momentum_needs_neither_a_signal_nor_a_reason():
    class Deaf(Gate):
        def opens(self, signal, local_steps):
            assert signal == 0.0
            return local_steps == 2

    gate = Deaf()
    assert gate.state_dict() == {}
    gate.load_state_dict({})
    history = gate_history(gate=gate)
    assert open_steps(history) == [*range(3, 25, 3)]
    assert {reason for is_open, reason in history if is_open} == {"gate"}
