"""What lies between the products of Cholesky QR, against float64, by every backend here.

With TRITON_INTERPRET=1 that is the Triton kernels; test_triton.py runs it so.
"""

from __future__ import annotations

import math

import pytest
import torch

from curvadion import ops
from curvadion.ops import backends
from support.references import operations
from support.references.operations import numbers
from support.references.reference import positive_qr
from support.references.tolerance import Rounding, assert_close

F32, F64 = torch.float32, torch.float64
ROUNDOFF = 5e-7
SHIFT = 1e-13  # of the diagonals of Gram matrices
INF, NAN = math.inf, math.nan
# Rows and columns: one, a few, several blocks of rows, and several of columns.
SIZES = [(4, 1), (40, 7), (90, 70), (320, 300)]

pytestmark = [
    pytest.mark.numeric,
    # C++ has none of these operations.
    pytest.mark.parametrize(("backend", "device"), operations.places("torch")),
]


@pytest.fixture(autouse=True)
def nothing_is_refused(backend):
    backends.refused.clear()
    with ops.use_backend(backend):
        yield
    assert not backends.refused


def grams(P):
    return P.double().mT @ P.double()


# ---------------------------------------------------------------- lengths and floors


def floors_of(squares, least, scale, dependent, error):
    """By their definition, one column after another."""
    lengths = [math.sqrt(square) for square in squares]
    r = len(lengths)
    if not all(map(math.isfinite, lengths)) or max(lengths) <= max(least, 3e-5 * scale):
        return lengths, [INF] * r
    mean = math.sqrt(sum(length**2 for length in lengths) / r)
    floors = [2 * ROUNDOFF * mean] * r
    for j in range(r):
        if dependent[j]:
            kept = [e * a for e, a, d in zip(error, lengths, dependent, strict=True) if not d]
            lost = math.sqrt(sum(each**2 for each in kept) / r)
            leak = 2 * (lost + math.sqrt(r) * error[j] * mean)
            floors[j] = max(floors[j], leak)
    return lengths, floors


@pytest.mark.parametrize("of_product", [True, False])
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("r", [1, 7, 300])
def test_floors_are_those_of_their_definition(backend, device, r, dtype, of_product):
    k = 6
    squares = numbers((k, r), F64, device, 0).square()
    squares[1] *= 1e-80  # too short for float32
    squares[2, r - 1] = NAN
    squares[3, 0] = INF
    scale = torch.tensor([1.0, 0.0, 1.0, 1.0, 1e8, 1e-3], dtype=F64, device=device)
    dependent = numbers((k, r), F32, device, 1) > 0
    error = numbers((k, r), F64, device, 2).abs() * 1e-5
    given = (scale, dependent, error) if of_product else ()
    lengths, floors = ops.column_floors(squares, ROUNDOFF, dtype, *given)
    assert lengths.shape == floors.shape == (k, r) and floors.dtype == F64
    least = 2.0**10 * torch.finfo(dtype).tiny
    for t in range(k):
        rows = [each[t].tolist() for each in (squares, scale, dependent, error)]
        if not of_product:
            rows[1:] = 0.0, [False] * r, [0.0] * r
        expected = floors_of(rows[0], least, *rows[1:])
        finite = math.isfinite(sum(expected[0]))
        if finite:
            assert_close(
                lengths[t], torch.tensor(expected[0], dtype=F64), Rounding(F64), elementwise=True
            )
        if math.isinf(expected[1][0]):
            # No length is above the floor.
            assert not (lengths[t] > floors[t]).any()
        else:
            expected_floors = torch.tensor(expected[1], dtype=F64)
            assert_close(floors[t], expected_floors, Rounding(F64, terms=r), elementwise=True)
    assert torch.isinf(floors[1]).all() == (dtype == F32)


def test_the_diagonal_of_a_matrix_need_not_be_copied(backend, device):
    squares = grams(numbers((3, 20, 9), F64, device, 3)).diagonal(dim1=1, dim2=2)
    found = ops.column_floors(squares, ROUNDOFF, F32)
    expected = ops.column_floors(squares.contiguous(), ROUNDOFF, F32)
    assert all(map(torch.equal, found, expected))


# ---------------------------------------------------------------- the first pass


def first_pass(P, roundoff=ROUNDOFF):
    """What the operations make of P, with products in float64; and the factor."""
    gram = grams(P)
    lengths, floors = ops.column_floors(gram.diagonal(dim1=1, dim2=2), roundoff, P.dtype)
    factor = ops.first_factor(gram, lengths, floors, roundoff, P.dtype)
    e, _ = ops.exponents(factor.longest)
    scaled = P.double() * torch.exp2(-e)[:, None, None]
    return scaled @ factor.W.double(), factor, gram


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize(("m", "r"), SIZES)
def test_first_factor_is_that_of_the_columns_that_are_kept(backend, device, m, r, dtype):
    P = numbers((3, m, r), dtype, device, 4)
    lost = [set(), set(), set()]
    if r > 1:
        P[1, :, 2] = -2 * P[1, :, 0]  # exactly
        P[1, :, r - 1] = 0.0
        lost[1] = {2, r - 1}
    P[2, 0, 0] = NAN
    lost[2] = set(range(r))
    columns, factor, gram = first_pass(P)
    assert factor.W.dtype == dtype
    assert factor.error.dtype == factor.longest.dtype == F64
    for t in range(3):
        dependent = factor.dependent[t].cpu()
        assert set(dependent.nonzero().flatten().tolist()) == lost[t]
        assert bool(factor.longest[t].isnan()) == bool(P[t].isnan().any())
        assert not factor.W[t].cpu()[:, dependent].any()
        if dependent.all():
            continue
        kept = P[t].double().cpu()[:, ~dependent]
        condition = float(torch.linalg.cond(kept))
        # Gram matrices square the condition, and are shifted by many roundings of float64.
        in_float64 = SHIFT / torch.finfo(F64).eps * condition**2
        amplified = in_float64 if dtype == F64 else condition
        rounding = Rounding(dtype, terms=m, condition=amplified)
        assert_close(columns[t].cpu()[:, ~dependent], positive_qr(kept), rounding)
        lengths = gram[t].diagonal().sqrt().cpu()
        assert_close(factor.longest[t], lengths.max(), Rounding(F64, terms=m))
        # |P W - its rounded| = roundoff * root mean square * |column of W|
        R = torch.linalg.inv(positive_qr(kept).mT @ kept)
        expected = ROUNDOFF * (lengths.square().mean().sqrt()) * R.norm(dim=0)
        expected = expected.clamp_min(torch.finfo(dtype).eps)
        rounding = Rounding(F64, terms=m, condition=in_float64)
        assert_close(factor.error[t].cpu()[~dependent], expected, rounding)


@pytest.mark.parametrize("scale", [1e-34, 1e-20, 1e30])
def test_first_factor_fits_float32_whatever_the_scale(backend, device, scale):
    P = numbers((2, 30, 5), F32, device, 5)
    columns, factor, _ = first_pass(P * scale)
    assert not factor.dependent.any() and factor.W.isfinite().all()
    for given, found in zip(P.double().cpu(), columns.cpu(), strict=True):
        condition = float(torch.linalg.cond(given))
        assert_close(found, positive_qr(given), Rounding(F32, terms=30, condition=condition))


def test_columns_that_amplify_errors_of_others_are_dependent(backend, device):
    P = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.01, 1.0], [0.0, 0.0, 0.3]], device=device)
    _, factor, _ = first_pass(P[None], roundoff=2e-3)
    assert factor.dependent.tolist() == [[False, False, True]]


def test_later_columns_are_not_compared_with_the_noise_of_dependent_ones(backend, device):
    P = torch.eye(3, device=device)
    P[:, 1] = P[:, 0] + 1e-3 * P[:, 1]
    P[1, 2] = 1.0
    columns, factor, _ = first_pass(P[None], roundoff=1e-3)
    assert factor.dependent.tolist() == [[False, True, False]]
    directions = torch.nn.functional.normalize(columns[0], dim=0)[:, [0, 2]]
    expected = torch.nn.functional.normalize(P[:, [0, 2]].double(), dim=0)
    assert_close(directions, expected, Rounding(F32, terms=3))


def test_columns_whose_condition_is_too_large_are_dependent(backend, device):
    P = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1e-4, 1.0], [0.0, 0.0, 1e-4]], dtype=F64)
    _, factor, _ = first_pass(P[None].to(device), roundoff=1e-15)
    assert factor.dependent.tolist() == [[False, False, True]]


def test_errors_are_not_below_those_of_the_dtype(backend, device):
    _, factor, _ = first_pass(numbers((2, 20, 3), F32, device, 12), roundoff=1e-12)
    assert (factor.error == torch.finfo(F32).eps).all()


@pytest.mark.parametrize("value", [0.0, INF, NAN, 1e-38])
def test_a_matrix_without_a_signal_has_no_factor(backend, device, value):
    P = numbers((2, 12, 4), F32, device, 6)
    _, alone, _ = first_pass(P[1:])
    P[0] = value
    columns, factor, _ = first_pass(P)
    assert factor.dependent.tolist() == [[True] * 4, [False] * 4]
    assert not factor.W[0].any()
    assert columns[1].isfinite().all()
    assert_close(factor.W[1], alone.W[0], Rounding(F32, terms=4))


# ---------------------------------------------------------------- the second pass


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize(("m", "r"), SIZES)
def test_second_factor_takes_dependent_columns_last(backend, device, m, r, dtype):
    P = numbers((3, m, r), F64, device, 7)
    dependent = numbers((3, r), F32, device, 8) > 0.5
    dependent[0] = False
    if r > 1:
        dependent[1, 0] = True
        dependent[2, 1] = True
        P[2, :, 1] = 0.0
    before = numbers((3, r), F64, device, 9).abs()
    gram = grams(P)
    W, error = ops.second_factor(gram, dependent, before, ROUNDOFF, dtype)
    assert W.dtype == dtype
    for t in range(3):
        p, last, w = P[t].cpu(), dependent[t].cpu(), W[t].double().cpu()
        zero = ~p.any(dim=0)
        # The others in their order, then these in theirs.
        order = [j for j in range(r) if not last[j]] + [j for j in range(r) if last[j]]
        order = [j for j in order if not zero[j]]
        condition = float(torch.linalg.cond(p[:, order]))
        rounding = Rounding(dtype, terms=m, condition=condition**2 if dtype == F64 else condition)
        assert_close((p @ w)[:, order], positive_qr(p[:, order]), rounding)
        assert not w[:, zero].any()
        mean = p.square().sum(dim=0).mean().sqrt()
        expected = torch.where(last, ROUNDOFF * mean * w.norm(dim=0), before[t].cpu())
        assert_close(error[t], expected, Rounding(dtype, terms=r), elementwise=True)


@pytest.mark.parametrize("module", ["curvadion.ops.cholesky_qr", "curvadion_kernels.cholesky_qr"])
def test_few_matrices_at_a_time_give_the_same(backend, device, module, monkeypatch):
    if backend == "torch" and "kernels" in module:
        pytest.skip("plain PyTorch has parts of its own")
    P = numbers((3, 30, 6), F32, device, 10)
    dependent = numbers((3, 6), F32, device, 11) > 0.5

    def both():
        _, factor, gram = first_pass(P)
        return *factor, *ops.second_factor(gram, dependent, factor.error, ROUNDOFF, F32)

    whole = both()
    monkeypatch.setattr(f"{module}.float64_chunk", lambda device: 80)
    for found, expected in zip(both(), whole, strict=True):
        if found.dtype == torch.bool:
            assert torch.equal(found, expected)
        else:
            assert_close(found, expected, Rounding(found.dtype, terms=6))


# ---------------------------------------------------------------- completing directions


def direction(row, column):
    """One value, in Python's integers."""
    x = 48_271 * (row + 1) + 69_621 * (column + 1)
    for factor in (16_807, 39_373, 630_360_016):
        x = (12_345 + factor * x) % (2**31 - 1)
        x ^= x >> 13
    return (x % (2**31 - 1)) / ((2**31 - 1) / 2) - 1.0


@pytest.mark.parametrize("dtypes", [[F32], [F64], [F32, F64]])
def test_only_dependent_columns_are_replaced(backend, device, dtypes):
    m = 11 if operations.INTERPRETED else 70  # of which two matrices take some blocks
    shapes = [(3, 40, 7), (1, 1, 1), (2, 0, 3), (2, 9, 5), (2, m, 300)]
    rows = [range(1000, 1040), range(1), range(3, 3), range(5, 14), range(m)]
    columns = [
        numbers(shape, dtypes[i % len(dtypes)], device, 20 + i) for i, shape in enumerate(shapes)
    ]
    dependent = [numbers((k, r), F32, device, 30 + i) > 0.5 for i, (k, _, r) in enumerate(shapes)]
    dependent[1][:] = True
    dependent[3][0] = False
    before = [p.clone() for p in columns]
    for p, lost in zip(columns, dependent, strict=True):
        # What is replaced may hold anything.
        p.masked_fill_(lost.unsqueeze(1), NAN)
    versions = [p._version for p in columns]
    ops.complete_(columns, dependent, rows)
    assert all(p._version > version for p, version in zip(columns, versions, strict=True))
    for p, lost, old, held in zip(columns, dependent, before, rows, strict=True):
        _, m, r = p.shape
        values = [[direction(row, j) for j in range(r)] for row in held]
        table = torch.tensor(values, dtype=F64).view(m, r).to(p.dtype)
        expected = torch.where(lost.cpu().unsqueeze(1), table, old.cpu())
        # On a GPU torch divides by multiplying with a reciprocal, which rounds twice.
        torch.testing.assert_close(p.cpu(), expected, rtol=0, atol=2.0**-51)


def test_a_shift_of_2_to_the_31_rows_overflows_nothing(backend, device):
    [p] = columns = [torch.zeros(1, 2, 2, device=device)]
    dependent = [torch.ones(1, 2, dtype=torch.bool, device=device)]
    first = 2**31 + 5
    ops.complete_(columns, dependent, [range(first, first + 2)])
    expected = [[direction(row, j) for j in range(2)] for row in (first, first + 1)]
    assert torch.equal(p[0].cpu(), torch.tensor(expected, dtype=F64).float())
