"""Replicas that take polar directions stay equal, whatever is missing or mixed."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from curvadion import AlwaysOpen, CodedGradients, CurvaDion, FixedPeriod, LowRank, QuantizedAverage
from curvadion.layout import exchange
from curvadion.sync import corrections
from support.runs import distributed
from support.runs.drifts import drift
from support.runs.seeded import gradient, weights
from support.runs.shards import shard

SHAPES = [(12, 8), (8, 12), (9, 9)]


def step(X, optimizer, number, rank, missing=()):
    for i, x in enumerate(X):
        x.grad = None if i in missing else gradient(x.shape, number, rank).to(x.dtype)
    optimizer.step()
    return drift(optimizer)


@pytest.mark.filterwarnings("ignore:state_dict")
@distributed.on_ranks(2)
def test_each_replica_keeps_a_spectrum_of_each_matrix_also_without_its_gradient(rank):
    X = [nn.Parameter(weights(shape)) for shape in [*SHAPES, (24, 8)]]
    groups = [{"params": X[:-1]}, {"params": X[-1:], "row_blocks": (16, 5, 3)}]
    sync = QuantizedAverage(fragments=2, spectrum_decay=0.8)
    how = {"replicas": dist.group.WORLD, "gate": FixedPeriod(1)}
    optimizer = CurvaDion(groups, sync=sync, **how)
    filled = []
    for number in range(2):
        step(X, optimizer, number, rank, [0] if rank == 1 else ())
        spectra = [optimizer.state[x]["spectrum"] for x in X]
        assert [s.numel() for s in spectra] == [8 * 8, 8 * 8, 9 * 9, 8 * 8 + 5 * 5 + 3 * 3]
        filled.append([bool(s.any()) for s in spectra])
    # After two steps both fragments have been synchronised, after one only one.
    assert not all(filled[0][:3]) and all(filled[1][1:3])
    without = CurvaDion(groups, sync=QuantizedAverage(spectrum_decay=0.0), **how)
    without.load_state_dict(optimizer.state_dict())
    step(X, without, 9, rank)
    assert not any("spectrum" in without.state[x] for x in X)


# Kinds of a run and of one that goes on from its states, of which coded gradients take means.
KINDS = [
    (LowRank(), LowRank(), "polar"),
    (LowRank(average_weights=False), LowRank(), "polar"),
    (QuantizedAverage(), LowRank(), "polar"),
    (QuantizedAverage(), CodedGradients(), "normuon"),
]


@pytest.mark.filterwarnings("ignore:state_dict")
@pytest.mark.parametrize(("before", "after", "direction"), KINDS)
@distributed.on_ranks(2)
def test_momenta_of_another_kind_are_brought_together(rank, before, after, direction):
    X = [nn.Parameter(weights(shape)) for shape in SHAPES]
    how = {"direction": direction, "rank_fraction": 1.0, "right_factor": "qr"}
    how["replicas"] = dist.group.WORLD
    optimizer = CurvaDion(X, gate=FixedPeriod(2), sync=before, **how)
    for number in range(4):
        step(X, optimizer, number, rank)
    if before.sends_codes and isinstance(after, LowRank):
        optimizer.synchronize()
    again = CurvaDion(X, gate=AlwaysOpen(), sync=after, **how)
    again.load_state_dict(optimizer.state_dict())
    assert [step(X, again, number, rank) for number in range(4, 7)] == [0.0] * 3


EXPERTS = ["low_rank", "polar", "normuon", "dion2", "nordion2"]


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("dense", ["low_rank", "polar"])
@distributed.on_ranks(2)
def test_ranks_without_experts_take_the_same_collectives(rank, experts, dense):
    mesh = init_device_mesh("cpu", (2,))
    whole = [weights((1, 8, 6)), weights((12, 8))]
    X = [nn.Parameter(shard(w, ("0",), mesh)) for w in whole]
    groups = [
        {"params": X[:1], "stack_dims": 1, "direction": experts},
        {"params": X[1:], "direction": dense},
    ]
    optimizer = CurvaDion(groups, replicas="single", threshold=0.3)
    for number in range(3):
        before = X[0].to_local().detach().clone()
        for x, w in zip(X, whole, strict=True):
            x.grad = shard(gradient(w.shape, number, 0), ("0",), mesh)
        optimizer.step()
        assert before.equal(X[0].to_local()) == (rank == 1)  # which has none to move


@distributed.on_ranks(2)
def test_a_fall_of_the_rate_does_no_harm_in_half_precision(rank):
    """Corrections multiply in float16 here."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (exchange, corrections):
            patch.setattr(module, "dtype_of_products", lambda rows: torch.float16)
        X = [nn.Parameter(weights((24, 16)))]
        optimizer = CurvaDion(
            X, replicas=dist.group.WORLD, gate=FixedPeriod(2), sync=QuantizedAverage(bits=1)
        )
        for number in range(12):
            if number == 6:
                optimizer.param_groups[0]["lr"] *= 1e-4
            step(X, optimizer, number, rank)
    assert X[0].isfinite().all() and X[0].norm() < 40
