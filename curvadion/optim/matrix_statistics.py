"""What the matrices of an optimizer look like: how long, of which rank, how many rows are dead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from curvadion.layout.flat_shard import flat_shard
from curvadion.optim.replica_optimizer import ReplicaOptimizer
from curvadion.plan.coded_states import decoded
from curvadion.plan.parameter import Parameter

# Of the momentum, by optimizer: Dion and CurvaDion, torch's SGD and Muon, AdamW.
MOMENTA = ("momentum", "momentum_buffer", "exp_avg")
ITERATIONS = 30
DEAD = 1e-6  # of the root mean square of the matrix's rows


class MatrixStatistics(NamedTuple):
    """What a matrix looks like; of stacked matrices, as of experts, the mean.

    Attributes:
        rms: the root mean square of its elements.
        stable_rank: |A|_F^2 / |A|_2^2, between 1 and the rank. The spectral norm is that of a
            few power iterations, so that this may be some percent too large.
        dead_rows: the share of its rows that are zero, or shorter than a millionth of the
            others.
    """

    rms: float
    stable_rank: float
    dead_rows: float


@torch.no_grad()
def of_momenta(optimizer: ReplicaOptimizer) -> dict[str, MatrixStatistics]:
    """The statistics of this replica's momenta, by name of the parameter.

    Collective in a sharded replica, which gathers one parameter after another.

    Raises:
        ValueError: if parameters are flat shards, of FSDP1 or ZeRO.
    """
    found = {}
    for p in _matrices(optimizer):
        for key in MOMENTA:
            if key in p.state:
                state = p.state[key]
                if p.is_coded(key):
                    state = decoded(key, p.X, state, p.group)
                found[p.name] = _statistics(state, p)
    return found


@contextmanager
def of_update(optimizer: ReplicaOptimizer) -> Iterator[dict[str, MatrixStatistics]]:
    """Fill a dictionary with the statistics of what a step inside changes, by parameter.

    Keeps a copy of all matrices meanwhile. Collective in a sharded replica::

        with matrix_statistics.of_update(optimizer) as found:
            optimizer.step()

    Raises:
        ValueError: if parameters are flat shards, of FSDP1 or ZeRO.
    """
    matrices = _matrices(optimizer)
    before = [p.X.detach().clone() for p in matrices]
    found: dict[str, MatrixStatistics] = {}
    yield found
    with torch.no_grad():
        for p, earlier in zip(matrices, before, strict=True):
            found[p.name] = _statistics(p.X.detach() - earlier, p)


def _matrices(optimizer: ReplicaOptimizer) -> list[Parameter]:
    """The parameters with matrices."""
    parameters = optimizer._collective_plan().parameters
    for p in parameters:
        if flat_shard(p.X) is not None:
            raise ValueError(f"{p.name} is a flat shard, of which no rank has a whole matrix.")
    return [p for p in parameters if p.X.dim() >= _stacked(p) + 2]


def _stacked(p: Parameter) -> int:
    """How many dimensions of a parameter count its matrices."""
    return int(p.group.get("stack_dims", 0))


def _statistics(values: Tensor, p: Parameter) -> MatrixStatistics:
    """The statistics of a tensor like a parameter; collective if it is sharded."""
    whole = values.full_tensor() if isinstance(values, DTensor) else values
    dims = _stacked(p)
    A = whole.float().reshape(-1, whole.shape[dims], whole.shape[dims + 1 :].numel())
    if p.group.get("input_first"):
        A = A.mT
    squares = A.square().sum(dim=(1, 2))
    rows = A.square().sum(dim=2)
    limit = DEAD**2 * rows.mean(dim=1, keepdim=True)
    ranks = squares / _spectral_squares(A).clamp_min(torch.finfo(torch.float32).tiny)
    return MatrixStatistics(
        rms=A.square().mean().sqrt().item(),
        stable_rank=ranks.mean().item(),
        dead_rows=(rows <= limit).float().mean().item(),
    )


def _spectral_squares(A: Tensor) -> Tensor:
    """Squares of the largest singular values, (k, m, n) -> (k,)."""
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(len(A), A.shape[2], 1, generator=generator).to(A.device)
    for _ in range(ITERATIONS):
        v = torch.nn.functional.normalize(A.mT @ (A @ v), dim=1)
    return (A @ v).square().sum(dim=(1, 2))
