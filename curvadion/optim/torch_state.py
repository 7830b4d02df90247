"""States of other optimizers: a run goes on here, or goes back to torch's.

With G_k the gradient of k steps ago, momenta are kept in two forms. torch.optim.Muon,
DeepSpeed's Muon and AdamW keep the mean (1 - d) sum_k d^k G_k; this package and microsoft/dion
keep the sum M = sum_k d^k G_k. So M is their mean over 1 - d, where d is their own decay.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvadion import checks
from curvadion.layout.dtensor import is_dtensor, placements_of, sharded_like
from curvadion.layout.flat_shard import flat_shard
from curvadion.ops.tensors import widened
from curvadion.optim.checkpoint import Progress, check_form, check_values, record
from curvadion.optim.dion_inner import DionInner
from curvadion.optim.replica_optimizer import ReplicaOptimizer
from curvadion.plan.coded_states import CODED
from curvadion.plan.parameter import Parameter, names
from curvadion.plan.state import MOMENTUM, PROGRESS
from curvadion.update.newton_schulz import MUON
from curvadion.update.normuon import ROW_SECOND_MOMENT
from curvadion.update.registry import create_state

NAME_BOTH = (
    "Match them by name: build torch's optimizers from named parameters "
    "(model.named_parameters()), load the old checkpoint into them, and pass their "
    "state_dict()s; param_groups(model) has names."
)
OTHERS = "torch.optim.Muon, AdamW or Adam, DeepSpeed's Muon, or an optimizer of microsoft/dion"


class LoadedState(NamedTuple):
    """What :func:`load_torch_state` has made of a state.

    Args:
        kept: by parameter, the saved entries that were kept, such as "momentum_buffer".
        dropped: by parameter, the saved entries that have no place here; only of parameters that
            have some.
        fresh: the parameters that start without a state.
    """

    kept: dict[str, list[str]]
    dropped: dict[str, list[str]]
    fresh: list[str]


@dataclass(frozen=True)
class _Saved:
    """A parameter's state in another optimizer.

    Args:
        name: of the parameter; None if it was saved without names.
        place: the numbers of its state_dict and its group.
        group: its group.
        state: its state.
        steps: that AdamW has counted; None if it was not saved.
    """

    name: str | None
    place: tuple[int, int]
    group: Mapping[str, Any]
    state: Mapping[str, Any]
    steps: float | None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The parameter's shape; None without a state, which alone tells it."""
        for key in ("momentum_buffer", "exp_avg", "momentum"):
            if isinstance(self.state.get(key), Tensor):
                return tuple(self.state[key].shape)
        return None


class _Moments(NamedTuple):
    """How another optimizer keeps moments of gradients.

    Args:
        first: its entry with the first moment.
        share: of the newest gradient in that: 1 - d in a mean, 1 in a sum.
        second: its entry with the mean of squares; None if it keeps none.
    """

    first: str
    share: float
    second: str | None = None


class _Live(NamedTuple):
    """A parameter of the optimizer that loads."""

    name: str
    named: bool  # whether the user has given the name
    X: Tensor
    g: int  # the number of its group
    group: dict[str, Any]


def load_torch_state(
    optimizer: ReplicaOptimizer, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]
) -> LoadedState:
    """Go on from the state of another optimizer, in a Dion, CurvaDion or Muon without steps.

    ==========================================  ============================================
    saved by                                    what is kept
    ==========================================  ============================================
    torch.optim.Muon, DeepSpeed's Muon          momenta: momentum_buffer / (1 - momentum)
    torch.optim.AdamW and Adam, for AdamW here  everything, the same bits
    the same, for matrices here                 exp_avg / (1 - beta1), which is approximate
    microsoft/dion                              momenta, moments, steps; Q and NorMuon's
                                                variances if they have the same form here
    ==========================================  ============================================

    AdamW's first moment has forgotten gradients that a momentum of 0.95 would still hold. The
    difference fades within 1 / (1 - momentum) steps, 20 by default. States are rounded if
    ``optimizer`` keeps them in 8 bits. Settings, such as learning rates, stay those of
    ``optimizer``. The run's ``progress.steps`` is AdamW's step, or 1, so a
    warm-up of the gate may be over.

    Parameters are matched by name if all have names on both sides. Otherwise all shapes must
    come in the same order, with those of equal shapes in the same groups; or parameters of a
    shape must be as many on both sides, and in one group on each, and are matched in order.

    States of sharded parameters are DTensors of the same placements, as FSDP2's optimizers
    have them, or whole tensors, as of a run on one rank, of which each rank takes its shard.
    Flat shards, of FSDP1 and ZeRO, are not supported.

    Args:
        optimizer: not yet stepped, with its final parameters: after ``fully_shard``, and after
            ``prepare`` of frameworks. Call this on every rank.
        state_dict: of an optimizer as above, or a sequence of them with different parameters,
            such as ``[muon.state_dict(), adamw.state_dict()]``. Names in place of numbers, as
            of ``torch.distributed.checkpoint.state_dict``, are fine. Its tensors are copied.

    Returns:
        What was kept, what has no place here, and which parameters start without a state.

    Raises:
        TypeError: for another optimizer, such as Replicated: load its inner optimizers first.
        ValueError: after a step, for states of unknown optimizers, for parameters that cannot
            be matched, and for shapes, dtypes and values that do not fit. Nothing has changed
            then.
    """
    inner = _inner(optimizer)
    if optimizer.progress.steps:
        raise ValueError(
            f"optimizer={type(optimizer).__name__} has taken {optimizer.progress.steps} steps: "
            f"load the state into a new one, before its first step."
        )
    saved = _all_saved(state_dict)
    live = _all_live(inner)
    saved_of = _by_name(live, saved) or _by_shape(live, saved)
    loaded = LoadedState({}, {}, [])
    states: dict[int, dict[str, Any]] = {}
    steps = 1
    for i, p in enumerate(live):
        found = saved_of.get(i)
        if found is None or not found.state:
            loaded.fresh.append(p.name)
            continue
        state, kept = _converted(p, found)
        if dropped := sorted(found.state.keys() - kept):
            loaded.dropped[p.name] = dropped
        if not kept:
            loaded.fresh.append(p.name)
            continue
        loaded.kept[p.name] = sorted(kept & found.state.keys())  # a step may be the group's
        states[i] = state
        steps = max(steps, int(found.steps or 0))
    if not states:
        raise ValueError(
            f"state_dict has no entry that this optimizer could keep: it must be of {OTHERS}, "
            f"after a step. Its groups have the keys {sorted(saved[0].group)}."
        )
    progress = record(Progress(steps=steps), optimizer.gate, optimizer.sync, None)
    optimizer.load_state_dict({"state": states, "param_groups": _packed(inner, progress)})
    return loaded


def _inner(optimizer: Any) -> DionInner:
    """The inner optimizer of a Dion, CurvaDion or Muon; TypeError for others."""
    if isinstance(optimizer, ReplicaOptimizer) and isinstance(optimizer.inner, DionInner):
        return optimizer.inner
    raise TypeError(
        f"optimizer={type(optimizer).__name__} must be a curvadion.Dion, CurvaDion or Muon: "
        f"unwrap it (accelerate's has it as .optimizer), and load torch's optimizers before "
        f"Replicated takes them."
    )


def _all_live(inner: DionInner) -> list[_Live]:
    """The optimizer's parameters, in the order of its state_dict."""
    live = []
    for g, group in enumerate(inner.param_groups):
        X_names = names(group, g)
        # ZeRO puts partitions, or nothing between steps, in place of the parameters.
        is_partitioned = len(X_names) != len(group["params"])
        if is_partitioned or any(flat_shard(X) is not None for X in group["params"]):
            raise ValueError(
                f"{X_names[0]} is a flat shard, of FSDP1 or ZeRO, whose states cannot be loaded "
                f"from another optimizer: use FSDP2, DDP or ZeRO stage 0."
            )
        for name, X in zip(X_names, group["params"], strict=True):
            live.append(_Live(name, "param_names" in group, X, g, group))
    return live


def _packed(inner: DionInner, progress: str) -> list[dict[str, Any]]:
    """The groups as they are, in torch's packed form; progress: the run's record."""
    groups = []
    start = 0
    for group in inner.param_groups:
        stop = start + len(group["params"])
        groups.append({**group, "params": list(range(start, stop)), PROGRESS: progress})
        start = stop
    return groups


# --- which saved state is whose


def _all_saved(state_dict: Any) -> list[_Saved]:
    """The states of all parameters, in the order in which they were saved."""
    given = list(state_dict) if isinstance(state_dict, (list, tuple)) else [state_dict]
    saved = []
    for d, one in enumerate(given):
        if not isinstance(one, Mapping):
            raise ValueError(
                f"state_dict={type(one).__name__} must be a state_dict of {OTHERS}, or a "
                f"sequence of them"
            )
        if one.get("param_groups") == []:
            continue  # as torch_state gives for parameters of one kind only
        check_form(one)
        for g, group in enumerate(one["param_groups"]):
            if PROGRESS in group:
                raise ValueError(
                    "state_dict was saved by an optimizer of curvadion: call "
                    "optimizer.load_state_dict(state_dict)."
                )
            keys = group["params"]
            saved_names = group.get("param_names")
            if saved_names is None:
                saved_names = [key if isinstance(key, str) else None for key in keys]
            if len(saved_names) != len(keys):
                raise ValueError(
                    f"state_dict has {len(saved_names)} param_names for {len(keys)} parameters "
                    f"in param group {g}: it is damaged."
                )
            states = [one["state"].get(key, {}) for key in keys]
            for name, state in zip(saved_names, states, strict=True):
                steps = _steps(group, state, states)
                saved.append(_Saved(name, (d, g), group, state, steps))
    if not saved:
        raise ValueError(f"state_dict={state_dict!r} has no parameters: pass that of {OTHERS}.")
    return saved


def _by_name(live: Sequence[_Live], saved: Sequence[_Saved]) -> dict[int, _Saved]:
    """The saved state of each parameter, by its number; {} if some have no names."""
    if not all(p.named for p in live) or any(s.name is None for s in saved):
        return {}
    by_name: dict[str | None, _Saved] = {}
    for s in saved:
        if s.name in by_name:
            raise ValueError(f"state_dict has the parameter {s.name!r} twice: leave one out.")
        by_name[s.name] = s
    unknown = by_name.keys() - {p.name for p in live}
    lost = sorted(str(name) for name in unknown if by_name[name].state)
    if lost:
        raise ValueError(
            f"state_dict has a state of {lost[0]!r} ({len(lost)} in all), which this optimizer "
            f"does not train; its parameters are {[p.name for p in live][:4]} and so on. "
            f"Rename the state's param_names, or leave out what you do not train."
        )
    return {i: by_name[p.name] for i, p in enumerate(live) if p.name in by_name}


def _by_shape(live: Sequence[_Live], saved: Sequence[_Saved]) -> dict[int, _Saved]:
    """The saved state of each parameter, by its number; ValueError if it is not clear which."""
    shapes = [tuple(p.X.shape) for p in live]
    if len(live) == len(saved):
        pairs = zip(shapes, saved, strict=True)
        if all(s.shape in (None, shape) for shape, s in pairs) and _groups_agree(live, saved):
            return dict(enumerate(saved))
    saved_of: dict[int, _Saved] = {}
    for shape in dict.fromkeys(s.shape for s in saved):
        if shape is None:
            continue  # never trained
        theirs = [s for s in saved if s.shape == shape]
        ours = [i for i, its in enumerate(shapes) if its == shape]
        if len(theirs) != len(ours):
            raise ValueError(
                f"state_dict has {len(theirs)} parameters of shape {shape}, this optimizer "
                f"{len(ours)}. {NAME_BOTH}"
            )
        places = {s.place for s in theirs}
        groups = {live[i].g for i in ours}
        if len(ours) > 1 and max(len(places), len(groups)) > 1:
            raise ValueError(
                f"state_dict has {len(theirs)} parameters of shape {shape}, which are in "
                f"{len(places)} of its groups and in {len(groups)} of this optimizer's, so that "
                f"their order does not say which is which. {NAME_BOTH}"
            )
        saved_of.update(zip(ours, theirs, strict=True))
    return saved_of


def _groups_agree(live: Sequence[_Live], saved: Sequence[_Saved]) -> bool:
    """Whether parameters of one shape are divided into the same groups on both sides.

    Otherwise one side may have been sorted by kind, and shapes would not show it.
    """
    groups_of: dict[tuple[int, ...], set[tuple[tuple[int, int], int]]] = {}
    for p, s in zip(live, saved, strict=True):
        groups_of.setdefault(tuple(p.X.shape), set()).add((s.place, p.g))
    for pairs in groups_of.values():
        theirs = {place for place, _ in pairs}
        ours = {g for _, g in pairs}
        if not len(theirs) == len(ours) == len(pairs):
            return False
    return True


# --- what its entries mean


def _moments(p: _Live, saved: _Saved) -> _Moments:
    """How the moments of a parameter's gradients were saved; ValueError if nobody knows."""
    group = saved.group
    state = saved.state
    moments = None
    if "momentum_buffer" in state and ("ns_steps" in group or "use_muon" in group):
        # torch.optim.Muon, DeepSpeed's Muon: M <- mu M + (1 - mu) G
        moments = _Moments("momentum_buffer", 1 - _decay(group, "momentum"))
    elif "momentum" in state and "algorithm" in group:  # microsoft/dion
        if group["algorithm"] == "adamw":
            moments = _Moments("momentum", 1 - _decay(group, "beta1"), "variance")
        elif group["algorithm"] in ("lion", "clion"):
            moments = _Moments("momentum", 1 - _decay(group, "beta2"))
        else:
            moments = _Moments("momentum", 1.0)
    elif "exp_avg" in state and "exp_avg_sq" in state and "betas" in group:
        moments = _Moments("exp_avg", 1 - _decay(group, "betas"), "exp_avg_sq")
    if moments is None:
        raise ValueError(
            f"state_dict has the entries {sorted(state)} of {p.name}, in a group with the keys "
            f"{sorted(group)}: it must be of {OTHERS}."
        )
    checks.number(f"the newest gradient's share in {moments.first!r}", moments.share, least=1e-9)
    for key in (moments.first, moments.second):
        value = state.get(key) if key is not None else None
        if key is not None and not isinstance(value, Tensor):
            raise ValueError(f"state_dict has no tensor {key!r} of {p.name}: it is damaged.")
        if isinstance(value, Tensor) and not value.is_floating_point():
            raise ValueError(
                f"state_dict has a {key!r} of {value.dtype} for {p.name}: it is damaged."
            )
    check_values(p.name, state)
    return moments


def _decay(group: Mapping[str, Any], key: str) -> float:
    """By how much a group's moments decay; of several numbers, such as betas, the first."""
    value: Any = group.get(key)
    try:
        # torch also takes tensors.
        return float(value[0] if isinstance(value, (list, tuple)) else value)
    except (TypeError, ValueError, IndexError) as error:
        raise ValueError(
            f"state_dict has a group with {key}={value!r} instead of a number: it is damaged."
        ) from error


def _steps(group: Mapping[str, Any], state: Any, states: Sequence[Any]) -> float | None:
    """The number of steps in AdamW's bias correction; None if it was not saved.

    Args:
        group: of the parameter.
        state: of the parameter.
        states: of all parameters of the group.
    """
    # DeepSpeed's FusedAdam, whose groups have this key, counts in a group's last parameter only.
    counting = states if "bias_correction" in group else [state]
    counters = [one.get(key) for one in counting for key in ("step", "step_dev")]
    if all(counter is None for counter in counters):
        counters = [group.get("step")]
    steps = []
    for counter in counters:
        if counter is None:
            continue
        try:
            steps.append(float(counter))
        except (TypeError, ValueError, RuntimeError) as error:  # such as a tensor of several
            raise ValueError(
                f"state_dict has the step {counter!r}: it must be one number."
            ) from error
        checks.number("state_dict's step", steps[-1], most=checks.LARGEST_COUNTER)
    return max(steps, default=None)


def _converted(p: _Live, saved: _Saved) -> tuple[dict[str, Any], set[str]]:
    """A parameter's state here, and the saved entries that are in it."""
    fresh = _fresh_state(p)
    moments = _moments(p, saved)
    # By the entry here: the saved entry, and its value.
    if p.group["algorithm"] == "dion":
        entries = _of_matrices(p, saved, moments, fresh)
    else:
        entries = _of_elementwise(p, saved, moments)
    state = dict(fresh)
    for key, (_, value) in entries.items():
        placed = value.detach()
        if is_dtensor(fresh[key]) and not is_dtensor(value) and value.shape == fresh[key].shape:
            placed = sharded_like(fresh[key], placed)
        state[key] = placed.to(fresh[key].dtype, copy=True)
    return state, {name for name, _ in entries.values()}


def _of_matrices(
    p: _Live, saved: _Saved, moments: _Moments, fresh: Mapping[str, Any]
) -> dict[str, tuple[str, Tensor]]:
    """What a matrix parameter takes from a saved state.

    Args:
        p: the parameter.
        saved: its state in another optimizer.
        moments: how that keeps moments.
        fresh: the state with which p begins.

    Returns:
        By the entry here, the saved entry and its value.
    """
    M = saved.state[moments.first]
    if moments.share != 1:
        # M = sum_k d^k G_k, from the mean (1 - d) sum_k d^k G_k
        M = widened(M) / moments.share
    entries = {MOMENTUM: (moments.first, M)}
    v = saved.state.get("variance_neuron")  # (..., m, 1)
    if isinstance(v, Tensor) and _same_form(p, v.squeeze(-1), fresh.get(ROW_SECOND_MOMENT)):
        entries[ROW_SECOND_MOMENT] = ("variance_neuron", v.squeeze(-1))
    Q = saved.state.get("Q")
    if isinstance(Q, Tensor) and _same_form(p, Q, fresh.get("Q")):
        entries["Q"] = ("Q", Q)
    return entries


def _same_form(p: _Live, theirs: Tensor, ours: Tensor | None) -> bool:
    """Whether a saved state of rows or columns belongs to the same ones here.

    Args:
        p: the parameter.
        theirs: the saved state.
        ours: the fresh one; None if there is none.
    """
    is_whole = p.group["row_blocks"] == 1 and p.group["column_blocks"] == 1
    if ours is None or p.group["input_first"] or not is_whole:
        return False  # microsoft/dion knows no blocks, and stores outputs first
    # A whole state is sharded as the parameter is.
    same_shards = not is_dtensor(theirs) or placements_of(theirs) == placements_of(ours)
    return theirs.shape == ours.shape and same_shards


def _of_elementwise(p: _Live, saved: _Saved, moments: _Moments) -> dict[str, tuple[str, Tensor]]:
    """What a parameter with AdamW or Lion takes, as :func:`_of_matrices`."""
    adamw = p.group["algorithm"] == "adamw"
    known = moments.second is not None if adamw else moments.share != 1
    if not known:
        return {}  # AdamW needs both moments, and Lion a mean
    entries = {"exp_avg": (moments.first, saved.state[moments.first])}
    if adamw and moments.second is not None:
        entries["exp_avg_sq"] = (moments.second, saved.state[moments.second])
    if saved.steps is not None:
        name = "step_dev" if "step_dev" in saved.state else "step"
        entries["step"] = (name, torch.tensor(saved.steps))
    elif adamw:
        raise ValueError(f"state_dict has no 'step' of {p.name}: it is damaged.")
    return entries


def _fresh_state(p: _Live) -> dict[str, Any]:
    """The state with which a parameter begins; not in 8 bits, as loading encodes it."""
    states: dict[Tensor, Any] = {}
    group = p.group
    if group["state_dtype"] == CODED:
        group = {**group, "state_dtype": None}
    create_state(Parameter(p.X, group, states, p.name))
    fresh: dict[str, Any] = states[p.X]
    return fresh


# --- back


def torch_state(optimizer: ReplicaOptimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state for torch.optim.Muon, which takes the matrices, and AdamW, for the rest.

    Build both with the groups of ``optimizer``, in their order, because torch matches
    parameters by their order::

        muon_state, adamw_state = curvadion.torch_state(optimizer)
        groups = optimizer.param_groups
        matrices = [{"params": g["params"]} for g in groups if g["algorithm"] == "dion"]
        muon = torch.optim.Muon(matrices)
        muon.load_state_dict(muon_state)

    Momenta become momentum_buffer = (1 - momentum) M. AdamW's states keep their bits; those in 8
    bits become float32. Learning rates and other settings come along. Either state is without
    groups if there are no such parameters.

    Args:
        optimizer: a Dion, CurvaDion or Muon. If replicas have drifted, call
            ``synchronize(exact=True)`` on all ranks first; ``state_dict`` warns.

    Returns:
        The state_dicts of torch.optim.Muon and of torch.optim.AdamW.

    Raises:
        TypeError: for another optimizer.

    Warns:
        UserWarning: for settings that torch's optimizers lack, so that their steps differ.
    """
    _inner(optimizer)
    packed = optimizer.state_dict()
    muon: dict[str, Any] = {"state": {}, "param_groups": []}
    adamw: dict[str, Any] = {"state": {}, "param_groups": []}
    lacking: set[str] = set()
    for group in packed["param_groups"]:
        if group["algorithm"] == "lion":
            lacking.add("algorithm='lion' (left out)")
            continue
        matrices = group["algorithm"] == "dion"
        target = muon if matrices else adamw
        settings = _settings_of_muon(group, lacking) if matrices else _settings_of_adamw(group)
        start = sum(len(earlier["params"]) for earlier in target["param_groups"])
        numbers = list(range(start, start + len(group["params"])))
        for key in ("param_names", "initial_lr"):
            if key in group:
                settings[key] = group[key]
        target["param_groups"].append({**settings, "params": numbers})
        for number, i in zip(numbers, group["params"], strict=True):
            if i not in packed["state"]:
                continue
            state = packed["state"][i]
            if matrices:
                # (1 - mu) sum_k mu^k G_k
                M = state[MOMENTUM]
                mean = (1 - group["momentum"]) * widened(M)
                target["state"][number] = {"momentum_buffer": mean.to(M.dtype)}
            else:
                keys = ("step", "exp_avg", "exp_avg_sq")
                target["state"][number] = {key: state[key].clone() for key in keys}
    if lacking:
        warnings.warn(
            f"torch.optim has no counterpart of {', '.join(sorted(lacking))}: its steps will "
            f"differ.",
            stacklevel=checks.user_stacklevel(),
        )
    return muon, adamw


def _settings_of_muon(group: Mapping[str, Any], lacking: set[str]) -> dict[str, Any]:
    """A group of torch.optim.Muon; lacking: takes the settings that it does not have."""
    settings = dict(torch.optim.Muon([torch.zeros(1, 1)]).defaults)
    for key in ("lr", "weight_decay", "momentum"):
        settings[key] = group[key]
    settings["nesterov"] = group["look_ahead"] > 0
    if settings["nesterov"] and abs(group["look_ahead"] * group["momentum"] - 1) > 1e-3:
        lacking.add(f"look_ahead={group['look_ahead']!r}")
    if group["newton_schulz"] == "muon":
        settings["ns_steps"] = group["newton_schulz_steps"]
        settings["ns_coefficients"] = MUON
    settings["adjust_lr_fn"] = "original"
    if group["update_scale"] == "match_rms_adamw":
        settings["adjust_lr_fn"] = "match_rms_adamw"
    of_torch = {
        "direction": ("polar",),
        "newton_schulz": ("muon",),
        "update_scale": ("original", "match_rms_adamw"),
        "stack_dims": (0,),
        "row_blocks": (1,),
        "column_blocks": (1,),
        "input_first": (False,),
        "stochastic_rounding": (False,),
    }
    for key, values in of_torch.items():
        if group[key] not in values:
            lacking.add(f"{key}={group[key]!r}")
    return settings


def _settings_of_adamw(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group of torch.optim.AdamW."""
    settings = dict(torch.optim.AdamW([torch.zeros(1)]).defaults)
    for key in ("lr", "weight_decay", "betas", "eps"):
        settings[key] = group[key]
    return settings
