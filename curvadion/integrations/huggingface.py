"""Hugging Face's Trainer: builds the optimizer, synchronises before saving, logs reports."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from curvadion.integrations import accelerate
from curvadion.integrations.shared import run_before, synchronize_replicas, wrap_method
from curvadion.metering.report import Summary
from curvadion.metering.wire import WireMeter
from curvadion.optim.curvadion import CurvaDion
from curvadion.optim.factory import from_model, wraps
from curvadion.optim.replica_optimizer import ReplicaOptimizer
from curvadion.optim.replicated import Replicated

Trainer = TypeVar("Trainer")

TRAINERS_RATE = 5e-5  # TrainingArguments' default, for AdamW


def attach(
    trainer: Trainer, optimizer: Callable[..., ReplicaOptimizer] = CurvaDion, **settings: Any
) -> Trainer:
    """Make a ``transformers.Trainer``, or a subclass, train with replicas.

    Call it before ``train()``, as in ``attach(trainer, wire_budget=0.01)``.

    Trainer then creates ``optimizer(param_groups(model), ...)``, with ``lr`` and
    ``weight_decay`` of TrainingArguments, or ``Replicated`` around the optimizer that
    TrainingArguments describe. Its replicas are those of the run: all ranks under DDP, the
    mesh's ``dp_replicate`` under FSDP2. ``max_grad_norm`` uses one factor for all replicas.
    Weights are synchronised before an evaluation and at the end of ``train()``, all state
    before a checkpoint. Trainer logs :meth:`curvadion.Summary.scalars` of the steps since the
    last log, and rank 0 prints which parameters take which update.

    Args:
        trainer: without an optimizer.
        optimizer: CurvaDion, Replicated, or Dion and Muon, such as for a single sharded replica.
        settings: arguments of the optimizer; for CurvaDion at least ``wire_budget=0.01`` or
            another gate. Those of :func:`curvadion.param_groups` too, but not for Replicated.
            None with DeepSpeed's JSON.

    Returns:
        ``trainer``.

    Raises:
        ValueError: if there is an optimizer already, or for settings that DeepSpeed's JSON
            or TrainingArguments should hold.
        RuntimeError: if attached already.
        TypeError, ValueError: from ``train()``, for unknown or missing settings.
    """
    if hasattr(trainer, "_curvadion"):
        raise RuntimeError("trainer is attached already: call attach(trainer, ...) once.")
    instance: Any = trainer  # mypy knows no attributes of a TypeVar
    if instance.optimizer is not None:
        raise ValueError(
            f"trainer already has the optimizer {type(instance.optimizer).__name__}: build it "
            f"without optimizers=, and call attach before train()."
        )
    if instance.is_deepspeed_enabled:
        if wraps(optimizer):
            raise ValueError(
                "Replicated does not work with DeepSpeed in Trainer: use DDP or FSDP2, or "
                "CurvaDion in DeepSpeed's JSON."
            )
        if settings:
            raise ValueError(f"set {sorted(settings)} in DeepSpeed's JSON, not in attach(trainer)")
    else:
        if wraps(optimizer):
            _check_outer(settings)
        else:
            _warn_of_rate(instance.args, settings)
        accelerate.attach(instance.accelerator)
        create = partial(_create_optimizer, trainer, optimizer, settings)
        wrap_method(trainer, "create_optimizer", create)
        # For parameters on several meshes Trainer computes its own norm, of one replica only.
        instance._has_mixed_mesh_grads = lambda model: False
    before_saving = partial(_synchronize, trainer, for_files=True)
    run_before(trainer, "_save_checkpoint", before_saving)
    # If replicas counted as drifted, the next evaluation would average the loaded weights.
    run_before(trainer, "_load_best_model", partial(_synchronize, trainer))
    _report(trainer)
    instance._curvadion = "attached"
    return trainer


def _optimizer_of(trainer: Any) -> Any:
    """A Trainer's optimizer, unwrapped."""
    engine = getattr(trainer, "deepspeed", None)
    if engine:
        return engine.basic_optimizer
    return accelerate.unwrapped(trainer.optimizer)


def _check_outer(settings: Mapping[str, Any]) -> None:
    """Raise ValueError for settings of the optimizer inside, which Trainer builds."""
    unknown = settings.keys() - inspect.signature(Replicated).parameters.keys()
    if unknown:
        raise ValueError(
            f"{sorted(unknown)} are no arguments of Replicated: the optimizer inside is the one "
            f"that TrainingArguments describe, such as by learning_rate and optim."
        )


def _warn_of_rate(args: Any, settings: Mapping[str, Any]) -> None:
    """Warn if nobody seems to have chosen the learning rate."""
    if "lr" not in settings and args.learning_rate == TRAINERS_RATE:
        warnings.warn(
            f"learning_rate={TRAINERS_RATE} is TrainingArguments' default, for AdamW; Dion's "
            f"is 0.02. Set it, or call attach(trainer, lr={TRAINERS_RATE}) to keep it.",
            stacklevel=3,  # where attach is called
        )


def _create_optimizer(
    trainer: Any,
    kind: Callable[..., ReplicaOptimizer],
    settings: Mapping[str, Any],
    original: Any,
    model: Any = None,
) -> Any:
    """Trainer's ``create_optimizer``.

    A hyperparameter search calls it once for each trial, with other arguments and another
    accelerator.

    Args:
        trainer: the attached one.
        kind: the optimizer's class.
        settings: arguments of the optimizer and of ``param_groups``.
        original: Trainer's own method, which builds the optimizer inside Replicated.
        model: the model to train; None for the trainer's.

    Returns:
        The trainer's optimizer, new unless it had one.
    """
    if trainer.optimizer is not None:
        return trainer.optimizer
    accelerator = accelerate.attach(trainer.accelerator)
    arguments: dict[str, Any] = {"replicas": _replicas_of(accelerator)}
    for key, value in settings.items():
        # A gate's state must not reach the next trial. Process groups cannot be copied.
        arguments[key] = value if key == "replicas" else copy.deepcopy(value)
    if wraps(kind):
        inner = original(model)
        trainer.optimizer = None  # an error must not leave the inner one to a second train()
        trainer.optimizer = kind(inner, **arguments)
        return trainer.optimizer
    rates = {"lr": trainer.args.learning_rate, "weight_decay": trainer.args.weight_decay}
    trained = trainer.model if model is None else model
    trainer.optimizer = from_model(kind, trained, {**rates, **arguments})
    return trainer.optimizer


def _replicas_of(accelerator: Any) -> Any:
    """The run's replicas: a process group or a mesh dimension; None if there is only one."""
    if accelerator.is_fsdp2:  # the model will be sharded later
        if accelerate.shards_have_replicas(accelerator):
            return accelerator.torch_device_mesh["dp_replicate"]
        return None
    return dist.group.WORLD if accelerator.num_processes > 1 else None


def _synchronize(trainer: Any, *, for_files: bool = False) -> None:
    """Synchronise weights; for_files: all state, if a checkpoint holds it."""
    # DeepSpeed's engine synchronises exactly for its own files.
    saves_states = not (trainer.is_deepspeed_enabled or trainer.args.save_only_model)
    exact = for_files and saves_states
    synchronize_replicas([_optimizer_of(trainer)], weights_only=not exact)


def _report(trainer: Any) -> None:
    """Log reports, and synchronise replicas before evaluations and at the end of training."""
    from transformers import TrainerCallback

    class Reports(TrainerCallback):  # type: ignore[misc]
        summary = Summary()  # of the steps since the last log

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            report = _optimizer_of(trainer).report
            if report is not None:
                self.summary.add(report)
            self._before_evaluation(args, control)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._before_evaluation(args, control)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            _synchronize(trainer)

        def _before_evaluation(self, args: Any, control: Any) -> None:
            # Evaluate the same weights as in this step's checkpoint, if there is one.
            will_save = control.should_save or args.save_strategy == "best"
            if control.should_evaluate and will_save:
                _synchronize(trainer, for_files=True)

    reports = Reports()
    trainer.add_callback(reports)

    def log(original: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        if "loss" in logs and reports.summary.steps:
            scalars = reports.summary.scalars(_optimizer_of(trainer).report)
            logs.update({f"curvadion/{name}": value for name, value in scalars.items()})
            reports.summary = Summary()
        return original(logs, *args, **kwargs)

    def train(original: Any, *args: Any, **kwargs: Any) -> Any:
        with WireMeter():
            return original(*args, **kwargs)

    wrap_method(trainer, "log", log)
    wrap_method(trainer, "train", train)
