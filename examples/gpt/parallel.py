"""Layouts of a GPT over processes: replicas, shards of a replica, tensor parallelism.

The processes form a mesh (replicate, shard, tensor), and any axis may have length one. The first
two axes are data-parallel: each place along them reads its own samples. Ranks along the last axis
compute every layer together and read the same samples.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from curvadion.integrations import ddp, fsdp
from gpt import GPT

Parallel = Literal["ddp", "fsdp", "hsdp", "tp", "fsdp_tp", "hsdp_tp"]
AXES: dict[Parallel, tuple[str, ...]] = {
    "ddp": ("replicate",),
    "fsdp": ("shard",),
    "hsdp": ("replicate", "shard"),
    "tp": ("tensor",),
    "fsdp_tp": ("shard", "tensor"),
    "hsdp_tp": ("replicate", "shard", "tensor"),
}


class Sizes(NamedTuple):
    """Lengths of the mesh's axes."""

    replicas: int
    shards: int
    tensor: int

    @property
    def readers(self) -> int:
        """The number of data-parallel places, which read their own samples."""
        return self.replicas * self.shards


def mesh_sizes(parallel: Parallel, processes: int, shards: int | None, tensor: int | None) -> Sizes:
    """Return the mesh over all processes; the layout's first axis takes all that remain.

    Args:
        parallel: the layout, a key of AXES.
        processes: how many.
        shards: length of the axis of shards; None: 2, or all that remain.
        tensor: the same of tensor parallelism.

    Raises:
        ValueError: if ``shards`` or ``tensor``, by default 2, do not fit.
    """
    first, *others = AXES[parallel]
    given = {"shard": ("shards", shards), "tensor": ("tensor", tensor)}
    for axis, (flag, size) in given.items():
        if size is not None and (axis not in others or size < 1):
            fits = [kind for kind, axes in AXES.items() if axis in axes[1:]]
            raise ValueError(
                f"{flag}={size} with parallel={parallel!r}: give a positive number to one of "
                f"{fits}, and none to the others, where it follows from the number of processes"
            )
    sizes = {axis: given[axis][1] or 2 for axis in others}
    sizes[first], rest = divmod(processes, math.prod(sizes.values()))
    if rest or not sizes[first]:
        wanted = " x ".join(f"{size} {axis}" for axis, size in sizes.items() if axis != first)
        raise ValueError(
            f"parallel={parallel!r} ({wanted}) needs a multiple of "
            f"{math.prod(sizes[axis] for axis in others)} processes and got {processes}: start "
            "another number, or give --shards and --tensor"
        )
    return Sizes(*(sizes.get(axis, 1) for axis in ("replicate", "shard", "tensor")))


class Layout:
    """A layout of the processes, and this rank's place in it."""

    def __init__(self, parallel: Parallel, sizes: Sizes, device: torch.device):
        self.parallel, self.sizes = parallel, sizes
        names = ("replicate", "shard", "tensor")
        self.mesh = init_device_mesh(device.type, tuple(sizes), mesh_dim_names=names)

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shards in all replicas, if there are several replicas."""
        return self.mesh.get_group("replicate") if self.sizes.replicas > 1 else None

    @property
    def reader(self) -> int:
        """The part of the data that this rank reads, from 0 to ``sizes.readers`` - 1."""
        place = self.mesh.get_local_rank
        return place("replicate") * self.sizes.shards + place("shard")

    def wrap(self, model: GPT, context: int, *, gradients_stay_local: bool) -> nn.Module:
        """Shard the model's weights in place; return the module to train on ``context`` positions.

        After a backward through it, gradients are averaged over the shards of a replica, and also
        over replicas unless ``gradients_stay_local``, which our optimizers need.

        Raises:
            ValueError: if heads or positions cannot be divided evenly.
        """
        if self.parallel == "ddp":
            replicated = DistributedDataParallel(model)
            return ddp.keep_gradients_local(replicated) if gradients_stay_local else replicated
        if "tensor" in AXES[self.parallel]:
            for name, size in (("heads", model.config.heads), ("context", context)):
                if size % self.sizes.tensor:
                    raise ValueError(
                        f"{name}={size} must be a multiple of {self.sizes.tensor}, the ranks "
                        "that share a layer"
                    )
            split_layers(model, self.mesh["tensor"])
        if "shard" in AXES[self.parallel]:
            replicated_too = "replicate" in AXES[self.parallel]
            mesh = self.mesh["replicate", "shard"] if replicated_too else self.mesh["shard"]
            for module in (*model.blocks, model):
                fully_shard(module, mesh=mesh)
            if gradients_stay_local:
                fsdp.keep_gradients_local(model)
        return model


def split_layers(model: GPT, mesh: DeviceMesh) -> None:
    """Shard attention by heads, the MLP by hidden channels, the stream in between by positions."""
    gathered = Replicate()
    by_position = Shard(1)  # of (batch, time, dim)
    block = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(by_position, None), desired_input_layouts=(gathered, None)
        ),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=by_position),
        "mlp_norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=by_position, desired_input_layouts=gathered),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=by_position),
    }
    for each in model.blocks:
        parallelize_module(each, mesh, block)
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=gathered, output_layouts=by_position),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=by_position, output_layouts=gathered),
        },
    )
    if model.config.tie:
        model.head.weight = model.embedding.weight


def unsynchronized(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context for all micro-batches but a step's last: DDP need not reduce them."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()
