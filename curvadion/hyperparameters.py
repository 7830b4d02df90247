"""The keys of a parameter group: defaults, what they may be, and errors that say so."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

ALGORITHMS = ("dion", "adamw", "lion")
# Key of every group: the sum of its learning rates so far, which tells how far weights may have
# gone since replicas agreed on them; the rate itself may have changed meanwhile.
LR_SUM = "lr_sum"
DTYPES = ("float64", "float32", "bfloat16", "float16")

# Written into groups by torch.optim, its schedulers and training frameworks; without effect here.
FOREIGN_KEYS = frozenset(
    {"params", "param_names", "fused", "foreach", "capturable", "differentiable", "maximize"}
    | {"initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum", "name"}
)


def check_group(group: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise ValueError or TypeError for a key or a value that a parameter group cannot have."""
    for key in group:
        if key not in known and key not in FOREIGN_KEYS:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f": did you mean {close[0]!r}?" if close else f"; known keys: {sorted(known)}"
            raise ValueError(f"Unknown key {key!r} (={group[key]!r}) in a parameter group{hint}")
    if group.get("maximize"):
        raise ValueError("maximize=True is not supported: minimise the negated loss instead.")
    for key, check in _CHECKS.items():
        if key in group:
            check(key, group[key])


def dtype_name(key: str, value: object) -> str | None:
    """A floating dtype, given as torch.dtype or by name, as a name; None stays None."""
    if value is None:
        return None
    name = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
    if not isinstance(name, str):
        raise TypeError(f"{key}={value!r} must be a torch.dtype, its name or None")
    if name not in DTYPES:
        raise ValueError(f"{key}={value!r} must be one of {DTYPES} or None (the parameter's own)")
    return name


def one_of(key: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{key}={value!r} must be one of {choices}")


def integer(key: str, value: object, least: int) -> None:
    """Raise unless ``value`` is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{key}={value!r} must be an integer >= {least}")
    if value < least:
        raise ValueError(f"{key}={value!r} must be >= {least}")


def number(
    key: str, value: object, *, least: float = 0.0, below: float = math.inf, most: float = math.inf
) -> None:
    """Raise unless ``value`` is a finite number within the bounds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{key}={value!r} must be a number, got {type(value).__name__}")
    if not (math.isfinite(value) and least <= value <= most and value < below):
        bound = (
            f" and < {below}" if below < math.inf else f" and <= {most}" if most < math.inf else ""
        )
        raise ValueError(f"{key}={value!r} must be finite, >= {least}{bound}")


def boolean(key: str, value: object) -> None:
    """Raise TypeError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{key}={value!r} must be True or False")


def learning_rate(key: str, value: object) -> None:
    """Raise unless ``value`` is a number >= 0 or a tensor of one element."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"{key} is a tensor of shape {tuple(value.shape)}: give it one element"
            )
        value = value.item()
    number(key, value)


def without_dimensions(value: Any) -> Any:
    """A tensor of one element as a zero-dimensional view, which promotes no dtype; else as is."""
    return value.view(()) if isinstance(value, Tensor) else value


def _local_lr(key: str, value: object) -> None:
    if value is not None:
        learning_rate(key, value)


def _betas(key: str, value: object) -> None:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{key}={value!r} must be a pair of numbers in [0, 1)")
    for i, beta in enumerate(value):
        number(f"{key}[{i}]", beta, below=1.0)


def _rank_fraction(key: str, value: object) -> None:
    number(key, value, most=1.0)
    if value == 0:
        raise ValueError(f"{key}={value!r} must be > 0 and <= 1")


def _row_blocks(key: str, value: object) -> None:
    if isinstance(value, (list, tuple)):
        if not value:
            raise ValueError(f"{key}={value!r} must not be empty")
        for i, size in enumerate(value):
            integer(f"{key}[{i}]", size, 1)
    else:
        integer(key, value, 1)


_CHECKS: dict[str, Callable[[str, Any], object]] = {
    "algorithm": lambda k, v: one_of(k, v, ALGORITHMS),
    "lr": learning_rate,
    "local_lr": _local_lr,
    "mu": lambda k, v: number(k, v, below=1.0),
    "nesterov": number,
    "betas": _betas,
    "eps": number,
    "weight_decay": number,
    "rank_fraction": _rank_fraction,
    "rank_multiple_of": lambda k, v: integer(k, v, 1),
    "stack_dims": lambda k, v: integer(k, v, 0),
    "row_blocks": _row_blocks,
    "input_first": boolean,
    "momentum_rule": lambda k, v: one_of(k, v, ("error_feedback", "plain")),
    "right_factor": lambda k, v: one_of(k, v, ("column_normalized", "qr")),
    "momentum_dtype": dtype_name,
    "q_dtype": dtype_name,
    "stochastic_rounding": boolean,
}
