import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import distributed


def total(rank, x):
    tensor = torch.full((2,), x * (rank + 1), requires_grad=True)
    with torch.no_grad():
        dist.all_reduce(tensor)
    return tensor


def identity(rank):
    return os.getpid(), dist.get_rank(), dist.get_world_size(), torch.get_num_threads()


def move_shards(rank):
    """What fills the caches of DTensor that hold meshes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    x = distribute_tensor(torch.ones(4, 6), mesh, [Replicate(), Shard(0)])
    return (x @ x.mT).redistribute(mesh, [Shard(0), Shard(1)]).full_tensor()


def polling(rank):
    return distributed.polling(os.getpid())


def raise_on(culprit, rank):
    if rank == culprit:
        raise ValueError(f"rank {rank} is unhappy")
    dist.barrier()


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


@pytest.mark.parametrize("world_size", [2, 4])
def test_returns_what_each_rank_computed(world_size):
    results = distributed.run(world_size, total, 2.0)
    expected = torch.full((2,), 2.0 * sum(range(1, world_size + 1)))
    assert len(results) == world_size
    for tensor in results:
        assert torch.equal(tensor.detach(), expected)
        assert not tensor.is_shared()


def test_workers_are_reused_over_world_sizes():
    few = [pid for pid, *_ in distributed.run(2, identity)]
    many = [pid for pid, *_ in distributed.run(4, identity)]
    again = [pid for pid, *_ in distributed.run(2, identity)]
    assert many[:2] == few == again
    assert len({*many, os.getpid()}) == 5


lists_threads = pytest.mark.skipif(
    not Path("/proc/self/task").is_dir(), reason="needs Linux's list of threads"
)


@lists_threads
def test_threads_of_groups_end_with_the_call():
    with distributed.own_workers():
        assert distributed.run(4, polling) == [1] * 4
        for _ in range(2):
            distributed.run(4, move_shards)
        assert distributed.run(4, polling) == [1] * 4


def test_raising_rank_is_named_with_its_traceback():
    start = time.monotonic()
    with pytest.raises(distributed.RankFailure) as failure:
        distributed.run(3, partial(raise_on, 1))
    assert time.monotonic() - start < 15
    text = str(failure.value)
    assert "rank 1 raised" in text
    assert "ValueError: rank 1 is unhappy" in text
    assert "in raise_on" in text


def test_hanging_rank_is_named_and_its_place_shown():
    with pytest.raises(distributed.RankFailure) as failure:
        distributed.run(3, partial(hang_on, 2), timeout=2)
    text = str(failure.value)
    assert "1 of 3 ranks failed" in text
    assert "rank 2 did not answer within 2 s" in text
    assert "in linger" in text


def test_unequal_numbers_of_collectives_are_a_failure_of_the_same_call(monkeypatch):
    monkeypatch.setattr(distributed, "CLEAN_UP", 1.0)
    with pytest.raises(distributed.RankFailure, match="same collectives"):
        distributed.run(2, partial(reduce_once_more_on, 1))


@pytest.mark.parametrize("disaster", [raise_on, die_on, hang_on])
def test_failure_is_followed_by_new_workers(disaster):
    before = {pid for pid, *_ in distributed.run(2, identity)}
    with pytest.raises(distributed.RankFailure):
        distributed.run(2, partial(disaster, 1), timeout=2)
    after = {pid for pid, *_ in distributed.run(2, identity)}
    assert not before & after
