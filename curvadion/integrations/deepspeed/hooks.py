"""DeepSpeedEngine learns the names CurvaDion and Dion."""

from __future__ import annotations

import importlib
from typing import Any

from curvadion.integrations.deepspeed import attaching, config, gathering, replicas, zero_init
from curvadion.integrations.deepspeed.process_groups import data_parallel_group, divided
from curvadion.optim.dion import Dion

ENGINE = "deepspeed.runtime.engine"
_ORIGINALS = "_curvadion_originals"
_METHODS = (
    "_do_sanity_check",
    "_is_supported_optimizer",
    "_configure_basic_optimizer",
    "_configure_optimizer",
)


def install() -> None:
    """Patch DeepSpeedEngine; again is harmless.

    If this package is imported several times (a notebook may purge it from sys.modules), the last
    import counts.

    Raises:
        ImportError: if DeepSpeed is not installed.
    """
    try:
        # First the package: after an import that failed, some of its modules may be there alone.
        importlib.import_module("deepspeed")
        engine = importlib.import_module(ENGINE)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"curvadion.deepspeed needs DeepSpeed ({error}): pip install deepspeed, or import "
            f"curvadion alone."
        ) from error
    _patch(engine)


def _patch(module: Any) -> None:
    """Wrap the methods of DeepSpeed's classes as they were before any patch of ours."""
    engine_class = module.DeepSpeedEngine
    if not hasattr(engine_class, _ORIGINALS):
        setattr(engine_class, _ORIGINALS, [getattr(engine_class, name) for name in _METHODS])
    check, is_supported, configure_basic, configure = getattr(engine_class, _ORIGINALS)

    def _do_sanity_check(engine: Any) -> None:
        config.check_early(engine)
        check(engine)

    def _is_supported_optimizer(engine: Any, name: str) -> bool:
        config.check_spelling(name)
        return name in config.OPTIMIZERS or is_supported(engine, name)

    def _configure_basic_optimizer(engine: Any, model_parameters: Any) -> Any:
        if engine.optimizer_name() not in config.OPTIMIZERS:
            return configure_basic(engine, model_parameters)
        return attaching.hold(config.from_json(engine, model_parameters))

    def _configure_optimizer(engine: Any, client_optimizer: Any, model_parameters: Any) -> None:
        if client_optimizer is not None and not hasattr(client_optimizer, "param_groups"):
            client_optimizer = client_optimizer(model_parameters)
        client = client_optimizer if isinstance(client_optimizer, Dion) else None
        named = client_optimizer is None and engine.optimizer_name() in config.OPTIMIZERS
        if client is None and not named:
            configure(engine, client_optimizer, model_parameters)
            return
        config.check_engine(engine)
        if client is not None:
            attaching.hold(client)
        replicas.divide_into_replicas(engine, client)
        inside = data_parallel_group(engine) if divided(engine) else None
        with zero_init.sharding_over(inside):
            configure(engine, client, model_parameters)
        attaching.attach(engine)

    engine_class._do_sanity_check = _do_sanity_check
    engine_class._is_supported_optimizer = _is_supported_optimizer
    engine_class._configure_basic_optimizer = _configure_basic_optimizer
    engine_class._configure_optimizer = _configure_optimizer
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init

    zero_init.patch(Init, config.OPTIMIZERS)
    gathering.patch(GatheredParameters)
    # ZeRO asks for zero_allow_untested_optimizer unless it knows the class.
    from deepspeed.runtime.zero import utils

    known = utils.ZERO_SUPPORTED_OPTIMIZERS
    known.extend(kind for kind in config.OPTIMIZERS.values() if kind not in known)
