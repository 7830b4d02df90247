"""Before something writes one replica's weights or state for all of them."""

from __future__ import annotations

from curvadion.optim.dion import Dion


def agree_exactly(optimizer: Dion) -> None:
    """Average weights and state of all replicas, unless they are the same already; collective."""
    if optimizer._replicas.size > 1 and optimizer.progress.steps_since_exact:
        optimizer.synchronize(exact=True)


def agree_for_a_file(optimizer: Dion, *, weights_only: bool) -> None:
    """Let replicas agree on what a file will hold; collective."""
    if weights_only:
        optimizer.eval()
    else:
        agree_exactly(optimizer)
