"""From an engine's configuration to an optimizer, or to an error that names the key."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from curvadion import checks
from curvadion.gates import RMMC, AlwaysOpen, ByteBudget, FixedPeriod
from curvadion.integrations.deepspeed.process_groups import Reaching, between_replicas, divided
from curvadion.integrations.deepspeed.replicas import REPLICA_SIZE
from curvadion.layout.flat_shard import declare_flat_shard
from curvadion.optim.curvadion import CurvaDion
from curvadion.optim.dion import Dion
from curvadion.optim.param_groups import param_groups
from curvadion.sync.coded_gradients import CodedGradients
from curvadion.sync.low_rank import LowRank
from curvadion.sync.quantized_average import QuantizedAverage

OPTIMIZERS: dict[str, type[Dion]] = {"CurvaDion": CurvaDion, "Dion": Dion}
# Arguments that are objects: in the JSON {"type": ..., ...its arguments}.
CHOICES: dict[str, dict[str, Callable[..., Any]]] = {
    "gate": {"rmmc": RMMC, "period": FixedPeriod, "budget": ByteBudget, "always": AlwaysOpen},
    "sync": {
        "low_rank": LowRank,
        "quantized_average": QuantizedAverage,
        "coded_gradients": CodedGradients,
    },
}
_EXAMPLES = {
    "gate": '{"type": "period", "period": 25}',
    "sync": '{"type": "quantized_average", "bits": 2}',
}
ROUTING = ("elementwise", "elementwise_lr", "options", "patterns")
DELAY = "delay"  # short for that of the sync
# Of DeepSpeed's schedulers that set rates, the key of the largest.
ONE_RATE = {
    "WarmupLR": "warmup_max_lr",
    "WarmupDecayLR": "warmup_max_lr",
    "OneCycle": "cycle_max_lr",
}
NOTHING_TO_BRING_TOGETHER = (
    f"one replica is sharded over all ranks, so there is nothing to bring together. Divide the "
    f"ranks by optimizer.params.{REPLICA_SIZE}, or use stage 0."
)


def check_spelling(name: str) -> None:
    """Raise ValueError for a name that is nearly one of ours."""
    for known in OPTIMIZERS:
        if name != known and difflib.get_close_matches(name.lower(), [known.lower()], cutoff=0.8):
            raise ValueError(f"optimizer.type={name!r}: did you mean {known!r}?")


def from_json(engine: Any, model_parameters: Sequence[Any]) -> Dion:
    """The optimizer that ``optimizer.type`` and ``optimizer.params`` describe.

    Raises:
        TypeError, ValueError: naming the key and the value.
    """
    kind = OPTIMIZERS[engine.optimizer_name()]
    params = dict(engine.optimizer_params() or {})
    _check_sections(engine._config._param_dict["optimizer"])
    _check_keys(kind, params)
    params.pop(REPLICA_SIZE, None)
    replicas = between_replicas(engine)
    delay, given = params.pop(DELAY, None), params.get("sync")
    for argument in CHOICES.keys() & params.keys():
        params[argument] = _choice(argument, params[argument])
    if delay is not None:
        _check_delay(delay, given, engine.zero_optimization_stage() if replicas is None else None)
    if delay:
        params["sync"] = _delayed(params, delay)
    if replicas is None and kind is CurvaDion:
        params.setdefault("local_step", "gradient")
    routing = {key: params.pop(key) for key in ROUTING if key in params}
    try:
        groups = _groups(engine.module, model_parameters, routing)
        if replicas is not None:
            replicas = Reaching()(replicas, _device_of_weights(engine))
        optimizer = kind(groups, replicas=replicas, **params)
    except (TypeError, ValueError) as error:
        raise type(error)(f"optimizer.params: {error}") from error
    _warn_of_one_rate(engine, optimizer)
    return optimizer


def _warn_of_one_rate(engine: Any, optimizer: Dion) -> None:
    """Warn if a scheduler of DeepSpeed gives one rate to groups that have several."""
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    key = ONE_RATE.get(engine.scheduler_name())
    rate = (engine.scheduler_params() or {}).get(key)
    if isinstance(rate, (int, float)) and len(set(rates)) > 1:
        warnings.warn(
            f"scheduler.params.{key}={rate!r} gives all parameter groups this learning rate, and "
            f"they have {rates}: write a list with one rate for each of them, in this order.",
            stacklevel=checks.frames_up(),
        )


def _check_sections(optimizer: Mapping[str, Any]) -> None:
    if unknown := sorted(optimizer.keys() - {"type", "params", "legacy_fusion"}):
        raise ValueError(
            f"optimizer.{unknown[0]}={optimizer[unknown[0]]!r} is unknown: hyperparameters belong "
            f"into optimizer.params"
        )


def _check_keys(kind: type[Dion], params: Mapping[str, Any]) -> None:
    known = [*list(inspect.signature(kind.__init__).parameters)[2:], *ROUTING, REPLICA_SIZE]
    if kind is CurvaDion:
        known.append(DELAY)
    for key in params:
        if key == "replicas":
            raise ValueError(
                f"optimizer.params.replicas: leave it out, {REPLICA_SIZE!r} says who they are"
            )
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            names = sorted(set(known) - {"replicas"})
            hint = f"did you mean {close[0]!r}?" if close else f"known keys: {names}"
            raise ValueError(f"optimizer.params.{key}={params[key]!r} is unknown: {hint}")


def _choice(argument: str, value: object) -> Any:
    """A gate or a sync from ``{"type": ..., ...its arguments}``."""
    key, kinds = f"optimizer.params.{argument}", CHOICES[argument]
    if not isinstance(value, Mapping):
        raise TypeError(f"{key}={value!r} must be an object like {_EXAMPLES[argument]}")
    arguments = dict(value)
    kind = arguments.pop("type", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"{key}.type={kind!r} must be one of {tuple(kinds)}")
    known = inspect.signature(kinds[kind]).parameters
    required = {name for name, given in known.items() if given.default is given.empty}
    if not required <= arguments.keys() <= known.keys():
        hint = ""
        if argument == "gate" and DELAY in arguments.keys() - known.keys():
            hint = f". For means that arrive later give optimizer.params.{DELAY}"
        raise ValueError(
            f"{key}={value!r}: a {argument} of type {kind!r} takes {list(known)}{hint}"
        )
    try:
        return kinds[kind](**arguments)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{key}.{error}") from error


def _check_delay(delay: object, sync: object, stage: int | None) -> None:
    """Raise for a delay that cannot be.

    sync: what the JSON says of it. stage: of ZeRO if it shards one replica over all ranks.
    """
    key = f"optimizer.params.{DELAY}"
    checks.integer(key, delay, 0)
    if delay and stage:
        where = f"with zero_optimization.stage={stage}"
        raise ValueError(f"{key}={delay} {where}: {NOTHING_TO_BRING_TOGETHER}")
    inside = sync.get(DELAY, delay) if isinstance(sync, Mapping) else delay
    if inside != delay:
        raise ValueError(f"{key}={delay}, but optimizer.params.sync.{DELAY}={inside}: drop one")


def _delayed(params: Mapping[str, Any], delay: int) -> QuantizedAverage:
    """The sync that the arguments choose, with a delay."""
    key = f"optimizer.params.{DELAY}"
    sync, gate = params.get("sync"), params.get("gate")
    if sync is None:
        counts_bytes = params.get("wire_budget") is not None or getattr(gate, "share", None)
        sync = QuantizedAverage() if counts_bytes else LowRank()
    if not isinstance(sync, QuantizedAverage):
        raise ValueError(
            f"{key}={delay} with sync={sync!r}: only coded means of weights can arrive later. "
            f"Give a wire_budget, "
            f'or "sync": {{"type": "quantized_average"}}, or leave {DELAY!r} out'
        )
    sync.delay = delay
    return sync


def _device_of_weights(engine: Any) -> torch.device:
    """Where the optimizer's weights are: on the host if they are offloaded."""
    offload = engine._config.zero_config.offload_optimizer
    offloaded = offload is not None and str(offload.device).endswith("cpu")
    device: torch.device = torch.device("cpu") if offloaded else engine.device
    return device


def _groups(module: Any, given: Sequence[Any], routing: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Parameter groups of the given parameters, routed by the module that owns each."""
    if any(isinstance(item, dict) for item in given):
        if routing:
            raise ValueError(
                f"{sorted(routing)} route parameters, but model_parameters came in groups: drop "
                f"one of them"
            )
        return [item if isinstance(item, dict) else {"params": [item]} for item in given]
    for key, value in routing.items():
        if key in ("options", "patterns") and not isinstance(value, Mapping):
            raise TypeError(f"{key}={value!r} must be an object")
    declare_shapes(module)
    wanted = {id(p) for p in given}
    groups = param_groups(module, **routing)
    for group in groups:
        group["params"] = [(name, p) for name, p in group["params"] if id(p) in wanted]
    found = {id(p) for group in groups for _, p in group["params"]}
    if strangers := [p for p in given if p.requires_grad and id(p) not in found]:
        raise ValueError(
            f"model_parameters holds {len(strangers)} parameters that the model does not have (the "
            f"first of shape {tuple(strangers[0].shape)}): give them in groups"
        )
    return [group for group in groups if group["params"]]


def declare_shapes(module: nn.Module) -> None:
    """Say what the parameters of a model built under ``deepspeed.zero.Init`` are shards of.

    They look empty; ``curvadion.param_groups`` then knows their shapes. A JSON configuration needs
    no such call.
    """
    for p in module.parameters():
        shape = getattr(p, "ds_shape", None)
        if shape is not None and p.shape != shape:
            declare_flat_shard(p, shape, 0, 0, None)


def check_replicas(engine: Any, optimizer: Dion) -> None:
    """Raise ValueError if the optimizer's replicas or local steps do not fit the engine."""
    stage, replicas = engine.zero_optimization_stage(), optimizer._replicas.process_group
    between = between_replicas(engine)
    if replicas is None and between is not None and not (stage or divided(engine)):
        return  # DeepSpeed averages the gradients of all
    if between is None:
        _check_one_replica(stage, optimizer)
        return
    found = None if replicas is None else dist.get_process_group_ranks(replicas)
    wanted = dist.get_process_group_ranks(between)
    if found != wanted:
        advice = "" if stage else ", or None to leave the averaging of gradients to DeepSpeed"
        raise ValueError(
            f"replicas holds the ranks {found}, but the engine's replicas are on {wanted}: pass "
            f"a group of these{advice}"
        )


def _check_one_replica(stage: int, optimizer: Dion) -> None:
    where = f"with zero_optimization.stage={stage}"
    if optimizer._replicas.process_group is not None:
        raise ValueError(
            f"replicas must be None {where}: ZeRO has averaged the gradients before the step and "
            f"shards one replica over all ranks. For several replicas of K ranks in a row pass the "
            f"group of the ranks that are K apart."
        )
    if optimizer.sync.sends_codes:
        raise ValueError(f"sync={optimizer.sync!r} {where}: {NOTHING_TO_BRING_TOGETHER}")
    local_step = optimizer.local_step if isinstance(optimizer, CurvaDion) else None
    if local_step == "dion" and not optimizer.gate.always_open:
        raise ValueError(
            f"local_step='dion' {where}: one replica is sharded over all ranks, so its local Dion "
            f"step would send all that a synchronised step sends. Use local_step='gradient', or "
            f"optimizer.params.{REPLICA_SIZE} for several replicas."
        )


def check_precision(engine: Any) -> None:
    """Raise ValueError if ``fp16`` or ``bf16`` is set where it does not work."""
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator()
    if engine.fp16_enabled():
        if engine.zero_optimization_stage() == 0:
            raise ValueError(
                "fp16.enabled does not work with CurvaDion and Dion at ZeRO stage 0, where each "
                "rank would scale its loss alone: use bf16, or stage 1, 2 or 3."
            )
        if not device.is_fp16_supported():
            raise ValueError(
                f"fp16.enabled=true: this {device.device_name()} has no float16 arithmetic that "
                f"DeepSpeed could use. Use bf16, or leave both out for float32."
            )
    if engine.bfloat16_enabled() and not device.is_bf16_supported():
        raise ValueError(
            f"bf16.enabled=true: this {device.device_name()} has no bfloat16 arithmetic that "
            f"DeepSpeed could use. Leave it out for float32."
        )


def check_mpu(engine: Any) -> None:
    """Raise ValueError if DeepSpeed was given a model-parallel unit."""
    if engine.mpu is not None:
        raise ValueError(
            f"mpu={type(engine.mpu).__name__} does not work with CurvaDion and Dion: matrices may "
            f"not be cut by other ranks, and optimizer.params.{REPLICA_SIZE} chooses replicas. "
            f"Pass none."
        )


def check_early(engine: Any) -> None:
    """Raise ValueError before DeepSpeed does, naming no key, or remembers an mpu for others."""
    if engine.client_optimizer is None and engine.optimizer_name() not in OPTIMIZERS:
        return
    if engine.client_optimizer is None or isinstance(engine.client_optimizer, Dion):
        check_precision(engine)
        check_mpu(engine)


def check_engine(engine: Any) -> None:
    """Raise ValueError, naming the key, for a mode of DeepSpeed in which no update is right."""
    check_precision(engine)
    zero, settings = engine._config.zero_config, engine._config
    stage = engine.zero_optimization_stage()
    autocast = engine.torch_autocast_enabled() and engine.torch_autocast_dtype()
    refused = [
        (engine.pipeline_parallelism, "PipelineModule", "train without pipeline stages"),
        (engine.has_moe_layers, "deepspeed.moe layers", "use dense layers"),
        (engine.autotp_size() > 1, "tensor_parallel.autotp_size", "set it to 1"),
        (
            settings.compile_config.deepcompile,
            "compile.deepcompile",
            "set it to false",
        ),
        (zero.zenflow is not None, "zero_optimization.zenflow", "remove it"),
        (
            zero.elastic_checkpoint,
            "zero_optimization.elastic_checkpoint",
            "set it to false: the optimizer's state is not elastic",
        ),
        (
            engine.load_universal_checkpoint(),
            "checkpoint.load_universal",
            "set it to false and load a checkpoint of the same world size",
        ),
        (
            autocast is torch.float16,
            "torch_autocast.dtype",
            "use bfloat16: float16 scales losses on each rank alone",
        ),
        (
            stage == 0 and engine.sequence_parallel_size > 1,
            "sequence_parallel_size",
            "use zero_optimization.stage >= 1",
        ),
        (
            stage == 0 and not engine.gradient_average,
            "gradient_allreduce_op",
            "use 'mean', which is what replicas take",
        ),
        *_refused_offloads(zero),
    ]
    for is_set, key, advice in refused:
        if is_set:
            raise ValueError(f"{key} does not work with CurvaDion and Dion: {advice}.")
    check_mpu(engine)  # autotp_size brings one of its own


def _refused_offloads(zero: Any) -> list[tuple[bool, str, str]]:
    refused = []
    for key in ("offload_optimizer", "offload_param"):
        offload = getattr(zero, key)
        if offload is None:
            continue
        name = f"zero_optimization.{key}"
        refused.append((str(offload.device).endswith("nvme"), f"{name}.device='nvme'", "use 'cpu'"))
        if key == "offload_optimizer":
            refused.append((offload.super_offload, f"{name}.super_offload", "set it to false"))
            refused.append((offload.ratio != 1.0, f"{name}.ratio={offload.ratio}", "set it to 1.0"))
    return refused
