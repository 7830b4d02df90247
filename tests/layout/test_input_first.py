"""Matrices stored as (in, out) train exactly as their transposes, which nn.Linear stores."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from curvadion import Dion
from seeded import gradient, weights
from tolerance import Rounding, assert_close, assert_within

pytestmark = pytest.mark.numeric

SHAPES = [(8, 24), (24, 8), (7, 7), (1, 5), (5, 1)]  # (out, in)
STEPS = 6
ROUNDING = Rounding(torch.float32, terms=24, steps=STEPS)


def pair(make, shapes=SHAPES, **options):
    """Weights after some steps, of (out, in) matrices and of the same ones stored as (in, out)."""
    finals = []
    for turned in (False, True):
        X = [
            nn.Parameter(
                weights(s).mT.clone(memory_format=torch.contiguous_format) if turned else weights(s)
            )
            for s in shapes
        ]
        optimizer = make([{"params": X, "input_first": turned, **options}])
        for step in range(STEPS):
            for x, shape in zip(X, shapes, strict=True):
                G = gradient(shape, step, 0 if not dist.is_initialized() else dist.get_rank())
                x.grad = G.mT.clone(memory_format=torch.contiguous_format) if turned else G
            optimizer.step()
        finals.append([x.detach().mT if turned else x.detach() for x in X])
    return finals


def distance(finals):
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(*finals, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"row_blocks": [1, 3, 4]},
        {"right_factor": "qr", "rank_fraction": 1.0},
    ],
    ids=str,
)
def test_a_matrix_and_its_transpose_train_equally(options):
    shapes = [(8, 24), (8, 3)] if "row_blocks" in options else SHAPES
    assert_within(distance(pair(Dion, shapes, **options)), ROUNDING)


def test_scale_is_the_root_of_outputs_over_inputs():
    """||update|| = lr sqrt(out / in) sqrt(r) for r orthonormal directions."""
    x = nn.Parameter(torch.zeros(4, 64))  # 4 inputs, 64 outputs
    x.grad = torch.randn(4, 64)
    options = {"rank_fraction": 1.0, "right_factor": "qr", "input_first": True}
    optimizer = Dion([x], lr=1.0, weight_decay=0.0, **options)
    optimizer.step()
    assert_close(torch.linalg.matrix_norm(x.detach(), 2), 4.0, Rounding(torch.float32, terms=64))
