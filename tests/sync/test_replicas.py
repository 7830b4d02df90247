"""Several replicas: what they compute, what they send, and how they stay together."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distributed
from curvadion import CurvaDion, FixedPeriod, LowRank, WireMeter
from curvadion.sync.meeting import MEETING_BYTES
from scheduled import Scheduled
from seeded import gradient
from tolerance import Rounding, assert_close, assert_within

pytestmark = pytest.mark.numeric
SHAPES = [(24, 16), (16, 24), (20, 20), (1, 12), (24, 16)]
VECTORS = [(16,), (7, 3), ()]
NUMBERS = sum(torch.Size(shape).numel() for shape in SHAPES + VECTORS)
VECTOR_NUMBERS = sum(torch.Size(shape).numel() for shape in VECTORS)
ROUNDING = Rounding(torch.float32, terms=24)  # of weights after some steps


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES + VECTORS]


def groups(X):
    k = len(SHAPES)
    return [
        {"params": X[:k], "rank_fraction": 0.3},
        {"params": X[k:], "algorithm": "adamw", "lr": 0.003, "weight_decay": 0.1},
    ]


def train(rank, steps, gate, sync):
    """Weights, per-step reports, bytes and calls of a run on seeded gradients."""
    X = parameters()
    how = {"gate": gate, "sync": sync, "max_local_steps": None}
    optimizer = CurvaDion(groups(X), replicas=dist.group.WORLD, **how)
    reports, sent = [], []
    for step in range(steps):
        for x in X:
            x.grad = gradient(tuple(x.shape), step, rank)
        with WireMeter() as meter:
            optimizer.step()
        sent.append((meter.total_bytes, meter.total_calls))
        reports.append(optimizer.report)
    return [x.detach() for x in X], reports, sent, optimizer


def run_bytes(rank, average_weights, gate):
    _, reports, sent, _ = train(rank, 6, gate, LowRank(average_weights))
    return sent, [report.wire_bytes for report in reports]


def low_rank_bytes():
    """4 bytes a number: P (max(m, n) x r) and R (min(m, n) x r) of every matrix."""
    return sum(4 * (m + n) * -(-round(0.3 * min(m, n), 9) // 1) for m, n in SHAPES)


@pytest.mark.parametrize(
    ("replicas", "average_weights", "gate", "closed"),
    [
        (2, True, FixedPeriod(3), 0),
        (2, False, Scheduled((3, 6)), MEETING_BYTES),
        (4, True, Scheduled((3, 6)), MEETING_BYTES),
    ],
)
def test_bytes_of_every_step_equal_the_formula(replicas, average_weights, gate, closed):
    """closed: what a closed step sends. Of a user's own gate nobody knows what it will say."""
    synchronized = MEETING_BYTES + low_rank_bytes() + 4 * VECTOR_NUMBERS
    weights_and_moments = 4 * (NUMBERS + 2 * VECTOR_NUMBERS + len(VECTORS))
    verification = 48
    for sent, reported in distributed.run(replicas, run_bytes, average_weights, gate):
        extra = weights_and_moments if average_weights else 0
        assert [count for count, _ in sent] == [
            MEETING_BYTES + verification,
            closed,
            synchronized + extra,
            closed,
            closed,
            synchronized + extra,
        ]
        calls = [calls for _, calls in sent]
        assert calls[1] == calls[3] == calls[4] == (closed > 0)
        # Gate, P, R, the other parameters' gradients; weights and moments, their counters.
        assert calls[5] == (6 if average_weights else 4)
        assert reported == [count for count, _ in sent]


# -------------------------------------------------------------------- drift, synchronize


def state_of(optimizer):
    return {
        (i, key): value.clone()
        for i, x in enumerate(x for g in optimizer.param_groups for x in g["params"])
        for key, value in optimizer.state[x].items()
    }


def run_drift(rank):
    X, _, _, optimizer = train(rank, 5, FixedPeriod(100), LowRank())
    stacked = torch.cat([x.flatten().double() for x in X])
    gathered = [torch.empty_like(stacked) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, stacked)
    before = optimizer.drift()
    optimizer.synchronize()
    state = state_of(optimizer)
    norms = [(state[i, "momentum_norm"], state[i, "momentum"].norm()) for i in range(len(SHAPES))]
    return gathered, before, optimizer.drift(), X, state, optimizer.progress.local_steps, norms


def test_drift_is_the_distance_to_the_mean_and_synchronize_removes_it():
    ranks = distributed.run(4, run_drift)
    weights = torch.stack(ranks[0][0])
    mean = weights.mean(dim=0)
    drift = ((weights - mean).norm(dim=1).square().mean().sqrt() / mean.norm()).item()
    assert drift > 1e-3
    for _, before, after, X, state, local_steps, norms in ranks:
        assert_close(before, drift, Rounding(torch.float32, terms=16))
        assert_within(after, Rounding(torch.float32))
        assert local_steps == 0
        assert all(torch.equal(a, b) for a, b in zip(X, ranks[0][3], strict=True))
        assert all(torch.equal(value, ranks[0][4][key]) for key, value in state.items())
        for held, norm in norms:
            assert_close(held, norm, Rounding(torch.float32, terms=16))
