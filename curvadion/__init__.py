"""Curvadion: low-rank, curvature-gated synchronisation for distributed training in PyTorch."""

from curvadion import deepspeed
from curvadion.gates import RMMC, AlwaysOpen, FixedPeriod, Gate, WireBudget
from curvadion.metering.report import StepReport, Summary
from curvadion.metering.wire import WireMeter
from curvadion.optim.clipping import clip_grad_norm_
from curvadion.optim.optimizer import CurvaDion, Dion
from curvadion.optim.param_groups import param_groups

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
