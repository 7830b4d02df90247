"""Stacks that share operations on an accelerator: here the same code with tensors of a CPU."""

from __future__ import annotations

import pytest
import torch

from curvadion import Dion
from curvadion.layout.matrix import Extent
from curvadion.ops import cholesky_qr
from curvadion.update import orthonormalize, power_iteration
from curvadion.update.orthonormalize import Floor, orthonormal_columns
from support.references.reference import DionReference, positive_qr, relative_error
from support.references.tolerance import Rounding, assert_close, assert_within, worst
from support.runs.pairwise import all_pairs
from support.runs.seeded import gradient, random, weights

pytestmark = pytest.mark.numeric
F32 = torch.float32

# Five matrices whose right factors have one shape, with r = 8, in stacks of several heights and
# strides; and one with r = 4.
SHAPES = [(40, 16), (16, 40), (16, 16), (48, 16), (40, 16), (24, 8)]
STEPS = 4


@pytest.fixture(autouse=True)
def grouped(monkeypatch):
    for module in (orthonormalize, power_iteration):
        monkeypatch.setattr(module, "GROUPED", ("cpu",))


def run(rule, right_factor, look_ahead, dtype=F32, steps=STEPS):
    """Errors of weights and momenta after some steps on all matrices."""
    options = dict(momentum_rule=rule, right_factor=right_factor, look_ahead=look_ahead)
    X = [torch.nn.Parameter(weights(shape, i).to(dtype)) for i, shape in enumerate(SHAPES)]
    optimizer = Dion(X, rank_fraction=0.5, replicas="single", **options)
    references = [DionReference(x.detach(), 1, min(x.shape) // 2, **options) for x in X]
    for step in range(steps):
        for i, (x, reference) in enumerate(zip(X, references, strict=True)):
            x.grad = gradient(x.shape, step, 0, seed=i).to(dtype)
            reference.step([x.grad], True)
        optimizer.step()
    errors = []
    for x, reference in zip(X, references, strict=True):
        errors.append(relative_error(x.detach(), reference.X[0]))
        errors.append(relative_error(optimizer.state[x]["momentum"], reference.M[0]))
        errors.append(relative_error(optimizer.state[x]["Q"], reference.Q[0]))
    return errors


@pytest.mark.parametrize(
    ("rule", "right_factor", "look_ahead", "chunk"),
    all_pairs(["error_feedback", "plain"], ["column_normalized", "qr"], [0.0, 1.5], [2**20, 150]),
)
def test_every_matrix_follows_its_equations(rule, right_factor, look_ahead, chunk, monkeypatch):
    for module in (orthonormalize, cholesky_qr):
        monkeypatch.setattr(module, "float64_chunk", lambda device: chunk)
    errors = run(rule, right_factor, look_ahead)
    assert_within(worst(errors), Rounding(F32, terms=48, condition=10, steps=STEPS))


@pytest.mark.parametrize(("right_factor", "factors"), [("column_normalized", 1), ("qr", 2)])
def test_stacks_of_one_rank_are_factorised_at_once(right_factor, factors, monkeypatch):
    counts = []
    cholesky = torch.linalg.cholesky_ex

    def counted(gram):
        counts.append(gram.shape)
        return cholesky(gram)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", counted)
    run("error_feedback", right_factor, 0.0, steps=1)
    passes = 2 * factors
    assert sorted(counts) == sorted([(5, 8, 8), (1, 4, 4)] * passes)


def test_stacks_keep_their_own_floors():
    P = [random(i, shape=(2, 30, 4)) for i in range(3)]
    for p in P[1:]:
        p[0, :, 2] = random("short", shape=(30,)) * 1e-4
    found = orthonormal_columns(P, [Extent(range(30))] * 3, [Floor(1e-3), Floor(1e-3), Floor(1e-9)])
    expected = torch.zeros(2, 4, dtype=torch.bool)
    expected[0, 2] = True
    assert [torch.equal(one.dependent, expected) for one in found] == [False, True, False]
    assert not found[0].dependent.any() and not found[2].dependent.any()


def test_matrices_have_their_own_dependent_columns():
    P = [random("dependent", i, shape=(3, 30, 4)) for i in range(2)]
    dependent = [[{2}, {3}, set()], [{1}, {2, 3}, {3}]]
    for p, sets in zip(P, dependent, strict=True):
        for given, columns in zip(p, sets, strict=True):
            for j in columns:
                given[:, j] = given[:, 0] * (j + 1)
    found = orthonormal_columns(P, [Extent(range(30))] * 2)
    for p, one, sets in zip(P, found, dependent, strict=True):
        for given, q, lost, columns in zip(p, one.columns, one.dependent, sets, strict=True):
            assert set(lost.nonzero().flatten().tolist()) == columns
            kept = given[:, ~lost].double()
            rounding = Rounding(F32, terms=4, condition=float(torch.linalg.cond(kept)))
            assert_close(q[:, ~lost], positive_qr(kept), rounding)
            error = (q.double().mT @ q.double() - torch.eye(4)).norm()
            assert_within(float(error), Rounding(F32, terms=4, condition=10))


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1e-38])
def test_a_matrix_without_a_signal_leaves_the_others_as_they_are(value, complete):
    P = [random("matrix", i, shape=(2, m, 4)) for i, m in enumerate((30, 20, 30))]
    P[1][0] = value
    rows = [Extent(range(p.shape[1])) for p in P]
    found = orthonormal_columns(P, rows, complete=complete)
    assert found[1].dependent.tolist() == [[True] * 4, [False] * 4]
    assert not found[0].dependent.any() and not found[2].dependent.any()
    for p, one in zip(P, found, strict=True):
        for given, q, dependent in zip(p, one.columns, one.dependent, strict=True):
            if dependent.all() and not complete:
                assert not q.any()
            elif dependent.all():
                error = (q.double().mT @ q.double() - torch.eye(4)).norm()
                assert_within(float(error), Rounding(F32, terms=4, condition=10))
            else:
                condition = float(torch.linalg.cond(given.double()))
                rounding = Rounding(F32, terms=4, condition=condition)
                assert_close(q, positive_qr(given.double()), rounding)


def test_directions_of_shards_do_not_depend_on_what_shares_a_table():
    """Rows of two matrices on one rank, near each other and far apart."""
    for rows in ([range(10, 20), range(14, 24)], [range(10, 20), range(900, 910)]):
        P = [torch.zeros(1, 10, 3) for _ in rows]
        found = orthonormal_columns(P, list(map(Extent, rows)))
        for p, one, held in zip(P, found, rows, strict=True):
            (alone,) = orthonormal_columns([p], [Extent(held)])
            assert_close(one.columns, alone.columns, Rounding(F32, terms=10))
        assert relative_error(found[0].columns, found[1].columns) > 0.1
