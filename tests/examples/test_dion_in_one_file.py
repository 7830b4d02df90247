"""The example on one screen takes the package's steps."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from curvadion import RMMC, CurvaDion, Dion
from dion_in_one_file import DionInOneFile
from support.references.tolerance import Rounding, assert_close
from support.runs import distributed
from support.runs.seeded import gradient, weights

pytestmark = pytest.mark.numeric
SHAPES, STEPS = [(24, 16), (12, 20), (16, 16)], 6


def model():
    X = [nn.Parameter(weights(shape).float()) for shape in SHAPES]
    return X, nn.Parameter(torch.linspace(-1, 1, 9))


@pytest.mark.parametrize("threshold", [None, 0.4])
@distributed.on_ranks(2)
def test_takes_the_steps_of_the_package(rank, threshold):
    group = dist.group.WORLD
    (ours, vector), (its, its_vector) = model(), model()
    groups = [{"params": ours}, {"params": [vector], "algorithm": "adamw"}]
    if threshold is None:
        optimizer = Dion(groups, replicas=group)
    else:
        optimizer = CurvaDion(groups, replicas=group, gate=RMMC(threshold), max_local_steps=None)
    ours, its, opened = [*ours, vector], [*its, its_vector], set()
    example = DionInOneFile(its, replicas=group, threshold=threshold)
    for step in range(STEPS):
        G = [gradient(shape, step, rank).float() for shape in SHAPES]
        G.append(torch.cos(torch.arange(9.0) + step + rank))
        for X, Y, G_i in zip(ours, its, G, strict=True):
            X.grad, Y.grad = G_i.clone(), G_i.clone()
        optimizer.step()
        example.step()
        assert optimizer.report.gate_open == (example.local_steps == 0)
        opened.add(optimizer.report.gate_open)
    assert threshold is None or opened == {True, False}
    for X, wanted in zip(its, ours, strict=True):
        rounding = Rounding(torch.float32, terms=24, condition=8, steps=STEPS)
        assert_close(X, wanted, rounding, what=tuple(X.shape))
