"""Curvadion: low-rank, curvature-gated synchronisation for distributed training in PyTorch."""

from curvadion import deepspeed
from curvadion.clipping import clip_grad_norm_
from curvadion.gate import RMMC, AlwaysOpen, FixedPeriod, Gate, WireBudget
from curvadion.optimizer import CurvaDion, Dion
from curvadion.params import param_groups
from curvadion.telemetry import StepReport, Summary
from curvadion.wire import WireMeter

__version__ = "0.1.0"

__all__ = [
    "RMMC",
    "AlwaysOpen",
    "CurvaDion",
    "Dion",
    "FixedPeriod",
    "Gate",
    "StepReport",
    "Summary",
    "WireBudget",
    "WireMeter",
    "clip_grad_norm_",
    "deepspeed",
    "param_groups",
]

deepspeed.register()
