"""Training in DDP: DDP sends no gradients, the optimizer sends its formula."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import curvadion
import distributed
import formulas
from curvadion import CurvaDion, FixedPeriod, WireMeter
from curvadion.integrations.ddp import keep_gradients_local
from scheduled import Scheduled

RANK = 4


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4)
    )


def loss_of(model, step, replica):
    generator = torch.Generator().manual_seed(1000 * step + replica)
    x = torch.randn(16, 8, generator=generator)
    return (model(x) - x[:, :4].sin()).square().mean()


def groups(model):
    return curvadion.param_groups(
        model, patterns={"4.weight": "matrix"}, options={"vector": {"lr": 0.003}}
    )


def low_rank_bytes():
    return sum(4 * (m + n) * RANK for m, n in ((32, 8), (16, 32), (4, 16)))


def train(rank, gate):
    model = keep_gradients_local(DistributedDataParallel(network()))
    optimizer = CurvaDion(
        groups(model.module), replicas=dist.group.WORLD, gate=gate, rank_multiple_of=RANK
    )
    sent = []
    with WireMeter() as meter:
        for step in range(6):
            before = meter.snapshot()
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
            sent.append(meter.since(before).bytes)
    return sent


@pytest.mark.parametrize(
    ("gate", "closed"), [(FixedPeriod(3), 0), (Scheduled((3, 6)), formulas.GATE)]
)
def test_only_the_gate_crosses_while_it_is_closed(gate, closed):
    for sent in distributed.run(2, train, gate):
        biases = 4 * (32 + 16 + 4)
        weights = 4 * (8 * 32 + 32 * 16 + 16 * 4) + biases
        averaged = weights + 2 * biases + 4 * 3
        # Before its second step DDP broadcasts, once, the order in which it met the gradients.
        assert sent[3] == sent[4] == closed
        assert sent[2] == sent[5] == formulas.GATE + low_rank_bytes() + biases + averaged
