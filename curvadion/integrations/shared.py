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

KINDS: dict[str, type[Dion]] = {"CurvaDion": CurvaDion, "Dion": Dion}  # in configurations


def keep_gradients_local(model: nn.Module) -> None:
    """Stop DDP or FSDP2, if used, from averaging gradients over replicas."""
    modules = list(model.modules())
    if any(isinstance(module, DistributedDataParallel) for module in modules):
        ddp.keep_gradients_local(model)
    elif any(isinstance(module, FSDPModule) for module in modules):
        fsdp.keep_gradients_local(model)


def agree(optimizers: Iterable[Dion], *, weights_only: bool = False) -> None:
    """Synchronise replicas before one of them writes a file for all; collective."""
    for optimizer in optimizers:
        if weights_only:
            optimizer.eval()
        elif optimizer._replicas.size > 1 and optimizer.progress.steps_since_exact:
            optimizer.synchronize(exact=True)


def run_before(owner: object, name: str, action: Callable[[], object]) -> None:
    """Make ``owner.name`` call ``action`` first."""

    def around(theirs: Any, *args: Any, **kwargs: Any) -> Any:
        action()
        return theirs(*args, **kwargs)

    wrap_method(owner, name, around)


def run_after(owner: object, name: str, action: Callable[[Any], object]) -> None:
    """Make ``owner.name`` pass its result to ``action`` at the end."""

    def around(theirs: Any, *args: Any, **kwargs: Any) -> Any:
        result = theirs(*args, **kwargs)
        action(result)
        return result

    wrap_method(owner, name, around)


def wrap_method(owner: object, name: str, around: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``owner.name`` by ``around``, which gets the original first; return that."""
    theirs: Callable[..., Any] = getattr(owner, name)

    @wraps(theirs)
    def ours(*args: Any, **kwargs: Any) -> Any:
        return around(theirs, *args, **kwargs)

    setattr(owner, name, ours)
    return theirs
