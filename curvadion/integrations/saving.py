"""Before something writes one replica's weights or state for all of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from curvadion import checks
from curvadion.optim.dion import Dion


def agree_exactly(optimizer: Dion) -> None:
    """Average weights and state of all replicas, unless they are the same already; collective."""
    if optimizer._replicas.size > 1 and optimizer.progress.steps_since_exact:
        optimizer.synchronize(exact=True)


def warn_of_own_weights(
    model: nn.Module, optimizers: Iterable[Dion], call: str = "optimizer.eval()"
) -> None:
    """Let the model's ``state_dict()`` warn while replicas are apart.

    A later call for the same model replaces an earlier one. Copies of the model say nothing.

    Args:
        model: the outermost module that others save.
        optimizers: those that train it, looked at each time.
        call: what brings replicas together, as the user calls it.
    """
    for hook in model._state_dict_pre_hooks.values():
        if isinstance(hook, _OwnWeights):
            hook.optimizers, hook.call = optimizers, call
            return
    model.register_state_dict_pre_hook(_OwnWeights(optimizers, call))


class _OwnWeights:
    """A module's hook; what a copy or a pickle of the module takes along knows no optimizer."""

    def __init__(self, optimizers: Iterable[Dion] = (), call: str = "") -> None:
        self.optimizers, self.call = optimizers, call

    def __reduce__(self) -> tuple[type[_OwnWeights], tuple[()]]:
        return _OwnWeights, ()

    def __call__(self, *_: Any) -> None:
        for optimizer in self.optimizers:
            if optimizer.apart:
                warnings.warn(
                    f"The model's state_dict() while the replicas are apart (local steps since "
                    f"they last agreed: {optimizer.progress.local_steps}) holds this rank's "
                    f"weights, of which torch.distributed.checkpoint would make a mixture. Call "
                    f"{self.call} on all ranks before, unless each rank saves and loads its own.",
                    stacklevel=checks.frames_up(),
                )
