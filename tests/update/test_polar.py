"""Polar factors of whole matrices: singular values, scales, memory, Muon's trajectory."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from curvadion import CurvaDion, Dion, Muon
from curvadion.plan import plan as plans
from curvadion.update.newton_schulz import SMALLEST_IN_HALF, polar_factors, smallest
from support.references.polar_reference import PolarReference, polar
from support.references.reference import relative_error
from support.references.tolerance import Rounding, assert_close, assert_within
from support.runs.polar_stacks import stack_of
from support.runs.seeded import gradient, weights

pytestmark = pytest.mark.numeric


def with_condition(m, n, condition, seed=0):
    """A float64 matrix whose singular values fall from 1 to 1 / condition."""
    generator = torch.Generator().manual_seed(seed)
    k = min(m, n)
    U = torch.linalg.qr(torch.randn(m, k, generator=generator, dtype=torch.float64)).Q
    V = torch.linalg.qr(torch.randn(n, k, generator=generator, dtype=torch.float64)).Q
    S = torch.logspace(0, -math.log10(condition), k, dtype=torch.float64)
    return U, S, V


def factor(B, steps, dtype=None):
    """The polar factor of one matrix as the package takes it, with products in ``dtype``."""
    m, n = B.shape
    upright = B.mT if m < n else B
    dtype = dtype or B.dtype
    wide = torch.promote_types(dtype, torch.float32)
    stack = stack_of(upright[None].to(wide), range(len(upright)), None, dtype, steps)
    [[U]] = polar_factors([stack])
    return U.mT if m < n else U


@pytest.mark.parametrize(("steps", "low", "high"), [(4, 0.8, 1.2), (6, 0.998, 1.002)])
@pytest.mark.parametrize(
    ("shape", "condition", "dtype"),
    [
        ((40, 160), 1.0, torch.float32),
        ((37, 31), 1e2, torch.float32),
        ((40, 40), 1e8, torch.float32),
        ((40, 160), 1e8, torch.float64),
    ],
    ids=str,
)
def test_singular_values_come_out_near_one(shape, condition, dtype, steps, low, high):
    U, S, V = with_condition(*shape, condition)
    found = factor(((U * S) @ V.mT).to(dtype), steps).double()
    # What float32 sees of a Gram matrix is wrong by rounding errors of its largest eigenvalue.
    slack = {1.0: 1e-3, 1e2: 5e-3}.get(condition, 0.05) if dtype == torch.float32 else 1e-3
    along = U.mT @ found @ V  # diagonal: no direction turns
    gained = along.diagonal()
    lifted = 1.5 * smallest(steps) < S  # which counts from the bound of the largest
    assert gained[lifted].min() > low - slack
    assert gained.abs().max() < high + slack
    assert (along - gained.diag()).abs().max() < slack
    # None falls, and the smallest grow by much.
    assert (gained > 0.9 * S.clamp(max=0.5)).all() or dtype == torch.float32
    assert gained.min() > -slack


@pytest.mark.parametrize(
    ("shape", "condition", "steps"), [((40, 40), 1e4, 4), ((160, 40), 1.0, 5)], ids=str
)
def test_two_passes_in_half_precision_see_what_one_in_float32_does(shape, condition, steps):
    U, S, V = with_condition(*shape, condition)
    B = (U * S) @ V.mT
    for scale in (1.0, 2.0**-60, 2.0**40):
        found = factor((B * scale).float(), steps, torch.float16).double()
        gained = (U.mT @ found @ V).diagonal()
        lifted = S.gt(3 * SMALLEST_IN_HALF)
        assert gained[lifted].min() > 0.7 and gained.abs().max() < 1.3
        assert torch.linalg.matrix_norm(found, 2) < 1.35


@pytest.mark.parametrize("steps", [5, 8, 20])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_any_number_of_iterations_keeps_a_singular_matrix_in_bounds(dtype, steps):
    """Rounding errors of its Gram matrix in its null space, which iterations make grow."""
    generator = torch.Generator().manual_seed(0)
    rank = 11
    B = torch.randn(512, rank, generator=generator) @ torch.randn(rank, 256, generator=generator)
    spectrum = torch.linalg.svdvals(factor(B, steps, dtype).double())
    assert spectrum[0] < 1.25 and spectrum[rank - 1] > 0.75


@settings(max_examples=30)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 40),
    rank=st.integers(0, 40),
    exponent=st.integers(-35, 28),
    seed=st.integers(0, 1000),
)
def test_any_shape_rank_and_scale(m, n, rank, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(m, rank, generator=generator, dtype=torch.float64)
    right = torch.randn(rank, n, generator=generator, dtype=torch.float64)
    B = left @ right * 10.0**exponent
    found = factor(B.float(), 5)
    assert torch.isfinite(found).all()
    if exponent > -30:  # float32 has no smaller numbers of full precision
        spectrum = torch.linalg.svdvals(found.double())
        assert spectrum.max() <= 1.2
        assert bool(found.any()) == bool(B.float().any())
        # No direction that B does not have, but for rounding errors, which grow by thousands.
        found = factor(B, 5)
        outside = found - polar(B) @ (polar(B).mT @ found)
        assert_within(outside.norm() / math.sqrt(m * n), Rounding(torch.float64, condition=1e6))


SHAPES = [(24, 16), (16, 24), (20, 20), (1, 12), (12, 1), (7, 5), (1, 1)]


@pytest.mark.parametrize(
    ("rule", "look_ahead", "input_first"),
    [("error_feedback", 0.0, False), ("plain", 2.0, True), ("error_feedback", 2.0, False)],
)
def test_steps_equal_the_equations(rule, look_ahead, input_first):
    references = [PolarReference(weights(s), 1, look_ahead=look_ahead) for s in SHAPES]
    X = [
        nn.Parameter(r.X[0].mT.contiguous() if input_first else r.X[0].clone()) for r in references
    ]
    optimizer = Dion(
        X,
        direction="polar",
        newton_schulz_steps=14,
        look_ahead=look_ahead,
        momentum_rule=rule,
        input_first=input_first,
    )
    for step in range(6):
        for x, shape, reference in zip(X, SHAPES, references, strict=True):
            G = gradient(shape, step, 0).double()
            x.grad = G.mT.contiguous() if input_first else G
            reference.step([G], True)
        optimizer.step()
    for x, reference in zip(X, references, strict=True):
        found = x.detach().mT if input_first else x.detach()
        assert_close(
            found, reference.X[0], Rounding(torch.float64, terms=24, condition=1e3, steps=6)
        )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0, "momentum": 0.9},
        {"lr": 0.02, "nesterov": False, "adjust_lr_fn": "original", "ns_steps": 6},
        {"momentum": 0.0},
    ],
)
@pytest.mark.chosen_inputs
def test_muon_takes_the_steps_of_torchs(settings):
    """With the same arguments, and with the defaults of both."""
    ours, theirs = ([nn.Parameter(weights(s)) for s in SHAPES] for _ in range(2))
    optimizers = Muon(ours, **settings), torch.optim.Muon(theirs, **settings)
    for step in range(10):
        for a, b, shape in zip(ours, theirs, SHAPES, strict=True):
            a.grad = gradient(shape, step, 0)
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for a, b, shape in zip(ours, theirs, SHAPES, strict=True):
        moved = (b.detach() - weights(shape)).norm()
        # torch takes its products in bfloat16. Without a look-ahead the distance is 0.14.
        assert (a - b).detach().norm() / moved < 0.05


def test_the_memory_of_a_step_is_that_of_a_batch(monkeypatch):
    """Batches change nothing but what is held at a time."""
    ends = []
    for numbers in (2**22, 500):
        monkeypatch.setattr(plans, "MOST_ON_CPU", numbers)
        monkeypatch.setattr(plans, "BATCH_SHARE", 0.0)
        X = [nn.Parameter(weights(shape)) for shape in (*SHAPES, *SHAPES)]
        bias = nn.Parameter(weights((7,)))
        groups = [
            {"params": X[:9], "direction": "polar"},
            {"params": X[9:], "direction": "low_rank"},
            {"params": [bias], "algorithm": "adamw"},
        ]
        optimizer = CurvaDion(groups, threshold=0.3, replicas="single", look_ahead=1.0)
        for number in range(4):
            for x in (*X, bias):
                x.grad = gradient(x.shape, number, 0)
            optimizer.step()
        assert (len(optimizer._collective_plan().batches) > 4) == (numbers == 500)
        norms = [optimizer.state[x]["momentum_norm"] for x in X]
        ends.append([*X, bias, *norms])
    for one, other in zip(*ends, strict=True):
        assert_close(one, other, Rounding(torch.float32, terms=24, steps=4))


def test_the_direction_of_a_group_follows_from_its_rank():
    def groups():
        each = {}, {"rank_fraction": 0.25}, {"rank_fraction": 1.0}, {"direction": "low_rank"}
        return [{"params": [nn.Parameter(torch.zeros(4, 3))], **more} for more in each]

    def directions(optimizer):
        return [group["direction"] for group in optimizer.param_groups]

    budget = {"wire_budget": 0.01, "replicas": "single"}
    assert directions(CurvaDion(groups(), **budget)) == ["polar", "low_rank", "polar", "low_rank"]
    assert directions(CurvaDion(groups(), replicas="single", threshold=0.3)) == ["low_rank"] * 4
    asked = directions(CurvaDion(groups(), rank_fraction=0.5, **budget))
    assert asked == ["low_rank", "low_rank", "low_rank", "low_rank"]
    assert directions(Dion(groups(), direction="polar"))[0] == "polar"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("direction", "muon"),
        ("newton_schulz_steps", 21),
        ("newton_schulz_steps", 5.0),
        ("update_scale", 1.0),
    ],
)
def test_errors_name_the_key_and_the_value(key, value):
    with pytest.raises((TypeError, ValueError), match=f"{key}={value!r}"):
        Dion([nn.Parameter(torch.zeros(4, 3))], **{key: value})


@pytest.mark.parametrize(("outlier", "count"), [(50.0, 10), (1e5, 1)])
def test_outliers_do_no_harm_in_half_precision(outlier, count):
    B = torch.randn(300, 256, generator=torch.Generator().manual_seed(0))
    B.view(-1)[:: B.numel() // count][:count] = outlier
    spectrum = torch.linalg.svdvals(factor(B, 4, torch.float16).double())
    assert spectrum.min() > 0.0 and spectrum.max() < 1.3
    wide = factor(B, 4)
    assert relative_error(factor(B, 4, torch.float16).float(), wide) < 0.3


@pytest.mark.parametrize(("iterations", "steps"), [("muon", 10), ("polar_express", 12)])
def test_more_iterations_than_rounding_bears_leave_weights_finite(iterations, steps):
    x = torch.nn.Parameter(torch.zeros(64, 48))
    optimizer = Dion([x], direction="polar", newton_schulz=iterations, newton_schulz_steps=steps)
    generator = torch.Generator().manual_seed(0)
    x.grad = torch.randn(64, 1, generator=generator) @ torch.randn(1, 48, generator=generator)
    optimizer.step()
    assert torch.isfinite(x).all()
