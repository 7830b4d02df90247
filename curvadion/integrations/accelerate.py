"""Hugging Face Accelerate: local gradients, and replicas that synchronise before it saves."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from curvadion.integrations import shared
from curvadion.optim.clipping import clip_grad_norm_
from curvadion.optim.factory import print_updates
from curvadion.optim.replica_optimizer import ReplicaOptimizer

Accelerator = TypeVar("Accelerator")


def attach(accelerator: Accelerator) -> Accelerator:
    """Make an ``accelerate.Accelerator`` work with replicas under DDP and FSDP2.

    The optimizer is a CurvaDion, Dion, Muon or Replicated. ``prepare`` prints on rank 0 which
    parameters take which update.

    Call it right after ``Accelerator(...)``; it returns its argument. ``prepare`` then leaves
    gradient averaging to the optimizer, ``clip_grad_norm_`` uses one factor for all replicas,
    and ``save_state``, to be called on all ranks, first calls ``synchronize(exact=True)``.
    ``get_state_dict`` and ``save_model`` call ``optimizer.eval()`` under FSDP2 only.

    Raises:
        ValueError: under DeepSpeed, Megatron-LM and FSDP1; if Accelerate runs each of several
            processes alone; and, from ``prepare``, if nothing would average some gradients
            over replicas.
        RuntimeError: from ``join_uneven_inputs``.
    """
    _check_kind(accelerator)
    if not hasattr(accelerator, "_curvadion_models"):
        _wrap_methods(accelerator)
    _leave_gradients_to_optimizers(accelerator)
    return accelerator


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside Accelerate's wrappers."""
    return getattr(optimizer, "optimizer", optimizer)


def shards_have_replicas(accelerator: Any) -> bool:
    """Whether the mesh has several replicas of FSDP2's shards."""
    return bool(getattr(accelerator.parallelism_config, "dp_replicate_enabled", False))


def _check_kind(accelerator: Any) -> None:
    """Raise ValueError for a kind of run in which the optimizers do not work."""
    kind = accelerator.distributed_type.value
    if kind in ("DEEPSPEED", "MEGATRON_LM", "FSDP") and not accelerator.is_fsdp2:
        raise ValueError(
            f"attach supports only DDP and FSDP2 (fsdp_version=2), not {kind}: for "
            f"DeepSpeed, import curvadion.deepspeed instead."
        )
    world = os.environ.get("WORLD_SIZE", "1")
    if accelerator.num_processes == 1 and int(world) > 1:
        raise ValueError(
            f"accelerator.num_processes=1, but WORLD_SIZE={world}: without a GPU pass "
            f"TrainingArguments(use_cpu=True) or Accelerator(cpu=True)."
        )


def _wrap_methods(accelerator: Any) -> None:
    """Add to an accelerator's methods what :func:`attach` promises of them."""
    accelerator._curvadion_models = WeakSet()  # those in DDP
    shared.run_before(accelerator, "save_state", partial(_synchronize, accelerator))
    if accelerator.is_fsdp2:
        # Its one model is gathered from shards on all ranks, so all can synchronise. Under
        # DDP one rank may call get_state_dict alone, and a collective would hang.
        synchronize_weights = partial(_synchronize, accelerator, weights_only=True)
        shared.run_before(accelerator, "get_state_dict", synchronize_weights)
        shared.run_after(accelerator, "prepare", partial(_after_sharding, accelerator))
    refuse = partial(_refuse_uneven_inputs, accelerator)
    shared.run_before(accelerator, "join_uneven_inputs", refuse)
    shared.run_after(accelerator, "prepare_model", partial(_after_wrapping, accelerator))
    shared.run_after(accelerator, "prepare_optimizer", partial(_after_preparing, accelerator))
    shared.wrap_method(accelerator, "clip_grad_norm_", partial(_clip_grad_norm_, accelerator))


def _after_sharding(accelerator: Any, _: object) -> None:
    """Drop what optimizers know of the unsharded parameters, which FSDP2 has replaced."""
    for optimizer in _optimizers(accelerator):
        if optimizer.state and not optimizer.state.keys() & _trained(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} had stepped or loaded a state before FSDP2 "
                f"replaced its parameters: call accelerator.prepare(model, optimizer) first."
            )
        if not optimizer.progress.steps:
            optimizer._forget()  # its plan would keep the unsharded weights alive
    _leave_gradients_to_optimizers(accelerator)


def _after_wrapping(accelerator: Any, model: Any) -> None:
    """Remember a model in DDP, of which the accelerator has no list of its own."""
    module = getattr(model, "_orig_mod", model)  # the module inside torch.compile
    if isinstance(module, DistributedDataParallel):
        accelerator._curvadion_models.add(model)
    _leave_gradients_to_optimizers(accelerator)


def _after_preparing(accelerator: Any, wrapper: Any) -> None:
    """Print the updates of an optimizer that has been prepared, and leave gradients to it."""
    optimizer = unwrapped(wrapper)
    if isinstance(optimizer, ReplicaOptimizer):
        print_updates(optimizer)
    _leave_gradients_to_optimizers(accelerator)


def _leave_gradients_to_optimizers(accelerator: Any) -> None:
    """Keep gradients local in each model that an optimizer trains, unless it is "single".

    Models and optimizers may be prepared in any order, so each of these calls it.
    """
    for model in _models_with_replicas(accelerator):
        weights = set(model.parameters())
        for optimizer in _optimizers(accelerator):
            trains_model = not weights.isdisjoint(_trained(optimizer))
            if trains_model and not optimizer.replicas.single:
                _check_replicas(accelerator, weights, optimizer)
                shared.keep_gradients_local(model)


def _models_with_replicas(accelerator: Any) -> Iterable[nn.Module]:
    """The models whose gradients DDP or FSDP2 would average over replicas."""
    models: Iterable[nn.Module]
    if accelerator.num_processes == 1:
        models = ()  # torchrun with one process also wraps in DDP
    elif not accelerator.is_fsdp2:
        models = accelerator._curvadion_models
    elif shards_have_replicas(accelerator):
        models = accelerator._models
    else:
        models = ()
    return models


def _check_replicas(
    accelerator: Any, weights: set[nn.Parameter], optimizer: ReplicaOptimizer
) -> None:
    """Raise ValueError if nothing would average the gradients of some weights.

    Args:
        accelerator: the attached one.
        weights: the parameters of a model in DDP or FSDP2.
        optimizer: one that trains some of them.
    """
    name = type(optimizer).__name__
    if optimizer.replicas.process_group is None:
        replicas = "dist.group.WORLD"
        if accelerator.is_fsdp2:
            replicas = 'accelerator.torch_device_mesh["dp_replicate"]'
        raise ValueError(
            f"replicas=None in {name}, but there are several: pass replicas={replicas} (after "
            f"Accelerator()), or 'single' to let the framework average all gradients."
        )
    for other in map(unwrapped, accelerator._optimizers):
        if weights.isdisjoint(_trained(other)):
            continue
        if not isinstance(other, ReplicaOptimizer) or other.replicas.size < 2:
            raise ValueError(
                f"{type(other).__name__} and {name} share a model: give {name} all "
                f"parameters, or both optimizers the same replicas=, one of torch inside "
                f"Replicated."
            )


def _optimizers(accelerator: Any) -> list[ReplicaOptimizer]:
    """The prepared optimizers of curvadion."""
    optimizers = map(unwrapped, accelerator._optimizers)
    return [optimizer for optimizer in optimizers if isinstance(optimizer, ReplicaOptimizer)]


def _trained(optimizer: Any) -> set[Tensor]:
    return {X for group in optimizer.param_groups for X in group["params"] if X.requires_grad}


def _clip_grad_norm_(
    accelerator: Any,
    original: Any,
    parameters: Any,
    max_norm: float,
    norm_type: float = 2,
) -> Any:
    """Accelerate's ``clip_grad_norm_``, but by one norm over all replicas.

    Args:
        accelerator: the attached one.
        original: its own method, for parameters that no optimizer with replicas trains.
        parameters: a tensor, or an iterable of tensors, whose gradients are clipped.
        max_norm: the largest norm, >= 0.
        norm_type: the order of the norm; 2 with replicas.

    Returns:
        The norm before clipping.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    clipped = set(parameters)
    optimizers = [
        optimizer
        for optimizer in _optimizers(accelerator)
        if optimizer.replicas.size > 1 and not clipped.isdisjoint(_trained(optimizer))
    ]
    if not optimizers:
        return original(parameters, max_norm, norm_type=norm_type)
    optimizer = optimizers[0]
    if len(optimizers) > 1 or not _trained(optimizer) <= clipped:
        raise ValueError(
            f"clip_grad_norm_ needs one norm over all parameters of an optimizer, and got "
            f"{len(parameters)} parameters of {len(optimizers)} optimizers: pass all of one "
            f"optimizer, or call curvadion.clip_grad_norm_(optimizer, max_norm)."
        )
    accelerator.unscale_gradients(optimizer)
    return clip_grad_norm_(optimizer, max_norm, norm_type)


def _synchronize(accelerator: Any, *, weights_only: bool = False) -> None:
    shared.synchronize_replicas(_optimizers(accelerator), weights_only=weights_only)


def _refuse_uneven_inputs(accelerator: Any) -> None:
    if any(optimizer.replicas.size > 1 for optimizer in _optimizers(accelerator)):
        raise RuntimeError(
            "join_uneven_inputs does not work with replicas: use even_batches=True or "
            "drop_last=True."
        )
