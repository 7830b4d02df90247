"""DeepSpeed engines that clip, save and load, meet bad gradients, and take optimizers from code."""

from __future__ import annotations

import importlib.util
import math
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import curvadion
import deepspeed_engines as ds
import distributed
from curvadion import RMMC, AlwaysOpen, CurvaDion
from tolerance import Rounding, assert_close, assert_within

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]
PERIOD = {"gate": {"type": "period", "period": 3}, "local_step": "gradient", "local_lr": 0.005}


# -------------------------------------------------------------------- a network


class Network(nn.Module):
    """Embedding, two linear layers, three experts with their inputs first, norm and head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 9)
        self.norm = nn.LayerNorm(9)
        self.experts = nn.Parameter(0.3 * torch.randn(3, 9, 5))
        self.down = nn.Linear(9, 7)
        self.lm_head = nn.Linear(12, 11, bias=False)

    def forward(self, tokens):
        x = torch.relu(self.norm(self.up(self.embedding(tokens))))
        mixed = torch.einsum("ti,eio->to", x, self.experts)
        return self.lm_head(torch.cat((self.down(x), mixed), dim=-1))


def network():
    torch.manual_seed(0)
    return Network()


def loss(of, step, rank):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    tokens, targets = torch.randint(11, (2, 16), generator=generator)
    return nn.functional.cross_entropy(of(tokens), targets)


PARAMS = {
    "lr": 0.02,
    "elementwise": "lion",
    "options": {"head": {"lr": 2e-3}, "embedding": {"lr": 3e-3}, "vector": {"lr": 1e-3}},
    "patterns": {
        "down.weight": "head",
        "experts": {"kind": "stack", "input_first": True, "momentum_rule": "plain"},
    },
    "local_step": "gradient",
}


def like_one_process(rank, stage):
    """JSON alone, against CurvaDion in one process on the mean loss: errors, both reports."""
    world, threshold = dist.get_world_size(), 0.18 if stage else 0.0
    engine = ds.engine_of(
        ds.config(stage, {**PARAMS, "gate": {"type": "rmmc", "threshold": threshold}}), network()
    )
    plain = network()
    groups = curvadion.param_groups(
        plain, **{key: PARAMS[key] for key in ("elementwise", "options", "patterns")}
    )
    optimizer = CurvaDion(
        groups, lr=0.02, gate=RMMC(threshold), local_step="gradient", rank_fraction=ds.FRACTION,
        replicas="single",
    )  # fmt: skip
    records = []
    for step in range(12):
        engine.backward(loss(engine, step, rank))
        engine.step()
        optimizer.zero_grad()
        (sum(loss(plain, step, r) for r in range(world)) / world).backward()
        optimizer.step()
        records.append((engine.basic_optimizer.report, optimizer.report))
    wanted = dict(plain.named_parameters())
    errors = {n: ds.relative_error(p, wanted[n]) for n, p in ds.masters(engine).items()}
    return errors, records


@pytest.mark.parametrize(("stage", "world"), [(0, 3), (1, 2), (2, 3), (3, 2)])
def test_json_alone_trains_like_one_process(stage, world):
    for errors, records in distributed.run(world, like_one_process, stage):
        assert_within(max(errors.values()), ds.ROUNDING, what=errors)
        for ours, plain in records:
            assert ours.gate_open == plain.gate_open
            if stage:
                assert ours.rmmc_parameter == plain.rmmc_parameter
                if plain.rmmc == math.inf:
                    assert ours.rmmc == math.inf
                    continue
                # A difference of norms, relative to one of them.
                condition = 1 / min(plain.rmmc, 1.0)
                assert_close(ours.rmmc, plain.rmmc, Rounding(torch.float32, 12 * 32, condition))
        opened = [ours.gate_open for ours, _ in records]
        assert all(opened) if stage == 0 else 1 < sum(opened) < 12


def dion(rank, stage):
    configuration = ds.config(stage, kind="Dion")
    del configuration["optimizer"]["params"]["gate"]
    engine = ds.engine_of(configuration)
    expected = ds.Expected(stage, dist.get_world_size())
    reports = ds.train(engine, range(5))
    for step in range(5):
        expected.step(step, True)
    return max(expected.distances(ds.masters(engine), rank).values()), reports


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_type_dion(stage):
    for error, reports in distributed.run(2, dion, stage):
        assert_within(error, ds.ROUNDING)
        assert [report.reason for report in reports] == ["always"] * 5


# -------------------------------------------------------------------- clipping


def clipped(rank, name, clip):
    world = dist.get_world_size()
    engine = ds.engine_of(ds.changed(name, PERIOD, gradient_clipping=clip))
    expected = ds.Expected(ds.stage_of(engine), world, local_lr=0.005, clip=clip)
    ds.train(engine, range(6))
    for step in range(6):
        expected.step(step, step in (2, 5))
    return max(expected.distances(ds.masters(engine), rank).values()), engine.get_global_grad_norm()


@pytest.mark.parametrize("name", ["0", "0 bf16", "1", "2 bf16", "3 sub-groups", "3 offload"])
def test_gradients_are_clipped_by_one_norm(name):
    results = distributed.run(2, clipped, name, 10.0)
    for error, norm in results:
        assert_within(error, ds.ROUNDING)
        assert norm > 10.0  # clipped at all
    assert len({float(norm) for _, norm in results}) == 1


# -------------------------------------------------------------------- checkpoints


def resumed(rank, name, folder):
    """Weights after going on, and after a new engine has gone on from the checkpoint."""
    configuration = ds.changed(name, PERIOD)
    engine = ds.engine_of(configuration)
    ds.train(engine, range(4))
    engine.save_checkpoint(folder, tag="here")
    first = ds.train(engine, range(4, 8)), ds.masters(engine)
    again = ds.engine_of(configuration)
    path, _ = again.load_checkpoint(folder, tag="here")
    assert path is not None
    second = ds.train(again, range(4, 8)), ds.masters(again)
    return first, second


# Of DeepSpeed's classes of optimizers, with either dtype; stages 1 and 2 share theirs.
CHECKPOINTED = [
    "0", "0 bf16", "1 bf16", "1 BF16_Optimizer", "2 round robin", "2 offload", "3 sub-groups",
    "3 bf16", "3 offload",
]  # fmt: skip


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_a_checkpoint_continues_bitwise(name, tmp_path):
    for (reports, weights), (again, weights_again) in distributed.run(
        2, resumed, name, str(tmp_path)
    ):
        assert reports == again
        assert [report.step for report in reports] == [5, 6, 7, 8]
        for parameter, W in weights.items():
            assert torch.equal(W, weights_again[parameter]), parameter


def saved(rank, name, folder):
    engine = ds.engine_of(ds.changed(name, PERIOD))
    ds.train(engine, range(2))
    engine.save_checkpoint(folder, tag="here")
    return ds.masters(engine)


def loaded(rank, name, folder):
    engine = ds.engine_of(ds.changed(name, PERIOD))
    try:
        engine.load_checkpoint(folder, tag="here")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ds.masters(engine)


@pytest.mark.parametrize("name", ["1", "2", "3"])
def test_another_world_size_is_a_clear_error(name, tmp_path):
    distributed.run(2, saved, name, str(tmp_path))
    for message in distributed.run(3, loaded, name, str(tmp_path)):
        assert "world size" in message


def test_another_order_of_the_parameters_is_a_clear_error(tmp_path):
    distributed.run(2, saved, "2", str(tmp_path))
    for message in distributed.run(2, loaded, "2 round robin", str(tmp_path)):
        assert "other keys of zero_optimization" in message


def test_stage_0_loads_in_another_world_size(tmp_path):
    before = distributed.run(2, saved, "0", str(tmp_path))
    after = distributed.run(3, loaded, "0", str(tmp_path))
    for weights in (*before, *after):
        for parameter, W in before[0].items():
            assert torch.equal(W, weights[parameter])


# -------------------------------------------------------------------- bad gradients


def spoiled(rank, name, settings):
    """Reports, and whether the step with a NaN on the last rank left all weights as they were."""
    engine = ds.engine_of(ds.changed(name, PERIOD, **settings))
    last = dist.get_world_size() - 1
    ds.train(engine, range(2))
    before = ds.masters(engine)
    reports = ds.train(engine, [2], spoil={(2, last)})
    after = ds.masters(engine)
    reports += ds.train(engine, range(3, 7))
    return reports, {n: torch.equal(W, after[n]) for n, W in before.items()}, ds.masters(engine)


NAMES = [
    "0", "0 bf16", "1", "1 bf16", "1 BF16_Optimizer", "2", "2 bf16", "3", "3 bf16", "3 offload",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "clip"),
    [(name, 10.0 if name in ("0", "1 bf16", "2", "3") else 0.0) for name in NAMES],
)
def test_a_nan_on_one_rank_skips_the_step_on_all(name, clip):
    results = distributed.run(2, spoiled, name, {"gradient_clipping": clip})
    for reports, unchanged, weights in results:
        assert [(r.step, r.skipped) for r in reports] == [
            (3, True), (4, False), (5, False), (6, False), (7, False),
        ]  # fmt: skip
        assert all(unchanged.values())
        assert all(W.isfinite().all() for W in weights.values())
    assert [r.gate_open for r in results[0][0]] == [r.gate_open for r in results[1][0]]


def incomplete(rank, name, missing):
    engine = ds.engine_of(ds.changed(name, PERIOD))
    reports = ds.train(engine, range(6), skip_on=missing)
    return reports, ds.masters(engine)


@pytest.mark.parametrize("name", ["0", "0 bf16", "1 BF16_Optimizer"])
def test_a_gradient_missing_on_one_rank_is_zero_there(name):
    missing = {(1, 1): ("wide",), (2, 1): ("tall",), (5, 0): ("two", "row")}
    (reports, weights), (again, others) = distributed.run(2, incomplete, name, missing)
    assert reports == again
    assert [report.gate_open for report in reports] == [False, False, True] * 2
    for parameter, W in weights.items():
        assert torch.equal(W, others[parameter]), parameter


def lacking(rank, name, bucket):
    """What the step raises at which the last rank lacks a gradient."""
    configuration = ds.changed(name, PERIOD)
    configuration["zero_optimization"]["reduce_bucket_size"] = bucket
    engine = ds.engine_of(configuration)
    ds.train(engine, range(2))
    with pytest.raises(RuntimeError) as error:
        ds.train(engine, [2], skip_on={(2, dist.get_world_size() - 1): ("wide",)})
    return str(error.value)


ONE_BUCKET, SEVERAL = 500, 40


@pytest.mark.parametrize(
    ("name", "bucket"),
    [
        *((name, SEVERAL) for name in ("1", "1 bf16", "2 round robin", "3 bf16")),
        *((name, ONE_BUCKET) for name in ("1", "2 offload", "3")),
    ],
)
def test_zero_cannot_take_a_gradient_that_is_missing_on_one_rank(name, bucket):
    messages = distributed.run(2, lacking, name, bucket)
    assert messages[0] == messages[1]
    assert "gradients of different parameters" in messages[0]
    assert "{0: 'wide." in messages[0]


@pytest.mark.parametrize("name", ["0", "1 bf16", "1 BF16_Optimizer", "2", "3", "3 offload"])
def test_a_gradient_missing_on_all_ranks_is_no_trouble(name):
    missing = {(step, rank): ("wide",) for step in (1, 2) for rank in (0, 1)}
    (reports, weights), (again, others) = distributed.run(2, incomplete, name, missing)
    assert reports == again
    assert not any(report.skipped for report in reports)
    for parameter, W in weights.items():
        assert torch.equal(W, others[parameter]), parameter


# -------------------------------------------------------------------- optimizers from code


def clients(rank, stage, how):
    """Worst distance from the equations with an optimizer, or a callable, made in code."""
    import deepspeed  # noqa: F401

    of, world = ds.model(), dist.get_world_size()
    replicas = dist.group.WORLD if how == "own" else None

    def build(parameters):
        groups = curvadion.param_groups(of, options={"vector": {"lr": ds.ELEMENTWISE_LR}})
        return CurvaDion(
            groups, lr=ds.LR, replicas=replicas, gate=AlwaysOpen(), rank_fraction=ds.FRACTION
        )

    configuration = ds.config(stage)
    del configuration["optimizer"]
    if how == "offloaded":
        configuration["zero_force_ds_cpu_optimizer"] = False
        configuration["zero_optimization"]["offload_optimizer"] = ds.OFFLOAD
    optimizer = build if how == "callable" else build(None)
    engine = ds.engine_of(configuration, of, optimizer=optimizer)
    expected = ds.Expected(0 if how == "own" else 1, world)
    ds.train(engine, range(5))
    for step in range(5):
        expected.step(step, True)
    assert curvadion.deepspeed.attach(engine) is engine  # again changes nothing
    return max(expected.distances(ds.masters(engine), rank).values())


@pytest.mark.parametrize(
    ("stage", "how"),
    [
        (0, "own"),
        (0, "left to DeepSpeed"),
        (1, "callable"),
        (2, "instance"),
        (2, "offloaded"),
        (3, "callable"),
        (3, "offloaded"),
    ],
)
def test_an_optimizer_made_in_code(stage, how):
    assert_within(max(distributed.run(2, clients, stage, how)), ds.ROUNDING)


def reduced_twice(rank):
    engine = ds.engine_of(ds.config(0))
    engine.enable_backward_allreduce = True
    with pytest.raises(RuntimeError) as error:
        ds.train(engine, [0])
    return str(error.value)


def test_gradients_that_deepspeed_has_reduced_are_an_error():
    for message in distributed.run(2, reduced_twice):
        assert "enable_backward_allreduce is True" in message


def built_under_zero_init(rank):
    import deepspeed

    configuration = ds.config(3, zero={"stage3_param_persistence_threshold": 0})
    ds.engine_of(configuration)  # DeepSpeed's groups
    ds.forget_groups()
    with deepspeed.zero.Init(config_dict_or_path=configuration):
        of = ds.Model()
    wanted = ds.model()
    for p, value in zip(of.parameters(), wanted.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters(p, modifier_rank=0), torch.no_grad():
            p.copy_(value)
    engine = curvadion.deepspeed.initialize(model=of, config=configuration)[0]
    expected = ds.Expected(3, dist.get_world_size())
    ds.train(engine, range(5))
    for step in range(5):
        expected.step(step, True)
    return max(expected.distances(ds.masters(engine), rank).values())


def test_a_model_built_under_zero_init():
    assert_within(max(distributed.run(2, built_under_zero_init)), ds.ROUNDING)


def moved_away(rank, name):
    engine = ds.engine_of(ds.CONFIGURATIONS[name])
    expected = ds.Expected(ds.stage_of(engine), dist.get_world_size())
    for step in range(6):
        ds.train(engine, [step])
        expected.step(step, True)
        if step == 2:
            engine.offload_states()
            engine.reload_states()
    return max(expected.distances(ds.masters(engine), rank).values())


@pytest.mark.parametrize("name", ["1", "2 round robin", "2 bf16"])
def test_states_may_be_offloaded_between_steps(name):
    assert_within(max(distributed.run(2, moved_away, name)), ds.ROUNDING)


def scheduled(rank, stage):
    """Learning rates of all groups as DeepSpeed's schedule and the optimizer have them."""
    scheduler = {"type": "WarmupLR", "params": {
        "warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 10,
        "warmup_type": "linear"}}  # fmt: skip
    engine = ds.engine_of(ds.config(stage, scheduler=scheduler))
    moved = []
    for step in range(4):
        before = ds.masters(engine)
        ds.train(engine, [step])
        after = ds.masters(engine)
        moved.append((after["tall.bias"] - before["tall.bias"]).abs().max().item())
    return engine.get_lr(), moved


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_schedules_reach_the_update(stage):
    for rates, moved in distributed.run(2, scheduled, stage):
        assert rates == pytest.approx([0.003, 0.003])
        # AdamW moves each element by at most about lr, which is 0 at first.
        assert all(m <= 1.2 * 0.001 * step for step, m in enumerate(moved))
        assert moved[-1] > 0.001


def one_rate(rank, rate):
    """What is said of a scheduler's rate, and the rates that the groups then have."""
    scheduler = {"type": "WarmupLR", "params": {
        "warmup_min_lr": 0.0, "warmup_max_lr": rate, "warmup_num_steps": 10}}  # fmt: skip
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        engine = ds.engine_of(ds.config(1, scheduler=scheduler))
    said = [str(w.message) for w in told if "scheduler" in str(w.message)]
    return said, len(engine.basic_optimizer.param_groups)


def test_one_rate_for_all_groups_is_warned_of():
    ((said,), groups), *_ = distributed.run(2, one_rate, 0.02)
    assert groups == 2
    assert re.search(r"warmup_max_lr=0\.02 gives all.*write a list with one rate for each", said)
    for said, _ in distributed.run(2, one_rate, [0.02, 0.003]):
        assert not said
