"""``deepspeed.zero.Init`` shards a model over the ranks of one replica, as the JSON says."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import nn

from curvadion.integrations.deepspeed import gathering
from curvadion.integrations.deepspeed.process_groups import ReplicaGroups, replica_groups
from curvadion.integrations.deepspeed.replicas import size_in

_ORIGINALS = "_curvadion_originals"
_METHODS = ("__init__", "_convert_to_deepspeed_param", "patch_init_and_builtins")
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


def patch(init_class: Any, names: Any) -> None:
    """Let Init know ``replica_size``; again is harmless.

    names: the optimizer types whose parameters count.
    """
    if not hasattr(init_class, _ORIGINALS):
        setattr(init_class, _ORIGINALS, [getattr(init_class, name) for name in _METHODS])
    start, convert, patch_modules = getattr(init_class, _ORIGINALS)
    signature = inspect.signature(start)

    @wraps(start)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        said, groups = given.arguments, None
        if said["data_parallel_group"] is None and said["sequence_data_parallel_group"] is None:
            if _engines:
                said["data_parallel_group"] = _engines[-1]
            elif said["enabled"]:
                configuration = said["config_dict_or_path"] or said["config"]
                groups = _groups_in(configuration, names)
                said["data_parallel_group"] = groups and groups.inside
        self._curvadion_between = groups and groups.between
        start(*given.args, **given.kwargs)

    @wraps(convert)
    def _convert_to_deepspeed_param(self: Any, parameter: Any) -> None:
        convert(self, parameter)
        if self._curvadion_between is not None:
            gathering.remember([parameter], self._curvadion_between)

    @wraps(patch_modules)
    def patch_init_and_builtins(self: Any) -> None:
        patch_modules(self)
        if self.override_module_apply and self.dp_world_size < dist.get_world_size():
            # DeepSpeed puts the original back.
            original = getattr(nn.Module, "_old_apply")  # noqa: B009
            setattr(nn.Module, "apply", gathering.apply_in_groups(original))  # noqa: B010

    for method in (__init__, _convert_to_deepspeed_param, patch_init_and_builtins):
        setattr(init_class, method.__name__, method)


def _groups_in(configuration: Any, names: Any) -> ReplicaGroups | None:
    """This rank's groups; None if the configuration does not divide the ranks."""
    from deepspeed import init_distributed
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

    if configuration is None:
        return None
    settings = configuration if isinstance(configuration, dict) else load_ds_config(configuration)
    optimizer = settings.get("optimizer") or {}
    if optimizer.get("type") not in names:
        return None
    if not dist.is_initialized():
        init_distributed()
    world = dist.get_world_size()
    size = size_in(optimizer.get("params"), world)
    return None if size in (None, world) else replica_groups(size)
