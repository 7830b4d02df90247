"""Lightning, from either package: a callback for training, evaluating, saving and resuming."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from curvadion.integrations.shared import agree_for_a_file, keep_gradients_local, wrap_method
from curvadion.metering.report import Summary
from curvadion.metering.wire import WireMeter
from curvadion.optim.clipping import clip_grad_norm_
from curvadion.optim.dion import Dion

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback  # type: ignore[assignment, unused-ignore]


class Replicas(Callback):  # type: ignore[misc, unused-ignore]
    """Callback that lets CurvaDion or Dion synchronise replicas in place of Lightning.

    With DDP, or FSDP2 on a (replicate, shard) mesh, gradient averaging is left to the optimizer
    when ``fit`` starts. ``gradient_clip_val`` clips by one norm over all replicas; clipping by
    value is unchanged. Weights are synchronised before validation, before a file of weights is
    saved and at the end of training, and all state before a checkpoint.

    Every ``log_every_n_steps`` steps the loggers get :meth:`curvadion.Summary.scalars` of the steps
    since the last log, as ``curvadion/wire_bytes`` and so on; with several optimizers under
    ``curvadion0/``, ``curvadion1/`` and so on.

    ``fit`` raises a TypeError if an optimizer is neither CurvaDion nor Dion, and a RuntimeError
    with FSDPStrategy (FSDP1) and DeepSpeedStrategy, and if only some optimizers have replicas.

    log: whether to log, and to count bytes for the log. Example::

        lightning.Trainer(strategy="ddp", callbacks=[Replicas()]).fit(model, data)
    """

    def __init__(self, *, log: bool = True) -> None:
        self._logs = log
        self._fit = ExitStack()  # undone at the end of a fit
        self._optimizers: list[Dion] = []  # of the fit
        self._summaries: list[Summary] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._leave()  # a fit that did not end
        self._optimizers = [_ours(optimizer) for optimizer in trainer.optimizers]
        _leave_gradients(trainer.strategy, self._optimizers)
        self._wrap(trainer, "save_checkpoint", self._save_checkpoint)
        self._wrap(trainer.precision_plugin, "clip_gradients", partial(_clip, trainer))
        if self._logs and trainer.loggers:
            self._fit.enter_context(WireMeter())
            self._summaries = [Summary() for _ in self._optimizers]
            for number, optimizer in enumerate(self._optimizers):
                after_step = optimizer.register_step_post_hook(partial(self._add, number))
                self._fit.callback(after_step.remove)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every = trainer.log_every_n_steps  # 0: never
        for number, summary in enumerate(self._summaries):
            report = self._optimizers[number].report
            if report is not None and 0 < every <= summary.steps:
                prefix = f"curvadion{number if len(self._summaries) > 1 else ''}"
                values = {f"{prefix}/{k}": v for k, v in summary.scalars(report).items()}
                self._summaries[number] = Summary()
                for logger in trainer.loggers:
                    logger.log_metrics(values, step=trainer.global_step)

    def _agree(self, *_: Any, **__: Any) -> None:
        for optimizer in self._optimizers:
            optimizer.eval()

    on_validation_start = on_train_end = _agree

    def _add(self, number: int, optimizer: Any, *_: Any) -> None:
        self._summaries[number].add(optimizer.report)

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self._fit.callback(setattr, owner, name, wrap_method(owner, name, around))

    def _save_checkpoint(
        self,
        theirs: Callable[..., None],
        filepath: Any,
        weights_only: bool | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        for optimizer in self._optimizers:
            agree_for_a_file(optimizer, weights_only=bool(weights_only))
        theirs(filepath, weights_only, *args, **kwargs)

    def _leave(self, *_: Any, **__: Any) -> None:
        self._fit.close()
        self._optimizers, self._summaries = [], []

    on_exception = teardown = _leave


def _ours(optimizer: Optimizer) -> Dion:
    if isinstance(optimizer, Dion):
        return optimizer
    raise TypeError(
        f"configure_optimizers returned {type(optimizer).__name__}, but with the callback Replicas "
        f"every optimizer must be a CurvaDion or Dion: put other parameters into groups with "
        f"algorithm='adamw'."
    )


def _leave_gradients(strategy: Any, optimizers: list[Dion]) -> None:
    """Stop a strategy from averaging gradients over the optimizers' replicas."""
    name = type(strategy).__name__
    flat = any(isinstance(m, FullyShardedDataParallel) for m in strategy.model.modules())
    if flat or name == "DeepSpeedStrategy":
        raise RuntimeError(
            f"strategy={name} does not work with the callback Replicas: use ModelParallelStrategy "
            f"with fully_shard in configure_model, or curvadion.deepspeed without Lightning."
        )
    if not any(optimizer._replicas.size > 1 for optimizer in optimizers):
        return
    if any(optimizer._replicas.size == 1 for optimizer in optimizers):
        raise RuntimeError(
            "configure_optimizers returned optimizers with and without replicas, so nothing would "
            "average the gradients of the latter: pass the same replicas= to all of them."
        )
    keep_gradients_local(strategy.model)


def _clip(
    trainer: Any,
    theirs: Callable[..., None],
    optimizer: Any,
    clip_val: float = 0.0,
    gradient_clip_algorithm: Any = "norm",
) -> None:
    """A precision plugin's ``clip_gradients`` with one norm over all replicas."""
    if not clip_val or clip_val <= 0:
        return
    precision = trainer.precision_plugin
    if (scaler := getattr(precision, "scaler", None)) is not None:
        scaler.unscale_(optimizer)  # its step then does not unscale again
    if gradient_clip_algorithm == "value":
        precision.clip_grad_by_value(optimizer, clip_val)
    else:
        clip_grad_norm_(optimizer, clip_val)
