"""Sums over ranks reach the ranks that work on them, and what these make of them reaches all."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import distributed
from curvadion.comm.shared_work import SharedWork


def vectors_of(rank, sizes):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(-9, 9, (size,), generator=generator).float() for size in sizes]


def worked_on(rank, sizes, more):
    """The sums of this rank's vectors, by vector, and twice the sums as all ranks hear of them."""
    shared = SharedWork([size**2 for size in sizes], dist.group.WORLD)
    sums = shared.sums(vectors_of(rank, sizes), torch.float64)
    own = [torch.cat((2 * each, each.new_ones(more))).float() for each in sums]
    results = shared.results(own, [size + more for size in sizes], torch.empty(0))
    return dict(zip(shared.mine, sums, strict=True)), results


@settings(max_examples=10, deadline=None)
@given(
    ranks=st.integers(1, 4), sizes=st.lists(st.integers(0, 20), min_size=1), more=st.integers(0, 2)
)
def test_every_vector_is_worked_on_once_and_known_to_all(ranks, sizes, more):
    wanted = [sum(each) for each in zip(*(vectors_of(r, sizes) for r in range(ranks)), strict=True)]
    seen = []
    for sums, results in distributed.run(ranks, worked_on, sizes, more):
        seen += sums
        for i, found in sums.items():
            assert found.dtype == torch.float64 and torch.equal(found.float(), wanted[i])
        for result, each in zip(results, wanted, strict=True):
            assert torch.equal(result, torch.cat((2 * each, torch.ones(more))))
    assert sorted(seen) == list(range(len(sizes)))


def sums_of_small_and_large(rank):
    shared = SharedWork([1], dist.group.WORLD)
    return shared.sums([torch.tensor([2048.0, 1.0]).half()], torch.float32)


def test_sums_are_wider_than_summands():
    (found,), *others = distributed.run(4, sums_of_small_and_large)
    assert found.tolist() == [8192.0, 4.0] and others == [[]] * 3
