"""Products in a step are accurate, whatever torch's switches say, and the switches stay."""

import itertools

import pytest
import torch

from curvadion import Dion, ops
from curvadion.ops import precision
from curvadion.ops.precision import accurate_products
from support.runs.switches import ROUNDING, switched

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
MATMUL = torch.backends.cuda.matmul
OLDER = ("highest", "high", "medium")
VALUES = ("none", "ieee", "tf32")
NEWER = {"all": torch.backends, "CUDA": torch.backends.cudnn, "products": MATMUL}
HALVES = [(True, False), (True, True), (False, False), (False, True), ((False, False), False)]


@pytest.fixture(autouse=True)
def _restored():
    halves = MATMUL.allow_fp16_reduced_precision_reduction, MATMUL.allow_fp16_accumulation
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.mkldnn.matmul.fp32_precision = "none"
    for switch in NEWER.values():
        switch.fp32_precision = "none"
    set_halves(*halves)


def set_halves(reduced, accumulated):
    MATMUL.allow_fp16_reduced_precision_reduction = reduced
    MATMUL.allow_fp16_accumulation = accumulated


def read(owner, name):
    """What a switch says, or that it cannot be read: interfaces are mixed."""
    try:
        return getattr(owner, name)
    except RuntimeError as error:
        return type(error)


def older():
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError as error:
        return type(error)


def switches():
    names = ("reduced_precision_reduction", "reduced_precision_reduction_split_k", "accumulation")
    return (
        *(switch.fp32_precision for switch in NEWER.values()),
        torch.backends.cudnn.conv.fp32_precision,
        torch.backends.mkldnn.matmul.fp32_precision,
        *(read(MATMUL, f"allow_fp16_{name}") for name in names),
        read(MATMUL, "allow_tf32"),
        older(),
    )


def own_values():
    """All that can be known of the switches: also what products inherit if others change."""
    known = [switches()]
    for name in ("all", "CUDA"):
        before = NEWER[name].fp32_precision
        for value in VALUES:
            NEWER[name].fp32_precision = value
            known.append(switches())
        NEWER[name].fp32_precision = before
    return known


def accurate():
    assert MATMUL.fp32_precision != "tf32"
    assert not MATMUL.allow_fp16_reduced_precision_reduction
    assert not MATMUL.allow_fp16_accumulation
    return True


def set_all(older_value, values):
    torch.set_float32_matmul_precision(older_value)
    for switch, value in zip(NEWER.values(), values, strict=True):
        if value != "unset":
            switch.fp32_precision = value


EVERY = [*itertools.product(VALUES, VALUES, (*VALUES, "unset"))]


@pytest.mark.parametrize("older_value", OLDER)
def test_every_combination_of_both_interfaces_is_restored(older_value):
    for values in EVERY:
        set_all(older_value, values)
        before = switches()
        with accurate_products(CUDA):
            assert accurate(), values
            with accurate_products(CUDA):  # nested
                assert accurate(), values
            assert accurate(), values
        assert switches() == before, values
        # Reading what is inherited changes it, so twice: with the block and without.
        after = own_values()
        set_all(older_value, values)
        assert own_values() == after, values


@pytest.mark.parametrize("halves", HALVES)
def test_sums_in_float16_are_restored(halves):
    set_halves(*halves)
    before = switches()
    with accurate_products(CUDA):
        assert accurate()
    assert switches() == before


def test_an_error_restores_them():
    torch.set_float32_matmul_precision("high")
    before = switches()
    with pytest.raises(KeyError), accurate_products(CUDA):
        assert accurate()
        raise KeyError
    assert switches() == before


@pytest.mark.parametrize("switch", ROUNDING)
def test_the_older_interface_can_be_read_as_before(switch):
    with switched(switch):
        before = older()
        with accurate_products(CUDA):
            assert older() == before or before is RuntimeError
        assert older() == before


def test_frozen_switches_are_no_obstacle(monkeypatch):
    torch.backends.fp32_precision = "tf32"
    monkeypatch.setattr(torch.backends, "flags_frozen", lambda: True)
    with accurate_products(CUDA):
        assert accurate()
    assert MATMUL.fp32_precision == "tf32"


def test_other_devices_keep_them():
    torch.set_float32_matmul_precision("high")
    before = switches()
    with accurate_products(CPU):
        assert switches() == before


# -------------------------------------------------------------------- a whole step


def rounded(x):
    """Float32 as tensor cores take it where TensorFloat-32 is allowed: 10 bits of mantissa."""
    if x.dtype != torch.float32 or MATMUL.fp32_precision != "tf32":
        return x
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def as_on_a_gpu(product):
    def call(a, b, **keys):
        return product(rounded(a), rounded(b), **keys)

    return call


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("switch", ROUNDING)
def test_a_momentum_of_low_rank_gives_a_step_of_low_rank(switch, autocast, monkeypatch):
    for name in ("mm", "bmm"):
        monkeypatch.setattr(torch, name, as_on_a_gpu(getattr(torch, name)))
    monkeypatch.setattr(precision, "accurate_products", lambda device: accurate_products(CUDA))
    generator = torch.Generator().manual_seed(0)
    X = torch.nn.Parameter(torch.zeros(512, 256))
    optimizer = Dion([X], rank_fraction=0.25, weight_decay=0.0, replicas="single", lr=1.0)
    left = torch.randn(512, 8, generator=generator, dtype=torch.float64)
    right = torch.randn(8, 256, generator=generator, dtype=torch.float64)
    X.grad = (left @ right).float()
    with ops.use_backend("torch"), switched(switch), torch.autocast("cpu", enabled=autocast):
        optimizer.step()
        assert MATMUL.fp32_precision == "tf32"
    # The longest is of length one: noise would have the same length.
    lengths = torch.linalg.svdvals(X.detach().double())
    assert int((lengths > 0.01 * lengths[0]).sum()) == 8
