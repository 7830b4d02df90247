"""FSDP2, HSDP and FSDP1 train to the weights of one process that reads all batches."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    DataParallelMeshDims,
    FSDPModule,
    FullyShardedDataParallel,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import distributed
import formulas
import transformer
from curvadion import CurvaDion, Dion, WireMeter
from curvadion.integrations import ddp
from curvadion.integrations.fsdp import declare_flat_shards, keep_gradients_local
from curvadion.layout.parameters import global_shape
from fsdp_training import LAYOUTS, mesh_of, setup, shard
from pairwise import all_pairs
from tolerance import Rounding, assert_close, assert_within
from training import OPEN_STEPS, assert_trains_like_one_process, assert_trains_like_whole_replicas

pytestmark = pytest.mark.numeric
SOME = ["hsdp 2x2", "replicas outside FSDP's mesh", "FSDP1, replicas outside"]


@pytest.mark.parametrize(
    "layout",
    [layout for layout in LAYOUTS if layout not in SOME],  # whose gates are always open below too
)
def test_open_gate_trains_to_the_weights_of_one_process(layout):
    assert_trains_like_one_process(setup, layout, math.prod(LAYOUTS[layout]))


@pytest.mark.parametrize(
    ("layout", "local_step", "schedule", "clip", "sparing"),
    all_pairs(
        ["fsdp 2", *SOME], ["gradient", "dion"], [OPEN_STEPS, None], [None, 0.5], [False, True]
    ),
)
def test_replicas_drift_and_meet_as_whole_ones_do(layout, local_step, schedule, clip, sparing):
    """Clipped or not, and with experts that some replicas or nobody uses."""
    options = (("local_step", local_step), ("local_lr", 0.1), ("nesterov", 1.5))
    how = {"schedule": schedule, "options": options, "clip": clip, "sparing": sparing}
    assert_trains_like_whole_replicas(setup, layout, *LAYOUTS[layout], **how)


# -------------------------------------------------------------------- gradients of replicas


def two_backwards(rank, layout, keep):
    """Errors of the gradients against those of whole replicas, and what the backwards sent."""
    mesh = mesh_of(layout)
    replica, shards = mesh.get_local_rank("replicate"), mesh.size(1)
    whole = transformer.build(blocks=2)  # of which FSDP gathers one while the other computes
    model = transformer.build(blocks=2)
    model, _ = shard(model, layout if keep else "hsdp, reduced by FSDP", mesh)
    with WireMeter() as meter:
        for step in range(2):
            transformer.loss_of(model, step, rank).backward()
    readers = range(replica * shards, (replica + 1) * shards) if keep else range(mesh.size())
    for step in range(2):
        for place in readers:
            (transformer.loss_of(whole, step, place) / len(readers)).backward()
    error = transformer.worst(
        {name: p.grad.full_tensor() for name, p in model.named_parameters()},
        {name: p.grad for name, p in whole.named_parameters()},
    )
    names = {mesh.get_group(d).group_name: d for d in ("replicate", "shard")}
    sent = {
        f"{collective} over {names.get(group, 'pairs')}": count.bytes
        for (group, collective), count in meter.records.items()
        if count.bytes
    }
    return error, sent


def padded_bytes(shards):
    """What is reduce-scattered of one backward: FSDP pads the first dimension."""
    shapes = [p.shape for p in transformer.build(blocks=2).parameters()]
    return sum(4 * -(-s[0] // shards) * shards * s[1:].numel() for s in shapes)


@pytest.mark.parametrize(
    "layout",
    [
        "hsdp 2x2",
        "hsdp 2x2, kept gathered",
        "hsdp 2x4, gathered in pairs",
        "replicas outside FSDP's mesh",
        "replicate",
    ],
)
def test_gradients_are_those_of_the_replica_and_nothing_crosses_between_replicas(layout):
    shards = LAYOUTS[layout][1]
    for (error, name), sent in distributed.run(
        math.prod(LAYOUTS[layout]), two_backwards, layout, True
    ):
        assert_within(error, Rounding(torch.float32, terms=16), what=name)
        assert not [how for how in sent if how.endswith("replicate")]
        if shards > 1:
            assert sent["reduce_scatter over shard"] == 2 * padded_bytes(shards)


def test_without_the_integration_fsdp_averages_over_the_replicas():
    for (error, name), sent in distributed.run(4, two_backwards, "hsdp 2x2", False):
        assert_within(error, Rounding(torch.float32, terms=16), what=name)
        assert sent["all_reduce over replicate"] == padded_bytes(2)


def of_a_whole_mesh(rank):
    """The first gradient where FSDP is told which dimensions of a model's mesh are its own."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replicate", "shard", "tp"))
    model = nn.Linear(4, 6, bias=False)
    everywhere = [Replicate()] * 3
    model.weight = nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, everywhere))
    dimensions = DataParallelMeshDims(shard="shard", replicate="replicate")
    keep_gradients_local(fully_shard(model, mesh=mesh, dp_mesh_dims=dimensions))
    x = DTensor.from_local(torch.full((1, 4), rank + 1.0), mesh, everywhere, run_check=False)
    model(x).to_local().sum().backward()
    return model.weight.grad.to_local().unique().tolist()


def test_a_mesh_that_fsdp_shares_with_the_model():
    assert distributed.run(4, of_a_whole_mesh) == [[1.5], [1.5], [3.5], [3.5]]


def of_compiled_modules(rank):
    """The first gradient of a layer under HSDP, by how it was compiled."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    layers = {
        "compiled": lambda layer: torch.compile(fully_shard(layer, mesh=mesh), backend="eager"),
        "of a compiled module": lambda layer: fully_shard(
            torch.compile(layer, backend="eager"), mesh=mesh
        ),
    }
    gradients = {}
    for name, wrap in layers.items():
        model = wrap(nn.Linear(4, 6, bias=False))
        assert keep_gradients_local(model) is model, name
        model(torch.full((1, 4), rank + 1.0)).sum().backward()
        (weight,) = model.parameters()
        gradients[name] = weight.grad.full_tensor().unique().tolist()
    return gradients


def test_compiled_modules_stay_compiled_and_their_gradients_in_their_replica():
    for rank, gradients in enumerate(distributed.run(2, of_compiled_modules)):
        assert gradients == {"compiled": [rank + 1.0], "of a compiled module": [rank + 1.0]}


def declare_compiled(rank):
    """Whether a compiled module of FSDP1 comes back as it was given, and the shapes declared."""
    model = torch.compile(
        FullyShardedDataParallel(
            nn.Linear(4, 6), device_id=torch.device("cpu"), use_orig_params=True
        ),
        backend="eager",
    )
    assert declare_flat_shards(model) is model
    return [global_shape(parameter) for parameter in model.parameters()]


def test_flat_shards_of_a_compiled_module_are_declared():
    assert distributed.run(2, declare_compiled) == [[(6, 4), (6,)]] * 2


def after_a_forgotten_call(rank, accumulate):
    """What the first step raises."""
    mesh = mesh_of("hsdp 2x2")
    model, _ = shard(transformer.build(), "hsdp, reduced by FSDP", mesh)
    optimizer = Dion(transformer.groups(model), replicas=mesh["replicate"])
    for micro in range(accumulate):
        transformer.loss_of(model, micro, rank).backward()
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    return str(error.value)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_synchronizing_twice_is_an_error_on_every_rank(accumulate):
    for message in distributed.run(4, after_a_forgotten_call, accumulate):
        assert "identical" in message and "curvadion.integrations.fsdp" in message


def late_and_repeated(rank):
    """Gradients after a call between two steps, and after another."""
    mesh = mesh_of("hsdp 2x2")
    model, _ = shard(transformer.build(), "hsdp, reduced by FSDP", mesh)
    found = []
    for calls in range(3):
        model.zero_grad()
        transformer.loss_of(model, 0, rank).backward()
        found.append({n: p.grad.to_local().clone() for n, p in model.named_parameters()})
        groups = [m._get_fsdp_state()._fsdp_param_groups[0] for m in modules_of(model)]
        before = [group.mesh_info for group in groups]
        keep_gradients_local(model)
        assert (before == [group.mesh_info for group in groups]) == (calls > 0)
        # Two meshes would mean another copy of the shards between forward and backward.
        assert not any(group._use_post_forward_mesh for group in groups)
    return found


def modules_of(model):
    return [m for m in model.modules() if isinstance(m, FSDPModule)]


def test_the_call_may_come_late_and_twice():
    averaged, own, again = zip(*distributed.run(4, late_and_repeated), strict=True)
    for name in own[0]:
        for shard_place in (0, 1):
            ranks = shard_place, shard_place + 2
            mean = (own[ranks[0]][name] + own[ranks[1]][name]) / 2
            for rank in ranks:
                assert_close(averaged[rank][name], mean, Rounding(torch.float32), what=name)
                assert torch.equal(again[rank][name], own[rank][name])


def moved(rank, swap):
    """What a step says after a cast of the model whose gradients stay on their replica."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = nn.Linear(8, 8, bias=False)
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        if swap:
            model = ddp.keep_gradients_local(DistributedDataParallel(model)).module
        else:  # torch swaps DTensors whatever the setting
            fully_shard(model, mesh=mesh)
            keep_gradients_local(model)
        model.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    model(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
    try:
        CurvaDion([("W", model.weight)], replicas=None).step()
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("swap", [False, True])
def test_models_can_be_moved_and_are_known_afterwards(swap):
    for said in distributed.run(2, moved, swap):
        assert "gradients of 2 replicas of W apart" in said


# -------------------------------------------------------------------- errors


def misuse(rank):
    """Each of these raises and names what to do."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    process_group = mesh.get_group("replicate")
    cpu = {"device_id": torch.device("cpu"), "process_group": process_group}
    line = functools.partial(nn.Linear, 4, 6)

    with pytest.raises(TypeError, match="fully_shard"):
        keep_gradients_local(line())
    with pytest.raises(TypeError, match="FullyShardedDataParallel, FSDP1"):
        keep_gradients_local(FullyShardedDataParallel(line(), use_orig_params=True, **cpu))
    with pytest.raises(TypeError, match="str"):
        keep_gradients_local("model")

    hooked = fully_shard(line(), mesh=mesh)
    hooked.set_all_reduce_hook(lambda tensor: None)
    with pytest.raises(RuntimeError, match="set_all_reduce_hook"):
        keep_gradients_local(hooked)

    held_back = fully_shard(line(), mesh=mesh)
    held_back.set_requires_all_reduce(False)
    held_back(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="before the first backward"):
        keep_gradients_local(held_back)

    other_torch = fully_shard(line(), mesh=mesh)
    del other_torch._get_fsdp_state()._fsdp_param_groups[0].mesh_info
    with pytest.raises(RuntimeError, match=r"FSDPParamGroup\.mesh_info"):
        keep_gradients_local(other_torch)

    with pytest.raises(TypeError, match="DTensors"):
        declare_flat_shards(fully_shard(line(), mesh=mesh))
    with pytest.raises(TypeError, match="str"):
        declare_flat_shards("model")
    with pytest.raises(ValueError, match="use_orig_params=True"):
        declare_flat_shards(FullyShardedDataParallel(line(), use_orig_params=False, **cpu))

    transposed = line()
    transposed.weight = nn.Parameter(torch.ones(4, 6).mT)
    with pytest.raises(ValueError, match=r"weight .* contiguous"):
        declare_flat_shards(FullyShardedDataParallel(transposed, use_orig_params=True, **cpu))

    flat = FullyShardedDataParallel(line(), use_orig_params=True, **cpu)
    with pytest.raises(ValueError, match="declare_flat_shards"):
        transformer.groups(flat)
    with pytest.raises(ValueError, match="declare_flat_shards"):
        Dion(flat.parameters())
    with pytest.raises(RuntimeError, match="_shard_param_infos"):
        del flat._handle.flat_param._shard_param_infos
        declare_flat_shards(flat)


def test_misuse_is_told():
    distributed.run(2, misuse)


# -------------------------------------------------------------------- what a step sends and holds

RANK = 3


class Stack(nn.Module):
    """Matrices whose products with their transposes make a loss, and a norm."""

    def __init__(self, shapes):
        super().__init__()
        self.layers = nn.ModuleList([transformer.Expert(n, m, bias=False) for m, n in shapes])
        self.norm = nn.LayerNorm(30)

    def forward(self, seed):
        generator = torch.Generator().manual_seed(seed)
        x = self.norm(torch.randn(4, 30, generator=generator)).mean()
        for layer in self.layers:
            x = x + layer(torch.randn(4, layer.in_features, generator=generator)).square().mean()
        return x


def steps_of_a_stack(rank, layout, shapes, r, measure):
    """``measure`` of the second open-gate step; the first also verifies the setup."""
    mesh = mesh_of(layout)
    torch.manual_seed(0)
    model = Stack(shapes)
    model.blocks = []
    model, replicas = shard(model, layout, mesh)
    groups = [
        {"params": list(model.layers.parameters()), "rank_multiple_of": r},
        {"params": list(model.norm.parameters()), "algorithm": "adamw"},
    ]
    optimizer = CurvaDion(
        groups, replicas=replicas, threshold=0.0, local_step="gradient", rank_fraction=1e-3
    )
    for step in range(2):
        optimizer.zero_grad()
        model(10 * step + rank).backward()
        result = measure(optimizer, mesh)
        assert optimizer.report.gate_open
    return result


def messages(optimizer, mesh):
    """Bytes sent, the largest message, and what the formulas say of both."""
    with WireMeter() as meter:
        optimizer.step()
    (replicas, shards), place = mesh.shape, mesh.get_local_rank("shard")
    everything = [
        formulas.held(tuple(x.shape), RANK, m_cuts=[("shard", shards, place)], replicas=replicas)
        for x in optimizer.param_groups[0]["params"]
    ]
    norms = sum(x.to_local().numel() for x in optimizer.param_groups[1]["params"])
    return (
        (meter.total_bytes, meter.largest),
        (
            formulas.open_step(everything, elementwise=norms, reads_momentum=True),
            formulas.largest_message(everything),
        ),
    )


@pytest.mark.parametrize("layout", ["fsdp 4", "hsdp 2x2"])
def test_only_low_rank_factors_are_sent(layout):
    shapes = [(50, 30), (30, 50), (40, 40), (41, 30)]
    for actual, expected in distributed.run(4, steps_of_a_stack, layout, shapes, RANK, messages):
        assert actual == expected
        assert actual[1] < min(4 * m * n for m, n in shapes)


def take_for_replicas(rank, which):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Linear(8, 8, bias=False)
    fully_shard(model, mesh=mesh)
    keep_gradients_local(model)
    model(torch.ones(2, 8)).sum().backward()
    replicas = {"all": dist.group.WORLD, "none": None, "shard": mesh.get_group("shard")}[which]
    try:
        CurvaDion([("W", model.weight)], replicas=replicas).step()
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("all", "ranks [0, 1, 2, 3], over which W of shape (8, 8) is sharded"),
        ("shard", "over which W of shape (8, 8) is sharded"),
        ("none", "replicas=None, but keep_gradients_local keeps the gradients of 2 replicas of W"),
    ],
)
def test_replicas_that_are_none_are_an_error(which, message):
    for said in distributed.run(4, take_for_replicas, which):
        assert message in said


def peak_memory(optimizer, mesh):
    """The most that a step holds at once of what it allocates itself, in bytes."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        optimizer.step()
    changes = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("layout", ["fsdp 4", "hsdp 2x2", "FSDP1 FULL_SHARD"])
def test_a_step_holds_no_more_than_one_shard_and_the_buckets(layout):
    shapes = [(401, 301), (301, 401)] * 8
    # P, R, the next Q, this replica's own R, and float64 copies of the P's of one stack.
    buckets = 6 * sum(4 * (m + n) for m, n in shapes)
    piece = 4 * 101 * 401 if layout != "hsdp 2x2" else 4 * 201 * 401
    # FSDP1 cuts through rows: padded copies of one X and of one M.
    largest = 2 * piece if layout.startswith("FSDP1") else piece
    assert largest + buckets < 0.4 * len(shapes) * piece
    for peak in distributed.run(4, steps_of_a_stack, layout, shapes, 1, peak_memory):
        assert peak < largest + buckets
