"""The small transformer under FSDP2, HSDP and FSDP1."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from curvadion.integrations.fsdp import declare_flat_shards, keep_gradients_local
from support.runs import transformer

# Replicas, shards of each.
LAYOUTS = {
    "fsdp 2": (1, 2),
    "fsdp 4": (1, 4),
    "hsdp 2x2": (2, 2),
    "hsdp 2x2, kept gathered": (2, 2),
    "hsdp 2x4, gathered in pairs": (2, 4),
    "hsdp 2x2, reduced by FSDP": (2, 2),
    "replicas outside FSDP's mesh": (2, 2),
    "replicate": (2, 1),
    "FSDP1 FULL_SHARD": (1, 4),
    "FSDP1 SHARD_GRAD_OP": (1, 2),
    "FSDP1 NO_SHARD": (1, 2),
    "FSDP1, replicas outside": (2, 2),
}


def shard(model, layout, mesh):
    """The sharded model and the optimizer's replicas."""
    if layout.startswith("FSDP1"):
        return shard_flat(model, layout, mesh)
    replicas = mesh["replicate"] if mesh.size(0) > 1 else None
    fsdp_mesh = mesh if layout.startswith("hsdp") else mesh["shard"]
    for module in (*model.blocks, model):
        if layout == "replicate":
            replicate(module, mesh=mesh["replicate"])
        else:
            reshard = False if "kept" in layout else 2 if "pairs" in layout else True
            fully_shard(module, mesh=fsdp_mesh, reshard_after_forward=reshard)
    if "reduced by FSDP" in layout:
        return model, None
    return keep_gradients_local(model), replicas


def shard_flat(model, layout, mesh):
    strategy = layout.partition("FSDP1 ")[2] or "FULL_SHARD"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # NO_SHARD is deprecated
        model = FullyShardedDataParallel(
            model,
            process_group=mesh.get_group("shard"),
            sharding_strategy=ShardingStrategy[strategy],
            # FSDP1 has zeros for what is unused in a unit that is used: experts are units.
            auto_wrap_policy=ModuleWrapPolicy({transformer.Block, transformer.Expert}),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    # NO_SHARD leaves parameters whole, and averages their gradients.
    alone = "single" if strategy == "NO_SHARD" else None
    return declare_flat_shards(model), mesh["replicate"] if mesh.size(0) > 1 else alone


def mesh_of(layout):
    return init_device_mesh("cpu", LAYOUTS[layout], mesh_dim_names=("replicate", "shard"))


def setup(layout):
    mesh = mesh_of(layout)
    model, replicas = shard(transformer.build(), layout, mesh)
    return model, replicas, mesh.get_local_rank("replicate"), dist.get_rank()
