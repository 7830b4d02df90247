"""Can a gate, a sync and these replicas work together? Errors and warnings that say why not."""

from __future__ import annotations

import os
import warnings

import torch.distributed as dist

from curvadion import checks
from curvadion.comm.collectives import group_size
from curvadion.comm.replicas import ReplicaGroup
from curvadion.gates import AlwaysOpen, FixedPeriod, Gate
from curvadion.sync.base import Sync
from curvadion.update.plan import Plan


def check_kinds(gate: Gate, sync: Sync) -> None:
    """Raise if the gate may close where replicas must synchronise at every step, and the like."""
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
            f"({gate.open_cost:.2%} of dense gradients, whose blocks of 256 numbers are filled "
            f"up): pass a larger budget, fewer bits (1 takes 3.3%) or sync=QuantizedAverage()."
        )


def check_one_replica(gate: Gate, sync: Sync, replicas: ReplicaGroup, plan: Plan) -> None:
    """Raise ValueError if processes with whole weights would never synchronise; or warn."""
    between = gate.share is not None or sync.every_step
    if between and plan.inside is not None and replicas.size == 1:
        raise ValueError(
            f"gate={gate!r} and sync={sync!r} with one replica, which is sharded over "
            f"{group_size(plan.inside)} ranks: there is nothing to synchronise, and shards send "
            f"their factors at every step. Use Dion, or pass replicas= if there are several."
        )
    if replicas.single or plan.all_ranks is not None:
        return
    initialized = dist.is_available() and dist.is_initialized()
    if initialized:
        _warn_of_one_rank(gate, replicas)
    averaged = gate.always_open and not sync.every_step  # by whoever else may average gradients
    if averaged or replicas.process_group is not None:
        return
    if initialized and dist.get_world_size() > 1:
        raise ValueError(
            f"replicas=None with gate={gate!r}, sync={sync!r}: there are "
            f"{dist.get_world_size()} processes, each with whole parameters, and none of them "
            f"would ever hear of the others. Pass replicas=torch.distributed.group.WORLD (which "
            f"is None until init_process_group has been called) with keep_gradients_local, or "
            f"replicas='single' if each process trains by itself or something else averages the "
            f"gradients. If the model is to be sharded, make the optimizer's groups after "
            f"fully_shard."
        )
    if not initialized and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        warnings.warn(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but no process group exists and replicas is "
            f"None: each process trains by itself. Call init_process_group and pass "
            f"replicas=torch.distributed.group.WORLD, or replicas='single' if this is meant.",
            stacklevel=checks.user_stacklevel(),
        )


def _warn_of_one_rank(gate: Gate, replicas: ReplicaGroup) -> None:
    """Warn if a process that holds whole weights has no replica, and may be meant to have some."""
    world, text = dist.get_world_size(), None
    if world > 1 and replicas.process_group is not None:
        text = (
            f"replicas is a process group of this rank alone, and there are {world} ranks: its "
            f"weights are never averaged with those of another rank. Pass "
            f"replicas=torch.distributed.group.WORLD or the group of all ranks that train the same "
            f"weights, or replicas='single' if no other rank does."
        )
    elif world == 1 and gate.share is not None:
        text = (
            f"gate={gate!r} with one process: there is no other replica to send anything to. Start "
            f"one process for each replica, as torchrun --nproc-per-node does, or pass "
            f"replicas='single' if there is to be one."
        )
    if text is not None:
        warnings.warn(text, stacklevel=checks.user_stacklevel())
