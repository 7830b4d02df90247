"""DeepSpeed engines that save and load, lack gradients, and are given one rate for all groups."""

import importlib.util
import re
import warnings

import pytest
import torch

from support.runs import deepspeed_engines as ds
from support.runs import distributed, toy

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]
PERIOD = {"gate": {"type": "period", "period": 3}, "local_step": "gradient", "local_lr": 0.005}


@distributed.on_ranks(2)
def test_a_checkpoint_continues_bitwise(rank, tmp_path):
    configuration = ds.changed("3 offload", PERIOD)
    engine = ds.engine_of(configuration)
    ds.train(engine, range(4))
    engine.save_checkpoint(str(tmp_path), tag="here")
    reports = ds.train(engine, range(4, 8))
    again = ds.engine_of(configuration)
    path, _ = again.load_checkpoint(str(tmp_path), tag="here")
    assert path is not None
    assert ds.train(again, range(4, 8)) == reports
    assert [report.step for report in reports] == [5, 6, 7, 8]
    toy.assert_bitwise_equal(ds.masters(again), ds.masters(engine))


ON_ONE_RANK = {(1, 1): ("wide",), (2, 1): ("tall",), (5, 0): ("two", "row")}
ON_ALL = {(step, rank): ("wide",) for step in (1, 2) for rank in (0, 1)}


def assert_moved_but(lacking, before, after):
    """Parameters that lack a gradient stay, also where their momenta are not zero."""
    moved = {name for name, W in before.items() if not torch.equal(W, after[name])}
    assert moved and not [name for name in moved if name.split(".")[0] in lacking]


@pytest.mark.parametrize(("name", "missing"), [("0", ON_ONE_RANK), ("3 offload", ON_ALL)])
@distributed.on_ranks(2)
def test_gradients_may_be_missing(rank, name, missing):
    engine = ds.engine_of(ds.changed(name, PERIOD))
    reports = []
    for step in range(6):
        before = ds.masters(engine)
        reports += ds.train(engine, [step], skip_on=missing)
        if name == "0" and not reports[-1].gate_open:
            assert_moved_but(missing.get((step, rank), ()), before, ds.masters(engine))
    assert [report.gate_open for report in reports] == [False, False, True] * 2
    assert distributed.gathered(reports) == [reports] * 2
    toy.assert_bitwise_equal(*distributed.gathered(ds.masters(engine)))


@pytest.mark.parametrize("rate", [0.02, [0.02, 0.003]])
@distributed.on_ranks(2)
def test_one_rate_for_all_groups_is_warned_of(rank, rate):
    """A scheduler sets the rate."""
    scheduler = {"type": "WarmupLR", "params": {
        "warmup_min_lr": 0.0, "warmup_max_lr": rate, "warmup_num_steps": 10}}  # fmt: skip
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        engine = ds.engine_of(ds.config(1, scheduler=scheduler))
    assert len(engine.basic_optimizer.param_groups) == 2
    said = [str(w.message) for w in told if "scheduler" in str(w.message)]
    if isinstance(rate, list):
        assert not said
    else:
        wanted = r"warmup_max_lr=0\.02 replaces the.*write a list with one rate per group"
        assert len(said) == 1 and re.search(wanted, said[0])
