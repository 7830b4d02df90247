"""Clipping takes one norm over all replicas and their shards, and scales all by one factor."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import curvadion
from curvadion import AlwaysOpen, CurvaDion, Dion, WireMeter
from support.references.tolerance import Rounding, assert_close
from support.runs import distributed, fsdp_training, tensor_parallel_training, transformer

pytestmark = pytest.mark.numeric
NORM = Rounding(torch.float32, terms=256)  # of gradients, each of a backward pass in float32

SETUPS = {"fsdp": fsdp_training.setup, "tp": tensor_parallel_training.setup}
# Of each layout: whose setup, and replicas, shards of each, copies of each shard's batch.
LAYOUTS = {
    **{name: ("fsdp", *sizes, 1) for name, sizes in fsdp_training.LAYOUTS.items()},
    **{name: ("tp", *sizes) for name, sizes in tensor_parallel_training.LAYOUTS.items()},
}
# The others leave gradients whose pieces lie as those of one of these.
CHOSEN = ["fsdp 4", "hsdp 2x2", "hsdp 2x2, reduced by FSDP", "replicas outside FSDP's mesh"]
CHOSEN += ["replicate", "FSDP1 FULL_SHARD", "FSDP1 NO_SHARD", "FSDP1, replicas outside"]
CHOSEN += ["dp x tp", "fsdp x tp"]


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
    return norm.item(), after.item(), meter.total.bytes, meter.total.calls


@pytest.mark.parametrize("layout", CHOSEN)
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


def model_of(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Linear(16, 5)).to(dtype)


def set_gradients(model, rank, scale):
    generator = torch.Generator().manual_seed(rank)
    for p in model.parameters():
        p.grad = (scale * torch.randn(p.shape, generator=generator)).to(p.dtype)


@pytest.mark.parametrize(("dtype", "missing"), [(torch.float32, True), (torch.bfloat16, False)])
@distributed.on_ranks(2)
def test_one_factor_for_all_replicas(rank, dtype, missing):
    model = model_of(dtype)
    optimizer = Dion(curvadion.param_groups(model), replicas=dist.group.WORLD)
    set_gradients(model, rank, 30.0**rank)
    if missing and rank == 1:
        model[0].weight.grad = None
    before = gradients_of(model)
    with WireMeter() as meter:
        returned = curvadion.clip_grad_norm_(optimizer, 3.0)
    assert meter.by_collective.keys() == {"all_reduce"} and meter.total.bytes == 8
    square = sum(G.double().square().sum() for G in before.values())
    norm = (sum(distributed.gathered(square)) / 2).sqrt()
    assert returned.shape == ()
    assert_close(returned, norm, NORM)
    for name, G in gradients_of(model).items():
        assert G.dtype == dtype
        assert_close(G, before[name].double() * 3.0 / (norm + 1e-6), Rounding(dtype), what=name)


@pytest.mark.parametrize(
    ("value", "where", "asked"), [(math.nan, 0, False), (-math.inf, 1, False), (math.nan, 1, True)]
)
@distributed.on_ranks(2)
def test_a_bad_gradient_anywhere_scales_nothing_and_skips_the_step(rank, value, where, asked):
    model = model_of()
    optimizer = CurvaDion(
        curvadion.param_groups(model), replicas=dist.group.WORLD, gate=AlwaysOpen()
    )
    weights = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    set_gradients(model, rank, 100.0)
    if rank == where:
        model[1].bias.grad[2] = value
    before = gradients_of(model)
    with pytest.raises(RuntimeError, match="error_if_nonfinite") if asked else nullcontext():
        norm = curvadion.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=asked)
        assert not norm.isfinite()
    after = gradients_of(model)
    assert all(torch.equal(after[n], G) or rank == where for n, G in before.items())
    optimizer.step()
    assert optimizer.report.skipped
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), weights)


@distributed.on_ranks(2)
def test_under_a_schedule_a_bad_gradient_anywhere_spoils_all(rank):
    """Replicas do not hear of each other's NaN before the step, and must not step unclipped."""
    model = model_of()
    optimizer = CurvaDion(
        curvadion.param_groups(model), replicas=dist.group.WORLD, gate=curvadion.FixedPeriod(3)
    )
    set_gradients(model, rank, 100.0)
    if rank == 1:
        model[1].bias.grad[2] = math.nan
    curvadion.clip_grad_norm_(optimizer, 1.0)
    assert all(G.isnan().all() for G in gradients_of(model).values())


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
