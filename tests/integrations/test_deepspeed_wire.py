"""What crosses between DeepSpeed's replicas: the optimizer's messages, by formula and budget."""

from __future__ import annotations

import importlib.util

import pytest
import torch.distributed as dist

import deepspeed_engines as ds
import distributed
import formulas
from curvadion import WireMeter
from curvadion.sync.coded_mean import message_bytes
from deepspeed_replicas import SIZE, crossing, engine_of, ranges_of
from flat_shards import held

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"
)
RMMC = {"threshold": 0.0, "local_step": "gradient"}


# -------------------------------------------------------------------- by formula


def matrices_of(engine, rank):
    """What this rank holds of each matrix, and how many numbers of the other parameters."""
    group = engine.seq_data_parallel_group
    matrices, elementwise = [], 0
    for _, shape, start, stop in ranges_of(engine):
        lengths = [0] * group.size()
        dist.all_gather_object(lengths, stop - start, group=group)
        ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
        if len(shape) == 2:
            matrices += held(shape, tuple(ends), {}, group.size(), rank % SIZE, 2)
        else:
            elementwise += stop - start
    return matrices, elementwise


def metered_step(engine, number):
    """What was sent at a step, and what of it the optimizer sent."""
    with WireMeter() as everything, ds.Metered() as metered:
        ds.train(engine, [number])
    (optimizers,) = metered.meters
    return everything, optimizers


def low_rank(rank, names):
    """By name and threshold: bytes of the optimizer's step, the formula's, and what crossed."""
    found = {}
    for name in names:
        for threshold in (0.0, 1e9):
            engine = engine_of(name, {**RMMC, "threshold": threshold})
            ds.train(engine, range(2))
            everything, optimizers = metered_step(engine, 2)
            matrices, elementwise = matrices_of(engine, rank)
            opened = engine.basic_optimizer.report.gate_open
            assert opened == (threshold == 0.0)
            if opened:
                wanted = formulas.open_step(matrices, elementwise=elementwise, reads_momentum=True)
            else:
                wanted = formulas.closed_step(matrices)
            crossed, own = crossing(engine, everything), crossing(engine, optimizers)
            found[name, threshold] = optimizers.total_bytes, wanted, crossed, own
    return found


def test_a_low_rank_step_sends_what_the_formula_says_and_nothing_else_crosses():
    for found in distributed.run(4, low_rank, ["2 round robin", "3 sub-groups"]):
        for case, (total, wanted, crossed, own) in found.items():
            assert total == wanted, case
            assert crossed == own, case
            closed = case[1] > 0
            assert (sum(crossed.values()) == formulas.GATE) == closed, (case, crossed)


CODES = {
    "gate": {"type": "period", "period": 3},
    "sync": {"type": "quantized_average", "bits": 2},
}


def in_codes(rank, names):
    """By name: what crossed at a closed step and at an opening, and the bytes of the codes."""
    found = {}
    for name in names:
        engine = engine_of(name, CODES)
        # Stage 3 has all ranks compare once, at the second step, in what order modules run.
        ds.train(engine, range(3))
        closed, _ = metered_step(engine, 3)
        ds.train(engine, [4])
        opened, _ = metered_step(engine, 5)
        between = engine.basic_optimizer._replicas.process_group.group_name
        records = opened.records.items()
        sent = sum(n.sent for (group, how), n in records if group == between and "all_to" in how)
        sizes = [stop - start for _, _, start, stop in ranges_of(engine)]
        codes = message_bytes(sizes, 2)
        found[name] = crossing(engine, closed), crossing(engine, opened), sent, codes
    return found


def test_codes_cross_at_openings_and_nothing_at_other_steps():
    names = ["0 bf16", "2 offload", "3 sub-groups"]
    each = distributed.run(4, in_codes, names)
    for name in names:
        for found in each:
            closed, opened, _, _ = found[name]
            assert closed == {}, name
            assert {how for _, how in opened} <= {"all_reduce", "all_to_all", "all_gather"}, name
        sent, codes = (sum(found[name][i] for found in each) for i in (2, 3))
        assert sent == codes > 0, name
