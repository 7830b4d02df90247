"""How the options of a parameter group divide a parameter into matrices.

The leading ``stack_dims`` dimensions enumerate matrices. ``row_blocks`` splits each of these into
blocks of rows, and every block is a matrix of its own. ``input_first`` says that the parameter
holds the transposes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from curvadion.layout.dtensor import (
    DimensionShard,
    dimension_shards,
    placements_of,
    shard_count,
    swapped,
)
from curvadion.layout.matrix import MatrixLayout


def block_sizes(rows: int, row_blocks: int | Sequence[int], name: str = "row_blocks") -> list[int]:
    """Number of rows of each block that a matrix of ``rows`` rows is split into.

    Args:
        rows: of the matrix.
        row_blocks: how many blocks of equal size, or the size of each.
        name: what an error calls row_blocks.

    Raises:
        ValueError: if the blocks do not add up to the rows.
    """
    if isinstance(row_blocks, int):
        if rows % row_blocks:
            raise ValueError(f"{name}={row_blocks!r} does not divide {rows} rows: list their sizes")
        return [rows // row_blocks] * row_blocks
    if sum(row_blocks) != rows:
        raise ValueError(f"{name}={row_blocks!r} must add up to the {rows} rows")
    return list(row_blocks)


def starts(sizes: Sequence[int]) -> list[int]:
    """Where each of several consecutive ranges begins."""
    return list(itertools.accumulate(sizes, initial=0))[:-1]


def intersection(a: range, b: range) -> range:
    """The numbers in both of two ranges of step 1."""
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))


def rank_of(layout: MatrixLayout, options: Mapping[str, Any]) -> int:
    """The rank r that a group's options give a matrix."""
    return layout.rank(options["rank_fraction"], options["rank_multiple_of"])


def output_first(X: Tensor, options: Mapping[str, Any]) -> Tensor:
    """The parameter in the order (*stack, out, in, ...); a view of it if ``input_first``."""
    return swapped(X, options["stack_dims"]) if options["input_first"] else X


class RowBlock(NamedTuple):
    """A block of rows, as this rank holds it.

    Attributes:
        start, size: the first row of the block and the number of its rows, over all ranks.
        held: the rows held here, counted from the block's first row.
        local: where these lie among the rows of the local tensor.
    """

    start: int
    size: int
    held: range
    local: slice

    def among(self, rows: range) -> range:
        """Which of these rows of the matrix are the block's, counted from its first row."""
        inside = intersection(rows, range(self.start, self.start + self.size))
        return range(inside.start - self.start, inside.stop - self.start)


@dataclass(frozen=True)
class BlockedTensor:
    """A parameter that is whole or a DTensor, divided into matrices.

    Attributes:
        X: the parameter, output first: (*stack, m, ...); what follows m are columns.
        stack: what this rank holds of the stack dimensions.
        rows, columns: what it holds of the next two dimensions.
        n: number of columns of each matrix, over all ranks.
        width: how many of them an index of the dimension after the rows makes.
        blocks: the row blocks of each matrix in the stack.
    """

    X: Tensor
    stack: list[DimensionShard]
    rows: DimensionShard
    columns: DimensionShard
    n: int
    width: int
    blocks: list[RowBlock]

    def flattened(self, indices: range) -> range:
        """The columns that these indices of the dimension after the rows make."""
        return range(indices.start * self.width, indices.stop * self.width)

    @property
    def held_columns(self) -> range:
        """The columns held here."""
        return self.flattened(self.columns.held)


def blocked(X: Tensor, options: Mapping[str, Any]) -> BlockedTensor:
    """Divide a parameter that is whole or a DTensor.

    Raises:
        ValueError: if the blocks do not fit, or if the DTensor is sharded in a way that no update
            is written for.
    """
    X, stack_dims = output_first(X, options), options["stack_dims"]
    dimensions = dimension_shards(X)
    rows, columns = dimensions[stack_dims : stack_dims + 2]
    _check_inner(X, columns, dimensions[stack_dims + 2 :])
    width = math.prod(X.shape[stack_dims + 2 :])
    sizes = block_sizes(X.shape[stack_dims], options["row_blocks"])
    blocks = []
    for start, size in zip(starts(sizes), sizes, strict=True):
        inside = intersection(rows.held, range(start, start + size))
        held = range(inside.start - start, inside.stop - start)
        local = slice(inside.start - rows.held.start, inside.stop - rows.held.start)
        blocks.append(RowBlock(start, size, held, local))
    return BlockedTensor(
        X=X,
        stack=dimensions[:stack_dims],
        rows=rows,
        columns=columns,
        n=X.shape[stack_dims + 1] * width,
        width=width,
        blocks=blocks,
    )


def _check_inner(X: Tensor, columns: DimensionShard, inner: Sequence[DimensionShard]) -> None:
    """Raise ValueError if the dimensions that are flattened into columns are sharded unevenly."""
    if any(d.axes for d in inner):
        raise ValueError(
            f"a parameter of shape {tuple(X.shape)} is sharded by {placements_of(X)}, but only "
            f"rows, columns and stacked dimensions can be"
        )
    if inner and len(columns.held) * shard_count(X, columns) != X.shape[-len(inner) - 1]:
        raise ValueError(
            f"a parameter of shape {tuple(X.shape)} is sharded by {placements_of(X)} into uneven "
            f"numbers of input channels: shard it over its output channels"
        )
