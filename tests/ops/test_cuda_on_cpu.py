"""The numbers of CUDA C++ without a GPU: csrc/cuda compiled for one CPU thread."""

from __future__ import annotations

import functools

import pytest
import torch

from curvadion import ops
from curvadion.ops import cuda
from support.devices import cuda_on_cpu
from support.devices.compiler import needs_compiler
from support.references import operations

CPU = torch.device("cpu")
F32, BF16 = operations.DTYPES
F16 = torch.float16
pytestmark = needs_compiler


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cuda_on_cpu")

    @functools.cache
    def built(*mutation):
        return cuda_on_cpu.build(folder / str(len(list(folder.iterdir()))), *mutation)

    return built


@pytest.fixture
def emulated(build):
    with cuda_on_cpu.in_place_of_cuda(build()):
        yield


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("sizes", operations.SIZES)
@pytest.mark.usefixtures("emulated")
@pytest.mark.numeric
def test_lists(sizes, aligned):
    shapes = operations.SIZES[sizes][:120]  # more than two launches take
    operations.check_norms("cuda", CPU, shapes, [BF16, F32, F16], aligned=aligned)
    for M_dtypes, G_dtypes in (([F32, BF16], [BF16, F32]), ([F32, BF16, F16], [F16])):
        operations.check_momentum("cuda", CPU, shapes, M_dtypes, G_dtypes, aligned=aligned)
    for X_dtypes, G_dtypes, M_dtypes in (
        ([BF16, F32], [BF16, F32], [BF16]),
        ([BF16, F32, F16], [F16], [F16, F32]),
    ):
        operations.check_local_step(
            "cuda", CPU, shapes, X_dtypes, G_dtypes, M_dtypes, aligned=aligned
        )


@pytest.mark.parametrize("check", operations.SPECIAL_CASES)
@pytest.mark.usefixtures("emulated")
@pytest.mark.numeric
def test_special_cases(check):
    check("cuda", CPU)


@pytest.mark.usefixtures("emulated")
@pytest.mark.numeric
def test_more_tensors_than_a_launch_takes():
    capacity = cuda.load().curvadion_cuda_capacity()
    sizes = [3 + i for i in range(2 * capacity)] + [40_000, 5]
    X = [torch.full((size,), float(i)) for i, size in enumerate(sizes)]
    with ops.use_backend("cuda"):
        found = ops.norms(X)
    expected = torch.tensor([i * size**0.5 for i, size in enumerate(sizes)], dtype=torch.float64)
    operations.assert_close(found, expected, operations.IN_A_NORM)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("== blocks - 1", ">= blocks - 2"),
        (
            "warps[threadIdx.x / 32] = value;\n    __syncthreads();",
            "warps[threadIdx.x / 32] = value;",
        ),
        ("if (dtype == BFLOAT16) return", "if (dtype != FLOAT32) return"),
    ],
    ids=["a block ends a norm too early", "a barrier is missing", "float16 is read as bfloat16"],
)
def test_the_checks_see_when(old, new, build):
    shapes = operations.SIZES["across blocks"]
    with (
        cuda_on_cpu.in_place_of_cuda(build(old, new)),
        pytest.raises(AssertionError, match="of what Rounding"),
    ):
        operations.check_norms("cuda", CPU, shapes, [F32, F16])
