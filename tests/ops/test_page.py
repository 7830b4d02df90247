"""What a recorded step reads anew: live numbers and addresses; and when it no longer fits."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch

from curvadion.ops.page import Column, Live, LiveGroup, Page, apply, recording
from curvadion.ops.tensors import from_host

CPU = torch.device("cpu")
F32, F64, I64 = torch.float32, torch.float64, torch.int64


@pytest.fixture
def moving():
    return [torch.zeros(6), torch.zeros(40)]


@pytest.fixture
def page(moving):
    return Page(CPU, lambda: moving)


def test_numbers_are_computed_again(page):
    group = {"lr": 0.5, "weight_decay": 0.25, "momentum": 0.81, "betas": (0.9, 0.99)}
    live = LiveGroup(group, page)
    rate = live["lr"]
    numbers = [
        1 - rate * live["weight_decay"],
        2.0 * rate,
        -rate,
        rate / 4,
        1 + rate,
        apply(math.sqrt, live["momentum"]),
        live["betas"][1],
        7.0,
    ]
    with page.record():
        held = from_host(numbers, F64, CPU)
        narrow = page.table(Column(numbers, F32, 8)).view(F32)[:8]
    before = [0.875, 1.0, -0.5, 0.125, 1.5, 0.9, 0.99, 7.0]
    assert held.tolist() == pytest.approx(before, rel=1e-15)
    group |= {"lr": 0.25, "weight_decay": 0.5, "momentum": 0.25, "betas": (0.8, 0.75)}
    page.settle()
    page.refresh()
    after = [0.875, 0.5, -0.25, 0.0625, 1.25, 0.5, 0.75, 7.0]
    assert held.tolist() == after and narrow.tolist() == after


def test_integers_follow_the_step(page):
    step = [3]
    number = Live(page, lambda: step[0])
    seeds = [(number * 0x9E3779B1 + i) & 0xFFFFFFFF for i in range(3)]
    with page.record():
        cells = page.table(Column(seeds, I64, 3))
    step[0] = 4
    page.refresh()
    assert cells.tolist() == [(4 * 0x9E3779B1 + i) & 0xFFFFFFFF for i in range(3)]


def test_addresses_move_with_their_tensors(page, moving):
    still = torch.zeros(5)
    views = [moving[1][7:], moving[0], still, moving[1]]
    with page.record():
        cells = page.table(Column([t.data_ptr() for t in views], None, 4))
    assert cells.tolist() == [t.data_ptr() for t in views]
    moving[:] = [torch.zeros(6), torch.zeros(40)]
    page.settle()
    page.refresh()
    moved = [moving[1][7:], moving[0], still, moving[1]]
    assert cells.tolist() == [t.data_ptr() for t in moved]


def test_tables_lie_as_without_a_page(page):
    launch = pytest.importorskip("curvadion_kernels.launch")
    columns = [
        Column([11, 2**62], None, 2),
        Column([0.5, -1.0, 3.0], F32, 3),
        Column([], F32, 3),
        Column([0.1, 0.2], F64, 2),
        Column([5, -1], I64, 3),
    ]
    plain = launch.table_of(columns, CPU)
    with page.record():
        first = launch.table_of(columns, CPU)
        second = launch.table_of(columns, CPU)
    page.refresh()
    assert torch.equal(first, plain) and torch.equal(second, plain)
    assert first.data_ptr() % 16 == second.data_ptr() % 16


def test_what_stays_as_it_is_is_kept(page):
    """A recorded step reads it at every replay, but nothing else refers to it."""
    with page.record():
        [place] = page.fixed([torch.arange(5)])
    address = weakref.ref(place)
    page.settle()
    del place
    gc.collect()
    assert address() is not None and address().tolist() == [0, 1, 2, 3, 4]


def test_more_tables_than_one_memory_holds(page):
    numbers = [float(i) for i in range(2**15)]
    with page.record():
        tables = [from_host(numbers, F64, CPU) for _ in range(3)]
    page.refresh()
    assert all(table.tolist() == numbers for table in tables)


@pytest.mark.parametrize(
    ("read", "same", "other"),
    [
        (lambda live: bool(live["lr"]), 0.25, 0.0),
        (lambda live: live["lr"] > 0.1, 0.25, 0.01),
        (lambda live: live["lr"] < 0.1, 0.25, 0.01),
        (lambda live: {**live}["direction"], 0.25, None),
        (lambda live: live["direction"], 0.25, None),
    ],
)
def test_branches_are_conditions(page, read, same, other):
    group = {"lr": 0.5, "direction": "polar"}
    read(LiveGroup(group, page))
    group["lr"] = same
    assert page.fits()
    group |= {"direction": "normuon"} if other is None else {"lr": other}
    assert not page.fits()


def test_plain_pytorch_refuses_live_numbers(page):
    """So none is frozen into a recorded step unnoticed."""
    rate = LiveGroup({"lr": 0.5}, page)["lr"]
    for use in (
        lambda: torch.ones(2).mul_(rate),
        lambda: torch.ones(2).add_(torch.ones(2), alpha=rate),
        lambda: torch.full((2,), rate),
        lambda: torch.tensor([rate]),
        lambda: math.sqrt(rate),
        lambda: float(rate),
        lambda: rate == 0.5,
        lambda: rate in (0.25, 0.5),
    ):
        with pytest.raises((TypeError, RuntimeError, ValueError)):
            use()


def test_a_page_is_that_of_the_thread_that_records(page):
    assert recording() is None
    with page.record():
        assert recording() is page
    assert recording() is None
