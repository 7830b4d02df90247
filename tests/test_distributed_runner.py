import os
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from support.runs import distributed


def identity(rank):
    return os.getpid(), dist.get_rank(), dist.get_world_size(), torch.get_num_threads()


def raise_on(culprit, rank):
    if rank == culprit:
        raise ValueError(f"rank {rank} is unhappy")
    dist.barrier()


def fail_on(culprit, rank):
    found = torch.tensor(2.5 + rank)
    assert rank != culprit
    assert found == 2.5


def die_on(culprit, rank):
    if rank == culprit:
        os._exit(7)
    dist.barrier()


def hang_on(culprit, rank):
    if rank == culprit:
        linger()


def linger():
    time.sleep(600)


def reduce_once_more_on(culprit, rank):
    works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(1 + (rank == culprit))]
    works[0].wait()


def test_workers_are_reused_over_world_sizes():
    few = [pid for pid, *_ in distributed.run(2, identity)]
    many = [pid for pid, *_ in distributed.run(4, identity)]
    again = [pid for pid, *_ in distributed.run(2, identity)]
    assert many[:2] == few == again
    assert len({*many, os.getpid()}) == 5
    assert distributed.run(2, identity) == [(pid, rank, 2, 1) for rank, pid in enumerate(few)]


@pytest.mark.parametrize(
    ("disaster", "seconds", "said"),
    [
        (raise_on, 30, ["rank 1 raised", "ValueError: rank 1 is unhappy", "in raise_on"]),
        (fail_on, 30, ["assert rank != culprit", "found = tensor(3.5"]),
        (die_on, 30, ["rank 1 died with exit code 7"]),
        (hang_on, 2, ["1 of 2 ranks failed", "rank 1 did not answer within 2 s", "in linger"]),
    ],
)
def test_a_failure_is_named_and_followed_by_new_workers(disaster, seconds, said):
    before = {pid for pid, *_ in distributed.run(2, identity)}
    with pytest.raises(distributed.RankFailure) as failure:
        distributed.run(2, partial(disaster, 1), timeout=seconds)
    assert all(text in str(failure.value) for text in said)
    after = {pid for pid, *_ in distributed.run(2, identity)}
    assert not before & after


def test_unequal_numbers_of_collectives_are_a_failure_of_the_same_call(monkeypatch):
    monkeypatch.setattr(distributed, "CLEAN_UP", 1.0)
    with pytest.raises(distributed.RankFailure, match="same collectives"):
        distributed.run(2, partial(reduce_once_more_on, 1))
