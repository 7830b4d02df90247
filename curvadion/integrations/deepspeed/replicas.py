"""``replica_size``: DeepSpeed shards and averages inside replicas, the optimizer between them.

DeepSpeed distinguishes the ranks that read their own data, which determine batch sizes, from those
over which it shards and averages gradients (``engine.seq_data_parallel_group``): here one replica.
``deepspeed.zero.Init`` also shards over it.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from curvadion import checks
from curvadion.comm.collectives import all_ranks_equal
from curvadion.comm.groups import Group, existing_group, new_group
from curvadion.integrations.shared import KINDS, wrap_method
from curvadion.optim.dion import Dion

REPLICA_SIZE = "replica_size"
KEY = f"optimizer.params.{REPLICA_SIZE}"
_BETWEEN = "_curvadion_between_replicas"  # an attribute of engines
_inside: list[list[int]] = []  # the ranks of this rank's replica, for jobs with several
# When DeepSpeed itself shards an unsharded model, it does not tell Init the engine's group.
_engines: list[dist.ProcessGroup | None] = []
# gloo groups over the ranks of other groups.
_on_cpu: weakref.WeakKeyDictionary[Group, Group] = weakref.WeakKeyDictionary()


def replica_groups(size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This replica's ranks, and the ranks with the same shards in all replicas; collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    first, place = rank - rank % size, rank % size
    # Also groups of one rank, because DeepSpeed needs a group.
    inside, between = (
        existing_group(ranks) or new_group(ranks)
        for ranks in (range(first, first + size), range(place, world, size))
    )
    _inside.append(dist.get_process_group_ranks(inside))
    return inside, between


def of_a_replica(p: Any) -> bool:
    """Whether a parameter is sharded over one of several replicas."""
    group = getattr(p, "ds_process_group", None)
    return group is not None and dist.get_process_group_ranks(group) in _inside


def reaching(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """``group`` if it supports ``device``, else a gloo group of its ranks; collective."""
    if f"{device.type}:" in str(dist.get_backend_config(group)):
        return group
    if group not in _on_cpu:
        ranks = dist.get_process_group_ranks(group)
        _on_cpu[group] = new_group(ranks, [group], backend="gloo")
    return _on_cpu[group]


def divided(engine: Any) -> bool:
    """Whether there are several replicas, inside which DeepSpeed averages gradients."""
    return hasattr(engine, _BETWEEN)


def between_replicas(engine: Any) -> dist.ProcessGroup | None:
    """The ranks with which the optimizer synchronises; None if all ranks are one replica."""
    whole = None if engine.zero_optimization_stage() else engine.seq_data_parallel_group
    group: Group | None = getattr(engine, _BETWEEN, whole)
    return group


def divide_into_replicas(engine: Any, client: Dion | None) -> None:
    """Divide the engine's ranks into replicas, by the JSON or by an optimizer built in code."""
    world, stage = dist.get_world_size(), engine.zero_optimization_stage()
    size = size_in(engine.optimizer_params(), world) if client is None else _size_of(client, stage)
    # A rank that differs would create other groups than the rest waits for.
    if not all_ranks_equal((stage, size), dist.group.WORLD, engine.device):
        raise ValueError(
            f"{KEY}={size} and zero_optimization.stage={stage} on this rank differ from another "
            f"rank's: use the same configuration and optimizer on every rank"
        )
    if size is None or size == (world if stage else 1):
        _check_shards(engine)
        return
    check_with_replicas(engine, size)
    inside, between = replica_groups(size)
    engine.seq_data_parallel_group, engine.seq_dp_world_size = inside, size
    setattr(engine, _BETWEEN, between)
    _average_inside(engine)
    _check_shards(engine)
    if stage == 3:  # zero.Init broadcast weights inside each replica only: use the first replica's
        for p in engine.module.parameters():
            if (shard := getattr(p, "ds_tensor", None)) is not None:
                for held in [shard, p] if p.ds_status.name == "AVAILABLE" else [shard]:
                    dist.broadcast(held.data, group=reaching(between, held.device), group_src=0)


def size_in(params: Any, world: int) -> int | None:
    """The ranks per replica in ``optimizer.params``; None leaves it to DeepSpeed."""
    if (size := (params or {}).get(REPLICA_SIZE)) is None:
        return None
    checks.integer(KEY, size, 1)
    if world % size:
        raise ValueError(f"{KEY}={size} must divide the number of ranks, which is {world}")
    return int(size)


def _size_of(client: Dion, stage: int) -> int | None:
    """The ranks per replica if the optimizer's replicas divide all ranks as the key would."""
    replicas, rank, world = client._replicas.process_group, dist.get_rank(), dist.get_world_size()
    if replicas is None or replicas.size() == 1:
        return None
    size = world // replicas.size()
    if size == 1 and stage == 0:
        return None  # as without the key
    found = dist.get_process_group_ranks(replicas)
    return size if found == [*range(rank % size, world, size)] else None


def _check_shards(engine: Any) -> None:
    """Raise ValueError if a model built under zero.Init is sharded over other ranks."""
    wanted = dist.get_process_group_ranks(engine.seq_data_parallel_group)
    for name, p in engine.module.named_parameters():
        held_by = getattr(p, "ds_process_group", None)
        if held_by is not None and (found := dist.get_process_group_ranks(held_by)) != wanted:
            raise ValueError(
                f"{name} was sharded over the ranks {found} under deepspeed.zero.Init, but the "
                f"engine shards over {wanted}: import curvadion.deepspeed, and build the model "
                f"under zero.Init(config_dict_or_path=...) with the engine's configuration."
            )


def _average_inside(engine: Any) -> None:
    """Restrict the engine's own averaging to a replica, at stage 0 and for BF16_Optimizer."""
    inside = engine.seq_data_parallel_group
    here = {"dp_group": inside, "dp_world_size": inside.size()}

    def reduce(theirs: Callable[..., Any], bucket: Any, **settings: Any) -> Any:
        return theirs(bucket, **{**settings, **here})

    for name in ("allreduce_no_retain", "sparse_allreduce_no_retain"):
        wrap_method(engine, name, reduce)


@contextmanager
def sharding_over(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Inside, models are sharded over these ranks by default; None: over all ranks."""
    _engines.append(group)
    try:
        yield
    finally:
        _engines.pop()


def patch(init_class: Any, gathered_class: Any) -> None:
    """Make Init respect ``replica_size``, and GatheredParameters reach all replicas."""
    wrap_method(init_class, "__init__", _init)
    wrap_method(init_class, "patch_init_and_builtins", _patch_apply)
    wrap_method(gathered_class, "__init__", _gather)
    wrap_method(gathered_class, "__exit__", _leave)


def _init(theirs: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    given = inspect.signature(theirs).bind(self, *args, **kwargs)
    given.apply_defaults()
    said = given.arguments
    if said["data_parallel_group"] is None and said["sequence_data_parallel_group"] is None:
        if _engines:
            said["data_parallel_group"] = _engines[-1]
        elif said["enabled"]:
            said["data_parallel_group"] = _group_in(said["config_dict_or_path"] or said["config"])
    theirs(*given.args, **given.kwargs)


def _group_in(configuration: Any) -> dist.ProcessGroup | None:
    """The ranks of this replica; None if the configuration does not divide the ranks."""
    from deepspeed import init_distributed
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

    if configuration is None:
        return None
    settings = configuration if isinstance(configuration, dict) else load_ds_config(configuration)
    optimizer = settings.get("optimizer") or {}
    if optimizer.get("type") not in KINDS:
        return None
    if not dist.is_initialized():
        init_distributed()
    world = dist.get_world_size()
    size = size_in(optimizer.get("params"), world)
    return None if size in (None, world) else replica_groups(size)[0]


def _gather(
    theirs: Callable[..., Any],
    self: Any,
    params: Any,
    modifier_rank: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Translate the user's global rank, where DeepSpeed expects a rank of one replica."""
    params = [params] if isinstance(params, Tensor) else list(params)
    self._curvadion_source = modifier_rank if any(map(of_a_replica, params)) else None
    inside = modifier_rank if self._curvadion_source is None else 0
    theirs(self, params, inside, *args, **kwargs)


def _leave(theirs: Callable[..., Any], self: Any, *raised: Any) -> Any:
    if self.enabled and self._curvadion_source is not None:
        for p in filter(of_a_replica, self.params):
            dist.broadcast(p.data, self._curvadion_source)
    return theirs(self, *raised)


def _patch_apply(theirs: Callable[..., Any], self: Any) -> None:
    theirs(self)
    if self.override_module_apply and self.dp_world_size < dist.get_world_size():
        original = getattr(nn.Module, "_old_apply")  # noqa: B009  # which DeepSpeed restores
        # DeepSpeed's version broadcasts from rank 0, which is only in the first replica's group.
        apply = lambda module, function: original(module, _on_gathered(function))  # noqa: E731
        setattr(nn.Module, "apply", apply)  # noqa: B010


def _on_gathered(function: Any) -> Any:
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    if hasattr(function, "wrapped"):  # apply calls itself for each child
        return function

    @wraps(function)
    def on_gathered(module: nn.Module) -> None:
        with GatheredParameters(module.parameters(recurse=False), modifier_rank=0):
            function(module)

    setattr(on_gathered, "wrapped", True)  # noqa: B010
    return on_gathered


def check_engine(engine: Any) -> None:
    """Raise ValueError, naming the key, for an unsupported mode of DeepSpeed."""
    settings = engine._config
    zero, stage = settings.zero_config, engine.zero_optimization_stage()
    half = engine.torch_autocast_enabled() and engine.torch_autocast_dtype() is torch.float16
    elastic, deep = "zero_optimization.elastic_checkpoint", settings.compile_config.deepcompile
    sums = stage == 0 and not engine.gradient_average
    sequences = stage == 0 and engine.sequence_parallel_size > 1
    refused = [
        (engine.fp16_enabled() and stage == 0, "fp16.enabled", "use bf16, or ZeRO stage 1, 2 or 3"),
        (engine.pipeline_parallelism, "PipelineModule", "train without pipeline stages"),
        (engine.has_moe_layers, "deepspeed.moe layers", "use dense layers"),
        (engine.autotp_size() > 1, "tensor_parallel.autotp_size", "set it to 1"),
        (engine.mpu is not None, "mpu", f"pass none: {KEY} chooses replicas"),
        (deep, "compile.deepcompile", "set it to false"),
        (zero.zenflow is not None, "zero_optimization.zenflow", "remove it"),
        (zero.elastic_checkpoint, elastic, "set it to false: optimizer state is not elastic"),
        (engine.load_universal_checkpoint(), "checkpoint.load_universal", "set it to false"),
        (half, "torch_autocast.dtype", "use bfloat16: ranks would scale float16 losses alone"),
        (sequences, "sequence_parallel_size", "use zero_optimization.stage >= 1"),
        (sums, "gradient_allreduce_op", "use 'mean', which replicas need"),
    ]
    for key in ("offload_optimizer", "offload_param"):
        name, offload = f"zero_optimization.{key}", getattr(zero, key)
        device, ratio = getattr(offload, "device", ""), getattr(offload, "ratio", 1.0)
        refused += [
            (str(device).endswith("nvme"), f"{name}.device='nvme'", "use 'cpu'"),
            (getattr(offload, "super_offload", False), f"{name}.super_offload", "set it to false"),
            (ratio != 1.0, f"{name}.ratio={ratio}", "set it to 1.0"),
        ]
    _refuse(refused, "CurvaDion and Dion")


def check_with_replicas(engine: Any, size: int) -> None:
    """Raise ValueError, naming the key, for a mode that does not work with replicas."""
    zero, checkpoint = engine._config.zero_config, engine._config.checkpoint_config
    sequences = engine.sequence_parallel_size > 1 or engine.mesh_device is not None
    secondary = (zero.zero_hpz_partition_size or 1) > 1
    coded, serial = "zero_optimization.zero_quantized_gradients", zero.pipeline_loading_checkpoint
    parallel = (checkpoint["writer"] or {}).get("data_parallel") is not None
    node, off = engine.use_node_local_storage(), "set it to false"
    refused = [
        (sequences, "sequence_parallel_size", "leave it out"),
        (secondary, "zero_optimization.zero_hpz_partition_size", "leave it out"),
        (bool(zero.zero_quantized_gradients), coded, f"{off}: its groups span all ranks"),
        (not engine.gradient_average, "gradient_allreduce_op", "use 'mean'"),
        (node, "checkpoint.use_node_local_storage", f"{off}: one replica writes for all"),
        (parallel, "checkpoint.writer.data_parallel", "leave it out: one replica writes for all"),
        (serial, "zero_optimization.pipeline_loading_checkpoint", f"{off}: ranks would wait"),
    ]
    _refuse(refused, f"{KEY}={size}")


def _refuse(modes: Iterable[tuple[bool, str, str]], beside: str) -> None:
    for is_set, key, advice in modes:
        if is_set:
            raise ValueError(f"{key} does not work with {beside}: {advice}.")
