"""``deepspeed.zero.Init`` shards a model over the ranks of one replica, as the JSON says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from curvadion.integrations.deepspeed.config import OPTIMIZERS
from curvadion.integrations.deepspeed.gathering import apply_in_groups
from curvadion.integrations.deepspeed.process_groups import replica_groups
from curvadion.integrations.deepspeed.replicas import size_in
from curvadion.integrations.wrapping import bound, wrap_method

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


def patch(init_class: Any) -> None:
    """Let Init know ``replica_size``. Idempotent."""
    wrap_method(init_class, "__init__", _start)
    wrap_method(init_class, "patch_init_and_builtins", _patch_apply)


def _start(theirs: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    given = bound(theirs, self, *args, **kwargs)
    said = given.arguments
    if said["data_parallel_group"] is None and said["sequence_data_parallel_group"] is None:
        if _engines:
            said["data_parallel_group"] = _engines[-1]
        elif said["enabled"]:
            said["data_parallel_group"] = _group_in(said["config_dict_or_path"] or said["config"])
    theirs(*given.args, **given.kwargs)


def _patch_apply(theirs: Callable[..., Any], self: Any) -> None:
    theirs(self)
    if self.override_module_apply and self.dp_world_size < dist.get_world_size():
        original = getattr(nn.Module, "_old_apply")  # noqa: B009  # which DeepSpeed puts back
        setattr(nn.Module, "apply", apply_in_groups(original))  # noqa: B010


def _group_in(configuration: Any) -> dist.ProcessGroup | None:
    """The ranks of this replica; None if the configuration does not divide the ranks."""
    from deepspeed import init_distributed
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

    if configuration is None:
        return None
    settings = configuration if isinstance(configuration, dict) else load_ds_config(configuration)
    optimizer = settings.get("optimizer") or {}
    if optimizer.get("type") not in OPTIMIZERS:
        return None
    if not dist.is_initialized():
        init_distributed()
    world = dist.get_world_size()
    size = size_in(optimizer.get("params"), world)
    return None if size in (None, world) else replica_groups(size).inside
