"""AdamW is torch's own; sync/test_low_rank_reference.py has Lion's equations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from curvadion import AlwaysOpen, CurvaDion
from support.references.tolerance import Rounding, assert_close

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
