"""Gradients of DTensors, brought to the placements of their parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.comm.collectives import group_size
from curvadion.layout.dtensor import local
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
    for X in parameters:
        gradient = X.grad
        if is_dtensor(gradient) and is_dtensor(X) and gradient.placements != X.placements:
            # A sum in half precision could overflow.
            wide: Any = _own(gradient, replicas).to(torch.promote_types(X.dtype, torch.float32))
            X.grad = wide.redistribute(X.device_mesh, X.placements).to(gradient.dtype)


def _own(gradient: DTensor, replicas: dist.ProcessGroup | None) -> DTensor:
    """The gradient, with partial sums on the replicas replaced by this replica's own gradient.

    The sum of these partial sums would be the mean of the replicas' own gradients.
    """
    from torch.distributed.tensor import Partial, Replicate

    mesh, placements = gradient.device_mesh, list(gradient.placements)
    for axis, placement in enumerate(gradient.placements):
        if type(placement) is Partial and placement.reduce_op == "sum" and replicas is not None:
            along = dist.get_process_group_ranks(mesh.get_group(axis))
            if set(along) == set(dist.get_process_group_ranks(replicas)):
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
