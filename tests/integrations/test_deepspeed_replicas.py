"""Replicas of two ranks under every ZeRO stage: where they go, what they hold, what they send."""

import importlib.util

import pytest
import torch
import torch.distributed as dist

from curvadion import CodedGradients, FixedPeriod, QuantizedAverage, Replicated
from curvadion.integrations.deepspeed.replicas import reaching, replica_groups
from support.references.tolerance import assert_within, worst
from support.runs import deepspeed_engines as ds
from support.runs import distributed, toy
from support.runs.deepspeed_replicas import SIZE, ByHand, engine_of

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]
STEPS = 6
# Of each of DeepSpeed's classes of optimizers, and what changes how gradients or weights lie.
NAMES = [
    "0 bf16", "0 accumulation", "1 BF16_Optimizer", "2 round robin", "2 alignment",
    "2 autocast", "3 sub-groups", "3 offload parameters",
]  # fmt: skip


# Two replicas, one in shards, sizes that no number of ranks divides, ranks that are replicas.
@pytest.mark.parametrize(
    ("names", "world", "size"),
    [
        (NAMES, 4, SIZE),
        (["1", "2 fp16", "2 accumulation", "3 bf16"], 3, 3),
        (["3 hpZ"], 4, 4),
        (["0", "2 offload"], 2, 1),
    ],
)
def test_engines_follow_the_equations_and_hold_all_elements_once(names, world, size):
    distributed.run(world, trajectories, names, size)


def trajectories(rank, names, size):
    world = dist.get_world_size()
    for name in names:
        engine = engine_of(name, ds.SCHEDULE, size)
        if ds.stage_of(engine):
            counts, right = ds.coverage(engine)
            assert right, name
            for parameter, count in counts.items():
                wanted = 0 if parameter.startswith("frozen") else 1
                assert count.eq(wanted).all(), (name, parameter)
        expected = ds.Expected(0, world, local_lr=ds.SCHEDULE["local_lr"], replicas=world // size)
        reports = ds.train(engine, range(STEPS))
        for step in range(STEPS):
            expected.step(step, step in ds.OPEN_STEPS)
        distances = expected.distances(ds.masters(engine), rank)
        assert_within(worst(distances.values()), ds.ROUNDING, what=(name, distances))
        opened = [report.gate_open for report in reports]
        assert opened == [step in ds.OPEN_STEPS for step in range(STEPS)], name
        assert engine.train_batch_size() == world * engine.gradient_accumulation_steps()
        assert engine.global_samples == STEPS * engine.train_batch_size()


# By name: an optimizer's arguments, and the same in JSON.
CHOICES = {
    "codes": (
        {"gate": FixedPeriod(3), "sync": QuantizedAverage(bits=2, spectrum_decay=0.8)},
        {
            "gate": {"type": "period", "period": 3},
            "sync": {"type": "quantized_average", "bits": 2, "spectrum_decay": 0.8},
        },
    ),
    "delay": (
        {"gate": FixedPeriod(3), "sync": QuantizedAverage(bits=(1, 2), fragments=2, delay=2)},
        {
            "gate": {"type": "period", "period": 3},
            "sync": {"type": "quantized_average", "bits": [1, 2], "fragments": 2, "delay": 2},
        },
    ),
    "coded gradients": (
        {"sync": CodedGradients(bits=2)}, {"sync": {"type": "coded_gradients", "bits": 2}},
    ),
}  # fmt: skip
FEW = 8
SPOILED = {(4, 1), (5, 2), (7, 0)}  # of the first FEW steps, the second at an opening


@pytest.mark.parametrize(
    ("name", "how", "spoil"),
    [
        ("0", "delay", SPOILED),
        ("2 offload", "delay", ()),
        ("3 sub-groups", "codes", SPOILED),
        ("2", "coded gradients", SPOILED),
    ],
)
@distributed.on_ranks(4)
def test_every_sync_goes_where_the_optimizer_made_in_code_goes(rank, name, how, spoil):
    """Bitwise, with and without NaNs on single ranks, and what all agree on in the end."""
    chosen, json = CHOICES[how]
    engine = engine_of(name, json)
    other = ByHand(engine, **chosen)
    ours, theirs = engine.basic_optimizer, other.optimizer
    assert repr(ours.sync) == repr(theirs.sync) and repr(ours.gate) == repr(theirs.gate)
    told = []
    for step in range(FEW):
        (report,) = ds.train(engine, [step], spoil=spoil)
        other.step(step, spoil)
        told.append((report.gate_open, report.skipped))
        assert told[-1] == (theirs.report.gate_open, theirs.report.skipped)
        if step in (5, FEW - 1):
            assert not other.unlike(ds.masters(engine))
    assert ours.drifted == theirs.drifted
    assert ours.drifted == (how != "coded gradients")
    for each in (ours, theirs):
        each.synchronize()
    assert not ours.drifted
    weights = ds.masters(engine)
    assert not other.unlike(weights)
    toy.assert_bitwise_equal(weights, distributed.gathered(weights)[0])
    closed = FEW - sum(opened for opened, _ in told)
    assert closed == len(spoil) if how == "coded gradients" else 0 < closed < FEW
    skipped = any(skipped for each in distributed.gathered(told) for _, skipped in each)
    assert skipped == bool(spoil)


def adamw_inside(groups, lr, **chosen):
    inner = torch.optim.AdamW([{"params": group["params"]} for group in groups], lr=lr)
    return Replicated(inner, **chosen)


@pytest.mark.parametrize("name", ["0 bf16", "1 BF16_Optimizer", "2 offload", "3 sub-groups"])
@distributed.on_ranks(4)
def test_an_optimizer_of_torch_takes_its_own_steps_inside(rank, name, tmp_path):
    """Bitwise, also after a checkpoint."""
    chosen = CHOICES["codes"][0]

    def engine_in_code():
        configuration = ds.changed(name, {})
        del configuration["optimizer"]
        if "offload" in name:
            configuration["zero_force_ds_cpu_optimizer"] = False
        of = ds.model(torch.bfloat16 if "bf16" in configuration else torch.float32)
        kinds = [
            {"params": [p for p in of.parameters() if p.requires_grad and p.dim() == dims]}
            for dims in (2, 1)
        ]
        _, between = replica_groups(SIZE)
        optimizer = adamw_inside(kinds, ds.LR, replicas=between, **chosen)
        return ds.engine_of(configuration, of, optimizer=optimizer)

    engine = engine_in_code()
    other = ByHand(engine, adamw_inside, **chosen)
    for step in range(5):
        (report,) = ds.train(engine, [step], spoil=SPOILED)
        other.step(step, SPOILED)
        assert report.gate_open == other.optimizer.report.gate_open == (step == 2)
    assert engine.basic_optimizer.drifted and not other.unlike(ds.masters(engine))
    engine.save_checkpoint(str(tmp_path), tag="here")
    again = engine_in_code()
    again.load_checkpoint(str(tmp_path), tag="here")
    for each in (engine, again):
        ds.train(each, range(5, 7))
        each.basic_optimizer.synchronize()
    weights = ds.masters(engine)
    toy.assert_bitwise_equal(weights, ds.masters(again))
    toy.assert_bitwise_equal(weights, distributed.gathered(weights)[0])


@distributed.on_ranks(2)
def test_offloaded_partitions_get_a_group_that_takes_them(rank):
    """Where the optimizer's was made for a device that takes no CPU tensors."""
    cpu, elsewhere = torch.device("cpu"), dist.new_group([0, 1], backend="cuda:gloo")
    assert reaching(dist.group.WORLD, cpu) is dist.group.WORLD
    made = reaching(elsewhere, cpu)
    assert made is reaching(elsewhere, cpu)
    total = torch.tensor([1.0 + rank])
    dist.all_reduce(total, group=made)
    assert total == 3.0
