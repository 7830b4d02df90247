"""DeepSpeed at stage 0 with a delay: means arrive later, from the JSON alone."""

from __future__ import annotations

import importlib.util
import os
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import curvadion
import deepspeed_engines as ds
import distributed
import fresh
from curvadion import CurvaDion, FixedPeriod, QuantizedAverage

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"
)
ROOT = Path(__file__).resolve().parents[2]
STEPS = 14
BUDGET = {"wire_budget": 0.8, "delay": 1}
PERIOD = {
    "gate": {"type": "period", "period": 3},
    "sync": {"type": "quantized_average", "bits": 3, "fragments": 2},
    "delay": 2,
}
MISSING = {(4, 1): ("wide",), (5, 0): ("tall", "two"), (7, 1): ("row",)}


def engine_of(name, params):
    configuration = ds.changed(name, params)
    if "gate" not in params:
        del configuration["optimizer"]["params"]["gate"]
    return ds.engine_of(configuration)


def under_way(optimizer):
    return any("due" in state for state in optimizer.state.values())


def by_hand(params, of):
    """The same optimizer, made in code."""
    groups = curvadion.param_groups(of, options={"vector": {"lr": ds.ELEMENTWISE_LR}})
    chosen = {"wire_budget": 0.8, "sync": QuantizedAverage(delay=1)}
    if "gate" in params:
        chosen = {"gate": FixedPeriod(3), "sync": QuantizedAverage(bits=3, fragments=2, delay=2)}
    return CurvaDion(groups, ds.LR, rank_fraction=ds.FRACTION, replicas=dist.group.WORLD, **chosen)


def train(rank, name, params, missing):
    """What differs between an engine and the optimizer made in code; how often it opened."""
    engine = engine_of(name, params)
    of = ds.model()
    optimizer = by_hand(params, of)
    assert repr(engine.basic_optimizer.sync) == repr(optimizer.sync)
    opened, waiting, unlike = 0, 0, set()
    for step in range(STEPS):
        (report,) = ds.train(engine, [step], skip_on=missing)
        optimizer.zero_grad()
        G = ds.gradients(step, rank, dist.get_world_size())
        of(G, skip=missing.get((step, rank), ())).backward()
        optimizer.step()
        opened += report.gate_open
        waiting += under_way(engine.basic_optimizer)
        assert report.gate_open == optimizer.report.gate_open
        unlike |= differing(ds.masters(engine), of)
    for each in (engine.basic_optimizer, optimizer):
        each.synchronize()
    assert not engine.basic_optimizer.apart
    return opened, waiting, unlike | differing(ds.masters(engine), of), ds.masters(engine)


def differing(weights, of):
    wanted = dict(of.named_parameters())
    return {name for name, W in weights.items() if not torch.equal(W, wanted[name])}


@pytest.mark.parametrize(
    ("name", "params", "missing", "world"),
    [
        ("0", BUDGET, {}, 2),
        ("0", PERIOD, MISSING, 4),
        ("0 accumulation", PERIOD, {}, 2),
        ("0 bf16", BUDGET, {}, 2),
    ],
)
def test_an_engine_goes_where_the_optimizer_made_in_code_goes(name, params, missing, world):
    first, *others = distributed.run(world, train, name, params, missing)
    for opened, waiting, unlike, weights in (first, *others):
        assert opened > 1 and waiting > 1 and not unlike
        assert all(torch.equal(W, first[3][parameter]) for parameter, W in weights.items())


def resumed(rank, name, params, stop, folder):
    """A run that goes on after it has saved, and one that loads what it saved."""
    engine = engine_of(name, params)
    ds.train(engine, range(stop))
    assert under_way(engine.basic_optimizer)
    engine.save_checkpoint(folder, tag="here")
    further = range(stop, stop + 20)
    runs = [(ds.train(engine, further), ds.masters(engine))]
    again = engine_of(name, params)
    again.load_checkpoint(folder, tag="here")
    runs.append((ds.train(again, further), ds.masters(again)))
    return runs


@pytest.mark.parametrize(
    ("name", "params", "stop"), [("0", PERIOD, 6), ("0 bf16", PERIOD, 7), ("0", BUDGET, 8)]
)
def test_a_checkpoint_with_something_under_way_continues_bitwise(name, params, stop, tmp_path):
    for (reports, weights), (again, others) in distributed.run(
        2, resumed, name, params, stop, str(tmp_path)
    ):
        opened = [(r.step, r.gate_open) for r in reports]
        assert opened == [(r.step, r.gate_open) for r in again]
        assert any(open_ for _, open_ in opened)
        for parameter, W in weights.items():
            assert torch.equal(W, others[parameter]), parameter


PROGRAM = """
    import sys, time
    import torch.distributed as dist
    import deepspeed_engines as ds
    from test_deepspeed_delay import PERIOD, engine_of, under_way
    rank = int(sys.argv[1])
    store = "file://" + sys.argv[2]
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    engine = engine_of("0", PERIOD)
    ds.train(engine, range(5))
    time.sleep(rank)
    ds.train(engine, [5])
    assert under_way(engine.basic_optimizer)
    engine.destroy()
"""


def test_a_process_ends_while_something_is_under_way(tmp_path):
    program = textwrap.dedent(PROGRAM)
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": paths}
    ranks = [
        fresh.Program("-c", program, rank, tmp_path / "store", environment=environment, cwd=ROOT)
        for rank in range(2)
    ]
    for process in ranks:
        said = process.finish(100)
        assert said.returncode == 0 and "terminate" not in said.stderr, said.stderr
