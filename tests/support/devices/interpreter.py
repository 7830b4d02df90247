"""Triton's interpreter, made faster in two ways that change no result.

A launch replaces what ``tl`` has by what computes with numpy, and puts it back at its end. A call
of a device function looks for what is left to replace, which takes a third of the kernels' time
here. With this it looks once a launch in each module.

Each sum and product of integers is computed again in 64 bits, to see whether it overflows, and
then nobody looks unless Triton debugs. That takes two fifths of the rest, and is left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from triton.runtime import interpreter

_replaced: set[int] = set()  # the modules whose language the current launch has replaced
_launch = interpreter.GridExecutor.__call__


def _launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
    _replaced.clear()
    _launch(self, *args, **kwargs)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of a device function."""
    module = self.fn.__globals__
    if id(module) not in _replaced:
        interpreter._patch_lang(self.fn)
        _replaced.add(id(module))
    return self.rewrite()(*args, **kwargs)


def speed_up() -> None:
    """Change the interpreter of this process."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter.GridExecutor.__call__ = _launch_anew
    interpreter.InterpretedFunction.__call__ = _call
