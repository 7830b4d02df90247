"""Lightning: a callback with which replicas train, are evaluated, saved and resumed.

Works with ``lightning`` and with ``pytorch_lightning``. This module needs one of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from curvadion import checks
from curvadion.integrations import ddp, fsdp
from curvadion.integrations.saving import agree_for_a_file
from curvadion.metering.report import StepReport, Summary
from curvadion.metering.wire import WireMeter
from curvadion.optim.clipping import clip_grad_norm_
from curvadion.optim.dion import Dion

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback  # type: ignore[assignment, unused-ignore]


_AVERAGE = {"WeightAveraging", "StochasticWeightAveraging"}
"""Lightning's callbacks that average weights; not all of its versions have them."""


class Replicas(Callback):  # type: ignore[misc, unused-ignore]
    """Lets CurvaDion or Dion synchronise what Lightning would average.

    On DDP, or FSDP2 with a mesh of (replicate, shard), gradients are left to the optimizer when
    ``fit`` starts. ``gradient_clip_val`` clips by one norm over all replicas, and by value as
    ever. Validation starts with ``optimizer.eval()``, and training ends with it. A checkpoint
    keeps one replica's state, so ``optimizer.synchronize(exact=True)`` comes before it, on all
    ranks, and ``eval()`` before one of weights only. Budgets count both; nothing is sent where
    replicas agree.

    Every ``log_every_n_steps`` steps the loggers get, under ``curvadion/``: since the last time,
    ``wire_bytes`` (a step, of all collectives of rank 0), ``open_gate_share``, ``skipped_steps``
    and ``waited_seconds``; of the last step, ``rmmc`` and ``local_steps``. With several optimizers
    it is ``curvadion0/``, ``curvadion1/`` and so on.

    ``fit`` raises a TypeError if an optimizer is neither CurvaDion nor Dion, because under DDP its
    gradients would no longer be averaged. It raises a RuntimeError with FSDPStrategy (FSDP1) and
    DeepSpeedStrategy, if only some of several optimizers have replicas, and if the model's DDP has
    a communication hook. It warns of callbacks that average weights over steps (EMA, SWA).

    Example::

        class Model(lightning.LightningModule):
            def configure_optimizers(self):
                groups = curvadion.param_groups(self)
                return curvadion.CurvaDion(groups, replicas=dist.group.WORLD, wire_budget=0.01)

        lightning.Trainer(strategy="ddp", callbacks=[Replicas()]).fit(Model(), data)

    Args:
        log: whether to log, and to count bytes for it.
    """

    def __init__(self, *, log: bool = True) -> None:
        self._logs = log
        self._undo: list[Callable[[], None]] = []
        self._tallies: list[_Tally] = []

    # ---------------------------------------------------------------- hooks

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._leave()  # of a fit that did not end
        if sum(isinstance(callback, Replicas) for callback in trainer.callbacks) > 1:
            raise RuntimeError("callbacks has several Replicas(): give Trainer one.")
        optimizers = [_ours(optimizer) for optimizer in trainer.optimizers]
        _leave_gradients(trainer.strategy, optimizers)
        if any(optimizer._replicas.size > 1 for optimizer in optimizers):
            _warn_of_averages(trainer.callbacks)
        self._replace(trainer, "save_checkpoint", _save_checkpoint(trainer))
        self._replace(trainer.precision_plugin, "clip_gradients", _clip(trainer.precision_plugin))
        if self._logs and trainer.loggers:
            self._tallies = [_Tally(optimizer) for optimizer in optimizers]
            meter = WireMeter()
            meter.__enter__()
            self._undo.append(lambda: meter.__exit__())

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for number, tally in enumerate(self._tallies):
            every = trainer.log_every_n_steps  # 0: never
            if tally.add() and 0 < every <= tally.summary.steps:
                values = tally.take(f"curvadion{number if len(self._tallies) > 1 else ''}")
                for logger in trainer.loggers:
                    logger.log_metrics(values, step=trainer.global_step)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._agree(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._agree(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._leave()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._leave()

    # ---------------------------------------------------------------- what they do

    def _agree(self, trainer: Any) -> None:
        # Outside fit, in validate and test, optimizers may be left over from an earlier fit.
        if self._undo:
            for optimizer in trainer.optimizers:
                optimizer.eval()

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Give one object another method, until the fit ends."""
        if name in vars(owner):
            self._undo.append(partial(setattr, owner, name, vars(owner)[name]))
        else:
            self._undo.append(partial(delattr, owner, name))
        setattr(owner, name, function)

    def _leave(self) -> None:
        self._tallies = []
        while self._undo:
            self._undo.pop()()


def _ours(optimizer: Optimizer) -> Dion:
    if isinstance(optimizer, Dion):
        return optimizer
    raise TypeError(
        f"configure_optimizers returned {type(optimizer).__name__}, but with the callback Replicas "
        f"every optimizer must be a CurvaDion or Dion: gradients are no longer averaged. Give "
        f"CurvaDion's groups algorithm='adamw' where AdamW is wanted."
    )


def _leave_gradients(strategy: Any, optimizers: list[Dion]) -> None:
    """Stop a strategy from averaging gradients over what the optimizers call replicas."""
    model: nn.Module = strategy.model
    name = type(strategy).__name__
    if name == "DeepSpeedStrategy":
        raise RuntimeError(
            f"strategy={name} builds an engine of its own: use curvadion.deepspeed without "
            f"Lightning, or ModelParallelStrategy with fully_shard in configure_model."
        )
    modules = list(model.modules())
    if any(isinstance(module, FullyShardedDataParallel) for module in modules):
        raise RuntimeError(
            f"strategy={name} shards with FSDP1, whose flat shards nobody declares in time here: "
            f"use ModelParallelStrategy with fully_shard in configure_model."
        )
    if not any(optimizer._replicas.size > 1 for optimizer in optimizers):
        return
    if any(optimizer._replicas.size == 1 for optimizer in optimizers):
        raise RuntimeError(
            "configure_optimizers returned optimizers with and without replicas, and nothing would "
            "average the gradients of the latter: give all of them the same replicas=."
        )
    if any(isinstance(module, DistributedDataParallel) for module in modules):
        ddp.keep_gradients_local(model)
    elif any(isinstance(module, FSDPModule) for module in modules):
        fsdp.keep_gradients_local(model)


def _warn_of_averages(callbacks: Sequence[Any]) -> None:
    for callback in callbacks:
        if _AVERAGE.intersection(kind.__name__ for kind in type(callback).__mro__):
            warnings.warn(
                f"{type(callback).__name__} averages the weights of each replica over steps, and "
                f"the model takes this average at the end of fit: replicas then hold different "
                f"weights. Call optimizer.broadcast_weights() on all ranks after fit.",
                stacklevel=checks.user_stacklevel(),
            )


def _save_checkpoint(trainer: Any) -> Callable[..., None]:
    """Trainer.save_checkpoint, which all ranks call, after the replicas agree."""
    save = trainer.save_checkpoint

    def save_checkpoint(
        filepath: Any, weights_only: bool | None = None, *args: Any, **keywords: Any
    ) -> None:
        for optimizer in trainer.optimizers:
            agree_for_a_file(optimizer, weights_only=bool(weights_only))
        save(filepath, weights_only, *args, **keywords)

    return save_checkpoint


def _clip(precision: Any) -> Callable[..., None]:
    """A precision plugin's ``clip_gradients`` with one norm over all replicas."""

    def clip_gradients(
        optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        if not clip_val or clip_val <= 0:
            return
        if (scaler := getattr(precision, "scaler", None)) is not None:
            scaler.unscale_(optimizer)  # its step leaves it out then
        if gradient_clip_algorithm == "value":
            precision.clip_grad_by_value(optimizer, clip_val)
        else:
            clip_grad_norm_(optimizer, clip_val)

    return clip_gradients


class _Tally:
    """What an optimizer has reported since it was last asked."""

    def __init__(self, optimizer: Dion) -> None:
        self._optimizer = optimizer
        self._last: StepReport | None = optimizer.report
        self.summary = Summary()

    def add(self) -> bool:
        """Whether the optimizer has taken a step since the last call."""
        report = self._optimizer.report
        if report is None or report is self._last:
            return False
        self._last = report
        self.summary.add(report)
        return True

    def take(self, prefix: str) -> dict[str, float]:
        """What loggers are told, after which it begins anew."""
        summary, self.summary = self.summary, Summary()
        last = self._last
        assert last is not None
        return {f"{prefix}/{name}": value for name, value in summary.scalars(last).items()}
