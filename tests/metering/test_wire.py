import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import distributed
from curvadion.metering.wire import Reading, WireMeter


def ones(*shape):
    return torch.ones(*shape)


def ones_per_rank(n, size):
    return [ones(n) for _ in range(size)]


def send_and_receive(rank, size):
    work = dist.isend(ones(5), (rank + 1) % size)
    dist.recv(ones(5), (rank - 1) % size)
    work.wait()


def coalesce(rank, size):
    with dist._coalescing_manager():
        dist.all_reduce(ones(10))
        dist.all_reduce(ones(5))


def uneven_all_to_all(rank, size):
    splits = [peer + 1 for peer in range(size)]
    received = ones(size * (rank + 1))
    dist.all_to_all_single(received, ones(sum(splits)), [rank + 1] * size, splits)


def wait(tensors):
    for tensor in tensors if isinstance(tensors, list) else [tensors]:
        functional.wait_tensor(tensor)


def redistribute(placement, *, to):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    DTensor.from_local(ones(4, 8), mesh, [placement]).redistribute(mesh, [to]).to_local()


# name: (what to run on each rank, what it must count in a group of n ranks)
CASES = {
    "all_reduce": (
        lambda rank, n: dist.all_reduce(ones(10)),
        lambda n: {"all_reduce": (1, 40, 40)},
    ),
    "all_reduce coalesced": (coalesce, lambda n: {"all_reduce": (1, 60, 60)}),
    "broadcast": (
        lambda rank, n: dist.broadcast(ones(10), 0),
        lambda n: {"broadcast": (1, 40, 40)},
    ),
    "all_gather_into_tensor": (
        lambda rank, n: dist.all_gather_into_tensor(ones(10 * n), ones(10)),
        lambda n: {"all_gather": (1, 40 * n, 40 * n)},
    ),
    "reduce_scatter_tensor": (
        lambda rank, n: dist.reduce_scatter_tensor(ones(10), ones(10 * n)),
        lambda n: {"reduce_scatter": (1, 40 * n, 40 * n)},
    ),
    "all_to_all": (
        lambda rank, n: dist.all_to_all(ones_per_rank(10, n), ones_per_rank(10, n)),
        lambda n: {"all_to_all": (1, 40 * n, 40 * n)},
    ),
    "all_to_all_single uneven": (
        uneven_all_to_all,
        lambda n: {"all_to_all": (1, 2 * n * (n + 1), 2 * n * (n + 1))},
    ),
    "gather": (
        lambda rank, n: dist.gather(ones(10), ones_per_rank(10, n) if rank == 0 else None),
        lambda n: {"gather": (1, 40 * n, 40 * n)},
    ),
    "send": (send_and_receive, lambda n: {"send": (1, 20, 20)}),
    "barrier": (lambda rank, n: dist.barrier(), lambda n: {"barrier": (1, 0, 0)}),
    "functional all_reduce": (
        lambda rank, n: wait(functional.all_reduce(ones(10), "sum", dist.group.WORLD)),
        lambda n: {"all_reduce": (1, 40, 40)},
    ),
    "functional reduce_scatter coalesced": (
        lambda rank, n: wait(
            functional.reduce_scatter_tensor_coalesced(
                [ones(2 * n), ones(3 * n)], "sum", [0, 0], dist.group.WORLD
            )
        ),
        lambda n: {"reduce_scatter": (1, 20 * n, 20 * n)},
    ),
    "DTensor gathers": (
        lambda rank, n: redistribute(Shard(0), to=Replicate()),
        lambda n: {"all_gather": (1, 128 * n, 128 * n)},
    ),
    "DTensor reduces": (
        lambda rank, n: redistribute(Partial(), to=Replicate()),
        lambda n: {"all_reduce": (1, 128, 128)},
    ),
}
if torch.__version__ < "2.13":
    del CASES["all_to_all"]  # gloo has none
# What a rank of three sends of the bytes that are counted, where it is not two thirds.
SENT = {"all_reduce": 4 / 3, "gather": 2 / 9, "send": 1, "barrier": 0}


def tuples(meter):
    """{collective: (calls, bytes, largest)}, where no collective ran on two groups."""
    records = {
        collective: (count.calls, count.bytes, count.largest)
        for (_, collective), count in meter.records.items()
    }
    assert len(records) == len(meter.records)
    return records


def count_cases(rank):
    counts = {}
    for name, (run, _) in CASES.items():
        with WireMeter() as meter:
            run(rank, dist.get_world_size())
        counts[name] = tuples(meter)
        for (_, collective), count in meter.records.items():
            assert count.sent == pytest.approx(SENT.get(collective, 2 / 3) * count.bytes)
    return counts


@functools.cache
def counted():
    """What each of three ranks counts of each case."""
    return distributed.run(3, count_cases)


@pytest.mark.parametrize("name", CASES)
def test_counts_exactly(name):
    expected = CASES[name][1](3)
    assert [counts[name] for counts in counted()] == [expected] * 3


# The meter's life


def reduce(n=10):
    dist.all_reduce(ones(n))


def nest(rank):
    with WireMeter() as outer:
        reduce()
        with WireMeter() as inner:
            reduce()
    reduce()
    return outer.total_calls, inner.total_calls


def test_nested_meters_both_count():
    assert distributed.run(2, nest) == [(2, 1)] * 2


def read_meters(rank):
    reading = Reading()
    answers = [reading.take()]
    with WireMeter():
        reduce()
        answers.append(reading.take())
        with WireMeter():
            reduce(2)
            answers.append(reading.take())
        answers.append(reading.take())
    reduce()
    answers.append(reading.take())
    with WireMeter():
        answers.append(reading.take())
        reduce()
        answers.append(reading.take())
    return answers


def test_readings_go_on_whichever_meters_come_and_go():
    bytes_read = [None, 40, 8, 0, None, 0, 40]
    expected = [None if n is None else {"0, 1": n} if n else {} for n in bytes_read]
    assert distributed.run(2, read_meters) == [expected] * 2


def of_groups(rank):
    """A meter's counts between replicas of one, two and four ranks, and a reading."""
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    reading = Reading()
    with WireMeter() as meter:
        dist.all_reduce(ones(8), group=inside)
        dist.all_reduce(ones(2), group=across)
        dist.all_reduce(ones(1))
        counts = [meter.between(size) for size in (1, 2, 4)]
        return [(count.calls, count.bytes, count.sent) for count in counts], reading.take()


def test_bytes_inside_replicas_are_told_from_those_between():
    for rank, (counts, read) in enumerate(distributed.run(4, of_groups)):
        assert counts == [(3, 44, 46.0), (2, 12, 14.0), (0, 0, 0.0)]
        here, there = f"{rank // 2 * 2}, {rank // 2 * 2 + 1}", f"{rank % 2}, {rank % 2 + 2}"
        assert read == {here: 32, there: 8, "0-3": 4}
