"""Replicas that take polar directions stay together, whatever is missing, changed or mixed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import distributed
from curvadion import CurvaDion, Dion, FixedPeriod, LowRank, QuantizedAverage
from curvadion.sync import corrections
from curvadion.sync.base import Sync
from curvadion.update import row_shards
from scheduled import Scheduled
from seeded import gradient, weights
from shards import shard

SHAPES = [(12, 8), (8, 12), (9, 9)]


def step(X, optimizer, number, rank, missing=()):
    for i, x in enumerate(X):
        x.grad = None if i in missing else gradient(x.shape, number, rank).to(x.dtype)
    optimizer.step()
    return optimizer.drift()


def changed_direction(rank, make, steps):
    X = [nn.Parameter(weights(shape)) for shape in SHAPES]
    optimizer = make(X)
    drifts = []
    for number in range(steps):
        if number == 3:
            optimizer.param_groups[0]["direction"] = "polar"
        drifts.append(step(X, optimizer, number, rank))
    return drifts


def dion(X):
    return Dion(X, replicas=dist.group.WORLD)


def scheduled(X):
    return CurvaDion(X, replicas=dist.group.WORLD, gate=Scheduled((1, 2, 3, 4, 7)), sync=LowRank())


def test_replicas_agree_after_a_change_of_the_direction():
    for drifts in distributed.run(2, changed_direction, dion, 7):
        assert max(drifts) == 0.0
    for drifts in distributed.run(2, changed_direction, scheduled, 7):
        assert [d == 0.0 for d in drifts] == [True] * 4 + [False] * 2 + [True]


def spectra(rank):
    """Which parameters keep spectra, after steps between which settings change; their sizes."""
    X = [nn.Parameter(weights(shape)) for shape in [*SHAPES, (24, 8)]]
    groups = [{"params": X[:-1]}, {"params": X[-1:], "row_blocks": (16, 5, 3)}]
    sync = QuantizedAverage(fragments=2, spectrum_decay=0.8)
    optimizer = CurvaDion(groups, replicas=dist.group.WORLD, gate=FixedPeriod(1), sync=sync)
    group, found = optimizer.param_groups[0], []
    directions = ["polar", "polar", "low_rank", "polar", "polar"]
    for number, direction in enumerate(directions):
        group["direction"] = direction
        step(X, optimizer, number, rank, [0] if rank == 1 else ())
        states = [optimizer.state[x].get("spectrum") for x in X]
        found.append([None if s is None else (s.numel(), bool(s.any())) for s in states])
    without = CurvaDion(
        groups,
        replicas=dist.group.WORLD,
        gate=FixedPeriod(1),
        sync=QuantizedAverage(spectrum_decay=0.0),
    )
    without.load_state_dict(optimizer.state_dict())
    step(X, without, 9, rank)
    found.append(["spectrum" in without.state[x] for x in X])
    return found


@pytest.mark.filterwarnings("ignore:state_dict")
def test_spectra_come_and_go_alike_on_all_replicas():
    one, other = distributed.run(2, spectra)
    sizes = [8 * 8, 8 * 8, 9 * 9, 8 * 8 + 5 * 5 + 3 * 3]
    for found in (one, other):
        *steps, after_loading = found
        kept = [[None if s is None else s[0] for s in each] for each in steps]
        low_rank = [None] * 3 + sizes[3:]
        assert kept == [sizes, sizes, low_rank, sizes, sizes]
        # After two steps both fragments have come together; anew, only one has after one step.
        filled = [[s is not None and s[1] for s in each[1:3]] for each in steps]
        assert filled[1] == filled[4] == [True] * 2
        assert not all(s[1] for s in steps[3][:3])
        assert after_loading == [False] * 4


def missing_gradients(rank, nesterov):
    X = [nn.Parameter(weights(shape)) for shape in SHAPES]
    optimizer = Dion(X, replicas=dist.group.WORLD, direction="polar", nesterov=nesterov)
    return [step(X, optimizer, n, rank, [1] if rank == 1 and n > 0 else ()) for n in range(4)]


@pytest.mark.parametrize("nesterov", [0.0, 1.0])
def test_replicas_agree_on_a_gradient_that_one_misses(nesterov):
    assert distributed.run(2, missing_gradients, nesterov) == [[0.0] * 4] * 2


def agreed_after_loading(rank):
    """Drifts of a run that goes on from its own state, and of one from a run of another kind."""
    found = []
    for kind in (LowRank(), QuantizedAverage()):
        X = [nn.Parameter(weights(shape)) for shape in SHAPES]
        how = {"direction": "polar", "replicas": dist.group.WORLD}
        before = CurvaDion(X, gate=FixedPeriod(2), sync=kind, **how)
        for number in range(4):
            step(X, before, number, rank)
        before.synchronize()
        after = CurvaDion(X, gate=FixedPeriod(1), sync=LowRank(), **how)
        after.load_state_dict(before.state_dict())
        found.append([step(X, after, number, rank) for number in range(4, 7)])
    return found


@pytest.mark.filterwarnings("ignore:state_dict")
def test_momenta_of_another_kind_are_brought_together():
    for found in distributed.run(2, agreed_after_loading):
        assert found == [[0.0] * 3] * 2


def experts_beside_dense(rank, experts, dense):
    """Ranks of which one holds no expert take the same collectives."""
    mesh = init_device_mesh("cpu", (2,))
    whole = [weights((1, 8, 6)), weights((12, 8))]
    X = [nn.Parameter(shard(w, ("0",), mesh)) for w in whole]
    groups = [
        {"params": X[:1], "stack_dims": 1, "direction": experts},
        {"params": X[1:], "direction": dense},
    ]
    optimizer = CurvaDion(groups, replicas="single", threshold=0.3)
    for number in range(3):
        for x, w in zip(X, whole, strict=True):
            x.grad = shard(gradient(w.shape, number, 0), ("0",), mesh)
        optimizer.step()
    return True


def test_ranks_without_experts_take_the_same_collectives():
    for experts in ("low_rank", "polar"):
        for dense in ("low_rank", "polar"):
            assert all(distributed.run(2, experts_beside_dense, experts, dense))


def mixed_dtypes(rank, cut):
    mesh = init_device_mesh("cpu", (2,))
    whole = [weights((12, 8)), weights((12, 8)).double(), weights((10, 8))]
    X = [nn.Parameter(shard(w, (cut,), mesh)) for w in whole]
    optimizer = Dion(X, replicas="single", direction="polar")
    for x, w in zip(X, whole, strict=True):
        x.grad = shard(gradient(w.shape, 0, 0).to(w.dtype), (cut,), mesh)
    optimizer.step()
    return [bool(x.to_local().isfinite().all()) for x in X]


@pytest.mark.parametrize("cut", ["0", "1"])
def test_dtypes_may_differ(cut):
    assert distributed.run(2, mixed_dtypes, cut) == [[True] * 3] * 2


def falling_rates(rank):
    """Weights after learning rates have fallen far, with corrections in half precision."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (row_shards, corrections):
            patch.setattr(module, "dtype_of_products", lambda rows: torch.float16)
        X = [nn.Parameter(weights((24, 16)))]
        optimizer = CurvaDion(
            X, replicas=dist.group.WORLD, gate=FixedPeriod(2), sync=QuantizedAverage(bits=1)
        )
        for number in range(12):
            if number == 6:
                optimizer.param_groups[0]["lr"] *= 1e-4
            step(X, optimizer, number, rank)
        return bool(X[0].detach().isfinite().all()), float(X[0].detach().norm())


def test_a_fall_of_the_rate_does_no_harm_in_half_precision():
    for finite, norm in distributed.run(2, falling_rates):
        assert finite and norm < 40


class Bare(Sync):
    group_defaults = {"rank_fraction": 1.0, "right_factor": "qr", "nesterov": 0.0}  # noqa: RUF012

    def open_step(self, step):
        step.local_update()


def test_a_sync_that_names_no_direction_takes_low_rank_factors():
    optimizer = CurvaDion([nn.Parameter(weights((4, 3)))], replicas="single", sync=Bare())
    assert optimizer.param_groups[0]["direction"] == "low_rank"
