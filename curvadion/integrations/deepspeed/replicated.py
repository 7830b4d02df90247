"""Stage 0: every rank has all weights, and replicas hear of each other by the optimizer only."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor

from curvadion.integrations.deepspeed.clipping import clip
from curvadion.integrations.deepspeed.process_groups import divided
from curvadion.integrations.deepspeed.saving import synchronize_before_saving
from curvadion.optim.dion import Dion


def attach(engine: Any, optimizer: Dion) -> None:
    """Keep gradients in their replica, and make the engine's clipping the same on all replicas.

    One with ``replicas="single"`` or None leaves the averaging to DeepSpeed: nothing changes.
    """
    replicas = optimizer._replicas.process_group
    if replicas is None:
        return
    # Several ranks of one replica have their gradients averaged among them.
    engine.enable_backward_allreduce = divided(engine)
    _refuse_other_reduction(engine, optimizer)
    masters = None if engine.optimizer is optimizer else Masters(engine.optimizer)
    if masters is not None:
        masters.step_with(engine, optimizer)
        masters.synchronize_with(optimizer)
    else:
        engine.clip_fp32_gradients = lambda: clip(engine, optimizer, engine.gradient_clipping())
    synchronize_before_saving(engine, optimizer)


def _refuse_other_reduction(engine: Any, optimizer: Dion) -> None:
    meant = engine.enable_backward_allreduce

    def step(self: Dion, closure: Any = None) -> Any:
        if engine.enable_backward_allreduce and not meant:
            raise RuntimeError(
                "engine.enable_backward_allreduce is True, so DeepSpeed has averaged the gradients "
                "that this optimizer was told to synchronise itself: leave it False, or build the "
                "optimizer with replicas='single'."
            )
        if meant and not engine.enable_backward_allreduce:
            raise RuntimeError(
                "engine.enable_backward_allreduce is False, so DeepSpeed has not averaged the "
                "gradients of the ranks of a replica: leave it True."
            )
        return type(self).step(self, closure)

    setattr(optimizer, "step", MethodType(step, optimizer))  # noqa: B010


class Masters:
    """float32 copies that a bfloat16 engine keeps of the weights, and steps on.

    Its own step takes norms and skips on each rank alone, which replicas must not.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def step_with(self, engine: Any, optimizer: Dion) -> None:
        """Replace the wrapper's step by one whose decisions are alike on all replicas."""

        def step(wrapper: Any, closure: Any = None) -> None:
            wrapper.overflow = False
            for weight, master in self._pairs():
                master.grad = None if weight.grad is None else weight.grad.to(master.dtype)
            if wrapper.clip_grad > 0:
                wrapper._global_grad_norm = clip(engine, optimizer, wrapper.clip_grad)
            optimizer.step()
            for _, master in self._pairs():
                master.grad = None
            self.publish()

        self._wrapper.step = MethodType(step, self._wrapper)

    def synchronize_with(self, optimizer: Dion) -> None:
        """Let the model have what the replicas agree on; Accelerate calls the wrapper's eval()."""

        def synchronize(self_: Dion, *args: Any, **kwargs: Any) -> None:
            type(self_).synchronize(self_, *args, **kwargs)
            self.publish()

        setattr(optimizer, "synchronize", MethodType(synchronize, optimizer))  # noqa: B010
        self._wrapper.eval, self._wrapper.train = optimizer.eval, optimizer.train

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into the weights that the model reads."""
        for weight, master in self._pairs():
            weight.copy_(master)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        groups = zip(self._wrapper.fp16_groups, self._wrapper.fp32_groups, strict=True)
        return [pair for group in groups for pair in zip(*group, strict=True)]
