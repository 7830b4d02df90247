"""DistributedDataParallel whose gradients stay on their replica."""

from __future__ import annotations

from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from curvadion.sharding import declare_replicas


def keep_gradients_local(ddp: DistributedDataParallel) -> DistributedDataParallel:
    """Stop ``ddp`` from reducing gradients, for optimizers that communicate themselves.

    Curvadion's then want ``replicas``, the ranks of ``ddp``.

    After any backward ``p.grad`` is this replica's own gradient, neither summed nor divided by the
    number of replicas, wherever the forward ran. (``no_sync()`` around the backward alone does not
    do this: DDP decides in the forward.) Gradient accumulation needs no ``no_sync()`` either, but
    may keep it.

    DDP still broadcasts parameters when it is built, the order of its buckets once, and buffers at
    each forward (``broadcast_buffers=False`` stops that). It also still reduces the map of used
    parameters, 4 bytes per parameter: in every backward with ``find_unused_parameters=True``, in
    the first with ``static_graph=True``. A parameter that only other replicas used gets a gradient
    of zeros.

    To clip gradients call ``curvadion.clip_grad_norm_(optimizer, max_norm)``, which takes one norm
    over all replicas: torch's function would divide each replica's gradient by its own norm.

    Calling it again changes nothing.

    Args:
        ddp: the wrapped model, before its first backward.

    Returns:
        ``ddp`` itself.

    Raises:
        TypeError: if ``ddp`` is not a DistributedDataParallel.
        RuntimeError: if ``ddp`` has another communication hook (DDP's own mixed precision counts
            as one), or reduces gradients where no hook reaches.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"ddp must be a torch.nn.parallel.DistributedDataParallel, got {type(ddp).__name__}: "
            "pass the DDP wrapper itself, before any other wrapper such as torch.compile."
        )
    if any(hook is noop_hook for hook, _ in ddp._comm_hooks):
        return ddp
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
    for parameter in ddp.module.parameters():
        declare_replicas(parameter, ddp.process_group.size())
    return ddp


def _hooked(name: str) -> RuntimeError:
    return RuntimeError(
        f"ddp already has a communication hook ({name}), which reduces gradients, and DDP takes "
        "only one: build the DistributedDataParallel without it (nor DDP mixed_precision) and call "
        "keep_gradients_local instead."
    )
