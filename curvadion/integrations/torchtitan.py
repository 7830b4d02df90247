"""torchtitan 0.3: a container of CurvaDion or Dion, and a trainer that uses it."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Annotated, Any

import torchtitan.trainer
import tyro
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import OptimizersContainer

from curvadion import checks
from curvadion.integrations.fsdp import keep_gradients_local
from curvadion.integrations.shared import KINDS, agree, run_before, wrap_method
from curvadion.optim.clipping import clip_grad_norm_
from curvadion.optim.dion import Dion
from curvadion.optim.param_groups import param_groups

Arguments = Annotated[dict[str, Any], tyro.conf.Suppress]
REPLICATE = "dp_replicate"  # torchtitan's mesh dimension of replicas


class ReplicaOptimizers(OptimizersContainer):  # type: ignore[misc, unused-ignore]
    """Container of one CurvaDion or Dion per model part, in place of torchtitan's.

    Replicas are along the ``dp_replicate`` dimension of the parts' meshes. Call
    :func:`attach` on the trainer; :class:`Trainer` does so itself. ValueError or TypeError
    for wrong settings.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc, unused-ignore]
        """Builds ``kind(param_groups(part, **groups), **options)``.

        ``replicas`` is derived from the mesh; the option "single" leaves the averaging to
        FSDP.
        """

        kind: str = "CurvaDion"
        options: Arguments = dataclasses.field(default_factory=dict)
        groups: Arguments = dataclasses.field(default_factory=dict)

    def __init__(self, config: Any, *, model_parts: list[nn.Module]) -> None:
        checks.one_of("kind", config.kind, tuple(KINDS))
        if config.param_groups:
            raise ValueError("param_groups must be empty: pass groups={'patterns': ...} instead.")
        self.model_parts = model_parts
        self.max_norm: float | None = None  # for clipping at each step; None before attach
        self.optimizers = [_build(config, part) for part in model_parts]
        groups = [group for one in self.optimizers for group in one.param_groups]
        trained = [x for group in groups for x in group["params"]]
        self._validate_params(trained)
        self._post_init(trained)

    def step(self, closure: None = None) -> None:
        """Clip gradients and take a step; collective. RuntimeError before :func:`attach`."""
        if self.max_norm is None:
            raise RuntimeError("call curvadion.integrations.torchtitan.attach(trainer) first")
        if self.max_norm != math.inf:
            for optimizer in self.optimizers:
                clip_grad_norm_(optimizer, self.max_norm)
        super().step(closure)

    def agree(self, *, exact: bool) -> None:
        """Synchronise replicas: all state for a checkpoint, else weights; collective."""
        agree(self.optimizers, weights_only=not exact)


def _build(config: Any, part: nn.Module) -> Dion:
    meshes = (x.device_mesh for x in part.parameters() if isinstance(x, DTensor))
    replicas = (mesh[REPLICATE] for mesh in meshes if REPLICATE in (mesh.mesh_dim_names or ()))
    options = {"replicas": next(replicas, None), **config.options}
    optimizer = KINDS[config.kind](param_groups(part, **config.groups), **options)
    if (size := optimizer._replicas.size) > 1:
        keep_gradients_local(part)
        for module in part.modules():
            if isinstance(module, FSDPModule):
                # torchtitan divides losses by the tokens of all ranks, not of one replica.
                module.set_gradient_divide_factor(1 / size)
    return optimizer


def attach(trainer: Any) -> None:
    """Make a Trainer clip, save and evaluate through its :class:`ReplicaOptimizers`.

    Call it before ``train``. TypeError if the trainer has other optimizers; RuntimeError
    under pipeline parallelism, and if it is attached already.
    """
    optimizers, checkpointer = trainer.optimizers, trainer.checkpointer
    if not isinstance(optimizers, ReplicaOptimizers):
        raise TypeError(
            f"trainer.optimizers is a {type(optimizers).__name__}: configure the trainer "
            f"with optimizer=ReplicaOptimizers.Config(...)."
        )
    if trainer.parallel_dims.pp_enabled:  # each stage would have its own norm and gate
        raise RuntimeError("parallelism.pipeline_parallel_degree must be 1")
    if optimizers.max_norm is not None:
        raise RuntimeError("trainer is attached already: call attach(trainer) once.")
    training = trainer.config.training
    optimizers.max_norm = training.max_norm
    unclipped = dataclasses.replace(training, max_norm=math.inf)
    trainer.config = dataclasses.replace(trainer.config, training=unclipped)

    def save(decide: Any, curr_step: int, last_step: bool = False) -> bool:
        saves = bool(decide(curr_step, last_step))
        if saves:
            last = last_step and getattr(checkpointer, "last_save_model_only", False)
            optimizers.agree(exact=not last)
        return saves

    wrap_method(checkpointer, "_should_save", save)
    if trainer.config.validator.enable:
        run_before(trainer.validator, "validate", partial(optimizers.agree, exact=False))


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
    """Return a :class:`Trainer.Config` with optimizers of ``kind``, "CurvaDion" or "Dion".

    config: a ``torchtitan.trainer.Trainer.Config``, such as ``llama3_8b()``. groups: keyword
    arguments of ``curvadion.param_groups``. options: those of the optimizer.
    """
    if type(config) not in (torchtitan.trainer.Trainer.Config, Trainer.Config):
        raise TypeError(
            f"config={type(config).__qualname__} is another trainer's: set "
            f"optimizer=ReplicaOptimizers.Config(...) and call attach(trainer)."
        )
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    values["optimizer"] = ReplicaOptimizers.Config(kind=kind, options=options, groups=groups or {})
    return Trainer.Config(**values)
