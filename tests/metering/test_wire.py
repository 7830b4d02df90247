import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import distributed
from curvadion.metering.wire import Reading, WireCount, WireMeter


@pytest.fixture(autouse=True, scope="module")
def workers_without_kernels():
    """An exchange in background leaves the meter's kernels in a worker for good."""
    distributed.shutdown()


F32 = 4


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


def sparse(rank, size):
    dist.all_reduce(torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (8,), check_invariants=True))


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


def on_all(call):
    return lambda rank, size: call(size)


# name: (what to run on each rank, what it must count in a group of n ranks)
CASES = {
    "all_reduce": (
        on_all(lambda n: dist.all_reduce(ones(10))),
        lambda n: {"all_reduce": (1, 40, 40)},
    ),
    "all_reduce sparse": (sparse, lambda n: {"all_reduce": (1, 2 * 8 + 2 * F32, 24)}),
    "all_reduce coalesced": (coalesce, lambda n: {"all_reduce": (1, 60, 60)}),
    "broadcast": (
        on_all(lambda n: dist.broadcast(ones(10), 0)),
        lambda n: {"broadcast": (1, 40, 40)},
    ),
    "all_gather_into_tensor": (
        on_all(lambda n: dist.all_gather_into_tensor(ones(10 * n), ones(10))),
        lambda n: {"all_gather": (1, 40 * n, 40 * n)},
    ),
    "reduce_scatter_tensor": (
        on_all(lambda n: dist.reduce_scatter_tensor(ones(10), ones(10 * n))),
        lambda n: {"reduce_scatter": (1, 40 * n, 40 * n)},
    ),
    "all_to_all": (
        on_all(lambda n: dist.all_to_all(ones_per_rank(10, n), ones_per_rank(10, n))),
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
    "scatter": (
        lambda rank, n: dist.scatter(ones(10), ones_per_rank(10, n) if rank == 0 else None),
        lambda n: {"scatter": (1, 40 * n, 40 * n)},
    ),
    "send": (send_and_receive, lambda n: {"send": (1, 20, 20)}),
    "barrier": (on_all(lambda n: dist.barrier()), lambda n: {"barrier": (1, 0, 0)}),
    "functional all_reduce": (
        on_all(lambda n: wait(functional.all_reduce(ones(10), "sum", dist.group.WORLD))),
        lambda n: {"all_reduce": (1, 40, 40)},
    ),
    "functional all_gather": (
        on_all(lambda n: wait(functional.all_gather_tensor(ones(10), 0, dist.group.WORLD))),
        lambda n: {"all_gather": (1, 40 * n, 40 * n)},
    ),
    "functional reduce_scatter coalesced": (
        on_all(
            lambda n: wait(
                functional.reduce_scatter_tensor_coalesced(
                    [ones(2 * n), ones(3 * n)], "sum", [0, 0], dist.group.WORLD
                )
            )
        ),
        lambda n: {"reduce_scatter": (1, 20 * n, 20 * n)},
    ),
    "DTensor gathers": (
        on_all(lambda n: redistribute(Shard(0), to=Replicate())),
        lambda n: {"all_gather": (1, 128 * n, 128 * n)},
    ),
    "DTensor reduces": (
        on_all(lambda n: redistribute(Partial(), to=Replicate())),
        lambda n: {"all_reduce": (1, 128, 128)},
    ),
}


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
    return counts


@functools.cache
def counted():
    """What each of three ranks counts of each case."""
    return distributed.run(3, count_cases)


@pytest.mark.parametrize("name", CASES)
def test_counts_exactly(name):
    expected = CASES[name][1](3)
    assert [counts[name] for counts in counted()] == [expected] * 3


# Frameworks


def count_ddp(rank):
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16, bias=False))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.005)
    counts = []
    for _ in range(4):
        with WireMeter() as meter:
            ddp(ones(2, 64)).sum().backward()
        counts.append(tuples(meter))
    return counts


def test_ddp_sends_every_gradient_once():
    gradients = (64 * 32 + 32 + 32 * 16) * F32
    for counts in distributed.run(2, count_ddp):
        assert counts[1].pop("broadcast")[1] < 100  # the ranks agree on the order of buckets
        assert [count.pop("all_reduce")[1] for count in counts] == [gradients] * 4
        assert counts == [{}] * 4


# The meter's life


def reduce(n=10):
    dist.all_reduce(ones(n))


def has_our_kernel():
    name = "c10d::allreduce_"
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "BackendSelect")


def nest(rank):
    reduce()
    with WireMeter() as outer:
        reduce()
        with WireMeter() as inner:
            reduce()
        reduce()
    reduce()
    return outer.total_calls, inner.total_calls, has_our_kernel()


def test_nested_meters_both_count():
    assert distributed.run(2, nest) == [(3, 1, False)] * 2


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
        with pytest.raises(ValueError, match="replica_size=0 must"):
            meter.between(0)
        return [(count.calls, count.bytes, count.sent) for count in counts], reading.take()


def test_bytes_inside_replicas_are_told_from_those_between():
    for rank, (counts, read) in enumerate(distributed.run(4, of_groups)):
        assert counts == [(3, 44, 46.0), (2, 12, 14.0), (0, 0, 0.0)]
        here, there = f"{rank // 2 * 2}, {rank // 2 * 2 + 1}", f"{rank % 2}, {rank % 2 + 2}"
        assert read == {here: 32, there: 8, "0-3": 4}


def take_steps(rank):
    with WireMeter() as meter:
        reduce(100)
        first = meter.mark_step()
        snapshot = meter.snapshot()
        reduce(1)
        reduce(2)
        second = meter.mark_step()
        reduce(3)
        return first, second, meter.mark_step(), meter.mark_step(), meter.since(snapshot)


def test_steps_and_snapshots_have_their_own_largest():
    expected = (
        WireCount(calls=1, bytes=400, largest=400, sent=400),
        WireCount(calls=2, bytes=12, largest=8, sent=12),
        WireCount(calls=1, bytes=12, largest=12, sent=12),
        WireCount(),
        WireCount(calls=3, bytes=24, largest=12, sent=24),
    )
    assert distributed.run(2, take_steps) == [expected] * 2


def exchange_in_every_way(rank):
    whole, pieces = ones(12), list(ones(12).chunk(3))
    own = pieces[rank]
    with WireMeter() as meter:
        dist.all_reduce(whole)
        dist.reduce_scatter_tensor(own, whole)
        dist.all_gather_into_tensor(whole, own)
        dist.all_to_all_single(torch.empty(12), whole)
        dist.broadcast(whole, 0)
        dist.gather(own, pieces if rank == 0 else None, 0)
        dist.barrier()
    by_kind = {kind: count.sent / 48 for (_, kind), count in meter.records.items()}
    return by_kind, meter.total_sent / 48


def test_an_all_reduce_sends_what_a_reduce_scatter_and_an_all_gather_send():
    third = pytest.approx(2 / 3)
    by_kind = {
        "all_reduce": pytest.approx(4 / 3),
        "reduce_scatter": third,
        "all_gather": third,
        "all_to_all": third,
        "broadcast": third,
        "gather": pytest.approx(2 / 9),
        "barrier": 0,
    }
    total = pytest.approx(4 / 3 + 4 * 2 / 3 + 2 / 9)
    assert distributed.run(3, exchange_in_every_way) == [(by_kind, total)] * 3
