"""Weights of stage 3 that are changed by hand, gathered, become those of all replicas.

DeepSpeed broadcasts them inside a replica: after ``GatheredParameters(modifier_rank=...)``, and
under ``zero.Init`` after ``Module.apply``. Users name ranks of all, and write on one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from curvadion.integrations.deepspeed.process_groups import other_replicas
from curvadion.integrations.wrapping import bound, wrap_method


def patch(gathered_class: Any) -> None:
    """Let GatheredParameters reach all replicas. Idempotent."""
    wrap_method(gathered_class, "__init__", _start)
    wrap_method(gathered_class, "__exit__", _leave)


def _start(theirs: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    given = bound(theirs, self, *args, **kwargs)
    said, self._curvadion_source = given.arguments, None
    if said["enabled"] and said["modifier_rank"] is not None:
        if isinstance(said["params"], Iterable) and not isinstance(said["params"], Tensor):
            said["params"] = list(said["params"])  # a generator gives them once
        self._curvadion_source = _source(said["params"], said["modifier_rank"])
        said["modifier_rank"] = self._curvadion_source[0]
    theirs(*given.args, **given.kwargs)


def _leave(theirs: Callable[..., Any], self: Any, *raised: Any) -> Any:
    if self.enabled and self._curvadion_source is not None:
        _share(self.params, *self._curvadion_source)
    return theirs(self, *raised)


def _source(params: Any, modifier_rank: int) -> tuple[int, int]:
    """The place of the modifying rank in its replica, which DeepSpeed expects, and the replica."""
    given = params if isinstance(params, list) else [params]
    sharded = [p for p in given if hasattr(p, "ds_id")]
    if all(other_replicas(p) is None for p in sharded):
        return modifier_rank, 0
    sizes = {p.ds_process_group.size() for p in sharded}
    if len(sizes) > 1:
        raise ValueError(
            f"modifier_rank={modifier_rank}: gather parameters one by one if some are sharded over "
            f"other ranks"
        )
    replica, place = divmod(modifier_rank, sizes.pop())
    return place, replica


def _share(params: Iterable[Any], place: int, replica: int) -> None:
    """Give gathered weights of one replica to all, on the ranks that broadcast inside next."""
    for p in params:
        between = other_replicas(p)
        if between is not None and dist.get_rank(p.ds_process_group) == place:
            dist.broadcast(p.data, group=between, group_src=replica)


def apply_in_groups(apply: Callable[..., Any]) -> Callable[..., Any]:
    """``Module.apply`` for models in shards, as DeepSpeed's, but from the first rank of a group.

    DeepSpeed's broadcasts from rank 0, which only the group of the first replica has.
    """
    return lambda module, function: apply(module, _on_gathered(function))


def _on_gathered(function: Any) -> Any:
    if hasattr(function, "wrapped"):  # apply calls itself for each child
        return function

    @wraps(function)
    def on_gathered(module: nn.Module) -> None:
        own: list[Any] = [p for p in module.parameters(recurse=False) if hasattr(p, "ds_id")]
        own.sort(key=lambda p: p.ds_id)
        for p in own:
            p.all_gather()
        function(module)
        _share(own, place=0, replica=0)
        for p in own:
            dist.broadcast(p.data, group=p.ds_process_group, group_src=0)
            p.partition(has_been_updated=True)

    setattr(on_gathered, "wrapped", True)  # noqa: B010
    return on_gathered
