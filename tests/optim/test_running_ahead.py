"""Where no replica waits, the host need not hear at once that a gradient is not finite.

On a CPU nothing is gained by that, so optimizers here are told to do it all the same.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from curvadion import CurvaDion, Dion, FixedPeriod, LowRank, QuantizedAverage
from curvadion.layout.dtensor import local
from curvadion.optim import replica_optimizer
from support.runs import distributed
from support.runs.seeded import gradient, weights
from support.runs.shards import shard

SHAPES, VECTOR = [(12, 8), (8, 12), (9, 9)], (7,)
STEPS, BAD = 8, (2, 3, 7)
PERIOD = 5  # step 5 is an opening
DIRECTIONS = {
    "low_rank": {"direction": "low_rank"},
    "low_rank with a look-ahead": {"direction": "low_rank", "look_ahead": 1.5},
    "polar": {"direction": "polar", "look_ahead": 1.5},
    "nordion2": {"direction": "nordion2", "rank_fraction": 0.5, "look_ahead": 1.5},
}
ELEMENTWISE = ("adamw", "lion")


def copied(optimizer, parameters):
    states = [optimizer.state[x] for x in parameters]
    held = [{k: local(torch.as_tensor(v)).clone() for k, v in s.items()} for s in states]
    return [local(x.detach()).clone() for x in parameters], held


def same(one, other):
    (X, states), (Y, others) = one, other
    pairs = [(a[k], b[k]) for a, b in zip(states, others, strict=True) for k in a]
    return all(torch.equal(a, b) for a, b in [*zip(X, Y, strict=True), *pairs])


def run(rank, build, devices, sharded, options):
    """After each step the weights and states, and whether the report says skipped."""
    before, replica_optimizer.RUNS_AHEAD = replica_optimizer.RUNS_AHEAD, devices
    try:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if sharded else None
        X = [nn.Parameter(_placed(weights(shape), mesh)) for shape in SHAPES]
        others = [nn.Parameter(torch.ones(VECTOR)) for _ in ELEMENTWISE]
        groups = [{"params": X}] + [
            {"params": [x], "algorithm": algorithm, "lr": 1e-3}
            for x, algorithm in zip(others, ELEMENTWISE, strict=True)
        ]
        optimizer, history = build(groups, sharded, options), []
        for step in range(1, STEPS + 1):
            for x, shape in zip([*X, *others], [*SHAPES, VECTOR, VECTOR], strict=True):
                G = gradient(shape, step, 0 if sharded else rank)
                if step in BAD and shape == SHAPES[-1]:
                    G[-1, -1] = math.nan
                x.grad = _placed(G, mesh) if x in set(X) else G
            optimizer.step()
            history.append((*copied(optimizer, [*X, *others]), optimizer.report.skipped))
        return history, optimizer.progress.consecutive_skips
    finally:
        replica_optimizer.RUNS_AHEAD = before


def _placed(x, mesh):
    return x if mesh is None else shard(x, ("0",), mesh)


def one_replica(groups, sharded, options):
    return Dion(groups, replicas=None if sharded else "single", **options)


def scheduled(groups, sharded, options):
    sync = LowRank() if options["direction"] == "low_rank" else QuantizedAverage()
    gate = FixedPeriod(PERIOD)
    return CurvaDion(groups, replicas=dist.group.WORLD, gate=gate, sync=sync, **options)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("build", "ranks", "sharded"),
    [(one_replica, 1, False), (one_replica, 2, True), (scheduled, 2, False)],
    ids=["one process", "shards", "replicas on a schedule"],
)
def test_steps_are_those_of_a_host_that_waits(build, ranks, sharded, direction):
    options = DIRECTIONS[direction]
    waiting, ahead = (
        distributed.run(ranks, run, build, devices, sharded, options) for devices in ((), ("cpu",))
    )
    for (history, _), (other, _) in zip(waiting, ahead, strict=True):
        for step, ((X, states, skipped), (Y, others, late)) in enumerate(
            zip(history, other, strict=True), start=1
        ):
            assert same((X, states), (Y, others)), step
            assert skipped == (step in BAD)
            if build is one_replica:  # the opening of replicas is heard at once
                assert late == (step - 1 in BAD)
        moved = [not same(history[i][:2], history[i - 1][:2]) for i in range(1, STEPS)]
        assert moved == [step not in BAD for step in range(2, STEPS + 1)]


def test_the_tenth_step_in_a_row_that_is_left_out_is_an_error(monkeypatch):
    monkeypatch.setattr(replica_optimizer, "RUNS_AHEAD", ("cpu",))
    x = nn.Parameter(weights((6, 4)))
    optimizer = Dion([x], replicas="single")
    x.grad = gradient((6, 4), 0, 0)
    optimizer.step()
    x.grad = torch.full_like(x, math.nan)
    for _ in range(replica_optimizer.MAX_CONSECUTIVE_SKIPS):
        optimizer.step()
    with pytest.raises(RuntimeError, match="10 steps in a row"):
        optimizer.step()


def test_states_of_a_stack_keep_their_own_dtypes(monkeypatch):
    def factors(devices):
        monkeypatch.setattr(replica_optimizer, "RUNS_AHEAD", devices)
        X = [nn.Parameter(weights((16, 12)).to(d)) for d in (torch.bfloat16, torch.float32)]
        optimizer = Dion(X, replicas="single", direction="low_rank")
        for step in range(3):
            for i, x in enumerate(X):
                x.grad = gradient((16, 12), step, i).to(x.dtype)
            optimizer.step()
        return [optimizer.state[x]["Q"] for x in X]

    assert all(map(torch.equal, factors(("cpu",)), factors(())))
