"""DeepSpeedEngine learns the names CurvaDion and Dion."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from curvadion.integrations.deepspeed import (
    attaching,
    config,
    gathering,
    modes,
    replicas,
    zero_init,
)
from curvadion.integrations.deepspeed.process_groups import data_parallel_group, divided
from curvadion.integrations.wrapping import wrap_method
from curvadion.optim.dion import Dion


def install() -> None:
    """Patch DeepSpeed's classes; of several imports of this package the last one counts."""
    try:
        # First the package: after an import that failed, some of its modules may be there alone.
        importlib.import_module("deepspeed")
        engine = importlib.import_module("deepspeed.runtime.engine").DeepSpeedEngine
    except ModuleNotFoundError as error:
        raise ImportError(
            f"curvadion.deepspeed needs DeepSpeed ({error}): pip install deepspeed, or import "
            f"curvadion alone."
        ) from error
    for hook in (_is_supported_optimizer, _configure_basic_optimizer, _configure_optimizer):
        wrap_method(engine, hook.__name__, hook)
    from deepspeed.runtime.zero import utils
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init

    zero_init.patch(Init)
    gathering.patch(GatheredParameters)
    # ZeRO asks for zero_allow_untested_optimizer unless it knows the class.
    known = utils.ZERO_SUPPORTED_OPTIMIZERS
    known.extend(kind for kind in config.OPTIMIZERS.values() if kind not in known)


def _is_supported_optimizer(theirs: Callable[..., Any], engine: Any, name: str) -> bool:
    config.check_spelling(name)
    return name in config.OPTIMIZERS or theirs(engine, name)


def _configure_basic_optimizer(theirs: Callable[..., Any], engine: Any, parameters: Any) -> Any:
    if engine.optimizer_name() not in config.OPTIMIZERS:
        return theirs(engine, parameters)
    return attaching.hold(config.from_json(engine, parameters))


def _configure_optimizer(
    theirs: Callable[..., Any], engine: Any, client: Any, parameters: Any
) -> None:
    if client is not None and not hasattr(client, "param_groups"):
        client = client(parameters)
    named = client is None and engine.optimizer_name() in config.OPTIMIZERS
    if not (named or isinstance(client, Dion)):
        theirs(engine, client, parameters)
        return
    modes.check_engine(engine)
    if client is not None:
        attaching.hold(client)
    replicas.divide_into_replicas(engine, client)
    with zero_init.sharding_over(data_parallel_group(engine) if divided(engine) else None):
        theirs(engine, client, parameters)
    attaching.attach(engine)
