"""NorMuon where products are float16, as on a GPU: rows without gradients, large factors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from curvadion import Dion
from curvadion.layout import exchange
from curvadion.update import newton_schulz, polar
from curvadion.update.normuon import ROW_SECOND_MOMENT
from support.references.polar_reference import PolarReference
from support.references.tolerance import Rounding, assert_close
from support.runs.pairwise import all_pairs
from support.runs.seeded import gradient, weights

pytestmark = pytest.mark.numeric

SHAPES = [(64, 48), (48, 64), (40, 40)]
DIRECTIONS = {"normuon": {}, "nordion2": {"rank_fraction": 0.5}}
ROW = 7


@pytest.fixture
def half(monkeypatch):
    for module in (newton_schulz, polar, exchange):
        if hasattr(module, "dtype_of_products"):
            monkeypatch.setattr(module, "dtype_of_products", lambda rows: torch.float16)


def stepped(shape, direction, steps, dead=lambda step: True, **options):
    """A weight and its optimizer after steps; dead: when row ROW has no gradient."""
    x = nn.Parameter(weights(shape))
    optimizer = Dion([x], lr=0.02, weight_decay=0.0, direction=direction, **options)
    for step in range(steps):
        x.grad = gradient(shape, step, 0)
        if dead(step):
            x.grad[ROW] = 0
        optimizer.step()
    return x, optimizer


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_a_row_that_never_has_a_gradient_does_not_move(half, shape, direction, eps):
    x, _ = stepped(shape, direction, 3, eps=eps, **DIRECTIONS[direction])
    assert torch.isfinite(x).all()
    assert torch.equal(x[ROW], weights(shape)[ROW])
    assert not torch.equal(x, weights(shape))


@pytest.mark.parametrize(
    ("shape", "eps", "v", "left"),
    all_pairs(SHAPES, [1e-8, 0.0], [0.0, 1e-45, 1e-12], [0.0, 1e-9]),
)
def test_a_row_whose_second_moment_has_died_out_does_not_move(half, shape, eps, v, left):
    """What is left of its momentum is by then below the smallest number of float16, or zero."""
    x, optimizer = stepped(shape, "normuon", 2, lambda step: False, eps=eps)
    before = x.detach().clone()
    state = optimizer.state[x]
    state[ROW_SECOND_MOMENT][ROW] = v
    state["momentum"][ROW] = left
    x.grad = gradient(shape, 2, 0)
    x.grad[ROW] = 0
    optimizer.step()
    assert torch.isfinite(x).all() and torch.isfinite(state[ROW_SECOND_MOMENT]).all()
    assert torch.equal(x[ROW], before[ROW])


def test_a_row_that_is_tiny_moves_as_others_do(half):
    """Its factor alone is larger than what float16 holds."""
    shape = SHAPES[0]
    x = nn.Parameter(weights(shape))
    optimizer = Dion([x], lr=1.0, weight_decay=0.0, direction="normuon")
    x.grad = gradient(shape, 0, 0)
    x.grad[ROW] *= 1e-7
    optimizer.step()
    moved = (x.detach() - weights(shape)).norm(dim=1)
    assert torch.isfinite(moved).all()
    assert 0.05 < moved[ROW] / moved.median() < 20


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_steps_in_half_precision_are_about_those_of_the_equations(half, shape):
    reference = PolarReference(weights(shape), 1, direction="normuon")
    x = nn.Parameter(weights(shape))
    optimizer = Dion([x], direction="normuon", newton_schulz_steps=14)
    for step in range(4):
        G = gradient(shape, step, 0)
        x.grad = G
        reference.step([G], True)
        optimizer.step()
    moved = (reference.X[0] - weights(shape).double()).norm()
    assert_close(x, reference.X[0], Rounding(torch.float16, terms=48), scale=float(moved))
