"""What a recorded step reads anew: live numbers and addresses; and when it no longer fits."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from curvadion.ops import page as page_module
from curvadion.ops.page import Column, Live, LiveGroup, Page, PageFull, apply, recording
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
    page.settle()
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
    page.settle()
    page.refresh()
    assert torch.equal(first, plain) and torch.equal(second, plain)
    assert first.data_ptr() % 16 == second.data_ptr() % 16


def test_what_stays_as_it_is_keeps_shapes_dtypes_and_bits(page):
    tensors = [torch.arange(5), torch.arange(6, dtype=torch.int32).view(2, 3), torch.empty(0)]
    with page.record():
        places = page.fixed(tensors)
    page.settle()
    page.refresh()
    for place, t in zip(places, tensors, strict=True):
        assert place.dtype == t.dtype and torch.equal(place, t)
        assert place.data_ptr() % 16 == places[0].data_ptr() % 16


class _OnlyViews(TorchDispatchMode):
    """Notes operators that take or return tensors of the device, and are no views."""

    def __init__(self):
        super().__init__()
        self.others = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        views = any(r.alias_info and not r.alias_info.is_write for r in function._schema.returns)
        leaves = tree_leaves((args, kwargs, result))
        if not views and any(isinstance(t, torch.Tensor) and t.is_meta for t in leaves):
            self.others.append(function._schema.name)
        return result


def test_memory_is_allocated_before_the_recording():
    """A graph would give the same memory to results before it, which then overwrite it."""
    page = Page(torch.device("meta"), list)
    with page.record(), _OnlyViews() as seen:
        page.fixed([torch.arange(5)])
        page.numbers([1.0, 2.0], F64)
    assert not seen.others
    with _OnlyViews() as seen:
        page.settle()
    assert seen.others == ["aten::copy_"]


@pytest.mark.parametrize("of", ["tables", "what stays"])
def test_a_page_that_is_full_says_so(of):
    with mock.patch.object(page_module, "CELLS", 32):
        page = Page(CPU, list)
    with page.record(), pytest.raises(PageFull):
        for _ in range(5):
            if of == "tables":
                page.numbers([1.0] * 8, F64)
            else:
                page.fixed([torch.arange(8)])


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
        with ThreadPoolExecutor(1) as other:
            assert other.submit(recording).result() is None
    assert recording() is None
