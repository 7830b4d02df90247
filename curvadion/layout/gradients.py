"""Gradients of DTensors, brought to where their parameters are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from curvadion.comm.collectives import Buckets, Slot, group_size
from curvadion.comm.groups import Group, same_ranks
from curvadion.layout.sharding import group_over, local


def settle_gradients(parameters: Iterable[Tensor], replicas: dist.ProcessGroup | None) -> None:
    """Give every gradient its parameter's placements; collective where one has others.

    Backward leaves some gradients of tensor-parallel models otherwise: those of norms under
    sequence parallelism are summands (Partial) that no one has added up, and that of a sharded
    embedding may be whole. Summands of replicated parameters are added up in one collective per
    process group; all else is left to ``DTensor.redistribute``.

    A gradient whose summands lie on the replicas themselves becomes this replica's own gradient,
    the summand times the number of replicas, without a collective.
    """
    groups = _Groups(replicas)
    summands = []
    for X in parameters:
        gradient = X.grad
        if not isinstance(gradient, DTensor) or not isinstance(X, DTensor):
            continue
        if gradient.placements == X.placements:
            continue
        gradient = _own(gradient, groups)
        axes = _axes_to_sum(gradient, X)
        if axes:
            summands.append(_Summand(X, gradient, groups.over(gradient.device_mesh, axes)))
        else:
            X.grad = gradient.redistribute(X.device_mesh, X.placements)
    _sum_(summands)


class _Summand(NamedTuple):
    X: DTensor
    gradient: DTensor
    group: Group | None


class _Groups:
    """Looks each group up once: a model has many parameters on few meshes."""

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
    """Without summands on the replicas, whose sum is the mean of the replicas' own gradients."""
    mesh = gradient.device_mesh
    placements = [
        Replicate() if _is_summand(placement) and groups.replicate(mesh, axis) else placement
        for axis, placement in enumerate(gradient.placements)
    ]
    if placements == list(gradient.placements):
        return gradient
    return _placed(local(gradient) * group_size(groups.replicas), gradient, placements)


def _axes_to_sum(gradient: DTensor, X: DTensor) -> list[int]:
    """The mesh axes to sum over if that is all that the gradient lacks; else none."""
    if gradient.device_mesh != X.device_mesh:
        return []
    axes = []
    for axis, (given, wanted) in enumerate(zip(gradient.placements, X.placements, strict=True)):
        if given != wanted:
            if not (_is_summand(given) and isinstance(wanted, Replicate)):
                return []
            axes.append(axis)
    return axes


def _is_summand(placement: Placement) -> bool:
    return type(placement) is Partial and placement.reduce_op == "sum"


def _sum_(summands: Sequence[_Summand]) -> None:
    pieces = [local(s.gradient) for s in summands]
    buckets = Buckets(
        [
            Slot(tuple(G.shape), s.group, torch.promote_types(G.dtype, torch.float32), G.device)
            for G, s in zip(pieces, summands, strict=True)
        ]
    )
    for view, G in zip(buckets.views, pieces, strict=True):
        view.copy_(G)
    buckets.all_reduce_()
    for view, G, s in zip(buckets.views, pieces, summands, strict=True):
        s.X.grad = _placed(view.to(G.dtype), s.gradient, s.X.placements)


def _placed(piece: Tensor, like: DTensor, placements: Sequence[Placement]) -> DTensor:
    placed: DTensor = DTensor.from_local(
        piece,
        like.device_mesh,
        placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return placed
