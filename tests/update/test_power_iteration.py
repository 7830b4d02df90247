"""A direction without signal waits until one comes."""

from __future__ import annotations

import pytest
import torch

from curvadion.layout.matrix import MatrixLayout
from curvadion.update.power_iteration import Stack, power_iteration
from tolerance import Rounding, assert_close

pytestmark = pytest.mark.numeric


def one_step(B, Q):
    layout = MatrixLayout.whole(tuple(B.shape))
    (found,) = power_iteration([Stack(layout, [B], [Q], "column_normalized", torch.float32)])
    return found


def test_a_direction_without_signal_takes_no_part_and_comes_back():
    generator = torch.Generator().manual_seed(0)
    B, Q = (torch.randn(shape, generator=generator) for shape in ((40, 24), (24, 4)))
    of_rank_two = (B[:, :2].double() @ B[:2].double()).float()
    first = one_step(of_rank_two, Q)
    assert torch.equal(first.Q.norm(dim=1) > 0, torch.tensor([[True, True, False, False]]))
    lengths = one_step(B, first.Q[0]).Q.norm(dim=1)
    assert_close(lengths, torch.ones_like(lengths), Rounding(torch.float32, terms=24))
