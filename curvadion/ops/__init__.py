"""The fused operations of an optimizer step and their backends.

operations    what each operation computes, in plain PyTorch, which is the reference of all backends
coding        the same for codes of a few bits, whose format is in codes
backends      the choice of a backend, by device or by the user, and calls of it
cpu, cuda     C++ and CUDA C++ (csrc/), called through ctypes; Triton is in curvadion_kernels
tensors       what operations ask of lists of tensors
native        building, loading and calling of the compiled libraries
"""

from curvadion.ops.backends import BACKENDS, backend_for, lacking, use_backend
from curvadion.ops.coding import average_codes_, decode_add_, encode_difference_
from curvadion.ops.operations import (
    accumulate_,
    column_normalize,
    column_sum_of_squares,
    local_step_,
    low_rank_update_,
    momentum_norms,
    norms,
    symmetric_product,
)

__all__ = [
    "BACKENDS",
    "accumulate_",
    "average_codes_",
    "backend_for",
    "column_normalize",
    "column_sum_of_squares",
    "decode_add_",
    "encode_difference_",
    "lacking",
    "local_step_",
    "low_rank_update_",
    "momentum_norms",
    "norms",
    "symmetric_product",
    "use_backend",
]
