"""Rounding errors, extreme scales and narrow dtypes: what moves the weights, and what never may."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from curvadion import RMMC, AlwaysOpen, CurvaDion, Dion, FixedPeriod, QuantizedAverage
from support.references.reference import relative_error
from support.references.tolerance import Rounding, assert_close, assert_within
from support.runs import distributed

pytestmark = pytest.mark.numeric

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
# What a budget's steps are in one process: full rank, QR, and nothing but local steps.
BUDGET = dict(gate=FixedPeriod(10_000), sync=QuantizedAverage(), max_local_steps=None)


def gaussian(shape, seed, dtype=F64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def low_rank(n, k, seed=0):
    return gaussian((n, k), seed) @ gaussian((k, n), seed + 1)


def finite(optimizer):
    tensors = [x for group in optimizer.param_groups for x in group["params"]]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return all(bool(torch.isfinite(t.detach()).all()) for t in tensors)


# A narrow momentum loses more of the short directions of large matrices than tells anything.
SMALL, LARGE = [(64, 1), (37, 5)], [(256, 16)]
HELD_IN = {
    "float64": (F64, None, SMALL + LARGE),
    "float32": (F32, None, SMALL + LARGE),
    "bfloat16 momentum": (F32, BF16, SMALL),
}


@pytest.mark.parametrize(
    ("held_in", "right_factor"),
    [*((name, "qr") for name in HELD_IN), ("float32", "column_normalized")],
)
def test_steps_stay_in_the_column_space_of_the_gradient(held_in, right_factor):
    """Of a gradient of rank k exactly k directions move, however it has been rounded.

    Unless the first k columns of P are nearly dependent, as random ones now and then are: their
    inverse amplifies the rounding errors of the others to what looks like a signal.
    """
    dtype, momentum, sizes = HELD_IN[held_in]
    for n, k in sizes:
        gradient = low_rank(n, k)
        basis = torch.linalg.qr(gaussian((n, k), 0)).Q  # its left factor
        # Numbers are rounded to the nearest: by half of the spacing.
        held = (
            Rounding(momentum, condition=0.5, steps=4)
            if momentum
            else Rounding(dtype, terms=n, condition=5, steps=4)
        )
        product = Rounding(dtype, terms=n)  # of k orthonormal columns, or as many of length one
        p = torch.nn.Parameter(torch.zeros(n, n, dtype=dtype))
        options = dict(lr=1, weight_decay=0, rank_fraction=1.0, right_factor=right_factor)
        optimizer = Dion([p], state_dtype=momentum, **options)
        for _ in range(4):
            before = p.detach().clone()
            p.grad = gradient.to(dtype)
            optimizer.step()
            step = (p.detach() - before).double()
            values = torch.linalg.svdvals(step)
            assert_close(basis @ (basis.mT @ step), step, held)
            assert_within(values[k:].max() / values.norm(), product)
            if right_factor == "qr":
                assert_close(values[:k], torch.ones_like(values[:k]), product, elementwise=True)


def test_small_singular_values_are_followed():
    """Down to what can be told from rounding errors: a condition number of 1e4 in float32."""
    n, condition, dtype = 128, 1e4, F32
    U, V = (torch.linalg.qr(gaussian((n, n), seed)).Q for seed in (1, 2))
    gradient = (U * torch.logspace(0, -math.log10(condition), n, dtype=F64)) @ V.mT
    p = torch.nn.Parameter(torch.zeros(n, n, dtype=dtype))
    optimizer = Dion([p], lr=1, weight_decay=0, rank_fraction=1.0, right_factor="qr")
    for _ in range(60):
        before = p.detach().clone()
        p.grad = gradient.to(dtype)
        optimizer.step()
    step = -(p.detach() - before).double()
    values = torch.linalg.svdvals(step)
    # The weights of 60 steps are longer than the last step.
    product = Rounding(dtype, terms=n, condition=60)
    assert_close(values, torch.ones_like(values), product, elementwise=True)
    # Small directions too have become the gradient's own.
    assert (U.mT @ step @ V).diagonal()[-8:].min() > 0.9


def test_a_direction_without_signal_takes_no_part_and_comes_back():
    p = torch.nn.Parameter(torch.zeros(40, 24))
    optimizer = Dion([p], rank_fraction=1 / 6, momentum=0.0)
    for rank in (2, 24):
        p.grad = (gaussian((40, rank), 0) @ gaussian((rank, 24), 1)).float()
        optimizer.step()
        lengths = optimizer.state[p]["Q"].norm(dim=0)
        assert torch.equal(lengths > 0, torch.arange(4) < rank)
    assert_close(lengths, torch.ones(4), Rounding(F32, terms=24))


@pytest.mark.parametrize(
    ("options", "dtype"),
    [(BUDGET, BF16), (dict(gate=AlwaysOpen()), F32)],
    ids=["budget, bfloat16", "dion"],
)
def test_a_matrix_whose_gradients_are_zero_comes_to_rest(options, dtype):
    """It goes no further than 9 times its own norm, about as torch's Muon does, and then stands."""
    p = torch.nn.Parameter((gaussian((32, 32), 0) / 32**0.5).to(dtype))
    start = p.detach().clone()
    optimizer = CurvaDion([p], weight_decay=0, rank_fraction=1.0, **options)
    for step in range(500):
        p.grad = gaussian((32, 32), step, dtype) if step < 20 else torch.zeros_like(p)
        if step == 450:
            late = p.detach().clone()
        optimizer.step()
    assert relative_error(p.detach(), start) < 9
    assert torch.equal(p.detach(), late)
    p.grad = gaussian((32, 32), 1, dtype)
    optimizer.step()
    assert not torch.equal(p.detach(), late)  # and moves again with the next gradient


@pytest.mark.parametrize(
    ("exponent", "right_factor", "gate"),
    [(-30, "qr", RMMC(0.3)), (12, "column_normalized", AlwaysOpen())],
    ids=str,
)
def test_the_scale_of_gradients_does_not_matter(exponent, right_factor, gate):
    ends = []
    for scale in (1.0, 2.0 ** round(exponent * math.log2(10))):
        p = torch.nn.Parameter(gaussian((40, 24), 0, F32))
        optimizer = CurvaDion([p], gate=gate, right_factor=right_factor)
        opened = []
        for step in range(12):
            p.grad = gaussian((40, 24), step + 1, F32) * scale
            optimizer.step()
            opened.append(optimizer.report.gate_open)
        ends.append(p.detach())
    assert_close(*ends, Rounding(F32, terms=40, steps=12))
    assert opened[0]


@distributed.on_ranks(2)
def test_norms_over_shards_of_any_scale(rank):
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for scale in (1.0, 1e-30, 1e12):
        p = torch.nn.Parameter(distribute_tensor(gaussian((12, 8), 0, F32), mesh, [Shard(0)]))
        optimizer = CurvaDion([p], threshold=0.3)
        for step in range(3):
            gradient = gaussian((12, 8), step, F32) * scale
            p.grad = distribute_tensor(gradient, mesh, [Shard(0)])
            optimizer.step()
            assert not optimizer.report.skipped
        found.append(optimizer.state[p]["momentum_norm"].item() / scale)
        assert_close(found[-1], found[0], Rounding(F32, terms=12 * 8, steps=3))


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [("dion", {"threshold": 0.3}), ("dion", BUDGET), ("adamw", BUDGET), ("lion", BUDGET)],
    ids=["rmmc", "budget", "adamw", "lion"],
)
def test_a_step_with_a_gradient_too_large_to_be_squared_is_left_out(algorithm, options):
    p = torch.nn.Parameter(gaussian((6, 4), 0, F32))
    optimizer = CurvaDion([{"params": [p], "algorithm": algorithm}], **options)
    for size, skipped in ((1e14, False), (1e16, True), (1e38, True), (1e14, False)):
        p.grad, before = torch.full((6, 4), size), p.detach().clone()
        optimizer.step()
        assert optimizer.report.skipped == skipped == p.detach().equal(before)
        assert finite(optimizer)


@settings(max_examples=50)
@given(
    algorithm=st.sampled_from(["dion", "dion", "adamw", "lion"]),
    m=st.integers(1, 24),
    n=st.integers(1, 24),
    rank=st.integers(0, 24),
    exponents=st.lists(st.integers(-38, 38), min_size=1, max_size=4),
    dtype=st.sampled_from([F32, BF16, F64]),
    momentum=st.sampled_from([None, BF16, F32]),
    rule=st.sampled_from(["error_feedback", "plain"]),
    right_factor=st.sampled_from(["qr", "column_normalized"]),
    look_ahead=st.sampled_from([0.0, 4.0]),
    gate=st.sampled_from(["rmmc", "always", "gradient", "budget"]),
    seed=st.integers(0, 1000),
)
def test_finite_gradients_give_finite_weights(
    algorithm, m, n, rank, exponents, dtype, momentum, rule, right_factor, look_ahead, gate, seed
):
    kind = {
        "rmmc": dict(threshold=0.3),
        "always": dict(gate=AlwaysOpen()),
        "gradient": dict(gate=FixedPeriod(3), local_step="gradient", local_lr=1.0),
        "budget": dict(BUDGET),
    }[gate]
    p = torch.nn.Parameter(gaussian((m, n), seed, dtype))
    if algorithm == "dion":
        kind |= dict(state_dtype=momentum, momentum_rule=rule, right_factor=right_factor)
        kind |= dict(look_ahead=look_ahead, rank_fraction=1.0)
    else:  # which needs a gate that reads no momenta
        kind = dict(gate=AlwaysOpen(), lr=0.02)
    optimizer = CurvaDion([{"params": [p], "algorithm": algorithm}], **kind)
    most = torch.finfo(dtype).max
    for i, exponent in enumerate(exponents * 2):
        G = gaussian((m, rank), seed + i) @ gaussian((rank, n), seed - i)
        p.grad = (G * 10.0**exponent).clamp(-most, most).to(dtype)
        optimizer.step()
        assert finite(optimizer)
    if algorithm != "dion":  # whose steps are of size lr, however large gradients are
        assert (p.detach().double() - gaussian((m, n), seed)).abs().max() < 10


def test_one_outlier_does_not_stop_a_matrix_for_long():
    generator = torch.Generator().manual_seed(0)
    X = torch.nn.Parameter(torch.zeros(16, 12))
    optimizer = Dion([X], weight_decay=0, rank_fraction=1, right_factor="qr")
    resting = 0
    for step in range(140):
        X.grad = torch.randn(X.shape, generator=generator) * (1e8 if step == 20 else 1)
        before = X.detach().clone()
        optimizer.step()
        resting += torch.equal(X, before)
    assert resting <= 30
