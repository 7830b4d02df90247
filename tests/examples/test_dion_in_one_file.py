"""The example on one screen takes the package's steps."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distributed
from curvadion import RMMC, CurvaDion, Dion
from dion_in_one_file import DionInOneFile
from seeded import gradient, weights
from tolerance import Rounding, assert_close

pytestmark = pytest.mark.numeric
SHAPES, STEPS = [(24, 16), (12, 20), (16, 16)], 6


def model():
    X = [nn.Parameter(weights(shape).float()) for shape in SHAPES]
    return X, nn.Parameter(torch.linspace(-1, 1, 9))


def train(rank, threshold):
    """Distances of the two optimizers' weights, relative to the package's."""
    group = dist.group.WORLD
    (ours, vector), (its, its_vector) = model(), model()
    groups = [{"params": ours}, {"params": [vector], "algorithm": "adamw"}]
    if threshold is None:
        optimizer = Dion(groups, replicas=group)
    else:
        optimizer = CurvaDion(groups, replicas=group, gate=RMMC(threshold), max_local_steps=None)
    example = DionInOneFile([*its, its_vector], replicas=group, threshold=threshold)
    opened = []
    for step in range(STEPS):
        G = [gradient(shape, step, rank).float() for shape in SHAPES]
        G.append(torch.cos(torch.arange(9.0) + step + rank))
        for X, G_i in zip([*ours, vector], G, strict=True):
            X.grad = G_i.clone()
        for X, G_i in zip([*its, its_vector], G, strict=True):
            X.grad = G_i.clone()
        optimizer.step()
        example.step()
        opened.append((optimizer.report.gate_open, example.local_steps == 0))
    return [*its, its_vector], [*ours, vector], opened


@pytest.mark.parametrize(("replicas", "threshold"), [(2, None), (2, 0.4)])
def test_takes_the_steps_of_the_package(replicas, threshold):
    for its, ours, opened in distributed.run(replicas, train, threshold):
        assert all(one == other for one, other in opened)
        assert threshold is None or {one for one, _ in opened} == {True, False}
        for X, wanted in zip(its, ours, strict=True):
            rounding = Rounding(torch.float32, terms=24, condition=8, steps=STEPS)
            assert_close(X.detach(), wanted.detach(), rounding, what=tuple(X.shape))
