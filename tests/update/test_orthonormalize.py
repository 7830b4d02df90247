"""Orthonormal columns from any input, whole or sharded over a row group."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import curvadion.update.orthonormalize as module
import distributed
from curvadion.layout.matrix import Extent
from curvadion.update.cholesky import inverse_of
from curvadion.update.orthonormalize import (
    completing_directions,
    orthonormal_columns,
    orthonormalize,
)
from reference import positive_qr
from tolerance import Rounding, assert_close, assert_within

pytestmark = pytest.mark.numeric
F32, F64 = torch.float32, torch.float64


def gaussian(m, r, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, r, generator=generator, dtype=torch.float64)


def with_condition(m, r, condition, seed=0):
    U = torch.linalg.qr(gaussian(m, r, seed)).Q
    V = torch.linalg.qr(gaussian(r, r, seed + 1)).Q
    return (U * torch.logspace(0, -torch.tensor(condition).log10().item(), r)) @ V.mT


def solve(P):
    return orthonormalize([P.unsqueeze(0)], [Extent(range(P.shape[0]))])[0].squeeze(0)


def conditions(P):
    """Of each matrix' directions, of which few dimensions may have been left for the completed."""
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


@pytest.mark.parametrize(("m", "r"), [(768, 96), (37, 23), (5, 1), (1, 1), (300, 299)])
def test_equals_the_qr_factor_with_positive_diagonal(m, r):
    P = gaussian(m, r)
    condition = float(torch.linalg.cond(P))
    # Float32 input: what matters is the factor of the rounded matrix.
    found, expected = solve(P.float()), positive_qr(P.float().double())
    assert_close(found, expected, Rounding(F32, terms=r, condition=condition))
    assert_close(solve(P), positive_qr(P), Rounding(F64, terms=m, condition=condition))
    assert_orthonormal(found)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scale_does_not_matter(scale):
    P = gaussian(64, 8)
    rounding = Rounding(F32, terms=8, condition=float(torch.linalg.cond(P)))
    assert_close(solve((P * scale).float()), positive_qr(P), rounding)


@pytest.mark.parametrize("scales", [(1.0, 1e-5), (1e-5, 1.0)])
def test_columns_of_very_different_lengths(scales):
    P = (gaussian(64, 2) * torch.tensor(scales)).float()
    assert_close(solve(P), positive_qr(P.double()), Rounding(F32, terms=2))


@pytest.mark.parametrize("scales", [(1.0, 1e-8), (1e-8, 1.0)])
def test_a_column_as_short_as_the_others_rounding_errors_is_replaced(scales):
    P = (gaussian(64, 2) * torch.tensor(scales)).float()
    long = scales.index(1.0)
    Q = solve(P)
    expected = P[:, long].double() / P[:, long].double().norm()
    assert_close(Q[:, long], expected, Rounding(F32, terms=2))
    assert_orthonormal(Q)
    kept, found = orthonormalize([P], [Extent(range(64))], complete=False), solve(P.double())
    assert kept[0][:, 1 - long].norm() == 0
    # Float64 tells the difference.
    assert_close(found, positive_qr(P.double()), Rounding(F64, terms=64, condition=1e8))


@pytest.mark.parametrize("rank", [0, 1, 7])
@pytest.mark.parametrize(("m", "r"), [(64, 8), (8, 8), (512, 64)])
def test_rank_deficient_input_is_completed(m, r, rank):
    P = (gaussian(m, rank) @ gaussian(rank, r, seed=1)).float()
    Q = solve(P)
    assert_orthonormal(Q, condition=conditions(P.unsqueeze(0))[0])
    if rank:  # the other columns are combinations of the first ones
        first = float(torch.linalg.cond(P[:, :rank].double()))
        condition = max(first, *conditions(P.unsqueeze(0)))
        assert_factors(Q, P, Rounding(F32, terms=r, condition=condition))


def test_without_completion_dependent_columns_become_zero():
    P = gaussian(50, 4).float()
    P[:, 2] = P[:, 0] + P[:, 1]
    (Q,) = orthonormalize([P], [Extent(range(50))], complete=False)
    assert Q[:, 2].norm() == 0
    expected = positive_qr(P[:, [0, 1, 3]].double())
    assert_close(Q[:, [0, 1, 3]], expected, Rounding(F32, terms=4))


def test_completing_directions_follow_the_global_index_alone():
    whole = completing_directions(torch.arange(100), 5)
    assert torch.equal(completing_directions(torch.tensor([7, 93]), 5), whole[[7, 93]])
    assert torch.equal(completing_directions(torch.arange(100), 3), whole[:, :3])
    assert whole.abs().max() <= 1
    assert torch.linalg.cond(whole) < 10


@settings(max_examples=30, deadline=None)
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
    (found,) = orthonormalize([P.float()], [Extent(range(m))])
    for Q, condition in zip(found, conditions(P.float()), strict=True):
        assert_orthonormal(Q, condition=condition)


def sharded_rows(rank, sizes, P):
    start = sum(sizes[:rank])
    rows = range(start, start + sizes[rank])
    return orthonormalize([P[:, rows]], [Extent(rows, dist.group.WORLD)])[0]


@pytest.mark.parametrize("sizes", [(33, 7), (40, 0), (0, 39, 0, 1)])
@pytest.mark.parametrize("deficient", [False, True])
def test_sharded_rows_equal_the_whole_result(sizes, deficient):
    P = torch.stack([gaussian(40, 9), gaussian(40, 9, seed=5)]).float()
    if deficient:
        P[0, :, 3:6] = 0
        P[1, :, 8] = P[1, :, 0] - P[1, :, 1]
    pieces = distributed.run(len(sizes), sharded_rows, sizes, P)
    whole = orthonormalize([P], [Extent(range(40))])[0]
    assert_close(torch.cat(pieces, dim=1), whole, Rounding(F32, terms=9))


DTYPES = (F32, F64)


@contextmanager
def second_pass_in_float64():
    """As on devices where the host must not ask whether columns are dependent."""
    with mock.patch.object(module, "none_set", lambda flags: False):
        yield


@pytest.mark.parametrize(
    ("dtype", "condition"), [*((F32, c) for c in (1, 1e4, 1e6, 1e8)), (F64, 1), (F64, 1e6)]
)
@pytest.mark.parametrize(("m", "r"), [(512, 64), (70, 70)])
def test_a_second_pass_in_the_columns_dtype_is_as_accurate(dtype, condition, m, r):
    P = with_condition(m, r, condition).to(dtype)
    Q = solve(P)
    with second_pass_in_float64():
        wide = solve(P)
    for each in (Q, wide):
        assert_orthonormal(each, dtype, conditions(P.unsqueeze(0))[0])
        assert_factors(each, P, Rounding(dtype, terms=r, condition=2))  # Q and R are rounded
    # Directions that are badly conditioned follow from how the first pass rounds.
    rounding = Rounding(dtype, terms=r, condition=condition)
    if rounding.allowed < 0.1:
        assert_close(Q, wide, rounding)
        assert_close(Q, positive_qr(P.double()), rounding)


@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize(("m", "r"), [(50_257, 8), (300_000, 2)])
def test_many_rows_lose_nothing_in_sums_of_float32(m, r, mean):
    P = (gaussian(m, r) + mean).float()
    assert_orthonormal(solve(P))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dependent", ["zero", "repeated", "not finite", "all zero"])
def test_matrices_with_dependent_columns_keep_the_float64_pass(dtype, dependent):
    P = torch.stack([gaussian(60, 12, seed) for seed in range(3)]).to(dtype)
    bad = {"zero": 0.0, "repeated": P[1, :, 2], "not finite": float("nan"), "all zero": 0.0}
    P[1, :, slice(None) if dependent == "all zero" else 5] = bad[dependent]
    (Q,) = orthonormalize([P], [Extent(range(60))])
    with second_pass_in_float64():
        (wide,) = orthonormalize([P], [Extent(range(60))])
    rounding = Rounding(dtype, terms=12, condition=10)
    assert_close(Q, wide, rounding)
    for i in (0, 2):
        assert_close(Q[i], positive_qr(P[i].double()), rounding)
    for one in Q:
        assert_orthonormal(one, dtype)


@pytest.mark.parametrize("r", [1, 96, 97, 193])
def test_inverses_of_triangles(r):
    lower = torch.eye(r, dtype=torch.float64) + gaussian(r, r).tril(-1) / r
    found = inverse_of(lower.unsqueeze(0)).squeeze(0)
    assert_close(found, torch.linalg.inv(lower), Rounding(F64, terms=r))
    assert found.triu(1).abs().max() == 0 if r > 1 else found == 1
