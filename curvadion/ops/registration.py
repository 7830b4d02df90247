"""The fused operations as operators ``torch.ops.curvadion.<name>``, for torch.compile.

Importing this module registers them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from curvadion.ops import reference
from curvadion.ops.operations import Lists, first_tensor, run

# Operators can be registered only once in a process. If this package is removed from sys.modules
# and imported again, the operators of the first import remain and call the functions of the last.
_LIBRARY = torch.library.Library("curvadion", "FRAGMENT")


def _sum_dtype(X: Lists) -> torch.dtype:
    dtype = torch.float32
    for x in X:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def _fake_norms(X: Lists, *_: Any) -> Tensor:
    return torch.empty(len(X), dtype=_sum_dtype(X), device=X[0].device if X else "cpu")


def _fake_column_sum_of_squares(R: Tensor) -> Tensor:
    return R.new_empty(*R.shape[:-2], R.shape[-1], dtype=torch.float64)


def _fake_nothing(*_: Any) -> None:
    return None


def _operator(name: str, args: tuple[Any, ...]) -> Any:
    first = first_tensor(args)
    return getattr(reference, name)(*args) if first is None else run(name, first, args)


def _register(schema: str, fake: Callable[..., Any]) -> None:
    name = schema.split("(")[0]
    if hasattr(torch.ops.curvadion, name):
        return

    def implementation(*args: Any) -> Any:
        newest: Any = sys.modules.get(__name__)
        return (newest._operator if newest else _operator)(name, args)

    _LIBRARY.define(schema)
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"curvadion::{name}", fake, lib=_LIBRARY)


_register("norms(Tensor[] X) -> Tensor", _fake_norms)
_register("momentum_norms(Tensor[] M, Tensor[] G, float[] mu) -> Tensor", _fake_norms)
_register("accumulate_(Tensor(a!)[] M, Tensor[] G, float[] mu) -> ()", _fake_nothing)
_register(
    "local_step_(Tensor(a!)[] X, Tensor[] G, float[] step, float[] decay, Tensor(b!)[] M, "
    "float[] mu, int[]? seeds) -> ()",
    _fake_nothing,
)
_register("column_sum_of_squares(Tensor R) -> Tensor", _fake_column_sum_of_squares)
_register(
    "column_normalize_(Tensor(a!)[] Q, Tensor R, Tensor? sum_of_squares, Tensor? floor) -> ()",
    _fake_nothing,
)
_register(
    "low_rank_update_(Tensor(a!)[] X, Tensor[] P, Tensor[] Q, float[] step, float[] decay, "
    "Tensor(b!)[] M, Tensor[] R, float[] feedback, int[]? seeds) -> ()",
    _fake_nothing,
)
_register("symmetric_product(Tensor A, Tensor B, Tensor(a!) out) -> ()", _fake_nothing)
_register(
    "encode_difference_(Tensor(a!) codes, Tensor[] X, Tensor[] anchors, Tensor(b!)[] residuals, "
    "int bits, Tensor(c!) owned, int first) -> ()",
    _fake_nothing,
)
_register("decode_(Tensor(a!)[] X, Tensor codes, int bits) -> ()", _fake_nothing)
_register(
    "decode_add_(Tensor(a!)[] X, Tensor(b!)[] anchors, Tensor codes, int bits) -> ()",
    _fake_nothing,
)
_register(
    "average_codes_(Tensor(a!) codes, Tensor(b!) own, Tensor received, int rank, int bits) -> ()",
    _fake_nothing,
)
