"""Work on vectors that are sums over ranks; each is worked on by one of the ranks.

All vectors form one line, those that one rank works on next to each other. Each rank also has one
of as many equal shares of the line, wherever this cuts through vectors:

    summands of the whole line        each rank sums its share
    shares of the sums                each rank has the vectors that it works on
    what it has made of these         each rank has its share of the results
    shares of the results             all ranks have all results

However many ranks there are, one receives, and sends, the line twice and its own vectors once more,
or less. No buffer is longer than the line but for one number a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.comm.collectives import all_gather, divide


class SharedWork:
    """Which rank of a group works on which vector (this one on ``mine``), and the ways there.

    costs: what the work on each vector takes.
    """

    def __init__(self, costs: Sequence[int], group: dist.ProcessGroup) -> None:
        self._group = group
        self._by_rank: list[list[int]] = [[] for _ in range(group.size())]
        for i, rank in enumerate(divide(costs, group.size())):
            self._by_rank[rank].append(i)
        self._order = [i for owned in self._by_rank for i in owned]
        self.mine = self._by_rank[group.rank()]

    def sums(self, summands: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """The sums over the ranks, taken in ``dtype``, of the vectors in ``mine``; collective."""
        sizes = [len(summand) for summand in summands]
        length, to, of = self._crossings(sizes)
        rest = summands[0].new_zeros(length * self._group.size() - sum(sizes))
        line = torch.cat([*(summands[i] for i in self._order), rest])
        received = torch.empty_like(line)
        dist.all_to_all_single(received, line, group=self._group)
        share = received.view(self._group.size(), length).sum(0, dtype=dtype)
        own = share.new_empty(sum(of))
        dist.all_to_all_single(own, share[: sum(to)], of, to, group=self._group)
        return list(own.split([sizes[i] for i in self.mine]))

    def results(self, own: Sequence[Tensor], sizes: Sequence[int], like: Tensor) -> list[Tensor]:
        """All results of the given sizes, on all ranks; own: those of ``mine``. Collective."""
        length, of, to = self._crossings(sizes)
        share = like.new_empty(length)
        sent = torch.cat([like.new_empty(0), *own])
        dist.all_to_all_single(share[: sum(of)], sent, of, to, group=self._group)
        line = all_gather(share, self._group)[: sum(sizes)]
        parts = line.split([sizes[i] for i in self._order])
        by_vector = dict(zip(self._order, parts, strict=True))
        return [by_vector[i] for i in range(len(sizes))]

    def _crossings(self, sizes: Sequence[int]) -> tuple[int, list[int], list[int]]:
        """How shares cross the vectors that ranks work on.

        The length of a share; how many numbers of this rank's share are of the vectors of each
        rank; how many numbers of this rank's vectors are in the share of each.
        """
        ends = accumulate((sum(sizes[i] for i in owned) for owned in self._by_rank), initial=0)
        owned = [range(*span) for span in pairwise(ends)]
        length, rank = -(-sum(sizes) // len(owned)), self._group.rank()
        shares = [range(i * length, (i + 1) * length) for i in range(len(owned))]
        return (
            length,
            [_common(shares[rank], of_rank) for of_rank in owned],
            [_common(share, owned[rank]) for share in shares],
        )


def _common(one: range, other: range) -> int:
    return max(0, min(one.stop, other.stop) - max(one.start, other.start))
