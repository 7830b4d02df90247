"""Gradients clipped by one norm of all replicas, as ``gradient_clipping`` means it."""

from __future__ import annotations

from typing import Any

from curvadion.optim.clipping import clip_grad_norm_
from curvadion.optim.dion import Dion


def clip(engine: Any, optimizer: Dion, max_norm: float) -> float:
    """Clip by the norm of all replicas, which is returned and is what the engine reports."""
    norm = clip_grad_norm_(optimizer, max_norm).item()
    engine._global_grad_norm = norm
    return norm
