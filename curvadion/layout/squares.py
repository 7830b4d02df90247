"""An n x n matrix for each oriented matrix (m x n) of a parameter, sharded evenly over its ranks.

The squares of a parameter's matrices lie flat, one after the other. Of a whole tensor or a DTensor
they are a state of shape (*stack dimensions, N), N the sum of n^2 over the row blocks: stack
dimensions are sharded as the parameter's are, and N is sharded over all ranks of the
matrices. Of a flat shard they are the numbers that this rank holds of N, the sum of n^2 over the
tensor's matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curvadion.comm.collectives import group_size, shares
from curvadion.layout.blocks import blocked, within
from curvadion.layout.dtensor import dimension_shards, is_shard, local, placements_of, zeros
from curvadion.layout.flat_shard import FlatShard, flat_matrices, flat_shard

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


def create_squares(X: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Zeros for the squares of a parameter's matrices, float32 or wider. options: its group."""
    shape, placements = _form(X, options)
    return zeros(X, shape, placements, torch.promote_types(X.dtype, torch.float32))


def squares_fit(X: Tensor, options: Mapping[str, Any], squares: Tensor) -> bool:
    """Whether a tensor has the form of what :func:`create_squares` makes."""
    shape, placements = _form(X, options)
    return tuple(squares.shape) == shape and placements_of(squares) == tuple(placements)


def _form(X: Tensor, options: Mapping[str, Any]) -> tuple[tuple[int, ...], Sequence[Placement]]:
    """Shape, of DTensors the global one, and placements of a parameter's squares."""
    if (shard := flat_shard(X)) is not None:
        sides = (min(shape) for _, shape, _ in flat_matrices(shard, options))
        return (len(_held_of_flat(shard, sum(n * n for n in sides))),), []
    matrices, stack_dims = blocked(X, options), options["stack_dims"]
    total = sum(min(block.size, matrices.n) ** 2 for block in matrices.blocks)
    placements: Sequence[Placement] = placements_of(matrices.X)
    if placements:
        from torch.distributed.tensor import Shard

        over_matrices = [is_shard(p) and getattr(p, "dim", 0) >= stack_dims for p in placements]
        each = zip(placements, over_matrices, strict=True)
        placements = [Shard(stack_dims) if over else p for p, over in each]
    return (*matrices.X.shape[:stack_dims], total), placements


def squares_held(
    X: Tensor, squares: Tensor, sides: Sequence[int]
) -> Iterator[tuple[Tensor, slice]]:
    """For each matrix, what this rank holds of its square: a view, and where it is in the flat one.

    sides: n of the matrices that are held here, in their order.
    """
    rows = local(squares)
    rows = rows.view(math.prod(rows.shape[:-1]), rows.shape[-1])
    each = sides[: len(sides) // max(1, len(rows))]  # the same in all entries of a stack
    ends = list(accumulate((n * n for n in each), initial=0))
    shard = flat_shard(X)
    held = dimension_shards(squares)[-1].held if shard is None else _held_of_flat(shard, ends[-1])
    for row in rows:
        for first, stop in pairwise(ends):
            inside = within(held, first, stop - first)
            start = first + inside.start - held.start
            yield row[start : start + len(inside)], slice(inside.start, inside.stop)


def _held_of_flat(shard: FlatShard, total: int) -> range:
    """The numbers that this rank holds of so many."""
    if shard.group is None:
        return range(total)
    ends = list(accumulate(shares(total, group_size(shard.group)), initial=0))
    return range(*list(pairwise(ends))[shard.group.rank()])
