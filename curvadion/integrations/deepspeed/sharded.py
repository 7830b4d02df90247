"""ZeRO 1, 2 and 3: ZeRO hands over partitions and gradients, and one optimizer step takes them.

Several replicas decide together what ZeRO would decide for each: by which norm gradients are
clipped, and whether a step is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any

import torch.distributed as dist

from curvadion.integrations.deepspeed.buckets import compare_before_reduction
from curvadion.integrations.deepspeed.clipping import clip
from curvadion.integrations.deepspeed.partitions import Partition, partitions_of, publish
from curvadion.integrations.deepspeed.process_groups import Reaching
from curvadion.integrations.deepspeed.saving import (
    check_shards_before_loading,
    synchronize_before_saving,
)
from curvadion.integrations.deepspeed.shards import RANGES, Shards
from curvadion.optim.dion import Dion


def attach(engine: Any, optimizer: Dion) -> None:
    """Make the optimizer step on the partitions of the engine's ZeRO optimizer."""
    zero = engine.optimizer
    reaching = Reaching()
    partitions = partitions_of(zero, reaching)
    replicas, then = optimizer._replicas.process_group, None
    if replicas is not None:
        check_apart(partitions, replicas)
        then = partial(publish, zero, partitions)
    shards = Shards(optimizer, partitions, engine.param_names)
    _give_methods(optimizer, shards, then)
    tell = None if replicas is None else partial(_tell_replicas, engine, shards)
    compare_before_reduction(engine, reaching, tell)
    check_shards_before_loading(engine)
    if then is None:
        _count_skipped_steps(zero, shards, tolerate=engine.fp16_enabled())
        return
    if engine.fp16_enabled():
        setattr(optimizer, "found_inf", None)  # noqa: B010  # a loss scaler looks for its scale
    _decide_with_all_replicas(engine, shards, then)
    zero.eval, zero.train = optimizer.eval, optimizer.train  # Accelerate calls them
    synchronize_before_saving(engine, optimizer)


def check_apart(partitions: Iterable[Partition], replicas: dist.ProcessGroup) -> None:
    """Raise ValueError if ZeRO averages gradients over ranks that are other replicas."""
    others = {*dist.get_process_group_ranks(replicas)} - {dist.get_rank()}
    for group in {r.group for partition in partitions for r in partition.ranges}:
        ranks = dist.get_process_group_ranks(group)
        if others & {*ranks}:
            raise ValueError(
                f"ZeRO averages gradients over the ranks {ranks}, of which {sorted(others)} are "
                f"other replicas, which the optimizer was told to synchronise itself: this version "
                f"of DeepSpeed takes its groups from elsewhere. Leave replica_size out."
            )


def _give_methods(optimizer: Dion, shards: Shards, publish: Callable[[], None] | None) -> None:
    """Let the optimizer's methods work on the shards; publish: gives the model what they change."""

    def step(self: Dion, closure: Any = None) -> None:
        shards.receive()

    def state_dict(self: Dion) -> dict[str, Any]:
        return {**type(self).state_dict(self), RANGES: shards.held()}

    def load_state_dict(self: Dion, state_dict: dict[str, Any]) -> None:
        shards.check(state_dict)
        type(self).load_state_dict(self, state_dict)

    kind = type(optimizer)
    setattr(optimizer, "step", MethodType(step, optimizer))  # noqa: B010
    for method in (kind.drift, state_dict, load_state_dict):
        setattr(optimizer, method.__name__, MethodType(_on_shards(method, shards), optimizer))
    moving: tuple[Callable[..., None], ...] = (kind.synchronize, kind.broadcast_weights)
    for move in moving:
        published = _on_shards(move, shards, publish)
        setattr(optimizer, move.__name__, MethodType(published, optimizer))


def _on_shards(
    method: Callable[..., Any], shards: Shards, then: Callable[[], None] | None = None
) -> Callable[..., Any]:
    def on_shards(self: Dion, *args: Any, **kwargs: Any) -> Any:
        with shards.in_place():
            result = method(self, *args, **kwargs)
        if then is not None:
            then()
        return result

    return on_shards


def _count_skipped_steps(zero: Any, shards: Shards, *, tolerate: bool) -> None:
    """ZeRO does not call the optimizer at a step with a non-finite gradient; it counts one."""
    step = zero.step

    def logical_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        shards.begin()
        result = step(*args, **kwargs)
        if not shards.stepped:
            shards.optimizer.skip_step(tolerate=tolerate)
        return result

    zero.step = MethodType(logical_step, zero)


def _decide_with_all_replicas(engine: Any, shards: Shards, publish: Callable[[], None]) -> None:
    """ZeRO's step clips and skips by the gradients of its replica; replicas do both together."""
    zero = engine.optimizer
    step = zero.step

    def logical_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        max_norm, self.clip_grad = self.clip_grad, 0.0
        _begin(engine, shards, max_norm)
        try:
            result = step(*args, **kwargs)
        except Exception as error:
            # What a loss scaler raises at its smallest scale, on all ranks of this replica only.
            if self.overflow and not shards.stepped:
                shards.refuse(str(error))
            raise
        finally:
            self.clip_grad = max_norm
        if not shards.stepped:  # other replicas are waiting, or send what arrives now
            shards.step_with_nan()
            publish()
        if max_norm:
            self._global_grad_norm = engine._global_grad_norm
        self.overflow = False  # learning rates follow their schedules on all replicas alike
        return result

    zero.step = MethodType(logical_step, zero)


def _tell_replicas(engine: Any, shards: Shards, wrong: str) -> None:
    """Let the other replicas, which step or will, raise an error too."""
    _begin(engine, shards, engine.optimizer.clip_grad)
    shards.refuse(wrong)


def _begin(engine: Any, shards: Shards, max_norm: float) -> None:
    """Begin a logical step; gradients are clipped once all are there. A norm of 0: they are not."""
    clipping = partial(clip, engine, shards.optimizer, max_norm) if max_norm else None
    shards.begin(before_step=clipping)
