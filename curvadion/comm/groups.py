"""Process groups over the ranks of several others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.distributed as dist

from curvadion.comm.collectives import group_size

Group = dist.ProcessGroup


def group_of_ranks(ranks: Iterable[int]) -> Group | None:
    """A process group of these global ranks: an existing one, else a new one; None for one rank.

    Only groups with the default group's backends are taken: programs that compute elsewhere often
    keep another over the same ranks for the CPU. Every rank of the group must call this at the
    same point.
    """
    wanted = sorted(set(ranks))
    if len(wanted) == 1:
        return None
    for group in dist.distributed_c10d._world.pg_map:
        if sorted(dist.get_process_group_ranks(group)) == wanted and (
            dist.get_backend_config(group) == dist.get_backend_config()
        ):
            return group
    created = dist.new_group(wanted, use_local_synchronization=True)
    if not isinstance(created, Group):
        raise RuntimeError(f"torch.distributed.new_group({wanted}) gave no group on a member")
    return created


def same_ranks(one: Group | None, other: Group | None) -> bool:
    """Whether two groups have the same members, though they may be two communicators."""
    if one is None or other is None:
        return one is other
    members = [set(dist.get_process_group_ranks(group)) for group in (one, other)]
    return one is other or members[0] == members[1]


class Unions:
    """Groups of all ranks that can be reached through some of the given groups.

    Building one asks the members whom they reach in turn (a replica's shards each know their own
    replica group only), so every rank must ask for the same unions in the same order. Answers are
    remembered.
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
    # As many rounds as groups: in a grid every round follows one dimension for all ranks.
    for _ in groups:
        for group in groups:
            told: list[set[int]] = [set() for _ in range(group_size(group))]
            dist.all_gather_object(told, ranks, group=group)
            ranks = set().union(*told)
    return ranks
