"""One replica, gate always open: the update equals Dion's equations in float64.

Nothing here is sent in codes, which are all that C++ on the CPU has. test_triton.py has the Triton
kernels interpreted here.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from curvadion import CurvaDion, Dion, FixedPeriod
from support.references.operations import INTERPRETED
from support.references.polar_reference import reference_of
from support.references.reference import rank_of, relative_error
from support.references.tolerance import Rounding, assert_within, worst
from support.runs.pairwise import all_pairs

pytestmark = pytest.mark.numeric

SHAPES = {
    "tall": (48, 16),
    "wide": (16, 48),
    "square": (32, 32),
    "one row": (1, 24),
    "one column": (24, 1),
    "one element": (1, 1),
    "prime": (37, 23),
    "two": (2, 3),
}

# Sums over the longest side; the momenta are well conditioned along what is followed of them.
TEN_STEPS = Rounding(torch.float32, terms=48, steps=10)
# The interpreter is slow: what Q, M and X carry on to a next step suffices there.
STEPS = 3 if INTERPRETED else 10


def run(optimizer_class, shape, rank_fraction, *, steps=10, seed=0, dtype=torch.float32, **options):
    """Errors of X and M against the reference after some steps on random gradients."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
    optimizer = optimizer_class([X], rank_fraction=rank_fraction, **options)
    multiple = options.get("rank_multiple_of", 1)
    r = rank_of(rank_fraction, shape, multiple)
    reference = reference_of(X.detach(), 1, r, options)
    reference.wd = options.get("weight_decay", 0.01)
    reference.momentum = options.get("momentum", 0.95)
    # A slowly turning gradient, so that momentum has something to follow.
    base = torch.randn(shape, generator=generator, dtype=torch.float64)
    for _ in range(steps):
        G = (base + torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
        X.grad = G.clone()
        optimizer.step()
        reference.step([G], optimizer.report.gate_open)
    return (
        relative_error(X.detach(), reference.X[0]),
        relative_error(optimizer.state[X]["momentum"], reference.M[0]),
    )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rank_fraction", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("name", SHAPES)
def test_update_equals_the_equations(name, rank_fraction, seed):
    assert_within(worst(run(Dion, SHAPES[name], rank_fraction, seed=seed)), TEN_STEPS)


@pytest.mark.parametrize("name", SHAPES)
def test_float64_parameters_are_updated_in_float64(name):
    errors = run(Dion, SHAPES[name], 0.5, dtype=torch.float64)
    assert_within(worst(errors), Rounding(torch.float64, terms=48, condition=10, steps=10))


RULES = ["error_feedback", "plain"]
FACTORS = ["column_normalized", "qr"]


@pytest.mark.parametrize(
    ("shape", "momentum_rule", "right_factor", "look_ahead"),
    all_pairs([(40, 16), (16, 40)], RULES, FACTORS, [0.0, 1.5]),
)
def test_rules_and_right_factors(shape, momentum_rule, right_factor, look_ahead):
    rules = dict(momentum_rule=momentum_rule, right_factor=right_factor)
    errors = run(Dion, shape, 0.5, look_ahead=look_ahead, steps=STEPS, **rules)
    assert_within(worst(errors), TEN_STEPS)


@pytest.mark.parametrize("local_step", ["dion", "gradient"])
@pytest.mark.parametrize("momentum_rule", RULES)
def test_local_steps_between(local_step, momentum_rule):
    errors = run(
        CurvaDion, (24, 40), 0.5, gate=FixedPeriod(4), local_step=local_step, local_lr=0.01,
        momentum_rule=momentum_rule, look_ahead=1.0, steps=2 + STEPS,
    )  # fmt: skip
    assert_within(worst(errors), TEN_STEPS)


@settings(max_examples=40)
@given(
    m=st.integers(1, 33),
    n=st.integers(1, 33),
    rank_fraction=st.floats(0.01, 1.0),
    multiple=st.sampled_from([1, 2, 8]),
    lr=st.floats(1e-4, 0.1),
    momentum=st.floats(0.0, 0.99),
    look_ahead=st.sampled_from([0.0, 1.0, 2.5]),
    weight_decay=st.floats(0.0, 0.5),
    seed=st.integers(0, 1000),
)
def test_any_shape_rank_and_hyperparameters(
    m, n, rank_fraction, multiple, lr, momentum, look_ahead, weight_decay, seed
):
    errors = run(
        Dion, (m, n), rank_fraction, rank_multiple_of=multiple, lr=lr, momentum=momentum, seed=seed,
        look_ahead=look_ahead, weight_decay=weight_decay, dtype=torch.float64, steps=4,
    )  # fmt: skip
    # Momenta that are drawn may be nearly singular.
    assert_within(errors[0], Rounding(torch.float64, terms=33, condition=1e6, steps=4))


@pytest.mark.parametrize(
    ("shape", "fraction", "multiple", "rank"),
    [
        ((768, 3072), 0.25, 1, 192),
        ((768, 768), 1 / 16, 1, 48),
        ((100, 200), 0.07, 1, 7),
        ((100, 200), 0.071, 1, 8),
        ((100, 200), 0.07, 16, 16),
        ((10, 200), 0.5, 16, 10),
        ((1, 7), 0.01, 1, 1),
    ],
)
def test_rank(shape, fraction, multiple, rank):
    X = torch.nn.Parameter(torch.zeros(shape))
    optimizer = Dion([X], rank_fraction=fraction, rank_multiple_of=multiple)
    X.grad = torch.ones(shape)
    optimizer.step()
    assert optimizer.state[X]["Q"].shape == (min(shape), rank)
