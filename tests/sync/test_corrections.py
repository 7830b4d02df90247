"""Corrections after an average, against their equations in float64, whole and in shards.

The references are written from the docstrings of curvadion.sync.corrections. Matrices in them are
oriented: they have at least as many rows as columns.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from curvadion import Dion
from curvadion.sync.corrections import (
    align_momenta_,
    correct_polar_,
    forget_spectra,
    place_spectra,
)
from curvadion.update.polar import PolarDirections
from curvadion.update.power_iteration import Factors, LowRankDirections
from support.references.tolerance import Rounding, assert_close
from support.runs import distributed, shards
from support.runs.seeded import random

pytestmark = pytest.mark.numeric

# Tall, wide and square, two of one stack; the last one is in a group of its own.
SHAPES = [(12, 8), (8, 12), (9, 9), (12, 8), (16, 6)]
RATES = [0.3, 0.05]  # sums of lr, by group
RANK = 3
# Of products with inner dimensions up to 16, three in a row.
ROUNDING = Rounding(torch.float32, terms=16, steps=3)


def oriented(matrix):
    return matrix if matrix.shape[0] >= matrix.shape[1] else matrix.mT


def length_of(number):
    """L of a matrix: its group's rate times the scale sqrt(m / n) of a spectral update."""
    m, n = SHAPES[number]
    return RATES[number == len(SHAPES) - 1] * math.sqrt(m / n)


def rate(p):
    return RATES[p.position]


def orthonormal(number, r, seed):
    """Columns (m, r) of an oriented matrix's shape."""
    m = max(SHAPES[number])
    return torch.linalg.qr(random("columns", number, r, seed, shape=(m, r)).double())[0]


def with_values(number, values, seed):
    """An oriented matrix, float64, with these singular values."""
    n = min(SHAPES[number])
    V = torch.linalg.qr(random("V", number, seed, shape=(n, n)).double())[0]
    return orthonormal(number, n, seed) @ torch.diag(values) @ V.mT


def ascending(number, first, last):
    return torch.linspace(first, last, min(SHAPES[number]), dtype=torch.float64)


class Case:
    """Matrices under Dion, with values that tests choose, whole or sharded.

    Args:
        axes: how every matrix is cut over all ranks, as in :mod:`shards`; None: it is whole.
    """

    def __init__(self, axes=None):
        self.mesh = None if axes is None else init_device_mesh("cpu", (dist.get_world_size(),))
        self.axes = axes
        X = [nn.Parameter(self.cut(torch.zeros(shape), whole=False)) for shape in SHAPES]
        groups = [{"params": X[:-1]}, {"params": X[-1:]}]
        scale = {"update_scale": "spectral", "replicas": "single"}
        self.optimizer = Dion(groups, direction="polar", rank_fraction=1.0, **scale)
        for x in X:
            x.grad = torch.zeros_like(x)
        self.optimizer.step()
        self.plan = self.optimizer._collective_plan()

    def cut(self, tensor, *, whole):
        """This rank's DTensor, or the local tensor in it; whole: oriented as the parameter is."""
        if self.mesh is None:
            return tensor.clone()
        made = shards.shard(tensor.contiguous(), self.axes, self.mesh)
        return made.to_local() if whole else made

    def shard(self, number, matrix):
        """This rank's part of an oriented matrix, as its parameter stores it."""
        m, n = SHAPES[number]
        return self.cut((matrix if m >= n else matrix.mT).float(), whole=True)

    def stacks(self, matrices):
        """Oriented matrices as shards (k, m_i, n_j) by stack."""
        stacks = []
        for stack in self.plan.stacks:
            parts = []
            for m in stack:
                part = self.shard(m.parameter.index, matrices[m.parameter.index])
                parts.append(part.mT if m.layout.transposed else part)
            stacks.append(torch.stack(parts))
        return stacks

    def fill(self, key, matrices):
        """Write oriented matrices to a state, or to the weights if key is None."""
        for p in self.plan.parameters:
            part = self.shard(p.index, matrices[p.index])
            if key is None:
                p.local.copy_(part)
            elif key in p.state and self.mesh is not None:
                p.state[key].to_local().copy_(part)
            else:
                p.state[key] = part

    def fill_momenta(self, matrices):
        """Write momenta, and what the last step has stored of their lengths."""
        self.fill("momentum", matrices)
        for m in self.plan.matrices:
            m.R_scale.fill_(torch.linalg.matrix_norm(matrices[m.parameter.index], 2))

    def assert_close(self, key, expected, *, scales=None, rounding=ROUNDING):
        """Compare a state, or the weights, with oriented matrices."""
        for p in self.plan.parameters:
            found = p.local if key is None else p.state[key]
            found = found.to_local() if hasattr(found, "to_local") else found
            part = self.shard(p.index, expected[p.index])
            scale = float(expected[p.index].norm()) if scales is None else scales[p.index]
            assert_close(found, part, rounding, scale=scale, what=(key, SHAPES[p.index]))


# ---------------------------------------------------------------- momentum alignment


def aligned(M, S, missing, L, r):
    """M - (D - D_i) S / L; beyond L sqrt(r), D - D_i shrinks with the square of its length."""
    step = missing / L
    excess = float(missing.square().sum()) / (L * L * r)
    if excess > 1:
        step = step / excess
    return M - step @ S


def momenta(seed):
    """Momenta of lengths that differ by orders of magnitude."""
    return [
        oriented(random("M", i, seed, shape=shape)).double() * 10.0 ** (2 * i - 3)
        for i, shape in enumerate(SHAPES)
    ]


def missing_of(factor, seed):
    """D - D_i, of length factor L sqrt(r) with r the full rank."""
    made = []
    for i, shape in enumerate(SHAPES):
        D = oriented(random("D", i, seed, shape=shape)).double()
        made.append(D * (factor * length_of(i) * math.sqrt(min(shape)) / D.norm()))
    return made


def polar_directions(case, U):
    return PolarDirections(case.plan, case.stacks(U))


def full_directions(seed):
    return [orthonormal(i, min(shape), seed) for i, shape in enumerate(SHAPES)]


def check_polar_alignment(case, factor):
    M = momenta(0)
    U = full_directions(0)
    missing = missing_of(factor, 0)
    case.fill_momenta(M)
    align_momenta_(polar_directions(case, U), case.stacks(missing), 0.0, rate)
    expected = []
    for i, shape in enumerate(SHAPES):
        expected.append(aligned(M[i], U[i].mT @ M[i], missing[i], length_of(i), min(shape)))
        assert (expected[i] - M[i]).norm() > 1e-3 * M[i].norm()  # the correction can be seen
    case.assert_close("momentum", expected)


@pytest.mark.parametrize("factor", [0.01, 0.9, 1.1, 30.0])
def test_momenta_turn_to_the_mean_of_polar_directions(factor):
    check_polar_alignment(Case(), factor)


@pytest.mark.parametrize("axes", ["0", "1"])
@distributed.on_ranks(2)
def test_shards_of_momenta_turn_as_whole_ones_do(rank, axes):
    for factor in (0.5, 3.0):
        check_polar_alignment(Case(axes), factor)


@pytest.mark.parametrize("factor", [0.1, 3.0])
def test_momenta_turn_to_the_mean_of_low_rank_directions(factor):
    """U = P Q^T, where only the columns of P are orthonormal, and r is the rank."""
    case = Case()
    M = momenta(1)
    P = [orthonormal(i, RANK, 1) for i in range(len(SHAPES))]
    Q = [random("Q", i, shape=(min(s), RANK)).double() for i, s in enumerate(SHAPES)]
    Q = [q / q.norm(dim=0) for q in Q]
    missing = missing_of(factor * 0.5, 1)
    case.fill_momenta(M)
    factors = []
    for stack in case.plan.stacks:
        numbers = [m.parameter.index for m in stack]
        of_P, of_Q = (torch.stack([A[i] for i in numbers]).float() for A in (P, Q))
        factors.append(Factors(of_P, torch.empty(0), of_Q))
    directions = LowRankDirections(case.plan, factors)
    align_momenta_(directions, case.stacks(missing), 0.0, rate)
    expected = []
    for i in range(len(SHAPES)):
        S = (P[i] @ Q[i].mT).mT @ M[i]
        expected.append(aligned(M[i], S, missing[i], length_of(i), RANK))
    case.assert_close("momentum", expected)


@pytest.mark.parametrize("axes", [None, "0", "1"])
def test_spectra_are_means_over_openings(axes):
    distributed.run(1 if axes is None else 2, openings_with_spectra, axes)


def openings_with_spectra(rank, axes):
    """S counts with 0.2, those of earlier openings with 0.8 of what they did."""
    decay = 0.8
    case = Case(axes)
    place_spectra(case.plan.parameters, kept=True)
    sums = [0.0] * len(SHAPES)
    weight = 0.0
    for seed in range(4):
        if seed == 3:
            forget_spectra(case.plan.parameters)
            sums = [0.0] * len(SHAPES)
            weight = 0.0
        M = momenta(seed)
        U = full_directions(seed)
        missing = missing_of(0.5, seed)
        case.fill_momenta(M)
        align_momenta_(polar_directions(case, U), case.stacks(missing), decay, rate)
        weight = decay * weight + 1 - decay
        expected = []
        for i, shape in enumerate(SHAPES):
            sums[i] = decay * sums[i] + (1 - decay) * U[i].mT @ M[i]
            mean = sums[i] / weight
            expected.append(aligned(M[i], mean, missing[i], length_of(i), min(shape)))
        case.assert_close("momentum", expected)
    place_spectra(case.plan.parameters, kept=False)
    assert not any({"spectrum", "spectrum_weight"} & p.state.keys() for p in case.plan.parameters)


def test_replicas_that_have_not_moved_keep_their_momenta():
    """L is 0, and nothing is missing."""
    case = Case()
    M = momenta(0)
    case.fill_momenta(M)
    nothing = [torch.zeros_like(m) for m in M]
    directions = polar_directions(case, full_directions(0))
    align_momenta_(directions, case.stacks(nothing), 0.0, lambda p: 0.0)
    case.assert_close("momentum", M)


# ---------------------------------------------------------------- polar correction


def corrected(D, L):
    """L (V - V V^T V) / 2 with V = D / L, bounded by what a V of singular values up to 1 gives.

    (s - s^3) / 2 is largest at sqrt(1 / 3), where it is 1 / (3 sqrt(3)).
    """
    V = D / L
    change = (V - V @ V.mT @ V) / 2
    largest = math.sqrt(min(V.shape)) / (3 * math.sqrt(3))
    return L * change * min(1.0, largest / float(change.norm()))


def check_polar_correction(case, first, last, together):
    """Mean movements whose singular values are from ``first`` to ``last`` times L."""
    numbers = range(len(SHAPES))
    D = [with_values(i, ascending(i, first, last), 0) * length_of(i) for i in numbers]
    start = [oriented(random("A", i, shape=shape)).double() for i, shape in enumerate(SHAPES)]
    anchors = [a + d for a, d in zip(start, D, strict=True)]
    # Local steps since the mean was sent.
    X = anchors if together else [a + 0.1 * a.sin() for a in anchors]
    case.fill("anchor", anchors)
    case.fill(None, X)
    correct_polar_(case.plan, case.stacks(D), rate, together=together)
    changes = [corrected(d, length_of(i)) for i, d in enumerate(D)]
    scales = [float(a.norm()) for a in anchors]
    for key, before in (("anchor", anchors), (None, X)):
        expected = [b + change for b, change in zip(before, changes, strict=True)]
        case.assert_close(key, expected, scales=scales)
    for change, scale in zip(changes, scales, strict=True):
        assert change.norm() > 100 * ROUNDING.allowed * scale  # the correction can be seen


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("first", "last"), [(0.1, 1.0), (0.6, 0.9), (0.5, 4.0)])
def test_mean_movements_take_a_step_of_newton_and_schulz(first, last, together):
    check_polar_correction(Case(), first, last, together)


@pytest.mark.parametrize("axes", ["0", "1"])
@distributed.on_ranks(2)
def test_shards_are_corrected_as_whole_matrices_are(rank, axes):
    for last in (1.0, 4.0):
        check_polar_correction(Case(axes), 0.3, last, together=False)


def test_replicas_that_took_one_direction_are_left_as_they_are():
    """All singular values of D / L are 1."""
    case = Case()
    numbers = range(len(SHAPES))
    D = [with_values(i, ascending(i, 1.0, 1.0), 0) * length_of(i) for i in numbers]
    anchors = [torch.ones_like(d) for d in D]
    case.fill("anchor", anchors)
    case.fill(None, anchors)
    correct_polar_(case.plan, case.stacks(D), rate)
    case.assert_close("anchor", anchors)
    case.assert_close(None, anchors)


@pytest.mark.parametrize("L", [0.0, 1e-12])
def test_what_moves_without_steps_is_not_corrected(L):
    """D holds only what codes had lost before, and D / L could overflow."""
    case = Case()
    D = [torch.ones(max(shape), min(shape)).double() for shape in SHAPES]
    case.fill("anchor", D)
    case.fill(None, D)
    correct_polar_(case.plan, case.stacks(D), lambda p: L)
    for p in case.plan.parameters:
        assert p.local.eq(1).all()
        assert p.state["anchor"].eq(1).all()


def test_without_matrices_there_is_nothing_to_correct():
    groups = [{"params": [nn.Parameter(torch.ones(3))], "algorithm": "adamw"}]
    plan = Dion(groups, replicas="single")._collective_plan()
    align_momenta_(PolarDirections(plan, []), [], 0.5, rate)
    correct_polar_(plan, [], rate)
