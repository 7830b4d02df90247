"""Rows, columns or both sharded, replicas: the factors of the whole matrix, in few collectives."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import distributed
from curvadion import WireMeter
from curvadion.layout.matrix import Extent, MatrixLayout
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


def expected(B, Q, right_factor="column_normalized"):
    P = torch.stack([positive_qr(b @ q) for b, q in zip(B, Q, strict=True)])
    R = B.mT @ P
    if right_factor == "qr":
        return P, R, torch.stack([positive_qr(one) for one in R])
    return P, R, R / R.norm(dim=1, keepdim=True)


def rounding_of(B, Q, dtype=torch.float32):
    """Of sums over the longer side, whose columns the orthonormalisation divides by R."""
    condition = float(torch.linalg.cond(B.double() @ Q.double()).max())
    return Rounding(dtype, terms=max(B.shape[1:]), condition=condition)


def split(sizes, place):
    start = sum(sizes[:place])
    return range(start, start + sizes[place])


def stack_of(B, Q, layout, right_factor="column_normalized"):
    rows, columns = layout.rows.indices, layout.columns.indices
    return Stack(
        layout=layout,
        B=[b[rows][:, columns].float() for b in B],
        Q=[q[columns].float() for q in Q],
        right_factor=right_factor,
        dtype=torch.float32,
    )


def on_grid(rank, B, Q, row_sizes, column_sizes, right_factor):
    """Rank (i, j) of a grid holds the i-th rows and the j-th columns."""
    grid = torch.arange(len(row_sizes) * len(column_sizes)).view(len(row_sizes), len(column_sizes))
    row_groups = [dist.new_group(grid[:, j].tolist()) for j in range(len(column_sizes))]
    column_groups = [dist.new_group(grid[i].tolist()) for i in range(len(row_sizes))]
    i, j = divmod(rank, len(column_sizes))
    layout = MatrixLayout(
        tuple(B.shape[1:]),
        Extent(split(row_sizes, i), row_groups[j] if len(row_sizes) > 1 else None),
        Extent(split(column_sizes, j), column_groups[i] if len(column_sizes) > 1 else None),
        shards=dist.group.WORLD,
    )
    with WireMeter() as meter:
        factors = power_iteration([stack_of(B, Q, layout, right_factor)])[0]
    here = layout.rows.indices, layout.columns.indices
    return *here, factors.P, factors.R, factors.Q, meter.total_bytes, meter.total_calls


GRIDS = {
    "both": ((20, 20), (12, 12)),
    "uneven both": ((3, 37), (23, 1)),
    "empty pieces of both": ((0, 40), (24, 0)),
    "four rows": ((13, 0, 20, 7), (24,)),
    "four columns": ((40,), (1, 11, 0, 12)),
}


@pytest.mark.parametrize("right_factor", ["column_normalized", "qr"])
@pytest.mark.parametrize("name", GRIDS)
def test_sharded_equals_whole(name, right_factor):
    row_sizes, column_sizes = GRIDS[name]
    B, Q = problem(40, 24, 7)
    P, R, next_Q = expected(B, Q, right_factor)
    ranks = distributed.run(
        len(row_sizes) * len(column_sizes), on_grid, B, Q, row_sizes, column_sizes, right_factor
    )
    for rows, columns, P_piece, R_piece, Q_piece, *_ in ranks:
        for actual, wanted, whole in (
            (P_piece, P[:, rows], P),
            (R_piece, R[:, columns], R),
            (Q_piece, next_Q[:, columns], next_Q),
        ):
            assert_close(actual, wanted, rounding_of(B, Q), scale=float(whole.norm()))


def test_bytes_and_calls_of_shards_equal_the_formula():
    k, m, n, r = 2, 40, 24, 7
    B, Q = problem(m, n, r, k)
    gram = 2 * 8 * k * r * (r + 1) // 2
    of_rows = distributed.run(2, on_grid, B, Q, (20, 20), (n,), "column_normalized")
    of_columns = distributed.run(2, on_grid, B, Q, (m,), (12, 12), "column_normalized")
    for *_, sent, calls in of_rows:
        assert (sent, calls) == (gram + 4 * k * n * r, 3)  # two Gram matrices, R
    for *_, sent, calls in of_columns:
        assert (sent, calls) == (4 * k * m * r + 8 * k * r, 2)  # P, column norms


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
