"""ZeRO 1, 2 and 3: ZeRO hands over partitions and gradients, and one optimizer step takes them.

Several replicas decide as one what ZeRO would decide for each: by which norm gradients are
clipped, and whether a step is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

from curvadion.integrations.deepspeed.partitions import partitions_of, publish
from curvadion.integrations.deepspeed.process_groups import Reaching
from curvadion.integrations.deepspeed.saving import (
    explain_failed_loading,
    synchronize_before_saving,
)
from curvadion.integrations.deepspeed.shards import Shards
from curvadion.integrations.wrapping import wrap_method
from curvadion.optim.clipping import clip_grad_norm_
from curvadion.optim.dion import Dion


def attach(engine: Any, optimizer: Dion) -> None:
    """Make the optimizer step on the partitions of the engine's ZeRO optimizer."""
    zero = engine.optimizer
    partitions = partitions_of(zero, Reaching())
    several = optimizer._replicas.process_group is not None
    then = partial(publish, zero, partitions) if several else None
    shards = Shards(optimizer, partitions, engine.param_names)
    _give_methods(optimizer, shards, then)
    explain_failed_loading(engine)
    if then is None:
        _count_skipped_steps(zero, shards, tolerate=engine.fp16_enabled())
        return
    if engine.fp16_enabled():
        setattr(optimizer, "found_inf", None)  # noqa: B010  # a loss scaler looks for its scale
    _decide_with_all_replicas(zero, shards, then)
    zero.eval, zero.train = optimizer.eval, optimizer.train  # Accelerate calls them
    synchronize_before_saving(engine, optimizer)


def _give_methods(optimizer: Dion, shards: Shards, publish: Callable[[], None] | None) -> None:
    """Let the optimizer's methods work on the shards; publish: gives the model what they change."""

    def step(self: Dion, closure: Any = None) -> None:
        shards.receive()

    def on_shards(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with shards.in_place():
            return theirs(*args, **kwargs)

    def moving(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        on_shards(theirs, *args, **kwargs)
        if publish is not None:
            publish()

    setattr(optimizer, "step", MethodType(step, optimizer))  # noqa: B010
    for name in ("drift", "state_dict", "load_state_dict"):
        wrap_method(optimizer, name, on_shards)
    for name in ("synchronize", "broadcast_weights"):
        wrap_method(optimizer, name, moving)


def _count_skipped_steps(zero: Any, shards: Shards, *, tolerate: bool) -> None:
    """ZeRO does not call the optimizer at a step with a non-finite gradient; it counts one."""

    def step(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        shards.begin()
        result = theirs(*args, **kwargs)
        if not shards.stepped:
            shards.optimizer.skip_step(tolerate=tolerate)
        return result

    wrap_method(zero, "step", step)


def _decide_with_all_replicas(zero: Any, shards: Shards, then: Callable[[], None]) -> None:
    """ZeRO's step clips and skips by the gradients of its replica; replicas do both as one."""

    def step(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        max_norm, zero.clip_grad, norms = zero.clip_grad, 0.0, []

        def clip() -> None:  # once all gradients are there
            norms.append(clip_grad_norm_(shards.optimizer, max_norm).item())

        shards.begin(before_step=clip if max_norm else None)
        try:
            result = theirs(*args, **kwargs)
        finally:
            zero.clip_grad = max_norm
        if not shards.stepped:  # other replicas are waiting, or send what arrives now
            shards.step_with_nan()
            then()
        if norms:
            zero._global_grad_norm = norms[0]
        zero.overflow = False  # learning rates follow their schedules on all replicas
        return result

    wrap_method(zero, "step", step)
