"""Build an optimizer from an engine's configuration, with errors that name the key."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from curvadion import checks
from curvadion.comm.groups import ranks_of
from curvadion.gates import RMMC, AlwaysOpen, ByteBudget, FixedPeriod
from curvadion.integrations.deepspeed.replicas import REPLICA_SIZE, reaching
from curvadion.integrations.shared import KINDS
from curvadion.layout.flat_shard import declare_flat_shard
from curvadion.optim.curvadion import CurvaDion
from curvadion.optim.dion import Dion
from curvadion.optim.param_groups import param_groups
from curvadion.sync.coded_gradients import CodedGradients
from curvadion.sync.low_rank import LowRank
from curvadion.sync.quantized_average import QuantizedAverage

# Arguments that are objects: in the JSON {"type": ..., ...its arguments}.
CHOICES: dict[str, dict[str, Callable[..., Any]]] = {
    "gate": {"rmmc": RMMC, "period": FixedPeriod, "budget": ByteBudget, "always": AlwaysOpen},
    "sync": {
        "low_rank": LowRank,
        "quantized_average": QuantizedAverage,
        "coded_gradients": CodedGradients,
    },
}
ROUTING = ("elementwise", "elementwise_lr", "options", "patterns")


def from_json(engine: Any, model_parameters: Sequence[Any]) -> Dion:
    """Build the JSON's optimizer; errors name the key."""
    kind = KINDS[engine.optimizer_name()]
    params = dict(engine.optimizer_params() or {})
    entry = engine._config._param_dict["optimizer"]
    if unknown := entry.keys() - {"type", "params", "legacy_fusion"}:
        raise ValueError(f"optimizer.{min(unknown)} is unknown: put settings in optimizer.params")
    params.pop(REPLICA_SIZE, None)
    for argument in CHOICES.keys() & params.keys():
        params[argument] = _choice(argument, params[argument])
    if (replicas := engine.curvadion_replicas) is not None:
        offloaded = engine.zero_use_cpu_optimizer()
        replicas = reaching(replicas, torch.device("cpu") if offloaded else engine.device)
    elif kind is CurvaDion:
        params.setdefault("local_step", "gradient")
    try:
        groups = _groups(engine.module, model_parameters, params)
        optimizer = kind(groups, replicas=replicas, **params)
    except (TypeError, ValueError) as error:
        raise type(error)(f"optimizer.params: {error}") from error
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    for key in ("warmup_max_lr", "cycle_max_lr"):
        largest = (engine.scheduler_params() or {}).get(key)
        if isinstance(largest, (int, float)) and len(set(rates)) > 1:
            warnings.warn(
                f"scheduler.params.{key}={largest!r} replaces the groups' rates {rates}: "
                f"write a list with one rate per group.",
                stacklevel=checks.user_stacklevel(),
            )
    return optimizer


def _choice(argument: str, value: object) -> Any:
    """A gate or a sync from ``{"type": ..., ...its arguments}``."""
    key, kinds = f"optimizer.params.{argument}", CHOICES[argument]
    if not isinstance(value, Mapping):
        raise TypeError(f'{key}={value!r} must be an object like {{"type": "{next(iter(kinds))}"}}')
    arguments = dict(value)
    kind = arguments.pop("type", None)
    checks.one_of(f"{key}.type", kind, tuple(kinds))
    try:
        return kinds[kind](**arguments)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{key}: {error}") from error


def _groups(module: Any, given: Sequence[Any], params: dict[str, Any]) -> list[dict[str, Any]]:
    """The given groups, or groups of the given parameters by their modules."""
    if any(isinstance(item, dict) for item in given):
        return [item if isinstance(item, dict) else {"params": [item]} for item in given]
    declare_shapes(module)
    groups = param_groups(module, **{key: params.pop(key) for key in ROUTING if key in params})
    wanted = set(given)
    for group in groups:
        group["params"] = [(name, p) for name, p in group["params"] if p in wanted]
    found = sum(len(group["params"]) for group in groups)
    if found < (trained := sum(p.requires_grad for p in given)):
        raise ValueError(
            f"the model has {found} of the {trained} trained model_parameters: pass groups."
        )
    return [group for group in groups if group["params"]]


def declare_shapes(module: nn.Module) -> None:
    """Tell ``curvadion.param_groups`` the shapes of a model of ``deepspeed.zero.Init``."""
    for p in module.parameters():
        shape = getattr(p, "ds_shape", None)
        if shape is not None and p.shape != shape:
            declare_flat_shard(p, shape, 0, 0, None)


def check_replicas(engine: Any, optimizer: Dion) -> None:
    """Raise ValueError if replicas or local steps do not fit the engine."""
    replicas, between = optimizer._replicas.process_group, engine.curvadion_replicas
    stage = engine.zero_optimization_stage()
    if replicas is None and stage == 0:
        return  # DeepSpeed averages the gradients of all
    found, wanted = (g and ranks_of(g) for g in (replicas, between))
    if found != wanted:
        raise ValueError(
            f"replicas holds the ranks {found}, but with zero_optimization.stage={stage} the "
            f"engine's replicas are on the ranks {wanted}: pass a group of these, or None"
        )
    local_step = getattr(optimizer, "local_step", None)
    drifts = local_step == "dion" and not optimizer.gate.always_open
    if between is None and (drifts or optimizer.sync.sends_codes):
        raise ValueError(
            f"{local_step=} and sync={optimizer.sync!r} with zero_optimization.{stage=}: one "
            f"replica is sharded over all ranks. Use optimizer.params.{REPLICA_SIZE}, or "
            f"local_step='gradient' without codes."
        )
