"""AdamW against torch's own, Lion against its equations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from curvadion import AlwaysOpen, CurvaDion, Dion
from curvadion.update import scalar
from curvadion.update.scalar import create_state
from tolerance import Rounding, assert_close

pytestmark = pytest.mark.numeric

SHAPES = [(7,), (3, 5), (), (2, 3, 4), (1,), (0,)]
STEPS = 8
SETTINGS = [
    {},
    {"lr": 0.1, "weight_decay": 0.3},
    {"betas": (0.8, 0.99), "eps": 1e-4},
    {"betas": (0.0, 0.0), "weight_decay": 0.0},
]


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def gradients(step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1 + step)
    return [torch.randn(s, generator=generator).to(dtype) for s in SHAPES]


def run(optimizer, X, steps=STEPS):
    for step in range(steps):
        for x, gradient in zip(X, gradients(step, X[0].dtype), strict=True):
            x.grad = gradient
        optimizer.step()
    return [x.detach() for x in X]


def ours(algorithm, dtype=torch.float32, **settings):
    X = parameters(dtype)
    return X, CurvaDion([{"params": X, "algorithm": algorithm}], gate=AlwaysOpen(), **settings)


DEFAULTS = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}


@pytest.mark.parametrize("settings", SETTINGS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_adamw_is_torchs_to_the_bit(dtype, settings):
    X, optimizer = ours("adamw", dtype, **settings)
    Y = parameters(dtype)
    reference = torch.optim.AdamW(Y, fused=True, **{**DEFAULTS, **settings})
    for x, y in zip(run(optimizer, X), run(reference, Y), strict=True):
        assert torch.equal(x, y)
    for x, y in zip(X, Y, strict=True):
        state, expected = optimizer.state[x], reference.state[y]
        assert state.keys() == expected.keys()
        for key, tensor in expected.items():
            assert state[key].dtype == tensor.dtype
            assert torch.equal(state[key], tensor)


def test_adamw_takes_what_the_fused_kernel_does_not():
    """A transposed weight and a gradient with other strides."""
    generator = torch.Generator().manual_seed(0)
    start, G = (torch.randn(5, 3, generator=generator) for _ in range(2))
    x, y = nn.Parameter(start.t().contiguous().t()), nn.Parameter(start.clone())
    assert not x.is_contiguous()
    ours = CurvaDion([{"params": [x], "algorithm": "adamw"}], gate=AlwaysOpen())
    reference = torch.optim.AdamW([y], **DEFAULTS)
    for step in range(STEPS):
        x.grad, y.grad = G * (step + 1), G * (step + 1)
        ours.step()
        reference.step()
    assert_close(x, y, Rounding(torch.float32, steps=STEPS))


def numbers(x):
    """The norm of standard normal numbers of this shape, as weights and gradients are."""
    return x.numel() ** 0.5


@pytest.mark.parametrize("largest, leaves_out", [(1e18, 0), (1.5e18, 1), (math.inf, 1)])
def test_a_gpu_leaves_out_a_step_whose_squares_would_overflow(largest, leaves_out):
    """Of the steps that PyTorch's fused kernel takes without a pass that limits gradients."""
    G = [torch.ones(3), torch.tensor([0.0, largest])]
    found_inf = scalar._too_large(G)
    assert found_inf.item() == leaves_out and found_inf.shape == ()
    X = [torch.ones(3), torch.ones(2)]
    states = [create_state("adamw", x) for x in X]
    lists = [[s[key] for s in states] for key in ("exp_avg", "exp_avg_sq")]
    steps = [s["step"] for s in states]
    options = {"beta1": 0.9, "beta2": 0.9, "lr": 0.1, "weight_decay": 0.1, "eps": 1e-8}
    scalar.adamw(
        X, G, *lists, [], steps, fused=True, found_inf=found_inf, amsgrad=False, maximize=False,
        **options,
    )  # fmt: skip
    assert all(torch.isfinite(t).all() for t in [*X, *lists[0], *lists[1]])
    assert all(torch.equal(x, torch.ones_like(x)) == bool(leaves_out) for x in X)


def lion(X, lr, beta1, beta2, weight_decay):
    """Algorithm 2 of arXiv 2302.06675 in float64; returns the weights after each step."""
    X = [x.detach().double() for x in X]
    M = [torch.zeros_like(x) for x in X]
    trajectory = []
    for step in range(STEPS):
        for i, g in enumerate(gradients(step)):
            g = g.double()
            c = beta1 * M[i] + (1 - beta1) * g
            X[i] = X[i] - lr * (torch.sign(c) + weight_decay * X[i])
            M[i] = beta2 * M[i] + (1 - beta2) * g
        trajectory.append([x.clone() for x in X])
    return trajectory, M


@pytest.mark.parametrize("settings", SETTINGS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_lion_follows_its_equations(dtype, settings):
    rounding = Rounding(dtype, steps=STEPS)
    values = {**DEFAULTS, **settings}
    X, optimizer = ours("lion", dtype, **settings)
    expected, M = lion(parameters(), values["lr"], *values["betas"], values["weight_decay"])
    for step in range(STEPS):
        for x, gradient in zip(X, gradients(step), strict=True):
            x.grad = gradient.to(dtype)
        optimizer.step()
        for x, reference in zip(X, expected[step], strict=True):
            assert_close(x, reference, rounding, scale=numbers(x))
    for x, m in zip(X, M, strict=True):
        state = optimizer.state[x]
        assert_close(state["exp_avg"], m, rounding, scale=numbers(x))
        assert set(state) == {"step", "exp_avg"}
        assert state["step"].item() == STEPS


def test_lion_leaves_zero_gradients_alone():
    """sign(0) = 0: only the decay moves such a weight."""
    x = nn.Parameter(torch.ones(3))
    optimizer = CurvaDion(
        [{"params": [x], "algorithm": "lion"}], gate=AlwaysOpen(), lr=0.1, weight_decay=0.5
    )
    x.grad = torch.tensor([1.0, 0.0, -1.0])
    optimizer.step()
    assert_close(x, torch.tensor([0.85, 0.95, 1.05]), Rounding(torch.float32))


@pytest.mark.parametrize("algorithm", ["adamw", "lion"])
def test_bfloat16_follows_float32(algorithm):
    """Two large steps: more would also add the rounding of as many bfloat16 weights."""
    X, optimizer = ours(algorithm, torch.bfloat16, lr=0.5)
    Y, wide = ours(algorithm, torch.float32, lr=0.5)
    start = [x.detach().float() for x in parameters(torch.bfloat16)]
    narrow_run, wide_run = run(optimizer, X, 2), run(wide, Y, 2)
    for x, y, first in zip(narrow_run, wide_run, start, strict=True):
        assert x.dtype == torch.bfloat16
        assert_close(x, y, Rounding(torch.bfloat16, terms=2), scale=numbers(x))
        assert not x.numel() or not torch.equal(x.float(), first)


@pytest.mark.parametrize("algorithm", ["adamw", "lion"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_state_has_the_parameters_shape_and_dtype(algorithm, dtype):
    X, optimizer = ours(algorithm, dtype)
    run(optimizer, X, 1)
    for x in X:
        state = optimizer.state[x]
        for key in state.keys() - {"step"}:
            assert (state[key].shape, state[key].dtype) == (x.shape, dtype)
        assert (state["step"].shape, state["step"].dtype) == ((), torch.float32)
        assert state["step"].device.type == "cpu"


@pytest.mark.parametrize("algorithm", ["adamw", "lion"])
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensor_lr_is_a_number(algorithm, shape, dtype):
    lr = 0.03125
    X, optimizer = ours(algorithm, dtype, lr=torch.full(shape, lr))
    Y, plain = ours(algorithm, dtype, lr=lr)
    steps = 1 if dtype == torch.bfloat16 else STEPS  # which rounds lr, and weights at every step
    for x, y in zip(run(optimizer, X, steps), run(plain, Y, steps), strict=True):
        assert_close(x, y, Rounding(dtype, steps=steps), scale=numbers(x))


@pytest.mark.parametrize("algorithm", ["adamw", "lion"])
def test_weight_decay_is_decoupled(algorithm):
    """From the same gradients, decay adds -lr wd X to each step and nothing to the moments."""
    X, optimizer = ours(algorithm, torch.float64, lr=0.1, weight_decay=0.5)
    Y, plain = ours(algorithm, torch.float64, lr=0.1, weight_decay=0.0)
    before = [x.detach().clone() for x in X]
    for x, y, first in zip(run(optimizer, X, 1), run(plain, Y, 1), before, strict=True):
        wanted = y - 0.1 * 0.5 * first
        assert_close(x, wanted, Rounding(torch.float64), scale=numbers(x))
    for x, y in zip(X, Y, strict=True):
        assert torch.equal(optimizer.state[x]["exp_avg"], plain.state[y]["exp_avg"])


def test_groups_keep_their_own_settings():
    X, Y = parameters(), parameters()
    optimizer = Dion(
        [
            {"params": X[:2], "algorithm": "adamw", "lr": 0.1, "betas": (0.5, 0.6)},
            {"params": X[2:], "algorithm": "adamw", "lr": 0.01, "weight_decay": 0.4},
        ]
    )
    reference = torch.optim.AdamW(
        [
            {"params": Y[:2], "lr": 0.1, "betas": (0.5, 0.6), "weight_decay": 0.01},
            {"params": Y[2:], "lr": 0.01, "weight_decay": 0.4},
        ],
        betas=(0.9, 0.95),
        fused=True,
    )
    for x, y in zip(run(optimizer, X), run(reference, Y), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("algorithm", ["adamw", "lion"])
def test_parameters_without_gradient_keep_their_moments(algorithm):
    X, optimizer = ours(algorithm)
    run(optimizer, X, 3)
    held = {key: value.clone() for key, value in optimizer.state[X[1]].items()}
    before = X[1].detach().clone()
    for x in X:
        x.grad = None if x is X[1] else torch.ones_like(x)
    optimizer.step()
    assert torch.equal(X[1], before)
    assert all(torch.equal(value, held[key]) for key, value in optimizer.state[X[1]].items())
    assert optimizer.state[X[0]]["step"].item() == 4
    assert optimizer.state[X[1]]["step"].item() == 3
