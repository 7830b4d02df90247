"""Collectives on many tensors at once, against sums that one process computes alone.

All values are small whole numbers, so that sums are exact in every dtype and order.
"""

from __future__ import annotations

import gc
import threading
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from curvadion.comm.collectives import (
    Buckets,
    SharedWork,
    Slot,
    all_ranks_equal,
    all_to_all,
    begin,
    begin_exchange_of_vectors,
    called_between,
    chunks,
    communicate,
    exchange_vectors,
    mean_,
)
from support.runs import distributed
from support.runs.seeded import seeded

CPU = torch.device("cpu")


def numbers(*key, shape, dtype=torch.float32):
    """Whole numbers from -9 to 9 that the key fixes, the same in every process."""
    return torch.randint(-9, 10, shape, generator=seeded(*key)).to(dtype)


def assert_equal(found, expected):
    """Equal values, shapes and dtypes of two lists of tensors."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.equal(other), (one, other)


class Recording:
    """Keeps collectives, and calls them when it is replayed."""

    def __init__(self):
        self.calls = []

    def between(self, collective, arguments):
        self.calls.append((collective, arguments))

    def replay(self):
        for collective, arguments in self.calls:
            collective(*arguments)


# ---------------------------------------------------------------- buckets

# Shape, group and dtype of each slot: neighbours in a buffer are not neighbours in this list.
SLOTS = [
    ((2, 3), "all", torch.float32),
    ((4,), "pair", torch.float32),
    ((), "all", torch.float64),
    ((0,), "all", torch.float32),
    ((5,), "all", torch.bfloat16),
    ((3, 2), "pair", torch.float32),
    ((2,), "alone", torch.float32),
    ((0, 3), "pair", torch.float64),  # the only one of its group and dtype
    ((1, 2, 2), "all", torch.float32),
    ((3,), "all", torch.bfloat16),
]


def groups_of(rank):
    """By name, the process group and its ranks; the last rank is in no pair."""
    world = dist.get_world_size()
    pair = dist.new_group([0, 1])
    return {
        "all": (dist.group.WORLD, [*range(world)]),
        "pair": (pair, [0, 1]) if rank < 2 else (None, [rank]),
        "alone": (None, [rank]),
    }


def filled(rank, seed=0):
    """Buckets of SLOTS with this rank's numbers, and the ranks of each view."""
    groups = groups_of(rank)
    slots = [Slot(shape, groups[name][0], dtype, CPU) for shape, name, dtype in SLOTS]
    buckets = Buckets(slots)
    fill(buckets, rank, seed)
    return buckets, [groups[name][1] for _, name, _ in SLOTS]


def fill(buckets, rank, seed):
    for i, view in enumerate(buckets.views):
        view.copy_(numbers(rank, i, seed, shape=view.shape))


def of_each_rank(ranks_by_view, seed=0):
    """By view, the numbers of all ranks that reduce it, (ranks, *shape)."""
    stacks = []
    for i, ((shape, _, dtype), ranks) in enumerate(zip(SLOTS, ranks_by_view, strict=True)):
        stacks.append(
            torch.stack([numbers(rank, i, seed, shape=shape, dtype=dtype) for rank in ranks])
        )
    return stacks


@pytest.mark.parametrize("world", [2, 3])
def test_every_view_of_buckets_is_summed_over_its_own_group(world):
    distributed.run(world, sums_of_buckets)


def sums_of_buckets(rank):
    buckets, ranks = filled(rank)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reducing:
        buckets.all_reduce_()
    assert_equal(buckets.views, [stack.sum(0, dtype=stack.dtype) for stack in of_each_rank(ranks)])
    # One for each dtype and each group of several ranks that has elements.
    assert reducing.call_count == (4 if rank < 2 else 3)


@distributed.on_ranks(3)
def test_buckets_take_maxima_and_divide(rank):
    buckets, ranks = filled(rank)
    buckets.all_reduce_(op=dist.ReduceOp.MAX, divide_by=2)
    assert_equal(buckets.views, [stack.amax(0) / 2 for stack in of_each_rank(ranks)])


def test_views_of_buckets_share_buffers_without_gaps():
    slots = [Slot(shape, None, dtype, CPU) for shape, _, dtype in SLOTS]
    views = Buckets(slots).views
    assert [(tuple(v.shape), v.dtype) for v in views] == [(s.shape, s.dtype) for s in slots]
    for dtype in {slot.dtype for slot in slots}:
        of_dtype = [v for v in views if v.dtype == dtype]
        elements = sum(v.numel() for v in of_dtype)
        sizes = {v.untyped_storage().nbytes() for v in of_dtype if v.numel()}
        assert sizes == {elements * dtype.itemsize}
        places = [v.storage_offset() + i for v in of_dtype for i in range(v.numel())]
        assert places == [*range(elements)]


def test_buckets_may_have_no_slot():
    buckets = Buckets([])
    buckets.all_reduce_(divide_by=2)
    assert buckets.views == []


@pytest.mark.parametrize("world", [2, 3])
def test_means_are_taken_in_float32_or_wider(world):
    distributed.run(world, means)


def means(rank):
    world = dist.get_world_size()
    dtypes = [torch.float16, torch.float32, torch.float64]
    own = [numbers(rank, i, shape=(3, i), dtype=d) for i, d in enumerate(dtypes)]
    own.append(torch.tensor([60000.0]).half())  # a sum that float16 cannot hold
    mean_(own, dist.group.WORLD)
    for i, dtype in enumerate(dtypes):
        wide = torch.promote_types(dtype, torch.float32)
        ranks = [numbers(r, i, shape=(3, i), dtype=wide) for r in range(world)]
        expected = (torch.stack(ranks).sum(0) / world).to(dtype)
        assert own[i].equal(expected)
    assert own[3].item() == 60000.0


def test_chunks_are_runs_of_bounded_bytes():
    tensors = [torch.empty(n, dtype=torch.bfloat16) for n in (2, 2, 1, 9, 0, 4, 1)]
    sizes = [[len(t) for t in chunk] for chunk in chunks(tensors, most_bytes=16)]
    assert sizes == [[2, 2], [1], [9], [0, 4], [1]]  # 4 bytes an element
    assert [*chunks([])] == []


@distributed.on_ranks(3)
def test_ranks_learn_whether_they_said_the_same(rank):
    assert all_ranks_equal(["a", 1.5], dist.group.WORLD, CPU)
    for other in range(3):
        assert not all_ranks_equal(["a", rank == other], dist.group.WORLD, CPU)
    assert all_ranks_equal(rank, None, CPU)


# ---------------------------------------------------------------- exchanges

# How many elements rank s sends to rank r: a rank that sends nothing, and one that gets nothing.
COUNTS = {
    2: [[[0, 3], [5, 1]], [[0, 0], [2, 0]], [[0, 0], [0, 0]]],
    3: [[[2, 0, 4], [1, 3, 0], [0, 6, 5]], [[0, 0, 0], [7, 0, 1], [2, 0, 0]]],
}
EXCHANGES = [(world, counts) for world, cases in COUNTS.items() for counts in cases]


def exchanged_at_once(buffers, sent, received, group):
    return [exchange_vectors(buffer, sent, received, group) for buffer in buffers]


def exchanged_in_the_background(buffers, sent, received, group):
    """All begin before one of them ends."""
    ends = [begin_exchange_of_vectors(buffer, sent, received, group) for buffer in buffers]
    return [end() for end in ends]


@pytest.mark.parametrize("exchange", [exchanged_at_once, exchanged_in_the_background])
@pytest.mark.parametrize(("world", "counts"), EXCHANGES)
def test_vectors_arrive_by_rank(world, counts, exchange):
    distributed.run(world, exchange_of_vectors, counts, exchange)


def exchange_of_vectors(rank, counts, exchange):
    ranks = range(len(counts))
    dtypes = [torch.float32, torch.bfloat16, torch.uint8]

    def part(number, source, target):
        shape = (counts[source][target],)
        return numbers(number, source, target, shape=shape, dtype=dtypes[number])

    received = [counts[source][rank] for source in ranks]
    buffers = []
    expected = []
    for number in range(len(dtypes)):
        buffers.append(torch.cat([part(number, rank, target) for target in ranks]))
        expected.append(torch.cat([part(number, source, rank) for source in ranks]))
    found = exchange(buffers, counts[rank], received, dist.group.WORLD)
    assert_equal(found, expected)


def shapes_from(source, target):
    """What a rank sends to another: two tensors, an empty one, or none."""
    return [
        [(source + 1, 2), ()],
        [(0, 3), (target, 2)],
        [],
    ][(source + 2 * target) % 3]


@pytest.mark.parametrize("silent", [None, 1])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_tensors_of_any_shape_arrive_by_rank(world, transposed, silent):
    distributed.run(world, exchange_of_tensors, transposed, silent)


def exchange_of_tensors(rank, transposed, silent):
    """silent: a rank that sends nothing to anybody."""
    ranks = range(dist.get_world_size())

    def shapes_of(source, target):
        return [] if source == silent else shapes_from(source, target)

    def sent(source, target):
        tensors = []
        for i, shape in enumerate(shapes_of(source, target)):
            tensor = numbers(source, target, i, shape=shape[::-1] if transposed else shape)
            tensors.append(tensor.mT if transposed and len(shape) == 2 else tensor)
        return tensors

    to = [sent(rank, target) for target in ranks]
    shapes = [shapes_of(source, rank) for source in ranks]
    found = all_to_all(to, shapes, dist.group.WORLD, torch.empty(0))
    assert len(found) == len(ranks)
    for source in ranks:
        assert_equal(found[source], sent(source, rank))


# ---------------------------------------------------------------- shared work

# Ranks, and by vector its cost and its size; fewer vectors than ranks, empty vectors, and sizes
# that the ranks do not divide.
WORK = {
    "equal": (2, [1, 1, 1, 1], [4, 4, 4, 4]),
    "the example of the docstring": (2, [6, 2, 2], [6, 2, 2]),
    "costs against sizes": (2, [1, 9, 4, 2], [7, 1, 0, 12]),
    "one vector": (3, [1], [5]),
    "uneven": (3, [5, 1, 3, 3, 2], [11, 0, 3, 1, 8]),
    "all empty": (3, [1, 2], [0, 0]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", WORK)
def test_owners_get_sums_and_all_ranks_get_results(case, dtype):
    world, costs, sizes = WORK[case]
    owned = distributed.run(world, shared_work, costs, sizes, dtype)
    assert sorted(vector for mine in owned for vector in mine) == [*range(len(costs))]
    work = [[costs[vector] for vector in mine] for mine in owned]
    least = min(map(sum, work))
    # Nobody has more than the least, but for one vector.
    assert all(sum(of_rank) - min(of_rank, default=0) <= least for of_rank in work)


def shared_work(rank, costs, sizes, dtype):
    world = dist.get_world_size()
    shared = SharedWork(costs, dist.group.WORLD)

    def summand(of_rank, vector):
        """Numbers that bfloat16 can hold, but not their sums."""
        return numbers(of_rank, vector, shape=(sizes[vector],), dtype=dtype) + 240

    vectors = range(len(sizes))
    sums = [sum(summand(r, vector).float() for r in range(world)) for vector in vectors]
    found = shared.sums([summand(rank, vector) for vector in vectors], torch.float32)
    assert_equal(found, [sums[vector] for vector in shared.mine])
    # A result need not have the size of its vector.
    results = [torch.cat([total, total[:2] + vector]) for vector, total in enumerate(sums)]
    found = shared.results(
        [results[vector] for vector in shared.mine],
        [len(result) for result in results],
        torch.empty(0),
    )
    assert_equal(found, results)
    return shared.mine


@distributed.on_ranks(3)
def test_all_ranks_sum_equally_much(rank):
    """Though one vector is nearly all of the line."""
    shared = SharedWork([100, 1, 1], dist.group.WORLD)
    sizes = [100, 1, 1]
    lengths = []

    def exchange(received, sent, *rest):
        lengths.append(sent.numel())
        return dist.all_to_all_single(received, sent, *rest)

    with called_between(lambda _, arguments: exchange(*arguments)):
        shared.sums([torch.ones(size) for size in sizes], torch.float32)
    # Summands of the whole line, then the sums of a third.
    assert lengths == [102, 34]


# ---------------------------------------------------------------- recorded collectives


@distributed.on_ranks(2)
def test_a_replay_sums_what_is_in_the_memory_by_then(rank):
    recording = Recording()
    buckets, ranks = filled(rank)
    before = [view.clone() for view in buckets.views]
    with called_between(recording.between):
        buckets.all_reduce_()
    assert_equal(buckets.views, before)  # nothing has been called yet
    assert len(recording.calls) == 1
    for seed in (1, 2):
        fill(buckets, rank, seed)
        recording.replay()
        expected = [stack.sum(0, dtype=stack.dtype) for stack in of_each_rank(ranks, seed)]
        assert_equal(buckets.views, expected)


@distributed.on_ranks(3)
def test_a_replayed_exchange_sends_what_is_in_the_memory_by_then(rank):
    counts = COUNTS[3][0]
    ranks = range(3)
    received = [counts[source][rank] for source in ranks]
    recording = Recording()
    buffers = [torch.zeros(sum(counts[rank])) for _ in range(2)]
    with called_between(recording.between):
        now = exchange_vectors(buffers[0], counts[rank], received, dist.group.WORLD)
        end = begin_exchange_of_vectors(buffers[1], counts[rank], received, dist.group.WORLD)
        later = end()
    # Called at once; begun, and waited for.
    assert len(recording.calls) == 3
    for seed in (1, 2):
        for i, buffer in enumerate(buffers):
            parts = [numbers(seed, i, rank, r, shape=(counts[rank][r],)) for r in ranks]
            buffer.copy_(torch.cat(parts))
        recording.replay()
        expected = []
        for i in range(2):
            parts = [numbers(seed, i, r, rank, shape=(counts[r][rank],)) for r in ranks]
            expected.append(torch.cat(parts))
        assert_equal([now, later], expected)


class Started:
    """Work of a collective that a test waits for."""

    def __init__(self, log):
        self.log = log

    def wait(self):
        self.log.append("waited")


def test_what_is_begun_is_waited_for_once():
    log = []
    started = []

    def collective(*arguments, async_op):
        assert async_op
        log.append(arguments)
        work = Started(log)
        started.append(weakref.ref(work))
        return work

    end = begin(collective, 1, "two")
    assert log == [(1, "two")]
    end()
    assert log == [(1, "two"), "waited"]
    assert started[0]() is None  # work may hold tensors, and a recording holds ``end``
    begin(lambda async_op: None)()  # there may be nothing to wait for
    recording = Recording()
    with called_between(recording.between):
        begin(collective, 3)()
    assert len(log) == 2
    for _ in range(2):
        recording.replay()
    assert log[2:] == [(3,), "waited"] * 2


def test_the_memory_of_what_is_begun_is_kept_until_its_end():
    """Also if the recording does not keep its tensors, so that others may get their memory."""
    tensor = torch.ones(3)
    alive = weakref.ref(tensor)
    with called_between(lambda collective, arguments: None):
        end = begin(lambda *arguments, async_op: None, tensor)
        del tensor
        gc.collect()
        assert alive() is not None
        end()
        gc.collect()
        assert alive() is None


def test_the_innermost_recording_takes_the_collectives_of_its_thread():
    outer = Recording()
    inner = Recording()
    log = []
    with called_between(outer.between):
        communicate(log.append, "outer")
        with called_between(inner.between):
            communicate(log.append, "inner")
        communicate(log.append, "outer again")
        # Exchanges during training are no part of a step.
        thread = threading.Thread(target=communicate, args=(log.append, "beside"))
        thread.start()
        thread.join()
    communicate(log.append, "after")
    assert log == ["beside", "after"]
    assert [arguments for _, arguments in outer.calls] == [("outer",), ("outer again",)]
    assert [arguments for _, arguments in inner.calls] == [("inner",)]


class Refused(Exception):
    """A collective that cannot be recorded."""


@pytest.mark.parametrize("how", ["at once", "begun", "in its end"])
@distributed.on_ranks(2)
def test_an_exception_in_a_recorded_collective_leaves_nothing_behind(rank, how):
    """No recording, no tensor, and collectives work as before."""
    buckets, ranks = filled(rank)
    calls = 0

    def refuse(collective, arguments):
        nonlocal calls
        calls += 1
        if how != "in its end" or calls == 2:
            raise Refused

    def record():
        tensor = torch.ones(3)
        alive.append(weakref.ref(tensor))
        with called_between(refuse):
            if how == "at once":
                communicate(dist.all_reduce, tensor)
            end = begin(dist.all_reduce, tensor)
            end()

    alive = []
    with pytest.raises(Refused):
        record()
    gc.collect()
    assert alive[0]() is None
    buckets.all_reduce_()
    assert calls == (2 if how == "in its end" else 1)
    assert_equal(buckets.views, [stack.sum(0, dtype=stack.dtype) for stack in of_each_rank(ranks)])


@distributed.on_ranks(2)
def test_a_failed_replay_can_be_repeated(rank):
    """A collective that raises has sent nothing, and the recording is as it was."""
    recording = Recording()
    tensor = torch.zeros(2)
    fails = True

    def reduce(tensor, async_op):
        if fails:
            raise Refused
        return dist.all_reduce(tensor, async_op=async_op)

    with called_between(recording.between):
        begin(reduce, tensor)()
    with pytest.raises(Refused):
        recording.replay()
    fails = False
    for value in (3.0, 5.0):
        tensor.fill_(value + rank)
        recording.replay()
        assert tensor.tolist() == [2 * value + 1] * 2
