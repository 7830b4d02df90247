"""The fused operations of an optimizer step and their backends.

operations    the list of operations, and what each one computes
backends      the choice of a backend, by device or by the user
codes         the format of codes of a few bits, and the arithmetic that makes them
reference     plain PyTorch, for any device and dtype; the reference of all backends; that of codes
              is in reference_codes
cpu, cuda     C++ and CUDA C++ (csrc/), called through ctypes; Triton is in curvadion_kernels
tensors       what compiled code needs to know about a list of tensors
arguments     such lists as arguments of C functions
native        building and loading of the compiled libraries
registration  the operations as operators for torch.compile
"""

from curvadion.ops import registration as registration
from curvadion.ops.backends import BACKENDS, backend_for, implements, lacking, use_backend
from curvadion.ops.operations import (
    accumulate_,
    average_codes_,
    column_normalize,
    column_normalize_,
    column_sum_of_squares,
    decode_,
    decode_add_,
    encode_difference_,
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
    "column_normalize_",
    "column_sum_of_squares",
    "decode_",
    "decode_add_",
    "encode_difference_",
    "implements",
    "lacking",
    "local_step_",
    "low_rank_update_",
    "momentum_norms",
    "norms",
    "symmetric_product",
    "use_backend",
]
