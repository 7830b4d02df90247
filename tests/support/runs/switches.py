"""torch's global switches, one at a time: what a user may set around an optimizer's step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def _float32_precision(value: str) -> None:
    torch.backends.fp32_precision = value


def _matmul_precision(value: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = value


def _older_precision(value: str) -> None:
    torch.set_float32_matmul_precision(value)
    if value == "highest":
        # It has set these two to "ieee", which would hide what is set for all of them.
        torch.backends.cuda.matmul.fp32_precision = "none"
        torch.backends.mkldnn.matmul.fp32_precision = "none"


# Name: how to set it, its value, and the value to restore.
_SET = {
    "set_float32_matmul_precision": (_older_precision, "high", "highest"),
    "fp32_precision of all": (_float32_precision, "tf32", "none"),
    "fp32_precision of CUDA": (_matmul_precision, "tf32", "none"),
    "default float64": (torch.set_default_dtype, torch.float64, torch.float32),
    "default bfloat16": (torch.set_default_dtype, torch.bfloat16, torch.float32),
    "default device cpu": (torch.set_default_device, "cpu", None),
    "default device meta": (torch.set_default_device, "meta", None),
    "deterministic": (torch.use_deterministic_algorithms, True, False),
}
# Those that let products round float32 to TensorFloat-32.
ROUNDING = ("set_float32_matmul_precision", "fp32_precision of all", "fp32_precision of CUDA")
SWITCHES = (*_SET, "autocast")


@contextmanager
def switched(name: str) -> Iterator[None]:
    """Set one of SWITCHES inside the block."""
    if name == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            yield
        return
    change, value, before = _SET[name]
    change(value)
    try:
        yield
    finally:
        change(before)
