"""Build an optimizer from an engine's configuration, with errors that name the key."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from curvadion import checks
from curvadion.gates import RMMC, AlwaysOpen, ByteBudget, FixedPeriod
from curvadion.integrations.deepspeed.replicas import (
    REPLICA_SIZE,
    between_replicas,
    divided,
    reaching,
)
from curvadion.integrations.shared import KINDS
from curvadion.layout.flat_shard import declare_flat_shard
from curvadion.optim.curvadion import CurvaDion
from curvadion.optim.dion import Dion
from curvadion.optim.param_groups import param_groups
from curvadion.sync.coded_gradients import CodedGradients
from curvadion.sync.low_rank import LowRank
from curvadion.sync.quantized_average import QuantizedAverage

# Arguments that are objects: in the JSON {"type": ..., ...its arguments}.
GATES = {"rmmc": RMMC, "period": FixedPeriod, "budget": ByteBudget, "always": AlwaysOpen}
SYNCS = {
    "low_rank": LowRank,
    "quantized_average": QuantizedAverage,
    "coded_gradients": CodedGradients,
}
CHOICES: dict[str, Mapping[str, Callable[..., Any]]] = {"gate": GATES, "sync": SYNCS}
ROUTING = ("elementwise", "elementwise_lr", "options", "patterns")
# Keys of DeepSpeed's schedulers: the largest rate, for all groups unless it is a list.
LARGEST_RATES = ("warmup_max_lr", "cycle_max_lr")


def from_json(engine: Any, model_parameters: Sequence[Any]) -> Dion:
    """Build the optimizer of the JSON's ``optimizer`` entry; errors name the key."""
    kind = KINDS[engine.optimizer_name()]
    params = dict(engine.optimizer_params() or {})
    unknown = engine._config._param_dict["optimizer"].keys() - {"type", "params", "legacy_fusion"}
    if unknown:
        raise ValueError(
            f"optimizer.{min(unknown)} is unknown: put hyperparameters in optimizer.params"
        )
    params.pop(REPLICA_SIZE, None)
    replicas = between_replicas(engine)
    for argument in CHOICES.keys() & params.keys():
        params[argument] = _choice(argument, params[argument])
    if replicas is None and kind is CurvaDion:
        params.setdefault("local_step", "gradient")
    routing = {key: params.pop(key) for key in ROUTING if key in params}
    try:
        groups = _groups(engine.module, model_parameters, routing)
        if replicas is not None:
            offload = engine._config.zero_config.offload_optimizer
            offloaded = offload is not None and str(offload.device).endswith("cpu")
            device = torch.device("cpu") if offloaded else engine.device
            replicas = reaching(replicas, device)
        optimizer = kind(groups, replicas=replicas, **params)
    except (TypeError, ValueError) as error:
        raise type(error)(f"optimizer.params: {error}") from error
    _warn_of_one_rate(engine, optimizer)
    return optimizer


def _warn_of_one_rate(engine: Any, optimizer: Dion) -> None:
    """Warn if a DeepSpeed scheduler sets one rate for groups with different rates."""
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    params = engine.scheduler_params() or {}
    for key in LARGEST_RATES:
        if isinstance(params.get(key), (int, float)) and len(set(rates)) > 1:
            warnings.warn(
                f"scheduler.params.{key}={params[key]!r} sets this learning rate for all parameter "
                f"groups, whose own rates are {rates}: write a list with one rate per group, in "
                f"this order.",
                stacklevel=checks.user_stacklevel(),
            )


def _choice(argument: str, value: object) -> Any:
    """A gate or a sync from ``{"type": ..., ...its arguments}``."""
    key, kinds = f"optimizer.params.{argument}", CHOICES[argument]
    if not isinstance(value, Mapping):
        raise TypeError(f'{key}={value!r} must be an object like {{"type": "{next(iter(kinds))}"}}')
    arguments = dict(value)
    kind = arguments.pop("type", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"{key}.type={kind!r} must be one of {tuple(kinds)}")
    try:
        return kinds[kind](**arguments)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{key}: {error}") from error


def _groups(module: Any, given: Sequence[Any], routing: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Group the given parameters by the modules that own them."""
    if any(isinstance(item, dict) for item in given):
        if routing:
            raise ValueError(
                f"{sorted(routing)} route parameters, but model_parameters already holds parameter "
                f"groups: drop one of the two"
            )
        return [item if isinstance(item, dict) else {"params": [item]} for item in given]
    declare_shapes(module)
    wanted = {id(p) for p in given}
    groups = param_groups(module, **routing)
    for group in groups:
        group["params"] = [(name, p) for name, p in group["params"] if id(p) in wanted]
    found = {id(p) for group in groups for _, p in group["params"]}
    if unknown := [p for p in given if p.requires_grad and id(p) not in found]:
        raise ValueError(
            f"model_parameters holds {len(unknown)} parameters that the model does not have (the "
            f"first of shape {tuple(unknown[0].shape)}): pass them as parameter groups"
        )
    return [group for group in groups if group["params"]]


def declare_shapes(module: nn.Module) -> None:
    """Tell ``curvadion.param_groups`` the shapes of a model built under ``deepspeed.zero.Init``."""
    for p in module.parameters():
        shape = getattr(p, "ds_shape", None)
        if shape is not None and p.shape != shape:
            declare_flat_shard(p, shape, 0, 0, None)


def check_replicas(engine: Any, optimizer: Dion) -> None:
    """Raise ValueError if the optimizer's replicas or local steps do not fit the engine."""
    replicas, between = optimizer._replicas.process_group, between_replicas(engine)
    where = f"zero_optimization.stage={(stage := engine.zero_optimization_stage())}"
    if replicas is None and not (stage or divided(engine)):
        return  # DeepSpeed averages the gradients of all
    found, wanted = (g and dist.get_process_group_ranks(g) for g in (replicas, between))
    if found != wanted:
        raise ValueError(
            f"replicas holds the ranks {found}, but with {where} the engine's replicas are on the "
            f"ranks {wanted} (None: one replica is sharded over all ranks): pass a process group "
            f"of those ranks"
        )
    local_step = getattr(optimizer, "local_step", None)
    drifts = local_step == "dion" and not optimizer.gate.always_open
    if between is None and (drifts or optimizer.sync.sends_codes):
        raise ValueError(
            f"local_step={local_step!r} and sync={optimizer.sync!r} with {where}: one replica is "
            f"sharded over all ranks, so there is nothing to synchronise. Remove codes and budget "
            f"and use local_step='gradient', or form replicas with optimizer.params.{REPLICA_SIZE}."
        )
