"""Optimizers that frameworks build from a model, and what they say about them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from curvadion.comm.groups import count_of_ranks, is_first_rank
from curvadion.layout.placements import global_shape
from curvadion.optim.group_keys import DEFAULTS, with_defaults, without_effect
from curvadion.optim.param_groups import of_all_layers, param_groups
from curvadion.optim.replica_optimizer import ReplicaOptimizer
from curvadion.optim.replicated import Replicated

# The arguments of param_groups, without its model: settings beside those of an optimizer.
GROUP_ARGUMENTS = tuple(inspect.signature(param_groups).parameters)[1:]
MOST_NAMES = 5  # of a group that are printed
# Keys that are printed unless they have their default.
_PRINTED = ("stack_dims", "row_blocks", "column_blocks", "state_dtype")


def factory(
    kind: Callable[..., ReplicaOptimizer], **settings: Any
) -> tuple[Callable[[], Callable[..., ReplicaOptimizer]], dict[str, Any]]:
    """What ``transformers.Trainer`` takes as ``optimizer_cls_and_kwargs``.

    ::

        how = curvadion.factory(curvadion.Muon, lr=1e-3)
        trainer = Trainer(model=model, args=args, optimizer_cls_and_kwargs=how, ...)

    Trainer then builds ``kind(param_groups(model), ...)``. It averages gradients over all
    ranks at every step, as for AdamW, so this is for Muon and Dion in one process, under DDP
    and under FSDP2. These things only :func:`curvadion.integrations.huggingface.attach` does:

    - leave gradients to the optimizer, so that replicas rarely synchronise. On several ranks
      a CurvaDion with a budget raises an error here.
    - take ``learning_rate`` and ``weight_decay`` of TrainingArguments: pass ``lr`` and
      ``weight_decay`` here. Trainer's scheduler multiplies that ``lr``.
    - log ``curvadion/wire_bytes`` and so on.

    Args:
        kind: Muon, Dion, or CurvaDion in one process.
        settings: arguments of ``kind`` and of :func:`curvadion.param_groups`.

    Returns:
        A function without arguments, as Trainer expects, and ``settings``.

    Raises:
        TypeError: for Replicated, which is built around Trainer's own optimizer, for a name in
            place of a class, and for an unknown setting.
        ValueError: when Trainer builds the optimizer, if it needs ``attach``.
    """
    if wraps(kind):
        raise TypeError(
            "factory(Replicated) has no optimizer to wrap: call "
            "curvadion.integrations.huggingface.attach(trainer, Replicated, wire_budget=0.01)."
        )
    if not callable(kind):
        raise TypeError(f"kind={kind!r} must be a class, such as curvadion.Muon")
    # Another class may pass its arguments on: only its constructor knows them.
    if isinstance(kind, type) and kind.__module__.startswith("curvadion."):
        named = {*inspect.signature(kind).parameters, *GROUP_ARGUMENTS}
        with_defaults(kind, {key: settings[key] for key in settings if key not in named})

    def create() -> Callable[..., ReplicaOptimizer]:
        return partial(_with_mean_gradients, kind)

    return create, settings


def _with_mean_gradients(
    kind: Callable[..., ReplicaOptimizer], model: nn.Module, **settings: Any
) -> ReplicaOptimizer:
    """Build an optimizer for gradients that the framework averages; ValueError if it cannot be."""
    optimizer = from_model(kind, model, settings)
    ranks = count_of_ranks()
    shares_all = optimizer.gate.always_open and not optimizer.sync.every_step
    local = ranks > 1 and not (shares_all or optimizer.replicas.single)
    if local or optimizer.replicas.size > 1:
        raise ValueError(
            f"factory(gate={optimizer.gate!r}, sync={optimizer.sync!r}) on {ranks} ranks: Trainer "
            f"averages gradients at every step, and only "
            f"curvadion.integrations.huggingface.attach(trainer, ...) leaves them to the "
            f"optimizer. Use that, without optimizer_cls_and_kwargs, or factory(curvadion.Dion)."
        )
    print_updates(optimizer)
    return optimizer


def wraps(kind: Callable[..., ReplicaOptimizer]) -> bool:
    """Whether it is built around an optimizer, and not from parameters."""
    kind = getattr(kind, "func", kind)  # of functools.partial
    return isinstance(kind, type) and issubclass(kind, Replicated)


def from_model(
    kind: Callable[..., ReplicaOptimizer], model: nn.Module, settings: Mapping[str, Any]
) -> ReplicaOptimizer:
    """Build an optimizer; settings: its arguments, and those of ``param_groups``."""
    routing = {key: settings[key] for key in GROUP_ARGUMENTS if key in settings}
    options = {key: settings[key] for key in settings if key not in routing}
    return kind(param_groups(model, **routing), **options)


def _differs(group: Mapping[str, Any], key: str) -> bool:
    """Whether a group's value of a key is not the default."""
    return bool(group[key] != dict(DEFAULTS)[key])


def print_updates(optimizer: ReplicaOptimizer) -> None:
    """Print on rank 0 which parameters take which update."""
    if is_first_rank():
        print(updates(optimizer), flush=True)


def updates(optimizer: ReplicaOptimizer) -> str:
    """A line for each group: its update, rate, size and names; of several with * for numbers."""
    lines = [
        f"curvadion: {type(optimizer).__name__} with gate={optimizer.gate!r}, "
        f"sync={optimizer.sync!r}"
    ]
    kinds = {}  # of torch's optimizers inside Replicated, by group
    for one in getattr(optimizer.inner, "optimizers", ()):
        kinds.update({id(group): type(one).__name__ for group in one.param_groups})
    for group in optimizer.param_groups:
        if id(group) in kinds:
            update = kinds[id(group)]
        else:
            is_directed = group["algorithm"] == "dion"
            update = str(group["direction"] if is_directed else group["algorithm"])
            read = [key for key in _PRINTED if key not in without_effect(group)]
            update += "".join(f", {key}={group[key]!r}" for key in read if _differs(group, key))
        X = group["params"]
        elements = sum(math.prod(global_shape(x)) for x in X)
        names = list(group.get("param_names", ()))
        if len(names) > 1:
            names = [of_all_layers(name) for name in names]
        shown = list(dict.fromkeys(names))
        if len(shown) > MOST_NAMES:
            shown = [*shown[:MOST_NAMES], "…"]
        # An inner optimizer may compute its rates itself.
        rate = f", lr={float(group['lr']):g}" if "lr" in group else ""
        tensors = "1 tensor" if len(X) == 1 else f"{len(X)} tensors"
        line = f"  {update}{rate}: {tensors} of {elements:,} elements"
        lines.append(": ".join([line, ", ".join(shown)]) if shown else line)
    return "\n".join(lines)
