"""Argument checks, with errors that name the argument, its value and the valid values."""

from __future__ import annotations

import math
import sys
from numbers import Real
from pathlib import Path

import torch

# Folders of this package, and of torch and the frameworks installed beside it.
_NOT_THE_USERS = (str(Path(__file__).parent), str(Path(str(torch.__file__)).parents[1]))

LARGEST_COUNTER = 2**53  # of steps: as long as floats can count them


def one_of(key: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``; ``key`` is its name."""
    if value not in choices:
        raise ValueError(f"{key}={value!r} must be one of {choices}")


def integer(key: str, value: object, least: int, most: float = math.inf) -> None:
    """Raise unless ``value`` is an integer within the bounds.

    Args:
        key: the argument's name.
        value: what was passed.
        least: the smallest valid value.
        most: the largest valid value.

    Raises:
        TypeError: the value is no integer.
        ValueError: it is out of bounds.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{key}={value!r} must be an integer >= {least}")
    if value < least:
        raise ValueError(f"{key}={value!r} must be >= {least}")
    if value > most:
        raise ValueError(f"{key}={value!r} must be <= {most}")


def number(
    key: str,
    value: object,
    *,
    least: float = 0.0,
    below: float = math.inf,
    most: float = math.inf,
) -> None:
    """Raise unless ``value`` is a finite number within the bounds.

    Args:
        key: the argument's name.
        value: what was passed.
        least: the smallest valid value.
        below: valid values are smaller than this.
        most: the largest valid value.

    Raises:
        TypeError: the value is no real number.
        ValueError: it is out of bounds, infinite or NaN.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{key}={value!r} must be a number")
    try:
        size = float(value)
    except OverflowError:  # of an integer that no float can hold
        size = math.inf
    if not (least <= size <= most and size < below):
        upper = f"{most}]" if most < below else f"{below})"
        raise ValueError(f"{key}={value!r} must be in [{least}, {upper}")


def numbers(key: str, value: object, *, least: float = 0.0) -> None:
    """Raise unless ``value`` is a list of finite numbers that are not below a bound.

    Args:
        key: the entry's name.
        value: what was saved.
        least: the smallest valid number.

    Raises:
        TypeError: it is no list of real numbers.
        ValueError: one is out of bounds, infinite or NaN.
    """
    if not isinstance(value, list):
        raise TypeError(f"{key}={value!r} must be a list of numbers")
    for i, item in enumerate(value):
        number(f"{key}[{i}]", item, least=least)


def boolean(key: str, value: object) -> None:
    """Raise TypeError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{key}={value!r} must be True or False")


def user_stacklevel() -> int:
    """The stack level at which a warning names the user's line."""
    # Level 1 is the function that calls this and warns.
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        level += 1
        frame = frame.f_back
    return level
