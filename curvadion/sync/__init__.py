"""How replicas synchronise, and the meeting before a step.

It also exports the types of a custom sync: Sync, Step, Costs, StateKey and Owner.
"""

from curvadion.sync.base import Costs, Step, Sync
from curvadion.sync.coded_gradients import CodedGradients
from curvadion.sync.low_rank import LowRank
from curvadion.sync.quantized_average import QuantizedAverage
from curvadion.update.state import Owner, StateKey

__all__ = [
    "CodedGradients",
    "Costs",
    "LowRank",
    "Owner",
    "QuantizedAverage",
    "StateKey",
    "Step",
    "Sync",
]
