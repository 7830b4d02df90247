import functools
import gc
import threading
import time
import weakref
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import distributed
from curvadion.metering.wire import Reading, WireCount, WireMeter, _named


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


def send_and_receive_in_a_batch(rank, size):
    to, source = (rank + 1) % size, (rank - 1) % size
    operations = [dist.P2POp(dist.isend, ones(5), to), dist.P2POp(dist.irecv, ones(5), source)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def coalesce(rank, size):
    with dist._coalescing_manager():
        dist.all_reduce(ones(10))
        dist.all_reduce(ones(5))


def asynchronous(rank, size):
    works = [dist.all_reduce(ones(10), async_op=True) for _ in range(3)]
    for work in works:
        work.wait()


def sparse(rank, size):
    dist.all_reduce(torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (8,), check_invariants=True))


def under_inference_mode(rank, size):
    with torch.inference_mode():
        dist.all_reduce(ones(10))


def under_a_dispatch_mode(rank, size):
    with CommDebugMode():
        dist.all_reduce(ones(10))


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
    "all_reduce bfloat16": (
        on_all(lambda n: dist.all_reduce(torch.ones(10, dtype=torch.bfloat16))),
        lambda n: {"all_reduce": (1, 20, 20)},
    ),
    "all_reduce async": (asynchronous, lambda n: {"all_reduce": (3, 120, 40)}),
    "all_reduce sparse": (sparse, lambda n: {"all_reduce": (1, 2 * 8 + 2 * F32, 24)}),
    "all_reduce coalesced": (coalesce, lambda n: {"all_reduce": (1, 60, 60)}),
    "inference mode": (under_inference_mode, lambda n: {"all_reduce": (1, 40, 40)}),
    "dispatch mode": (under_a_dispatch_mode, lambda n: {"all_reduce": (1, 40, 40)}),
    "broadcast": (
        on_all(lambda n: dist.broadcast(ones(10), 0)),
        lambda n: {"broadcast": (1, 40, 40)},
    ),
    "reduce": (on_all(lambda n: dist.reduce(ones(10), 0)), lambda n: {"reduce": (1, 40, 40)}),
    "all_gather": (
        on_all(lambda n: dist.all_gather(ones_per_rank(10, n), ones(10))),
        lambda n: {"all_gather": (1, 40 * n, 40 * n)},
    ),
    "all_gather_into_tensor": (
        on_all(lambda n: dist.all_gather_into_tensor(ones(10 * n), ones(10))),
        lambda n: {"all_gather": (1, 40 * n, 40 * n)},
    ),
    "reduce_scatter": (
        on_all(lambda n: dist.reduce_scatter(ones(10), ones_per_rank(10, n))),
        lambda n: {"reduce_scatter": (1, 40 * n, 40 * n)},
    ),
    "reduce_scatter_tensor": (
        on_all(lambda n: dist.reduce_scatter_tensor(ones(10), ones(10 * n))),
        lambda n: {"reduce_scatter": (1, 40 * n, 40 * n)},
    ),
    "all_to_all": (
        on_all(lambda n: dist.all_to_all(ones_per_rank(10, n), ones_per_rank(10, n))),
        lambda n: {"all_to_all": (1, 40 * n, 40 * n)},
    ),
    "all_to_all_single": (
        on_all(lambda n: dist.all_to_all_single(ones(2 * n), ones(2 * n))),
        lambda n: {"all_to_all": (1, 8 * n, 8 * n)},
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
    "send in a batch": (send_and_receive_in_a_batch, lambda n: {"send": (1, 20, 20)}),
    "barrier": (on_all(lambda n: dist.barrier()), lambda n: {"barrier": (1, 0, 0)}),
    "monitored_barrier": (
        on_all(lambda n: dist.monitored_barrier()),
        lambda n: {"barrier": (1, 0, 0)},
    ),
    "functional all_reduce": (
        on_all(lambda n: wait(functional.all_reduce(ones(10), "sum", dist.group.WORLD))),
        lambda n: {"all_reduce": (1, 40, 40)},
    ),
    "functional broadcast": (
        on_all(lambda n: wait(functional.broadcast(ones(10), 0, dist.group.WORLD))),
        lambda n: {"broadcast": (1, 40, 40)},
    ),
    "functional all_gather": (
        on_all(lambda n: wait(functional.all_gather_tensor(ones(10), 0, dist.group.WORLD))),
        lambda n: {"all_gather": (1, 40 * n, 40 * n)},
    ),
    "functional reduce_scatter": (
        on_all(
            lambda n: wait(
                functional.reduce_scatter_tensor(ones(10 * n), "sum", 0, dist.group.WORLD)
            )
        ),
        lambda n: {"reduce_scatter": (1, 40 * n, 40 * n)},
    ),
    "functional all_to_all": (
        on_all(
            lambda n: wait(functional.all_to_all_single(ones(2 * n), None, None, dist.group.WORLD))
        ),
        lambda n: {"all_to_all": (1, 8 * n, 8 * n)},
    ),
    "functional all_reduce coalesced": (
        on_all(
            lambda n: wait(
                functional.all_reduce_coalesced([ones(10), ones(5)], "sum", dist.group.WORLD)
            )
        ),
        lambda n: {"all_reduce": (1, 60, 60)},
    ),
    "functional all_gather coalesced": (
        on_all(
            lambda n: wait(
                functional.all_gather_into_tensor_coalesced([ones(10), ones(5)], dist.group.WORLD)
            )
        ),
        lambda n: {"all_gather": (1, 60 * n, 60 * n)},
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
    "DTensor scatters": (
        on_all(lambda n: redistribute(Partial(), to=Shard(0))),
        lambda n: {"reduce_scatter": (1, 128, 128)},
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
def counted(world_size):
    """What each rank counts of each case."""
    return distributed.run(world_size, count_cases)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_counts_exactly(name, world_size):
    expected = CASES[name][1](world_size)
    assert [counts[name] for counts in counted(world_size)] == [expected] * world_size


def count_on_one_gpu(rank):
    with WireMeter() as meter:
        dist.all_reduce(torch.ones(10, device="cuda"))
    return tuples(meter)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_counts_tensors_on_a_gpu():
    assert distributed.run(2, count_on_one_gpu) == [{"all_reduce": (1, 40, 40)}] * 2


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


def count_fsdp(rank, mesh_shape):
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    model = nn.Sequential(nn.Linear(16, 8, bias=False), nn.Linear(8, 16, bias=False))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    with WireMeter() as meter:
        model(ones(2, 16)).sum().backward()
    return tuples(meter)


def test_fsdp_gathers_twice_and_scatters_once():
    matrix = 16 * 8 * F32
    expected = {
        "all_gather": (2 * 2, 2 * 2 * matrix, matrix),  # forward and backward
        "reduce_scatter": (2, 2 * matrix, matrix),
    }
    assert distributed.run(2, count_fsdp, (2,)) == [expected] * 2


def test_hybrid_fsdp_also_reduces_shards():
    matrix = 16 * 8 * F32
    expected = {
        "all_gather": (2 * 2, 2 * 2 * matrix, matrix),
        "reduce_scatter": (2, 2 * matrix, matrix),
        "all_reduce": (2, matrix, matrix // 2),
    }
    assert distributed.run(4, count_fsdp, (2, 2)) == [expected] * 4


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


def leave_in_order_of_entry(rank):
    first, second = WireMeter(), WireMeter()
    with ExitStack() as outer:
        with ExitStack() as inner:
            inner.enter_context(first)
            outer.enter_context(second)
            reduce()
        reduce()
        still = has_our_kernel()
    reduce()
    return first.total_calls, second.total_calls, still, has_our_kernel()


def test_meters_may_be_left_in_any_order():
    assert distributed.run(2, leave_in_order_of_entry) == [(1, 2, True, False)] * 2


def enter_many_times(rank):
    meter, wrong = WireMeter(), 0
    for turn in range(200):
        with meter:
            reduce(1)
            wrong += not has_our_kernel()
        reduce(1)
        wrong += has_our_kernel() or meter.total_calls != turn + 1
    return wrong, meter.total_calls, meter.total_bytes


def test_reentered_meter_goes_on_counting():
    assert distributed.run(2, enter_many_times) == [(0, 200, 200 * F32)] * 2


def enter_twice(rank):
    with WireMeter() as meter:
        with pytest.raises(RuntimeError, match="already active"), meter:
            pass
        reduce()
    return meter.total_calls, has_our_kernel()


def test_entering_an_active_meter_is_an_error():
    assert distributed.run(2, enter_twice) == [(1, False)] * 2


def raise_inside(rank):
    with pytest.raises(KeyError, match="mine"), WireMeter() as meter:
        reduce()
        raise KeyError("mine")
    reduce()
    return meter.total_calls, has_our_kernel()


def test_exceptions_pass_through_and_undo():
    assert distributed.run(2, raise_inside) == [(1, False)] * 2


def fail_to_gather(rank):
    with WireMeter() as meter, pytest.raises(RuntimeError, match="invalid tensor size"):
        dist.all_gather([ones(3), ones(4)], ones(3 + rank))
    return meter.total_calls


def test_a_call_that_raises_is_not_counted():
    assert distributed.run(2, fail_to_gather) == [0, 0]


def pause(rank):
    reading = Reading()
    with WireMeter() as outer, WireMeter() as inner:
        reduce()
        with inner.paused():
            reduce()
            with inner.paused():
                reduce()
            reduce()
            while_paused = reading.take()
        reduce()
    return outer.total_calls, inner.total_calls, while_paused


def test_paused_meter_leaves_out_and_others_do_not():
    assert distributed.run(2, pause) == [(5, 2, {"0, 1": 40})] * 2


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


def of_a_group_that_is_gone(rank):
    group, reading = dist.new_group([0, 1]), Reading()
    name = f"group {group.group_name}"
    with WireMeter() as meter:
        dist.all_reduce(ones(2), group=group)
        assert meter.between(2).bytes == 0
        dist.destroy_process_group(group)
        return meter.between(2).bytes, reading.take() == {name: 8}


def test_bytes_of_a_group_that_is_gone_are_not_lost():
    assert distributed.run(2, of_a_group_that_is_gone) == [(8, True)] * 2


@pytest.mark.parametrize(
    ("ranks", "name"),
    [([3], "3"), ([0, 8], "0, 8"), ([0, 1, 2], "0-2"), ([1, 9, 17], "1-17 by 8"),
     ([0, 1, 5], "0, 1, 5")],
)  # fmt: skip
def test_ranks_have_short_names(ranks, name):
    assert _named(ranks) == name


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


def test_dropped_snapshots_are_not_kept():
    meter = WireMeter()
    dropped = weakref.ref(meter.snapshot())
    gc.collect()
    assert dropped() is None


def test_a_snapshot_of_another_meter_is_an_error():
    with pytest.raises(ValueError, match="another WireMeter"):
        WireMeter().since(WireMeter().snapshot())


def use_groups(rank):
    pair = dist.new_group([0, 1])
    alone = [dist.new_group([member]) for member in range(3)][rank]
    with WireMeter() as meter:
        reduce()
        dist.all_reduce(ones(3), group=alone)
        if rank < 2:
            dist.all_reduce(ones(5), group=pair)
            dist.broadcast(ones(7), 0, group=pair)
    world = dist.group.WORLD.group_name
    records = {(world, "all_reduce"): WireCount(1, 40, 40, 40 * (2 / 3) * 2)}
    records[alone.group_name, "all_reduce"] = WireCount(1, 0, 0)
    if rank < 2:
        records[pair.group_name, "all_reduce"] = WireCount(1, 20, 20, 20)
        records[pair.group_name, "broadcast"] = WireCount(1, 28, 28, 14)
    assert meter.records == records
    return meter.bytes_by_collective, meter.calls_by_collective, meter.largest


def test_groups_are_told_apart_and_a_lone_rank_has_no_wire():
    together = ({"all_reduce": 60, "broadcast": 28}, {"all_reduce": 3, "broadcast": 1}, 40)
    apart = ({"all_reduce": 40}, {"all_reduce": 2}, 40)
    assert distributed.run(3, use_groups) == [together, together, apart]


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


def use_a_group_built_by_hand(rank):
    store = dist.PrefixStore("by hand", dist.group.WORLD.get_group_store())
    group = dist.ProcessGroup(store, rank, 2)
    backend = dist.ProcessGroupGloo(store, rank, 2)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    with WireMeter() as meter:
        group.allreduce([ones(10)]).wait()
    return meter.records


def test_a_group_without_a_name_is_counted():
    expected = {("", "all_reduce"): WireCount(1, 40, 40, 40)}
    assert distributed.run(2, use_a_group_built_by_hand) == [expected] * 2


def reduce_in_threads(rank):
    groups = [dist.new_group() for _ in range(4)]

    def work(group):
        for _ in range(50):
            dist.all_reduce(ones(10), group=group)

    threads = [threading.Thread(target=work, args=(group,)) for group in groups]
    with WireMeter() as meter:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return meter.total_calls, meter.total_bytes


def test_threads_count_together():
    assert distributed.run(2, reduce_in_threads) == [(200, 8000)] * 2


def tick_during_a_barrier(rank):
    ticks = 0
    done = threading.Event()

    def tick():
        nonlocal ticks
        while not done.wait(0.005):
            ticks += 1

    with WireMeter():
        dist.barrier()
        thread = threading.Thread(target=tick)
        thread.start()
        time.sleep(0.5 * rank)
        ticks = 0
        dist.monitored_barrier()  # rank 0 waits here for rank 1
        done.set()
        thread.join()
    return ticks


def test_other_python_threads_run_during_a_collective():
    assert distributed.run(2, tick_during_a_barrier)[0] >= 10


def drop_temporaries(rank):
    with WireMeter() as meter:
        for _ in range(100):
            coalesce(rank, 2)
    return meter.total_calls


def test_tensors_freed_by_the_backends_threads_do_not_deadlock():
    assert distributed.run(2, drop_temporaries, timeout=20) == [100, 100]
