"""What steps do on a GPU, counted with fake CUDA tensors: launches, reads and copies.

Operations may not be more than the number in the table, nor so few that the table is out of date.
``PYTHONPATH=tests python -m support.devices.counted_steps --tables`` prints today's.
"""

from functools import partial

import pytest
import torch

from curvadion import Dion, ops
from curvadion.ops import backends, code_format
from support.devices.counted_steps import CASES, counted_steps, smaller
from support.devices.fake_cuda import CUDA, Count, fake_cuda, needs_fake_cuda

pytestmark = needs_fake_cuda

# By case: operations of the first step, of an opening, and of a closed step if there is one.
OPERATIONS = {
    "Dion, low_rank": (224, 75),
    "Dion, polar, 8 ranks": (521, 61),
    "Dion, polar, 8 shards": (514, 61),
    "LowRank, RMMC, low_rank": (242, 87, 85),
    "LowRank, RMMC, polar, 8 ranks": (519, 122, 56),
    "LowRank, schedule, low_rank, 8 ranks": (558, 124, 71),
    "QuantizedAverage, schedule, polar, 8 ranks": (589, 355, 36),
    "QuantizedAverage, RMMC, polar": (275, 96, 52),
    "QuantizedAverage, RMMC, low_rank, 8 ranks": (682, 356, 112),
    "CodedGradients, polar, 8 ranks": (559, 54),
    "CodedGradients, low_rank, 8 ranks": (639, 108),
    "160M: Dion, polar": (266, 36),
    "160M: Dion, polar, states in 8 bits": (270, 38),
    "160M: Dion, polar, bfloat16, stochastic rounding": (266, 36),
    "160M: Dion, polar, 8 shards": (295, 61),
    "160M: Dion, normuon": (323, 42),
    "160M: Dion, dion2": (293, 56),
    "160M: Dion, low_rank": (401, 75),
    "160M: local step, polar": (464, 35),
    "1.3B: Dion, polar": (914, 248),
    "1.3B: Dion, polar, 8 shards": (763, 94),
}
# By case: fused operations that plain PyTorch runs, since the Triton backend refuses them. A
# symmetric product of small matrices is one launch of torch.bmm, which is faster there.
REFUSED = {
    "Dion, low_rank": {"symmetric_product"},
    "LowRank, RMMC, low_rank": {"symmetric_product"},
    "LowRank, schedule, low_rank, 8 ranks": {"symmetric_product"},
    "QuantizedAverage, RMMC, low_rank, 8 ranks": {"symmetric_product"},
    "CodedGradients, low_rank, 8 ranks": {"symmetric_product"},
    "160M: Dion, dion2": {"grams", "symmetric_product"},
    "160M: Dion, low_rank": {"symmetric_product"},
    "1.3B: Dion, polar, 8 shards": {"grams"},
}
# By case: fused operations that the Triton backend does not have.
ABSENT = {}
# The first step also compares the replicas, and creates states: right factors begin on the host.
READS_OF_THE_FIRST = 2
# The constants of codes: signs, midpoints and levels.
COPIES_OF_THE_FIRST_CODES = 3


def reads(name, kind):
    """None where no other replica waits: closed steps of a schedule, and those of one replica."""
    # One replica whose gate closes waits at every step, although nobody waits for it.
    alone = "shards" in name or not any(each in name for each in ("ranks", "RMMC", "local step"))
    return 0 if alone or (kind == "closed" and "schedule" in name) else 1


def copies(name, kind):
    codes_begin_here = "QuantizedAverage" in name and "ranks" in name and kind == "open"
    return COPIES_OF_THE_FIRST_CODES if codes_begin_here else 0


def names(counters):
    return {name for counter in counters for name in counter}


# Of the large model those that differ most; each of the others takes four seconds. In bfloat16 that
# with stochastic rounding.
TESTED = [
    name
    for name in CASES
    if not (name.startswith("1.3B") and "8 ranks" in name) and not name.endswith("bfloat16")
]


@pytest.mark.parametrize("name", TESTED)
def test_a_step_keeps_to_its_budget(name):
    steps = counted_steps(smaller(CASES[name]))
    assert names(step.refusals for step in steps) == REFUSED.get(name, set())
    assert names(step.absent for step in steps) == ABSENT.get(name, set())
    assert len(steps) == len(OPERATIONS[name])
    for step, most in zip(steps, OPERATIONS[name], strict=True):
        assert 0.95 * most <= step.operations <= most, (step.kind, step.operations)
        if step.kind == "first":
            assert len(step.reads) <= READS_OF_THE_FIRST, step.reads
        else:
            assert len(step.reads) == reads(name, step.kind), (step.kind, step.reads)
            assert len(step.copies) == copies(name, step.kind), (step.kind, step.copies)


def operations_of_a_step(shapes, **options):
    """How many the second step of one group of parameters needs."""
    with fake_cuda():
        X = [torch.nn.Parameter(torch.empty(shape, device=CUDA)) for shape in shapes]
        optimizer = Dion([{"params": X, **options}], replicas="single")
        for _ in range(2):
            for x in X:
                x.grad = torch.empty_like(x)
            with Count() as count:
                optimizer.step()
    # Products of few matrices are left to PyTorch.
    assert count.refusals.keys() <= {"grams", "symmetric_product", "inverse_root"}
    return count.operations.total()


def test_blocks_with_gaps_are_copied_once_a_parameter():
    """The heads of an output projection: momenta and gradients twice, weights once, and back."""
    heads = {"direction": "polar", "column_blocks": 4}
    four, eight = (operations_of_a_step([(64, 64)] * layers, **heads) for layers in (4, 8))
    assert eight - four == 4 * 7


def test_moments_in_8_bits_are_stepped_in_one_operation():
    """However many elements there are: nothing of them is opened."""
    coded = {"algorithm": "adamw", "state_dtype": "int8"}
    one, three = (operations_of_a_step([2**28] * tensors, **coded) for tensors in (1, 3))
    assert three == one


@pytest.mark.parametrize(
    ("shape", "division"),
    [
        ((64, 64), {"row_blocks": 4}),
        ((48, 64), {"row_blocks": (24, 16, 8)}),
        ((4, 16, 64), {"stack_dims": 1}),
        ((4, 64, 16), {"stack_dims": 1, "input_first": True}),
    ],
)
def test_momenta_of_blocks_in_8_bits_need_no_more_operations(shape, division):
    coded, plain = (
        operations_of_a_step([shape] * 3, direction="polar", state_dtype=dtype, **division)
        for dtype in ("int8", None)
    )
    assert coded == plain


# -------------------------------------------------------------------- the counter itself


def on_device(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device=CUDA)


READS = [
    lambda x: x.sum().item(),
    lambda x: x.tolist(),
    lambda x: x.cpu(),
    lambda x: bool(x.sum() > 0),
    lambda x: torch.empty(3)[x.argmax()],
    lambda x: x[x.argmax()],
    lambda x: torch.empty(3).copy_(x),
    lambda x: torch.linalg.cholesky(x[:, None] * x),
]
BLOCKING_COPIES = [
    lambda x: torch.empty(3).to(CUDA),
    lambda x: torch.tensor([1.0, 2.0], device=CUDA),
    lambda x: x.copy_(torch.empty(3)),
    lambda x: x[torch.tensor([0, 2])],
    lambda x: x[[0, 2]],
    lambda x: torch.empty(3).to(CUDA, non_blocking=True),  # not pinned: the host waits
]


@pytest.mark.parametrize("waits", [*READS, *BLOCKING_COPIES])
def test_everything_for_which_the_host_waits_is_counted(waits):
    with fake_cuda():
        x = on_device(3)
        with Count() as count:
            waits(x)
    assert (len(count.reads), len(count.copies)) == ((1, 0) if waits in READS else (0, 1))


def test_what_costs_no_wait_is_not_counted():
    with fake_cuda():
        x, i = on_device(3), on_device(2, dtype=torch.int64)
        with Count() as count:
            pinned = torch.empty(3).pin_memory()
            x += pinned.to(CUDA, non_blocking=True)
            x.mul_(torch.tensor(2.0))  # a number of the host is an argument of the kernel
            x.view(1, 3)[0].add_(x.take(i).sum())
    assert not (count.reads or count.copies)
    # The copy, +=, mul, take, sum and add.
    assert count.operations.total() == 6, count.operations


def test_tensors_of_two_devices_are_an_error():
    with fake_cuda():
        x = on_device(3)
        with pytest.raises(RuntimeError, match="devices"):
            x.add_(torch.empty(3))


# -------------------------------------------------------------------- fused operations


LAUNCH_WITH_TABLE = {"aten::_to_copy": 1, "triton::momentum_kernel": 1}


def counted_twice(operation, *args):
    """A later call: the first one also makes indices that the device keeps."""
    operation(*args)
    with Count() as count:
        operation(*args)
    assert not (count.reads or count.copies or count.absent)
    return count


def test_a_list_is_one_launch_and_one_copy_of_its_table():
    with fake_cuda():
        M = [on_device(20 + i, 3) for i in range(4)]
        G = [on_device(20 + i, 3, dtype=torch.bfloat16) for i in range(4)]
        count = counted_twice(partial(ops.accumulate_, moves=None), M, G, [0.5] * 4)
    assert count.operations == LAUNCH_WITH_TABLE
    assert not count.refusals


def test_what_a_launch_only_reads_is_copied_to_the_strides_of_what_it_writes():
    with fake_cuda():
        M = [on_device(20, 3), on_device(5, 5)]
        G = [on_device(3, 20).mT, on_device(5, 5)]
        count = counted_twice(partial(ops.accumulate_, moves=None), M, G, [0.5] * 2)
    assert count.operations == {**LAUNCH_WITH_TABLE, "aten::copy_": 1}
    assert not count.refusals


@pytest.mark.parametrize(
    "tensor",
    [
        lambda: on_device(20, 3, dtype=torch.float64),
        lambda: on_device(20, 6)[:, ::2],
    ],
    ids=["float64", "gaps"],
)
def test_a_list_that_the_backend_refuses_runs_in_plain_pytorch(tensor):
    with fake_cuda():
        M = [tensor() for _ in range(4)]
        G = [tensor() for _ in range(4)]
        count = counted_twice(partial(ops.accumulate_, moves=None), M, G, [0.5] * 4)
    assert count.operations == {"aten::mul_": 4, "aten::add_": 4}
    assert count.refusals == {"accumulate_": 1}


@pytest.mark.parametrize(
    ("count", "size", "operation"),
    [
        (1, 2048, "triton::symmetric_kernel"),
        (1, 2040, "aten::bmm"),  # rows do not begin at multiples of 16 numbers
        (1, 1024, "aten::bmm"),  # fewer programs than an H100 has processors
        (4, 1024, "triton::symmetric_kernel"),
        (99, 256, "aten::bmm"),
    ],
)
def test_the_backend_itself_says_which_symmetric_products_gain(count, size, operation):
    with fake_cuda():
        A, out = (on_device(count, size, size, dtype=torch.float16) for _ in range(2))
        counted = counted_twice(ops.symmetric_product, A, A, out)
    assert counted.operations == {operation: 1}
    assert counted.refusals.total() == (operation == "aten::bmm")


def test_tables_hold_addresses_that_do_not_overlap():
    with fake_cuda():
        x, y = on_device(5), on_device(7, dtype=torch.float16)
        begin = x.data_ptr()
        assert begin % 16 == 0 and y.data_ptr() % 16 == 0
        assert x[2:].data_ptr() == begin + 8
        assert not begin <= y.data_ptr() < begin + x.nbytes


def test_an_operation_that_the_backend_lacks_is_recorded():
    with fake_cuda(), Count() as count:
        assert backends.fused("unheard_of", on_device(3)) is None
    assert count.absent == {"unheard_of": 1} and not count.refusals


def test_nothing_fake_stays_in_caches():
    launch = pytest.importorskip("curvadion_kernels.launch")
    with fake_cuda():
        counted_twice(ops.norms, [on_device(3)])
        code_format.constants(2, CUDA)
        assert launch._launches.cache_info().currsize == 1
    assert launch._launches.cache_info().currsize == 0
    assert code_format.constants.cache_info().currsize == 0
    assert backends.backend_for(torch.device("cpu")) != "triton"


def test_a_learning_rate_on_the_device_stays_there():
    """Neither is it read, nor does the update run in plain PyTorch."""

    def build(groups, replicas):
        rate = torch.empty((), device=CUDA)
        return Dion(
            [group | {"lr": rate} for group in groups], direction="polar", replicas="single"
        )

    case = CASES["160M: Dion, polar"]
    step = counted_steps(case._replace(build=build))[-1]
    with_number = counted_steps(case)[-1]
    assert not (step.reads or step.copies or step.refusals)
    # Rates of each shape, decays, and their places in two tables.
    assert step.operations <= with_number.operations + 20
