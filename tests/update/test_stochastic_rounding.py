"""The option stochastic_rounding: bfloat16 weights follow small updates."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from curvadion import AlwaysOpen, CurvaDion, FixedPeriod
from support.references.tolerance import Rounding, assert_close
from support.runs import distributed

pytestmark = pytest.mark.numeric

STEPS = 32
SPACING = 2**-7  # of bfloat16 between 1 and 2
LR = SPACING / 16
NEVER = FixedPeriod(10**6)
STEPS_OF_ALL_KINDS = {
    "closed, gradient": {"gate": NEVER, "local_step": "gradient"},
    "closed, Dion": {"gate": NEVER, "local_step": "dion"},
    "open": {"gate": AlwaysOpen()},
    "open, polar": {"gate": AlwaysOpen(), "direction": "polar", "newton_schulz_steps": 6},
}


def signs(shape):
    """A matrix of rank one, of +1 and -1: so are its gradients, and Dion's updates of size lr."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = (torch.randint(2, (n,), generator=generator) * 2.0 - 1 for n in shape)
    return rows.unsqueeze(1) * columns


def trained(dtype, kind, shape=(96, 64), count=1, steps=STEPS, **options):
    """Weights that start at 1.5 everywhere, after steps of size LR along -signs."""
    X = [nn.Parameter(torch.full(shape, 1.5, dtype=dtype)) for _ in range(count)]
    n = shape[-1]
    # P Q^T has entries of size 1 / sqrt(m n), and is scaled by sqrt(m / n).
    lr = LR if kind == "closed, gradient" else LR * n
    optimizer = CurvaDion(
        X, lr, weight_decay=0.0, rank_fraction=1 / n, state_dtype=torch.float32,
        q_dtype=torch.float32, max_local_steps=None,
        **copy.deepcopy(STEPS_OF_ALL_KINDS[kind]), **options,
    )  # fmt: skip
    G = signs(shape[-2:]).expand(shape).to(dtype)
    for _ in range(steps):
        for x in X:
            x.grad = G.clone()
        optimizer.step()
    return [x.detach().float() for x in X]


@pytest.mark.parametrize("kind", list(STEPS_OF_ALL_KINDS))
def test_updates_smaller_than_the_spacing_count_on_average(kind):
    (wide,) = trained(torch.float32, kind)
    (to_nearest,) = trained(torch.bfloat16, kind)
    (stochastic,) = trained(torch.bfloat16, kind, stochastic_rounding=True)
    moved = wide - 1.5
    wanted = -signs(moved.shape) * LR * STEPS
    # Each step rounds a weight of 1.5, which moves by much less.
    rounding = Rounding(torch.float32, condition=1.5 / (LR * STEPS), steps=STEPS)
    assert_close(moved, wanted, rounding)
    assert (to_nearest == 1.5).all()
    followed = ((stochastic - 1.5) * moved).sum() / moved.square().sum()
    # Its standard deviation: sqrt(spacing / (step size * steps * elements)) = 0.009.
    assert abs(followed - 1) < 0.05
    # An element moves with probability 1/16 a step, not 1/16 of them at all steps.
    assert 0.8 < (stochastic != 1.5).float().mean() < 0.95


@pytest.mark.parametrize("kind", list(STEPS_OF_ALL_KINDS))
def test_equal_weights_are_rounded_differently_and_equal_runs_equally(kind):
    first, second = trained(torch.bfloat16, kind, count=2, stochastic_rounding=True)
    again, _ = trained(torch.bfloat16, kind, count=2, stochastic_rounding=True)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    (both,) = trained(torch.bfloat16, kind, (2, 96, 64), stack_dims=1, stochastic_rounding=True)
    assert not torch.equal(*both)


@distributed.on_ranks(2)
def test_replicas_keep_the_same_bits(rank):
    X = [nn.Parameter(torch.full(shape, 1.5).bfloat16()) for shape in [(24, 16), (16, 24)]]
    X.append(nn.Parameter(torch.full((3, 8, 8), 1.5).bfloat16()))
    groups = [{"params": X[:2]}, {"params": X[2:], "stack_dims": 1}]
    optimizer = CurvaDion(
        groups, lr=1e-3, replicas=dist.group.WORLD, gate=FixedPeriod(3), stochastic_rounding=True
    )
    for step in range(6):
        generator = torch.Generator().manual_seed(10 * step + rank)
        for x in X:
            x.grad = torch.randn(x.shape, generator=generator).bfloat16()
        optimizer.step()
        assert optimizer.report.gate_open == (step % 3 == 2)
        for mine, theirs in zip(*distributed.gathered(X), strict=True):
            assert torch.equal(mine, theirs) == (step % 3 == 2)
