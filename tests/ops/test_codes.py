"""Codes of every backend that runs in this process, bit for bit against numpy.

With TRITON_INTERPRET=1 that is the Triton kernels; test_triton.py runs it so.
"""

from __future__ import annotations

import os

import pytest
import torch

import code_operations
from code_operations import LONG
from curvadion import ops
from curvadion.ops.codes import BITS, block_bytes
from pairwise import all_pairs

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CPU = torch.device("cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["triton"] if INTERPRETED else ["torch", "cpu"]


each_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def available(request):
    given = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    lacks = ops.lacking(given.get("backend", BACKENDS[-1]))
    if lacks is not None:
        pytest.skip(lacks)


@each_backend
@pytest.mark.parametrize(
    ("bits", "X_dtype", "R_dtype", "anchors", "residuals"),
    all_pairs(BITS, [F32, BF16, F16], [F32, BF16], [True, False], [True, False]),
)
def test_differences(backend, bits, X_dtype, R_dtype, anchors, residuals):
    code_operations.check_encode_difference(
        backend, CPU, bits, X_dtype, R_dtype, with_anchors=anchors, with_residuals=residuals
    )


@each_backend
@pytest.mark.parametrize("X_dtype", [F32, BF16, F16])
@pytest.mark.parametrize("bits", BITS)
def test_what_codes_stand_for(backend, bits, X_dtype):
    code_operations.check_decode(backend, CPU, bits, X_dtype)


@each_backend
@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (3, 0), (3, 1), (4, 3)])
@pytest.mark.parametrize("bits", [2, 8])
def test_averages(backend, bits, ranks, rank):
    code_operations.check_average(backend, CPU, bits, ranks, rank)


@each_backend
@pytest.mark.parametrize("scale", [0.0, 1e-44, 2.0**-126, 1e10, 2.0**115])
def test_numbers_of_any_scale(backend, scale):
    shapes = [(300,), (7,)]
    code_operations.check_encode_difference(backend, CPU, 2, shapes=shapes, scale=scale)
    # The interpreter does not convert subnormal bfloat16.
    narrow = F32 if INTERPRETED and scale < 1e-30 else BF16
    code_operations.check_decode(backend, CPU, 3, narrow, shapes=shapes, scale=scale)
    code_operations.check_average(backend, CPU, 4, 3, 1, scale=scale)


@each_backend
@pytest.mark.parametrize(("first", "owned"), [(0, 0), (0, 200), (69, 5), (133, 9), (64, 70)])
def test_runs_of_blocks(backend, first, owned):
    code_operations.check_encode_difference(backend, CPU, 2, shapes=LONG, first=first, owned=owned)
    code_operations.check_decode(backend, CPU, 2, shapes=LONG)


@each_backend
def test_memory_layouts(backend):
    code_operations.check_memory_layouts(backend, CPU)


@pytest.mark.numeric
@each_backend
def test_wide_tensors(backend):
    code_operations.check_wide_tensors(backend, CPU)


@each_backend
def test_lists_may_be_empty(backend):
    codes = torch.zeros(0, block_bytes(2), dtype=torch.uint8)
    with ops.use_backend(backend):
        ops.encode_difference_(codes, [], bits=2)
        ops.decode_([], codes, 2)
        ops.decode_add_([], [], codes, 2)
        ops.average_codes_(codes, torch.zeros(0, 256), codes.view(2, 0, 66), 0, 2)


@each_backend
def test_what_does_not_fit_is_refused(backend):
    x, codes = [torch.ones(300)], torch.zeros(2, block_bytes(2), dtype=torch.uint8)
    with ops.use_backend(backend):
        for wrong, bits in ((codes[:1], 2), (codes, 4), (codes.int(), 2)):
            with pytest.raises(ValueError, match=r"codes of shape .* they must be"):
                ops.encode_difference_(wrong, x, bits=bits)
            with pytest.raises(ValueError, match=r"codes of shape .* they must be"):
                ops.decode_add_(x, x, wrong, bits)
        with pytest.raises(ValueError, match="must be equal"):
            ops.encode_difference_(codes, x, [torch.ones(301)], bits=2)
        with pytest.raises(ValueError, match="received of shape"):
            ops.average_codes_(codes, torch.zeros(2, 256), codes[None, :1], 0, 2)


@pytest.mark.skipif(INTERPRETED, reason="of the C++")
def test_the_number_of_threads_changes_no_bit():
    before, results = torch.get_num_threads(), []
    X, A, R = ([torch.randn(100_003), torch.randn(17)] for _ in range(3))
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            codes = torch.zeros(392, block_bytes(3), dtype=torch.uint8)
            x, a, r = ([t.clone() for t in list_] for list_ in (X, A, R))
            own = torch.zeros(100, 256)
            with ops.use_backend("cpu"):
                ops.encode_difference_(codes, x, a, r, bits=3, owned=own, first=150)
                ops.decode_add_(x, a, codes, 3)
                mean = torch.zeros_like(codes[:100])
                ops.average_codes_(mean, own, codes[:300].view(3, 100, -1), 1, 3)
            results.append([codes, *x, *a, *r, mean, own])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
