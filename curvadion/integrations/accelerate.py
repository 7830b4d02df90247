"""Hugging Face Accelerate: local gradients, and replicas that synchronise before it saves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from curvadion.integrations.shared import (
    agree_for_a_file,
    keep_gradients_local,
    run_after,
    run_before,
    wrap_method,
)
from curvadion.optim.clipping import clip_grad_norm_
from curvadion.optim.dion import Dion

Accelerator = TypeVar("Accelerator")

_PREPARED = "_curvadion_prepared"  # attribute of accelerators: their wrapped models


def attach(accelerator: Accelerator) -> Accelerator:
    """Make an ``accelerate.Accelerator`` work with CurvaDion and Dion under DDP and FSDP2.

    Call it right after ``Accelerator(...)``, which creates the process group. ``prepare`` then
    leaves gradient averaging to the optimizer, ``clip_grad_norm_`` uses one factor for all
    replicas, and ``save_state``, which must be called on all ranks, first calls
    ``synchronize(exact=True)``. ``get_state_dict`` and ``save_model`` call ``optimizer.eval()``
    under FSDP2; under DDP call that on all ranks first.

    A step skipped for a NaN still advances schedulers; ``optimizer_step_was_skipped`` does not
    report it, but ``optimizer.optimizer.report.skipped`` does. With one process nothing changes.
    Returns ``accelerator``; attaching it again has no effect.

    Raises:
        ValueError: under DeepSpeed, Megatron-LM and FSDP1, and if Accelerate treats each of several
            processes as the only one; from ``prepare``, if nothing would average a parameter's
            gradient over replicas, and if an optimizer has stepped before FSDP2 shards its
            parameters.
        RuntimeError: from ``join_uneven_inputs``, because replicas step together.
    """
    from accelerate import Accelerator

    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"accelerator must be an accelerate.Accelerator, got {accelerator!r}")
    _check_kind(accelerator)
    if not hasattr(accelerator, _PREPARED):
        setattr(accelerator, _PREPARED, WeakSet())
        run_before(accelerator, "save_state", partial(_agree_exactly, accelerator))
        run_before(accelerator, "get_state_dict", partial(_agree_on_weights, accelerator))
        run_before(accelerator, "join_uneven_inputs", partial(_refuse_uneven_inputs, accelerator))
        run_after(accelerator, "prepare", partial(_prepared, accelerator))
        run_after(accelerator, "prepare_model", partial(_prepared_model, accelerator))
        run_after(accelerator, "prepare_optimizer", partial(_prepared_optimizer, accelerator))
        wrap_method(accelerator, "clip_grad_norm_", partial(_clip_grad_norm_, accelerator))
    _take_over(accelerator)
    return accelerator


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside Accelerate's wrappers."""
    while not isinstance(optimizer, Dion) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _check_kind(accelerator: Any) -> None:
    kind = accelerator.distributed_type.value
    if kind in ("DEEPSPEED", "MEGATRON_LM", "FSDP") and not accelerator.is_fsdp2:
        raise ValueError(
            f"accelerator runs {kind}, but attach supports only DDP and FSDP2: for FSDP set "
            f"fsdp_version=2; for DeepSpeed import curvadion.deepspeed and leave attach out."
        )
    world = os.environ.get("WORLD_SIZE", "1")
    if accelerator.num_processes == 1 and int(world) > 1:
        raise ValueError(
            f"accelerator.num_processes=1, but WORLD_SIZE={world}: without a GPU Accelerate trains "
            f"in each process by itself. Pass use_cpu=True to TrainingArguments or cpu=True to "
            f"Accelerator, or set ACCELERATE_USE_CPU=true."
        )


def _prepared(accelerator: Any, result: Any) -> None:
    if accelerator.is_fsdp2:
        for optimizer in _optimizers(accelerator):
            own = {id(X) for group in optimizer.param_groups for X in group["params"]}
            if optimizer.state and not any(id(X) in own for X in optimizer.state):
                raise ValueError(
                    f"{type(optimizer).__name__} had already taken {optimizer.progress.steps} "
                    f"steps when FSDP2 replaced its parameters: call accelerator.prepare(model, "
                    f"optimizer) before the first step and before loading a state."
                )
            if not optimizer.progress.steps:
                optimizer._forget()  # its plan would keep the unsharded weights alive
    _take_over(accelerator)


def _prepared_model(accelerator: Any, model: Any) -> None:
    getattr(accelerator, _PREPARED).add(model)
    _take_over(accelerator)


def _prepared_optimizer(accelerator: Any, wrapper: Any) -> None:
    if isinstance(ours := unwrapped(wrapper), Dion):
        # Accelerate's wrapper lacks these, and errors name them.
        wrapper.synchronize, wrapper.drift = ours.synchronize, ours.drift
    _take_over(accelerator)


def _take_over(accelerator: Any) -> None:
    for model in _replicated_models(accelerator):
        own = {id(p) for p in model.parameters()}
        for optimizer in _optimizers(accelerator):
            if own & _ids(optimizer) and not optimizer._replicas.single:
                _check_replicas(accelerator, own, optimizer)
                keep_gradients_local(model)


def _replicated_models(accelerator: Any) -> list[nn.Module]:
    if accelerator.is_fsdp2:
        return list(accelerator._models) if shards_have_replicas(accelerator) else []
    # A compiled DDP counts as DDP.
    known = list(getattr(accelerator, _PREPARED))
    return [m for m in known if isinstance(getattr(m, "_orig_mod", m), DistributedDataParallel)]


def shards_have_replicas(accelerator: Any) -> bool:
    """Whether the mesh has several replicas of FSDP2's shards."""
    return bool(getattr(accelerator.parallelism_config, "dp_replicate_enabled", False))


def _check_replicas(accelerator: Any, own: set[int], optimizer: Dion) -> None:
    """Raise ValueError if nothing would average some gradients; own: ids of the model's."""
    if optimizer._replicas.process_group is None:
        mesh = 'accelerator.torch_device_mesh["dp_replicate"]'
        where = mesh if accelerator.is_fsdp2 else "dist.group.WORLD"
        raise ValueError(
            f"replicas=None in {type(optimizer).__name__}, but accelerator runs several replicas: "
            f"pass replicas={where} after creating the Accelerator (before that, dist.group.WORLD "
            f"is None), or replicas='single' to let the framework average all gradients."
        )
    for other in map(unwrapped, accelerator._optimizers):
        if own & _ids(other) and not (isinstance(other, Dion) and other._replicas.size > 1):
            raise ValueError(
                f"{type(other).__name__} and {type(optimizer).__name__} hold parameters of the "
                f"same model: give all of them to {type(optimizer).__name__}, or pass the same "
                f"replicas= to both optimizers."
            )


def _optimizers(accelerator: Any) -> list[Dion]:
    return [one for one in map(unwrapped, accelerator._optimizers) if isinstance(one, Dion)]


def _ids(optimizer: Any) -> set[int]:
    each = (X for group in optimizer.param_groups for X in group["params"])
    return {id(X) for X in each if X.requires_grad}


def _clip_grad_norm_(
    accelerator: Any,
    theirs: Callable[..., Any],
    parameters: Tensor | Iterable[Tensor],
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
            f"clip_grad_norm_ got parameters of {len(asked)} optimizers with replicas, or only "
            f"some parameters of one. Replicas need one norm over all parameters of an optimizer: "
            f"pass exactly these, or call curvadion.clip_grad_norm_(optimizer, max_norm)."
        )
    accelerator.unscale_gradients(asked[0])
    return clip_grad_norm_(asked[0], max_norm, norm_type)


def _agree_exactly(accelerator: Any) -> None:
    for optimizer in _optimizers(accelerator):
        agree_for_a_file(optimizer)


def _agree_on_weights(accelerator: Any) -> None:
    if accelerator.is_fsdp2:  # it has one model, and gathers its shards on all ranks
        for optimizer in _optimizers(accelerator):
            optimizer.eval()


def _refuse_uneven_inputs(accelerator: Any) -> None:
    if any(optimizer._replicas.size > 1 for optimizer in _optimizers(accelerator)):
        raise RuntimeError(
            "join_uneven_inputs lets ranks stop at different steps, but replicas step together: "
            "give every rank the same number of batches (even_batches=True, or drop_last=True)."
        )
