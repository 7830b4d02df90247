"""Replicas that take polar directions stay equal, whatever is missing or mixed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import distributed
from curvadion import CurvaDion, FixedPeriod, LowRank, QuantizedAverage
from curvadion.sync import corrections
from curvadion.update import row_shards
from seeded import gradient, weights
from shards import shard

SHAPES = [(12, 8), (8, 12), (9, 9)]


def step(X, optimizer, number, rank, missing=()):
    for i, x in enumerate(X):
        x.grad = None if i in missing else gradient(x.shape, number, rank).to(x.dtype)
    optimizer.step()
    return optimizer.drift()


def spectra(rank):
    """Which parameters keep spectra after each of two steps, and after loading without; sizes."""
    X = [nn.Parameter(weights(shape)) for shape in [*SHAPES, (24, 8)]]
    groups = [{"params": X[:-1]}, {"params": X[-1:], "row_blocks": (16, 5, 3)}]
    sync = QuantizedAverage(fragments=2, spectrum_decay=0.8)
    how = {"replicas": dist.group.WORLD, "gate": FixedPeriod(1)}
    optimizer = CurvaDion(groups, sync=sync, **how)
    found = []
    for number in range(2):
        step(X, optimizer, number, rank, [0] if rank == 1 else ())
        states = [optimizer.state[x]["spectrum"] for x in X]
        found.append([(s.numel(), bool(s.any())) for s in states])
    without = CurvaDion(groups, sync=QuantizedAverage(spectrum_decay=0.0), **how)
    without.load_state_dict(optimizer.state_dict())
    step(X, without, 9, rank)
    return found, ["spectrum" in without.state[x] for x in X]


@pytest.mark.filterwarnings("ignore:state_dict")
def test_all_replicas_keep_the_same_spectra():
    sizes = [8 * 8, 8 * 8, 9 * 9, 8 * 8 + 5 * 5 + 3 * 3]
    for (first, second), after_loading in distributed.run(2, spectra):
        assert [size for size, _ in first] == [size for size, _ in second] == sizes
        # After two steps both fragments have been synchronised, after one only one.
        assert not all(filled for _, filled in first[:3])
        assert all(filled for _, filled in second[1:3])
        assert after_loading == [False] * 4


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
