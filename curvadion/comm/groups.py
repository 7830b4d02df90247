"""Looking up process groups, and groups that span the ranks of several others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.distributed as dist

from curvadion.comm.collectives import group_size

Group = dist.ProcessGroup


def group_of_ranks(ranks: Iterable[int]) -> Group | None:
    """A process group of these global ranks; None for one rank.

    An existing group is used if it has the default group's backends. (Programs that compute on
    another device often keep a second group over the same ranks for the CPU.) Otherwise a group is
    created, so every rank of the group must call this function at the same point.

    Raises:
        RuntimeError: if torch gives this rank no group, because it is not one of ``ranks``.
    """
    wanted = sorted(set(ranks))
    if len(wanted) == 1:
        return None
    if (existing := existing_group(wanted)) is not None:
        return existing
    created = dist.new_group(wanted, use_local_synchronization=True)
    if not isinstance(created, Group):
        raise RuntimeError(f"torch.distributed.new_group({wanted}) gave no group on a member")
    return created


def existing_group(ranks: Iterable[int]) -> Group | None:
    """A process group of these global ranks that has the default group's backends, if any."""
    wanted = sorted(ranks)
    for group in dist.distributed_c10d._world.pg_map:
        if sorted(dist.get_process_group_ranks(group)) == wanted and (
            dist.get_backend_config(group) == dist.get_backend_config()
        ):
            return group
    return None


def same_ranks(one: Group | None, other: Group | None) -> bool:
    """Whether two groups have the same members. They may still be two communicators."""
    if one is None or other is None:
        return one is other
    members = [set(dist.get_process_group_ranks(group)) for group in (one, other)]
    return one is other or members[0] == members[1]


class Unions:
    """Looks up or creates groups of all ranks that can be reached through several groups.

    A rank knows its own groups only: each shard of a replica, for instance, has a replica group of
    its own. So the members tell each other which ranks they reach, which is collective. Every rank
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
            self._known[key] = group_of_ranks(_reachable(several))
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
