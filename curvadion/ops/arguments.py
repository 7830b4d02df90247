"""Arguments of the compiled libraries: lists as C sees them."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from curvadion.ops.tensors import Facts, Unsupported

POINTER = ctypes.c_void_p
INT = ctypes.c_int64


def declare(library: ctypes.CDLL, signatures: Mapping[str, list[Any]], result: Any) -> ctypes.CDLL:
    """Tell ctypes the argument types of functions, and the result type that they share."""
    for name, types in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, result
    return library


def counted(facts: Facts) -> tuple[int, int, int]:
    """Sizes, addresses and dtypes of a list, as three array arguments."""
    return start(facts.sizes.numel), *addressed(facts)


def addressed(facts: Facts) -> tuple[int, int]:
    """Addresses and dtypes of a list, as two array arguments."""
    return start(facts.pointers), start(facts.codes)


def floats(values: Sequence[float], count: int) -> array[float]:
    """float32 numbers, one for each of ``count`` tensors."""
    if len(values) != count:
        raise ValueError(f"{len(values)} numbers for {count} tensors: give one for each")
    return array("f", values)


def host_numbers(values: Sequence[float | Tensor], count: int) -> array[float]:
    """As :func:`floats`, one for each of ``count`` tensors.

    Raises:
        Unsupported: for learning rates that are tensors, which the host must not wait for.
    """
    numbers = [value for value in values if not isinstance(value, Tensor)]
    if len(numbers) < len(values):
        raise Unsupported
    return floats(numbers, count)


def start(values: array[Any] | None) -> Any:
    """The address of an array's first element, valid as long as the array lives."""
    return None if values is None else values.buffer_info()[0]
