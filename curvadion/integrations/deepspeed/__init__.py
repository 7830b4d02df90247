"""DeepSpeed: ``"optimizer": {"type": "CurvaDion"}`` at every ZeRO stage.

``import curvadion.deepspeed`` is enough for a JSON configuration: it calls :func:`register`.
:func:`initialize` and :func:`attach` are for those who prefer calls. Importing this module alone
imports no DeepSpeed and changes nothing.
"""

from __future__ import annotations

import functools
from typing import Any

from curvadion.integrations.deepspeed import engines
from curvadion.integrations.deepspeed.config import declare_shapes
from curvadion.integrations.deepspeed.engines import attach

__all__ = ["attach", "declare_shapes", "initialize", "register"]


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """``deepspeed.initialize``, sure to know CurvaDion and Dion."""
    register()
    import deepspeed

    result: tuple[Any, ...] = deepspeed.initialize(*args, **kwargs)
    return result


@functools.cache
def register() -> None:
    """Teach DeepSpeed the optimizers' names; again is harmless.

    Raises:
        ImportError: if DeepSpeed is not installed.
    """
    engines.install()
