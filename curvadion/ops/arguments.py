"""Lists of tensors and numbers as arguments of C functions."""

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
    """Declare the argument types of a library's functions, and their common result type."""
    for name, types in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, result
    return library


def counted(facts: Facts) -> tuple[int, int, int]:
    """A list's sizes, addresses and dtype codes, as three array arguments."""
    return start(facts.sizes.numel), *addressed(facts)


def addressed(facts: Facts) -> tuple[int, int]:
    """A list's addresses and dtype codes, as two array arguments."""
    return start(facts.pointers), start(facts.codes)


def floats(values: Sequence[float], count: int) -> array[float]:
    """The numbers as float32, one for each of ``count`` tensors.

    Raises:
        ValueError: if their number is not ``count``.
    """
    if len(values) != count:
        raise ValueError(f"{len(values)} numbers for {count} tensors: give one for each")
    return array("f", values)


def host_numbers(values: Sequence[float | Tensor], count: int) -> array[float]:
    """As :func:`floats`, for numbers that may be tensors.

    Raises:
        Unsupported: if one is a tensor, because reading it could make the host wait for a GPU.
        ValueError: if their number is not ``count``.
    """
    numbers = [value for value in values if not isinstance(value, Tensor)]
    if len(numbers) < len(values):
        raise Unsupported
    return floats(numbers, count)


def start(values: array[Any] | None) -> Any:
    """The address of an array's first element, valid as long as the array exists."""
    return None if values is None else values.buffer_info()[0]
