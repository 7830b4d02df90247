"""``deepspeed.zero.Init`` shards a model over the ranks of one replica, as the JSON says."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist

from curvadion.integrations.deepspeed.process_groups import replica_groups
from curvadion.integrations.deepspeed.replicas import size_in

_ORIGINAL = "_curvadion_original_init"
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
    if not hasattr(init_class, _ORIGINAL):
        setattr(init_class, _ORIGINAL, init_class.__init__)
    original = getattr(init_class, _ORIGINAL)
    signature = inspect.signature(original)

    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        said = given.arguments
        if said["data_parallel_group"] is None and said["sequence_data_parallel_group"] is None:
            if _engines:
                said["data_parallel_group"] = _engines[-1]
            elif said["enabled"]:
                configuration = said["config_dict_or_path"] or said["config"]
                said["data_parallel_group"] = _group_in(configuration, names)
        original(*given.args, **given.kwargs)

    init_class.__init__ = __init__


def _group_in(configuration: Any, names: Any) -> dist.ProcessGroup | None:
    """The ranks of this replica; None if the configuration does not divide them."""
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
    return None if size in (None, world) else replica_groups(size).inside
