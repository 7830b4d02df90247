"""Stage 0: every rank is a replica with all weights, and the optimizer does all communication."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from curvadion.optim.clipping import clip_grad_norm_
from curvadion.optim.dion import Dion


def attach(engine: Any, optimizer: Dion) -> None:
    """Switch the engine's gradient all-reduce off and make its clipping the same on all replicas.

    One with ``replicas="single"`` or None leaves the averaging to DeepSpeed: nothing changes.
    """
    replicas = optimizer._replicas.process_group
    if replicas is None:
        return
    engine.enable_backward_allreduce = False
    _refuse_reduced_gradients(engine, optimizer)
    masters = None if engine.optimizer is optimizer else Masters(engine.optimizer)
    if masters is not None:
        masters.step_with(engine, optimizer)
        masters.synchronize_with(optimizer)
    else:
        engine.clip_fp32_gradients = lambda: _clip(engine, optimizer, engine.gradient_clipping())
    _synchronize_before_saving(engine, optimizer)


def _refuse_reduced_gradients(engine: Any, optimizer: Dion) -> None:
    def step(self: Dion, closure: Any = None) -> Any:
        if engine.enable_backward_allreduce:
            raise RuntimeError(
                "engine.enable_backward_allreduce is True, so DeepSpeed has averaged the gradients "
                "that this optimizer was told to synchronise itself: leave it False, or build the "
                "optimizer with replicas='single'."
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
                wrapper._global_grad_norm = _clip(engine, optimizer, wrapper.clip_grad)
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


def _clip(engine: Any, optimizer: Dion, max_norm: float) -> float:
    """Clip by the norm of all replicas, which is returned and is what the engine reports."""
    norm = clip_grad_norm_(optimizer, max_norm).item()
    engine._global_grad_norm = norm
    return norm


def _synchronize_before_saving(engine: Any, optimizer: Dion) -> None:
    """Only one rank's weights and state are written, and every rank loads these: all must agree."""
    save_checkpoint, save_weights = engine.save_checkpoint, engine.save_16bit_model

    def synchronize_and_save(*args: Any, **kwargs: Any) -> Any:
        optimizer.synchronize(exact=True)
        return save_checkpoint(*args, **kwargs)

    def meet_and_save_weights(*args: Any, **kwargs: Any) -> Any:
        optimizer.eval()
        return save_weights(*args, **kwargs)

    engine.save_checkpoint = synchronize_and_save
    engine.save_16bit_model = meet_and_save_weights
    engine.module.register_state_dict_pre_hook(_warn_if_apart(optimizer))


def _warn_if_apart(optimizer: Dion) -> Callable[..., None]:
    """For tools that read the model's weights themselves, perhaps on one rank only."""

    def hook(*_: Any) -> None:
        if optimizer.apart:
            warnings.warn(
                f"The model's state_dict() while the replicas are apart, "
                f"{optimizer.progress.local_steps} local steps after they last agreed, holds this "
                f"rank's weights. Call engine.basic_optimizer.eval() on all ranks before.",
                stacklevel=3,
            )

    return hook
