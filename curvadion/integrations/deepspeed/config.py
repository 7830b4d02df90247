"""Build an optimizer from an engine's configuration, with errors that name the key."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from curvadion import checks
from curvadion.comm.groups import Group, ranks_of
from curvadion.gates import RMMC, AlwaysOpen, ByteBudget, FixedPeriod
from curvadion.integrations.deepspeed.replicas import KEY, REPLICA_SIZE, reaching
from curvadion.integrations.shared import KINDS
from curvadion.layout.flat_shard import declare_flat_shard
from curvadion.optim.curvadion import CurvaDion
from curvadion.optim.factory import GROUP_ARGUMENTS
from curvadion.optim.param_groups import param_groups
from curvadion.optim.replica_optimizer import ReplicaOptimizer
from curvadion.optim.replicated import Replicated
from curvadion.optim.torch_inner import works_by_element
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


def from_json(engine: Any, model_parameters: Sequence[Any]) -> ReplicaOptimizer:
    """Build the JSON's optimizer; errors name the key.

    Args:
        engine: a ``DeepSpeedEngine`` under construction, already divided into replicas.
        model_parameters: parameters or groups, as passed to ``deepspeed.initialize``.
    """
    kind = KINDS[engine.optimizer_name()]
    params = dict(engine.optimizer_params() or {})
    entry = engine._config._param_dict["optimizer"]
    unknown = entry.keys() - {"type", "params", "legacy_fusion"}
    if unknown:
        raise ValueError(f"optimizer.{min(unknown)} is unknown: put settings in optimizer.params")
    params.pop(REPLICA_SIZE, None)  # of the engine, which is divided already
    for argument in CHOICES.keys() & params.keys():
        params[argument] = _choice(argument, params[argument])
    if kind is CurvaDion:
        _check_gate(params, one_replica=engine.curvadion_replicas is None)
    replicas = engine.curvadion_replicas
    if replicas is not None:
        offloaded = engine.zero_use_cpu_optimizer()
        replicas = reaching(replicas, torch.device("cpu") if offloaded else engine.device)
    elif kind is CurvaDion:
        # With one replica on all ranks check_replicas refuses local steps of Dion.
        params.setdefault("local_step", "gradient")
    try:
        groups = _groups(engine.module, model_parameters, params)
        optimizer = kind(groups, replicas=replicas, **params)
    except (TypeError, ValueError) as error:
        raise type(error)(f"optimizer.params: {error}") from error
    _warn_of_scheduler(engine.scheduler_params() or {}, optimizer)
    return optimizer


def _warn_of_scheduler(params: Mapping[str, Any], optimizer: ReplicaOptimizer) -> None:
    """Warn if a scheduler would give one learning rate to groups that have several."""
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    for key in ("warmup_max_lr", "cycle_max_lr"):
        largest = params.get(key)
        if isinstance(largest, (int, float)) and len(set(rates)) > 1:
            warnings.warn(
                f"scheduler.params.{key}={largest!r} replaces the groups' rates {rates}: "
                f"write a list with one rate per group.",
                stacklevel=checks.user_stacklevel(),
            )


def _check_gate(params: Mapping[str, Any], *, one_replica: bool) -> None:
    """Raise ValueError if nothing says when replicas synchronise.

    Args:
        params: ``optimizer.params``, with gate and sync as objects.
        one_replica: whether all ranks form one replica.
    """
    if any(params.get(key) is not None for key in ("wire_budget", "gate", "threshold")):
        return
    sync = params.get("sync")
    if sync is not None and sync.every_step:
        return
    if one_replica:
        raise ValueError(
            f'optimizer.type="CurvaDion" without {KEY}: all ranks are one replica, which has '
            f'nothing to synchronise with. Use "type": "Dion", or set {REPLICA_SIZE} and '
            f'"wire_budget": 0.01.'
        )
    raise ValueError(
        'optimizer.params of "CurvaDion" has no default for when replicas synchronise. Set one '
        'of: "wire_budget": 0.01 (recommended); "gate", such as {"type": "period", "period": '
        '50}, or "threshold"; or, for the method of the paper, "threshold": 0.3 with '
        '"local_step": "gradient".'
    )


def _choice(argument: str, value: object) -> Any:
    """A gate or a sync from ``{"type": ..., ...its arguments}``."""
    key = f"optimizer.params.{argument}"
    kinds = CHOICES[argument]
    if not isinstance(value, Mapping):
        raise TypeError(f'{key}={value!r} must be an object like {{"type": "{next(iter(kinds))}"}}')
    arguments = dict(value)
    kind = arguments.pop("type", None)
    checks.one_of(f"{key}.type", kind, tuple(kinds))
    try:
        return kinds[kind](**arguments)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{key}: {error}") from error


def _groups(
    module: Any, model_parameters: Sequence[Any], params: dict[str, Any]
) -> list[dict[str, Any]]:
    """The groups that were passed, or groups of the passed parameters by their modules.

    Args:
        module: the model.
        model_parameters: parameters, or dictionaries with them.
        params: ``optimizer.params``, which loses the arguments of ``param_groups``.
    """
    if any(isinstance(entry, dict) for entry in model_parameters):
        return [
            entry if isinstance(entry, dict) else {"params": [entry]} for entry in model_parameters
        ]
    declare_shapes(module)
    routing = {key: params.pop(key) for key in GROUP_ARGUMENTS if key in params}
    groups = param_groups(module, **routing)
    passed = set(model_parameters)
    for group in groups:
        group["params"] = [(name, p) for name, p in group["params"] if p in passed]
    grouped = sum(len(group["params"]) for group in groups)
    trained = sum(p.requires_grad for p in model_parameters)
    if grouped < trained:
        raise ValueError(
            f"the model has {grouped} of the {trained} trained model_parameters: pass groups."
        )
    return [group for group in groups if group["params"]]


def declare_shapes(module: nn.Module) -> None:
    """Tell ``curvadion.param_groups`` the shapes of a model of ``deepspeed.zero.Init``."""
    for p in module.parameters():
        shape = getattr(p, "ds_shape", None)
        if shape is not None and p.shape != shape:
            declare_flat_shard(p, shape, 0, 0, None)


def check_inner(engine: Any, optimizer: Replicated) -> None:
    """Raise ValueError if ZeRO's flat shards do not fit the optimizer inside Replicated."""
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return
    inner = optimizer.inner.optimizers
    if len(inner) > 1:
        raise ValueError(
            f"Replicated holds {len(inner)} optimizers, but with zero_optimization.{stage=} it "
            f"may hold one: give that one all groups, or use stage 0."
        )
    if not works_by_element(inner[0]) and not engine.zero_allow_untested_optimizer():
        raise ValueError(
            f"{type(inner[0]).__name__} in Replicated would step on the flat shards of "
            f"zero_optimization.{stage=}: use stage 0, or set zero_allow_untested_optimizer if "
            f"it steps each element alone."
        )


def check_replicas(engine: Any, optimizer: ReplicaOptimizer) -> None:
    """Raise ValueError if replicas or local steps do not fit the engine."""
    replicas = optimizer.replicas.process_group
    stage = engine.zero_optimization_stage()
    if replicas is None and stage == 0:
        return  # DeepSpeed averages the gradients of all
    ranks = _ranks_or_none(replicas)
    engine_ranks = _ranks_or_none(engine.curvadion_replicas)
    if ranks != engine_ranks:
        raise ValueError(
            f"replicas holds the ranks {ranks}, but with zero_optimization.stage={stage} the "
            f"engine's replicas are on the ranks {engine_ranks}: pass a group of these, or None"
        )
    drifts = optimizer.inner.directed and not optimizer.gate.always_open
    if engine.curvadion_replicas is None and (drifts or optimizer.sync.sends_codes):
        remedy = ", or use local_step='gradient' without codes" if optimizer.inner.directed else ""
        raise ValueError(
            f"gate={optimizer.gate!r} and sync={optimizer.sync!r} with "
            f"zero_optimization.{stage=}: one replica is sharded over all ranks. Set {KEY} to a "
            f"part of them (in code, replicas=){remedy}."
        )


def _ranks_or_none(group: Group | None) -> list[int] | None:
    return None if group is None else ranks_of(group)
