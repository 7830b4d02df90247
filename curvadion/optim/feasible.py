"""Can a gate, a sync and these replicas work together? Errors that say why not."""

from __future__ import annotations

import torch.distributed as dist

from curvadion import checks
from curvadion.comm.collectives import group_size
from curvadion.comm.replicas import ReplicaGroup
from curvadion.gates import AlwaysOpen, FixedPeriod, Gate
from curvadion.sync.base import Sync
from curvadion.update.plan import Plan


def check_kinds(gate: Gate, sync: Sync) -> None:
    """Raise if the gate may close, or opens too often, for the sync."""
    checks.integer("sync.delay", sync.delay, 0)
    if sync.every_step and not (gate.always_open or gate.share is not None):
        raise ValueError(
            f"gate={gate!r} may close, but with sync={sync!r} replicas synchronise at every "
            f"step: pass gate=AlwaysOpen(), a ByteBudget (wire_budget=) or no gate."
        )
    if isinstance(gate, (AlwaysOpen, FixedPeriod)) and sync.delay >= (
        period := gate.expected_period(1.0)
    ):
        raise ValueError(
            f"sync={sync!r} with gate={gate!r}: means would arrive after the next opening. Pass a "
            f"delay below {period}, or a longer period."
        )


def check_costs(gate: Gate, sync: Sync, max_local_steps: int | None) -> None:
    """Raise ValueError if the gate, which knows what openings cost, cannot do its work."""
    check_kinds(gate, sync)
    if not sync.every_step:
        gate.check_feasible(max_local_steps)
    elif gate.share and gate.open_cost and gate.open_cost > gate.share:
        raise ValueError(
            f"wire_budget={gate.share!r} is less than sync={sync!r} sends at every step "
            f"({gate.open_cost:.2%} of dense gradients): pass a larger budget, fewer bits (1 takes "
            f"3.3%) or sync=QuantizedAverage()."
        )


def check_one_replica(gate: Gate, sync: Sync, replicas: ReplicaGroup, plan: Plan) -> None:
    """Raise ValueError if processes with whole weights would never synchronise."""
    between = gate.share is not None or sync.every_step
    if between and plan.inside is not None and replicas.size == 1:
        raise ValueError(
            f"gate={gate!r} and sync={sync!r} with one replica, which is sharded over "
            f"{group_size(plan.inside)} ranks: there is nothing to synchronise. Use Dion, or pass "
            f"replicas= if there are several."
        )
    if replicas.single or plan.all_ranks is not None:
        return
    averaged = gate.always_open and not sync.every_step  # by whoever else may average gradients
    if averaged or replicas.process_group is not None:
        return
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"replicas=None with gate={gate!r}, sync={sync!r}: there are "
            f"{dist.get_world_size()} processes, each with whole parameters, and none of them "
            f"would ever hear of the others. Pass replicas=torch.distributed.group.WORLD after "
            f"init_process_group, or replicas='single' if something else averages the gradients; "
            f"to shard the model, make the optimizer's groups after fully_shard."
        )
