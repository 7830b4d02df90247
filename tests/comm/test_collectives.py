"""Sums over ranks reach the ranks that work on them."""

from __future__ import annotations

import torch
import torch.distributed as dist

import distributed
from curvadion.comm.collectives import SharedWork


def sums_beyond_half_precision(rank):
    shared = SharedWork([1], dist.group.WORLD)
    return shared.sums([torch.tensor([60000.0, 1.0 if rank else 2048.0]).half()], torch.float32)


def test_sums_are_wider_than_summands():
    (found,), *others = distributed.run(4, sums_beyond_half_precision)
    assert found.tolist() == [240000.0, 2051.0] and others == [[]] * 3
