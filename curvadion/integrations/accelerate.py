"""Hugging Face Accelerate: local gradients, and replicas that synchronise before it saves."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from curvadion.integrations import shared
from curvadion.optim.clipping import clip_grad_norm_
from curvadion.optim.dion import Dion

Accelerator = TypeVar("Accelerator")


def attach(accelerator: Accelerator) -> Accelerator:
    """Make an ``accelerate.Accelerator`` work with CurvaDion and Dion under DDP and FSDP2.

    Call it right after ``Accelerator(...)``; it returns its argument. ``prepare`` then leaves
    gradient averaging to the optimizer, ``clip_grad_norm_`` uses one factor for all replicas,
    and ``save_state``, to be called on all ranks, first calls ``synchronize(exact=True)``.
    ``get_state_dict`` and ``save_model`` call ``optimizer.eval()`` under FSDP2 only.

    ValueError under DeepSpeed, Megatron-LM and FSDP1, if Accelerate runs each of several
    processes alone and, from ``prepare``, if nothing would average some gradients over
    replicas. RuntimeError from ``join_uneven_inputs``.
    """
    mine: Any = accelerator
    _check_kind(mine)
    if not hasattr(mine, "_curvadion_models"):
        mine._curvadion_models = WeakSet()  # those in DDP
        shared.run_before(mine, "save_state", partial(_agree, mine))
        if mine.is_fsdp2:  # it has one model, and gathers its shards on all ranks
            shared.run_before(mine, "get_state_dict", partial(_agree, mine, weights_only=True))
            shared.run_after(mine, "prepare", partial(_sharded, mine))
        shared.run_before(mine, "join_uneven_inputs", partial(_refuse_uneven_inputs, mine))
        shared.run_after(mine, "prepare_model", partial(_prepared_model, mine))
        shared.run_after(mine, "prepare_optimizer", partial(_take_over, mine))
        shared.wrap_method(mine, "clip_grad_norm_", partial(_clip_grad_norm_, mine))
    _take_over(mine)
    return accelerator


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside Accelerate's wrappers."""
    return getattr(optimizer, "optimizer", optimizer)


def _check_kind(accelerator: Any) -> None:
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


def _sharded(accelerator: Any, _: object) -> None:
    for optimizer in _optimizers(accelerator):
        if optimizer.state and not optimizer.state.keys() & _trained(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} had stepped or loaded a state before FSDP2 "
                f"replaced its parameters: call accelerator.prepare(model, optimizer) first."
            )
        if not optimizer.progress.steps:
            optimizer._forget()  # its plan would keep the unsharded weights alive
    _take_over(accelerator)


def _prepared_model(accelerator: Any, model: Any) -> None:
    if isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel):
        accelerator._curvadion_models.add(model)
    _take_over(accelerator)


def _take_over(accelerator: Any, _: object = None) -> None:
    models = accelerator._curvadion_models
    if accelerator.is_fsdp2:
        models = accelerator._models if shards_have_replicas(accelerator) else ()
    for model in models:
        own = set(model.parameters())
        for optimizer in _optimizers(accelerator):
            if own & _trained(optimizer) and not optimizer._replicas.single:
                _check_replicas(accelerator, own, optimizer)
                shared.keep_gradients_local(model)


def shards_have_replicas(accelerator: Any) -> bool:
    """Whether the mesh has several replicas of FSDP2's shards."""
    return bool(getattr(accelerator.parallelism_config, "dp_replicate_enabled", False))


def _check_replicas(accelerator: Any, own: set[nn.Parameter], optimizer: Dion) -> None:
    name = type(optimizer).__name__
    if optimizer._replicas.process_group is None:
        mesh = 'accelerator.torch_device_mesh["dp_replicate"]'
        where = mesh if accelerator.is_fsdp2 else "dist.group.WORLD"
        raise ValueError(
            f"replicas=None in {name}, but there are several: pass replicas={where} (after "
            f"Accelerator()), or 'single' to let the framework average all gradients."
        )
    for other in map(unwrapped, accelerator._optimizers):
        if own & _trained(other) and not (isinstance(other, Dion) and other._replicas.size > 1):
            raise ValueError(
                f"{type(other).__name__} and {name} share a model: give {name} all "
                f"parameters, or both optimizers the same replicas=."
            )


def _optimizers(accelerator: Any) -> list[Dion]:
    return [one for one in map(unwrapped, accelerator._optimizers) if isinstance(one, Dion)]


def _trained(optimizer: Any) -> set[Tensor]:
    return {X for group in optimizer.param_groups for X in group["params"] if X.requires_grad}


def _clip_grad_norm_(
    accelerator: Any,
    theirs: Any,
    parameters: Any,
    max_norm: float,
    norm_type: float = 2,
) -> Any:
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    given, each = set(parameters), _optimizers(accelerator)
    asked = [one for one in each if one._replicas.size > 1 and given & _trained(one)]
    if not asked:
        return theirs(parameters, max_norm, norm_type=norm_type)
    if len(asked) > 1 or not _trained(asked[0]) <= given:
        raise ValueError(
            "clip_grad_norm_ needs one norm over all parameters of an optimizer: pass these, "
            "or call curvadion.clip_grad_norm_(optimizer, max_norm)."
        )
    accelerator.unscale_gradients(asked[0])
    return clip_grad_norm_(asked[0], max_norm, norm_type)


def _agree(accelerator: Any, *, weights_only: bool = False) -> None:
    shared.agree(_optimizers(accelerator), weights_only=weights_only)


def _refuse_uneven_inputs(accelerator: Any) -> None:
    if any(optimizer._replicas.size > 1 for optimizer in _optimizers(accelerator)):
        raise RuntimeError(
            "join_uneven_inputs does not work with replicas: use even_batches=True or "
            "drop_last=True."
        )
