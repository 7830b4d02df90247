"""Hugging Face's Trainer: builds the optimizer, synchronises before saving, logs reports."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from curvadion.integrations import accelerate
from curvadion.integrations.shared import agree, run_before, wrap_method
from curvadion.metering.report import Summary
from curvadion.metering.wire import WireMeter
from curvadion.optim.curvadion import CurvaDion
from curvadion.optim.dion import Dion
from curvadion.optim.param_groups import param_groups

Trainer = TypeVar("Trainer")

TRAINERS_RATE = 5e-5  # TrainingArguments' default, for AdamW
_FOR_GROUPS = tuple(inspect.signature(param_groups).parameters)[1:]


def attach(trainer: Trainer, optimizer: type[Dion] = CurvaDion, **settings: Any) -> Trainer:
    """Make a ``transformers.Trainer``, or a subclass, train with CurvaDion or Dion.

    Call it before ``train()``, as in ``attach(trainer, wire_budget=0.01)``; it returns
    ``trainer``.

    Trainer then creates ``optimizer(param_groups(model), ...)``, with ``lr`` and
    ``weight_decay`` of TrainingArguments and the replicas of the run: all ranks under DDP,
    the mesh's ``dp_replicate`` under FSDP2. ``max_grad_norm`` uses one factor for all
    replicas. Weights are synchronised before an evaluation and at the end of ``train()``, all
    state before a checkpoint. Trainer logs :meth:`curvadion.Summary.scalars` of the steps
    since the last log.

    optimizer: CurvaDion, or Dion for a single sharded replica. settings: its arguments and
    those of :func:`curvadion.param_groups`; none with DeepSpeed's JSON.

    ValueError if there is an optimizer already, or for settings beside DeepSpeed's JSON;
    RuntimeError if attached already; TypeError from ``train()`` for unknown settings.
    """
    if hasattr(trainer, "_curvadion"):
        raise RuntimeError("trainer is attached already: call attach(trainer, ...) once.")
    mine: Any = trainer
    if mine.optimizer is not None:
        raise ValueError(
            f"trainer already has the optimizer {type(mine.optimizer).__name__}: build it "
            f"without optimizers=, and call attach before train()."
        )
    if mine.is_deepspeed_enabled:
        if settings:
            raise ValueError(f"set {sorted(settings)} in DeepSpeed's JSON, not in attach(trainer)")
    else:
        _warn_of_rate(mine.args, settings)
        accelerate.attach(mine.accelerator)
        wrap_method(trainer, "create_optimizer", partial(_create, trainer, optimizer, settings))
        # For parameters on several meshes Trainer computes its own norm, of one replica only.
        mine._has_mixed_mesh_grads = lambda model: False
    run_before(trainer, "_save_checkpoint", partial(_agree, trainer, for_files=True))
    # If replicas counted as drifted, the next evaluation would average the loaded weights.
    run_before(trainer, "_load_best_model", partial(_agree, trainer))
    _report(trainer)
    mine._curvadion = "attached"
    return trainer


def _optimizer_of(trainer: Any) -> Any:
    """A Trainer's optimizer, unwrapped."""
    engine = getattr(trainer, "deepspeed", None)
    return engine.basic_optimizer if engine else accelerate.unwrapped(trainer.optimizer)


def _warn_of_rate(args: Any, settings: Mapping[str, Any]) -> None:
    if "lr" not in settings and args.learning_rate == TRAINERS_RATE:
        warnings.warn(
            f"learning_rate={TRAINERS_RATE} is TrainingArguments' default, for AdamW; Dion's "
            f"is 0.02. Set it, or call attach(trainer, lr={TRAINERS_RATE}) to keep it.",
            stacklevel=3,
        )


def _create(
    trainer: Any,
    kind: type[Dion],
    settings: Mapping[str, Any],
    theirs: Any,
    model: Any = None,
) -> Any:
    if trainer.optimizer is None:
        # A hyperparameter search makes several optimizers, each with the arguments and the
        # accelerator of its trial, and a gate keeps state.
        accelerator, args = accelerate.attach(trainer.accelerator), trainer.args
        mine: dict[str, Any] = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
        for key, value in settings.items():
            mine[key] = value if key == "replicas" else copy.deepcopy(value)
        of_groups = {key: mine.pop(key) for key in _FOR_GROUPS if key in mine}
        replicas = dist.group.WORLD if accelerator.num_processes > 1 else None
        if accelerator.is_fsdp2:  # the model will be sharded later
            several = accelerate.shards_have_replicas(accelerator)
            replicas = accelerator.torch_device_mesh["dp_replicate"] if several else None
        mine.setdefault("replicas", replicas)
        groups = param_groups(trainer.model if model is None else model, **of_groups)
        trainer.optimizer = kind(groups, **mine)
    return trainer.optimizer


def _agree(trainer: Any, *, for_files: bool = False) -> None:
    # DeepSpeed's engine synchronises exactly for its own files.
    exact = for_files and not (trainer.is_deepspeed_enabled or trainer.args.save_only_model)
    agree([_optimizer_of(trainer)], weights_only=not exact)


def _report(trainer: Any) -> None:
    """Log reports, and synchronise replicas at the end of training."""
    from transformers import TrainerCallback

    class Reports(TrainerCallback):  # type: ignore[misc]
        since_last = Summary()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if (report := _optimizer_of(trainer).report) is not None:
                self.since_last.add(report)
            self.on_epoch_end(args, state, control)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # Evaluate the same weights as in this step's checkpoint, if there is one.
            if control.should_evaluate and (control.should_save or args.save_strategy == "best"):
                _agree(trainer, for_files=True)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            _agree(trainer)

    reports = Reports()
    trainer.add_callback(reports)

    def log(theirs: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        if "loss" in logs and reports.since_last.steps:
            values = reports.since_last.scalars(_optimizer_of(trainer).report)
            logs.update({f"curvadion/{name}": value for name, value in values.items()})
            reports.since_last = Summary()
        return theirs(logs, *args, **kwargs)

    def train(theirs: Any, *args: Any, **kwargs: Any) -> Any:
        with WireMeter():
            return theirs(*args, **kwargs)

    wrap_method(trainer, "log", log)
    wrap_method(trainer, "train", train)
