"""Registering the optimizers with DeepSpeed, and attaching them to engines."""

from __future__ import annotations

from functools import cache
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.integrations.deepspeed import config, replicas, sharded
from curvadion.integrations.shared import KINDS, run_after, run_before, wrap_method
from curvadion.optim.clipping import clip_grad_norm_
from curvadion.optim.muon import Muon
from curvadion.optim.replica_optimizer import ReplicaOptimizer
from curvadion.optim.replicated import Replicated


@cache
def register() -> None:
    """Register the optimizers with DeepSpeed; calling it again has no effect."""
    import deepspeed
    from deepspeed.runtime.zero import utils
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init

    for hook in (_is_supported_optimizer, _configure_basic_optimizer, _configure_optimizer):
        wrap_method(deepspeed.DeepSpeedEngine, hook.__name__, hook)
    replicas.patch(Init, GatheredParameters)
    # For unknown classes ZeRO requires zero_allow_untested_optimizer.
    utils.ZERO_SUPPORTED_OPTIMIZERS.extend([*KINDS.values(), Muon, Replicated])


def _is_supported_optimizer(original: Any, engine: Any, name: str) -> bool:
    return name in KINDS or original(engine, name)


def _configure_basic_optimizer(original: Any, engine: Any, parameters: Any) -> Any:
    """Build the JSON's optimizer."""
    if engine.optimizer_name() not in KINDS:
        return original(engine, parameters)
    optimizer = config.from_json(engine, parameters)
    _disable_step(optimizer)
    return optimizer


def _configure_optimizer(original: Any, engine: Any, client: Any, parameters: Any) -> None:
    """Build and wrap the engine's optimizer, and attach one of curvadion.

    Args:
        original: the engine's own method, which builds and wraps it.
        engine: under construction.
        client: an optimizer built in code, or a function of the parameters that builds one;
            None for the JSON's.
        parameters: ``model_parameters`` of ``deepspeed.initialize``.
    """
    if client is not None and not hasattr(client, "param_groups"):
        client = client(parameters)
    named_in_json = client is None and engine.optimizer_name() in KINDS
    if not (named_in_json or isinstance(client, ReplicaOptimizer)):
        original(engine, client, parameters)
        return
    if isinstance(client, Replicated):
        config.check_inner(engine, client)
    if client is not None:
        _disable_step(client)
    replicas.divide_into_replicas(engine, client)
    replicas.sharding_over.append(engine.seq_data_parallel_group)
    try:
        original(engine, client, parameters)
    finally:
        replicas.sharding_over.pop()
    _attach(engine, engine.basic_optimizer)


def _disable_step(optimizer: ReplicaOptimizer) -> None:
    """Disable ``step`` until attached: a bfloat16 engine calls it during construction."""
    # A method, because torch's learning-rate schedulers read step.__func__.
    vars(optimizer)["step"] = MethodType(lambda self, closure=None: None, optimizer)


def _attach(engine: Any, optimizer: ReplicaOptimizer) -> None:
    """Make a complete engine step and save through the optimizer."""
    config.check_replicas(engine, optimizer)
    if optimizer.progress.steps and engine.optimizer is not optimizer:
        # DeepSpeed has put parameters of its own into the groups.
        raise ValueError(
            f"optimizer={type(optimizer).__name__} has the state of {optimizer.progress.steps} "
            f"steps, which would be lost: pass a new one, or use "
            f"zero_optimization.stage=0 in float32. engine.load_checkpoint loads the state of "
            f"an engine."
        )
    vars(optimizer).pop("step", None)
    has_replicas = optimizer.replicas.process_group is not None
    if engine.zero_optimization_stage():
        sharded.attach(engine, optimizer)
    elif has_replicas:
        _attach_unsharded(engine, optimizer)
    if has_replicas:
        _synchronize_before_saving(engine, optimizer)


def _attach_unsharded(engine: Any, optimizer: ReplicaOptimizer) -> None:
    """Let the engine average inside one replica only, and clip by one norm over all."""
    engine.enable_backward_allreduce = optimizer.replicas.size < dist.get_world_size()

    def clip() -> None:
        norm = clip_grad_norm_(optimizer, engine.gradient_clipping())
        engine._global_grad_norm = norm.item()

    engine.clip_fp32_gradients = clip
    if engine.optimizer is not optimizer:
        _step_on_masters(engine.optimizer, optimizer)


def _step_on_masters(wrapper: Any, optimizer: ReplicaOptimizer) -> None:
    """Step on a bfloat16 engine's masters; its own step would skip on each rank alone.

    Args:
        wrapper: DeepSpeed's optimizer of bfloat16 weights and float32 masters.
        optimizer: the one inside, whose parameters are the masters.
    """
    pairs: list[tuple[Tensor, Tensor]] = []  # weights of the model and their masters
    for weights, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
        pairs.extend(zip(weights, masters, strict=True))

    @torch.no_grad()
    def publish(_: object = None) -> None:
        """Copy the masters to the model."""
        for weight, master in pairs:
            weight.copy_(master)

    def step(closure: None = None) -> None:
        for weight, master in pairs:
            master.grad = None if weight.grad is None else weight.grad.to(master.dtype)
        if wrapper.clip_grad > 0:
            wrapper._global_grad_norm = clip_grad_norm_(optimizer, wrapper.clip_grad).item()
        optimizer.step()
        optimizer.zero_grad()
        publish()

    wrapper.step = step
    run_after(optimizer, "synchronize", publish)
    # Accelerate calls these.
    wrapper.eval = optimizer.eval
    wrapper.train = optimizer.train


def _synchronize_before_saving(engine: Any, optimizer: ReplicaOptimizer) -> None:
    """Synchronise before saving, because one replica saves for all."""

    def synchronize() -> None:
        optimizer.synchronize(exact=True)
        if optimizer.replicas.replica.number > 0:
            # From stage 1 on replicas would write the same files.
            engine.save_non_zero_checkpoint = False
            engine.save_zero_checkpoint = False

    run_before(engine, "save_checkpoint", synchronize)
    # Accelerate gathers weights on all ranks without save_16bit_model.
    for name in ("save_16bit_model", "_zero3_consolidated_16bit_state_dict"):
        run_before(engine, name, optimizer.eval)
