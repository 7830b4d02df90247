"""Fully sharded models: FSDP2 with local gradients, and FSDP1's flat shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from curvadion.comm.groups import Group
from curvadion.layout.dtensor import fsdp_groups
from curvadion.layout.flat_shard import declare_flat_shard
from curvadion.layout.local_gradients import LOCAL_GRADIENTS

Model = TypeVar("Model", bound=nn.Module)


def keep_gradients_local(model: Model) -> Model:
    """Stop FSDP2 from averaging gradients over replicas: the optimizer does that.

    On a (replicate, shard) mesh use ``CurvaDion(..., replicas=mesh["replicate"])``.
    ``p.grad`` is then the mean over the ranks of this replica. Call this between two steps.
    Clip gradients with ``curvadion.clip_grad_norm_(optimizer, max_norm)``.

    Returns:
        ``model``.

    Raises:
        TypeError: if nothing in ``model`` was sharded by
            ``torch.distributed.fsdp.fully_shard``.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            raise TypeError(
                f"{type(model).__name__} contains a DistributedDataParallel and no FSDP2 module: "
                f"call curvadion.integrations.ddp.keep_gradients_local instead."
            )
        raise TypeError(
            f"{type(model).__name__} contains no FSDP2 module: call fully_shard first, or "
            f"give FSDP1 the shards of one replica as process_group=."
        )
    prefixes = {module: prefix for prefix, module in model.named_modules()}
    local: dict[str, Group] = {}
    for module in sharded:
        for group in fsdp_groups(module):
            replicas = _reduce_over_shards_only(group)
            if replicas is not None:
                local |= dict.fromkeys(_names(group, prefixes), replicas)
    LOCAL_GRADIENTS.declare(model, local)
    return model


def declare_flat_shards(model: Model) -> Model:
    """Tell optimizers which part of each FSDP1 parameter this rank holds.

    FullyShardedDataParallel(use_orig_params=True) leaves a flat range of every parameter.
    Call this between two steps.

    Returns:
        ``model``.

    Raises:
        ValueError: for use_orig_params=False, and for a parameter that is not contiguous.
    """
    for wrapper in FullyShardedDataParallel.fsdp_modules(model):
        handle = wrapper._handle  # of the wrapper's flat parameter; None if it has none
        if handle is not None and handle.uses_sharded_strategy:
            _declare_handle(handle)
    return model


def _names(group: Any, prefixes: Mapping[nn.Module, str]) -> Iterator[str]:
    """Yield the names of a parameter group's parameters; prefixes: names of modules."""
    for p in group.fsdp_params:
        owner = p._module_info
        prefix = prefixes[owner.module]
        yield f"{prefix}.{owner.param_name}" if prefix else owner.param_name


def _reduce_over_shards_only(group: Any) -> Group | None:
    """Make a parameter group ignore the replicas of its mesh; return them, if there are any."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp

    mesh_info = group.mesh_info
    if not isinstance(mesh_info, fsdp.DDPMeshInfo):
        return None
    arguments = {f.name: getattr(mesh_info, f.name) for f in fields(mesh_info) if f.init}
    # FSDP reduces gradients over the mesh dimensions that the class names. HSDPMeshInfo, of
    # shards with replicas, becomes FSDPMeshInfo, of shards only; DDPMeshInfo, of replicas
    # only, becomes the base class, which reduces over none.
    local_class = fsdp.DataParallelMeshInfo
    if isinstance(mesh_info, fsdp.FSDPMeshInfo):
        local_class = fsdp.FSDPMeshInfo
        arguments["replicate_mesh_dim"] = None
    local_info: Any = local_class(**arguments)
    if hasattr(mesh_info, "reduce_scatter_process_group"):  # not one of the arguments
        local_info.reduce_scatter_process_group = mesh_info.reduce_scatter_process_group
    if group.post_forward_mesh_info is mesh_info:
        group.post_forward_mesh_info = local_info
    group.mesh_info = local_info
    replicas: Group = mesh_info.replicate_process_group
    return replicas


def _declare_handle(handle: Any) -> None:
    """Declare the parameters that one FSDP1 wrapper concatenates and shards."""
    flat = handle.flat_param
    if flat._params is None:
        raise ValueError("use_orig_params=False merges parameters: pass use_orig_params=True.")
    for parameter, name, shape, contiguous, info in zip(
        flat._params,
        flat._fqns,
        flat._shapes,
        flat._contiguities,
        flat._shard_param_infos,
        strict=True,
    ):
        if not contiguous:
            raise ValueError(f"{name} is not contiguous: make it so before wrapping the model.")
        # Elements [start, stop) of the parameter are on this rank, perhaps none.
        start = 0
        stop = 0
        if info.in_shard:
            start = info.intra_param_start_idx
            stop = info.intra_param_end_idx + 1
        declare_flat_shard(parameter, shape, start, stop, handle.process_group)
