"""Hugging Face's Trainer: builds the optimizer, synchronises before saving, logs reports."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from curvadion.integrations import accelerate
from curvadion.integrations.accelerate import unwrapped
from curvadion.integrations.shared import agree_for_a_file, run_before, wrap_method
from curvadion.metering.report import Summary
from curvadion.metering.wire import WireMeter
from curvadion.optim.curvadion import CurvaDion
from curvadion.optim.dion import Dion
from curvadion.optim.param_groups import param_groups

Trainer = TypeVar("Trainer")

TRAINERS_RATE = 5e-5  # TrainingArguments' default, for AdamW
_ATTACHED = "_curvadion_attached"  # an attribute of trainers
_FOR_GROUPS = tuple(inspect.signature(param_groups).parameters)[1:]


def attach(trainer: Trainer, optimizer: type[Dion] = CurvaDion, **settings: Any) -> Trainer:
    """Make a ``transformers.Trainer``, or a subclass, train with CurvaDion or Dion.

    Call it before ``train()``, as in ``attach(trainer, wire_budget=0.01)``; it returns ``trainer``.

    Trainer then creates ``optimizer(param_groups(model), ...)``, with ``lr`` and ``weight_decay``
    of TrainingArguments (``optim`` and Adam's values are ignored) and the replicas of the run: all
    ranks under DDP, the mesh's ``dp_replicate`` under FSDP2, none in one process. Trainer's
    Accelerator is attached too, and ``max_grad_norm`` uses one factor for all replicas. Weights are
    synchronised before an evaluation and at the end of ``train()``, and all state before a
    checkpoint; before a ``save_model()`` in between call ``trainer.optimizer.eval()`` on all ranks.
    Trainer logs :meth:`curvadion.Summary.scalars` of the steps since the last log, as
    ``curvadion/wire_bytes`` and so on.

    ``optimizer`` is the class CurvaDion or Dion (use Dion for a single sharded replica, FSDP2
    alone). ``settings`` are its arguments and those of :func:`curvadion.param_groups`. Pass none
    with DeepSpeed's JSON, or to a trainer built with ``optimizers=(curvadion's, None)``, which
    keeps that optimizer.

    TypeError for another class or, from ``train()``, an unknown setting; ValueError for settings
    where the optimizer exists already; RuntimeError if the trainer is attached already.
    """
    from transformers import Trainer

    if not isinstance(trainer, Trainer):
        raise TypeError(f"trainer must be a transformers.Trainer, got {type(trainer).__name__}")
    if not (isinstance(optimizer, type) and issubclass(optimizer, Dion)):
        raise TypeError(f"optimizer={optimizer!r} must be the class CurvaDion or Dion")
    if hasattr(trainer, _ATTACHED):
        raise RuntimeError("trainer is attached already: call attach(trainer, ...) once.")
    if trainer.is_deepspeed_enabled or trainer.optimizer is not None:
        _check_given(trainer, settings)
    else:
        _warn_of_rate(trainer.args, settings)
        wrap_method(trainer, "create_optimizer", partial(_create, trainer, optimizer, settings))
    if not trainer.is_deepspeed_enabled:
        accelerate.attach(trainer.accelerator)
        # For parameters on several meshes Trainer computes its own norm, of one replica only.
        trainer._has_mixed_mesh_grads = lambda model: False
    run_before(trainer, "_save_checkpoint", partial(_agree, trainer, for_files=True))
    # If replicas counted as drifted, the next evaluation would average the loaded weights.
    run_before(trainer, "_load_best_model", partial(_agree, trainer))
    _report(trainer)
    setattr(trainer, _ATTACHED, True)
    return trainer


def optimizer_of(trainer: Any) -> Dion | None:
    """A Trainer's CurvaDion or Dion, unwrapped; None if it has none yet."""
    engine = getattr(trainer, "deepspeed", None)
    found = unwrapped(trainer.optimizer) if engine is None else engine.basic_optimizer
    return found if isinstance(found, Dion) else None


def _check_given(trainer: Any, settings: Mapping[str, Any]) -> None:
    if not trainer.is_deepspeed_enabled and optimizer_of(trainer) is None:
        raise ValueError(
            f"trainer already has the optimizer {type(trainer.optimizer).__name__}: leave "
            f"optimizers= out, and call attach before train(), which creates the optimizer."
        )
    if settings:
        raise ValueError(
            f"attach(trainer) got {sorted(settings)}, but DeepSpeed's JSON names the optimizer, or "
            f"trainer already has one: set these in the JSON or on that optimizer, or leave "
            f"optimizers= out."
        )


def _warn_of_rate(args: Any, settings: Mapping[str, Any]) -> None:
    if "lr" not in settings and args.learning_rate == TRAINERS_RATE:
        warnings.warn(
            f"learning_rate={TRAINERS_RATE} is the default of TrainingArguments, meant for AdamW; "
            f"Dion's default for matrices is 0.02. Set TrainingArguments(learning_rate=...), or "
            f"call attach(trainer, lr={TRAINERS_RATE}) to keep this value.",
            stacklevel=3,
        )


def _create(
    trainer: Any,
    kind: type[Dion],
    settings: Mapping[str, Any],
    theirs: Callable[..., Any],
    model: nn.Module | None = None,
) -> Any:
    if trainer.optimizer is None:
        # A hyperparameter search makes several optimizers, each with the arguments and the
        # accelerator of its trial, and a gate keeps state.
        accelerate.attach(trainer.accelerator)
        args = trainer.args
        mine = {"lr": args.learning_rate, "weight_decay": args.weight_decay} | {
            key: value if key == "replicas" else copy.deepcopy(value)
            for key, value in settings.items()
        }
        of_groups = {key: mine.pop(key) for key in _FOR_GROUPS if key in mine}
        mine.setdefault("replicas", _replicas(trainer.accelerator))
        groups = param_groups(trainer.model if model is None else model, **of_groups)
        trainer.optimizer = kind(groups, **mine)
    return trainer.optimizer


def _replicas(accelerator: Any) -> Any:
    """The ranks that will hold replicas once Trainer lays out its model."""
    if accelerator.is_fsdp2:
        several = accelerate.shards_have_replicas(accelerator)
        return accelerator.torch_device_mesh["dp_replicate"] if several else None
    parallelism = accelerator.parallelism_config
    by_ddp = parallelism is None or not parallelism.tp_enabled
    return dist.group.WORLD if accelerator.num_processes > 1 and by_ddp else None


def _agree(trainer: Any, *, for_files: bool = False) -> None:
    """Synchronise weights, or all state for a checkpoint; collective."""
    if (optimizer := optimizer_of(trainer)) is not None:
        # DeepSpeed's engine synchronises exactly for its own files.
        exact = for_files and not (trainer.is_deepspeed_enabled or trainer.args.save_only_model)
        agree_for_a_file(optimizer, weights_only=not exact)


def _report(trainer: Any) -> None:
    """Log reports of steps, and synchronise replicas at the end of training."""
    from transformers import TrainerCallback

    class Reports(TrainerCallback):  # type: ignore[misc]
        since_last = Summary()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            optimizer = optimizer_of(trainer)
            if optimizer is not None and optimizer.report is not None:
                self.since_last.add(optimizer.report)
            self.on_epoch_end(args, state, control)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # Evaluate the same weights as in this step's checkpoint, if there is one.
            if control.should_evaluate and (control.should_save or args.save_strategy == "best"):
                _agree(trainer, for_files=True)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            _agree(trainer)

    reports = Reports()
    trainer.add_callback(reports)

    def log(theirs: Callable[..., Any], logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        optimizer = optimizer_of(trainer)
        report = None if optimizer is None else optimizer.report
        if report is not None and "loss" in logs and reports.since_last.steps:
            values = reports.since_last.scalars(report)
            logs.update({f"curvadion/{name}": value for name, value in values.items()})
            reports.since_last = Summary()
        return theirs(logs, *args, **kwargs)

    def train(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with WireMeter() if dist.is_initialized() else nullcontext():
            return theirs(*args, **kwargs)

    wrap_method(trainer, "log", log)
    wrap_method(trainer, "train", train)
