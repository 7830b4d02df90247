"""The fused operations of an optimizer step, their backends, and plain PyTorch as their reference.

operations    the list: what each computes
backends      which implementation runs, by device or forced
reference     plain PyTorch, for any device and dtype
cpu, cuda     C++ and CUDA C++ (csrc/), called through ctypes; Triton is curvadion_kernels
tensors       what compiled code must know of a list of tensors
native        builds and loads the compiled libraries
registration  the operations as operators of torch.compile
"""

from curvadion.ops import registration as registration
from curvadion.ops.backends import BACKENDS, backend_for, implements, lacking, use_backend
from curvadion.ops.operations import (
    accumulate_,
    column_normalize,
    column_normalize_,
    column_sum_of_squares,
    local_step_,
    low_rank_update_,
    momentum_norms,
    momentum_norms_,
    norms,
)

__all__ = [
    "BACKENDS",
    "accumulate_",
    "backend_for",
    "column_normalize",
    "column_normalize_",
    "column_sum_of_squares",
    "implements",
    "lacking",
    "local_step_",
    "low_rank_update_",
    "momentum_norms",
    "momentum_norms_",
    "norms",
    "use_backend",
]
