"""FSDP2, HSDP and FSDP1 train to the weights of one process that reads all batches."""

import functools
import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from curvadion import CurvaDion, Dion, WireMeter
from curvadion.integrations.fsdp import declare_flat_shards, keep_gradients_local
from support.references import formulas
from support.references.tolerance import Rounding
from support.runs import distributed, transformer
from support.runs.fsdp_training import LAYOUTS, mesh_of, setup, shard
from support.runs.training import (
    OPEN_STEPS,
    SPARING,
    assert_trains_like_one_process,
    assert_trains_like_whole_replicas,
)

pytestmark = pytest.mark.numeric


@distributed.on_ranks(4)
def test_local_gradients_need_an_optimizer_that_averages_them(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = keep_gradients_local(fully_shard(nn.Linear(4, 4, bias=False), mesh=mesh))
    model(torch.randn(2, 4)).sum().backward()
    with pytest.raises(
        ValueError, match=rf"gradient of .* the ranks \[{rank % 2}, {rank % 2 + 2}\]"
    ):
        Dion(model.parameters()).step()
    Dion(model.parameters(), replicas=mesh["replicate"]).step()


@pytest.mark.parametrize(
    "layout",
    [
        "fsdp 4",
        "hsdp 2x4, gathered in pairs",
        "hsdp 2x2, reduced by FSDP",
        "replicate",
        "FSDP1 SHARD_GRAD_OP",
        "FSDP1 NO_SHARD",
    ],
)
def test_open_gate_trains_to_the_weights_of_one_process(layout):
    assert_trains_like_one_process(setup, layout, math.prod(LAYOUTS[layout]))


@pytest.mark.parametrize(
    ("layout", "local_step", "clip", "how"),
    [
        ("fsdp 2", "gradient", 0.5, {"schedule": OPEN_STEPS}),
        ("hsdp 2x2", "dion", None, SPARING),
        ("hsdp 2x2", "gradient", 0.5, {"sparing": True, "steps": 4}),
        ("replicas outside FSDP's mesh", "gradient", 0.5, {"schedule": OPEN_STEPS}),
        ("FSDP1, replicas outside", "dion", None, {"schedule": OPEN_STEPS}),
    ],
)
def test_replicas_drift_and_meet_as_whole_ones_do(layout, local_step, clip, how):
    """Clipped or not, and with experts that some replicas or nobody uses."""
    options = (("local_step", local_step), ("local_lr", 0.1), ("look_ahead", 1.5))
    how = {"options": options, "clip": clip, **how}
    assert_trains_like_whole_replicas(setup, layout, *LAYOUTS[layout], **how)


def padded_bytes(shards):
    """What is reduce-scattered of one backward: FSDP pads the first dimension."""
    shapes = [p.shape for p in transformer.build(blocks=2).parameters()]
    return sum(4 * -(-s[0] // shards) * shards * s[1:].numel() for s in shapes)


@pytest.mark.parametrize(
    "layout", ["hsdp 2x2, kept gathered", "hsdp 2x4, gathered in pairs", "replicate"]
)
def test_gradients_are_those_of_the_replica_and_nothing_crosses_between_replicas(layout):
    distributed.run(math.prod(LAYOUTS[layout]), two_backwards, layout)


def two_backwards(rank, layout):
    mesh = mesh_of(layout)
    replica, shards = mesh.get_local_rank("replicate"), mesh.size(1)
    whole = transformer.build(blocks=2)  # of which FSDP gathers one while the other computes
    model = transformer.build(blocks=2)
    model, _ = shard(model, layout, mesh)
    with WireMeter() as meter:
        for step in range(2):
            transformer.loss_of(model, step, rank).backward()
    readers = range(replica * shards, (replica + 1) * shards)
    for step in range(2):
        for place in readers:
            (transformer.loss_of(whole, step, place) / len(readers)).backward()
    transformer.assert_close(
        {name: p.grad.full_tensor() for name, p in model.named_parameters()},
        {name: p.grad for name, p in whole.named_parameters()},
        Rounding(torch.float32, terms=16),
    )
    between, inside = (mesh.get_group(dim).group_name for dim in ("replicate", "shard"))
    assert not [n.bytes for (group, _), n in meter.records.items() if group == between and n.bytes]
    if shards > 1:
        assert meter.records[inside, "reduce_scatter"].bytes == 2 * padded_bytes(shards)


@distributed.on_ranks(4)
def test_synchronizing_twice_is_an_error_on_every_rank(rank):
    mesh = mesh_of("hsdp 2x2")
    model, _ = shard(transformer.build(), "hsdp, reduced by FSDP", mesh)
    optimizer = Dion(transformer.groups(model), replicas=mesh["replicate"])
    transformer.loss_of(model, 0, rank).backward()
    with pytest.raises(RuntimeError, match=r"identical.*curvadion\.integrations\.fsdp"):
        optimizer.step()


@distributed.on_ranks(2)
def test_misuse_is_told(rank):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    process_group = mesh.get_group("replicate")
    cpu = {"device_id": torch.device("cpu"), "process_group": process_group}
    line = functools.partial(nn.Linear, 4, 6)

    with pytest.raises(TypeError, match="fully_shard"):
        keep_gradients_local(line())
    with pytest.raises(TypeError, match=r"curvadion\.integrations\.ddp\.keep_gradients_local"):
        keep_gradients_local(DistributedDataParallel(line()))

    with pytest.raises(ValueError, match="use_orig_params=True"):
        declare_flat_shards(FullyShardedDataParallel(line(), use_orig_params=False, **cpu))

    transposed = line()
    transposed.weight = nn.Parameter(torch.ones(4, 6).mT)
    with pytest.raises(ValueError, match=r"weight .* contiguous"):
        declare_flat_shards(FullyShardedDataParallel(transposed, use_orig_params=True, **cpu))

    flat = FullyShardedDataParallel(line(), use_orig_params=True, **cpu)
    with pytest.raises(ValueError, match="declare_flat_shards"):
        transformer.groups(flat)


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


@pytest.mark.parametrize("layout", ["fsdp 4", "hsdp 2x2"])
@distributed.on_ranks(4)
def test_only_low_rank_factors_are_sent(rank, layout):
    """Bytes and the largest message of the second open-gate step are the formulas'."""
    shapes = [(50, 30), (30, 50), (40, 40), (41, 30)]
    mesh = mesh_of(layout)
    torch.manual_seed(0)
    model = Stack(shapes)
    model.blocks = []
    model, replicas = shard(model, layout, mesh)
    groups = [
        {"params": list(model.layers.parameters()), "rank_multiple_of": RANK},
        {"params": list(model.norm.parameters()), "algorithm": "adamw"},
    ]
    optimizer = CurvaDion(
        groups, replicas=replicas, threshold=0.0, local_step="gradient", rank_fraction=1e-3
    )
    for step in range(2):
        optimizer.zero_grad()
        model(10 * step + rank).backward()
        with WireMeter() as meter:
            optimizer.step()
        assert optimizer.report.gate_open
    (replicas, shards), place = mesh.shape, mesh.get_local_rank("shard")
    everything = [
        formulas.held(tuple(x.shape), RANK, m_cuts=[("shard", shards, place)], replicas=replicas)
        for x in groups[0]["params"]
    ]
    norms = sum(x.to_local().numel() for x in groups[1]["params"])
    wanted = formulas.open_step(everything, elementwise=norms, reads_momentum=True)
    assert meter.total.bytes == wanted
    assert meter.total.largest == formulas.largest_message(everything)
    assert meter.total.largest < min(4 * m * n for m, n in shapes)


@pytest.mark.parametrize("when", ["evaluated before", "moved after", "in parts"])
@distributed.on_ranks(2)
def test_gradients_stay_local_and_known_as_such(rank, when):
    """Large models get their storage late, which replaces what their parameters are."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    for module in [*model, model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    if when == "moved after":
        keep_gradients_local(model)
    model.to_empty(device="cpu")
    for X in model.parameters():
        nn.init.ones_(X)
    if when == "evaluated before":
        with torch.no_grad():
            model(torch.ones(2, 4))
    if when == "in parts":
        keep_gradients_local(nn.ModuleList([model[0]]))  # which is gone at once
    keep_gradients_local(model)
    model(torch.full((1, 4), rank + 1.0)).sum().backward()
    # Both other layers sum up four equal elements.
    own = torch.full((4, 4), 16.0 * (rank + 1))
    torch.testing.assert_close(model[0].weight.grad.to_local(), own, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"nothing averages the gradient .* ranks \[0, 1\]"):
        Dion(model.parameters()).step()
    optimizer = Dion([model[0].weight, model[2].weight], replicas=mesh["replicate"])
    with pytest.warns(UserWarning, match=r"in no CurvaDion.* 1 in all, such as '1\.weight'"):
        optimizer.step()
