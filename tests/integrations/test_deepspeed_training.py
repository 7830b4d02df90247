"""DeepSpeed engines that clip, save and load, meet bad gradients, and take optimizers from code."""

from __future__ import annotations

import importlib.util
import re
import warnings

import pytest
import torch
import torch.distributed as dist

import curvadion
import deepspeed_engines as ds
import distributed
from curvadion import AlwaysOpen, CurvaDion
from tolerance import assert_within

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]
PERIOD = {"gate": {"type": "period", "period": 3}, "local_step": "gradient", "local_lr": 0.005}


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


def test_a_checkpoint_continues_bitwise(tmp_path):
    results = distributed.run(2, resumed, "3 offload", str(tmp_path))
    for (reports, weights), (again, weights_again) in results:
        assert reports == again
        assert [report.step for report in reports] == [5, 6, 7, 8]
        for parameter, W in weights.items():
            assert torch.equal(W, weights_again[parameter]), parameter


# -------------------------------------------------------------------- bad gradients


def spoiled(rank):
    """Reports, and whether the step with a NaN on the last rank left all weights as they were."""
    engine = ds.engine_of(ds.changed("1 bf16", PERIOD, gradient_clipping=10.0))
    last = dist.get_world_size() - 1
    ds.train(engine, range(2))
    before = ds.masters(engine)
    reports = ds.train(engine, [2], spoil={(2, last)})
    after = ds.masters(engine)
    reports += ds.train(engine, range(3, 7))
    return reports, {n: torch.equal(W, after[n]) for n, W in before.items()}, ds.masters(engine)


def test_a_nan_on_one_rank_skips_the_step_on_all():
    results = distributed.run(2, spoiled)
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


ON_ONE_RANK = {(1, 1): ("wide",), (2, 1): ("tall",), (5, 0): ("two", "row")}
ON_ALL = {(step, rank): ("wide",) for step in (1, 2) for rank in (0, 1)}


@pytest.mark.parametrize(("name", "missing"), [("0", ON_ONE_RANK), ("3 offload", ON_ALL)])
def test_gradients_may_be_missing(name, missing):
    (reports, weights), (again, others) = distributed.run(2, incomplete, name, missing)
    assert reports == again
    assert [report.gate_open for report in reports] == [False, False, True] * 2
    for parameter, W in weights.items():
        assert torch.equal(W, others[parameter]), parameter


# -------------------------------------------------------------------- optimizers from code


def clients(rank, stage, how):
    """Worst distance from the equations with an optimizer, or a callable, made in code."""
    import deepspeed  # noqa: F401

    of, world = ds.model(), dist.get_world_size()

    def build(parameters):
        groups = curvadion.param_groups(of, options={"vector": {"lr": ds.ELEMENTWISE_LR}})
        return CurvaDion(groups, lr=ds.LR, gate=AlwaysOpen(), rank_fraction=ds.FRACTION)

    configuration = ds.config(stage)
    del configuration["optimizer"]
    optimizer = build if how == "callable" else build(None)
    engine = ds.engine_of(configuration, of, optimizer=optimizer)
    expected = ds.Expected(1, world)
    ds.train(engine, range(5))
    for step in range(5):
        expected.step(step, True)
    return max(expected.distances(ds.masters(engine), rank).values())


@pytest.mark.parametrize(("stage", "how"), [(0, "left to DeepSpeed"), (3, "callable")])
def test_an_optimizer_made_in_code(stage, how):
    assert_within(max(distributed.run(2, clients, stage, how)), ds.ROUNDING)


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
    assert re.search(r"warmup_max_lr=0\.02 sets this.*write a list with one rate per group", said)
    for said, _ in distributed.run(2, one_rate, [0.02, 0.003]):
        assert not said
