"""What replicas under LowRank send at every step."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from curvadion import CurvaDion, FixedPeriod, LowRank, WireMeter
from curvadion.agreement.meeting import MEETING_BYTES
from support.references.reference import rank_of
from support.runs import distributed
from support.runs.scheduled import Scheduled
from support.runs.seeded import gradient

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


def low_rank_bytes():
    """4 bytes a number: P (max(m, n) x r) and R (min(m, n) x r) of every matrix."""
    return sum(4 * (m + n) * rank_of(0.3, (m, n)) for m, n in SHAPES)


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
    distributed.run(replicas, run_bytes, average_weights, gate, closed)


def run_bytes(rank, average_weights, gate, closed):
    X = parameters()
    how = {"gate": gate, "sync": LowRank(average_weights), "max_local_steps": None}
    optimizer = CurvaDion(groups(X), replicas=dist.group.WORLD, **how)
    synchronized = MEETING_BYTES + low_rank_bytes() + 4 * VECTOR_NUMBERS
    if average_weights:
        synchronized += 4 * (NUMBERS + 2 * VECTOR_NUMBERS + len(VECTORS))  # and moments
    verification = 48
    for step in range(6):
        for x in X:
            x.grad = gradient(tuple(x.shape), step, rank)
        with WireMeter() as meter:
            optimizer.step()
        assert optimizer.report.wire_bytes == meter.total.bytes
        if step == 0:
            assert meter.total.bytes == MEETING_BYTES + verification
        elif step % 3 == 2:
            assert meter.total.bytes == synchronized
        else:
            assert (meter.total.bytes, meter.total.calls) == (closed, closed > 0)
    # Gate, P, R, the other parameters' gradients; weights and moments, their counters.
    assert meter.total.calls == (6 if average_weights else 4)
