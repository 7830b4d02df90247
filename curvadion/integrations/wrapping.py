"""Methods of frameworks, with ours around them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

_THEIRS = "_curvadion_theirs"


def wrap_method(owner: object, name: str, around: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``around``, which gets the method before and its arguments.

    Args:
        owner: an object, or a class, whose methods get the object as their first argument. A class
            is patched once: what an earlier call has put there is replaced.
        name: of the method.
        around: called in its place.
    """
    theirs = getattr(owner, name)
    if isinstance(owner, type):
        theirs = getattr(theirs, _THEIRS, theirs)

    @wraps(theirs)
    def ours(*args: Any, **kwargs: Any) -> Any:
        return around(theirs, *args, **kwargs)

    setattr(ours, _THEIRS, theirs)
    setattr(owner, name, ours)


def bound(function: Callable[..., Any], *args: Any, **kwargs: Any) -> inspect.BoundArguments:
    """The arguments of a call by name, with the defaults of those that were left out."""
    given = inspect.signature(function).bind(*args, **kwargs)
    given.apply_defaults()
    return given
