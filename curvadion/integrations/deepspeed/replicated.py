"""Stage 0: every rank is a replica with all weights, and the optimizer does all communication."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor

from curvadion.clipping import clip_grad_norm_
from curvadion.optimizer import CurvaDion


def attach(engine: Any, optimizer: CurvaDion) -> None:
    """Switch the engine's gradient all-reduce off and make its clipping the same on all replicas.

    An optimizer with ``replicas=None`` leaves the averaging to DeepSpeed: nothing changes.
    """
    replicas = optimizer._replicas.process_group
    if replicas is None:
        return
    engine.enable_backward_allreduce = False
    _refuse_reduced_gradients(engine, optimizer)
    masters = None if engine.optimizer is optimizer else Masters(engine.optimizer)
    if masters is not None:
        masters.step_with(engine, optimizer)
    else:
        engine.clip_fp32_gradients = lambda: _clip(engine, optimizer, engine.gradient_clipping())
    _synchronize_before_saving(engine, optimizer, masters)


def _refuse_reduced_gradients(engine: Any, optimizer: CurvaDion) -> None:
    def step(self: CurvaDion, closure: Any = None) -> Any:
        if engine.enable_backward_allreduce:
            raise RuntimeError(
                "engine.enable_backward_allreduce is True, so DeepSpeed has averaged the gradients "
                "that this optimizer was told to synchronise itself: leave it False, or build the "
                "optimizer with replicas=None."
            )
        return type(self).step(self, closure)

    setattr(optimizer, "step", MethodType(step, optimizer))  # noqa: B010


class Masters:
    """float32 copies that a bfloat16 engine keeps of the weights, and steps on.

    Its own step takes norms and skips on each rank alone, which replicas must not.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def step_with(self, engine: Any, optimizer: CurvaDion) -> None:
        """Replace the wrapper's step by one whose decisions are alike on all replicas."""

        def step(wrapper: Any, closure: Any = None) -> None:
            wrapper.overflow = False
            for weight, master in self._pairs():
                master.grad = None if weight.grad is None else weight.grad.to(master.dtype)
            if wrapper.clip_grad > 0:
                wrapper._global_grad_norm = _clip(engine, optimizer, wrapper.clip_grad)
            optimizer.step()
            for _, master in self._pairs():
                master.grad = None
            self.publish()

        self._wrapper.step = MethodType(step, self._wrapper)

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into the weights that the model reads."""
        for weight, master in self._pairs():
            weight.copy_(master)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        groups = zip(self._wrapper.fp16_groups, self._wrapper.fp32_groups, strict=True)
        return [pair for group in groups for pair in zip(*group, strict=True)]


def _clip(engine: Any, optimizer: CurvaDion, max_norm: float) -> float:
    """Clip by the norm of all replicas, which is returned and is what the engine reports."""
    norm = clip_grad_norm_(optimizer, max_norm).item()
    engine._global_grad_norm = norm
    return norm


def _synchronize_before_saving(engine: Any, optimizer: CurvaDion, masters: Masters | None) -> None:
    """Only one rank's weights and state are written, and every rank loads these."""
    save = engine.save_checkpoint

    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        optimizer.synchronize()
        if masters is not None:
            masters.publish()
        return save(*args, **kwargs)

    engine.save_checkpoint = save_checkpoint
