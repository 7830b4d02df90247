"""AdamW is torch's own; sync/test_low_rank_reference.py has Lion's equations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from curvadion import AlwaysOpen, CurvaDion
from curvadion.update import scalar
from curvadion.update.scalar import create_state
from tolerance import Rounding, assert_close

pytestmark = pytest.mark.numeric

SHAPES = [(7,), (3, 5), (), (2, 3, 4), (0,)]
STEPS = 8
SETTINGS = [
    {},
    {"betas": (0.8, 0.99), "eps": 1e-4},
    {"betas": (0.0, 0.0), "weight_decay": 0.0},
]


def parameters(dtype):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def gradients(step, dtype):
    generator = torch.Generator().manual_seed(1 + step)
    return [torch.randn(s, generator=generator).to(dtype) for s in SHAPES]


def run(optimizer, X):
    for step in range(STEPS):
        for x, gradient in zip(X, gradients(step, X[0].dtype), strict=True):
            x.grad = gradient
        optimizer.step()
    return [x.detach() for x in X]


DEFAULTS = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}


@pytest.mark.parametrize("settings", SETTINGS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adamw_is_torchs_to_the_bit(dtype, settings):
    X, Y = parameters(dtype), parameters(dtype)
    optimizer = CurvaDion([{"params": X, "algorithm": "adamw"}], gate=AlwaysOpen(), **settings)
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
