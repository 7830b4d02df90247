"""The outer layer around any torch optimizers."""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from curvadion.comm.collectives import all_ranks_equal
from curvadion.comm.groups import ReplicasArgument
from curvadion.gates import ByteBudget, Gate
from curvadion.layout.dtensor import local, placements_of
from curvadion.layout.placements import spans_replicas
from curvadion.optim.base import check_costs, chosen_gate, chosen_sync
from curvadion.optim.checkpoint import Record, check_groups, check_sync
from curvadion.optim.outer import ReplicaOptimizer
from curvadion.plan.parameter import Parameter, States
from curvadion.plan.plan import Plan
from curvadion.plan.state import PROGRESS, StateKey, StateOwner
from curvadion.sync.base import Step, Sync
from curvadion.sync.low_rank import LowRank
from curvadion.sync.quantized_average import QuantizedAverage
from curvadion.update.inner_step import Batch

DEFAULT_BUDGET = 0.01
COMPARED = ("lr", "weight_decay", "betas", "momentum")  # group keys equal on all replicas


class Replicated(ReplicaOptimizer):
    """Wrapper around any optimizer, for replicas that rarely synchronise.

    When the gate opens, replicas average changes of weights in codes of a few bits::

        inner = torch.optim.AdamW(model.parameters(), lr=3e-4)
        optimizer = curvadion.Replicated(inner, replicas=dist.group.WORLD, wire_budget=0.01)

    Use it in place of the inner optimizer, whose groups it shares. Inner states, such as
    momenta, are each replica's own; ``synchronize(exact=True)`` averages them.

    Args:
        optimizer: a torch.optim.Optimizer without a closure, or a sequence of them with
            different parameters, such as Muon for matrices and AdamW for the rest.
        replicas: as in :class:`curvadion.Dion`.
        gate, sync, wire_budget, max_local_steps, warmup_steps: as in
            :class:`curvadion.CurvaDion`, but sync is QuantizedAverage() by default, and the
            gate a budget of 1 %.

    Attributes:
        inner: the inner optimizers, a tuple.
        report, progress: as in :class:`curvadion.Dion`.
    """

    _kept = (*ReplicaOptimizer._kept, "inner", "_own")

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
        self.inner = _checked(optimizer)
        self._own: dict[Tensor, dict[str, Any]] = {}  # the sync's states, by parameter
        gate = chosen_gate(gate, wire_budget, None, sync, ByteBudget(DEFAULT_BUDGET))
        if isinstance(sync, LowRank):
            raise ValueError(f"sync={sync!r} averages Dion's low-rank factors: use CurvaDion.")
        sync = chosen_sync(QuantizedAverage() if sync is None else sync, gate)
        if gate.reads_momentum:
            raise ValueError(
                f"gate={gate!r} has a signal, of Dion's momenta: with Replicated pass "
                f"wire_budget= or gate=FixedPeriod(k)"
            )
        self._choose(replicas, gate, sync, max_local_steps, warmup_steps)
        super().__init__(self.param_groups, self.inner[0].defaults)
        self._note_record()
        self._set_gate_costs([x for g in self.param_groups for x in g["params"]], sharded=False)
        check_costs(gate, self.sync, max_local_steps)

    # --- groups and states

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all inner optimizers, in order."""
        return [group for optimizer in self.inner for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, groups: object) -> None:
        """Ignore the assignment by torch's constructor."""

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """A copy of the states of inner optimizers and the sync, by parameter."""
        return defaultdict(dict, {X: dict(state) for X, state in self._states.items()})

    @state.setter
    def state(self, state: object) -> None:
        """Ignore the assignment by torch's constructor."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer; with several, call one of theirs instead."""
        if any(param_group is group for group in self.param_groups):
            return  # torch's constructor adds groups that the inner optimizers already have
        if len(self.inner) > 1:
            raise ValueError(
                f"param_group={param_group!r} could be any optimizer's: call "
                f"optimizer.inner[i].add_param_group."
            )
        self.inner[0].add_param_group(param_group)
        self._note_record()
        self._verified = False

    def _note_record(self) -> None:  # checkpoint tools expect the key to exist
        for group in self.param_groups:
            group.setdefault(PROGRESS, self._record())

    @property
    def _compared_groups(self) -> Sequence[dict[str, Any]]:
        # Optimizers such as Prodigy adapt other keys to what their replica sees.
        return [{key: group.get(key) for key in COMPARED} for group in self.param_groups]

    @property
    def _groups(self) -> Sequence[dict[str, Any]]:
        # All other keys belong to inner optimizers.
        return [
            {key: group[key] for key in ("params", "param_names") if key in group}
            | {"algorithm": "inner"}
            for group in self.param_groups
        ]

    @property
    def _states(self) -> States:
        return cast(States, self._merged)

    def _forget(self) -> None:
        super()._forget()
        self._merged = _Merged(self.inner, self._own)

    @property
    def _state_keys(self) -> tuple[StateKey, ...]:
        tensors = {
            key
            for state in self._inner_states
            for key, value in state.items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        return (
            *self.sync.state_keys,
            *(StateKey(key, StateOwner.REPLICA) for key in sorted(tensors)),
        )

    @property
    def _inner_states(self) -> list[dict[str, Any]]:
        return [state for optimizer in self.inner for state in optimizer.state.values()]

    @property
    def _own_keys(self) -> set[str]:
        return {key.name for key in self.sync.state_keys}

    def _create_state(self, p: Parameter) -> None:
        self._own[p.X] = {}

    def _put_state(self, p: Parameter, key: str, value: Any) -> None:
        if key in self._own_keys:
            p.state[key] = value
            return
        for optimizer in self.inner:
            if any(p.X is X for group in optimizer.param_groups for X in group["params"]):
                optimizer.state[p.X][key] = value

    def _check_plan(self, plan: Plan) -> None:
        super()._check_plan(plan)
        several = [type(o).__name__ for o in self.inner if not _works_by_element(o)]
        group = self.replicas.process_group
        for p in plan.parameters:
            if group is not None and several and spans_replicas(p.X, group):
                raise ValueError(
                    f"optimizer={several[0]} would mix replicas, as the mesh of {p.name} "
                    f"spans them: call fully_shard(model, mesh=mesh['shard'])."
                )

    # --- a step

    def _runs_ahead(self, plan: Plan, *, opens: bool) -> bool:
        return False  # a flag on the device cannot cancel an inner optimizer's writes

    def _inner_step(self, *agreed: Any, **more: Any) -> Step:
        if self.progress.steps == 1:
            keys = {key for state in self._inner_states for key in state}
            if taken := sorted(keys & self._own_keys):
                raise ValueError(
                    f"optimizer={type(self.inner[0]).__name__} has states {taken}, the names "
                    f"of sync={self.sync!r}: Replicated cannot wrap it."
                )
        more |= {"directed": False, "inner": self.inner}
        return WrappedStep(*agreed, **more)

    def _average_everything(self, plan: Plan) -> None:
        held = [(p.name, sorted(p.state)) for p in plan.parameters]
        if not all_ranks_equal(held, self.replicas.process_group, plan.device):
            raise RuntimeError(
                "Replicas hold states of different parameters: use the same on every replica "
                "before synchronize(exact=True)."
            )
        super()._average_everything(plan)

    def eval(self) -> None:
        """Synchronise drifted replicas, then call the inner optimizers' ``eval``."""
        super().eval()
        for optimizer in self.inner:
            getattr(optimizer, "eval", lambda: None)()

    def train(self) -> None:
        for optimizer in self.inner:
            getattr(optimizer, "train", lambda: None)()

    def _take_no_step(self) -> None:
        for optimizer in self.inner:
            optimizer.step()

    # --- checkpoints

    def _load(self, saved: dict[str, Any], held: Record) -> None:
        check_groups(self.param_groups, saved["param_groups"])
        same_sync = held.sync_class == type(self.sync).__name__
        of_sync = self._own_keys.union(held.sync_keys)
        own: dict[Tensor, dict[str, Any]] = {}
        inner: dict[int, dict[str, Any]] = {}
        for live, group in zip(self.param_groups, saved["param_groups"], strict=True):
            for X, i in zip(live["params"], group["params"], strict=True):
                state = saved["state"].get(i, {})
                if same_sync:
                    own[X] = {k: _placed(k, v, X) for k, v in state.items() if k in of_sync}
                inner[i] = {k: v for k, v in state.items() if k not in of_sync}
        check_sync(saved, held, self.sync, self.replicas.replica)
        groups = iter(saved["param_groups"])
        for optimizer in self.inner:
            mine = [next(groups) for _ in optimizer.param_groups]
            states = {i: inner[i] for group in mine for i in group["params"] if inner[i]}
            if optimizer is self.inner[0]:  # states that belong to no parameter
                states |= {k: v for k, v in saved["state"].items() if k not in inner}
            optimizer.load_state_dict({"state": states, "param_groups": mine})
        self._own = own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)  # hooks may change it
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        super().load_state_dict(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        held = super().__getstate__()
        return {key: held[key] for key in held if key not in ("state", "param_groups")}

    def __repr__(self) -> str:
        names = ", ".join(type(optimizer).__name__ for optimizer in self.inner)
        return super().__repr__().replace("Replicated (", f"Replicated {names} (", 1)


@dataclass(frozen=True)
class WrappedStep(Step):
    """A step of other optimizers: all parameters at once, without directions."""

    inner: Sequence[Optimizer] = ()

    def batches(
        self, *parts: Plan, gradients: Mapping[int, Tensor] | None = None, **how: object
    ) -> Iterator[Batch]:
        if not self.rests:
            for p in self.plan.parameters:
                if gradients and id(p) in gradients:
                    if p.X.grad is None:
                        p.X.grad = torch.zeros_like(p.X)
                    if local(p.X.grad).data_ptr() != gradients[id(p)].data_ptr():
                        local(p.X.grad).copy_(gradients[id(p)])
            self._step_inner()
        for part in parts or (self.plan,):
            for chosen in part.batches:
                yield Batch(part, chosen, None)

    def _step_inner(self) -> None:
        groups = [group for optimizer in self.inner for group in optimizer.param_groups]
        moving = {id(p.X) for p in self.plan.parameters}
        resting = [X for g in groups for X in g["params"] if id(X) not in moving]
        hidden = [(X, X.grad) for X in resting]
        for X in resting:  # may hold gradients from before they were frozen
            X.grad = None
        for optimizer in self.inner:
            optimizer.step()
        for X, gradient in hidden:
            X.grad = gradient


def _works_by_element(optimizer: Optimizer) -> bool:
    of_torch = type(optimizer).__module__.startswith("torch.optim.")
    return of_torch and type(optimizer).__name__ not in ("Muon", "Adafactor", "LBFGS")


class _Merged(Mapping[Tensor, MutableMapping[str, Any]]):
    """States of inner optimizers and the sync, by parameter; new keys go to the sync's."""

    def __init__(self, inner: Sequence[Optimizer], own: dict[Tensor, dict[str, Any]]) -> None:
        self._inner = inner
        self._own = own

    def __getitem__(self, X: Tensor) -> MutableMapping[str, Any]:
        # Inner states may be defaultdicts, where a look-up would create an entry.
        found = [o.state[X] for o in self._inner if X in o.state]
        if X not in self._own and not found:
            raise KeyError(X)
        return ChainMap(self._own.setdefault(X, {}), *found)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(dict.fromkeys(chain(self._own, *(o.state for o in self._inner))))

    def __len__(self) -> int:
        return len(list(self))


def _checked(optimizer: Any) -> tuple[Optimizer, ...]:
    given = tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)
    if not given:
        raise ValueError(f"optimizer={optimizer!r} must hold at least one optimizer")
    if len(set(map(id, given))) < len(given):
        raise ValueError(f"optimizer={optimizer!r} contains the same optimizer twice")
    for one in given:
        if not isinstance(one, Optimizer) or isinstance(one, ReplicaOptimizer):
            raise TypeError(
                f"optimizer={type(one).__name__} must be a torch.optim.Optimizer or a "
                f"sequence of them: CurvaDion and Dion synchronise replicas themselves."
            )
    return given


def _placed(key: str, value: Any, X: Tensor) -> Any:
    """Move a loaded state of the sync to X's device."""
    if not isinstance(value, Tensor):
        return value
    same = value.shape == X.shape and placements_of(value) == placements_of(X)
    if not same:
        raise ValueError(
            f"state_dict holds a {key!r} of shape {tuple(value.shape)} and placements "
            f"{placements_of(value)}: load another layout by torch.distributed.checkpoint."
        )
    return value.detach().clone().to(X.device)
