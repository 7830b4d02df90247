"""Orthonormal columns from any input, whole or sharded over a row group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from curvadion.layout.matrix import Extent
from curvadion.ops.cholesky_qr import completing_directions
from curvadion.update.orthonormalize import Floor, orthonormal_columns
from support.references.reference import positive_qr
from support.references.tolerance import Rounding, assert_close, assert_within
from support.runs import distributed

pytestmark = pytest.mark.numeric
F32, F64 = torch.float32, torch.float64


def gaussian(m, r, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, r, generator=generator, dtype=torch.float64)


def solve(P):
    return orthonormal_columns([P[None]], [Extent(range(P.shape[0]))])[0].columns[0]


def conditions(P):
    """Of each matrix's directions, of which few dimensions may have been left for the completed."""
    (found,) = orthonormal_columns([P], [Extent(range(P.shape[1]))])
    directions = F.normalize(completing_directions(torch.arange(P.shape[1]), P.shape[2]), dim=0)
    given = torch.where(found.dependent.unsqueeze(1), directions, found.columns)
    return torch.linalg.cond(given).tolist()


def orthogonality_error(Q):
    r = Q.shape[-1]
    eye = torch.eye(r, dtype=torch.float64)
    return ((Q.double().mT @ Q.double() - eye).norm() / r**0.5).item()


def assert_orthonormal(Q, dtype=F32, condition=1.0):
    """Columns are divided by lengths and rounded; Q^T Q has twice the relative error of Q."""
    m, r = Q.shape
    terms = r if dtype == F32 else m * r  # float32 is summed in float64
    rounding = Rounding(dtype, terms=terms, condition=2 * condition, steps=2)
    assert_within(orthogonality_error(Q), rounding, what="Q^T Q - I")


def assert_factors(Q, P, rounding):
    """P = Q R with an upper triangular R of positive diagonal: however P is conditioned."""
    Q, P = Q.double(), P.double()
    R = Q.mT @ P
    assert_close(Q @ R, P, rounding, what="Q R")
    below = R.tril(-1) + R.diagonal().clamp_max(0).diag()
    assert_within(below.norm() / P.norm(), rounding, what="R below its diagonal")


@pytest.mark.parametrize(("m", "r"), [(768, 96), (1, 1), (300, 299)])
def test_equals_the_qr_factor_with_positive_diagonal(m, r):
    P = gaussian(m, r)
    condition = float(torch.linalg.cond(P))
    # Float32 input: what matters is the factor of the rounded matrix.
    found, expected = solve(P.float()), positive_qr(P.float().double())
    assert_close(found, expected, Rounding(F32, terms=r, condition=condition))
    assert_close(solve(P), positive_qr(P), Rounding(F64, terms=m, condition=condition))
    assert_orthonormal(found)


@pytest.mark.parametrize("scales", [(1.0, 1e-8), (1e-8, 1.0)])
def test_a_column_as_short_as_the_others_rounding_errors_is_replaced(scales):
    P = (gaussian(64, 2) * torch.tensor(scales)).float()
    long = scales.index(1.0)
    Q = solve(P)
    expected = P[:, long].double() / P[:, long].double().norm()
    assert_close(Q[:, long], expected, Rounding(F32, terms=2))
    assert_orthonormal(Q)
    (kept,) = orthonormal_columns([P[None]], [Extent(range(64))], complete=False)
    found = solve(P.double())
    assert kept.columns[0, :, 1 - long].norm() == 0
    # Float64 tells the difference.
    assert_close(found, positive_qr(P.double()), Rounding(F64, terms=64, condition=1e8))


def test_a_column_that_amplifies_the_errors_of_others_is_dependent():
    P = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.01, 1.0], [0.0, 0.0, 0.3]])
    (found,) = orthonormal_columns([P[None]], [Extent(range(3))], [Floor(2e-3)])
    assert found.dependent.tolist() == [[False, False, True]]


@pytest.mark.parametrize(("m", "r", "rank"), [(64, 8, 0), (8, 8, 7), (512, 64, 1)])
def test_rank_deficient_input_is_completed(m, r, rank):
    P = (gaussian(m, rank) @ gaussian(rank, r, seed=1)).float()
    Q = solve(P)
    assert_orthonormal(Q, condition=conditions(P.unsqueeze(0))[0])
    if rank:  # the other columns are combinations of the first ones
        first = float(torch.linalg.cond(P[:, :rank].double()))
        condition = max(first, *conditions(P.unsqueeze(0)))
        assert_factors(Q, P, Rounding(F32, terms=r, condition=condition))


@settings(max_examples=30)
@given(
    m=st.integers(1, 40),
    r=st.integers(1, 40),
    rank=st.integers(0, 40),
    stack=st.integers(1, 3),
    seed=st.integers(0, 10_000),
)
def test_always_orthonormal(m, r, rank, stack, seed):
    r = min(m, r)
    P = torch.stack(
        [gaussian(m, rank, s) @ gaussian(rank, r, s + 9) for s in range(seed, seed + stack)]
    )
    (found,) = orthonormal_columns([P.float()], [Extent(range(m))])
    for Q, condition in zip(found.columns, conditions(P.float()), strict=True):
        assert_orthonormal(Q, condition=condition)


def sharded_rows(rank, sizes, P):
    start = sum(sizes[:rank])
    rows = range(start, start + sizes[rank])
    return orthonormal_columns([P[:, rows]], [Extent(rows, dist.group.WORLD)])[0].columns


@pytest.mark.parametrize(("sizes", "deficient"), [((33, 7), False), ((0, 39, 0, 1), True)])
def test_sharded_rows_equal_the_whole_result(sizes, deficient):
    P = torch.stack([gaussian(40, 9), gaussian(40, 9, seed=5)]).float()
    if deficient:
        P[0, :, 3:6] = 0
        P[1, :, 8] = P[1, :, 0] - P[1, :, 1]
    pieces = distributed.run(len(sizes), sharded_rows, sizes, P)
    whole = orthonormal_columns([P], [Extent(range(40))])[0].columns
    assert_close(torch.cat(pieces, dim=1), whole, Rounding(F32, terms=9))


def test_many_rows_lose_nothing_in_sums_of_float32():
    P = (gaussian(300_000, 2) + 1.0).float()
    assert_orthonormal(solve(P))
