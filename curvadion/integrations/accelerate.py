"""Hugging Face Accelerate: local gradients, and replicas that synchronise before it saves."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from curvadion.integrations import shared
from curvadion.optim.clipping import clip_grad_norm_
from curvadion.optim.dion import Dion

Accelerator = TypeVar("Accelerator")

_PREPARED = "_curvadion_prepared"  # attribute of accelerators: their wrapped models


def attach(accelerator: Accelerator) -> Accelerator:
    """Make an ``accelerate.Accelerator`` work with CurvaDion and Dion under DDP and FSDP2.

    Call it right after ``Accelerator(...)``; it returns its argument. ``prepare`` then leaves
    gradient averaging to the optimizer, ``clip_grad_norm_`` uses one factor for all replicas, and
    ``save_state``, to be called on all ranks, first calls ``synchronize(exact=True)``.
    ``get_state_dict`` and ``save_model`` call ``optimizer.eval()`` under FSDP2 only.

    ValueError under DeepSpeed, Megatron-LM and FSDP1, if Accelerate treats each of several
    processes as the only one and, from ``prepare``, if nothing would average some gradients over
    replicas. RuntimeError from ``join_uneven_inputs``.
    """
    _check_kind(accelerator)
    if not hasattr(accelerator, _PREPARED):
        _hook(accelerator)
    _take_over(accelerator)
    return accelerator


def _hook(accelerator: Any) -> None:
    setattr(accelerator, _PREPARED, WeakSet())
    shared.run_before(accelerator, "save_state", partial(_agree, accelerator))
    if accelerator.is_fsdp2:  # it has one model, and gathers its shards on all ranks
        weights = partial(_agree, accelerator, weights_only=True)
        shared.run_before(accelerator, "get_state_dict", weights)
    refuse = partial(_refuse_uneven_inputs, accelerator)
    shared.run_before(accelerator, "join_uneven_inputs", refuse)
    shared.run_after(accelerator, "prepare", partial(_prepared, accelerator))
    shared.run_after(accelerator, "prepare_model", partial(_prepared_model, accelerator))
    shared.run_after(accelerator, "prepare_optimizer", partial(_take_over, accelerator))
    shared.wrap_method(accelerator, "clip_grad_norm_", partial(_clip_grad_norm_, accelerator))


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside Accelerate's wrappers."""
    return getattr(optimizer, "optimizer", optimizer)


def _check_kind(accelerator: Any) -> None:
    kind = accelerator.distributed_type.value
    if kind in ("DEEPSPEED", "MEGATRON_LM", "FSDP") and not accelerator.is_fsdp2:
        raise ValueError(
            f"accelerator runs {kind}, but attach supports only DDP and FSDP2 (fsdp_version=2); "
            f"for DeepSpeed import curvadion.deepspeed and leave attach out."
        )
    world = os.environ.get("WORLD_SIZE", "1")
    if accelerator.num_processes == 1 and int(world) > 1:
        raise ValueError(
            f"accelerator.num_processes=1, but WORLD_SIZE={world}: without a GPU pass use_cpu=True "
            f"to TrainingArguments or cpu=True to Accelerator, or set ACCELERATE_USE_CPU=true."
        )


def _prepared(accelerator: Any, _: object) -> None:
    for optimizer in _optimizers(accelerator) if accelerator.is_fsdp2 else ():
        own = {X for group in optimizer.param_groups for X in group["params"]}
        if optimizer.state and not optimizer.state.keys() & own:
            raise ValueError(
                f"{type(optimizer).__name__} had stepped or loaded a state before FSDP2 replaced "
                f"its parameters: call accelerator.prepare(model, optimizer) first."
            )
        if not optimizer.progress.steps:
            optimizer._forget()  # its plan would keep the unsharded weights alive
    _take_over(accelerator)


def _prepared_model(accelerator: Any, model: Any) -> None:
    if isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel):
        getattr(accelerator, _PREPARED).add(model)
    _take_over(accelerator)


def _take_over(accelerator: Any, _: object = None) -> None:
    for model in _replicated_models(accelerator):
        own = {id(p) for p in model.parameters()}
        for optimizer in _optimizers(accelerator):
            if own & _ids(optimizer) and not optimizer._replicas.single:
                _check_replicas(accelerator, own, optimizer)
                shared.keep_gradients_local(model)


def _replicated_models(accelerator: Any) -> list[nn.Module]:
    if accelerator.is_fsdp2:
        return list(accelerator._models) if shards_have_replicas(accelerator) else []
    return list(getattr(accelerator, _PREPARED))


def shards_have_replicas(accelerator: Any) -> bool:
    """Whether the mesh has several replicas of FSDP2's shards."""
    return bool(getattr(accelerator.parallelism_config, "dp_replicate_enabled", False))


def _check_replicas(accelerator: Any, own: set[int], optimizer: Dion) -> None:
    name = type(optimizer).__name__
    if optimizer._replicas.process_group is None:
        mesh = 'accelerator.torch_device_mesh["dp_replicate"]'
        where = mesh if accelerator.is_fsdp2 else "dist.group.WORLD"
        raise ValueError(
            f"replicas=None in {name}, but there are several: pass replicas={where} after creating "
            f"the Accelerator, or 'single' to let the framework average all gradients."
        )
    for other in map(unwrapped, accelerator._optimizers):
        if own & _ids(other) and not (isinstance(other, Dion) and other._replicas.size > 1):
            raise ValueError(
                f"{type(other).__name__} and {name} hold parameters of the same model: give all of "
                f"them to {name}, or pass the same replicas= to both optimizers."
            )


def _optimizers(accelerator: Any) -> list[Dion]:
    return [one for one in map(unwrapped, accelerator._optimizers) if isinstance(one, Dion)]


def _ids(optimizer: Any) -> set[int]:
    each = (X for group in optimizer.param_groups for X in group["params"])
    return {id(X) for X in each if X.requires_grad}


def _clip_grad_norm_(
    accelerator: Any,
    theirs: Callable[..., Any],
    parameters: Any,
    max_norm: float,
    norm_type: float = 2,
) -> Any:
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    given = {id(p) for p in parameters}
    each = _optimizers(accelerator)
    asked = [one for one in each if one._replicas.size > 1 and given & _ids(one)]
    if not asked:
        return theirs(parameters, max_norm, norm_type=norm_type)
    if len(asked) > 1 or not _ids(asked[0]) <= given:
        raise ValueError(
            "clip_grad_norm_ needs one norm over all parameters of an optimizer with replicas: "
            "pass exactly these, or call curvadion.clip_grad_norm_(optimizer, max_norm)."
        )
    accelerator.unscale_gradients(asked[0])
    return clip_grad_norm_(asked[0], max_norm, norm_type)


def _agree(accelerator: Any, *, weights_only: bool = False) -> None:
    shared.agree(_optimizers(accelerator), weights_only=weights_only)


def _refuse_uneven_inputs(accelerator: Any) -> None:
    if any(optimizer._replicas.size > 1 for optimizer in _optimizers(accelerator)):
        raise RuntimeError(
            "join_uneven_inputs does not work with replicas, which step together: use "
            "even_batches=True or drop_last=True."
        )
