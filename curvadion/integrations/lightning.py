"""Lightning, from either package: a callback for a whole fit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch.distributed.fsdp import FullyShardedDataParallel

from curvadion.integrations.shared import agree, keep_gradients_local, wrap_method
from curvadion.metering.report import Summary
from curvadion.metering.wire import WireMeter
from curvadion.optim.clipping import clip_grad_norm_
from curvadion.optim.dion import Dion

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback  # type: ignore[assignment, unused-ignore]


class ReplicasCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Callback that lets CurvaDion or Dion synchronise replicas in place of Lightning.

    With DDP, or FSDP2 on a (replicate, shard) mesh, gradient averaging is left to the
    optimizer when ``fit`` starts. ``gradient_clip_val`` clips by one norm over all replicas.
    Weights are synchronised before validation, before a file of weights and at the end of
    training; all state before a checkpoint. Every ``log_every_n_steps`` steps the loggers get
    :meth:`curvadion.Summary.scalars` of the first optimizer, as ``curvadion/wire_bytes`` and
    so on.

    ``fit`` raises a TypeError if an optimizer is neither CurvaDion nor Dion, and a
    RuntimeError with FSDPStrategy and DeepSpeedStrategy, and if only some optimizers have
    replicas.

    log: whether to log, and to count bytes for the log. Example::

        lightning.Trainer(strategy="ddp", callbacks=[ReplicasCallback()]).fit(model, data)
    """

    def __init__(self, *, log: bool = True) -> None:
        self._logs = log
        self._fit = ExitStack()  # undone at the end of a fit
        self._optimizers: list[Dion] = []  # of the fit
        self._summary = Summary()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._optimizers, self._summary = trainer.optimizers, Summary()
        _leave_gradients(trainer.strategy, trainer.optimizers)
        self._wrap(trainer, "save_checkpoint", self._save_checkpoint)
        self._wrap(trainer.precision_plugin, "clip_gradients", partial(_clip, trainer))
        if self._logs and trainer.loggers:
            self._fit.enter_context(WireMeter())
            after_step = trainer.optimizers[0].register_step_post_hook(self._add)
            self._fit.callback(after_step.remove)

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        report, every = self._optimizers[0].report, trainer.log_every_n_steps  # 0: never
        if report is not None and 0 < every <= self._summary.steps:
            scalars = self._summary.scalars(report)
            values = {f"curvadion/{name}": value for name, value in scalars.items()}
            self._summary = Summary()
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.global_step)

    def _agree(self, *_: Any, **__: Any) -> None:
        agree(self._optimizers, weights_only=True)

    on_validation_start = on_train_end = _agree

    def _add(self, optimizer: Any, *_: Any) -> None:
        self._summary.add(optimizer.report)

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self._fit.callback(setattr, owner, name, wrap_method(owner, name, around))

    def _save_checkpoint(
        self, theirs: Any, filepath: Any, weights_only: Any = None, *more: Any, **options: Any
    ) -> None:
        agree(self._optimizers, weights_only=bool(weights_only))
        theirs(filepath, weights_only, *more, **options)

    def _leave(self, *_: Any, **__: Any) -> None:
        self._fit.close()
        self._optimizers = []

    on_exception = teardown = _leave


def _leave_gradients(strategy: Any, optimizers: list[Any]) -> None:
    for optimizer in optimizers:
        if not isinstance(optimizer, Dion):
            raise TypeError(
                f"configure_optimizers returned {type(optimizer).__name__} beside "
                f"ReplicasCallback: use CurvaDion or Dion, with groups of algorithm='adamw' for other "
                f"parameters."
            )
    flat = any(isinstance(m, FullyShardedDataParallel) for m in strategy.model.modules())
    if flat or type(strategy).__name__ == "DeepSpeedStrategy":
        raise RuntimeError(
            f"strategy={strategy!r} does not work with ReplicasCallback: use ModelParallelStrategy "
            f"and fully_shard, or curvadion.deepspeed without Lightning."
        )
    several = {optimizer._replicas.size > 1 for optimizer in optimizers}
    if several == {True, False}:
        raise RuntimeError(
            "configure_optimizers returned optimizers with and without replicas: pass the "
            "same replicas= to all, or nothing averages some gradients."
        )
    if several == {True}:
        keep_gradients_local(strategy.model)


def _clip(trainer: Any, theirs: Any, optimizer: Any, clip_val: float | None, how: Any) -> None:
    """A precision plugin's ``clip_gradients`` with one norm over all replicas."""
    if not clip_val or clip_val <= 0:
        return
    precision = trainer.precision_plugin
    if (scaler := getattr(precision, "scaler", None)) is not None:
        scaler.unscale_(optimizer)  # its step then does not unscale again
    if how == "value":
        precision.clip_grad_by_value(optimizer, clip_val)
    else:
        clip_grad_norm_(optimizer, clip_val)
