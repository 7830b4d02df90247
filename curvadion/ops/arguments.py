"""Lists of tensors and numbers as arguments of C functions."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from curvadion.ops.tensors import DTYPE_CODES

POINTER = ctypes.c_void_p
INT = ctypes.c_int64


def declare(library: ctypes.CDLL, signatures: Mapping[str, list[Any]], result: Any) -> ctypes.CDLL:
    """Declare the argument types of a library's functions, and their common result type."""
    for name, types in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, result
    return library


def counted(X: Sequence[Tensor]) -> tuple[ctypes.Array[Any], ...]:
    """A list's sizes, addresses and dtype codes, as three arrays."""
    return (ctypes.c_int64 * len(X))(*(x.numel() for x in X)), *addressed(X)


def addressed(X: Sequence[Tensor]) -> tuple[ctypes.Array[Any], ...]:
    """A list's addresses and dtype codes, as two arrays."""
    codes = (ctypes.c_uint8 * len(X))(*(DTYPE_CODES[x.dtype] for x in X))
    return addresses(X), codes


def addresses(X: Sequence[Tensor]) -> ctypes.Array[Any]:
    """A list's addresses."""
    return (ctypes.c_uint64 * len(X))(*(x.data_ptr() for x in X))


def floats(values: Sequence[float]) -> ctypes.Array[Any]:
    """Numbers as float32."""
    return (ctypes.c_float * len(values))(*values)
