"""Every ZeRO stage: which elements a partition holds, the trajectory, and what a step sends."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.distributed as dist

import deepspeed_engines as ds
import distributed
import formulas
from curvadion.integrations.deepspeed.partitions import partitions_of
from curvadion.integrations.deepspeed.process_groups import Reaching
from curvadion.layout.matrix import MatrixLayout
from flat_shards import held
from pairwise import all_pairs
from tolerance import assert_within

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]
STEPS = 6


def trajectory(rank, configuration):
    """The engine's optimizer, distances from the float64 equations, gates, state keys, coverage."""
    world = dist.get_world_size()
    engine = ds.engine_of(configuration)
    stage = ds.stage_of(engine)
    covered = ds.coverage(engine) if stage else None
    expected = ds.Expected(stage, world, local_lr=ds.SCHEDULE["local_lr"])
    reports = ds.train(engine, range(STEPS))
    for step in range(STEPS):
        expected.step(step, step in ds.OPEN_STEPS)
    gates = [(report.step, report.gate_open) for report in reports]
    state = engine.basic_optimizer.state_dict()["state"]
    keys = {frozenset(held) - {"flat_shard_start"} for held in state.values()}
    kind = type(engine.optimizer).__name__
    return kind, expected.distances(ds.masters(engine), rank), gates, keys, covered


# Three ranks cut what two do, and through more. A secondary group of 2 divides the ranks.
WORLDS = [
    *((name, 4 if name == "3 hpZ" else 3) for name in ds.CONFIGURATIONS),
    *((name, 2) for name in ("1", "3 hpZ")),
]


@pytest.mark.parametrize(("name", "world"), WORLDS)
def test_partitions_cover_all_elements_once_and_follow_the_equations(name, world):
    configuration = ds.changed(name, ds.SCHEDULE)
    if "fp16" in configuration and not ds.supports_fp16():
        pytest.skip("this CPU has no float16 arithmetic")  # refused: test_deepspeed_config
    for kind, distances, gates, keys, covered in distributed.run(world, trajectory, configuration):
        assert (kind == "BF16_Optimizer") == name.endswith("BF16_Optimizer")
        assert_within(max(distances.values()), ds.ROUNDING, what=distances)
        assert gates == [(step + 1, step in ds.OPEN_STEPS) for step in range(STEPS)]
        assert keys == {
            frozenset({"momentum", "Q", "momentum_norm", "R_scale"}),
            frozenset({"step", "exp_avg", "exp_avg_sq"}),
        }
        if covered is not None:
            counts, right_values = covered
            assert right_values
            for parameter, count in counts.items():
                wanted = 0 if parameter.startswith("frozen") else 1
                assert count.eq(wanted).all(), parameter


# -------------------------------------------------------------------- what is sent


def sent(rank, name, threshold):
    """Bytes and largest message of the third step, and those that the formulas tell."""
    world = dist.get_world_size()
    configuration = ds.changed(name, {"threshold": threshold, "local_step": "gradient"})
    del configuration["optimizer"]["params"]["gate"]
    engine = ds.engine_of(configuration)
    with ds.Metered() as metered:
        reports = ds.train(engine, range(3))
    assert len(metered.meters) == 3
    matrices, elementwise = [], 0
    if ds.stage_of(engine) == 0:
        for shape in ds.MATRICES.values():
            r = MatrixLayout.whole(shape).rank(ds.FRACTION, 1)
            matrices.append(formulas.Held(max(shape), min(shape), r, replicas=world))
            elementwise += shape[0]
    else:
        for partition in partitions_of(engine.optimizer, Reaching()):
            for r in partition.ranges:
                lengths = [0] * world
                dist.all_gather_object(lengths, r.stop - r.start)
                ends = torch.tensor(lengths).cumsum(0).tolist()
                if len(r.shape) == 2:
                    matrices += held(r.shape, tuple(ends), {}, world, rank, 1)
    if reports[-1].gate_open:
        wanted = formulas.open_step(matrices, elementwise=elementwise, reads_momentum=True)
        largest = formulas.largest_message(matrices)
    else:
        wanted, largest = formulas.closed_step(matrices), None
    return metered.meters[-1].total_bytes, wanted, metered.meters[-1].largest, largest


@pytest.mark.parametrize(
    ("name", "threshold", "world"),
    all_pairs(["0", "1", "1 bf16", "2 round robin", "3", "3 sub-groups"], [0.0, 1e9], [2, 3]),
)
def test_bytes_are_those_of_the_formulas(name, threshold, world):
    for total, wanted, largest, largest_wanted in distributed.run(world, sent, name, threshold):
        assert total == wanted
        if largest_wanted is not None and not name.startswith("0"):
            assert largest == largest_wanted


def without_cpu(rank):
    """The sum over the ranks through a group made for one that takes no CPU tensors."""
    cpu, elsewhere = torch.device("cpu"), dist.new_group([0, 1], backend="cuda:gloo")
    reaching = Reaching()
    assert reaching(dist.group.WORLD, cpu) is dist.group.WORLD
    made = reaching(elsewhere, cpu)
    assert made is reaching(elsewhere, cpu)
    with pytest.raises(RuntimeError, match="No backend"):
        dist.all_reduce(torch.ones(1), group=elsewhere)
    total = torch.tensor([1.0 + rank])
    dist.all_reduce(total, group=made)
    return total.item()


def test_offloaded_partitions_get_a_group_that_takes_them():
    assert distributed.run(2, without_cpu) == [3.0, 3.0]
