"""Looking up process groups, and groups that span the ranks of several others."""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from curvadion.comm.collectives import group_size

Group = dist.ProcessGroup

BACKGROUND = "curvadion background"  # the description of groups that a thread of ours uses
# By default group: how often a group of some ranks was made. Their members count the same.
_made: weakref.WeakKeyDictionary[Group, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()


def new_group(
    ranks: Iterable[int],
    like: Sequence[Group] = (),
    *,
    backend: str | None = None,
    description: str = "curvadion",
) -> Group:
    """A new process group of these global ranks, which must all call this at the same point.

    like: groups whose longest timeout it gets; by default the default group. backend: as of torch's
    ``new_group``; None for the default group's.
    """
    # dist.new_group is a call of all ranks of the world, of which some have no optimizer, or step
    # at other moments. With use_local_synchronization=True members suffice, but derive the group's
    # name from the number of groups that each is in. With init_process_group(device_id=...) both
    # split the world's NCCL communicator, a call of all ranks again. So the members make the group
    # under a name that only their calls decide, with a communicator of its own.
    members = tuple(sorted(ranks))
    if dist.get_rank() not in members:
        raise ValueError(f"rank {dist.get_rank()} is not one of the group's ranks {members}")
    world = dist.group.WORLD
    assert world is not None
    made = _made.setdefault(world, Counter())
    made[members] += 1
    digest = hashlib.sha1(repr(members).encode(), usedforsecurity=False).hexdigest()
    store = c10d._world.pg_map[world][1]
    make: Any = c10d._new_process_group_helper
    bound, world.bound_device_id = world.bound_device_id, None  # else the helper splits
    group: Group
    try:
        group, _ = make(
            len(members),
            members.index(dist.get_rank()),
            list(members),
            dist.Backend(backend or dist.get_backend()),
            store,
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
    """A process group of these global ranks, an existing one or a new one; None for one rank.

    Every rank of the group must call this function at the same point. like: as for new_group.
    """
    wanted = sorted(set(ranks))
    if len(wanted) == 1:
        return None
    return existing_group(wanted) or new_group(wanted, like)


def existing_group(ranks: Iterable[int]) -> Group | None:
    """A process group of these global ranks that has the default group's backends, if any."""
    wanted = sorted(ranks)
    for group in c10d._world.pg_map:
        if (
            sorted(dist.get_process_group_ranks(group)) == wanted
            and dist.get_backend_config(group) == dist.get_backend_config()
            and group.group_desc != BACKGROUND
        ):
            return group
    return None


class Unions:
    """Looks up or creates groups of all ranks that can be reached through several groups.

    A rank knows its own groups only, so members tell each other which ranks they reach. Every rank
    must ask for the same unions in the same order. Answers are remembered.
    """

    def __init__(self) -> None:
        self._known: dict[frozenset[Group], Group | None] = {}

    def of(self, groups: Sequence[Group | None]) -> Group | None:
        """The union; None if no group has more than one rank."""
        several = list(dict.fromkeys(g for g in groups if g is not None and group_size(g) > 1))
        if len(several) <= 1:
            return several[0] if several else None
        key = frozenset(several)
        if key not in self._known:
            self._known[key] = group_of_ranks(_reachable(several), several)
        return self._known[key]


def _reachable(groups: Sequence[Group]) -> set[int]:
    ranks = {dist.get_rank()}
    # One round for each group: in a grid, each round adds one dimension, for all ranks.
    for _ in groups:
        for group in groups:
            told: list[set[int]] = [set() for _ in range(group_size(group))]
            dist.all_gather_object(told, ranks, group=group)
            ranks = set().union(*told)
    return ranks
