"""Groups that the package makes: by members alone, connected, not for ever; sums over them."""

import gc
import os
import threading
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from curvadion import RMMC, CodedGradients, CurvaDion, Dion, FixedPeriod, QuantizedAverage
from curvadion.comm import background
from curvadion.comm.collectives import SharedWork, mean_
from curvadion.comm.groups import Unions, existing_group, timeout_of
from support.runs import distributed
from support.runs.one_at_a_time import one_at_a_time
from support.runs.shards import shard

CPU = torch.device("cpu")


def period(**delay):
    return {"gate": FixedPeriod(3), "sync": QuantizedAverage(bits=2, **delay)}


def train(optimizer, replica, steps=6, sharding=lambda whole: whole):
    generator = torch.Generator().manual_seed(replica)
    for _ in range(steps):
        for x in optimizer.param_groups[0]["params"]:
            x.grad = sharding(torch.randn(16, 24, generator=generator))
        optimizer.step()
    optimizer.synchronize()


class Layout:
    """Two matrices in replicas of two shards each, or of one rank."""

    def __init__(self, shards):
        rank, world = dist.get_rank(), dist.get_world_size()
        self.replica, self.replicas, self.sharding = rank, dist.group.WORLD, lambda whole: whole
        if shards:
            mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
            self.replica, self.replicas = rank // 2, mesh["replicate"]
            self.sharding = lambda whole: shard(whole, "0", mesh["shard"])

    def train(self, kind=CurvaDion, **options):
        generator = torch.Generator().manual_seed(0)
        whole = [torch.randn(16, 24, generator=generator) / 10 for _ in range(2)]
        X = [torch.nn.Parameter(self.sharding(x)) for x in whole]
        train(kind(X, replicas=self.replicas, **options), self.replica, sharding=self.sharding)


def two_shardings():
    """The union of the two dimensions is not the world, whose last rank has no optimizer."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    if mesh.get_coordinate() is None:
        return
    sharding = lambda whole: shard(whole, "01", mesh)  # noqa: E731
    train(Dion([torch.nn.Parameter(sharding(torch.ones(16, 24)))]), 0, sharding=sharding)


def stages_of_a_pipeline():
    """The first has a delay and shares no moment with the second, which makes no group."""
    stage, replica = divmod(dist.get_rank(), 2)
    replicas = [dist.new_group([0, 1]), dist.new_group([2, 3])][stage]
    X = [torch.nn.Parameter(torch.ones(16, 24))]
    optimizer = Dion(X, replicas=replicas)
    if stage == 0:
        optimizer = CurvaDion(X, replicas=replicas, **period(delay=1))
    train(optimizer, replica)


LAYOUTS = {
    "shards, with a delay": lambda: Layout(shards=True).train(**period(delay=1)),
    "two shardings": two_shardings,
    "stages of a pipeline": stages_of_a_pipeline,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_in_unequal_numbers_of_groups_train_and_call_new_group_equally_often(layout):
    ranks = 5 if layout == "two shardings" else 4
    assert len({*distributed.run(ranks, calls_of_new_group, layout, timeout=30)}) == 1


def calls_of_new_group(rank, layout):
    """How often a rank calls torch's ``new_group``, where rank 0 is in one group more."""
    dist.new_group([0])
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as counting:
        LAYOUTS[layout]()
    return counting.call_count


@distributed.on_ranks(3)
def test_a_group_beside_the_training_is_never_found(rank):
    dist.new_group([0, 1], backend="cpu:gloo")  # nor one of another backend
    replicas = dist.new_group([0, 1])
    if rank < 2:
        beside = background.background_of(replicas, CPU)
        assert existing_group([0, 1]) is replicas
        dist.destroy_process_group(replicas)
        assert existing_group(dist.get_process_group_ranks(beside.group)) is None


@distributed.on_ranks(5)
def test_a_group_has_the_timeout_of_those_that_it_is_made_of(rank):
    """A union of rows and columns, which is not the world, and a group beside a row."""
    short, long = timedelta(minutes=2), timedelta(minutes=3)
    rows = [dist.new_group(ranks, timeout=short) for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks, timeout=long) for ranks in ([0, 2], [1, 3])]
    if rank < 4:
        row = rows[rank // 2]
        union = Unions().of([row, columns[rank % 2]])
        assert timeout_of([background.background_of(row, CPU).group]) == short
        assert timeout_of([union]) == long


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="Linux tells how many there are")
@distributed.on_ranks(2)
def test_groups_and_threads_end_with_the_group_that_the_user_destroys(rank):
    """Of trainings with a delay, one after the other, threads and open files are counted."""
    found = []
    for _ in range(10):
        replicas = dist.new_group([0, 1])
        X = [torch.nn.Parameter(torch.ones(16, 24))]
        optimizer = CurvaDion(X, replicas=replicas, **period(delay=1))
        train(optimizer, rank, steps=3)
        dist.destroy_process_group(replicas)
        del X, optimizer, replicas
        gc.collect()
        found.append([len(os.listdir(f"/proc/self/{each}")) for each in ("task", "fd")])
    for second, last in zip(found[1], found[-1], strict=True):
        assert last - second < 8  # one group is three threads and five files


@distributed.on_ranks(1, timeout=30)
def test_the_end_of_a_process_waits_for_exchanges_no_longer_than_their_timeout(rank):
    group, released = dist.new_group([0], timeout=timedelta(seconds=1)), threading.Event()
    exchange = background.background_of(group, CPU).begin("a lost exchange", released.wait)
    start = time.monotonic()
    background._finish_all()
    waited = time.monotonic() - start
    released.set()
    exchange.result()
    assert 0.9 < waited < 20


def end_with_a_background(rank):
    """Whether threads of gloo end with a group for exchanges, which torch's map holds."""
    dist.barrier()  # the first collective of a group starts its threads
    held = background.background_of(dist.group.WORLD, CPU)
    assert held.begin("an exchange", lambda: 1).result() == 1
    during, end = distributed.polling(os.getpid()), time.monotonic() + 20
    if not during:
        return None
    background._finish_all()
    while distributed.polling(os.getpid()) >= during and time.monotonic() < end:
        time.sleep(0.05)
    return distributed.polling(os.getpid()) < during


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="Linux tells how many there are")
def test_threads_of_gloo_end_before_the_interpreter_does():
    ended = distributed.run(2, end_with_a_background)
    if None in ended:
        pytest.skip("this torch does not name gloo's threads")
    assert ended == [True, True]


# What completes where collectives of one rank never overlap: all without a delay, and one delay
# whose replicas are one rank each. docs/slow-links.md says what depends on more.
PROGRAMS = {
    "always open": {"kind": Dion},
    "a gate that reads momenta": {"gate": RMMC(0.3)},
    "local steps": period(),
    "coded gradients": {"sync": CodedGradients(2)},
}
DELAYED = {
    "a delay": period(delay=1),
    "a delay, in fragments": period(delay=2, fragments=2),
}


def train_in_one_order(rank, shards):
    layout = Layout(shards)
    with one_at_a_time():
        for options in (PROGRAMS if shards else {**PROGRAMS, **DELAYED}).values():
            layout.train(**options)


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_does_not_depend_on_collectives_that_overlap(ranks):
    distributed.run(ranks, train_in_one_order, ranks == 4)


@distributed.on_ranks(4)
def test_sums_that_ranks_share_are_wider_than_summands(rank):
    shared = SharedWork([1], dist.group.WORLD)
    part = torch.tensor([60000.0, 1.0 if rank else 2048.0]).half()
    found = [x.tolist() for x in shared.sums([part], torch.float32)]
    assert found == ([] if rank else [[240000.0, 2051.0]])
    mean_([part], dist.group.WORLD)
    assert part.tolist() == [60000.0, 513.0]  # of 512.75
