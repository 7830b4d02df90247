"""Rows, columns or both sharded, replicas: the factors of the whole matrix, in few collectives."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from curvadion.layout.matrix import MatrixLayout
from curvadion.update import power_iteration as module
from curvadion.update.power_iteration import Stack, power_iteration
from reference import positive_qr
from tolerance import Rounding, assert_close

pytestmark = pytest.mark.numeric


def problem(m, n, r, k=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    B = torch.randn(k, m, n, generator=generator, dtype=torch.float64)
    Q = torch.randn(k, n, r, generator=generator, dtype=torch.float64)
    return B, Q


def rounding_of(B, Q, dtype=torch.float32):
    """Of sums over the longer side, whose columns the orthonormalisation divides by R."""
    condition = float(torch.linalg.cond(B.double() @ Q.double()).max())
    return Rounding(dtype, terms=max(B.shape[1:]), condition=condition)


def stack_of(B, Q, layout, right_factor="column_normalized"):
    rows, columns = layout.rows.indices, layout.columns.indices
    return Stack(
        layout=layout,
        B=[b[rows][:, columns].float() for b in B],
        Q=[q[columns].float() for q in Q],
        right_factor=right_factor,
        dtype=torch.float32,
    )


def test_a_direction_without_signal_takes_no_part_and_comes_back():
    B, Q = problem(40, 24, 4, k=1)
    low = B[0, :, :2] @ B[0, :2, :]  # of rank 2
    layout = MatrixLayout.whole((40, 24))
    first = power_iteration([stack_of(low[None], Q, layout)])[0]
    assert torch.equal(first.Q.norm(dim=1) > 0, torch.tensor([[True, True, False, False]]))
    again = power_iteration([stack_of(B, first.Q, layout)])[0]
    lengths = again.Q.norm(dim=1)
    assert_close(lengths, torch.ones_like(lengths), Rounding(torch.float32, terms=24))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("m", "n", "r", "turned"), [(40, 24, 7, False), (64, 64, 20, True), (9, 1, 1, True)]
)
def test_small_matrices_are_multiplied_together(stored, m, n, r, turned):
    B, Q = problem(m, n, r, k=5)
    B[3] = 0
    dtype = torch.float64 if stored == torch.float64 else torch.float32
    momenta = [b.to(stored).mT.contiguous().mT if turned else b.to(stored) for b in B]
    given = stack_of(B, Q, MatrixLayout.whole((m, n)))
    given = replace(given, B=momenta, Q=[q.to(dtype) for q in Q], dtype=dtype, stored=stored)
    together = power_iteration([given])[0]
    with mock.patch.object(module, "SMALL", 0):
        alone = power_iteration([given])[0]
    held = torch.stack([b.double() for b in momenta])
    assert together.P.dtype == dtype and together.R[3].norm() == 0 == together.Q[3].norm()
    kept = [0, 1, 2, 4]
    rounding = rounding_of(held[kept], torch.stack(given.Q)[kept], dtype)
    for i in kept:
        wanted = positive_qr(held[i] @ given.Q[i].double())
        assert_close(together.P[i], wanted, rounding)
        assert_close(together.R[i], alone.R[i], rounding)
        assert_close(together.Q[i], alone.Q[i], rounding)
