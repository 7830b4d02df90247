"""The process groups that an engine's ranks and tensors need."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from curvadion.comm.groups import existing_group, new_group

_BETWEEN = "_curvadion_between_replicas"  # an attribute of engines
_others: dict[dist.ProcessGroup, dist.ProcessGroup] = {}  # by the group of a replica's ranks


class ReplicaGroups(NamedTuple):
    """The groups that this rank is in where the ranks hold several replicas."""

    inside: dist.ProcessGroup  # of this replica, over which DeepSpeed shards and averages gradients
    between: dist.ProcessGroup  # the ranks that hold the same shards, one of each replica


def replica_groups(size: int) -> ReplicaGroups:
    """Groups for replicas of ``size`` ranks in a row, fewer than all; collective.

    All ranks must ask for the same size at the same point.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    first, place = rank - rank % size, rank % size
    groups = ReplicaGroups(_group(range(first, first + size)), _group(range(place, world, size)))
    _others[groups.inside] = groups.between
    return groups


def _group(ranks: range) -> dist.ProcessGroup:
    """The same at every call; also of one rank, which DeepSpeed wants a group of."""
    return existing_group(ranks) or new_group(ranks)


def other_replicas(parameter: Any) -> dist.ProcessGroup | None:
    """Who holds this rank's shard of a parameter of stage 3 in each replica; None for one."""
    group = getattr(parameter, "ds_process_group", None)
    return None if group is None else _others.get(group)


def data_parallel_group(engine: Any) -> dist.ProcessGroup:
    """The ranks over which the engine averages gradients, and shards from stage 1 on."""
    group: dist.ProcessGroup = engine.seq_data_parallel_group
    return group


def between_replicas(engine: Any) -> dist.ProcessGroup | None:
    """The ranks with which the optimizer synchronises; None if the engine's ranks are one replica.

    At stage 0 every rank is a replica unless the engine was divided otherwise.
    """
    whole = None if engine.zero_optimization_stage() else data_parallel_group(engine)
    group: dist.ProcessGroup | None = getattr(engine, _BETWEEN, whole)
    return group


def divide(engine: Any, groups: ReplicaGroups) -> None:
    """Let the engine shard and average inside a replica.

    Batch sizes, data loaders and the first broadcast of the weights stay those of all ranks.
    """
    engine.seq_data_parallel_group = groups.inside
    engine.seq_dp_world_size = groups.inside.size()
    setattr(engine, _BETWEEN, groups.between)


def divided(engine: Any) -> bool:
    """Whether DeepSpeed averages gradients inside replicas, of which there are several."""
    return hasattr(engine, _BETWEEN)


class Reaching:
    """Groups over the same ranks as others, for tensors where those may have no backend.

    A GPU's engine has NCCL groups; offloaded master weights are on the CPU. All ranks of a group
    must ask for it at the same point.
    """

    def __init__(self) -> None:
        self._made: dict[dist.ProcessGroup, dist.ProcessGroup] = {}

    def __call__(self, group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
        """``group`` if it takes tensors on ``device``, else a gloo group of its ranks."""
        if f"{device.type}:" in str(dist.get_backend_config(group)):
            return group
        if group not in self._made:
            ranks = dist.get_process_group_ranks(group)
            self._made[group] = new_group(ranks, [group], backend="gloo")
        return self._made[group]
