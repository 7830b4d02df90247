"""Every backend of curvadion.ops.operations that runs in this process, against float64.

With TRITON_INTERPRET=1 that is the Triton kernels; test_triton.py runs it so.
"""

from __future__ import annotations

import contextlib
import importlib

import pytest
import torch

from support.references import operations
from support.references.operations import INTERPRETED
from support.runs.pairwise import all_pairs
from support.runs.switches import ROUNDING, SWITCHES, switched

F32, BF16 = operations.DTYPES
F16 = torch.float16
SIZES = operations.SIZES
SHAPES = [(40, 24, 7), (24, 40, -8), (1, 1, 1), (130, 70, -33), (5, 0, 2), (64, 64, 64)]
ROWS = [1, 5, 127, 129, 300, 517]
if INTERPRETED:  # which takes milliseconds a program: it sees short lists only
    SIZES = {name: SIZES[name] for name in ("one", "few", "odd and even")}
    ROWS = [1, 129, 300]

pytestmark = [
    pytest.mark.numeric,
    # C++ on the CPU has codes alone.
    pytest.mark.parametrize(("backend", "device"), operations.places("torch")),
]


@pytest.mark.parametrize(
    ("dtypes", "sizes", "aligned"),
    all_pairs([[F32], [BF16], [F16], [BF16, F32, F16]], list(SIZES), [True, False]),
)
def test_norms(backend, device, dtypes, sizes, aligned):
    operations.check_norms(backend, device, SIZES[sizes], dtypes, aligned=aligned)


@pytest.mark.parametrize(
    ("M_dtypes", "G_dtypes", "sizes", "aligned"),
    all_pairs(
        [[F32], [BF16], [F16, F32, BF16]],
        [[F32], [BF16], [F16], [BF16, F32, F16]],
        list(SIZES),
        [True, False],
    ),
)
def test_momentum(backend, device, M_dtypes, G_dtypes, sizes, aligned):
    operations.check_momentum(backend, device, SIZES[sizes], M_dtypes, G_dtypes, aligned=aligned)


@pytest.mark.parametrize("check", operations.SPECIAL_CASES)
def test_special_cases(backend, device, check):
    check(backend, device)


@pytest.mark.parametrize(
    ("X_dtypes", "G_dtypes", "M_dtypes", "sizes", "aligned"),
    all_pairs(
        [[F32], [BF16], [BF16, F32], [F16]],
        [[F32], [BF16], [F16]],
        [None, [F32], [BF16], [F16]],
        list(SIZES),
        [True, False],
    ),
)
def test_local_step(backend, device, X_dtypes, G_dtypes, M_dtypes, sizes, aligned):
    operations.check_local_step(
        backend, device, SIZES[sizes], X_dtypes, G_dtypes, M_dtypes, aligned=aligned
    )


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 40, 7), (3, 129, 64), (1, 5, 300), (2, 0, 4)])
def test_columns(backend, device, shape):
    operations.check_columns(backend, device, shape)


@pytest.mark.parametrize("scale", [1e-36, 1e30])
def test_columns_of_any_scale(backend, device, scale):
    operations.check_columns(backend, device, (2, 40, 7), scale)


@pytest.mark.parametrize(
    ("X_dtypes", "M_dtypes", "with_momentum", "aligned"),
    all_pairs([[F32], [BF16], [BF16, F32]], [[F32], [BF16]], [True, False], [True, False]),
)
def test_low_rank_update(backend, device, X_dtypes, M_dtypes, with_momentum, aligned):
    shapes = SHAPES if INTERPRETED else [*SHAPES, (512, 256, 128), (256, 512, -128)]
    operations.check_low_rank_update(
        backend, device, shapes, X_dtypes, M_dtypes, aligned=aligned, with_momentum=with_momentum
    )


@pytest.mark.parametrize(
    ("n", "k", "dtype", "layout"), all_pairs(ROWS, [0, 1, 2], [F32, BF16, F16], operations.LAYOUTS)
)
def test_symmetric_product(backend, device, n, k, dtype, layout):
    operations.check_symmetric_product(backend, device, k, n, dtype, layout)


def test_symmetric_products_of_few_rows_and_many(backend, device):
    for m in (0, 1, 700):
        operations.check_symmetric_product(backend, device, 2, 33, F32, "rows", m=m)


# The interpreter is slow: one switch of a kind suffices there.
@pytest.mark.parametrize("switch", SWITCHES[::2] if INTERPRETED else SWITCHES)
def test_global_switches_of_torch_change_nothing(backend, device, switch, monkeypatch):
    force = operations.backend

    @contextlib.contextmanager
    def forced(name):
        with force(name), switched(switch):
            yield

    monkeypatch.setattr(operations, "backend", forced)  # which surrounds only the operations
    shapes = SIZES["few"]
    operations.check_norms(backend, device, shapes, [F32, BF16])
    operations.check_momentum(backend, device, shapes, [F32, BF16], [BF16, F32])
    operations.check_local_step(backend, device, shapes, [F32, BF16], [F32], [BF16])
    operations.check_columns(backend, device, (2, 40, 7))
    # TensorFloat-32, which some CPUs have, keeps ten bits of each factor, as float16 does.
    how = {"arithmetic": F16 if switch in ROUNDING else F32}
    operations.check_low_rank_update(backend, device, SHAPES[:2], [F32], [F32], **how)
    operations.check_symmetric_product(backend, device, 2, 33, F32, "rows", **how)


def test_tiles_of_symmetric_products(backend, device):
    if backend != "triton":
        pytest.skip("of the Triton kernel alone")
    importlib.import_module("support.devices.triton_tiles").check_tiles(device)
