"""DistributedDataParallel with local gradients."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

Model = TypeVar("Model", bound=nn.Module)


def keep_gradients_local(ddp: Model) -> Model:
    """Stop DDP from reducing gradients, for optimizers that communicate themselves.

    ``ddp`` is a DistributedDataParallel, or ``torch.compile`` of one, before its first backward; it
    is returned. Pass its process group to the optimizer as ``replicas``. ``p.grad`` is this
    replica's own gradient, neither summed nor divided; gradient accumulation needs no
    ``no_sync()``. To clip gradients call ``curvadion.clip_grad_norm_(optimizer, max_norm)``.

    DDP still reduces the map of used parameters, 4 bytes per parameter: in every backward with
    ``find_unused_parameters=True``, in the first with ``static_graph=True``. A parameter that only
    other replicas used gets a gradient of zeros.

    DDP broadcasts its first rank's buffers before every forward. This stops if all of them are
    non-persistent, such as rotary embedding tables. Persistent buffers may be state, such as
    BatchNorm's running statistics, and are still broadcast: build the DistributedDataParallel with
    ``broadcast_buffers=False`` if each replica may keep its own.

    TypeError if ``ddp`` is neither of these. RuntimeError if it already has a communication hook,
    such as that of DDP's mixed precision.
    """
    wrapper: Any = ddp
    while isinstance(wrapper, nn.Module) and "_orig_mod" in wrapper._modules:
        wrapper = wrapper._modules["_orig_mod"]  # the module inside torch.compile
    if not isinstance(wrapper, DistributedDataParallel):
        raise TypeError(
            f"ddp must be a torch.nn.parallel.DistributedDataParallel, or torch.compile of one, "
            f"got {type(wrapper).__name__}: pass the DDP wrapper itself."
        )
    if not any(hook is noop_hook for hook, _ in wrapper._comm_hooks):
        try:
            wrapper.register_comm_hook(None, noop_hook)
        except RuntimeError as error:
            wrapper._comm_hooks = [each for each in wrapper._comm_hooks if each[0] is not noop_hook]
            raise RuntimeError(
                "ddp already has a communication hook, which reduces gradients, and DDP takes only "
                "one: build the DistributedDataParallel without it and without mixed_precision."
            ) from error
        wrapper.broadcast_buffers &= any(
            name not in module._non_persistent_buffers_set  # a checkpoint keeps it
            for module in wrapper.module.modules()
            for name, _ in module.named_buffers(recurse=False)
        )
    return ddp
