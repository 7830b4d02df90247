"""Helpers shared by the integrations of several frameworks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from curvadion.integrations import ddp, fsdp
from curvadion.optim.curvadion import CurvaDion
from curvadion.optim.dion import Dion
from curvadion.optim.replica_optimizer import ReplicaOptimizer

# The optimizers by their names in configurations.
KINDS: dict[str, Callable[..., ReplicaOptimizer]] = {"CurvaDion": CurvaDion, "Dion": Dion}


def keep_gradients_local(model: nn.Module) -> None:
    """Stop DDP or FSDP2, if used, from averaging gradients over replicas."""
    modules = list(model.modules())
    if any(isinstance(module, DistributedDataParallel) for module in modules):
        ddp.keep_gradients_local(model)
    elif any(isinstance(module, FSDPModule) for module in modules):
        fsdp.keep_gradients_local(model)


def synchronize_replicas(
    optimizers: Iterable[ReplicaOptimizer], *, weights_only: bool = False
) -> None:
    """Synchronise replicas, before one writes a file for all or evaluates; collective.

    Args:
        optimizers: those of the model, in the same order on all ranks.
        weights_only: whether weights suffice, as in an evaluation or a file without optimizer
            states; otherwise all state becomes identical on all replicas.
    """
    for optimizer in optimizers:
        if weights_only:
            optimizer.eval()
        elif optimizer.replicas.size > 1 and optimizer.progress.steps_since_exact:
            optimizer.synchronize(exact=True)


def run_before(owner: object, name: str, action: Callable[[], object]) -> None:
    """Make ``owner.name`` call ``action`` first."""

    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        action()
        return original(*args, **kwargs)

    wrap_method(owner, name, around)


def run_after(owner: object, name: str, action: Callable[[Any], object]) -> None:
    """Make ``owner.name`` pass its result to ``action`` at the end."""

    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        action(result)
        return result

    wrap_method(owner, name, around)


def wrap_method(owner: object, name: str, around: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a method by a function that gets the original method first.

    Args:
        owner: an object, for its bound method; or a class, for all its objects.
        name: the method's name.
        around: called in its place, as ``around(original, *args, **kwargs)``.

    Returns:
        The original method.
    """
    original: Callable[..., Any] = getattr(owner, name)

    @wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, replacement)
    return original
