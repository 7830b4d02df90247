"""What crosses between DeepSpeed's replicas: the optimizer's messages, by formula and budget."""

import importlib.util
from unittest import mock

import pytest
import torch.distributed as dist

from curvadion import CurvaDion, WireMeter
from curvadion.sync.coded_mean import message_bytes
from support.references import formulas
from support.runs import deepspeed_engines as ds
from support.runs import distributed
from support.runs.deepspeed_replicas import SIZE, crossing, engine_of, ranges_of
from support.runs.flat_shards import held

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"
)


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
    """What was sent at a step, and what of it the optimizer itself sent."""
    own, step = WireMeter(), CurvaDion.step

    def metered(optimizer, closure=None):
        with own:
            step(optimizer, closure)

    with WireMeter() as everything, mock.patch.object(CurvaDion, "step", metered):
        ds.train(engine, [number])
    return everything, own


@pytest.mark.parametrize("threshold", [0.0, 1e9])
@pytest.mark.parametrize("name", ["2 round robin", "3 sub-groups"])
@distributed.on_ranks(4)
def test_a_low_rank_step_sends_what_the_formula_says_and_nothing_else_crosses(
    rank, name, threshold
):
    engine = engine_of(name, {"threshold": threshold, "local_step": "gradient"})
    ds.train(engine, range(2))
    everything, own = metered_step(engine, 2)
    matrices, elementwise = matrices_of(engine, rank)
    opened = engine.basic_optimizer.report.gate_open
    assert opened == (threshold == 0.0)
    wanted = formulas.closed_step(matrices)
    if opened:
        wanted = formulas.open_step(matrices, elementwise=elementwise, reads_momentum=True)
    assert own.total.bytes == wanted
    crossed = crossing(engine, everything)
    assert crossed == crossing(engine, own)
    assert (sum(crossed.values()) == formulas.GATE) == (not opened)


CODES = {
    "gate": {"type": "period", "period": 3},
    "sync": {"type": "quantized_average", "bits": 2},
}


@pytest.mark.parametrize("name", ["0 bf16", "2 offload", "3 sub-groups"])
@distributed.on_ranks(4)
def test_codes_cross_at_openings_and_nothing_at_other_steps(rank, name):
    engine = engine_of(name, CODES)
    # Stage 3 has all ranks compare once, at the second step, in what order modules run.
    ds.train(engine, range(3))
    closed, _ = metered_step(engine, 3)
    assert crossing(engine, closed) == {}
    ds.train(engine, [4])
    opened, _ = metered_step(engine, 5)
    kinds = {how for _, how in crossing(engine, opened)}
    assert kinds <= {"all_reduce", "all_to_all", "all_gather"}
    between = engine.basic_optimizer.replicas.process_group.group_name
    records = opened.records.items()
    sent = sum(n.sent for (group, how), n in records if group == between and "all_to" in how)
    codes = message_bytes([stop - start for _, _, start, stop in ranges_of(engine)], 2)
    assert sum(distributed.gathered(sent)) == sum(distributed.gathered(codes)) > 0
