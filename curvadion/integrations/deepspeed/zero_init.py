"""``deepspeed.zero.Init`` shards a model over the ranks of one replica, as the JSON says.

Weights that are changed by hand, gathered, become those of all replicas: DeepSpeed broadcasts them
inside a replica, after ``GatheredParameters(modifier_rank=...)`` and ``Module.apply``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from curvadion.integrations.deepspeed.replicas import of_a_replica, replica_groups, size_in
from curvadion.integrations.shared import KINDS, wrap_method

# DeepSpeed shards a whole model by itself, and does not tell Init the engine's group.
_engines: list[dist.ProcessGroup | None] = []


@contextmanager
def sharding_over(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Inside, models are sharded over these ranks if nothing else is said; None: over all."""
    _engines.append(group)
    try:
        yield
    finally:
        _engines.pop()


def patch(init_class: Any, gathered_class: Any) -> None:
    """Let Init know ``replica_size``, and GatheredParameters reach all replicas."""
    wrap_method(init_class, "__init__", _init)
    wrap_method(init_class, "patch_init_and_builtins", _patch_apply)
    wrap_method(gathered_class, "__init__", _gather)
    wrap_method(gathered_class, "__exit__", _leave)


def _init(theirs: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    given = inspect.signature(theirs).bind(self, *args, **kwargs)
    given.apply_defaults()
    said = given.arguments
    if said["data_parallel_group"] is None and said["sequence_data_parallel_group"] is None:
        if _engines:
            said["data_parallel_group"] = _engines[-1]
        elif said["enabled"]:
            said["data_parallel_group"] = _group_in(said["config_dict_or_path"] or said["config"])
    theirs(*given.args, **given.kwargs)


def _group_in(configuration: Any) -> dist.ProcessGroup | None:
    """The ranks of this replica; None if the configuration does not divide the ranks."""
    from deepspeed import init_distributed
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

    if configuration is None:
        return None
    settings = configuration if isinstance(configuration, dict) else load_ds_config(configuration)
    optimizer = settings.get("optimizer") or {}
    if optimizer.get("type") not in KINDS:
        return None
    if not dist.is_initialized():
        init_distributed()
    world = dist.get_world_size()
    size = size_in(optimizer.get("params"), world)
    return None if size in (None, world) else replica_groups(size)[0]


def _gather(
    theirs: Callable[..., Any],
    self: Any,
    params: Any,
    modifier_rank: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Users name a rank of all, DeepSpeed one of a replica."""
    params = [params] if isinstance(params, Tensor) else list(params)
    self._curvadion_source = modifier_rank if any(map(of_a_replica, params)) else None
    inside = modifier_rank if self._curvadion_source is None else 0
    theirs(self, params, inside, *args, **kwargs)


def _leave(theirs: Callable[..., Any], self: Any, *raised: Any) -> Any:
    if self.enabled and self._curvadion_source is not None:
        for p in filter(of_a_replica, self.params):
            dist.broadcast(p.data, self._curvadion_source)
    return theirs(self, *raised)


def _patch_apply(theirs: Callable[..., Any], self: Any) -> None:
    theirs(self)
    if self.override_module_apply and self.dp_world_size < dist.get_world_size():
        original = getattr(nn.Module, "_old_apply")  # noqa: B009  # which DeepSpeed puts back
        # DeepSpeed's own broadcasts from rank 0, which only the group of the first replica has.
        apply = lambda module, function: original(module, _on_gathered(function))  # noqa: E731
        setattr(nn.Module, "apply", apply)  # noqa: B010


def _on_gathered(function: Any) -> Any:
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    if hasattr(function, "wrapped"):  # apply calls itself for each child
        return function

    @wraps(function)
    def on_gathered(module: nn.Module) -> None:
        with GatheredParameters(module.parameters(recurse=False), modifier_rank=0):
            function(module)

    setattr(on_gathered, "wrapped", True)  # noqa: B010
    return on_gathered
