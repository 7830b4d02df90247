"""Hooks on the update of matrices, for ``optimizer.register_update_hook``; types of your own."""

from curvadion.hooks.cautious_weight_decay import CautiousWeightDecay
from curvadion.hooks.qk_clip import Attention, QKClip
from curvadion.hooks.row_floor import RowFloor
from curvadion.update.update_hooks import MatrixUpdate, UpdateBatch, UpdateHook

__all__ = [
    "Attention",
    "CautiousWeightDecay",
    "MatrixUpdate",
    "QKClip",
    "RowFloor",
    "UpdateBatch",
    "UpdateHook",
]
