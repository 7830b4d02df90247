"""Fragments: the parts of a model that are synchronised one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from curvadion import checks
from curvadion.comm.collectives import checksum
from curvadion.division import divide
from curvadion.plan.parameter import Parameter
from curvadion.plan.plan import Plan
from curvadion.sync.corrections import Rate


class Movement(NamedTuple):
    """What a fragment has done since its anchor.

    Attributes:
        rates: sums of learning rates, by parameter group.
        weight: how much its steps count, if members come and go.
        last_sent_rates: the sums of its last opening, by parameter group.
    """

    rates: list[float]
    weight: float
    last_sent_rates: list[float]


class Fragments:
    """The division of a plan's parameters into fragments, and what each one has done.

    Attributes:
        of_parameter: the fragment of each parameter of the plan.
        next: the fragment of the next opening; they take turns.
        rates: by fragment, sums of learning rates since its anchor, by parameter group.
        sent_rates: the same sums at its last opening, by group the largest of all members'
            (those of a fixed group are equal). From these follows the L of
            curvadion.sync.corrections.
        weights: by fragment, how much the steps since its anchor count.
        members: by fragment, how many members the last mean had; 0 if there was none.
    """

    def __init__(self) -> None:
        self.of_parameter: list[int] = []
        self.next = 0
        self.rates: list[list[float]] = []
        self.sent_rates: list[list[float]] = []
        self.weights: list[float] = []
        self.members: list[int] = []
        self._checksum = 0  # of the division

    @property
    def count(self) -> int:
        """How many there are: at most one for each parameter."""
        return max(self.of_parameter, default=0) + 1

    def divide(self, sizes: Sequence[int], count: int) -> bool:
        """Divide parameters of these sizes; return whether they were divided differently."""
        self.of_parameter = divide(sizes, count)
        earlier = self._checksum
        self._checksum = checksum(self.of_parameter)
        self.next %= self.count
        if self._checksum == earlier and len(self.weights) == self.count:
            return False
        # What each of the old ones has done says nothing about the new ones.
        self.rates = [_largest(self.rates) for _ in range(self.count)]
        self.sent_rates = [_largest(self.sent_rates) for _ in range(self.count)]
        self.weights = [max(self.weights, default=0.0)] * self.count
        self.members = [max(self.members, default=0)] * self.count
        return True

    def select(self, plan: Plan, fragment: int) -> Plan:
        """The plan of a fragment's parameters."""
        return plan.select([its_fragment == fragment for its_fragment in self.of_parameter])

    def count_step(self, plan: Plan, weight: float) -> None:
        """Add a step to all fragments.

        Args:
            plan: of the step, in whose groups are its learning rates.
            weight: how much it counts.
        """
        self.weights = [so_far + weight for so_far in self.weights]
        rates = {position: float(group["lr"]) for position, group in plan.groups.items()}
        for sums in self.rates:
            missing = max(rates, default=-1) + 1 - len(sums)
            sums.extend([0.0] * missing)
            for position, rate in rates.items():
                sums[position] += rate

    def movement(self, fragment: int, plan: Plan) -> Movement:
        """What a fragment has done, with a sum for each group of the plan."""
        groups = max(plan.groups, default=-1) + 1
        rates = (self.rates[fragment] + [0.0] * groups)[:groups]
        return Movement(rates, self.weights[fragment], self.sent_rates[fragment])

    def begin_again(self, fragment: int, *, sent_rates: list[float]) -> None:
        """Note that a fragment's movement is sent, with these sums of rates."""
        self.rates[fragment] = []
        self.weights[fragment] = 0.0
        self.sent_rates[fragment] = sent_rates

    def put_back(self, fragment: int, movement: Movement) -> None:
        """Undo :meth:`begin_again`, after an opening that was not applied."""
        both = zip_longest(movement.rates, self.rates[fragment], fillvalue=0.0)
        self.rates[fragment] = [sent + since for sent, since in both]
        self.weights[fragment] += movement.weight
        self.sent_rates[fragment] = movement.last_sent_rates

    def sent_rate(self, plan: Plan) -> Rate:
        """A function from a parameter to its sum of learning rates at its last opening."""
        fragments = dict(zip(plan.parameters, self.of_parameter, strict=True))

        def rate(p: Parameter) -> float:
            sums = self.sent_rates[fragments[p]]
            return sums[p.position] if p.position < len(sums) else 0.0

        return rate

    def forget_rates(self) -> None:
        """Note that all anchors are new."""
        self.rates = [[] for _ in self.rates]

    def forget_members(self) -> None:
        """Note that residuals are no longer parts of a mean of so many members."""
        self.members = [0] * len(self.members)

    def go_on_after(self, fragment: int) -> None:
        """Let the next opening be that of the fragment after this one."""
        self.next = (fragment + 1) % self.count

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "next_fragment": self.next,
            "division": self._checksum,
            "rates": self.rates,
            "sent_rates": self.sent_rates,
            "weights": self.weights,
            "members": self.members,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict()``; :meth:`divide` then compares the divisions."""
        checks.integer("next_fragment", state["next_fragment"], 0)
        checks.integer("division", state["division"], 0)
        checks.numbers("weights", state["weights"])
        checks.numbers("members", state["members"])
        count = len(state["weights"])
        for key in ("rates", "sent_rates", "members"):
            if not isinstance(state[key], list) or len(state[key]) != count:
                raise ValueError(f"{key}={state[key]!r} must be a list of {count} entries")
        for key in ("rates", "sent_rates"):
            for fragment, rates in enumerate(state[key]):
                checks.numbers(f"{key}[{fragment}]", rates)
        self.next = state["next_fragment"]
        self._checksum = state["division"]
        self.rates = state["rates"]
        self.sent_rates = state["sent_rates"]
        self.weights = state["weights"]
        self.members = state["members"]


def _largest(sums: Sequence[Sequence[float]]) -> list[float]:
    """The largest of the fragments' sums, by group."""
    return [max(of_group) for of_group in zip_longest(*sums, fillvalue=0.0)]
