"""Loading distributed checkpoints that were saved with other arguments."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from curvadion.layout.dtensor import is_dtensor, local
from curvadion.sync.base import Sync
from curvadion.update.directions import state_keys
from curvadion.update.state import MOMENTUM_NORM, is_right_factor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader


def fit_to_checkpoint(
    state: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | None = None,
    *,
    storage_reader: StorageReader | None = None,
) -> None:
    """Prepare ``state``, in place, to load a checkpoint that was saved with other arguments.

    ``torch.distributed.checkpoint.load`` needs the sizes and keys that were saved: right factors
    get their saved number of columns, and keys that were not saved are removed. ``load_state_dict``
    then converts the state. For a checkpoint of the same arguments this changes nothing::

        weights, held = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": held}
        fit_to_checkpoint(state, checkpoint_id=path)
        torch.distributed.checkpoint.load(state, checkpoint_id=path)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    Args:
        state: the dict for ``load``, which contains what get_optimizer_state_dict returned.
        checkpoint_id: as in ``load``.
        storage_reader: as in ``load``.

    Raises:
        ValueError: if neither checkpoint_id nor storage_reader is given.
    """
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if storage_reader is None:
        if checkpoint_id is None:
            raise ValueError("checkpoint_id=None and storage_reader=None: pass one of them.")
        storage_reader = FileSystemReader(checkpoint_id)
    saved = storage_reader.read_metadata().state_dict_metadata
    dispensable = _keys_of_syncs(Sync) | {key.name for key in state_keys()} | {MOMENTUM_NORM}
    _, paths = flatten_state_dict(state)
    for key, path in paths.items():
        parent = functools.reduce(lambda held, part: held[part], path[:-1], cast(Any, state))
        # A flattened optimizer state has keys like "state.linear.weight.Q".
        name, target = str(path[-1]).rpartition(".")[2], parent[path[-1]]
        if key not in saved:
            if name in dispensable or is_right_factor(name) or "param_groups" in path:
                del parent[path[-1]]
            continue
        form = saved[key]
        if is_right_factor(name) and isinstance(form, TensorStorageMetadata):
            parent[path[-1]] = _with_columns(target, form.size[-1])


def _keys_of_syncs(kind: Any) -> set[str]:
    """The state keys of a sync class and all its subclasses, also a user's."""
    own = {key.name for key in kind.state_keys}
    return own.union(*(_keys_of_syncs(one) for one in kind.__subclasses__()))


def _with_columns(Q: Tensor, columns: int) -> Tensor:
    """Return a tensor sharded like Q with another number of columns, which are never sharded."""
    if Q.shape[-1] == columns:
        return Q
    shard = local(Q)
    resized = shard.new_zeros(*shard.shape[:-1], columns)
    if not is_dtensor(Q):
        return resized
    shape = torch.Size((*Q.shape[:-1], columns))
    stride = torch.empty(shape, device="meta").stride()
    whole: Tensor = Q.from_local(
        resized, Q.device_mesh, Q.placements, run_check=False, shape=shape, stride=stride
    )
    return whole
