"""Every backend of curvadion.ops.operations that runs in this process, against float64.

With TRITON_INTERPRET=1 that includes the Triton kernels; test_triton.py runs it so.
"""

from __future__ import annotations

import contextlib
import importlib
import os

import pytest
import torch

import operations
from curvadion import ops
from pairwise import all_pairs
from switches import ROUNDING, SWITCHES, switched

F32, BF16, F16 = operations.DTYPES
CPU = torch.device("cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# The interpreter takes milliseconds a program: it sees short lists only.
BACKENDS = ["triton"] if INTERPRETED else ["torch"]  # C++ on the CPU has codes alone
SIZES = {k: v for k, v in operations.SIZES.items() if not (INTERPRETED and k == "across blocks")}


pytestmark = [pytest.mark.numeric, pytest.mark.parametrize("backend", BACKENDS)]


@pytest.fixture(autouse=True)
def available(backend):
    lacks = ops.lacking(backend)
    if lacks is not None:
        pytest.skip(lacks)


@pytest.mark.parametrize(
    ("dtypes", "sizes", "aligned"),
    all_pairs([[F32], [BF16], [F16], [F32, BF16], [BF16, F16, F32]], list(SIZES), [True, False]),
)
def test_norms(backend, dtypes, sizes, aligned):
    operations.check_norms(backend, CPU, SIZES[sizes], dtypes, aligned=aligned)


@pytest.mark.parametrize(
    ("M_dtypes", "G_dtypes", "sizes", "aligned"),
    all_pairs([[F32], [BF16], [F32, F16]], [[F32], [BF16], [F16, F32]], list(SIZES), [True, False]),
)
def test_momentum(backend, M_dtypes, G_dtypes, sizes, aligned):
    operations.check_momentum(backend, CPU, SIZES[sizes], M_dtypes, G_dtypes, aligned=aligned)


@pytest.mark.parametrize("check", operations.SPECIAL_CASES)
def test_special_cases(backend, check):
    check(backend, CPU)


@pytest.mark.parametrize(
    ("X_dtypes", "G_dtypes", "M_dtypes", "sizes", "aligned"),
    all_pairs(
        [[F32], [BF16], [F16, F32]],
        [[F32], [BF16]],
        [None, [F32], [BF16]],
        list(SIZES),
        [True, False],
    ),
)
def test_local_step(backend, X_dtypes, G_dtypes, M_dtypes, sizes, aligned):
    operations.check_local_step(
        backend, CPU, SIZES[sizes], X_dtypes, G_dtypes, M_dtypes, aligned=aligned
    )


@pytest.mark.parametrize("Q_dtype", [F32, BF16, F16])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (2, 40, 7), (3, 129, 64), (1, 5, 300), (2, 0, 4), (0, 3, 2)]
)
def test_columns(backend, shape, Q_dtype):
    operations.check_columns(backend, CPU, shape, Q_dtype)


@pytest.mark.parametrize("scale", [1e-36, 1e30])
def test_columns_of_any_scale(backend, scale):
    operations.check_columns(backend, CPU, (2, 40, 7), F32, scale)


@pytest.mark.parametrize(
    ("X_dtypes", "M_dtypes", "with_momentum", "aligned"),
    all_pairs([[F32], [BF16], [F16, F32]], [[F32], [BF16]], [True, False], [True, False]),
)
def test_low_rank_update(backend, X_dtypes, M_dtypes, with_momentum, aligned):
    shapes = [(40, 24, 7), (24, 40, -8), (1, 1, 1), (130, 70, -33), (5, 0, 2), (64, 64, 64)]
    operations.check_low_rank_update(
        backend, CPU, shapes, X_dtypes, M_dtypes, aligned=aligned, with_momentum=with_momentum
    )


@pytest.mark.parametrize(
    ("n", "k", "dtype", "layout"),
    all_pairs(
        [1, 5, 127, 129, 300, 517],
        [0, 1, 2],
        [F32, BF16, F16],
        operations.LAYOUTS,
    ),
)
def test_symmetric_product(backend, n, k, dtype, layout):
    operations.check_symmetric_product(backend, CPU, k, n, dtype, layout)


def test_symmetric_products_of_few_rows_and_many(backend):
    for m in (0, 1, 700):
        operations.check_symmetric_product(backend, CPU, 2, 33, F32, "rows", m=m)


# The interpreter is slow: one switch of a kind suffices there.
@pytest.mark.parametrize("switch", SWITCHES[::2] if INTERPRETED else SWITCHES)
def test_global_switches_of_torch_change_nothing(backend, switch, monkeypatch):
    force = operations.backend

    @contextlib.contextmanager
    def forced(name):
        with force(name), switched(switch):
            yield

    monkeypatch.setattr(operations, "backend", forced)  # which surrounds only the operations
    shapes = SIZES["few"]
    operations.check_norms(backend, CPU, shapes, [F32, BF16, F16])
    operations.check_momentum(backend, CPU, shapes, [F32, F16], [BF16, F32])
    operations.check_local_step(backend, CPU, shapes, [F32, BF16, F16], [F32], [BF16])
    operations.check_columns(backend, CPU, (2, 40, 7), BF16)
    # TensorFloat-32, which some CPUs have, keeps ten bits of each factor, as float16 does.
    how = {"arithmetic": F16 if switch in ROUNDING else F32}
    operations.check_low_rank_update(backend, CPU, [(40, 24, 7), (24, 40, -8)], [F32], [F32], **how)
    operations.check_symmetric_product(backend, CPU, 2, 33, F32, "rows", **how)


if INTERPRETED:  # of the kernel, not of the operation

    def test_tiles_of_symmetric_products(backend):
        importlib.import_module("triton_tiles").check_tiles(CPU)
