"""Lightning, from either package: a callback for a whole fit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch.distributed.fsdp import FullyShardedDataParallel

from curvadion.integrations.shared import keep_gradients_local, synchronize_replicas, wrap_method
from curvadion.metering.report import Summary
from curvadion.metering.wire import WireMeter
from curvadion.optim.clipping import clip_grad_norm_
from curvadion.optim.factory import print_updates
from curvadion.optim.replica_optimizer import ReplicaOptimizer

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback  # type: ignore[assignment, unused-ignore]


class ReplicasCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Callback that lets optimizers synchronise replicas in place of Lightning.

    ``configure_optimizers`` returns a CurvaDion, Dion, Muon or Replicated. With DDP, or FSDP2 on a
    (replicate, shard) mesh, gradient averaging is left to the optimizer when ``fit`` starts.
    ``gradient_clip_val`` clips by one norm over all replicas. Weights are synchronised before
    validation, before a file of weights and at the end of training; all state before a
    checkpoint. Every ``log_every_n_steps`` steps the loggers get
    :meth:`curvadion.Summary.scalars` of the first optimizer, as ``curvadion/wire_bytes`` and
    so on. When ``fit`` starts, rank 0 prints which parameters take which update.

    Example::

        lightning.Trainer(strategy="ddp", callbacks=[ReplicasCallback()]).fit(model, data)

    Args:
        log: whether to log, and to count bytes for the log.

    Raises:
        TypeError: from ``fit``, if an optimizer is not of this package.
        RuntimeError: from ``fit``, with FSDPStrategy and DeepSpeedStrategy, and if only some
            optimizers have replicas.
    """

    def __init__(self, *, log: bool = True) -> None:
        self._logs = log
        self._fit = ExitStack()  # what is undone at the end of a fit
        self._optimizers: list[ReplicaOptimizer] = []  # of the fit
        self._summary = Summary()  # of the steps since the last log

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._optimizers = trainer.optimizers
        self._summary = Summary()
        _leave_gradients_to_optimizers(trainer.strategy, trainer.optimizers)
        for optimizer in self._optimizers:
            print_updates(optimizer)
        self._wrap(trainer, "save_checkpoint", self._save_checkpoint)
        clip_gradients = partial(_clip_gradients, trainer)
        self._wrap(trainer.precision_plugin, "clip_gradients", clip_gradients)
        if self._logs and trainer.loggers:
            self._fit.enter_context(WireMeter())
            step_hook = trainer.optimizers[0].register_step_post_hook(self._add_report)
            self._fit.callback(step_hook.remove)

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        report = self._optimizers[0].report
        interval = trainer.log_every_n_steps  # 0: never
        if report is not None and 0 < interval <= self._summary.steps:
            scalars = self._summary.scalars(report)
            values = {f"curvadion/{name}": value for name, value in scalars.items()}
            self._summary = Summary()
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.global_step)

    def _synchronize_weights(self, *_: Any, **__: Any) -> None:
        synchronize_replicas(self._optimizers, weights_only=True)

    on_validation_start = _synchronize_weights
    on_train_end = _synchronize_weights

    def _add_report(self, optimizer: Any, *_: Any) -> None:
        self._summary.add(optimizer.report)

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Wrap a method until the fit ends."""
        original = wrap_method(owner, name, around)
        self._fit.callback(setattr, owner, name, original)

    def _save_checkpoint(
        self, original: Any, filepath: Any, weights_only: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        synchronize_replicas(self._optimizers, weights_only=bool(weights_only))
        original(filepath, weights_only, *args, **kwargs)

    def _end_fit(self, *_: Any, **__: Any) -> None:
        self._fit.close()
        self._optimizers = []

    on_exception = _end_fit
    teardown = _end_fit


def _leave_gradients_to_optimizers(strategy: Any, optimizers: list[Any]) -> None:
    """Keep gradients local if there are replicas; raise an error if that cannot work."""
    for optimizer in optimizers:
        if not isinstance(optimizer, ReplicaOptimizer):
            raise TypeError(
                f"configure_optimizers returned {type(optimizer).__name__} beside "
                f"ReplicasCallback: return Replicated({type(optimizer).__name__}(...), "
                f"replicas=...), or give all parameters to CurvaDion or Dion."
            )
    modules = strategy.model.modules()
    fsdp1 = any(isinstance(module, FullyShardedDataParallel) for module in modules)
    if fsdp1 or type(strategy).__name__ == "DeepSpeedStrategy":
        raise RuntimeError(
            f"strategy={strategy!r} does not work with ReplicasCallback: use "
            f"ModelParallelStrategy and fully_shard, or curvadion.deepspeed without Lightning."
        )
    with_replicas = [optimizer.replicas.size > 1 for optimizer in optimizers]
    if any(with_replicas) and not all(with_replicas):
        raise RuntimeError(
            "configure_optimizers returned optimizers with and without replicas: pass the "
            "same replicas= to all, or nothing averages some gradients."
        )
    if any(with_replicas):
        keep_gradients_local(strategy.model)


def _clip_gradients(
    trainer: Any,
    original: Any,
    optimizer: Any,
    clip_val: float | None,
    gradient_clip_algorithm: Any,
) -> None:
    """A precision plugin's ``clip_gradients``, but by one norm over all replicas.

    Args:
        trainer: of the fit.
        original: the plugin's own method, which is not called.
        optimizer: whose gradients are clipped.
        clip_val: the largest norm, or absolute value; None or 0 does not clip.
        gradient_clip_algorithm: "norm", or "value" to clip each element.
    """
    if not clip_val or clip_val <= 0:
        return
    precision = trainer.precision_plugin
    scaler = getattr(precision, "scaler", None)  # of float16
    if scaler is not None:
        scaler.unscale_(optimizer)  # its step then does not unscale again
    if gradient_clip_algorithm == "value":
        precision.clip_grad_by_value(optimizer, clip_val)
    else:
        clip_grad_norm_(optimizer, clip_val)
