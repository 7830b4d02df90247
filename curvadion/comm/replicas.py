"""The ranks that hold replicas of the same weights."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from curvadion.comm.collectives import group_size

SINGLE: Literal["single"] = "single"
Replicas = dist.ProcessGroup | DeviceMesh | Literal["single"] | None


class Replica(NamedTuple):
    """One of several replicas."""

    number: int
    total: int


class ReplicaGroup:
    """The ranks that hold replicas of the same weights; copies share it, pickles find it by name.

    process_group: None for one replica. single: whether the user has said that there is only one.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.single = isinstance(replicas, str) and replicas == SINGLE
        self.process_group = None if self.single else _process_group(replicas)

    @property
    def size(self) -> int:
        return group_size(self.process_group)

    @property
    def replica(self) -> Replica:
        return Replica(0 if self.process_group is None else self.process_group.rank(), self.size)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicaGroup:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        name = None if self.process_group is None else self.process_group.group_name
        return _replica_group_by_name, (name, self.single)


def _process_group(replicas: object) -> dist.ProcessGroup | None:
    if isinstance(replicas, DeviceMesh):
        if replicas.ndim != 1:
            raise ValueError(
                f"replicas={replicas!r} has {replicas.ndim} dimensions: pass the one along which "
                f"weights are replicated, e.g. mesh['replicate']."
            )
        replicas = replicas.get_group()
    if replicas is None:
        return None
    if not isinstance(replicas, dist.ProcessGroup):
        raise TypeError(
            f"replicas={replicas!r} must be a ProcessGroup that this rank is in, a one-dimensional "
            f"DeviceMesh, 'single' or None: pass torch.distributed.group.WORLD for all ranks."
        )
    return replicas


def _replica_group_by_name(name: str | None, single: bool = False) -> ReplicaGroup:
    if name is None:
        return ReplicaGroup(SINGLE if single else None)
    for group in dist.distributed_c10d._world.pg_map:
        if group.group_name == name:
            return ReplicaGroup(group)
    raise RuntimeError(
        f"The optimizer was pickled with the process group {name!r}, which this process does not "
        f"have: call torch.distributed.init_process_group before unpickling."
    )
