"""Curvadion: low-rank, curvature-gated synchronisation for training in PyTorch."""

from curvadion.gates import RMMC, AlwaysOpen, ByteBudget, FixedPeriod, Gate
from curvadion.metering.report import StepReport, Summary
from curvadion.metering.wire import WireMeter
from curvadion.optim.clipping import clip_grad_norm_
from curvadion.optim.curvadion import CurvaDion
from curvadion.optim.dion import Dion
from curvadion.optim.factory import factory
from curvadion.optim.muon import Muon
from curvadion.optim.param_groups import param_groups
from curvadion.optim.replica_optimizer import ReplicaOptimizer
from curvadion.optim.replicated import Replicated
from curvadion.optim.tail_average import TailAverage
from curvadion.optim.torch_state import load_torch_state, torch_state
from curvadion.sync.base import Sync
from curvadion.sync.coded_gradients import CodedGradients
from curvadion.sync.low_rank import LowRank
from curvadion.sync.quantized_average import QuantizedAverage

__version__ = "0.1.0"

__all__ = [
    "RMMC",
    "AlwaysOpen",
    "ByteBudget",
    "CodedGradients",
    "CurvaDion",
    "Dion",
    "FixedPeriod",
    "Gate",
    "LowRank",
    "Muon",
    "QuantizedAverage",
    "ReplicaOptimizer",
    "Replicated",
    "StepReport",
    "Summary",
    "Sync",
    "TailAverage",
    "WireMeter",
    "clip_grad_norm_",
    "factory",
    "load_torch_state",
    "param_groups",
    "torch_state",
]
