"""DeepSpeed: ``"optimizer": {"type": "CurvaDion"}`` at every ZeRO stage.

``import curvadion.deepspeed`` is enough for a JSON configuration: it calls :func:`register`.
:func:`initialize` and :func:`attach` are for those who prefer calls. Importing this module alone
imports no DeepSpeed and changes nothing.

    hooks           DeepSpeedEngine learns the two names
    config          from the JSON and the engine to an optimizer, or an error that names the key
    replicas        DeepSpeed shards and averages inside a replica, the optimizer between them
    zero_init       a model that is built in shards is sharded over the ranks of one replica
    gathering       weights of such shards that are changed by hand become those of all replicas
    process_groups  whom an engine's ranks and tensors can reach
    replicated      stage 0: gradients stay in their replica, the optimizer does the rest
    partitions      stages 1 to 3: which elements of which parameters a flat partition holds
    shards          stages 1 to 3: these ranges as parameters of the optimizer
    sharded         stages 1 to 3: one optimizer step for ZeRO's several
    buckets         stages 1 to 3: ranks reduce gradients of the same parameters
    clipping        one norm of all replicas
    saving          replicas agree before one of them is written
"""

from __future__ import annotations

from typing import Any

from curvadion.integrations.deepspeed import hooks
from curvadion.integrations.deepspeed.attaching import attach
from curvadion.integrations.deepspeed.config import declare_shapes

__all__ = ["attach", "declare_shapes", "initialize", "register"]


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """``deepspeed.initialize``, sure to know CurvaDion and Dion."""
    register()
    import deepspeed

    result: tuple[Any, ...] = deepspeed.initialize(*args, **kwargs)
    return result


def register() -> None:
    """Teach DeepSpeed the optimizers' names; again is harmless.

    Raises:
        ImportError: if DeepSpeed is not installed.
    """
    hooks.install()
