"""DistributedDataParallel with local gradients."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

Model = TypeVar("Model", bound=nn.Module)


def keep_gradients_local(ddp: Model) -> Model:
    """Stop DDP from reducing gradients, for optimizers that communicate themselves.

    ``ddp`` is a DistributedDataParallel, or ``torch.compile`` of one, before its first
    backward; it is returned. Pass its process group to the optimizer as ``replicas``.
    Accumulating gradients needs no ``no_sync()``. Clip them with
    ``curvadion.clip_grad_norm_(optimizer, max_norm)``.

    With ``find_unused_parameters`` DDP still reduces 4 bytes per parameter in every backward.
    It broadcasts buffers before every forward, unless none is persistent or
    ``broadcast_buffers=False``.

    TypeError for other models. RuntimeError if ``ddp`` already has a communication hook.
    """
    wrapper: Any = getattr(ddp, "_orig_mod", ddp)  # the module inside torch.compile
    if not isinstance(wrapper, DistributedDataParallel):
        raise TypeError(
            f"ddp must be a DistributedDataParallel, or torch.compile of one, got "
            f"{type(wrapper).__name__}."
        )
    hooks = [hook for hook, _ in wrapper._comm_hooks]
    if hooks and hooks != [noop_hook]:
        raise RuntimeError(
            "ddp already has a communication hook: build the DistributedDataParallel without "
            "it and without mixed_precision."
        )
    if not hooks:
        try:
            wrapper.register_comm_hook(None, noop_hook)
        except RuntimeError:  # a built-in hook, which is in no list
            wrapper._comm_hooks.clear()
            raise
        wrapper.broadcast_buffers &= any(
            name not in module._non_persistent_buffers_set  # a checkpoint keeps it
            for module in wrapper.module.modules()
            for name, _ in module.named_buffers(recurse=False)
        )
    return ddp
