"""How many numbers methods all-reduce, and which of their settings fit a budget of bytes.

A budget is a share of what AdamW with DDP sends: one number per parameter at every step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

import curvadion
from curvadion.ops.codes import BITS
from curvadion.sync.coded_mean import bits_of_weights, message_bytes
from curvadion.sync.meeting import MEETING_BYTES
from methods import POWERSGD_DENSE_STEPS

# Numbers of 4 bytes that CurvaDion's meeting takes: at openings where the gate follows a schedule,
# otherwise at every step.
MEETING = MEETING_BYTES // 4
RANK_FRACTION = 1 / 4  # by default


@dataclass(frozen=True)
class Shapes:
    """What of a model crosses the wire.

    Attributes:
        all: shapes of all parameters.
        matrices: shapes of those that take Dion.
    """

    all: list[tuple[int, ...]]
    matrices: list[tuple[int, ...]]

    @classmethod
    def of(cls, model: nn.Module) -> "Shapes":
        """Return a model's; its parameters may be on the meta device."""
        groups = curvadion.param_groups(model)
        dion = [g["params"] for g in groups if g["algorithm"] == "dion"]
        matrices = [tuple(p.shape) for pairs in dion for _, p in pairs]
        return cls([tuple(p.shape) for p in model.parameters()], matrices)

    @property
    def parameters(self) -> int:
        """Numbers in all parameters: what AdamW with DDP all-reduces in a step."""
        return sum(map(math.prod, self.all))

    @property
    def elementwise(self) -> int:
        """Numbers in the parameters that take no Dion."""
        return self.parameters - sum(map(math.prod, self.matrices))

    def low_rank(self, rank_fraction: float) -> int:
        """Return numbers in all P and R of a Dion step."""
        return sum(math.ceil(rank_fraction * min(s)) * sum(s) for s in self.matrices)

    def dion_step(self, rank_fraction: float = RANK_FRACTION) -> int:
        """Return what a synchronised Dion step all-reduces, the meeting left out."""
        return self.low_rank(rank_fraction) + self.elementwise

    def averaged_step(self) -> int:
        """Return what a Dion step on averaged replicas does: weights, AdamW's moments and a step.

        AdamW's step counters, one per parameter that it has, travel with them.
        """
        counters = len(self.all) - len(self.matrices)
        return self.parameters + 2 * self.elementwise + counters + self.dion_step()

    def powersgd_step(self, rank: int) -> int:
        """Return what a compressed step of PowerSGD does."""
        return sum(powersgd_numbers(shape, rank) for shape in self.all)


def powersgd_numbers(shape: Sequence[int], rank: int) -> int:
    """Return what PowerSGD all-reduces of a gradient; what it would not halve stays dense."""
    rows, columns = shape[0], math.prod(shape[1:])
    compressed = min(rank, rows, columns) * (rows + columns)
    dense = rows * columns
    return compressed if 2 * compressed < dense else dense


def period_within(budget: float, steps: int, numbers: float, parameters: int) -> int | None:
    """Return the shortest period at which synchronisations of so many numbers fit a budget.

    Counted is one at each full period and one at the end. None where not even one fits.
    """
    fitting = math.floor(budget * steps * parameters / numbers + 1e-9)
    return math.ceil(steps / fitting) if fitting else None


def averaging_period(shapes: Shapes, budget: float, steps: int) -> int | None:
    """Return the shortest period of averaging that fits a budget, its gate included."""
    return period_within(budget, steps, shapes.averaged_step() + MEETING, shapes.parameters)


def quantized_bytes(shapes: Shapes, bits: int) -> int:
    """Return bytes of the codes of all weights."""
    return message_bytes(map(math.prod, shapes.all), bits)


@dataclass(frozen=True)
class Spending:
    """How CurvaDion spends a budget: arguments of ``methods.ours``."""

    wire_budget: float
    bits: int
    parts: int


def spending(shapes: Shapes, budget: float, steps: int, *, parts: int = 1) -> Spending:
    """Return the bits, and the budget whose last opening falls on the last step.

    The bits are CurvaDion's own choice. Counted are also the parts that come together after the
    last step. The gate is given what it keeps back for an agreement on all, ``parts`` openings
    more, and opens once it has that.
    """
    bits = bits_of_weights(budget, parts)
    codes = quantized_bytes(shapes, bits) / (4 * shapes.parameters) / parts
    once = codes + MEETING / shapes.parameters
    fitting = math.floor((budget * steps - (parts - 1) * codes) / once)
    openings = min(fitting, steps - parts)
    share = (openings + parts) * once / steps
    return Spending(math.ceil(1e6 * share) / 1e6, bits, parts)


def gradient_bits(shapes: Shapes, budget: float) -> int | None:
    """Return the bits of gradients in codes at every step that a budget pays for."""
    left = budget * 4 * shapes.parameters - 4 * MEETING
    return max((b for b in BITS if b > 1 and quantized_bytes(shapes, b) <= left), default=None)


def powersgd_rank(shapes: Shapes, budget: float, steps: int) -> int | None:
    """Return the highest rank of PowerSGD that fits a budget, dense steps included."""

    def fits(rank: int) -> bool:
        compressed = (steps - POWERSGD_DENSE_STEPS) * shapes.powersgd_step(rank)
        dense = POWERSGD_DENSE_STEPS * shapes.parameters
        return dense + compressed <= budget * steps * shapes.parameters

    ranks = range(1, max(min(shape) for shape in shapes.all if len(shape) > 1) + 1)
    return max(filter(fits, ranks), default=None)
