"""The lines that an optimizer logs: how its run begins, and what it has sent so far."""

from __future__ import annotations

import logging
from typing import Any

from curvadion.comm.collectives import group_size
from curvadion.comm.groups import is_first_rank
from curvadion.comm.replicas import ReplicaGroup
from curvadion.gates import Gate
from curvadion.metering.report import Summary
from curvadion.ops.code_format import Bits
from curvadion.plan.plan import Plan
from curvadion.sync import exact_average
from curvadion.sync.base import Sync
from curvadion.update.registry import DIRECTIONS

logger = logging.getLogger("curvadion")


def is_logged() -> bool:
    """Whether this rank logs, and somebody reads it."""
    return is_first_rank() and logger.isEnabledFor(logging.INFO)


def beginning(
    name: str,
    replicas: ReplicaGroup,
    plan: Plan,
    gate: Gate,
    sync: Sync,
    *,
    first_opening: int | None,
) -> str:
    """What is trained how, and when replicas synchronise.

    Args:
        name: of the optimizer.
        replicas: the ranks with replicas.
        plan: of the first step.
        gate: when replicas synchronise.
        sync: how they do.
        first_opening: the step at which they first will; None if it is not known.
    """
    counted = _count(replicas, group_size(plan.inside))
    line = f"{name}, {counted}: {_updates(plan)}"
    if replicas.size == 1:
        return line
    bits = getattr(sync, "bits", None)
    line += f"; {type(sync).__name__}"
    if bits is not None:
        line += f" in {_bits(bits)}"
    line += f", {_openings(gate, first_opening)}"
    if gate.share is not None:
        # An all-reduce of n replicas sends 2 (n - 1) / n times the gradients' bytes.
        dense = 4 * sum(exact_average.sizes([p.X for p in plan.parameters]))
        line += f"; budget {100 * gate.share:.3g} % of DDP's bytes"
        if replicas.fixed:
            sent = gate.share * dense * 2 * (replicas.size - 1) / replicas.size
            line += f", {sent:,.0f} bytes a step from each replica"
    return line


def so_far(steps: int, share: float | None, totals: Summary) -> str:
    """What has been sent, and what happened since the optimizer was built or loaded.

    Args:
        steps: of the run.
        share: of DDP's bytes that have been sent; None if it is not known.
        totals: over the steps since then.
    """
    sent = "bytes unknown" if share is None else f"{100 * share:.3g} % of DDP's bytes sent"
    waited = totals.waited_seconds + totals.opening_seconds
    return (
        f"Step {steps}: {sent}; in {totals.steps} steps since start or load {totals.open_steps} "
        f"openings, {totals.skipped_steps} skipped, {waited:.2f} s waited for other replicas"
    )


def _bits(bits: Any) -> str:
    """The bits of codes; a sync of a user's own may have a number instead of :class:`Bits`."""
    up, down = bits if isinstance(bits, Bits) else (bits, bits)
    counted = f"{up} bit" if up == 1 else f"{up} bits"
    return counted if up == down else f"{counted} up and {down} down"


def _openings(gate: Gate, first: int | None) -> str:
    """When a gate opens; first: the first time, None if it is not known."""
    if gate.always_open:
        return "at every step"
    if first is None:
        return f"when {gate!r} opens"
    period = gate.expected_period()
    then = f", then every {period:.3g} steps" if period > 1 else ""
    return f"first at step {first}{then}"


def _count(replicas: ReplicaGroup, ranks: int) -> str:
    """How many replicas there are; ranks: of one of them."""
    each = "1 rank" if ranks == 1 else f"{ranks} ranks"
    names = replicas.members.names
    if not replicas.fixed:
        if names is not None and len(names) == 1:
            return f"1 replica that comes and goes, of {each}"
        present = "replicas" if names is None else f"{len(names)} replicas"
        return f"{present} that come and go, of {each}"
    if replicas.size == 1:
        return f"1 replica of {each}"
    return f"{replicas.size} replicas of {each}"


def _updates(plan: Plan) -> str:
    """How many parameters take which update."""
    counts = []
    for update, count in plan.directions.items():
        if update == "inner":
            counts.append(f"{count} parameters")
        elif update in DIRECTIONS:
            counts.append(f"{count} {'matrix' if count == 1 else 'matrices'} {update}")
        else:
            counts.append(f"{count} embeddings, heads or vectors {update}")
    return ", ".join(counts) or "no parameters"
