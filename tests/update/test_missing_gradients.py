"""A parameter without a gradient rests in a replica's own step; else zeros take its place."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distributed
from curvadion import CurvaDion, FixedPeriod, LowRank, QuantizedAverage
from seeded import gradient, weights


def rest(rank, sync):
    """What moves at a closed step and at an opening if replica 1 lacks every second gradient."""
    X = [nn.Parameter(weights((8, 6)).float()) for _ in range(2)]
    X += [nn.Parameter(torch.linspace(-1, 1, 5)) for _ in range(2)]
    groups = [{"params": X[:2]}, {"params": X[2:], "algorithm": "adamw"}]
    optimizer = CurvaDion(groups, replicas=dist.group.WORLD, gate=FixedPeriod(2), sync=sync)
    moved = []
    for step in range(4):
        for i, x in enumerate(X):
            missing = step >= 2 and rank == 1 and i % 2 == 1
            own = gradient((8, 6), step, 10 * rank + i).float()
            x.grad = None if missing else own if x.dim() == 2 else own[0, :5].clone()
        before = [(x.detach().clone(), _states(optimizer, x)) for x in X]
        optimizer.step()
        moved.append(
            [
                (not torch.equal(x, was), not _same(_states(optimizer, x), states))
                for x, (was, states) in zip(X, before, strict=True)
            ]
        )
    return moved[2], [x.detach() for x in X]


def _states(optimizer, x):
    state = optimizer.state.get(x, {})
    return {key: t.clone() for key, t in state.items() if torch.is_tensor(t)}


def _same(these, those):
    return these.keys() == those.keys() and all(torch.equal(these[k], those[k]) for k in these)


@pytest.mark.parametrize("sync", [LowRank(), QuantizedAverage(bits=8)])
def test_what_has_no_gradient_rests_on_its_replica_until_the_opening(sync):
    (first, weights_of_first), (second, weights_of_second) = distributed.run(2, rest, sync)
    assert first == [(True, True)] * 4
    assert second == [(True, True), (False, False)] * 2
    for one, other in zip(weights_of_first, weights_of_second, strict=True):
        assert torch.equal(one, other)
