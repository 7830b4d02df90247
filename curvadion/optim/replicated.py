"""Replicated: any optimizer, for replicas that rarely synchronise."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from curvadion.comm.members import Members
from curvadion.comm.replicas import ReplicasArgument
from curvadion.gates import ByteBudget, Gate
from curvadion.optim.choices import check_costs, chosen_gate, chosen_sync, set_costs
from curvadion.optim.dion_inner import DionInner
from curvadion.optim.inner import trained
from curvadion.optim.replica_optimizer import ReplicaOptimizer
from curvadion.optim.torch_inner import TorchInner
from curvadion.sync.base import Sync
from curvadion.sync.low_rank import LowRank
from curvadion.sync.quantized_average import QuantizedAverage

DEFAULT_BUDGET = 0.01


class Replicated(ReplicaOptimizer):
    """Wrapper around any optimizer, for replicas that rarely synchronise.

    When the gate opens, replicas average changes of weights in codes of a few bits::

        inner = torch.optim.AdamW(model.parameters(), lr=3e-4)
        optimizer = curvadion.Replicated(inner, replicas=dist.group.WORLD, wire_budget=0.01)

    Use it in place of the inner optimizer, whose groups it shares. Inner states, such as
    momenta, are each replica's own; ``synchronize(exact=True)`` averages them.

    Args:
        optimizer: a torch.optim.Optimizer whose step needs no closure, or a sequence of them
            with different parameters, such as Muon for matrices and AdamW for the rest. Only
            Replicated may step them.
        replicas: as in :class:`curvadion.Dion`.
        gate: when replicas synchronise; it may not read momenta, as RMMC does. None, without
            wire_budget, is ByteBudget(0.01), or AlwaysOpen() with CodedGradients(). It is
            copied.
        sync: QuantizedAverage() by default, or CodedGradients() or your own, but not
            LowRank(), which averages Dion's factors. It is copied.
        wire_budget, max_local_steps, warmup_steps: as in :class:`curvadion.CurvaDion`.

    Attributes:
        inner: the optimizer of this replica; ``inner.optimizers`` is a tuple of those given.
        report: as in Dion. :class:`curvadion.ReplicaOptimizer` has all attributes.

    Raises:
        TypeError, ValueError: naming the argument and its value.
    """

    inner: TorchInner

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        replicas: ReplicasArgument = None,
        gate: Gate | None = None,
        sync: Sync | None = None,
        wire_budget: float | None = None,
        max_local_steps: int | None = 50,
        warmup_steps: int = 0,
    ) -> None:
        optimizers = _checked(optimizer)
        gate = chosen_gate(gate, wire_budget, None, sync, ByteBudget(DEFAULT_BUDGET))
        if isinstance(sync, LowRank):
            raise ValueError(f"sync={sync!r} averages Dion's low-rank factors: use CurvaDion.")
        sync = chosen_sync(QuantizedAverage() if sync is None else sync, gate)
        if gate.reads_momentum:
            raise ValueError(
                f"gate={gate!r} has a signal, of Dion's momenta: with Replicated pass "
                f"wire_budget= or gate=FixedPeriod(k)"
            )
        inner = TorchInner(optimizers, sync)
        if inner.evaluates_states and isinstance(replicas, Members):
            raise ValueError(
                f"optimizer={inner.names} has an eval() that computes weights from its states, "
                f"which replicas that come and go do not share: pass a fixed group as replicas=, "
                f"or an optimizer that is not schedule-free."
            )
        super().__init__(
            inner,
            gate,
            sync,
            replicas=replicas,
            max_local_steps=max_local_steps,
            warmup_steps=warmup_steps,
        )
        # A small model with a default budget is a likely mistake: say so before training.
        set_costs(gate, sync, trained(self.param_groups), sharded=False)
        check_costs(gate, sync, max_local_steps)


def _checked(optimizer: Any) -> tuple[Optimizer, ...]:
    given = tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)
    if not given:
        raise ValueError(f"optimizer={optimizer!r} must hold at least one optimizer")
    if len(set(map(id, given))) < len(given):
        raise ValueError(f"optimizer={optimizer!r} contains the same optimizer twice")
    for one in given:
        if isinstance(one, (ReplicaOptimizer, DionInner)):
            raise TypeError(
                f"optimizer={type(one).__name__} synchronises replicas itself: use it alone, or "
                f"pass a torch.optim.Optimizer."
            )
        if not isinstance(one, Optimizer):
            shown = f"the class {one.__name__}" if isinstance(one, type) else type(one).__name__
            raise TypeError(
                f"optimizer={shown} must be a torch.optim.Optimizer, such as "
                f"torch.optim.AdamW(model.parameters()), or a sequence of them."
            )
        step = inspect.signature(type(one).step)
        needed = [p.name for p in step.parameters.values() if p.name != "self" and _is_needed(p)]
        if needed:
            raise ValueError(
                f"optimizer={type(one).__name__} needs {needed[0]} in each step, which Replicated "
                f"cannot pass: give it an optimizer that uses gradients as they are."
            )
    each = [X for one in given for group in one.param_groups for X in group["params"]]
    twice = len(each) - len(set(each))
    if twice:
        raise ValueError(
            f"optimizer={[type(one).__name__ for one in given]} hold {twice} parameters twice: "
            f"give each parameter to one of them."
        )
    return given


def _is_needed(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not variadic
