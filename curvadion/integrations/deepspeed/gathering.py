"""Weights of stage 3 that are changed by hand, gathered, become those of all replicas.

DeepSpeed broadcasts them inside a replica: after ``GatheredParameters(modifier_rank=...)``, and
under ``zero.Init`` after ``Module.apply``. Users name ranks of all, and write on one of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

_BETWEEN = "_curvadion_between_replicas"  # an attribute of parameters
_ORIGINALS = "_curvadion_originals"


def remember(parameters: Iterable[Any], between: dist.ProcessGroup) -> None:
    """Note who holds the same shards of these parameters in the other replicas."""
    for p in parameters:
        setattr(p, _BETWEEN, between)


def patch(gathered_class: Any) -> None:
    """Let GatheredParameters reach all replicas; again is harmless."""
    if not hasattr(gathered_class, _ORIGINALS):
        methods = gathered_class.__init__, gathered_class.__exit__
        setattr(gathered_class, _ORIGINALS, methods)
    start, leave = getattr(gathered_class, _ORIGINALS)
    signature = inspect.signature(start)

    @wraps(start)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        said, replica = given.arguments, 0
        if said["enabled"] and said["modifier_rank"] is not None:
            if isinstance(said["params"], Iterable) and not isinstance(said["params"], Tensor):
                said["params"] = list(said["params"])  # a generator gives them once
            said["modifier_rank"], replica = _source(said["params"], said["modifier_rank"])
        start(*given.args, **given.kwargs)
        self._curvadion_source = said["modifier_rank"], replica

    @wraps(leave)
    def __exit__(self: Any, *raised: Any) -> Any:
        place, replica = self._curvadion_source
        if self.enabled and place is not None:
            _share(self.params, place, replica)
        return leave(self, *raised)

    gathered_class.__init__ = __init__
    gathered_class.__exit__ = __exit__


def _source(params: Any, modifier_rank: int) -> tuple[int, int]:
    """The place of the modifying rank in its replica, which DeepSpeed expects, and the replica.

    Raises:
        ValueError: if there is no such rank, or its place differs from parameter to parameter.
    """
    given = params if isinstance(params, list) else [params]
    sharded = [p for p in given if hasattr(p, "ds_id")]
    ours = [p for p in sharded if hasattr(p, _BETWEEN)]
    if not ours:
        return modifier_rank, 0
    world = dist.get_world_size()
    if not 0 <= modifier_rank < world:
        raise ValueError(f"modifier_rank={modifier_rank} must be one of the ranks 0 to {world - 1}")
    size = ours[0].ds_process_group.size()
    replica, place = divmod(modifier_rank, size)
    alike = len(ours) == len(sharded) and all(p.ds_process_group.size() == size for p in ours)
    if replica and not alike:
        raise ValueError(
            f"modifier_rank={modifier_rank} with parameters of which some are sharded over a "
            f"replica of {size} ranks and some over other ranks: gather them one after the other"
        )
    return place, replica


def _share(params: Iterable[Any], place: int, replica: int) -> None:
    """Give gathered weights of one replica to all, on the ranks that broadcast inside next."""
    for p in params:
        between = getattr(p, _BETWEEN, None)
        if between is not None and dist.get_rank(p.ds_process_group) == place:
            dist.broadcast(p.data, group=between, group_src=replica)


def apply_in_groups(apply: Callable[..., Any]) -> Callable[..., Any]:
    """``Module.apply`` for models in shards, as DeepSpeed's, but from the first rank of a group.

    DeepSpeed's broadcasts from rank 0, which only the group of the first replica has.
    """

    @wraps(apply)
    def apply_gathered(module: nn.Module, function: Any) -> Any:
        return apply(module, _on_gathered(function))

    return apply_gathered


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
        for p in own:
            p.partition(has_been_updated=True)

    setattr(on_gathered, "wrapped", True)  # noqa: B010
    return on_gathered
