"""What DeepSpeed's replicas decide together: bad and missing gradients, norms, rates, errors."""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import curvadion
import deepspeed_engines as ds
import distributed
from curvadion import AlwaysOpen, CurvaDion
from curvadion.integrations.deepspeed import declare_shapes
from curvadion.integrations.deepspeed.partitions import partitions_of
from curvadion.integrations.deepspeed.process_groups import Reaching, replica_groups
from curvadion.integrations.deepspeed.sharded import check_apart
from deepspeed_replicas import SIZE, by_hand_groups, engine_of
from tolerance import assert_within

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]
PERIOD = {"gate": {"type": "period", "period": 3}, "local_step": "gradient", "local_lr": 0.005}
ALWAYS = {"gate": {"type": "always"}}
RMMC = {"threshold": 0.18, "local_step": "gradient"}
CODES = {"gate": {"type": "period", "period": 3}, "sync": {"type": "quantized_average"}}


# -------------------------------------------------------------------- gradients that are not finite


def spoiled(rank, cases):
    """By case: reports around a NaN on the last rank, and whether weights stayed as they were."""
    found = {}
    for name, how, clip in cases:
        params = {"always": ALWAYS, "rmmc": RMMC, "period": PERIOD, "codes": CODES}[how]
        engine = engine_of(name, params, gradient_clipping=clip)
        ds.train(engine, range(3))
        before = ds.masters(engine)
        reports = ds.train(engine, [3], spoil={(3, 3)})
        after = ds.masters(engine)
        unchanged = all(torch.equal(W, after[n]) for n, W in before.items())
        reports += ds.train(engine, range(4, 7))
        finite = all(W.isfinite().all() for W in ds.masters(engine).values())
        found[name, how, clip] = [r.skipped for r in reports], unchanged, finite
    return found


# Replicas hear each other at every step but under a schedule, unless they clip.
SPOILED = [
    ("1", "always", 0.0),
    ("2 bf16", "always", 10.0),
    ("3", "rmmc", 0.0),
    ("3 sub-groups", "period", 10.0),
    ("1 BF16_Optimizer", "rmmc", 10.0),
    ("2 offload", "period", 0.0),
    ("0", "always", 0.0),
    ("0 bf16", "codes", 0.0),
    ("3 bf16", "codes", 0.0),
]


def test_a_nan_on_one_rank_harms_no_replica():
    for rank, found in enumerate(distributed.run(4, spoiled, SPOILED)):
        for case, (skipped, unchanged, finite) in found.items():
            alone = case[1] in ("period", "codes") and not case[2]
            mine = rank >= 2 or not alone
            assert skipped == [mine, False, False, False], case
            assert unchanged == mine and finite, case


def always_nan(rank, name, params):
    """The step at which all stop, and what they say."""
    engine = engine_of(name, params)
    steps = range(40)
    with pytest.raises(RuntimeError) as error:
        ds.train(engine, steps, spoil={(step, 3) for step in steps})
    return engine.basic_optimizer.progress.steps, str(error.value)


@pytest.mark.parametrize(("name", "params"), [("2", ALWAYS), ("3", CODES)])
def test_nans_that_do_not_end_stop_all_replicas(name, params):
    told = distributed.run(4, always_nan, name, params)
    assert all("a NaN or an Inf" in text for _, text in told)
    assert {steps for steps, _ in told} <= {10, 11}


def at_the_smallest_scale(rank, cases):
    """What ends a run where the last rank's gradients never fit into float16."""
    told = {}
    for stage, how, clip in cases:
        fp16 = {"enabled": True, "initial_scale_power": 1, "hysteresis": 1}
        params = {"replica_size": 1, **{"always": ALWAYS, "codes": CODES}[how]}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DS_ACCELERATOR", "cpu")
            from deepspeed.accelerator import get_accelerator

            # Not all CPUs have its arithmetic; these gradients need none.
            patch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: True)
            engine = ds.engine_of(ds.config(stage, params, fp16=fp16, gradient_clipping=clip))
        with pytest.raises(Exception, match="minimum|see that rank's output") as error:
            ds.train(engine, range(8), spoil={(step, 1) for step in range(2, 8)})
        told[stage, how, clip] = str(error.value)
    return told


def test_a_loss_scale_that_cannot_shrink_stops_all_replicas():
    cases = [(1, "always", 0.0), (2, "always", 10.0), (3, "codes", 0.0)]
    other, own = distributed.run(2, at_the_smallest_scale, cases)
    for case in cases:
        assert "loss scale already at minimum" in own[case], case
        assert "a loss scale that cannot become smaller" in other[case], case


# -------------------------------------------------------------------- gradients that are missing


def lacking(rank, cases):
    """What is raised where the last rank lacks a gradient; the others must not wait for ever."""
    told = {}
    for name, how, clip in cases:
        params = {"always": ALWAYS, "rmmc": RMMC, "codes": CODES}[how]
        engine = engine_of(name, params, gradient_clipping=clip)
        ds.train(engine, range(3))
        with pytest.raises(RuntimeError) as error:
            # Under a schedule the others hear of it at the next opening.
            ds.train(engine, range(3, 6), skip_on={(3, 3): ("wide",)})
        assert engine.basic_optimizer.progress.steps == (5 if how == "codes" and rank < 2 else 3)
        told[name, how, clip] = str(error.value)
    return told


def test_a_gradient_missing_on_one_rank_is_an_error_on_all_replicas():
    cases = [("1", "always", 0.0), ("2", "rmmc", 10.0), ("3 bf16", "rmmc", 0.0)]
    cases.append(("2 round robin", "codes", 0.0))
    first, second, third, fourth = distributed.run(4, lacking, cases)
    for case in cases:
        assert "gradients of different parameters" in third[case], case
        assert third[case] == fourth[case] and "{2: 'wide." in third[case], case
        for other in (first[case], second[case]):
            assert "gradients that its replica cannot average" in other, case


def missing_on_replicas(rank, names):
    """Weights and reports where a replica, or all, lack gradients that its ranks agree on."""
    missing = {(1, 2): ("wide",), (1, 3): ("wide",), (4, 0): ("two",), (4, 1): ("two",)}
    missing |= {(2, r): ("tall",) for r in range(4)}
    found = {}
    for name in names:
        engine = engine_of(name, PERIOD)
        reports = ds.train(engine, range(6), skip_on=missing)
        found[name] = [(r.gate_open, r.skipped) for r in reports], ds.masters(engine)
    return found


def test_gradients_missing_on_a_whole_replica_are_no_trouble():
    first, *others = distributed.run(4, missing_on_replicas, ["0", "1", "1 BF16_Optimizer", "2"])
    for name, (told, weights) in first.items():
        assert told == [(False, False), (False, False), (True, False)] * 2
        for found in others:
            assert found[name][0] == told
            assert all(torch.equal(W, found[name][1][n]) for n, W in weights.items()), name


# -------------------------------------------------------------------- norms and rates


def clipped(rank, names):
    """Distance from the equations with one norm for all replicas, and that norm."""
    found = {}
    for name in names:
        engine = engine_of(name, PERIOD, gradient_clipping=10.0)
        expected = ds.Expected(0, 4, local_lr=0.005, clip=10.0, replicas=2)
        ds.train(engine, range(6))
        for step in range(6):
            expected.step(step, step in (2, 5))
        distances = expected.distances(ds.masters(engine), rank)
        found[name] = max(distances.values()), float(engine.get_global_grad_norm())
    return found


def test_gradients_are_clipped_by_one_norm_of_all_replicas():
    each = distributed.run(4, clipped, ["0", "1", "1 BF16_Optimizer", "2 offload", "3"])
    for name in each[0]:
        assert_within(max(found[name][0] for found in each), ds.ROUNDING, what=name)
        assert len({found[name][1] for found in each}) == 1 and each[0][name][1] > 10, name


def scheduled(rank, name):
    """Learning rates where one replica leaves out a step that ZeRO itself would not count."""
    warmup = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 10}
    scheduler = {"type": "WarmupLR", "params": {**warmup, "warmup_type": "linear"}}
    engine = engine_of(name, PERIOD, scheduler=scheduler)
    ds.train(engine, range(7), spoil={(3, 3), (4, 0)})
    return engine.get_lr(), engine.lr_scheduler.last_batch_iteration


@pytest.mark.parametrize("name", ["2", "3"])
def test_rates_stay_alike_where_one_replica_leaves_out_a_step(name):
    first, *others = distributed.run(4, scheduled, name)
    assert all(other == first for other in others)
    assert first[0] == pytest.approx([0.006, 0.006])


# -------------------------------------------------------------------- synchronised twice


def reduced_by_a_hook(rank, name):
    """What the first step says where a user's hook averages gradients over all ranks."""
    engine = engine_of(name, ALWAYS)

    def average(gradient):
        dist.all_reduce(gradient)
        return gradient / 4

    for p in engine.module.parameters():
        if p.requires_grad:
            p.register_hook(average)
    with pytest.raises(RuntimeError) as error:
        ds.train(engine, [0])
    return str(error.value)


@pytest.mark.parametrize("name", ["0", "2", "3"])
def test_gradients_that_something_else_averages_are_an_error(name):
    for message in distributed.run(4, reduced_by_a_hook, name):
        assert "identical on all replicas" in message


def zero_over_all_ranks(rank):
    engine = ds.engine_of(ds.config(2))
    partitions = partitions_of(engine.optimizer, Reaching())
    with pytest.raises(ValueError, match="ZeRO averages gradients over the ranks") as error:
        check_apart(partitions, replica_groups(SIZE).between)
    divided = engine_of("2", {})
    check_apart(partitions_of(divided.optimizer, Reaching()), replica_groups(SIZE).between)
    assert replica_groups(1) == replica_groups(1)  # of one rank too, none is made twice
    switched = engine_of("0", {})
    switched.enable_backward_allreduce = False
    with pytest.raises(RuntimeError, match="enable_backward_allreduce is False"):
        ds.train(switched, [0])
    return str(error.value)


def test_groups_of_zero_that_span_replicas_are_an_error():
    for message in distributed.run(4, zero_over_all_ranks):
        assert "[0, 1, 2, 3]" in message and "other replicas" in message


# -------------------------------------------------------------------- errors of users

INVALID = {
    "no divisor": ({"replica_size": 3}, {}, "params.replica_size=3 must divide the number of"),
    "zero": ({"replica_size": 0}, {}, "optimizer.params.replica_size=0 must be >= 1"),
    "no integer": ({"replica_size": "2"}, {}, "TypeError: optimizer.params.replica_size='2' must"),
    "too many": ({"replica_size": 8}, {}, "optimizer.params.replica_size=8 must divide"),
    "hpZ": (
        {"replica_size": 2}, {"zero": {"zero_hpz_partition_size": 2}},
        "zero_optimization.zero_hpz_partition_size does not work with optimizer.params.replica_",
    ),
    "sums": (
        {"replica_size": 2}, {"gradient_allreduce_op": "sum"}, "gradient_allreduce_op does not",
    ),
    "local files": (
        {"replica_size": 2}, {"checkpoint": {"use_node_local_storage": True}},
        "checkpoint.use_node_local_storage does not work with optimizer.params.replica_size=2",
    ),
    "parallel writers": (
        {"replica_size": 2}, {"checkpoint": {"writer": {"data_parallel": "replica"}}},
        "checkpoint.writer.data_parallel does not work with optimizer.params.replica_size=2",
    ),
    "one after another": (
        {"replica_size": 2}, {"zero": {"pipeline_loading_checkpoint": True}},
        "zero_optimization.pipeline_loading_checkpoint does not work with optimizer.params.repl",
    ),
    "one replica": (
        {"replica_size": 4, "gate": {"type": "budget", "share": 0.01}}, {},
        "one replica is sharded over all ranks",
    ),
    "misspelt": ({"replica_sise": 2}, {}, "replica_sise=2 is unknown: did you mean 'replica_size'"),
}  # fmt: skip


class OwnUnit:
    """A model-parallel unit that cuts nothing."""

    def __getattr__(self, name):
        known = {"world_size": dist.get_world_size(), "rank": dist.get_rank()}
        for what, value in known.items():
            if name == f"get_data_parallel_{what}":
                return lambda: value
        raise AttributeError(name)


def refused(rank):
    """What is raised by each configuration; and where ranks differ; and with an mpu."""
    told = {}
    for case, (params, settings, _) in INVALID.items():
        stage = 1 if case == "sums" else 3  # which DeepSpeed itself refuses at stage 3
        told[case] = error_of(ds.config(stage, params, **settings))
    told["unlike"] = error_of(ds.config(2, {"replica_size": 2 if rank else 4}))
    told["only here"] = error_of(ds.config(2, {"replica_size": 2} if rank == 2 else {}))
    told["wrong here"] = error_of(ds.config(2, {"replica_size": 3 if rank == 2 else 2}))
    told["mpu"] = error_of(ds.config(1, {"replica_size": 2}), mpu=OwnUnit())
    from deepspeed.utils import groups

    assert groups.mpu is None  # which DeepSpeed would remember for other engines
    return told


def error_of(configuration, **arguments):
    try:
        ds.engine_of(configuration, **arguments)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_configurations_that_cannot_work_are_errors_on_all_ranks():
    for rank, told in enumerate(distributed.run(4, refused)):
        for case, (_, _, part) in INVALID.items():
            assert part in told[case], case
        for case in ("unlike", "only here"):
            assert "give all ranks the same configuration" in told[case], case
        own = "replica_size=3 must divide" if rank == 2 else "the same configuration"
        assert own in told["wrong here"]
        assert told["mpu"].startswith("ValueError: mpu=OwnUnit does not work with"), told["mpu"]
        assert "optimizer.params.replica_size chooses replicas" in told["mpu"]


# -------------------------------------------------------------------- from code, and under Init


def clients(rank, cases):
    """Distances of engines whose optimizer, made in code, says who the replicas are."""
    found = {}
    for stage, replicas in cases:
        grid = (replicas, dist.get_world_size() // replicas)
        mesh = init_device_mesh("cpu", grid, mesh_dim_names=("replicate", "shard"))
        of, configuration = ds.model(), ds.config(stage)
        del configuration["optimizer"]
        optimizer = CurvaDion(
            by_hand_groups(of), ds.LR, replicas=mesh["replicate"], gate=AlwaysOpen(),
            rank_fraction=ds.FRACTION,
        )  # fmt: skip
        engine = ds.engine_of(configuration, of, optimizer=optimizer)
        expected = ds.Expected(0, 4, replicas=replicas)
        ds.train(engine, range(4))
        for step in range(4):
            expected.step(step, True)
        assert curvadion.deepspeed.attach(engine) is engine
        found[stage, replicas] = max(expected.distances(ds.masters(engine), rank).values())
    return found


def test_an_optimizer_made_in_code_may_have_replicas():
    cases = [(0, 2), (1, 2), (2, 2), (3, 2), (0, 4), (1, 4), (3, 4)]
    for found in distributed.run(4, clients, cases):
        assert_within(max(found.values()), ds.ROUNDING, what=found)


class Applied(ds.Model):
    """Fills its weights as GPTs do, here from a generator that differs from rank to rank."""

    def __init__(self, fill=True):
        super().__init__()
        if fill:
            self.apply(self.fill)

    @staticmethod
    def fill(module):
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight)


def gathered(of):
    import deepspeed

    with deepspeed.zero.GatheredParameters([*of.parameters()]):
        return {n: p.detach().clone() for n, p in of.named_parameters()}


def applied(rank):
    """Weights that ``apply`` has filled, with the JSON or a group given; what this rank draws."""
    import deepspeed

    ds.prepare()
    configuration = ds.config(3, {"replica_size": SIZE})
    found = {}
    for way in ("configuration", "group"):
        said = {"config_dict_or_path": configuration}
        if way == "group":
            inside = replica_groups(SIZE).inside
            said = {"config_dict_or_path": ds.config(3), "data_parallel_group": inside}
        torch.manual_seed(rank)
        with deepspeed.zero.Init(**said):
            of = Applied()
        found[way] = gathered(of)
        if way == "group":
            deepspeed.initialize(model=of, config=configuration)
            found["engine"] = gathered(of)
    assert torch.nn.Module.apply is torch.nn.Module._old_apply
    torch.manual_seed(rank)
    drawn = Applied()
    return found, {n: p.detach() for n, p in drawn.named_parameters()}


def test_apply_under_zero_init_starts_from_the_first_rank():
    each = distributed.run(4, applied)
    for rank, (found, _) in enumerate(each):
        for way, weights in found.items():
            drawn = each[rank - rank % SIZE if way == "group" else 0][1]
            for name in ds.MATRICES:
                weight = f"{name}.weight"
                assert torch.equal(weights[weight], drawn[weight]), (way, rank, name)


def changed_by_hand(rank):
    """What replicas hold once one rank of all has changed it; for inference, and in a training."""
    import deepspeed

    configuration = ds.config(3, {"replica_size": SIZE, **CODES}, **{"bf16": {"enabled": True}})
    ds.prepare()
    torch.manual_seed(rank)
    with deepspeed.zero.Init(config_dict_or_path=configuration):
        loaded = ds.Model()
    for modifier, p in enumerate(loaded.parameters()):
        with deepspeed.zero.GatheredParameters(p, modifier_rank=modifier % 4), torch.no_grad():
            if rank == modifier % 4:
                p.fill_(modifier)
    # Without an optimizer no engine divides the ranks.
    inference = {k: v for k, v in configuration.items() if k != "optimizer"}
    read = gathered(deepspeed.initialize(model=loaded, config=inference)[0].module)

    of = engine_of("3 bf16", CODES).module
    some = (of.frozen.weight, of.tall.weight)
    with deepspeed.zero.GatheredParameters((p for p in some), modifier_rank=3), torch.no_grad():
        if rank == 3:
            for p in some:
                p.fill_(0.5)
    other = torch.nn.Linear(2, 2)
    deepspeed.zero.Init(module=other, dtype=torch.float32)
    with pytest.raises(ValueError, match="modifier_rank=4 must be one of the ranks 0 to 3"):
        deepspeed.zero.GatheredParameters(some, modifier_rank=4)
    with pytest.raises(ValueError, match="modifier_rank=2 with parameters of which some are"):
        deepspeed.zero.GatheredParameters([other.weight, *some], modifier_rank=2)
    after = gathered(of)
    return read, after["frozen.weight"], after["tall.weight"]


def test_weights_changed_by_hand_on_one_rank_are_those_of_all_replicas():
    for read, *trained in distributed.run(4, changed_by_hand):
        for place, (name, weight) in enumerate(read.items()):
            assert weight.eq(place).all(), (name, weight)
        assert all(weight.eq(0.5).all() for weight in trained)


def under_init(rank):
    """Distance of a model built under zero.Init, of other weights on each rank; errors."""
    import deepspeed

    configuration = ds.config(
        3, {"replica_size": SIZE}, zero={"stage3_param_persistence_threshold": 0}
    )
    ds.prepare()
    torch.manual_seed(rank)
    with deepspeed.zero.Init(config_dict_or_path=configuration):
        of = ds.Model()
    wanted = ds.model()
    for p, value in zip(of.parameters(), wanted.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters(p, modifier_rank=0), torch.no_grad():
            if rank == 0:  # as Transformers loads weights
                p.copy_(value)
    engine = deepspeed.initialize(model=of, config=configuration)[0]
    expected = ds.Expected(0, 4, replicas=2)
    ds.train(engine, range(4))
    for step in range(4):
        expected.step(step, True)
    frozen = of.frozen.weight
    with deepspeed.zero.GatheredParameters(frozen):
        alike = torch.equal(frozen, wanted.frozen.weight)
    with deepspeed.zero.Init():  # without the configuration: over all ranks
        other = ds.Model()
    before = gathered(other)
    told = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    declare_shapes(other)
    made = CurvaDion(by_hand_groups(other), ds.LR, replicas=mesh["replicate"])
    keyless = {k: v for k, v in configuration.items() if k != "optimizer"}
    undivided = ds.config(3)
    for model, said in (
        (other, {"config": configuration}),
        (other, {"config": keyless, "optimizer": made}),
        (of, {"config": undivided}),
    ):
        with pytest.raises(ValueError) as error:
            deepspeed.initialize(model=model, **said)
        told.append(str(error.value))
    unchanged = all(torch.equal(W, before[n]) for n, W in gathered(other).items())
    error = max(expected.distances(ds.masters(engine), rank).values())
    return error, alike, unchanged, told


def test_a_model_built_under_zero_init_starts_alike_on_all_replicas():
    for error, alike, unchanged, told in distributed.run(4, under_init):
        assert_within(error, ds.ROUNDING)
        assert alike and unchanged
        by_key, by_code, keyless = told
        over_all = r"sharded over the ranks \[0, 1, 2, 3\].*"
        assert re.search(f"{over_all}replica_size says .*config_dict_or_path", by_key)
        assert re.search(f"{over_all}of the optimizer.*data_parallel_group", by_code)
        assert "has no optimizer.params.replica_size, shards over [0, 1, 2, 3]" in keyless
