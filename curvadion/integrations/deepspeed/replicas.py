"""``replica_size``: DeepSpeed averages inside replicas, the optimizer between them.

DeepSpeed shards and averages over ``engine.seq_data_parallel_group``: here one replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from curvadion import checks
from curvadion.comm.collectives import all_ranks_equal
from curvadion.comm.groups import Group, existing_group, new_group, ranks_of
from curvadion.integrations.shared import KINDS, wrap_method
from curvadion.optim.dion import Dion

REPLICA_SIZE = "replica_size"
KEY = f"optimizer.params.{REPLICA_SIZE}"
_inside: list[list[int]] = []  # the ranks of this rank's replica, for jobs with several
# Of engines under construction: when they shard a model, they do not tell Init their group.
sharding_over: list[Group] = []


def replica_groups(size: int) -> tuple[Group, Group]:
    """This replica's ranks, and the ranks with the same shards in all; collective."""
    first, place = dist.get_rank() // size * size, dist.get_rank() % size
    # Also groups of one rank, because DeepSpeed needs a group.
    inside, between = (
        existing_group(ranks) or new_group(ranks)
        for ranks in (range(first, first + size), range(place, dist.get_world_size(), size))
    )
    _inside.append(ranks_of(inside))
    return inside, between


@cache
def reaching(group: Group, device: torch.device) -> Group:
    """``group`` if it supports ``device``, else one on gloo; collective."""
    if f"{device.type}:" in str(dist.get_backend_config(group)):
        return group
    return new_group(ranks_of(group), [group], backend="gloo")


def divide_into_replicas(engine: Any, client: Dion | None) -> None:
    """Divide the engine's ranks into replicas, by the JSON or by an optimizer built in code.

    ``engine.curvadion_replicas`` then holds one rank per replica; None if there is one
    replica.
    """
    stage = engine.zero_optimization_stage()
    usual = dist.get_world_size() if stage else 1
    size = size_in(engine.optimizer_params(), usual) if client is None else _size_of(client, usual)
    # A rank that differs would create other groups.
    if not all_ranks_equal((stage, size), dist.group.WORLD, engine.device):
        raise ValueError(
            f"{KEY}={size} or zero_optimization.{stage=} differs from another rank's: use "
            f"the same configuration and optimizer on all"
        )
    _check_modes(engine)
    if stage == 0 or size != usual:
        _check_modes_of_replicas(engine, size)
    engine.curvadion_replicas = None if stage else engine.seq_data_parallel_group
    if size != usual:
        inside, engine.curvadion_replicas = replica_groups(size)
        engine.seq_data_parallel_group, engine.seq_dp_world_size = inside, size
        here = {"dp_group": inside, "dp_world_size": size}

        def reduce(theirs: Any, bucket: Any, **settings: Any) -> Any:
            return theirs(bucket, **settings | here)

        # Averages of the engine itself, at stage 0 and for BF16_Optimizer.
        for name in ("allreduce_no_retain", "sparse_allreduce_no_retain"):
            wrap_method(engine, name, reduce)
        _share_weights(engine)


def _share_weights(engine: Any) -> None:
    """Broadcast shards of the first replica: zero.Init broadcasts inside each one only."""
    wanted = ranks_of(engine.seq_data_parallel_group)
    for name, p in engine.module.named_parameters():
        if not hasattr(p, "ds_process_group"):
            continue
        if (found := ranks_of(p.ds_process_group)) != wanted:
            raise ValueError(
                f"{name} is sharded over the ranks {found}, but the engine's replica is "
                f"{wanted}: pass the engine's configuration to "
                f"zero.Init(config_dict_or_path=...)."
            )
        for held in [p.ds_tensor, p] if p.ds_status.name == "AVAILABLE" else [p.ds_tensor]:
            between = reaching(engine.curvadion_replicas, held.device)
            dist.broadcast(held.data, group=between, group_src=0)


def size_in(params: Any, usual: int) -> int:
    """The ranks per replica in ``optimizer.params``; ``usual`` without the key."""
    if (size := (params or {}).get(REPLICA_SIZE)) is None:
        return usual
    checks.integer(KEY, size, 1)
    if (world := dist.get_world_size()) % size:
        raise ValueError(f"{KEY}={size} must divide the number of ranks, {world}")
    return int(size)


def _size_of(client: Dion, usual: int) -> int:
    """The ranks per replica, if those of an optimizer lie as with the key."""
    replicas, world = client._replicas.process_group, dist.get_world_size()
    if replicas is None or replicas.size() == 1:
        return usual
    size = world // replicas.size()
    wanted = [*range(dist.get_rank() % size, world, size)]
    return size if ranks_of(replicas) == wanted else usual


def patch(init_class: Any, gathered_class: Any) -> None:
    """Make Init respect ``replica_size``, and GatheredParameters reach all replicas."""

    def apply(self: nn.Module, function: Callable[[nn.Module], None]) -> nn.Module:
        for child in self.children():
            child.apply(function)
        with gathered_class(self.parameters(recurse=False), modifier_rank=0):
            function(self)
        return self

    def patch_apply(theirs: Any, self: Any) -> None:
        theirs(self)
        if self.override_module_apply and self.dp_world_size < dist.get_world_size():
            # DeepSpeed's own broadcasts from rank 0, which is only in the first replica.
            setattr(nn.Module, "apply", apply)  # noqa: B010  # until Init restores torch's

    wrap_method(init_class, "__init__", _init)
    wrap_method(init_class, "patch_init_and_builtins", patch_apply)
    wrap_method(gathered_class, "__init__", _gather)
    wrap_method(gathered_class, "__exit__", _leave)


def _init(theirs: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    if len(args) < 2 and kwargs.get("data_parallel_group") is None:
        configuration = kwargs.get("config_dict_or_path") or kwargs.get("config")
        group = sharding_over[-1] if sharding_over else _group_in(configuration)
        kwargs["data_parallel_group"] = group
    theirs(self, *args, **kwargs)


def _group_in(configuration: Any) -> Group | None:
    """The ranks of this replica; None if the configuration does not divide the ranks."""
    from deepspeed import init_distributed
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

    if configuration is None:
        return None
    optimizer = load_ds_config(configuration).get("optimizer") or {}
    if optimizer.get("type") not in KINDS:
        return None
    if not dist.is_initialized():
        init_distributed()
    world = dist.get_world_size()
    size = size_in(optimizer.get("params"), world)
    return None if size == world else replica_groups(size)[0]


def of_a_replica(p: Any) -> bool:
    """Whether a parameter is sharded over one of several replicas."""
    group = getattr(p, "ds_process_group", None)
    return group is not None and ranks_of(group) in _inside


def _gather(
    theirs: Any,
    self: Any,
    params: Any,
    modifier_rank: int | None = None,
    *more: Any,
    **kwargs: Any,
) -> None:
    """Take a global rank, where DeepSpeed expects a rank of one replica."""
    params = [params] if isinstance(params, Tensor) else list(params)
    self.curvadion_source = modifier_rank if any(map(of_a_replica, params)) else None
    inside = modifier_rank if self.curvadion_source is None else 0
    theirs(self, params, inside, *more, **kwargs)


def _leave(theirs: Any, self: Any, *raised: Any) -> Any:
    if self.enabled and self.curvadion_source is not None:
        for p in filter(of_a_replica, self.params):
            dist.broadcast(p.data, self.curvadion_source)
    return theirs(self, *raised)


def _check_modes(engine: Any) -> None:
    settings, stage = engine._config, engine.zero_optimization_stage()
    zero = settings.zero_config
    half = engine.torch_autocast_enabled() and engine.torch_autocast_dtype() is torch.float16
    modes = {
        "PipelineModule": engine.pipeline_parallelism,
        "deepspeed.moe": engine.has_moe_layers,
        "mpu": engine.mpu is not None,
        "tensor_parallel.autotp_size": engine.autotp_size() > 1,
        "compile.deepcompile": settings.compile_config.deepcompile,
        "checkpoint.load_universal": engine.load_universal_checkpoint(),
        "torch_autocast.dtype of float16": half,
        "fp16.enabled at ZeRO stage 0": stage == 0 and engine.fp16_enabled(),
        "zenflow": zero.zenflow is not None,
        "elastic_checkpoint": zero.elastic_checkpoint,
    }
    if offload := zero.offload_param:
        modes["offload_param.device of NVMe"] = offload.device == "nvme"
    if offload := zero.offload_optimizer:
        modes["offload_optimizer.device of NVMe"] = offload.device == "nvme"
        modes["offload_optimizer.super_offload"] = getattr(offload, "super_offload", False)
        modes["offload_optimizer.ratio below 1.0"] = offload.ratio < 1.0
    _refuse(modes, "CurvaDion and Dion")


def _check_modes_of_replicas(engine: Any, size: int) -> None:
    zero = engine._config.zero_config
    writer = engine._config.checkpoint_config["writer"] or {}
    sequences = engine.sequence_parallel_size > 1 or engine.mesh_device is not None
    modes = {
        "sequence_parallel_size": sequences,
        "gradient_allreduce_op of sums": not engine.gradient_average,
        "zero_hpz_partition_size": (zero.zero_hpz_partition_size or 1) > 1,
        "zero_quantized_gradients": zero.zero_quantized_gradients,
        "pipeline_loading_checkpoint": zero.pipeline_loading_checkpoint,
        # One replica writes for all.
        "checkpoint.use_node_local_storage": engine.use_node_local_storage(),
        "checkpoint.writer.data_parallel": writer.get("data_parallel") is not None,
    }
    _refuse(modes, f"{KEY}={size}" if engine.zero_optimization_stage() else "ZeRO stage 0")


def _refuse(modes: Mapping[str, object], beside: str) -> None:
    for key, is_set in modes.items():
        if is_set:
            raise ValueError(f"{key} does not work with {beside}: remove it.")
