"""DistributedDataParallel whose gradients stay on their replica."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from curvadion import checks

Model = TypeVar("Model", bound=nn.Module)

NEGLIGIBLE = 1e-3
"""Share of dense gradients' bytes below which buffers are broadcast without a warning."""


def keep_gradients_local(ddp: Model, *, broadcast_buffers: bool | None = None) -> Model:
    """Stop DDP from reducing gradients, for optimizers that communicate themselves.

    Curvadion's then want ``replicas``, the ranks of the DistributedDataParallel.

    After any backward ``p.grad`` is this replica's own gradient, neither summed nor divided by the
    number of replicas; gradient accumulation needs no ``no_sync()``, but may keep it. To clip
    gradients call ``curvadion.clip_grad_norm_(optimizer, max_norm)``: torch's function would divide
    each replica's gradient by its own norm.

    DDP goes on broadcasting parameters when it is built and the order of its buckets once, and
    reducing the map of used parameters, 4 bytes per parameter: in every backward with
    ``find_unused_parameters=True``, in the first with ``static_graph=True``. A parameter that only
    other replicas used gets a gradient of zeros.

    DDP broadcasts the buffers of its first rank before every forward. By default this ends if all
    of them are non-persistent, such as tables of rotary embeddings. Persistent ones may be state,
    such as BatchNorm's running statistics: they are broadcast as before, with a warning if that
    costs more than 0.1 % of the bytes of dense gradients. With ``broadcast_buffers=False`` they are
    each replica's own, and a checkpoint keeps those of the rank that writes it.

    Calling it again changes nothing, unless ``broadcast_buffers`` is given.

    Args:
        ddp: a DistributedDataParallel, or what ``torch.compile`` makes of one, before its first
            backward. It may wrap a compiled module.
        broadcast_buffers: whether DDP broadcasts buffers at each forward; None decides as said.

    Returns:
        ``ddp`` itself, as it was given.

    Raises:
        TypeError: if ``ddp`` is not a DistributedDataParallel.
        RuntimeError: if it has another communication hook (DDP's own mixed precision counts
            as one).
    """
    wrapper = _inside_compiled(ddp)
    if not isinstance(wrapper, DistributedDataParallel):
        raise TypeError(
            f"ddp must be a torch.nn.parallel.DistributedDataParallel, or torch.compile of one, "
            f"got {type(wrapper).__name__}: pass the DDP wrapper itself."
        )
    if broadcast_buffers is not None:
        wrapper.broadcast_buffers = broadcast_buffers
    if _replace_reduction(wrapper) and broadcast_buffers is None:
        _spare_buffers(wrapper)
    return ddp


def _inside_compiled(model: Any) -> Any:
    """What torch.compile has wrapped, or the model itself."""
    while isinstance(model, nn.Module) and "_orig_mod" in model._modules:
        model = model._modules["_orig_mod"]
    return model


def _replace_reduction(ddp: DistributedDataParallel) -> bool:
    """Give ``ddp`` a communication hook that sends nothing; False if it has that one already."""
    if any(hook is noop_hook for hook, _ in ddp._comm_hooks):
        return False
    if ddp._comm_hooks:
        raise _hooked(ddp._comm_hooks[0][0].__qualname__)
    if ddp._delay_all_reduce_params or ddp._use_python_reducer:
        raise RuntimeError(
            "ddp reduces gradients outside its communication hook: build it without "
            "delay_all_reduce_named_params and with torch._dynamo.config.optimize_ddp other than "
            "'python_reducer'."
        )
    try:
        ddp.register_comm_hook(None, noop_hook)
    except RuntimeError as error:  # a built-in hook, which only DDP's C++ side knows of
        ddp._comm_hooks.clear()
        raise _hooked("built-in") from error
    return True


def _spare_buffers(ddp: DistributedDataParallel) -> None:
    """Do not broadcast buffers that no checkpoint keeps; say what the others cost."""
    if not ddp.will_sync_module_buffers():
        return
    kept = {
        id(buffer)
        for module in ddp.module.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
    if not any(id(buffer) in kept for buffer in ddp.modules_buffers):
        ddp.broadcast_buffers = False
        return
    sent = sum(buffer.nbytes for buffer in ddp.modules_buffers)
    dense = sum(p.nbytes for p in ddp.module.parameters() if p.requires_grad)
    if sent > NEGLIGIBLE * dense:
        warnings.warn(
            f"DDP broadcasts {len(ddp.modules_buffers)} buffers at each forward: {sent} bytes, "
            f"{sent / dense:.2%} of what dense gradients take. Call keep_gradients_local(model, "
            f"broadcast_buffers=False) if they never change (rotary tables, masks) or if each "
            f"replica may keep its own (BatchNorm's running statistics), and broadcast_buffers="
            f"True to keep it as it is.",
            stacklevel=checks.user_stacklevel(),
        )


def _hooked(name: str) -> RuntimeError:
    return RuntimeError(
        f"ddp already has a communication hook ({name}), which reduces gradients, and DDP takes "
        "only one: build the DistributedDataParallel without it (nor DDP mixed_precision) and call "
        "keep_gradients_local instead."
    )
