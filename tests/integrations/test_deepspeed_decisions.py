"""What DeepSpeed's replicas decide as one: bad gradients, norms, errors, first weights."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import deepspeed_engines as ds
import distributed
from curvadion import AlwaysOpen, CurvaDion
from deepspeed_replicas import SIZE, by_hand_groups, engine_of
from tolerance import assert_within

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]
PERIOD = {"gate": {"type": "period", "period": 3}, "local_step": "gradient", "local_lr": 0.005}
RMMC = {"threshold": 0.18, "local_step": "gradient"}
CODES = {"gate": {"type": "period", "period": 3}, "sync": {"type": "quantized_average"}}


# -------------------------------------------------------------------- gradients that are not finite


def spoiled(rank, cases):
    """By case: reports around a NaN on the last rank, and whether weights stayed as they were."""
    found = {}
    for name, how, clip in cases:
        params = {"always": {}, "rmmc": RMMC, "period": PERIOD, "codes": CODES}[how]
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
    ("0", "always", 0.0),
    ("0 bf16", "codes", 0.0),
    ("1 BF16_Optimizer", "rmmc", 10.0),
    ("3 sub-groups", "period", 10.0),
]


def test_a_nan_on_one_rank_harms_no_replica():
    for rank, found in enumerate(distributed.run(4, spoiled, SPOILED)):
        for case, (skipped, unchanged, finite) in found.items():
            alone = case[1] in ("period", "codes") and not case[2]
            mine = rank >= 2 or not alone
            assert skipped == [mine, False, False, False], case
            assert unchanged == mine and finite, case


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
    each = distributed.run(4, clipped, ["0", "0 bf16", "2 offload"])
    for name in each[0]:
        assert_within(max(found[name][0] for found in each), ds.ROUNDING, what=name)
        assert len({found[name][1] for found in each}) == 1 and each[0][name][1] > 10, name


# -------------------------------------------------------------------- errors of users

INVALID = {
    "no divisor": ({"replica_size": 3}, {}, "params.replica_size=3 must divide the number of"),
    "no integer": ({"replica_size": "2"}, {}, "TypeError: optimizer.params.replica_size='2' must"),
    "local files": (
        {"replica_size": 2}, {"checkpoint": {"use_node_local_storage": True}},
        "checkpoint.use_node_local_storage does not work with optimizer.params.replica_size=2",
    ),
    "one replica": (
        {"replica_size": 4, "gate": {"type": "budget", "share": 0.01}}, {},
        "one replica is sharded over all ranks",
    ),
}  # fmt: skip


def refused(rank):
    """What is raised by each configuration."""
    return {
        case: error_of(ds.config(3, params, **settings))
        for case, (params, settings, _) in INVALID.items()
    }


def error_of(configuration):
    try:
        ds.engine_of(configuration)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_configurations_that_cannot_work_are_errors_on_all_ranks():
    for told in distributed.run(4, refused):
        for case, (_, _, part) in INVALID.items():
            assert part in told[case], case


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
        found[stage, replicas] = max(expected.distances(ds.masters(engine), rank).values())
    return found


def test_an_optimizer_made_in_code_may_have_replicas():
    cases = [(0, 2), (3, 4)]
    for found in distributed.run(4, clients, cases):
        assert_within(max(found.values()), ds.ROUNDING, what=found)


class Applied(ds.Model):
    """Fills its weights as GPTs do, here from a generator that differs from rank to rank."""

    def __init__(self):
        super().__init__()
        self.apply(self.fill)

    @staticmethod
    def fill(module):
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight)


def gathered(of):
    import deepspeed

    with deepspeed.zero.GatheredParameters([*of.parameters()]):
        return {n: p.detach().clone() for n, p in of.named_parameters()}


def under_init(rank):
    """A model built under zero.Init, of other weights on each rank.

    What it and a rank alone draw; distances, with weights that single ranks have loaded; what is
    held once a rank has changed weights by hand; an error.
    """
    import deepspeed

    settings = {"stage3_param_persistence_threshold": 0}
    configuration = ds.config(3, {"replica_size": SIZE}, zero=settings)
    ds.prepare()
    torch.manual_seed(rank)
    with deepspeed.zero.Init(config_dict_or_path=configuration):
        of = Applied()
    built = gathered(of)["tall.weight"]
    torch.manual_seed(rank)
    drawn = Applied().tall.weight.detach()
    assert torch.nn.Module.apply is torch.nn.Module._old_apply
    wanted = ds.model()
    for place, (p, value) in enumerate(zip(of.parameters(), wanted.parameters(), strict=True)):
        loader = place % 4
        with deepspeed.zero.GatheredParameters(p, modifier_rank=loader), torch.no_grad():
            if rank == loader:  # as Transformers loads weights on the first rank
                p.copy_(value)
    engine = deepspeed.initialize(model=of, config=configuration)[0]
    expected = ds.Expected(0, 4, replicas=2)
    ds.train(engine, range(4))
    for step in range(4):
        expected.step(step, True)
    distance = max(expected.distances(ds.masters(engine), rank).values())
    same = torch.equal(gathered(of)["frozen.weight"], wanted.frozen.weight)
    some = (of.frozen.weight, of.tall.weight)
    with deepspeed.zero.GatheredParameters((p for p in some), modifier_rank=3), torch.no_grad():
        if rank == 3:
            for p in some:
                p.fill_(0.5)
    changed = gathered(of)["tall.weight"]
    with deepspeed.zero.Init():  # without the configuration: over all ranks
        other = ds.Model()
    with pytest.raises(ValueError, match="config_dict_or_path") as told:
        deepspeed.initialize(model=other, config=configuration)
    return built, drawn, distance, same, changed, str(told.value)


def test_a_model_built_under_zero_init_has_the_same_weights_on_all_replicas():
    each = distributed.run(4, under_init)
    for built, _, distance, same, changed, told in each:
        assert torch.equal(built, each[0][1])
        assert_within(distance, ds.ROUNDING)
        assert same and changed.eq(0.5).all()
        assert "sharded over the ranks [0, 1, 2, 3]" in told
