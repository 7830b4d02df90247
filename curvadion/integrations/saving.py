"""Before something writes one replica's weights or state for all of them."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from curvadion.optim.dion import Dion


def agree_exactly(optimizer: Dion) -> None:
    """Average weights and state of all replicas, unless they are the same already; collective."""
    if optimizer._replicas.size > 1 and optimizer.progress.steps_since_exact:
        optimizer.synchronize(exact=True)


def warn_if_apart(model: nn.Module, optimizer: Dion, say: str) -> None:
    """Let ``model.state_dict()`` warn if replicas are apart; it may be called on one rank alone.

    say: what to call before.
    """

    def hook(*_: Any) -> None:
        if optimizer.apart:
            warnings.warn(
                f"The model's state_dict() while the replicas are apart, "
                f"{optimizer.progress.local_steps} local steps after they last agreed, holds this "
                f"rank's weights. Call {say}.",
                stacklevel=3,
            )

    model.register_state_dict_pre_hook(hook)
