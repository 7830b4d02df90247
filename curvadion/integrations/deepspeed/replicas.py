"""``replica_size``: DeepSpeed averages inside replicas, the optimizer between them.

DeepSpeed shards and averages over ``engine.seq_data_parallel_group``, which becomes the group
of one replica.
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
from curvadion.optim.replica_optimizer import ReplicaOptimizer

REPLICA_SIZE = "replica_size"
KEY = f"optimizer.params.{REPLICA_SIZE}"
# The ranks of this rank's replica, once for each engine or Init that divides the ranks.
_ranks_of_replicas: list[list[int]] = []
# The replicas' groups of engines under construction, the innermost last: while an engine
# shards its model, it does not tell Init over which group.
sharding_over: list[Group] = []


def replica_groups(size: int) -> tuple[Group, Group]:
    """Divide all ranks into replicas of ``size`` neighbouring ranks; collective.

    Returns:
        The group of this replica's ranks, and the group of one rank per replica, those that
        hold the same shards as this one.
    """
    rank = dist.get_rank()
    first_rank = rank // size * size
    replica_group = _group_of(range(first_rank, first_rank + size))
    counterparts = _group_of(range(rank % size, dist.get_world_size(), size))
    _ranks_of_replicas.append(ranks_of(replica_group))
    return replica_group, counterparts


def _group_of(ranks: range) -> Group:
    # A group even of one rank, because DeepSpeed needs one.
    return existing_group(ranks) or new_group(ranks)


@cache
def reaching(group: Group, device: torch.device) -> Group:
    """``group`` if it supports ``device``, else one on gloo; collective."""
    if f"{device.type}:" in str(dist.get_backend_config(group)):
        return group
    return new_group(ranks_of(group), [group], backend="gloo")


def divide_into_replicas(engine: Any, client: ReplicaOptimizer | None) -> None:
    """Divide the engine's ranks into replicas, by the JSON or by an optimizer built in code.

    ``engine.curvadion_replicas`` becomes the group of one rank per replica; None if there is
    one replica.

    Args:
        engine: under construction.
        client: the optimizer built in code; None for the JSON's.
    """
    stage = engine.zero_optimization_stage()
    # Without sharding each rank is a replica; sharding over all ranks makes them one replica.
    default = dist.get_world_size() if stage else 1
    if client is None:
        size = size_in(engine.optimizer_params(), default)
    else:
        size = _size_of(client, default)
    # A rank that differs would create other groups.
    if not all_ranks_equal((stage, size), dist.group.WORLD, engine.device):
        raise ValueError(
            f"{KEY}={size} or zero_optimization.{stage=} differs from another rank's: use "
            f"the same configuration and optimizer on all"
        )
    if stage == 0 and size == dist.get_world_size() > 1:
        raise ValueError(
            f"{KEY}={size} with zero_optimization.{stage=} makes all ranks one replica, which has "
            f"nothing to synchronise with: leave {REPLICA_SIZE} out, and every rank is a replica."
        )
    _check_modes(engine)
    if stage == 0 or size != default:
        _check_modes_of_replicas(engine, size)
    engine.curvadion_replicas = None if stage else engine.seq_data_parallel_group
    if size == default:
        return
    replica_group, counterparts = replica_groups(size)
    engine.curvadion_replicas = counterparts
    engine.seq_data_parallel_group = replica_group
    engine.seq_dp_world_size = size
    group_settings = {"dp_group": replica_group, "dp_world_size": size}

    def reduce(original: Any, bucket: Any, **settings: Any) -> Any:
        return original(bucket, **settings | group_settings)

    # Averages of the engine itself, at stage 0 and for BF16_Optimizer.
    for name in ("allreduce_no_retain", "sparse_allreduce_no_retain"):
        wrap_method(engine, name, reduce)
    _share_weights(engine)


def _share_weights(engine: Any) -> None:
    """Broadcast shards of the first replica: zero.Init broadcasts inside each one only."""
    replica_ranks = ranks_of(engine.seq_data_parallel_group)
    for name, p in engine.module.named_parameters():
        if not hasattr(p, "ds_process_group"):  # not of zero.Init
            continue
        shard_ranks = ranks_of(p.ds_process_group)
        if shard_ranks != replica_ranks:
            raise ValueError(
                f"{name} is sharded over the ranks {shard_ranks}, but the engine's replica is "
                f"{replica_ranks}: pass the engine's configuration to "
                f"zero.Init(config_dict_or_path=...)."
            )
        tensors = [p.ds_tensor]  # this rank's shard
        if p.ds_status.name == "AVAILABLE":
            tensors.append(p)  # gathered at present
        for tensor in tensors:
            counterparts = reaching(engine.curvadion_replicas, tensor.device)
            dist.broadcast(tensor.data, group=counterparts, group_src=0)


def size_in(params: Any, default: int) -> int:
    """The ranks per replica in ``optimizer.params``; ``default`` without the key."""
    size = (params or {}).get(REPLICA_SIZE)
    if size is None:
        return default
    checks.integer(KEY, size, 1)
    world = dist.get_world_size()
    if world % size:
        raise ValueError(f"{KEY}={size} must divide the number of ranks, {world}")
    return int(size)


def _size_of(client: ReplicaOptimizer, default: int) -> int:
    """The ranks per replica that an optimizer's ``replicas`` imply.

    ``default`` if it has none, or if they are other ranks than :func:`replica_groups` would
    choose, which :func:`config.check_replicas` reports.
    """
    replicas = client.replicas.process_group
    if replicas is None or replicas.size() == 1:
        return default
    world = dist.get_world_size()
    size = world // replicas.size()
    counterparts = list(range(dist.get_rank() % size, world, size))
    return size if ranks_of(replicas) == counterparts else default


def patch(init_class: Any, gathered_class: Any) -> None:
    """Make Init respect ``replica_size``, and GatheredParameters reach all replicas.

    Args:
        init_class: ``deepspeed.zero.Init``.
        gathered_class: ``deepspeed.zero.GatheredParameters``.
    """

    def apply(self: nn.Module, function: Callable[[nn.Module], None]) -> nn.Module:
        """As ``nn.Module.apply``, on gathered parameters."""
        for child in self.children():
            child.apply(function)
        with gathered_class(self.parameters(recurse=False), modifier_rank=0):
            function(self)
        return self

    def patch_apply(original: Any, self: Any) -> None:
        original(self)
        if self.override_module_apply and self.dp_world_size < dist.get_world_size():
            # DeepSpeed's own broadcasts from rank 0, which is only in the first replica.
            setattr(nn.Module, "apply", apply)  # noqa: B010  # until Init restores torch's

    wrap_method(init_class, "__init__", _init)
    wrap_method(init_class, "patch_init_and_builtins", patch_apply)
    wrap_method(gathered_class, "__init__", _gather)
    wrap_method(gathered_class, "__exit__", _exit)


def _init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """``Init.__init__``, but with this replica as the default ``data_parallel_group``."""
    # The second positional argument is data_parallel_group.
    if len(args) < 2 and kwargs.get("data_parallel_group") is None:
        configuration = kwargs.get("config_dict_or_path") or kwargs.get("config")
        group = sharding_over[-1] if sharding_over else _group_in(configuration)
        kwargs["data_parallel_group"] = group
    original(self, *args, **kwargs)


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
    if size == world:
        return None
    replica_group, _ = replica_groups(size)
    return replica_group


def of_a_replica(p: Any) -> bool:
    """Whether a parameter is sharded over one of several replicas."""
    group = getattr(p, "ds_process_group", None)
    return group is not None and ranks_of(group) in _ranks_of_replicas


def _gather(
    original: Any,
    self: Any,
    params: Any,
    modifier_rank: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """``GatheredParameters.__init__``, but with a global rank.

    Args:
        original: DeepSpeed's own, which expects a rank of one replica.
        self: the context.
        params: a parameter, or an iterable of parameters, that it gathers.
        modifier_rank: the global rank whose changes reach all others at the exit; None for
            no changes.
        args: further arguments of ``original``.
        kwargs: the same.
    """
    params = [params] if isinstance(params, Tensor) else list(params)
    self.curvadion_source = None
    rank = modifier_rank
    if modifier_rank is not None and any(of_a_replica(p) for p in params):
        self.curvadion_source = modifier_rank
        rank = 0  # DeepSpeed broadcasts inside each replica what _exit sends to all ranks
    original(self, params, rank, *args, **kwargs)


def _exit(original: Any, self: Any, *exception: Any) -> Any:
    """``GatheredParameters.__exit__``, after a broadcast of the changes to all replicas."""
    if self.enabled and self.curvadion_source is not None:
        for p in filter(of_a_replica, self.params):
            dist.broadcast(p.data, self.curvadion_source)
    return original(self, *exception)


def _check_modes(engine: Any) -> None:
    """Raise ValueError for modes of DeepSpeed in which the optimizers do not work."""
    settings = engine._config
    stage = engine.zero_optimization_stage()
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
    if zero.offload_param:
        modes["offload_param.device of NVMe"] = zero.offload_param.device == "nvme"
    offload = zero.offload_optimizer
    if offload:
        modes["offload_optimizer.device of NVMe"] = offload.device == "nvme"
        modes["offload_optimizer.super_offload"] = getattr(offload, "super_offload", False)
        modes["offload_optimizer.ratio below 1.0"] = offload.ratio < 1.0
    _refuse(modes, "the optimizers of curvadion")


def _check_modes_of_replicas(engine: Any, size: int) -> None:
    """Raise ValueError for modes of DeepSpeed in which several replicas do not work."""
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


def _refuse(modes: Mapping[str, object], setting: str) -> None:
    for mode, is_set in modes.items():
        if is_set:
            raise ValueError(f"{mode} does not work with {setting}: remove it.")
