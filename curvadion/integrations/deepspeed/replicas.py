"""``replica_size``: DeepSpeed shards and averages inside a replica, the optimizer between them.

DeepSpeed tells apart the ranks that read data of their own, which its batch sizes, data loaders
and samplers count, and those over which it shards and averages gradients. Sequence parallelism
makes the latter more; here they become fewer. An ``mpu`` would change both, and DeepSpeed would
remember it for every later engine of the process.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from curvadion import checks
from curvadion.comm.collectives import said_alike
from curvadion.integrations.deepspeed import gathering
from curvadion.integrations.deepspeed.process_groups import (
    Reaching,
    data_parallel_group,
    divide,
    replica_groups,
)
from curvadion.optim.dion import Dion

REPLICA_SIZE = "replica_size"
KEY = f"optimizer.params.{REPLICA_SIZE}"


def divide_into_replicas(engine: Any, client: Dion | None) -> None:
    """Divide the engine's ranks into replicas, as the JSON or an optimizer made in code says.

    Call it on all ranks, before DeepSpeed makes its optimizer.

    Raises:
        TypeError, ValueError: on all ranks, naming the key and its value.
    """
    world, stage = dist.get_world_size(), engine.zero_optimization_stage()
    size, wrong = None, None
    try:
        params = engine.optimizer_params()
        size = size_in(params, world) if client is None else _size_of(client, stage)
    except (TypeError, ValueError) as error:
        wrong = error  # the others must not wait for this rank
    # A rank that differs would create other groups than those that the rest waits for.
    alike = said_alike((stage, size, wrong is None), dist.group.WORLD, engine.device)
    if wrong is not None:
        raise wrong
    if not alike:
        raise ValueError(
            f"{KEY}={size} and zero_optimization.stage={stage} on this rank, and others on "
            f"another: give all ranks the same configuration and optimizer"
        )
    groups = None
    if size is not None and size != (world if stage else 1):
        _check_modes(engine, size)
        groups = replica_groups(size)
        divide(engine, groups)
        _average_inside(engine)
    _check_shards(engine, client)
    if groups is not None and stage == 3:
        gathering.remember(engine.module.parameters(), groups.between)
        _start_alike(engine, groups.between)


def size_in(params: Any, world: int) -> int | None:
    """Ranks of a replica by ``optimizer.params``; None leaves it to DeepSpeed.

    Raises:
        TypeError, ValueError: naming the key and its value.
    """
    size = (params or {}).get(REPLICA_SIZE)
    if size is None:
        return None
    checks.integer(KEY, size, 1)
    if world % size:
        raise ValueError(f"{KEY}={size} must divide the number of ranks, which is {world}")
    return int(size)


def _size_of(client: Dion, stage: int) -> int | None:
    """Ranks of a replica if the optimizer's replicas divide all ranks like the key would."""
    replicas, rank, world = client._replicas.process_group, dist.get_rank(), dist.get_world_size()
    if replicas is None or not 1 < replicas.size() <= world:
        return None
    size = world // replicas.size()
    if size == 1 and stage == 0:
        return None  # as it is without the key
    alike = dist.get_process_group_ranks(replicas) == [*range(rank % size, world, size)]
    return size if alike else None


def _check_modes(engine: Any, size: int) -> None:
    zero = engine._config.zero_config
    refused = [
        (
            engine.sequence_parallel_size > 1 or engine.mesh_device is not None,
            "sequence_parallel_size",
            "leave it out",
        ),
        (
            (zero.zero_hpz_partition_size or 1) > 1,
            "zero_optimization.zero_hpz_partition_size",
            "leave it out: weights are gathered inside a replica anyway",
        ),
        (
            bool(zero.zero_quantized_gradients),
            "zero_optimization.zero_quantized_gradients",
            "set it to false: its groups span all ranks",
        ),
        (not engine.gradient_average, "gradient_allreduce_op", "use 'mean'"),
        (
            engine.use_node_local_storage(),
            "checkpoint.use_node_local_storage",
            "set it to false: one replica writes for all, into a folder that all can read",
        ),
        (
            (engine._config.checkpoint_config["writer"] or {}).get("data_parallel") is not None,
            "checkpoint.writer.data_parallel",
            "leave it out: the ranks of one replica write for all",
        ),
        (
            zero.pipeline_loading_checkpoint,
            "zero_optimization.pipeline_loading_checkpoint",
            "set it to false: ranks of one replica would wait for those of another",
        ),
    ]
    for is_set, key, advice in refused:
        if is_set:
            raise ValueError(f"{key} does not work with {KEY}={size}: {advice}.")


def _check_shards(engine: Any, client: Dion | None) -> None:
    """Raise ValueError if a model built under zero.Init is sharded over other ranks."""
    wanted = dist.get_process_group_ranks(data_parallel_group(engine))
    for name, p in engine.module.named_parameters():
        held_by = getattr(p, "ds_process_group", None)
        if held_by is None or (found := dist.get_process_group_ranks(held_by)) == wanted:
            continue
        raise ValueError(
            f"{name} was sharded over the ranks {found} when it was built under "
            f"deepspeed.zero.Init, but {_why_sharded_over(wanted, engine, client)}"
        )


def _why_sharded_over(ranks: list[int], engine: Any, client: Dion | None) -> str:
    """What the engine's ranks come from, and how to build a model for them."""
    if client is not None:
        return (
            f"by the replicas of the optimizer the engine shards over {ranks}. Build the model "
            f"under deepspeed.zero.Init(data_parallel_group=...) with the group of these ranks."
        )
    if (engine.optimizer_params() or {}).get(REPLICA_SIZE) is None:
        return (
            f"the engine, whose configuration has no {KEY}, shards over {ranks}. Pass the same "
            f"configuration to deepspeed.zero.Init(config_dict_or_path=...) and to "
            f"deepspeed.initialize(config=...)."
        )
    return (
        f"{KEY} says {ranks}. Import curvadion.deepspeed before, and pass the configuration: "
        f"deepspeed.zero.Init(config_dict_or_path=...)"
    )


def _average_inside(engine: Any) -> None:
    """Let gradients that the engine averages itself, at stage 0 and for BF16_Optimizer, stay here.

    It asks DeepSpeed's module for the group, and not itself.
    """
    inside = data_parallel_group(engine)

    def reduce_with(method: Any) -> Any:
        def reduce(self: Any, bucket: Any, **settings: Any) -> Any:
            here = {"dp_group": inside, "dp_world_size": inside.size()}
            return method(bucket, **{**settings, **here})

        return reduce

    for name in ("allreduce_no_retain", "sparse_allreduce_no_retain"):
        setattr(engine, name, MethodType(reduce_with(getattr(engine, name)), engine))


def _start_alike(engine: Any, between: dist.ProcessGroup) -> None:
    """Give all replicas the weights of the first, which zero.Init has shared inside each only."""
    reaching = Reaching()
    for p in engine.module.parameters():
        for tensor in _held(p):
            group = reaching(between, tensor.device)
            dist.broadcast(tensor.data, group=group, group_src=0)


def _held(parameter: Any) -> list[Tensor]:
    """What this rank holds of a parameter built under zero.Init; nothing of others."""
    shard = getattr(parameter, "ds_tensor", None)
    if shard is None:
        return []
    gathered = parameter.ds_status.name == "AVAILABLE"
    return [shard, parameter.data] if gathered else [shard]
