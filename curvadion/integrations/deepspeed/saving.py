"""Checkpoints: replicas agree before one of them is written, and all load what it wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from curvadion.integrations.wrapping import wrap_method
from curvadion.optim.dion import Dion


def synchronize_before_saving(engine: Any, optimizer: Dion) -> None:
    """Only one replica's weights and state are written, and all load these: they must agree."""

    def save(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        optimizer.synchronize(exact=True)
        if optimizer._replicas.replica.number > 0:
            # From stage 1 on each replica would write files of the same names.
            engine.save_non_zero_checkpoint = engine.save_zero_checkpoint = False
        return theirs(*args, **kwargs)

    def save_weights(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        optimizer.eval()
        return theirs(*args, **kwargs)

    wrap_method(engine, "save_checkpoint", save)
    # Accelerate gathers weights without save_16bit_model, also on all ranks.
    for name in ("save_16bit_model", "_zero3_consolidated_16bit_state_dict"):
        wrap_method(engine, name, save_weights)


def explain_failed_loading(engine: Any) -> None:
    """Say what ZeRO wants of a checkpoint, of which its own errors do not tell."""

    def load(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return theirs(*args, **kwargs)
        except Exception as error:
            raise ValueError(
                f"load_checkpoint failed ({type(error).__name__}: {error}). ZeRO loads a "
                f"checkpoint with the zero_optimization that it was saved with, and with as many "
                f"ranks in a replica."
            ) from error

    wrap_method(engine, "load_checkpoint", load)
