"""Accurate products, whatever a user has set for those of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

# Values of torch's switches fp32_precision.
IEEE = "ieee"  # factors are not rounded
TF32 = "tf32"  # factors are rounded to TensorFloat-32
INHERITED = "none"  # as the next wider switch says


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Disable what would round an update's products: autocast, and switches on a GPU.

    It is entered for every step, also for one without products: that takes the host less time
    than a kernel launch. Blocks may be nested.
    """
    by_autocast = torch.is_autocast_enabled(device.type)
    without = torch.autocast(device.type, enabled=False) if by_autocast else nullcontext()
    with accurate_products(device), without:
        yield


def accurate_products(device: torch.device) -> AbstractContextManager[object]:
    """Inside the block, products on a CUDA device neither round factors nor sum in float16.

    torch's switches are the whole process's, so products of other threads are accurate too.
    Blocks may be nested: an inner one finds nothing to change. One costs the host 2 us, or 6
    if products inherit their precision from a wider switch.
    """
    return _AccurateProducts() if device.type == "cuda" else nullcontext()


class _AccurateProducts:
    """Changes those switches of torch.backends.cuda.matmul that have to, and restores them.

    The older interface (torch.set_float32_matmul_precision, allow_tf32) keeps a value beside
    them, which is not touched: afterwards both agree or disagree as before.
    """

    def __enter__(self) -> None:
        matmul = torch.backends.cuda.matmul
        # Calling it directly saves Python's search for ordinary attributes.
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
            # This also allows products in parts again, as torch does wherever it allows such
            # sums.
            matmul.allow_fp16_reduced_precision_reduction = True
        if self._sums_in_float16:
            matmul.allow_fp16_accumulation = True


def _rounds_by_itself() -> bool:
    """Whether matmul's switch itself is "tf32"; if not, it inherits that value.

    torch reports the value in effect, not the switch it comes from. Products inherit from the
    switch of all of CUDA, which is in torch.backends.cudnn, and that from the switch of all
    backends. So this changes for a moment the switch from which the value may come.
    """
    matmul = torch.backends.cuda.matmul
    cuda: Any = torch.backends.cudnn
    backends: Any = torch.backends
    if cuda.fp32_precision != TF32:
        return True  # there is nothing to inherit
    if torch.backends.flags_frozen():
        return True  # frozen switches do not change, so it does not matter
    source = backends if backends.fp32_precision == TF32 else cuda
    source.fp32_precision = IEEE
    try:
        if cuda.fp32_precision == TF32:
            # CUDA's switch has the value whatever that of all backends is.
            source.fp32_precision = TF32
            source = cuda
            source.fp32_precision = IEEE
        return bool(matmul.fp32_precision == TF32)
    finally:
        source.fp32_precision = TF32
