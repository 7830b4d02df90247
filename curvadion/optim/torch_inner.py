"""The inner optimizer of Replicated: one or several of torch's, or of anybody's."""

from __future__ import annotations

from collections import ChainMap, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from curvadion.comm.groups import Group
from curvadion.layout.dtensor import local
from curvadion.layout.matrix import Options
from curvadion.layout.placements import spans_replicas
from curvadion.optim import group_keys
from curvadion.optim.checkpoint import (
    Record,
    check_complete,
    check_groups,
    check_state,
    check_values,
    restore_dtypes,
)
from curvadion.optim.inner import load_unless_frozen, undo_of_loads
from curvadion.plan.parameter import Parameter, States, names
from curvadion.plan.plan import Plan, StepTensors
from curvadion.plan.state import StateKey, StateOwner
from curvadion.sync.base import Step, Sync
from curvadion.update.inner_step import Batch
from curvadion.update.update_hooks import UpdateHook

MISSING = object()  # in place of an option that was not saved
# By optimizer, the latest TorchInner that steps it.
_owners: WeakKeyDictionary[Optimizer, ref[TorchInner]] = WeakKeyDictionary()
COMPARED = ("lr", "weight_decay", "betas", "momentum")  # group keys equal on all replicas


class TorchInner:
    """Optimizers of torch, which step together as one.

    The sync's state of a parameter is not among theirs, because an optimizer may iterate over
    its own. ``states`` has both, and ``state`` a copy of both for checkpoints.

    Args:
        optimizers: with different parameters.
        sync: of the :class:`ReplicaOptimizer` that has this one.

    Attributes:
        optimizers: the same, as a tuple.
        states: live, by parameter.
        stepping: whether it steps them now.
    """

    directed = False
    runs_ahead = False  # a flag on the device cannot cancel these optimizers' writes

    def __init__(self, optimizers: Sequence[Optimizer], sync: Sync) -> None:
        self.optimizers = tuple(optimizers)
        self.defaults = self.optimizers[0].defaults
        self._sync_keys = {key.name for key in sync.state_keys}
        self._checked_keys = False
        self.update_hooks: OrderedDict[int, UpdateHook] = OrderedDict()
        self._hold({})
        self._own()

    def _own(self) -> None:
        """Let nobody else step the optimizers."""
        self.stepping = False
        for optimizer in self.optimizers:
            if optimizer not in _owners:
                optimizer.register_step_pre_hook(_refuse_steps_of_others)
            _owners[optimizer] = ref(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._own()  # copies of optimizers have no hooks

    def _hold(self, sync_states: dict[Tensor, dict[str, Any]]) -> None:
        """Keep these states of the sync, by parameter."""
        self._sync_states = sync_states
        self.states = cast(States, _MergedStates(self.optimizers, sync_states))

    # --- groups and states

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, in order; of a single one its own list."""
        if len(self.optimizers) == 1:
            return self.optimizers[0].param_groups
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        groups_left = list(groups)
        for optimizer in self.optimizers[:-1]:
            count = len(optimizer.param_groups)
            optimizer.param_groups = groups_left[:count]
            groups_left = groups_left[count:]
        self.optimizers[-1].param_groups = groups_left

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """A copy of the states of the optimizers and the sync, by parameter."""
        copies: defaultdict[Tensor, Any] = defaultdict(dict)
        for X, state in self.states.items():
            copies[X] = dict(state)
        return copies

    @state.setter
    def state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        keys = self._sync_keys
        sync_states = {}
        for optimizer in self.optimizers:
            its_state: defaultdict[Tensor, Any] = defaultdict(dict)
            for group in optimizer.param_groups:
                for X in group["params"]:
                    if X not in state:
                        continue
                    sync_states[X] = {k: v for k, v in state[X].items() if k in keys}
                    its_state[X] = {k: v for k, v in state[X].items() if k not in keys}
            optimizer.state = its_state
        self._hold(sync_states)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if len(self.optimizers) > 1:
            raise ValueError(
                f"param_group with the keys {sorted(param_group)} could be any of {self.names}: "
                f"call optimizer.inner.optimizers[i].add_param_group."
            )
        self.optimizers[0].add_param_group(param_group)

    @property
    def state_count(self) -> int:
        return len(self._sync_states) + sum(len(o.state) for o in self.optimizers)

    @property
    def planned_groups(self) -> Sequence[dict[str, Any]]:
        # All other keys belong to these optimizers.
        groups = []
        for group in self.param_groups:
            planned: dict[str, Any] = {"algorithm": "inner", "params": group["params"]}
            if "param_names" in group:
                planned["param_names"] = group["param_names"]
            groups.append(planned)
        return groups

    @property
    def compared_groups(self) -> Sequence[Options]:
        # Optimizers such as Prodigy adapt other keys to what their replica sees.
        return [{key: group.get(key) for key in COMPARED} for group in self.param_groups]

    @property
    def choices(self) -> Mapping[str, object]:
        return {"optimizer": self.names}

    @property
    def names(self) -> Sequence[str]:
        return [type(optimizer).__name__ for optimizer in self.optimizers]

    def state_keys(self, sync: Sync) -> tuple[StateKey, ...]:
        tensors = {
            key
            for state in self._inner_states()
            for key, value in state.items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        return (
            *sync.state_keys,
            *(StateKey(key, StateOwner.REPLICA) for key in sorted(tensors)),
        )

    def _inner_states(self) -> Iterable[dict[str, Any]]:
        return chain.from_iterable(optimizer.state.values() for optimizer in self.optimizers)

    def check_groups(self) -> None:
        """Do nothing: the optimizers themselves check their groups."""

    def check_plan(self, plan: Plan, replicas: Group | None, *, begun: bool) -> None:
        mixing = [type(o).__name__ for o in self.optimizers if not works_by_element(o)]
        if replicas is None or not mixing:
            return
        for p in plan.parameters:
            if spans_replicas(p.X, replicas):
                raise ValueError(
                    f"optimizer={mixing[0]} would mix replicas, as the mesh of {p.name} "
                    f"spans them: call fully_shard(model, mesh=mesh['shard']), or use an "
                    f"elementwise optimizer such as AdamW."
                )

    def create_state(self, p: Parameter) -> None:
        self._sync_states[p.X] = {}

    def put_state(self, p: Parameter, key: str, value: Any) -> None:
        if key in self._sync_keys:
            p.state[key] = value
            return
        for optimizer in self.optimizers:
            if any(p.X is X for group in optimizer.param_groups for X in group["params"]):
                optimizer.state[p.X][key] = value

    # --- a step

    def step_of(self, plan: Plan, tensors: StepTensors, step_index: int, **fields: Any) -> Step:
        # Their first step has created their states.
        if step_index and not self._checked_keys:
            self._check_keys()
            self._checked_keys = True
        return TorchStep(plan, tensors, step_index, directed=False, inner=self, **fields)

    def _check_keys(self) -> None:
        """Raise ValueError if a state has the name of one of the sync's."""
        for optimizer in self.optimizers:
            keys = {key for state in optimizer.state.values() for key in state}
            shared = sorted(keys & self._sync_keys)
            if shared:
                raise ValueError(
                    f"optimizer={type(optimizer).__name__} has states {shared}, the names of the "
                    f"sync's: Replicated cannot wrap it."
                )

    def step_optimizers(self) -> None:
        """Step all optimizers, which nobody else may do."""
        self.stepping = True
        try:
            for optimizer in self.optimizers:
                optimizer.step()
        finally:
            self.stepping = False

    def register_update_hook(self, hook: UpdateHook) -> RemovableHandle:
        raise TypeError(
            f"hook={hook!r} would not be called, because {', '.join(self.names)} moves weights "
            f"itself: use Dion or CurvaDion, or that optimizer's register_step_post_hook()."
        )

    def take_no_step(self) -> None:
        self.step_optimizers()

    @property
    def evaluates_states(self) -> bool:
        # Schedule-free optimizers compute the weights to evaluate from a state of their own.
        return any(callable(getattr(optimizer, "eval", None)) for optimizer in self.optimizers)

    def eval(self) -> None:
        for optimizer in self.optimizers:
            getattr(optimizer, "eval", lambda: None)()

    def train(self) -> None:
        for optimizer in self.optimizers:
            getattr(optimizer, "train", lambda: None)()

    # --- checkpoints

    def undo_of_load(self) -> Callable[[], None]:
        undo_optimizers = undo_of_loads(self.optimizers)
        sync_states = self._sync_states

        def undo() -> None:
            undo_optimizers()
            self._hold(sync_states)

        return undo

    def load(self, saved: Mapping[str, Any], record: Record, sync: Sync) -> None:
        check_groups(self.param_groups, saved["param_groups"])
        if sync.state_keys:
            check_complete(self.param_groups, saved, record.progress.steps)
        same_sync = record.sync_class == type(sync).__name__
        keys_of_syncs = self._sync_keys.union(record.sync_keys)
        sync_states: dict[Tensor, dict[str, Any]] = {}
        inner_states: dict[int, dict[str, Any]] = {}
        pairs = zip(self.param_groups, saved["param_groups"], strict=True)
        for g, (live, group) in enumerate(pairs):
            for X, i, name in zip(live["params"], group["params"], names(live, g), strict=True):
                state = saved["state"].get(i, {})
                inner_states[i] = {k: v for k, v in state.items() if k not in keys_of_syncs}
                of_sync = {k: v for k, v in state.items() if k in keys_of_syncs}
                # No empty entry: it would keep alive a parameter that a framework replaces later.
                if same_sync and of_sync:
                    check_state(name, X, {"algorithm": "inner"}, of_sync, sync.state_keys)
                    check_values(name, of_sync)
                    sync_states[X] = {k: _placed(v, X) for k, v in of_sync.items()}
        groups = iter(saved["param_groups"])
        for optimizer in self.optimizers:
            its_groups = [next(groups) for _ in optimizer.param_groups]
            numbers = [i for group in its_groups for i in group["params"]]
            its_states: dict[Any, Any] = {i: inner_states[i] for i in numbers if inner_states[i]}
            if optimizer is self.optimizers[0]:  # states that belong to no parameter
                its_states |= _states_of_optimizer(saved["state"], inner_states)
            _check_states(optimizer, its_groups, its_states)
            its_saved = {"state": its_states, "param_groups": its_groups}
            load_unless_frozen(optimizer, its_saved)
            # Scalars keep their dtype, such as NAdam's mu_product.
            restore_dtypes(
                optimizer.param_groups,
                optimizer.state,
                its_saved,
                lambda _, __, value: value.dim() == 0,
            )
        self._hold(sync_states)


def _states_of_optimizer(state: Mapping[Any, Any], parameters: Mapping[int, Any]) -> dict[Any, Any]:
    """The entries of a saved state that are not a parameter's; others would fail at a step.

    Args:
        state: as saved, by the number of a parameter or by a name.
        parameters: by number, those of the saved groups.
    """
    states = {}
    for key, value in state.items():
        if key in parameters:
            continue
        if isinstance(key, int):
            raise ValueError(
                f"state_dict has a state of the parameter {key}, but its groups have none of this "
                f"number: load the state_dict() of an optimizer as it was saved."
            )
        states[key] = value
    return states


@dataclass(frozen=True)
class TorchStep(Step):
    """A step of torch's optimizers: all parameters at once, without directions."""

    inner: TorchInner = field(kw_only=True)

    def batches(
        self, *parts: Plan, gradients: Mapping[int, Tensor] | None = None, **how: object
    ) -> Iterator[Batch]:
        if not self.rests:
            if gradients:
                self._put_gradients(gradients)
            self._step_all()
        for part in parts or (self.plan,):
            for batch in part.batches:
                yield Batch(part, batch, None)

    def _put_gradients(self, gradients: Mapping[int, Tensor]) -> None:
        """Put these local gradients into ``.grad``, by the id of the :class:`Parameter`."""
        for p in self.plan.parameters:
            gradient = gradients.get(id(p))
            if gradient is None:
                continue
            if p.X.grad is None:
                p.X.grad = torch.zeros_like(p.X)
            present = local(p.X.grad)
            if present.data_ptr() != gradient.data_ptr():
                present.copy_(gradient)

    def _step_all(self) -> None:
        """Step all optimizers, but not the parameters that are not in the plan."""
        groups = self.inner.param_groups
        resting: list[Tensor] = []
        if sum(len(group["params"]) for group in groups) > len(self.plan.parameters):
            moving = {id(p.X) for p in self.plan.parameters}
            resting = [X for group in groups for X in group["params"] if id(X) not in moving]
        gradients = [X.grad for X in resting]
        for X in resting:  # may hold gradients from before they were frozen
            X.grad = None
        self.inner.step_optimizers()
        for X, gradient in zip(resting, gradients, strict=True):
            X.grad = gradient


def owner_of(optimizer: Optimizer) -> TorchInner | None:
    """The TorchInner that steps an optimizer; None if users do."""
    owner = _owners.get(optimizer)
    return None if owner is None else owner()


def _refuse_steps_of_others(optimizer: Optimizer, *_: Any) -> None:
    """Raise RuntimeError if somebody else steps an optimizer: a hook before its steps."""
    owner = owner_of(optimizer)
    if owner is not None and not owner.stepping:
        name = type(optimizer).__name__
        raise RuntimeError(
            f"{name}.step() was called although {name} is inside Replicated, which would not know "
            f"that replicas drift: call optimizer.step() of Replicated, or scaler.step(optimizer) "
            f"with it."
        )


def works_by_element(optimizer: Optimizer) -> bool:
    """Whether it is known to step each element of a parameter alone."""
    mixing = ("Muon", "Adafactor", "LBFGS")
    return _is_of_torch(optimizer) and type(optimizer).__name__ not in mixing


def _is_of_torch(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


class _MergedStates(Mapping[Tensor, MutableMapping[str, Any]]):
    """States of optimizers and the sync, by parameter; new keys go to the sync's.

    Args:
        optimizers: whose states come second.
        sync_states: by parameter, the sync's states.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], sync_states: dict[Tensor, dict[str, Any]]
    ) -> None:
        self._optimizers = optimizers
        self._sync_states = sync_states

    def __getitem__(self, X: Tensor) -> MutableMapping[str, Any]:
        # Inner states may be defaultdicts, where a look-up would create an entry.
        states = [o.state[X] for o in self._optimizers if X in o.state]
        if X not in self._sync_states and not states:
            raise KeyError(X)
        return ChainMap(self._sync_states.setdefault(X, {}), *states)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(dict.fromkeys(chain(self._sync_states, *(o.state for o in self._optimizers))))

    def __len__(self) -> int:
        return len(list(self))


def _check_states(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], states: Mapping[Any, Any]
) -> None:
    """Raise ValueError if saved groups and states cannot be those of an optimizer.

    What an optimizer keeps is its own affair. But parameters of one group with equally many
    dimensions have the same entries, and what torch's optimizers keep are tensors of the
    parameter's shape and counters.

    Args:
        optimizer: that will load them.
        groups: saved, with numbers of parameters.
        states: saved, by number.
    """
    of_torch = _is_of_torch(optimizer)
    for g, (live, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        for key, value in optimizer.defaults.items():
            _check_option(f"param_groups[{g}][{key!r}]", value, saved.get(key, MISSING))
        if of_torch and "betas" in optimizer.defaults:
            group_keys.betas("betas", saved["betas"])
        entries: dict[int, set[str]] = {}  # by number of dimensions
        for X, i, name in zip(live["params"], saved["params"], names(live, g), strict=True):
            state = states.get(i)
            if not state:
                continue
            check_values(name, state)
            present = optimizer.state.get(X) or {}
            expected = set(present) or entries.setdefault(X.dim(), set(state))
            if set(state) != expected:
                raise ValueError(
                    f"state_dict holds {sorted(map(str, state))} of {name}, instead of "
                    f"{sorted(map(str, expected))}: it is incomplete, or another optimizer's."
                )
            for key, value in state.items():
                if not _may_be(value, key, X, present.get(key), of_torch=of_torch):
                    raise ValueError(
                        f"state_dict holds a {key!r} of {name}, of shape {tuple(X.shape)}, that "
                        f"is {_described(value)}: it is another model's or optimizer's."
                    )


def _check_option(name: str, default: Any, saved: Any) -> None:
    """Raise ValueError if a saved option is of another kind than its default.

    Args:
        name: of the option.
        default: the optimizer's.
        saved: what was saved; :data:`MISSING` if nothing was.
    """
    valid = saved is not MISSING
    if valid and isinstance(default, (tuple, list)):
        same_length = isinstance(saved, (tuple, list)) and len(saved) == len(default)
        valid = same_length and all(map(_is_option, default, saved))
    elif valid:
        valid = _is_option(default, saved)
    if not valid:
        raise ValueError(
            f"state_dict holds {name}={saved!r}, but this optimizer's default is {default!r}: "
            f"set it to a valid value before loading."
        )


def _is_option(default: Any, saved: Any) -> bool:
    """Whether a number is one that trains; of anything else its optimizer knows."""
    if isinstance(default, bool) or not isinstance(default, (int, float)):
        return True
    if isinstance(saved, Tensor):
        return saved.numel() == 1
    return isinstance(saved, (int, float)) and abs(saved) <= group_keys.LARGEST_OPTION


def _may_be(value: Any, key: str, X: Tensor, present: Any, *, of_torch: bool) -> bool:
    """Whether an entry of a saved state can be one of a parameter's.

    Args:
        value: of the entry.
        key: of the entry.
        X: the parameter.
        present: the entry that the optimizer has now; None if it has none.
        of_torch: whether the optimizer is one of torch's.
    """
    if isinstance(present, Tensor):
        return isinstance(value, Tensor) and value.shape in (present.shape, X.shape)
    if not of_torch:
        return True
    if not isinstance(value, Tensor):
        return key == "step" and isinstance(value, (int, float))
    # Adafactor keeps one number for each row or column.
    sizes = zip(value.shape, X.shape, strict=False)
    broadcasts = value.dim() == X.dim() and all(size in (1, of_X) for size, of_X in sizes)
    return value.dim() == 0 or value.shape == X.shape or broadcasts


def _described(value: Any) -> str:
    return f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _placed(value: Any, X: Tensor) -> Any:
    """A copy of a loaded state of the sync on X's device."""
    return value.detach().clone().to(X.device) if isinstance(value, Tensor) else value
