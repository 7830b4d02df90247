"""Process groups of any ranks, and unions of groups."""

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
ranks_of = dist.get_process_group_ranks

BACKGROUND = "curvadion background"  # the description of background groups
# By default group, how often a group of some ranks was made; its members count equally.
_groups_made: weakref.WeakKeyDictionary[Group, Counter[tuple[int, ...]]] = (
    weakref.WeakKeyDictionary()
)


def count_of_ranks() -> int:
    """How many ranks the default process group has; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_first_rank() -> bool:
    """Whether this is rank 0 of the default process group, or the only process."""
    return count_of_ranks() == 1 or dist.get_rank() == 0


def new_group(
    ranks: Iterable[int],
    like: Sequence[Group] = (),
    *,
    backend: str | None = None,
    description: str = "curvadion",
) -> Group:
    """Create a process group of these global ranks, which all call this at the same point.

    Ranks outside the group need not call this, unlike ``dist.new_group``: some ranks have no
    optimizer, such as those of another pipeline stage.

    Args:
        ranks: the members, of which this rank is one.
        like: groups; the new one has the longest of their timeouts. (): the default group.
        backend: of the group; None: the default group's.
        description: of the group, for torch's logs.
    """
    # dist.new_group does not serve here, for three reasons:
    # - By default it must be called by all ranks of the world, because it names a group by a
    #   count of the calls, and members find each other by the name.
    # - With use_local_synchronization only members call it. But the name is then a hash of
    #   the ranks and of how many groups this process is in. A member that is in one group
    #   more than another one looks for another name, and they wait for each other for ever.
    # - If init_process_group got a device_id, both make a NCCL group by splitting the world's
    #   communicator, and all ranks of the world must call that split.
    # So this calls what dist.new_group calls, with a name that all members know: their ranks,
    # and how many groups of exactly these ranks there were. Without a bound device torch does
    # not split.
    members = tuple(sorted(ranks))
    world = dist.group.WORLD
    assert world is not None
    groups_made = _groups_made.setdefault(world, Counter())
    groups_made[members] += 1
    digest = hashlib.sha1(repr(members).encode(), usedforsecurity=False).hexdigest()
    store = c10d._world.pg_map[world][1]  # through which members find each other
    make: Any = c10d._new_process_group_helper
    bound_device = world.bound_device_id
    world.bound_device_id = None
    group: Group
    try:
        group, _ = make(
            len(members),
            members.index(dist.get_rank()),
            list(members),
            dist.Backend(backend or dist.get_backend()),
            store,
            f"curvadion_{digest}_{groups_made[members]}",
            timeout=timeout_of(like or [world]),
            group_desc=description,
        )
    finally:
        world.bound_device_id = bound_device
    # dist.new_group registers the ranks of its groups likewise.
    c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(members)}
    return group


def timeout_of(groups: Sequence[Group]) -> timedelta:
    """The longest of the groups' timeouts; torch's default if backends tell none."""
    timeouts = []
    for group in groups:
        for device in group._device_types:
            options = getattr(group._get_backend(device), "options", None)
            timeout = getattr(options, "_timeout", None)
            if timeout is not None:
                timeouts.append(timeout)
    return max(timeouts, default=c10d.default_pg_timeout)


def group_of_ranks(ranks: Iterable[int], like: Sequence[Group] = ()) -> Group | None:
    """An existing or a new group of these global ranks; collective; None for one rank.

    A new group has the longest timeout of the groups in ``like``, as in :func:`new_group`.
    """
    members = sorted(set(ranks))
    if len(members) == 1:
        return None
    return existing_group(members) or new_group(members, like)


def existing_group(ranks: Iterable[int]) -> Group | None:
    """A process group of these ranks with the default group's backends, if there is one.

    It is never the group of a :class:`~curvadion.comm.background.Background`.
    """
    members = sorted(ranks)
    backends = dist.get_backend_config()
    for group in c10d._world.pg_map:
        same_ranks = sorted(ranks_of(group)) == members
        same_backends = dist.get_backend_config(group) == backends
        if same_ranks and same_backends and group.group_desc != BACKGROUND:
            return group
    return None


class Unions:
    """Unions of process groups; all ranks request them in the same order."""

    def __init__(self) -> None:
        self._known: dict[frozenset[Group], Group | None] = {}

    def of(self, groups: Sequence[Group | None]) -> Group | None:
        """The union; None if it is one rank. Collective over the union."""
        # A dict drops repetitions and keeps the order, in which ranks communicate below.
        distinct = dict.fromkeys(g for g in groups if g is not None and group_size(g) > 1)
        several = list(distinct)
        if not several:
            return None
        if len(several) == 1:
            return several[0]
        key = frozenset(several)
        if key not in self._known:
            self._known[key] = group_of_ranks(_reachable(several), several)
        return self._known[key]


def _reachable(groups: Sequence[Group]) -> set[int]:
    """The ranks that this one reaches through groups of these kinds; collective.

    Each rank is in one group of a kind, such as its row and its column of a grid.
    """
    reached = {dist.get_rank()}
    # One round per group: in a grid, each round adds a dimension, for all ranks.
    for _ in groups:
        for group in groups:
            reached_by_rank: list[set[int]] = [set() for _ in range(group_size(group))]
            dist.all_gather_object(reached_by_rank, reached, group=group)
            reached = set().union(*reached_by_rank)
    return reached
