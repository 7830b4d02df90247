"""Accurate products on a GPU, whatever a user has set for those of the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

# Of fp32_precision: exact factors, rounded ones, and those of a switch for more at once.
IEEE, TF32, INHERITED = "ieee", "tf32", "none"


def accurate_products(device: torch.device) -> AbstractContextManager[object]:
    """Inside the block, products on a CUDA device neither round factors nor sum in float16.

    torch's switches are the whole process's, so products of other threads are accurate too.
    Blocks may be nested: an inner one finds nothing to change. One costs the host 2 us, or 6
    if products inherit their precision from a switch for more at once.
    """
    return _AccurateProducts() if device.type == "cuda" else nullcontext()


class _AccurateProducts:
    """Changes those switches of torch.backends.cuda.matmul that have to, and restores them.

    The older interface (torch.set_float32_matmul_precision, allow_tf32) has a value of its
    own besides, which stays what it is: afterwards both agree or disagree as before.
    """

    def __enter__(self) -> None:
        matmul = torch.backends.cuda.matmul
        # Faster than attributes, for which Python first looks elsewhere.
        read: Callable[[str], Any] = matmul.__getattr__
        self._rounds = read("fp32_precision") == TF32
        self._sums_parts_in_float16 = read("allow_fp16_reduced_precision_reduction")
        self._sums_in_float16 = read("allow_fp16_accumulation")
        if self._rounds:
            self._precision = TF32 if _rounds_by_itself() else INHERITED
            matmul.fp32_precision = IEEE
        if self._sums_parts_in_float16:
            matmul.allow_fp16_reduced_precision_reduction = False
        if self._sums_in_float16:
            matmul.allow_fp16_accumulation = False

    def __exit__(self, *error: object) -> None:
        matmul = torch.backends.cuda.matmul
        if self._rounds:
            matmul.fp32_precision = self._precision
        if self._sums_parts_in_float16:
            # Where torch allows such sums, it also allows a split of products in parts.
            matmul.allow_fp16_reduced_precision_reduction = True
        if self._sums_in_float16:
            matmul.allow_fp16_accumulation = True


def _rounds_by_itself() -> bool:
    """Whether matmul's own fp32_precision is "tf32", or it inherits that.

    torch tells only what holds. A product inherits from all of CUDA, whose switch is in
    torch.backends.cudnn, and that from all backends. So this changes the switch from which
    the value may come for a moment.
    """
    matmul = torch.backends.cuda.matmul
    cuda: Any = torch.backends.cudnn
    every: Any = torch.backends
    if cuda.fp32_precision != TF32 or torch.backends.flags_frozen():
        return True  # frozen switches do not change, so it does not matter
    above = every if every.fp32_precision == TF32 else cuda
    above.fp32_precision = IEEE
    try:
        if cuda.fp32_precision == TF32:  # by itself too
            above.fp32_precision = TF32
            above = cuda
            above.fp32_precision = IEEE
        return bool(matmul.fp32_precision == TF32)
    finally:
        above.fp32_precision = TF32
