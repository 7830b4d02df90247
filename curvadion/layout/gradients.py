"""Gradients of DTensors, brought to the placements of their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from curvadion.comm.collectives import Buckets, Slot, group_size
from curvadion.comm.groups import Group, same_ranks
from curvadion.layout.dtensor import group_over, local
from curvadion.layout.lazy import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def place_gradients(parameters: Iterable[Tensor], replicas: dist.ProcessGroup | None) -> None:
    """Give every gradient the placements of its parameter; collective where one has others.

    Backward gives some gradients of tensor-parallel models other placements. Gradients of norms
    under sequence parallelism are partial sums (Partial) that still have to be added up, and the
    gradient of a sharded embedding may be whole. Partial sums of replicated parameters are added up
    in one collective per process group. ``DTensor.redistribute`` does everything else.

    A gradient whose partial sums lie on the replicas themselves becomes this replica's own
    gradient, which is its partial sum times the number of replicas. That takes no collective.

    Args:
        parameters: those whose ``.grad`` is replaced where its placements differ.
        replicas: the ranks that hold the same shard in other replicas.
    """
    groups = _Groups(replicas)
    partial_sums = []
    for X in parameters:
        gradient = X.grad
        if not is_dtensor(gradient) or not is_dtensor(X):
            continue
        if gradient.placements == X.placements:
            continue
        gradient = _own(gradient, groups)
        axes = _axes_to_sum(gradient, X)
        if axes:
            partial_sums.append(_PartialSum(X, gradient, groups.over(gradient.device_mesh, axes)))
        else:
            X.grad = gradient.redistribute(X.device_mesh, X.placements)
    _sum_(partial_sums)


class _PartialSum(NamedTuple):
    X: DTensor
    gradient: DTensor
    group: Group | None


class _Groups:
    """Looks up each group once: a model has many parameters on few meshes."""

    def __init__(self, replicas: Group | None) -> None:
        self.replicas = replicas
        self._known: dict[tuple[DeviceMesh, tuple[int, ...]], Group | None] = {}
        self._replicated: dict[tuple[DeviceMesh, int], bool] = {}

    def over(self, mesh: DeviceMesh, axes: Sequence[int]) -> Group | None:
        key = (mesh, tuple(axes))
        if key not in self._known:
            self._known[key] = group_over(mesh, axes)
        return self._known[key]

    def replicate(self, mesh: DeviceMesh, axis: int) -> bool:
        """Whether a mesh axis is that of the replicas."""
        if self.replicas is None:
            return False
        if (mesh, axis) not in self._replicated:
            self._replicated[mesh, axis] = same_ranks(self.over(mesh, [axis]), self.replicas)
        return self._replicated[mesh, axis]


def _own(gradient: DTensor, groups: _Groups) -> DTensor:
    """The gradient, with partial sums on the replicas replaced by this replica's own gradient.

    The sum of these partial sums would be the mean of the replicas' own gradients.
    """
    from torch.distributed.tensor import Replicate

    mesh = gradient.device_mesh
    placements = [
        Replicate() if _is_partial_sum(placement) and groups.replicate(mesh, axis) else placement
        for axis, placement in enumerate(gradient.placements)
    ]
    if placements == list(gradient.placements):
        return gradient
    return _placed(local(gradient) * group_size(groups.replicas), gradient, placements)


def _axes_to_sum(gradient: DTensor, X: DTensor) -> list[int]:
    """The mesh axes to sum over, if such sums give X's placements; else none."""
    if gradient.device_mesh != X.device_mesh:
        return []
    axes = []
    for axis, (given, wanted) in enumerate(zip(gradient.placements, X.placements, strict=True)):
        if given != wanted:
            if not (_is_partial_sum(given) and wanted.is_replicate()):
                return []
            axes.append(axis)
    return axes


def _is_partial_sum(placement: Placement) -> bool:
    from torch.distributed.tensor import Partial

    return type(placement) is Partial and placement.reduce_op == "sum"


def _sum_(partial_sums: Sequence[_PartialSum]) -> None:
    shards = [local(s.gradient) for s in partial_sums]
    buckets = Buckets(
        [
            Slot(tuple(G.shape), s.group, torch.promote_types(G.dtype, torch.float32), G.device)
            for G, s in zip(shards, partial_sums, strict=True)
        ]
    )
    for view, G in zip(buckets.views, shards, strict=True):
        view.copy_(G)
    buckets.all_reduce_()
    for view, G, s in zip(buckets.views, shards, partial_sums, strict=True):
        s.X.grad = _placed(view.to(G.dtype), s.gradient, s.X.placements)


def _placed(shard: Tensor, like: DTensor, placements: Sequence[Placement]) -> DTensor:
    placed: DTensor = like.from_local(
        shard,
        like.device_mesh,
        placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return placed
