"""Codes of every backend that runs in this process, bit for bit against numpy.

With TRITON_INTERPRET=1 that is the Triton kernels; test_triton.py runs it so.
"""

from __future__ import annotations

import pytest
import torch

from curvadion import ops
from curvadion.ops.code_format import BITS, Bits, block_bytes
from support.references import code_operations
from support.references.code_operations import LONG
from support.references.operations import DTYPES, INTERPRETED, places
from support.runs.pairwise import all_pairs

F32, BF16 = DTYPES
FEW_BITS = [1, 3] if INTERPRETED else BITS

each_backend = pytest.mark.parametrize(("backend", "device"), places("torch", "cpu"))


@each_backend
@pytest.mark.parametrize(
    ("bits", "X_dtype", "R_dtype", "anchors", "residuals"),
    all_pairs(FEW_BITS, [F32, BF16], [F32, BF16], [True, False], [True, False]),
)
def test_differences(backend, device, bits, X_dtype, R_dtype, anchors, residuals):
    code_operations.check_encode_difference(
        backend, device, bits, X_dtype, R_dtype, with_anchors=anchors, with_residuals=residuals
    )


@each_backend
@pytest.mark.parametrize("X_dtype", [F32, BF16])
@pytest.mark.parametrize("bits", FEW_BITS)
def test_what_codes_stand_for(backend, device, bits, X_dtype):
    code_operations.check_decode(backend, device, bits, X_dtype)


@each_backend
@pytest.mark.parametrize(
    ("up", "down", "ranks", "rank"), [(2, 2, 1, 0), (8, 8, 3, 0), (1, 2, 3, 1), (8, 3, 4, 3)]
)
def test_averages(backend, device, up, down, ranks, rank):
    code_operations.check_average(backend, device, up, down, ranks, rank)


@each_backend
@pytest.mark.parametrize("scale", [0.0, 1e-44, 2.0**-126, 1e10, 2.0**121])
def test_numbers_of_any_scale(backend, device, scale):
    shapes = [(300,), (7,)]
    code_operations.check_encode_difference(backend, device, 2, shapes=shapes, scale=scale)
    # The interpreter does not convert subnormal bfloat16.
    narrow = F32 if INTERPRETED and scale < 1e-30 else BF16
    code_operations.check_decode(backend, device, 3, narrow, shapes=shapes, scale=scale)
    code_operations.check_average(backend, device, 4, 4, 3, 1, scale=scale)


@each_backend
@pytest.mark.parametrize(("first", "owned"), [(0, 0), (69, 5), (64, 70)])
def test_runs_of_blocks(backend, device, first, owned):
    code_operations.check_encode_difference(
        backend, device, 2, shapes=LONG, first=first, owned=owned
    )
    code_operations.check_decode(backend, device, 2, shapes=LONG)


@each_backend
def test_memory_layouts(backend, device):
    code_operations.check_memory_layouts(backend, device)


@pytest.mark.numeric
@each_backend
def test_wide_tensors(backend, device):
    code_operations.check_wide_tensors(backend, device)


@each_backend
def test_lists_may_be_empty(backend, device):
    """They have no rows, and nothing around the memory of none is written."""
    memory = torch.full((4, block_bytes(2)), 7, dtype=torch.uint8, device=device)
    floats = torch.full((4, 256), 7.0, device=device)
    codes, own = memory[2:2], floats[2:2]
    empty = [floats.new_empty(0)]
    with ops.use_backend(backend):
        for X in ([], empty):
            ops.encode_difference_(codes, X, bits=2)
            ops.encode_difference_(codes, X, X, X, bits=2, owned=own, first=2)
            ops.decode_add_(X, (), codes, 2)
            ops.decode_add_(X, X, codes, 2)
            with pytest.raises(ValueError, match="they must be"):
                ops.encode_difference_(memory[:1], X, bits=2)
            with pytest.raises(ValueError, match="they must be"):
                ops.decode_add_(X, X, memory[:1], 2)
        ops.average_codes_(codes, own, codes.view(2, 0, block_bytes(2)), 0, Bits(2, 2))
    assert memory.eq(7).all()
    assert floats.eq(7).all()
    assert empty[0].shape == (0,)


@each_backend
def test_what_does_not_fit_is_refused(backend, device):
    x = [torch.ones(300, device=device)]
    codes = torch.zeros(2, block_bytes(2), dtype=torch.uint8, device=device)
    with ops.use_backend(backend):
        for wrong, bits in ((codes[:1], 2), (codes, 4), (codes.int(), 2)):
            with pytest.raises(ValueError, match=r"codes of shape .* they must be"):
                ops.encode_difference_(wrong, x, bits=bits)


def test_the_number_of_threads_changes_no_bit_of_the_compiled_library():
    if ops.lacking("cpu"):
        pytest.skip(ops.lacking("cpu"))
    before, results = torch.get_num_threads(), []
    X, A, R = ([torch.randn(100_003), torch.randn(17)] for _ in range(3))
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            codes = torch.zeros(392, block_bytes(3), dtype=torch.uint8)
            x, a, r = ([t.clone() for t in list_] for list_ in (X, A, R))
            own = torch.zeros(100, 256)
            with ops.use_backend("cpu"):
                ops.encode_difference_(codes, x, a, r, bits=3, owned=own, first=150)
                ops.decode_add_(x, a, codes, 3)
                mean = torch.zeros_like(codes[:100])
                ops.average_codes_(mean, own, codes[:300].view(3, 100, -1), 1, Bits(3, 3))
            results.append([codes, *x, *a, *r, mean, own])
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *results))
