"""How many elements methods all-reduce, and which of their settings fit a byte budget.

A budget is a share of what AdamW with DDP sends: one element per parameter at every step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

import curvadion
from curvadion.agreement.meeting import MEETING_BYTES
from curvadion.ops.code_format import BITS
from curvadion.sync.coded_mean import bits_of_weights, message_bytes

# 4-byte elements of CurvaDion's meeting: at openings if the gate follows a schedule, otherwise at
# every step.
MEETING = MEETING_BYTES // 4
RANK_FRACTION = 1 / 4  # by default
POWERSGD_DENSE_STEPS = 2  # the hook's minimum: DDP orders its buckets during these steps


@dataclass(frozen=True)
class Shapes:
    """The shapes of a model that cross the wire.

    Attributes:
        all: shapes of all parameters.
        matrices: shapes of those that take Dion.
    """

    all: list[tuple[int, ...]]
    matrices: list[tuple[int, ...]]

    @classmethod
    def of(cls, model: nn.Module) -> "Shapes":
        """Return a model's shapes; its parameters may be on the meta device."""
        groups = curvadion.param_groups(model)
        dion = [g["params"] for g in groups if g["algorithm"] == "dion"]
        matrices = [tuple(p.shape) for pairs in dion for _, p in pairs]
        return cls([tuple(p.shape) for p in model.parameters()], matrices)

    @property
    def parameters(self) -> int:
        """Elements of all parameters, which AdamW with DDP all-reduces in a step."""
        return sum(map(math.prod, self.all))

    @property
    def elementwise(self) -> int:
        """Elements of the parameters that do not take Dion."""
        return self.parameters - sum(map(math.prod, self.matrices))

    def low_rank(self, rank_fraction: float) -> int:
        """Return the elements of all P and R of a Dion step."""
        return sum(math.ceil(rank_fraction * min(s)) * sum(s) for s in self.matrices)

    def dion_step(self, rank_fraction: float = RANK_FRACTION) -> int:
        """Return the elements that a synchronised Dion step all-reduces, without the meeting."""
        return self.low_rank(rank_fraction) + self.elementwise

    def averaged_step(self) -> int:
        """Return the elements of averaging weights and AdamW's moments, and of a Dion step.

        Includes AdamW's step counters, one for each of its parameters.
        """
        counters = len(self.all) - len(self.matrices)
        return self.parameters + 2 * self.elementwise + counters + self.dion_step()

    def powersgd_step(self, rank: int) -> int:
        """Return the elements that a compressed step of PowerSGD all-reduces."""
        return sum(powersgd_elements(shape, rank) for shape in self.all)


def powersgd_elements(shape: Sequence[int], rank: int) -> int:
    """Return the elements PowerSGD all-reduces; a gradient that it would not halve stays dense."""
    rows, columns = shape[0], math.prod(shape[1:])
    compressed = min(rank, rows, columns) * (rows + columns)
    dense = rows * columns
    return compressed if 2 * compressed < dense else dense


def period_within(budget: float, steps: int, elements: float, parameters: int) -> int | None:
    """Return the shortest period at which synchronising so many elements fits a budget.

    Counts one synchronisation per full period and one at the end. None if not even one fits.

    Args:
        budget: share of the bytes of gradients in float32 at every step.
        steps: of the run.
        elements: of one synchronisation, in float32.
        parameters: elements of the model.
    """
    fitting = math.floor(budget * steps * parameters / elements + 1e-9)
    return math.ceil(steps / fitting) if fitting else None


def averaging_period(shapes: Shapes, budget: float, steps: int) -> int | None:
    """Return the shortest period of averaging that fits a budget, with its gate's bytes."""
    return period_within(budget, steps, shapes.averaged_step() + MEETING, shapes.parameters)


def quantized_bytes(shapes: Shapes, bits: int) -> int:
    """Return the bytes of all weights' codes."""
    return message_bytes(map(math.prod, shapes.all), bits)


@dataclass(frozen=True)
class Spending:
    """How CurvaDion spends a budget: arguments of ``methods.ours``."""

    wire_budget: float
    bits: int
    parts: int


def spending(shapes: Shapes, budget: float, steps: int, *, parts: int = 1) -> Spending:
    """Return the bits, and the budget whose last opening falls on the last step.

    On both ways it sends as many bits as CurvaDion by default sends back. The budget includes the
    parts that are synchronised after the last step: the gate gets the ``parts`` openings that it
    saves for a full synchronisation, and opens once it has saved them.

    Args:
        shapes: of the model.
        budget: share of the bytes of gradients in float32 at every step.
        steps: of the run.
        parts: the fragments that are synchronised in turn.
    """
    bits = bits_of_weights(budget, parts).down
    codes = quantized_bytes(shapes, bits) / (4 * shapes.parameters) / parts
    once = codes + MEETING / shapes.parameters
    fitting = math.floor((budget * steps - (parts - 1) * codes) / once)
    openings = min(fitting, steps - parts)
    share = (openings + parts) * once / steps
    return Spending(math.ceil(1e6 * share) / 1e6, bits, parts)


def gradient_bits(shapes: Shapes, budget: float) -> int | None:
    """Return the most bits at which coded gradients at every step fit a budget."""
    left = budget * 4 * shapes.parameters - 4 * MEETING
    return max((b for b in BITS if b > 1 and quantized_bytes(shapes, b) <= left), default=None)


def powersgd_rank(shapes: Shapes, budget: float, steps: int) -> int | None:
    """Return the highest rank of PowerSGD that fits a budget, with its dense steps."""

    def fits(rank: int) -> bool:
        compressed = (steps - POWERSGD_DENSE_STEPS) * shapes.powersgd_step(rank)
        dense = POWERSGD_DENSE_STEPS * shapes.parameters
        return dense + compressed <= budget * steps * shapes.parameters

    ranks = range(1, max(min(shape) for shape in shapes.all if len(shape) > 1) + 1)
    return max(filter(fits, ranks), default=None)
