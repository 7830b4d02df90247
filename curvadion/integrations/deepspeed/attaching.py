"""An optimizer meets its engine."""

from __future__ import annotations

from types import MethodType
from typing import Any

from curvadion.integrations.deepspeed import config, modes, replicated, sharded
from curvadion.optim.dion import Dion


def hold(optimizer: Dion) -> Dion:
    """Let ``step`` do nothing until :func:`attach`: a bfloat16 engine calls it while it is built.

    Its parameters are then not yet those of the training, and its gradients are made up.
    """
    setattr(optimizer, "step", MethodType(lambda self, closure=None: None, optimizer))  # noqa: B010
    return optimizer


def attach(engine: Any) -> Any:
    """Make an engine and its CurvaDion or Dion work together; ``deepspeed.initialize`` does it.

    Stage 0: the engine no longer reduces gradients, or inside replicas only, unless the optimizer
    has ``replicas="single"`` and leaves that to it. Stages 1 to 3: the optimizer steps on the
    ranges of parameters that the flat partitions hold, once per ``engine.step()``. Where there are
    several replicas, norms for ``gradient_clipping`` are taken over all of them, and
    ``save_checkpoint`` and ``save_16bit_model`` first synchronise them.

    Args:
        engine: a DeepSpeedEngine. Attached engines are left as they are.

    Returns:
        ``engine`` itself. The optimizer is ``engine.basic_optimizer``, with ``report``,
        ``progress``, ``drift()`` and ``synchronize()``.

    Raises:
        TypeError: if the engine's optimizer is neither CurvaDion nor Dion.
        ValueError: for a configuration that cannot work, naming its key.
    """
    optimizer = getattr(engine, "basic_optimizer", None)
    if not isinstance(optimizer, Dion):
        raise TypeError(
            f"engine must be a DeepSpeedEngine whose optimizer is CurvaDion or Dion, but it has "
            f"{type(optimizer).__name__}"
        )
    if getattr(engine, "_curvadion_attached", None) is optimizer:
        return engine
    modes.check_engine(engine)
    config.check_replicas(engine, optimizer)
    vars(optimizer).pop("step", None)
    if engine.zero_optimization_stage() == 0:
        replicated.attach(engine, optimizer)
    else:
        sharded.attach(engine, optimizer)
    engine._curvadion_attached = optimizer
    return engine
