"""Stage 0: every rank has all weights, and replicas hear of each other by the optimizer only."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from curvadion.integrations.deepspeed.process_groups import divided
from curvadion.integrations.deepspeed.saving import synchronize_before_saving
from curvadion.integrations.wrapping import wrap_method
from curvadion.optim.clipping import clip_grad_norm_
from curvadion.optim.dion import Dion


def attach(engine: Any, optimizer: Dion) -> None:
    """Keep gradients in their replica, and make the engine's clipping the same on all replicas.

    One with ``replicas="single"`` or None leaves the averaging to DeepSpeed: nothing changes.
    """
    if optimizer._replicas.process_group is None:
        return
    # Several ranks of one replica have their gradients averaged among them.
    engine.enable_backward_allreduce = divided(engine)
    if engine.optimizer is optimizer:

        def clip() -> None:
            norm = clip_grad_norm_(optimizer, engine.gradient_clipping())
            engine._global_grad_norm = norm.item()

        engine.clip_fp32_gradients = clip
    else:
        _step_on_masters(engine.optimizer, optimizer)
    synchronize_before_saving(engine, optimizer)


def _step_on_masters(wrapper: Any, optimizer: Dion) -> None:
    """Step on the float32 copies of the weights that a bfloat16 engine keeps.

    Its own step takes norms and skips on each rank alone, which replicas must not.
    """

    def step(self: Any, closure: Any = None) -> None:
        self.overflow = False
        for weight, master in _pairs(self):
            master.grad = None if weight.grad is None else weight.grad.to(master.dtype)
        if self.clip_grad > 0:
            self._global_grad_norm = clip_grad_norm_(optimizer, self.clip_grad).item()
        optimizer.step()
        for _, master in _pairs(self):
            master.grad = None
        _publish(self)

    def synchronize(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        theirs(*args, **kwargs)
        _publish(wrapper)

    wrapper.step = MethodType(step, wrapper)
    wrap_method(optimizer, "synchronize", synchronize)
    wrapper.eval, wrapper.train = optimizer.eval, optimizer.train  # Accelerate calls them


@torch.no_grad()
def _publish(wrapper: Any) -> None:
    """Copy the masters into the weights that the model reads."""
    for weight, master in _pairs(wrapper):
        weight.copy_(master)


def _pairs(wrapper: Any) -> list[tuple[Tensor, Tensor]]:
    groups = zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
    return [pair for group in groups for pair in zip(*group, strict=True)]
