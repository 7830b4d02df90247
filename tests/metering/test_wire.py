import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from curvadion import Dion
from curvadion.metering import wire
from curvadion.metering.wire import Reading, WireMeter
from support.runs import distributed


def ones(*shape):
    return torch.ones(*shape)


def three(n):
    return [ones(n) for _ in range(3)]


def send_and_receive(rank):
    work = dist.isend(ones(5), (rank + 1) % 3)
    dist.recv(ones(5), (rank - 1) % 3)
    work.wait()


def coalesce(rank):
    with dist._coalescing_manager():
        dist.all_reduce(ones(10))
        dist.all_reduce(ones(5))


def uneven_all_to_all(rank):
    splits = [1, 2, 3]
    dist.all_to_all_single(ones(3 * (rank + 1)), ones(6), [rank + 1] * 3, splits)


def reduce_scatter_coalesced(rank):
    parts = [ones(6), ones(9)]
    wait(functional.reduce_scatter_tensor_coalesced(parts, "sum", [0, 0], dist.group.WORLD))


def wait(tensors):
    for tensor in tensors if isinstance(tensors, list) else [tensors]:
        functional.wait_tensor(tensor)


def redistribute(placement, *, to):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    DTensor.from_local(ones(4, 8), mesh, [placement]).redistribute(mesh, [to]).to_local()


# By name: what each rank does, which collective it is, and its bytes in a group of three ranks.
CASES = {
    "all_reduce": (lambda rank: dist.all_reduce(ones(10)), "all_reduce", 40),
    "all_reduce coalesced": (coalesce, "all_reduce", 60),
    "broadcast": (lambda rank: dist.broadcast(ones(10), 0), "broadcast", 40),
    "all_gather_into_tensor": (
        lambda rank: dist.all_gather_into_tensor(ones(30), ones(10)),
        *("all_gather", 120),
    ),
    "reduce_scatter_tensor": (
        lambda rank: dist.reduce_scatter_tensor(ones(10), ones(30)),
        *("reduce_scatter", 120),
    ),
    "all_to_all": (lambda rank: dist.all_to_all(three(10), three(10)), "all_to_all", 120),
    "all_to_all_single uneven": (uneven_all_to_all, "all_to_all", 24),
    "gather": (
        lambda rank: dist.gather(ones(10), three(10) if rank == 0 else None),
        *("gather", 120),
    ),
    "send": (send_and_receive, "send", 20),
    "barrier": (lambda rank: dist.barrier(), "barrier", 0),
    "functional all_reduce": (
        lambda rank: wait(functional.all_reduce(ones(10), "sum", dist.group.WORLD)),
        *("all_reduce", 40),
    ),
    "functional reduce_scatter coalesced": (reduce_scatter_coalesced, "reduce_scatter", 60),
    "DTensor gathers": (
        lambda rank: redistribute(Shard(0), to=Replicate()),
        *("all_gather", 384),
    ),
    "DTensor reduces": (
        lambda rank: redistribute(Partial(), to=Replicate()),
        *("all_reduce", 128),
    ),
}
if torch.__version__ < "2.13":
    del CASES["all_to_all"]  # gloo has none
# What a rank of three sends of the bytes that are counted, where it is not two thirds.
SENT = {"all_reduce": 4 / 3, "gather": 2 / 9, "send": 1, "barrier": 0}


@functools.cache
def counted():
    return distributed.run(3, count_cases)


def count_cases(rank):
    counts = {}
    for name, (run, *_) in CASES.items():
        with WireMeter() as meter:
            run(rank)
        counts[name] = [(how, n.calls, n.bytes, n.largest) for (_, how), n in meter.records.items()]
        for (_, collective), count in meter.records.items():
            assert count.sent == pytest.approx(SENT.get(collective, 2 / 3) * count.bytes)
    return counts


@pytest.mark.parametrize("name", CASES)
def test_counts_exactly(name):
    _, collective, size = CASES[name]
    assert [counts[name] for counts in counted()] == [[(collective, 1, size, size)]] * 3


# The meter's life


def reduce(n=10):
    dist.all_reduce(ones(n))


@distributed.on_ranks(2)
def test_nested_meters_both_count(rank):
    with WireMeter() as outer:
        reduce()
        with WireMeter() as inner:
            reduce()
    reduce()
    assert (outer.total.calls, inner.total.calls) == (2, 1)


@distributed.on_ranks(2)
def test_readings_go_on_whichever_meters_come_and_go(rank):
    reading = Reading()
    assert reading.take() is None
    with WireMeter() as meter:
        reduce()
        assert reading.take() == {"0, 1": 40}
        with meter.paused():
            reduce()
        with WireMeter():
            reduce(2)
            assert reading.take() == {"0, 1": 8}
        assert reading.take() == {}
    reduce()
    assert reading.take() is None
    with WireMeter():
        assert reading.take() == {}
        reduce()
        assert reading.take() == {"0, 1": 40}


@distributed.on_ranks(4)
def test_bytes_inside_replicas_are_told_from_those_between(rank):
    """A meter's counts between replicas of one, two and four ranks, and a reading."""
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    reading = Reading()
    with WireMeter() as meter:
        dist.all_reduce(ones(8), group=inside)
        dist.all_reduce(ones(2), group=across)
        dist.all_reduce(ones(1))
        counts = [meter.between(size) for size in (1, 2, 4)]
        read = reading.take()
    dist.destroy_process_group(inside)  # whose ranks nobody knows any more
    told = [(count.calls, count.bytes, count.sent) for count in (*counts, meter.between(4))]
    assert told == [(3, 44, 46.0), (2, 12, 14.0), (0, 0, 0.0), (1, 32, 32.0)]
    here, there = f"{rank // 2 * 2}, {rank // 2 * 2 + 1}", f"{rank % 2}, {rank % 2 + 2}"
    assert read == {here: 32, there: 8, "0-3": 4}


class Optimizer(SimpleNamespace):
    """What a share asks an optimizer for; one that can be told from others."""

    __hash__ = object.__hash__


@distributed.on_ranks(4)
def test_a_share_is_of_what_an_all_reduce_of_this_ranks_shards_sends(rank):
    """Two replicas of two ranks, with a sharded parameter, a whole one and one that is frozen."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sharded = DTensor.from_local(ones(3, 4), mesh["shard"], [Shard(0)]).requires_grad_()
    frozen = ones(1000)
    optimizer = Optimizer(
        replicas=SimpleNamespace(process_group=mesh.get_group("replicate"), fixed=True),
        param_groups=[{"params": [sharded, frozen]}, {"params": [ones(8).requires_grad_()]}],
    )
    with WireMeter() as meter:
        dist.all_reduce(ones(100), group=mesh.get_group("shard"))
        dist.all_reduce(ones(4), group=mesh.get_group("replicate"))
        dist.all_reduce(ones(2))
        with pytest.raises(ValueError, match="optimizer=Optimizer has taken no step"):
            meter.share(optimizer)
        with meter.paused():
            wire.count_step(optimizer)
        for _ in range(5):
            wire.count_step(optimizer)
    wire.count_step(optimizer)
    # Two ranks send the payload of an all-reduce, four send 3 / 2 of it.
    sent = 4 * 4 + 1.5 * 4 * 2
    dense = 4 * (12 + 8)
    assert meter.share(optimizer) == pytest.approx(sent / (5 * dense))
    optimizer.replicas.process_group = None
    with pytest.raises(ValueError, match="replicas="):
        meter.share(optimizer)


def test_one_process_sends_nothing():
    alone = Dion([torch.nn.Parameter(torch.ones(2, 2))], replicas="single")
    with WireMeter() as meter, pytest.warns(UserWarning, match="No parameter has a gradient"):
        alone.step()
    assert meter.share(alone) == 0.0
    elastic = SimpleNamespace(process_group=None, fixed=False)
    with pytest.raises(ValueError, match="no fixed group of several replicas"):
        meter.share(Optimizer(replicas=elastic, param_groups=alone.param_groups))
