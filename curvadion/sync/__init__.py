"""How replicas synchronise when the gate opens.

It also exports the types of a custom sync: Sync, Step, Costs, StateKey and StateOwner.
"""

from curvadion.plan.state import StateKey, StateOwner
from curvadion.sync.base import Costs, Step, Sync
from curvadion.sync.coded_gradients import CodedGradients
from curvadion.sync.low_rank import LowRank
from curvadion.sync.quantized_average import QuantizedAverage

__all__ = [
    "CodedGradients",
    "Costs",
    "LowRank",
    "QuantizedAverage",
    "StateKey",
    "StateOwner",
    "Step",
    "Sync",
]
