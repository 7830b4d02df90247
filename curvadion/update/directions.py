"""The directions there are, by the name that a group's ``direction`` gives them.

Another direction is one more file, and a line here.
"""

from __future__ import annotations

from curvadion.update.direction import Direction
from curvadion.update.low_rank import PowerIteration
from curvadion.update.parameter import Parameter
from curvadion.update.polar import Polar

DIRECTIONS: dict[str, Direction] = {"low_rank": PowerIteration(), "polar": Polar()}


def create_state(p: Parameter) -> None:
    """Fill a parameter's state as its algorithm and direction need it before the first step."""
    p.create_state()
    if p.group["algorithm"] == "dion":
        p.state.update(DIRECTIONS[p.direction].create_state(p.X, p.group))
