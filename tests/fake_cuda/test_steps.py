"""What steps do on a GPU, counted with fake CUDA tensors: launches, reads and copies.

Operations may not be more than the number in the table, nor so few that the table is out of date.
``python tests/support/counted_steps.py`` prints today's.
"""

import pytest
import torch

from counted_steps import CASES, counted_steps
from fake_cuda import CUDA, Count, fake_cuda, needs_fake_cuda

pytestmark = needs_fake_cuda

# By case: operations of the first step, of an opening, and of a closed step if there is one.
OPERATIONS = {
    "Dion, low_rank": (1499, 1023),
    "Dion, polar, 8 ranks": (2045, 361),
    "Dion, polar, 8 shards": (815, 379),
    "LowRank, RMMC, low_rank": (1649, 1107, 1103),
    "LowRank, RMMC, polar, 8 ranks": (2014, 445, 330),
    "LowRank, schedule, low_rank, 8 ranks": (2733, 1023, 963),
    "QuantizedAverage, schedule, polar, 8 ranks": (2353, 628, 335),
    "QuantizedAverage, RMMC, polar": (1124, 479, 330),
    "QuantizedAverage, RMMC, low_rank, 8 ranks": (3541, 1802, 1465),
    "CodedGradients, polar, 8 ranks": (2173, 341),
    "CodedGradients, low_rank, 8 ranks": (3543, 1615),
    "1.3B: Dion, low_rank, 8 ranks": (7351, 3274),
    "1.3B: QuantizedAverage, schedule, polar, 8 ranks": (5215, 1811, 892),
    "1.3B: LowRank, RMMC, low_rank, 8 ranks": (6794, 3198, 2717),
    "1.3B: Dion, polar, 8 shards": (1036, 387),
}
# The first step also compares the replicas, and creates states: right factors begin on the host.
READS_OF_THE_FIRST, COPIES = 2, 0


def reads(name, kind):
    """None where no other replica waits: closed steps of a schedule, and those of one replica."""
    alone = "shards" in name or not ("ranks" in name or "RMMC" in name)
    return 0 if alone or (kind == "closed" and "schedule" in name) else 1


@pytest.mark.parametrize("name", CASES)
def test_a_step_keeps_to_its_budget(name):
    steps = counted_steps(CASES[name])
    assert len(steps) == len(OPERATIONS[name])
    for step, most in zip(steps, OPERATIONS[name], strict=True):
        assert 0.95 * most <= step.operations <= most, (step.kind, step.operations)
        if step.kind == "first":
            assert len(step.reads) <= READS_OF_THE_FIRST, step.reads
        else:
            assert len(step.reads) == reads(name, step.kind), (step.kind, step.reads)
            assert len(step.copies) == COPIES, (step.kind, step.copies)


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
