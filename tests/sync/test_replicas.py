"""What replicas under LowRank send at every step."""

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

SHAPES = [(24, 16), (16, 24), (20, 20), (1, 12), (24, 16)]
VECTORS = [(16,), (7, 3), ()]
NUMBERS = sum(torch.Size(shape).numel() for shape in SHAPES + VECTORS)
VECTOR_NUMBERS = sum(torch.Size(shape).numel() for shape in VECTORS)


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES + VECTORS]


def groups(X):
    k = len(SHAPES)
    return [
        {"params": X[:k], "rank_fraction": 0.3},
        {"params": X[k:], "algorithm": "adamw", "lr": 0.003, "weight_decay": 0.1},
    ]


def run_bytes(rank, average_weights, gate):
    """Bytes and calls by step, and the bytes that are reported."""
    X = parameters()
    how = {"gate": gate, "sync": LowRank(average_weights), "max_local_steps": None}
    optimizer = CurvaDion(groups(X), replicas=dist.group.WORLD, **how)
    sent, reported = [], []
    for step in range(6):
        for x in X:
            x.grad = gradient(tuple(x.shape), step, rank)
        with WireMeter() as meter:
            optimizer.step()
        sent.append((meter.total_bytes, meter.total_calls))
        reported.append(optimizer.report.wire_bytes)
    return sent, reported


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
