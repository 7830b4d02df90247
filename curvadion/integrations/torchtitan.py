"""torchtitan 0.3: a container of optimizers of replicas, and a trainer that uses it."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Annotated, Any

import torchtitan.trainer
import tyro
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import OptimizersContainer

from curvadion import checks
from curvadion.integrations.fsdp import keep_gradients_local
from curvadion.integrations.shared import KINDS, run_before, synchronize_replicas, wrap_method
from curvadion.optim.clipping import clip_grad_norm_
from curvadion.optim.factory import print_updates
from curvadion.optim.muon import Muon
from curvadion.optim.param_groups import param_groups
from curvadion.optim.replica_optimizer import ReplicaOptimizer
from curvadion.optim.replicated import Replicated

NAMED = {**KINDS, "Muon": Muon}  # in KINDS it would be mistaken for DeepSpeed's own
Arguments = Annotated[dict[str, Any], tyro.conf.Suppress]
REPLICATE = "dp_replicate"  # torchtitan's mesh dimension of replicas
REPLICATED = "Replicated"  # the kind whose inner optimizers torchtitan builds


class ReplicaOptimizers(OptimizersContainer):  # type: ignore[misc, unused-ignore]
    """Container of one CurvaDion, Dion or Replicated per model part, in place of torchtitan's.

    When it is built, rank 0 prints which parameters take which update.

    Replicas are along the ``dp_replicate`` dimension of the parts' meshes. Call
    :func:`attach` on the trainer; :class:`Trainer` does so itself.

    Raises:
        TypeError, ValueError: for wrong settings.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc, unused-ignore]
        """Builds ``kind(param_groups(part, **groups), **options)``.

        With kind="Replicated" it builds ``Replicated(inner, **options)``, where inner are the
        optimizers that torchtitan builds for the part from ``param_groups``.

        Args:
            kind: "CurvaDion", "Dion", "Muon" or "Replicated".
            options: arguments of the optimizer. CurvaDion needs one that says when replicas
                synchronise, such as ``wire_budget=0.01``; Dion suits a single replica.
                ``replicas`` is derived from the mesh; "single" leaves the averaging to FSDP.
            groups: arguments of :func:`curvadion.param_groups`; not for "Replicated".
        """

        kind: str = "CurvaDion"
        options: Arguments = dataclasses.field(default_factory=dict)
        groups: Arguments = dataclasses.field(default_factory=dict)

    def __init__(self, config: Any, *, model_parts: list[nn.Module]) -> None:
        checks.one_of("kind", config.kind, (*NAMED, REPLICATED))
        _check_groups(config)
        self.model_parts = model_parts
        self.max_norm: float | None = None  # for clipping at each step; None before attach
        self.optimizers = [_build(config, part) for part in model_parts]
        for optimizer in self.optimizers:
            print_updates(optimizer)
        parameters = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                parameters.extend(group["params"])
        self._validate_params(parameters)
        self._post_init(parameters)

    def step(self, closure: None = None) -> None:
        """Clip gradients and take a step; collective.

        Raises:
            RuntimeError: before :func:`attach`.
        """
        if self.max_norm is None:
            raise RuntimeError(
                "ReplicaOptimizers does not know the trainer's max_norm: call "
                "curvadion.integrations.torchtitan.attach(trainer) first."
            )
        if self.max_norm != math.inf:
            for optimizer in self.optimizers:
                clip_grad_norm_(optimizer, self.max_norm)
        super().step(closure)

    def synchronize(self, *, exact: bool) -> None:
        """Synchronise replicas: all state for a checkpoint, else weights; collective."""
        synchronize_replicas(self.optimizers, weights_only=not exact)


def _check_groups(config: Any) -> None:
    """Raise ValueError for groups that the kind does not take, or lacks."""
    if config.kind != REPLICATED and config.param_groups:
        raise ValueError(
            f"param_groups={config.param_groups!r} must be empty: pass "
            f"groups={{'patterns': ...}} instead."
        )
    if config.kind == REPLICATED and (config.groups or not config.param_groups):
        raise ValueError(
            f"groups={config.groups!r} and param_groups={config.param_groups!r} with "
            f"kind='Replicated': configure the optimizers inside by torchtitan's own "
            f"param_groups=[ParamGroupConfig(...)] only."
        )


def _build(config: Any, part: nn.Module) -> ReplicaOptimizer:
    """Build the optimizer of a model part, and leave its replicas' gradients local."""
    options = {"replicas": _replicas_of(part), **config.options}
    optimizer: ReplicaOptimizer
    if config.kind == REPLICATED:
        inner = OptimizersContainer(config, model_parts=[part])
        optimizer = Replicated(inner.optimizers, **options)
    else:
        optimizer = NAMED[config.kind](param_groups(part, **config.groups), **options)
    size = optimizer.replicas.size
    if size > 1:
        keep_gradients_local(part)
        for module in part.modules():
            if isinstance(module, FSDPModule):
                # torchtitan divides losses by the tokens of all ranks, not of one replica.
                module.set_gradient_divide_factor(1 / size)
    return optimizer


def _replicas_of(part: nn.Module) -> DeviceMesh | None:
    """The mesh dimension of a model part's replicas; None if there is only one."""
    for x in part.parameters():
        if isinstance(x, DTensor) and REPLICATE in (x.device_mesh.mesh_dim_names or ()):
            return x.device_mesh[REPLICATE]
    return None


def attach(trainer: Any) -> None:
    """Make a Trainer clip, save and evaluate through its :class:`ReplicaOptimizers`.

    Call it before ``train``.

    Raises:
        TypeError: if the trainer has other optimizers.
        RuntimeError: under pipeline parallelism, and if it is attached already.
    """
    optimizers = trainer.optimizers
    checkpointer = trainer.checkpointer
    if not isinstance(optimizers, ReplicaOptimizers):
        raise TypeError(
            f"trainer.optimizers is a {type(optimizers).__name__}: configure the trainer "
            f"with optimizer=ReplicaOptimizers.Config(...)."
        )
    if trainer.parallel_dims.pp_enabled:  # each stage would have its own norm and gate
        raise RuntimeError(
            f"parallelism.pipeline_parallel_degree="
            f"{trainer.config.parallelism.pipeline_parallel_degree} must be 1: shard the model "
            f"by FSDP or tensor parallelism instead."
        )
    if optimizers.max_norm is not None:
        raise RuntimeError("trainer is attached already: call attach(trainer) once.")
    training = trainer.config.training
    optimizers.max_norm = training.max_norm
    # The trainer then measures the norm, of one replica, and leaves clipping to the container.
    unclipped = dataclasses.replace(training, max_norm=math.inf)
    trainer.config = dataclasses.replace(trainer.config, training=unclipped)

    def should_save(original: Any, curr_step: int, last_step: bool = False) -> bool:
        saves = bool(original(curr_step, last_step))
        if saves:
            model_only = last_step and getattr(checkpointer, "last_save_model_only", False)
            optimizers.synchronize(exact=not model_only)
        return saves

    wrap_method(checkpointer, "_should_save", should_save)
    if trainer.config.validator.enable:
        run_before(trainer.validator, "validate", partial(optimizers.synchronize, exact=False))


class Trainer(torchtitan.trainer.Trainer):  # type: ignore[misc, unused-ignore]
    """torchtitan's trainer, attached."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(torchtitan.trainer.Trainer.Config):  # type: ignore[misc, unused-ignore]
        """As torchtitan's."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        attach(self)


def with_curvadion(
    config: Any,
    *,
    kind: str = "CurvaDion",
    groups: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A :class:`Trainer.Config` with CurvaDion, Dion or Muon in place of its optimizers.

    With kind="Replicated" its optimizers are kept, inside Replicated.

    Args:
        config: a ``torchtitan.trainer.Trainer.Config``, such as ``llama3_8b()``.
        kind: "CurvaDion", "Dion", "Muon" or "Replicated".
        groups: keyword arguments of :func:`curvadion.param_groups`; not for "Replicated".
        options: keyword arguments of the optimizer; for CurvaDion ``wire_budget=0.01`` or
            another gate.

    Raises:
        TypeError: if ``config`` is of another trainer.
    """
    if type(config) not in (torchtitan.trainer.Trainer.Config, Trainer.Config):
        raise TypeError(
            f"config={type(config).__qualname__} is another trainer's: set "
            f"optimizer=ReplicaOptimizers.Config(...) and call attach(trainer)."
        )
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    inner: dict[str, Any] = {}
    if kind == REPLICATED:
        for field in dataclasses.fields(OptimizersContainer.Config):
            inner[field.name] = getattr(config.optimizer, field.name)
    values["optimizer"] = ReplicaOptimizers.Config(
        kind=kind, options=options, groups=groups or {}, **inner
    )
    return Trainer.Config(**values)
