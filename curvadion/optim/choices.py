"""Which gates and syncs go together, and what openings cost."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from curvadion import checks
from curvadion.agreement.meeting import MEETING_BYTES, WORDS_BYTES
from curvadion.comm.collectives import group_size
from curvadion.comm.groups import count_of_ranks, ranks_of
from curvadion.comm.replicas import ReplicaGroup
from curvadion.gates import RMMC, AlwaysOpen, ByteBudget, FixedPeriod, Gate
from curvadion.layout.local_gradients import LOCAL_GRADIENTS
from curvadion.layout.placements import shard_sizes
from curvadion.plan.plan import Plan
from curvadion.sync.base import Sync
from curvadion.sync.exact_average import sizes
from curvadion.sync.low_rank import LowRank
from curvadion.sync.quantized_average import QuantizedAverage

NO_GATE = (
    "CurvaDion has no default for when replicas synchronise. Pass one of: wire_budget=0.01 "
    "(recommended; 1 % of the bytes of dense gradients); gate= or threshold=, such as "
    "gate=FixedPeriod(50); or, for the paper's method, use CurvaDion.paper(params), which is "
    "threshold=0.3 with local_step='gradient'."
)


def chosen_gate(
    gate: Any,
    wire_budget: float | None,
    threshold: float | None,
    sync: object,
    default: Gate | None,
) -> Gate:
    """Return the gate, given by a short form or as an object, which is copied.

    Args:
        gate: an object, or None.
        wire_budget: short for ``ByteBudget(wire_budget)``, or None.
        threshold: short for ``RMMC(threshold)``, or None.
        sync: as users give it; one that needs every step needs no gate.
        default: the gate without any of these; None: that is an error.
    """
    ways = {"gate": gate, "threshold": threshold, "wire_budget": wire_budget}
    given = [f"{key}={value!r}" for key, value in ways.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)}: each is a gate; pass one of them.")
    if wire_budget is not None:
        return ByteBudget(wire_budget)
    if threshold is not None:
        return RMMC(threshold)
    if gate is None:
        if isinstance(sync, Sync) and sync.every_step:
            return AlwaysOpen()
        if default is None:
            raise ValueError(NO_GATE)
        return default
    if not isinstance(gate, Gate):
        raise TypeError(f"gate={gate!r} must be a Gate, such as curvadion.FixedPeriod(50)")
    own: Gate = copy.deepcopy(gate)  # which keeps counters and costs of one optimizer
    return own


def chosen_sync(given: Any, gate: Gate) -> Sync:
    """Return a copy of the sync, with the defaults that suit the gate."""
    if given is None:
        given = LowRank() if gate.share is None else QuantizedAverage()
    if not isinstance(given, Sync):
        raise TypeError(f"sync={given!r} must be a Sync, such as curvadion.QuantizedAverage()")
    sync: Sync = copy.deepcopy(given)
    if gate.share is not None and sync.costs([[1]]) is None:
        raise ValueError(
            f"gate={gate!r} needs a sync of known cost, such as QuantizedAverage(), not {sync!r}"
        )
    sync.choose_defaults(gate.share)
    return sync


def check_kinds(gate: Gate, sync: Sync) -> None:
    """Raise ValueError if the gate opens too rarely or too often for the sync."""
    checks.integer("sync.delay", sync.delay, 0)
    if sync.every_step and not (gate.always_open or gate.share is not None):
        raise ValueError(
            f"gate={gate!r} may close, but sync={sync!r} needs every step: pass "
            f"AlwaysOpen(), wire_budget= or no gate."
        )
    if isinstance(gate, (AlwaysOpen, FixedPeriod)) and sync.delay >= gate.expected_period():
        raise ValueError(
            f"sync={sync!r} with gate={gate!r}: means would arrive after the next opening, "
            f"so pass a delay below {gate.expected_period()}."
        )


def set_costs(gate: Gate, sync: Sync, X: Sequence[Tensor], *, sharded: bool = True) -> None:
    """Tell gate and sync what all ranks of a replica send together.

    Args:
        gate: whose ``open_cost`` is set, if the sync knows its cost.
        sync: which notes the parameters.
        X: the trained parameters, in the order of a plan.
        sharded: whether to count by shards; before a model is sharded nobody knows them.
    """
    elements = sizes(X)
    shards = [shard_sizes(x) for x in X] if sharded else [[n] for n in elements]
    sync.prepare(shards)
    costs = sync.costs(shards)
    dense = 4 * sum(elements)
    if costs is None or not dense:
        return
    meeting = 0
    if gate.follows_schedule:  # only openings hold meetings
        bytes_of_rank = WORDS_BYTES if sync.delay else MEETING_BYTES
        meeting = bytes_of_rank * max(map(len, shards))
    gate.open_cost = (costs.opening_bytes + meeting) / dense
    gate.openings_per_full_sync = costs.openings_per_full_sync


def check_costs(gate: Gate, sync: Sync, max_local_steps: int | None) -> None:
    """Raise ValueError if the gate cannot pay for its openings."""
    check_kinds(gate, sync)
    if not sync.every_step:
        gate.check_feasible(max_local_steps)
    elif gate.share and gate.open_cost > gate.share:
        raise ValueError(
            f"wire_budget={gate.share!r} is less than sync={sync!r} sends at every step, "
            f"{gate.open_cost:.4f}: raise it, or pass fewer bits or sync=QuantizedAverage()."
        )


def check_members(gate: Gate, sync: Sync, replicas: ReplicaGroup) -> None:
    """Raise ValueError if gate or sync do not work with replicas that come and go."""
    if replicas.fixed:
        return
    # AlwaysOpen, too: members need no step between openings, only openings known ahead.
    known_ahead = sync.every_step or (gate.follows_schedule and not gate.reads_momentum)
    if not (sync.elastic and known_ahead):
        raise ValueError(
            f"gate={gate!r}, sync={sync!r} with replicas that come and go: pass "
            f"QuantizedAverage() with a schedule, such as wire_budget=0.01, or "
            f"CodedGradients()."
        )


def check_one_replica(gate: Gate, sync: Sync, replicas: ReplicaGroup, plan: Plan) -> None:
    """Raise ValueError if processes with whole weights would never synchronise.

    Args:
        gate: when replicas synchronise.
        sync: how they do.
        replicas: as the user has given them.
        plan: whose groups say on how many ranks this replica is.
    """
    # These gates and syncs have no use but between replicas.
    for_several = gate.share is not None or sync.every_step
    if for_several and plan.inside is not None and replicas.size == 1:
        raise ValueError(
            f"gate={gate!r} with one replica on {group_size(plan.inside)} ranks: use Dion, "
            f"or pass replicas= if there are several."
        )
    group = replicas.process_group
    # Without a group something else may average gradients.
    averaged = group is None and gate.always_open and not sync.every_step
    if replicas.single or replicas.size > 1 or averaged or plan.all_ranks is not None:
        return
    ranks = count_of_ranks()
    if ranks > 1:
        given = "None" if group is None else f"a process group of rank {dist.get_rank()} alone"
        raise ValueError(
            f"replicas={given} with gate={gate!r}: {ranks} processes with whole "
            f"parameters would never synchronise. Pass "
            f"replicas=torch.distributed.group.WORLD with keep_gradients_local, or 'single' "
            f"if each trains alone; with fully_shard, build the groups after it."
        )


def check_local_gradients(replicas: ReplicaGroup, plan: Plan) -> None:
    """Raise ValueError if nothing would average gradients that a framework leaves to us."""
    group = replicas.process_group
    if not replicas.fixed or (replicas.single and group is None):
        return
    averaged = set() if group is None else set(ranks_of(group))
    all_local_ranks = LOCAL_GRADIENTS.ranks()
    for p in plan.parameters:
        local_ranks = all_local_ranks.get(id(p.X), frozenset())
        if len(local_ranks) > 1 and not local_ranks <= averaged:
            given = "None" if group is None else f"a process group of ranks {sorted(averaged)}"
            raise ValueError(
                f"replicas={given}, but since keep_gradients_local nothing averages the gradient "
                f"of {p.name} over the ranks {sorted(local_ranks)}: pass replicas= with these, "
                f"or 'single' if each trains alone."
            )
