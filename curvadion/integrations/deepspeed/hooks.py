"""DeepSpeedEngine learns the names CurvaDion and Dion, whenever DeepSpeed is imported."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from curvadion.integrations.deepspeed import attaching, config
from curvadion.optim.optimizer import CurvaDion

ENGINE = "deepspeed.runtime.engine"
_ORIGINALS = "_curvadion_originals"
_METHODS = (
    "_do_sanity_check",
    "_is_supported_optimizer",
    "_configure_basic_optimizer",
    "_configure_optimizer",
)


def install() -> None:
    """Patch DeepSpeedEngine if DeepSpeed is there, or as soon as it is imported.

    Of several imports of this package (a notebook may purge it from sys.modules) the last counts.
    """
    sys.meta_path[:] = [finder for finder in sys.meta_path if not _is_ours(finder)]
    engine = sys.modules.get(ENGINE)
    if engine is not None and hasattr(engine, "DeepSpeedEngine"):
        _patch(engine)
    else:
        sys.meta_path.insert(0, _AfterImport())


def _is_ours(finder: object) -> bool:
    kind = type(finder)
    return (kind.__module__, kind.__name__) == (__name__, _AfterImport.__name__)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Lets the other finders find the engine's module, and patches it once it has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != ENGINE:
            return None
        spec = self._found_by_others(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _patch(module)
                if self in sys.meta_path:  # and not before: an import may fail and be tried again
                    sys.meta_path.remove(self)

            loader.exec_module = exec_module
        return spec

    def _found_by_others(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                return spec
        return None


def _patch(module: Any) -> None:
    """Wrap the methods of DeepSpeedEngine as they were before any patch of ours."""
    engine_class = module.DeepSpeedEngine
    if not hasattr(engine_class, _ORIGINALS):
        setattr(engine_class, _ORIGINALS, [getattr(engine_class, name) for name in _METHODS])
    check, is_supported, configure_basic, configure = getattr(engine_class, _ORIGINALS)

    def _do_sanity_check(engine: Any) -> None:
        if engine.optimizer_name() in config.OPTIMIZERS:
            config.check_precision(engine)  # before DeepSpeed, which names no key
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
        if isinstance(client_optimizer, CurvaDion):
            config.check_engine(engine)
            attaching.hold(client_optimizer)
        configure(engine, client_optimizer, model_parameters)
        if isinstance(engine.basic_optimizer, CurvaDion):
            attaching.attach(engine)

    engine_class._do_sanity_check = _do_sanity_check
    engine_class._is_supported_optimizer = _is_supported_optimizer
    engine_class._configure_basic_optimizer = _configure_basic_optimizer
    engine_class._configure_optimizer = _configure_optimizer
    # ZeRO asks for zero_allow_untested_optimizer unless it knows the class.
    from deepspeed.runtime.zero import utils

    known = utils.ZERO_SUPPORTED_OPTIMIZERS
    known.extend(kind for kind in config.OPTIMIZERS.values() if kind not in known)
