"""DeepSpeedEngine learns the names CurvaDion and Dion, whenever DeepSpeed is imported."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from curvadion.integrations.deepspeed import attaching, config
from curvadion.optimizer import CurvaDion

ENGINE = "deepspeed.runtime.engine"
_PATCHED = "_curvadion_knows_its_optimizers"


def install() -> None:
    """Patch DeepSpeedEngine if DeepSpeed is there, or as soon as it is imported."""
    engine = sys.modules.get(ENGINE)
    if engine is not None and hasattr(engine, "DeepSpeedEngine"):
        _patch(engine)
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(importlib.abc.MetaPathFinder):
    """Lets the other finders import the engine's module, then patches it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != ENGINE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _patch(module)

            loader.exec_module = exec_module
        return spec


def _patch(module: Any) -> None:
    engine_class = module.DeepSpeedEngine
    if hasattr(engine_class, _PATCHED):
        return
    setattr(engine_class, _PATCHED, True)
    is_supported = engine_class._is_supported_optimizer
    configure_basic = engine_class._configure_basic_optimizer
    configure = engine_class._configure_optimizer

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
        if isinstance(client_optimizer, CurvaDion):
            config.check_engine(engine)
            attaching.hold(client_optimizer)
        configure(engine, client_optimizer, model_parameters)
        if isinstance(engine.basic_optimizer, CurvaDion):
            attaching.attach(engine)

    engine_class._is_supported_optimizer = _is_supported_optimizer
    engine_class._configure_basic_optimizer = _configure_basic_optimizer
    engine_class._configure_optimizer = _configure_optimizer
    # ZeRO asks for zero_allow_untested_optimizer unless it knows the class.
    from deepspeed.runtime.zero import utils

    utils.ZERO_SUPPORTED_OPTIMIZERS.extend(config.OPTIMIZERS.values())
