"""``replica_size``: DeepSpeed shards and averages inside a replica, the optimizer between them.

DeepSpeed tells the ranks that read data of their own, which batch sizes count, from those over
which it shards and averages gradients. Sequence parallelism makes the latter more, and this fewer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from curvadion import checks
from curvadion.comm.collectives import all_ranks_equal
from curvadion.integrations.deepspeed.modes import KEY, REPLICA_SIZE, check_with_replicas
from curvadion.integrations.deepspeed.process_groups import (
    Reaching,
    data_parallel_group,
    divide,
    replica_groups,
)
from curvadion.integrations.wrapping import wrap_method
from curvadion.optim.dion import Dion


def divide_into_replicas(engine: Any, client: Dion | None) -> None:
    """Divide the engine's ranks into replicas, as the JSON or an optimizer made in code says.

    Call it on all ranks, before DeepSpeed makes its optimizer.
    """
    world, stage = dist.get_world_size(), engine.zero_optimization_stage()
    size = size_in(engine.optimizer_params(), world) if client is None else _size_of(client, stage)
    # A rank that differs would create other groups than those that the rest waits for.
    if not all_ranks_equal((stage, size), dist.group.WORLD, engine.device):
        raise ValueError(
            f"{KEY}={size} and zero_optimization.stage={stage} on this rank, and others on "
            f"another: give all ranks the same configuration and optimizer"
        )
    groups = None
    if size is not None and size != (world if stage else 1):
        check_with_replicas(engine, size)
        groups = replica_groups(size)
        divide(engine, groups)
        _average_inside(engine)
    _check_shards(engine)
    if groups is not None and stage == 3:
        _start_with_the_first(engine, groups.between)


def size_in(params: Any, world: int) -> int | None:
    """Ranks of a replica by ``optimizer.params``; None leaves it to DeepSpeed."""
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
    found = dist.get_process_group_ranks(replicas)
    return size if found == [*range(rank % size, world, size)] else None


def _check_shards(engine: Any) -> None:
    """Raise ValueError if a model built under zero.Init is sharded over other ranks."""
    wanted = dist.get_process_group_ranks(data_parallel_group(engine))
    for name, p in engine.module.named_parameters():
        held_by = getattr(p, "ds_process_group", None)
        if held_by is not None and (found := dist.get_process_group_ranks(held_by)) != wanted:
            raise ValueError(
                f"{name} was sharded over the ranks {found} when it was built under "
                f"deepspeed.zero.Init, but the engine shards over {wanted}, as its configuration "
                f"or its optimizer's replicas say. Import curvadion.deepspeed first, and build it "
                f"under zero.Init(config_dict_or_path=...) with the configuration that "
                f"deepspeed.initialize gets, or zero.Init(data_parallel_group=...) of these ranks."
            )


def _average_inside(engine: Any) -> None:
    """Let gradients that the engine averages itself, at stage 0 and for BF16_Optimizer, stay here.

    It asks DeepSpeed's module for the group, and not itself.
    """
    inside = data_parallel_group(engine)
    here = {"dp_group": inside, "dp_world_size": inside.size()}

    def reduce(theirs: Callable[..., Any], bucket: Any, **settings: Any) -> Any:
        return theirs(bucket, **{**settings, **here})

    for name in ("allreduce_no_retain", "sparse_allreduce_no_retain"):
        wrap_method(engine, name, reduce)


def _start_with_the_first(engine: Any, between: dist.ProcessGroup) -> None:
    """Give all replicas the weights of the first, which zero.Init has shared inside each only."""
    reaching = Reaching()
    for p in engine.module.parameters():
        if (shard := getattr(p, "ds_tensor", None)) is not None:
            for held in [shard, p] if p.ds_status.name == "AVAILABLE" else [shard]:
                dist.broadcast(held.data, group=reaching(between, held.device), group_src=0)
