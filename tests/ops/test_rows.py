"""Operations on rows of stacks of matrices, against float64, by every backend of this process.

With TRITON_INTERPRET=1 that is the Triton kernels; test_triton.py runs it so.
"""

from __future__ import annotations

import math

import pytest
import torch

from curvadion import ops
from curvadion.ops import backends
from support.references import operations
from support.references.operations import INTERPRETED, numbers
from support.references.tolerance import Rounding, assert_close
from support.runs.pairwise import all_pairs, every_value

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
# (k, rows, columns): one tile and several, lines of whole 16 bytes and others, nothing at all.
SHAPES = [(1, 1, 1), (2, 40, 24), (3, 7, 600), (2, 130, 1), (1, 1, 70), (2, 0, 3), (2, 5, 0)]
SHAPES += [(1, 72, 520), (1, 9, 1040)]
# How a stack lies in memory: rows or columns without gaps, a part of each row, parts of columns.
ORDERS = ("rows", "columns", "part of rows", "part of columns")
# The interpreter is slow: kernels read what they are given in one order as float32 in each.
some = every_value if INTERPRETED else all_pairs

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


def stack(shape, dtype, device, order, seed, scale=1.0):
    k, rows, columns = shape
    if order == "rows":
        values = numbers(shape, dtype, device, seed)
    elif order == "columns":
        values = numbers((k, columns, rows), dtype, device, seed).mT
    elif order == "part of rows":
        values = numbers((k, rows, columns + 3), dtype, device, seed)[..., 1 : columns + 1]
    else:
        values = numbers((k, columns, rows + 8), dtype, device, seed)[..., 8:].mT
    return values.mul_(scale)


def stacks(dtypes, device, order, seed=0):
    """One stack a shape; dtypes in turn."""
    return [
        stack(shape, dtypes[i % len(dtypes)], device, order, seed + i)
        for i, shape in enumerate(SHAPES)
    ]


def wide(tensor):
    return tensor.double().cpu()


# ---------------------------------------------------------------- sums of rows


@pytest.mark.parametrize(
    ("power", "dtypes", "order"),
    some([1, 2], [[F32], [F16], [BF16, F32], [F16, F32]], ORDERS),
)
def test_sums_of_rows(backend, device, power, dtypes, order):
    U = stacks(dtypes, device, order)
    sums = ops.row_sums(U, power)
    for u, of_one in zip(U, sums, strict=True):
        assert of_one.dtype == F32
        expected = wide(u).abs().pow(power).sum(-1)
        terms = max(u.shape[-1], 1)
        assert_close(of_one, expected, Rounding(F32, terms=terms), elementwise=True)


def test_sums_of_float64_are_left_to_plain_pytorch(backend, device):
    [sums] = ops.row_sums([numbers((2, 5, 7), F64, device, 0)], 2)
    backends.refused.clear()
    assert sums.dtype == F64


# ---------------------------------------------------------------- second moments


def moments_problem(device, *, seed=0):
    """Squares of rows (k, rows), and moments of which some have masks and some skip a row."""
    shapes = [(2, 40), (1, 1), (3, 1500), (1, 0), (2, 7)]
    squares = [numbers(shape, F32, device, seed + i).square() for i, shape in enumerate(shapes)]
    problem = []
    for i, (k, rows) in enumerate(shapes):
        states = numbers((k, rows + 3), F32, device, 50 + i).square()
        mask = numbers((k, rows + 2), F32, device, 90 + i)[:, 2:] > 0 if i % 2 == 0 else None
        problem.append(
            ops.Moments(
                v=[state[3:] for state in states],  # unaligned
                width=3.0 + i,
                beta2=operations.scalars(k, 0.3, 0.99),
                eps=operations.scalars(k, 1e-8, 1e-2),
                mask=mask,
                skipped=int(i == 2),
            )
        )
    return squares, problem


def averaged(squares, moments):
    """v, factors and energies of one stack by their equations, in float64."""
    square = wide(squares)
    beta2, eps = (torch.tensor(each, dtype=F64)[:, None] for each in (moments.beta2, moments.eps))
    before = torch.stack([wide(v) for v in moments.v])
    v = beta2 * before + (1 - beta2) * square / moments.width
    if moments.mask is not None:
        v = torch.where(moments.mask.cpu(), v, before)
    factors = 1 / (v.sqrt() + eps)
    counted = square[:, moments.skipped :]
    after = counted * factors[:, moments.skipped :].square()
    return v, factors, torch.stack([counted.sum(1), after.sum(1)], dim=1)


@pytest.mark.parametrize("moves", [None, True])
def test_second_moments(backend, device, moves):
    squares, problem = moments_problem(device)
    expected = [averaged(*each) for each in zip(squares, problem, strict=True)]
    flag = None if moves is None else torch.tensor(moves, device=device)
    factors, energies = ops.second_moments_(squares, problem, flag)
    for moments, factor, energy, (v, f, e) in zip(
        problem, factors, energies, expected, strict=True
    ):
        few = Rounding(F32, terms=4)
        assert_close(torch.stack(list(moments.v)), v, few, elementwise=True)
        # Relative to each number, because factors differ by orders of magnitude.
        assert_close(factor.cpu() / f, torch.ones_like(f), few, elementwise=True)
        sums = Rounding(F32, terms=max(v.shape[1], 4))
        assert_close(energy.cpu() / e.clamp_min(1e-30), torch.sign(e), sums, elementwise=True)


def test_second_moments_stay_where_the_flag_is_false(backend, device):
    squares, problem = moments_problem(device)
    squares[0][0, 3] = math.nan
    before = [v.clone() for moments in problem for v in moments.v]
    ops.second_moments_(squares, problem, torch.tensor(False, device=device))
    assert all(map(torch.equal, (v for moments in problem for v in moments.v), before))


# ---------------------------------------------------------------- scaling


@pytest.mark.parametrize(("dtypes", "order"), some([[F32], [F16], [BF16, F32], [F16, F32]], ORDERS))
def test_rows_are_rescaled(backend, device, dtypes, order):
    U = stacks(dtypes, device, order)
    before = [u.clone() for u in U]
    factors = [numbers(u.shape[:2], F32, device, 30 + i).abs() for i, u in enumerate(U)]
    energies = [numbers((len(u), 2), F32, device, 60 + i).square() for i, u in enumerate(U)]
    rescaled = ops.rescaled_rows(U, factors, energies)
    for u, old, new, factor, energy in zip(U, before, rescaled, factors, energies, strict=True):
        assert torch.equal(u, old) and new.dtype == u.dtype
        c = (wide(energy)[:, 0] / wide(energy)[:, 1]).sqrt()
        expected = wide(u) * wide(factor)[..., None] * c[:, None, None]
        assert_close(new, expected, Rounding(u.dtype, terms=4), elementwise=True)
        if min(u.shape[1:]) > 1:  # in the order of U, so that the next operation finds them so
            assert (new.stride(1) < new.stride(2)) == (u.stride(1) < u.stride(2))


def test_what_a_dtype_cannot_hold_becomes_its_largest_number(backend, device):
    largest = torch.finfo(F16).max
    U = torch.tensor([[[0.0, 0.0], [1.0, -1.0], [1.0, 6e-8]]], dtype=F16, device=device)
    factors = torch.tensor([[3e38, 1e10, 0.5]], device=device)
    energies = torch.tensor([[4.0, 1.0]], device=device)  # twice the first is not a float32
    for u in (U, U.mT.contiguous().mT):
        [rescaled] = ops.rescaled_rows([u], [factors], [energies])
        assert rescaled.tolist() == [[[0, 0], [largest, -largest], [1, u[0, 2, 1].item()]]]


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
@pytest.mark.parametrize("v", [0.0, 1e-45, 1e-20])
def test_a_row_without_direction_has_none_afterwards(backend, device, dtype, eps, v):
    """From the start, and after its second moment has all but died out."""
    u = numbers((1, 6, 8), dtype, device, 0)
    u[0, 2] = 0
    u[0, 4] = 6e-8  # the smallest number of float16
    squares = ops.row_sums([u], 2)
    state = torch.full((6,), v, device=device)
    moments = ops.Moments([state], 8.0, [0.95], [eps])
    factors, energies = ops.second_moments_(squares, [moments])
    [rescaled] = ops.rescaled_rows([u], factors, energies)
    assert torch.isfinite(state).all() and torch.isfinite(rescaled).all()
    assert not rescaled[0, 2].any() and rescaled[0, [0, 1, 3, 5]].all(-1).all()
    # The length of all stays, and so do signs.
    rounding = Rounding(dtype, terms=4)
    assert_close(wide(rescaled).norm(), wide(u).norm(), rounding)
    assert torch.equal(wide(rescaled).sign(), wide(u).sign())


@pytest.mark.parametrize(
    ("dtypes", "order", "moves"),
    all_pairs([[F32], [BF16], [BF16, F32]], ORDERS, [None, True, False]),
)
def test_rows_of_a_mask_are_scaled_in_place(backend, device, dtypes, order, moves):
    X = [matrix for of_one in stacks(dtypes, device, order) for matrix in of_one]
    before = [x.clone() for x in X]
    masks = [numbers(x.shape[:1], F32, device, 30 + i) > 0 for i, x in enumerate(X)]
    factors = operations.scalars(len(X), 0.1, 0.9)
    flag = None if moves is None else torch.tensor(moves, device=device)
    ops.scale_rows_(X, masks, factors, flag)
    for x, old, mask, factor in zip(X, before, masks, factors, strict=True):
        if moves is False:
            assert torch.equal(x, old)
            continue
        expected = torch.where(mask.cpu()[:, None], factor * wide(old), wide(old))
        assert_close(x, expected, Rounding(x.dtype), elementwise=True)
        assert torch.equal(x[~mask], old[~mask])


def test_what_is_not_finite_stays_where_the_flag_is_false(backend, device):
    x = torch.full((4, 3), math.nan, device=device)
    x[1] = 1.0
    mask = torch.ones(4, dtype=torch.bool, device=device)
    ops.scale_rows_([x], [mask], [0.5], torch.tensor(False, device=device))
    assert x[1].tolist() == [1.0] * 3


# ---------------------------------------------------------------- some columns


@pytest.mark.parametrize(("dtypes", "order"), some([[F32], [F16], [BF16, F32]], ORDERS))
def test_columns_are_taken_and_put_back(backend, device, dtypes, order):
    B = stacks(dtypes, device, order)
    counts = [math.ceil(0.6 * b.shape[2]) for b in B]
    K = []
    for i, (b, r) in enumerate(zip(B, counts, strict=True)):
        generator = torch.Generator().manual_seed(i)
        each = [torch.randperm(b.shape[2], generator=generator)[:r] for _ in range(len(b))]
        K.append(torch.stack(each).sort(1).values.to(device))
    parts = ops.take_columns(B, K)
    turned = [b.stride(1) < b.stride(2) for b in B]
    whole = ops.put_columns(parts, K, [b.shape[2] for b in B], turned)
    for b, indices, part, back, by_column in zip(B, K, parts, whole, turned, strict=True):
        expected = torch.zeros_like(b)
        for i in range(len(b)):
            assert torch.equal(part[i], b[i][:, indices[i]])
            expected[i][:, indices[i]] = b[i][:, indices[i]]
        assert torch.equal(back, expected) and back.dtype == b.dtype
        if min(b.shape[1:]) > 1:
            assert (back.stride(1) < back.stride(2)) == by_column
    other = ops.put_columns(parts, K, [b.shape[2] for b in B], [not each for each in turned])
    assert all(map(torch.equal, whole, other))
