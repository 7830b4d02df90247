"""The small transformer under tensor parallelism, alone and with FSDP and replicas."""

from __future__ import annotations

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from curvadion.integrations.fsdp import keep_gradients_local
from support.runs import transformer

# Replicas, shards of each, tensor-parallel ranks of each shard.
LAYOUTS = {
    "tp": (1, 1, 2),
    "dp x tp": (2, 1, 2),
    "fsdp x tp": (1, 2, 2),
    "hsdp x tp": (2, 2, 2),
}


def parallelize(model, mesh):
    """Llama's plan: activations between the blocks are sharded along the sequence."""
    whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for i in range(len(model.blocks)):
        block = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(**whole),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "mlp_norm": SequenceParallel(),
            "mlp": PrepareModuleInput(**whole),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
            # Three outputs over two ranks.
            "narrow": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            "wide": RowwiseParallel(output_layouts=Shard(1)),
            # Replicated weights, each rank with a part of the sequence.
            "expert": SequenceParallel(use_local_output=True),
        }
        plan |= {f"blocks.{i}.{name}": style for name, style in block.items()}
    return parallelize_module(model, mesh, plan)


def setup(layout):
    mesh = init_device_mesh("cpu", LAYOUTS[layout], mesh_dim_names=("replicate", "shard", "tp"))
    model = parallelize(transformer.build(), mesh["tp"])
    replicate, shard = mesh.get_local_rank("replicate"), mesh.get_local_rank("shard")
    if "fsdp" in layout or "hsdp" in layout:
        fsdp_mesh = mesh["replicate", "shard"] if "hsdp" in layout else mesh["shard"]
        for module in (*model.blocks, model):
            fully_shard(module, mesh=fsdp_mesh)
        keep_gradients_local(model)
    replicas = mesh["replicate"] if mesh.size(0) > 1 else None
    return model, replicas, replicate, replicate * mesh.size(1) + shard
