"""Gradients of DTensors, brought to the placements of their parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from curvadion.comm.collectives import group_size
from curvadion.comm.groups import same_ranks
from curvadion.layout.dtensor import group_over, local
from curvadion.layout.lazy import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def place_gradients(parameters: Iterable[Tensor], replicas: dist.ProcessGroup | None) -> None:
    """Give every gradient the placements of its parameter; collective where one has others.

    Backward gives some gradients of tensor-parallel models other placements. Gradients of norms
    under sequence parallelism are partial sums (Partial) that still have to be added up, and the
    gradient of a sharded embedding may be whole. ``DTensor.redistribute`` brings them in place.

    A gradient whose partial sums lie on the replicas themselves becomes this replica's own
    gradient, which is its partial sum times the number of replicas. That takes no collective.
    """
    of_replicas: dict[tuple[DeviceMesh, int], bool] = {}
    for X in parameters:
        gradient = X.grad
        if is_dtensor(gradient) and is_dtensor(X) and gradient.placements != X.placements:
            own = _own(gradient, replicas, of_replicas)
            X.grad = own.redistribute(X.device_mesh, X.placements)


def _own(
    gradient: DTensor,
    replicas: dist.ProcessGroup | None,
    of_replicas: dict[tuple[DeviceMesh, int], bool],
) -> DTensor:
    """The gradient, with partial sums on the replicas replaced by this replica's own gradient.

    The sum of these partial sums would be the mean of the replicas' own gradients.

    of_replicas: which axes of meshes are known to be that of the replicas, or not to be.
    """
    from torch.distributed.tensor import Partial, Replicate

    mesh, placements = gradient.device_mesh, list(gradient.placements)
    for axis, placement in enumerate(gradient.placements):
        if type(placement) is Partial and placement.reduce_op == "sum" and replicas is not None:
            if (mesh, axis) not in of_replicas:
                of_replicas[mesh, axis] = same_ranks(group_over(mesh, [axis]), replicas)
            if of_replicas[mesh, axis]:
                placements[axis] = Replicate()
    if placements == list(gradient.placements):
        return gradient
    own: DTensor = gradient.from_local(
        local(gradient) * group_size(replicas),
        mesh,
        placements,
        run_check=False,
        shape=gradient.shape,
        stride=gradient.stride(),
    )
    return own
