"""Process groups: of replicas, of any ranks, and unions of groups."""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from curvadion.comm.collectives import group_size
from curvadion.comm.members import Members

Group = dist.ProcessGroup
ranks_of = dist.get_process_group_ranks
ReplicasArgument = Group | DeviceMesh | Members | Literal["single"] | None

BACKGROUND = "curvadion background"  # the description of background groups
# By default group, how often a group of some ranks was made; its members count equally.
_made: weakref.WeakKeyDictionary[Group, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()


def new_group(
    ranks: Iterable[int],
    like: Sequence[Group] = (),  # groups with its timeout; else the default group
    *,
    backend: str | None = None,  # None for the default group's
    description: str = "curvadion",
) -> Group:
    """Create a process group of these global ranks, which all call this at the same point."""
    # dist.new_group needs all ranks, but some have no optimizer. With
    # use_local_synchronization, members name the group by the number of groups that each is
    # in. With device_id both split the world's NCCL communicator, which again needs all
    # ranks.
    members = tuple(sorted(ranks))
    world = dist.group.WORLD
    assert world is not None
    made = _made.setdefault(world, Counter())
    made[members] += 1
    digest = hashlib.sha1(repr(members).encode(), usedforsecurity=False).hexdigest()
    make: Any = c10d._new_process_group_helper
    bound, world.bound_device_id = world.bound_device_id, None  # prevents a split
    group: Group
    try:
        group, _ = make(
            len(members),
            members.index(dist.get_rank()),
            list(members),
            dist.Backend(backend or dist.get_backend()),
            c10d._world.pg_map[world][1],
            f"curvadion_{digest}_{made[members]}",
            timeout=timeout_of(like or [world]),
            group_desc=description,
        )
    finally:
        world.bound_device_id = bound
    c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(members)}
    return group


def timeout_of(groups: Sequence[Group]) -> timedelta:
    """The longest of the groups' timeouts."""
    backends = [group._get_backend(device) for group in groups for device in group._device_types]
    timeouts = [getattr(getattr(b, "options", None), "_timeout", None) for b in backends]
    return max((t for t in timeouts if t is not None), default=c10d.default_pg_timeout)


def group_of_ranks(ranks: Iterable[int], like: Sequence[Group] = ()) -> Group | None:
    """An existing or a new group of these global ranks; collective; None for one rank."""
    wanted = sorted(set(ranks))
    if len(wanted) == 1:
        return None
    return existing_group(wanted) or new_group(wanted, like)


def existing_group(ranks: Iterable[int]) -> Group | None:
    """A process group of these ranks with the default group's backends, if there is one."""
    wanted = sorted(ranks), dist.get_backend_config()
    for group in c10d._world.pg_map:
        found = sorted(ranks_of(group)), dist.get_backend_config(group)
        if found == wanted and group.group_desc != BACKGROUND:
            return group
    return None


class Unions:
    """Unions of process groups; all ranks request them in the same order."""

    def __init__(self) -> None:
        self._known: dict[frozenset[Group], Group | None] = {}

    def of(self, groups: Sequence[Group | None]) -> Group | None:
        """The union; None if it is one rank."""
        several = list(dict.fromkeys(g for g in groups if g is not None and group_size(g) > 1))
        if len(several) <= 1:
            return several[0] if several else None
        key = frozenset(several)
        if key not in self._known:
            self._known[key] = group_of_ranks(_reachable(several), several)
        return self._known[key]


def _reachable(groups: Sequence[Group]) -> set[int]:
    ranks = {dist.get_rank()}
    # One round per group: in a grid, each round adds a dimension, for all ranks.
    for _ in groups:
        for group in groups:
            told: list[set[int]] = [set() for _ in range(group_size(group))]
            dist.all_gather_object(told, ranks, group=group)
            ranks = set().union(*told)
    return ranks


class Replica(NamedTuple):
    """A replica's position among all."""

    number: int
    total: int


class ReplicaGroup:
    """The ranks that hold replicas, which copies share."""

    def __init__(self, replicas: ReplicasArgument) -> None:
        self.single = isinstance(replicas, str) and replicas == "single"  # the user's choice
        self.members = replicas if isinstance(replicas, Members) else None
        if self.single or self.members is not None:
            replicas = None
        elif isinstance(replicas, DeviceMesh):
            replicas = replicas.get_group()
        if not isinstance(replicas, Group | None):
            raise TypeError(
                f"replicas={replicas!r} must be None, 'single', a DeviceMesh like "
                f"mesh['replicate'] or a ProcessGroup like torch.distributed.group.WORLD"
            )
        self.process_group = replicas

    @property
    def size(self) -> int:
        """The number of replicas; 2, meaning several, if they come and go."""
        return group_size(self.process_group) if self.members is None else 2

    @property
    def replica(self) -> Replica:
        return Replica(0 if self.process_group is None else self.process_group.rank(), self.size)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicaGroup:
        return self
