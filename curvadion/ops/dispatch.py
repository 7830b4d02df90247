"""How an operation runs: on a backend, in plain PyTorch, or as an operator while PyTorch traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from curvadion.ops.backends import backend_for, operation
from curvadion.ops.tensors import Unsupported

F = TypeVar("F", bound=Callable[..., Any])

_LIBRARY = torch.library.Library("curvadion", "FRAGMENT")
# By operation, the positions of arguments that it writes, and of lists of numbers.
_WRITES: dict[str, list[int]] = {}
_NUMBERS: dict[str, list[int]] = {}


def _returns_nothing(*_: Any) -> None:
    return None


def operator(schema: str, fake: Callable[..., Any] = _returns_nothing) -> Callable[[F], F]:
    """Register a function as ``torch.ops.curvadion.<name>``, for torch.compile.

    schema: as of torch.library, with the function's argument names. fake: makes results without
    numbers.
    """
    name = schema.split("(")[0]

    def register(function: F) -> F:
        # Operators can be registered only once in a process, however often this is imported.
        if not hasattr(torch.ops.curvadion, name):

            def implementation(*args: Any) -> Any:
                result = function(**dict(zip(names, args, strict=True)))
                return None if fake is _returns_nothing else result

            _LIBRARY.define(schema)
            _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
            torch.library.register_fake(f"curvadion::{name}", fake, lib=_LIBRARY)
        arguments = getattr(torch.ops.curvadion, name).default._schema.arguments
        names = [a.name for a in arguments]
        _WRITES[name] = [i for i, a in enumerate(arguments) if a.is_write]
        _NUMBERS[name] = [i for i, a in enumerate(arguments) if str(a.type) == "List[float]"]
        return function

    return register


def fused(name: str, *args: Any) -> Any:
    """What a backend, or the operator, makes of these arguments: its result, or True for none.

    None if plain PyTorch has to do it.
    """
    first = args[0] if isinstance(args[0], Tensor) else next(iter(args[0]), None)
    # Reading numbers that are tensors could make the host wait for a GPU.
    if first is None or any(isinstance(v, Tensor) for i in _NUMBERS[name] for v in args[i]):
        return None
    if torch.compiler.is_compiling() or (
        type(first).__torch_dispatch__ is not Tensor.__torch_dispatch__
    ):
        result = getattr(torch.ops.curvadion, name)(*args)
        return True if result is None else result
    function = operation(backend_for(first.device), name)
    if function is None:
        return None
    try:
        result = function(*args)
    except Unsupported:
        return None
    if not first.is_inference():
        for i in _WRITES[name]:
            # Autograd must notice if a weight changes between forward and backward.
            torch.autograd.graph.increment_version(args[i])
    return True if result is None else result
