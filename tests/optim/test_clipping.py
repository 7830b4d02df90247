"""Clipping takes one norm over all replicas and their shards, and scales all by one factor."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import curvadion
import distributed
import fsdp_training
import tensor_parallel_training
import transformer
from curvadion import AlwaysOpen, CurvaDion, Dion, WireMeter
from tolerance import Rounding, assert_close

pytestmark = pytest.mark.numeric
NORM = Rounding(torch.float32, terms=256)  # of gradients, each of a backward pass in float32

SETUPS = {"fsdp": fsdp_training.setup, "tp": tensor_parallel_training.setup}
# Of each layout: whose setup, and replicas, shards of each, copies of each shard's batch.
LAYOUTS = {
    **{name: ("fsdp", *sizes, 1) for name, sizes in fsdp_training.LAYOUTS.items()},
    **{name: ("tp", *sizes) for name, sizes in tensor_parallel_training.LAYOUTS.items()},
}


def reference(replicas, shards, max_norm):
    """float64 norm and factor, of replicas that are whole models."""
    squares = []
    for replica in range(replicas):
        model = transformer.build(torch.float64)
        for reader in range(replica * shards, (replica + 1) * shards):
            (transformer.loss_of(model, 0, reader) / shards).backward()
        squares.append(sum(p.grad.square().sum() for p in model.parameters()))
    norm = math.sqrt(sum(squares) / replicas)
    return norm, min(1.0, max_norm / norm)


def gradients_of(model):
    """A copy of the local pieces of all gradients, as backward left them or as they are now."""
    return {
        name: curvadion.layout.dtensor.local(p.grad).clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def clip(rank, setup, layout, max_norm):
    """The norm before, the one after, and the bytes of clipping a second time."""
    model, replicas, _, reader = SETUPS[setup](layout)
    optimizer = Dion(transformer.groups(model), replicas=replicas)
    transformer.loss_of(model, 0, reader).backward()
    norm = curvadion.clip_grad_norm_(optimizer, max_norm)
    with WireMeter() as meter:
        after = curvadion.clip_grad_norm_(optimizer, math.inf)
    return norm.item(), after.item(), meter.total_bytes, meter.total_calls


# The others leave gradients whose pieces lie as those of one of these.
LIKE = {
    "fsdp 2": "fsdp 4",
    "hsdp 2x2, kept gathered": "hsdp 2x2",
    "hsdp 2x4, gathered in pairs": "hsdp 2x2",
    "FSDP1 SHARD_GRAD_OP": "FSDP1 FULL_SHARD",
    "tp": "dp x tp",
    "hsdp x tp": "fsdp x tp",
}


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in LIKE])
def test_every_layout_takes_the_norm_of_whole_replicas(layout):
    setup, replicas, shards, _ = LAYOUTS[layout]
    if layout == "hsdp 2x2, reduced by FSDP":
        replicas, shards = 1, 4  # FSDP has averaged the replicas' gradients
    if layout == "FSDP1 NO_SHARD":
        replicas, shards = 1, 2
    norm, factor = reference(replicas, shards, 0.5)
    for before, after, sent, calls in distributed.run(
        math.prod(LAYOUTS[layout][1:]), clip, setup, layout, 0.5
    ):
        assert_close(before, norm, NORM)
        assert_close(after, norm * factor, NORM)
        alone = layout == "FSDP1 NO_SHARD"  # nothing is sharded and there are no replicas
        assert (sent, calls) == ((0, 0) if alone else (8, 1))


# ---------------------------------------------------------------- replicas of different gradients


def model_of(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Linear(16, 5)).to(dtype)


def set_gradients(model, rank, scale):
    generator = torch.Generator().manual_seed(rank)
    for p in model.parameters():
        p.grad = (scale * torch.randn(p.shape, generator=generator)).to(p.dtype)


def plain(rank, dtype, max_norm, missing, options):
    model = model_of(dtype)
    optimizer = Dion(curvadion.param_groups(model), replicas=dist.group.WORLD)
    set_gradients(model, rank, 30.0**rank)
    if missing and rank == 1:
        model[0].weight.grad = None
    before = gradients_of(model)
    with WireMeter() as meter:
        norm = curvadion.clip_grad_norm_(optimizer, max_norm, **options)
    return before, norm, gradients_of(model), meter.bytes_by_collective


@pytest.mark.parametrize(
    ("dtype", "missing"),
    [
        (torch.float32, True),
        (torch.bfloat16, False),
    ],
)
def test_one_factor_for_all_replicas(dtype, missing):
    results = distributed.run(2, plain, dtype, 3.0, missing, {})
    squares = [sum(G.double().square().sum() for G in before.values()) for before, *_ in results]
    norm = (sum(squares) / 2).sqrt()
    for before, returned, after, sent in results:
        assert returned.shape == ()
        assert_close(returned, norm, NORM)
        assert sent == {"all_reduce": 8}
        for name, G in before.items():
            wanted = G.double() * 3.0 / (norm + 1e-6)
            assert after[name].dtype == dtype
            assert_close(after[name], wanted, Rounding(dtype), what=name)


# ---------------------------------------------------------------- faults


def spoiled(rank, value, where, error_if_nonfinite):
    model = model_of()
    optimizer = CurvaDion(
        curvadion.param_groups(model), replicas=dist.group.WORLD, gate=AlwaysOpen()
    )
    weights = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    set_gradients(model, rank, 100.0)
    if rank == where:
        model[1].bias.grad[2] = value
    before = gradients_of(model)
    raised = None
    try:
        norm = curvadion.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=error_if_nonfinite)
        assert not norm.isfinite()
    except RuntimeError as error:
        raised = str(error)
    after = gradients_of(model)
    unscaled = all(torch.equal(after[n], G) or rank == where for n, G in before.items())
    optimizer.step()
    stood = torch.equal(nn.utils.parameters_to_vector(model.parameters()), weights)
    return unscaled, optimizer.report.skipped, stood, raised


@pytest.mark.parametrize(
    ("value", "where", "asked"), [(math.nan, 0, False), (-math.inf, 1, False), (math.nan, 1, True)]
)
def test_a_bad_gradient_anywhere_scales_nothing_and_skips_the_step_on_all(value, where, asked):
    for *held, raised in distributed.run(2, spoiled, value, where, asked):
        assert held == [True, True, True]
        assert "error_if_nonfinite" in raised if asked else raised is None


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"optimizer": [torch.ones(2)]}, TypeError, "optimizer"),
        ({"norm_type": 1.0}, ValueError, "norm_type=1.0"),
        ({"max_norm": -1.0}, ValueError, "max_norm=-1.0"),
    ],
)
def test_errors_name_the_argument(arguments, kind, message):
    optimizer = Dion(curvadion.param_groups(model_of()))
    assert curvadion.clip_grad_norm_(optimizer, 1.0).item() == 0.0  # there is no gradient
    with pytest.raises(kind, match=message):
        curvadion.clip_grad_norm_(**{"optimizer": optimizer, "max_norm": 1.0, **arguments})


def spoiled_under_a_schedule(rank):
    model = model_of()
    optimizer = CurvaDion(
        curvadion.param_groups(model), replicas=dist.group.WORLD, gate=curvadion.FixedPeriod(3)
    )
    set_gradients(model, rank, 100.0)
    if rank == 1:
        model[1].bias.grad[2] = math.nan
    curvadion.clip_grad_norm_(optimizer, 1.0)
    return [bool(G.isnan().all()) for G in gradients_of(model).values()]


def test_under_a_schedule_a_bad_gradient_anywhere_spoils_all():
    """Replicas do not hear of each other's NaN before the step, and must not step unclipped."""
    for spoilt in distributed.run(2, spoiled_under_a_schedule):
        assert all(spoilt)
