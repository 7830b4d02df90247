"""Replicas in shards come together shard by shard: the same bits, and no more bytes than codes."""

from __future__ import annotations

import pytest

import distributed
import test_fsdp
import test_tensor_parallel
import transformer
from curvadion import CurvaDion, FixedPeriod, WireMeter
from curvadion.quantized_mean import message_bytes
from curvadion.sharding import local

STEPS = 5
BITS = 2


def train(rank, setup, layout, momenta):
    """Per step the drift, and what replicas sent each other against the formula's bytes."""
    model, replicas, _, reader = setup(layout)
    optimizer = CurvaDion(
        transformer.groups(model),
        replicas=replicas,
        gate=FixedPeriod(2),
        reconcile="quantized",
        reconcile_bits=BITS,
        reconcile_momentum=momenta,
    )
    group = replicas.get_group()
    drifts, sent, expected = [], [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        transformer.loss_of(model, step, reader).backward()
        with WireMeter() as meter:
            optimizer.step()
        drifts.append(optimizer.drift())
        counts = meter.records.items()
        records = {kind: n.sent for (name, kind), n in counts if name == group.group_name}
        sent.append(records.get("all_to_all", 0.0))
        expected.append(codes(optimizer, momenta) if optimizer.report.gate_open else 0)
    return drifts, sent, expected


def codes(optimizer, momenta):
    """Bytes of the codes of what this rank holds."""
    X = [x for g in optimizer.param_groups for x in g["params"]]
    if momenta:
        X += [x for g in optimizer.param_groups for x in g["params"] if g["algorithm"] == "dion"]
    return message_bytes((local(x).numel() for x in X), BITS)


CASES = [
    (test_fsdp.setup, "hsdp 2x2"),
    (test_fsdp.setup, "FSDP1, replicas outside"),
    (test_tensor_parallel.setup, "dp x tp"),
]


@pytest.mark.parametrize("momenta", [False, True])
@pytest.mark.parametrize(("setup", "layout"), CASES, ids=[layout for _, layout in CASES])
def test_shards_of_replicas_come_together(setup, layout, momenta):
    ranks = distributed.run(4, train, setup, layout, momenta)
    for drifts, _, _ in ranks:
        assert [drift == 0 for drift in drifts] == [False, True, False, True, False]
    for step in range(STEPS):
        sent, expected = (sum(rank[i][step] for rank in ranks) for i in (1, 2))
        assert sent == expected
        assert (expected > 0) == (step % 2 == 1)
