"""DistributedDataParallel with local gradients."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from curvadion.layout.local_gradients import LOCAL_GRADIENTS

Model = TypeVar("Model", bound=nn.Module)


def keep_gradients_local(ddp: Model) -> Model:
    """Stop DDP from reducing gradients, for optimizers that communicate themselves.

    Pass the model's process group to the optimizer as ``replicas``. Accumulating gradients
    needs no ``no_sync()``. Clip them with ``curvadion.clip_grad_norm_(optimizer, max_norm)``.

    With ``find_unused_parameters`` DDP still reduces 4 bytes per parameter in every backward.
    It broadcasts buffers before every forward, unless none is persistent or
    ``broadcast_buffers=False``.

    Args:
        ddp: a DistributedDataParallel, or ``torch.compile`` of one, before its first backward.

    Returns:
        ``ddp``.

    Raises:
        TypeError: for other models.
        RuntimeError: if ``ddp`` already has a communication hook.
    """
    wrapper: Any = getattr(ddp, "_orig_mod", ddp)  # the module inside torch.compile
    if not isinstance(wrapper, DistributedDataParallel):
        # The import is slow, and only this error needs it.
        from torch.distributed.fsdp import FSDPModule

        inside = wrapper.modules() if isinstance(wrapper, nn.Module) else ()
        if any(isinstance(module, FSDPModule) for module in inside):
            raise TypeError(
                f"{type(wrapper).__name__} is sharded by FSDP2: call "
                f"curvadion.integrations.fsdp.keep_gradients_local instead."
            )
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
    if hooks:
        return ddp
    try:
        wrapper.register_comm_hook(None, noop_hook)
    except RuntimeError:  # torch has a built-in hook already, which _comm_hooks does not list
        wrapper._comm_hooks.clear()
        raise
    reduced = {
        name: wrapper.process_group
        for name, _ in wrapper.module.named_parameters(remove_duplicate=False)
        if name not in wrapper.parameters_to_ignore
    }
    LOCAL_GRADIENTS.declare(wrapper.module, reduced)
    # Buffers that no checkpoint keeps, such as tables of rotary embeddings, are constants.
    if not any(_persistent_buffers(module) for module in wrapper.module.modules()):
        wrapper.broadcast_buffers = False
    return ddp


def _persistent_buffers(module: nn.Module) -> set[str]:
    """The names of a module's own buffers that its state_dict holds."""
    names = {name for name, _ in module.named_buffers(recurse=False)}
    return names - module._non_persistent_buffers_set
