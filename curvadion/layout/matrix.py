"""A rank's part of a matrix, and the process groups that hold the rest.

What affects a trajectory (orientation, rank, initial right factor) follows from the GLOBAL
shape and global indices, not from the sharding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from curvadion.comm.groups import Group
from curvadion.division import spans

Options = Mapping[str, Any]  # a parameter group
# Of the orthonormal update of a matrix (m, n): Dion's (section 2), Muon's and Moonlight's
# (arXiv 2502.16982).
UPDATE_SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda m, n: math.sqrt(m / n),
    "original": lambda m, n: math.sqrt(max(1.0, m / n)),
    "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n)),
}


def block_sizes(length: int, blocks: int | Sequence[int], name: str = "row_blocks") -> list[int]:
    """The rows or columns of each block.

    Args:
        length: the number of rows or columns of all blocks.
        blocks: the number of equal blocks, or their sizes.
        name: of the option in errors.
    """
    what = "columns" if "column" in name else "rows"
    if isinstance(blocks, int):
        if length % blocks:
            raise ValueError(
                f"{name}={blocks!r} does not divide {length} {what}: list the sizes of the blocks"
            )
        return [length // blocks] * blocks
    if sum(blocks) != length:
        raise ValueError(
            f"{name}={blocks!r} must add up to the {length} {what}, not to {sum(blocks)}: "
            f"list the {what} of all blocks"
        )
    return list(blocks)


def blocks_of(shape: tuple[int, int], options: Options) -> list[tuple[range, range]]:
    """The rows and columns of each matrix into which a parameter's (m, n) is divided.

    A group may divide rows or columns, but not both.
    """
    m, n = shape
    blocks = []
    for rows in spans(block_sizes(m, options["row_blocks"])):
        for columns in spans(block_sizes(n, options["column_blocks"], "column_blocks")):
            blocks.append((rows, columns))
    return blocks


def matrix_shape(shape: Sequence[int], options: Options) -> tuple[int, int]:
    """(m, n) of each matrix of a stack, output features first, before it is divided into blocks.

    Args:
        shape: of the parameter, global.
        options: its group.
    """
    rows = shape[options["stack_dims"]]
    columns = math.prod(shape[options["stack_dims"] + 1 :])
    return (columns, rows) if options["input_first"] else (rows, columns)


def division_of(shape: Sequence[int], options: Options) -> tuple[object, ...]:
    """Into which matrices a group divides a parameter: equal on all ranks, and comparable.

    Args:
        shape: of the parameter, global.
        options: its group.
    """
    blocks = blocks_of(matrix_shape(shape, options), options)
    return (options["stack_dims"], options["input_first"], *blocks)


def within(indices: range, part: range) -> range:
    """The indices in ``part``, counted from its start; an empty range if there are none."""
    start = max(indices.start, part.start)
    stop = max(start, min(indices.stop, part.stop))
    return range(start - part.start, stop - part.start)


@dataclass(frozen=True)
class Extent:
    """This rank's rows (or columns) of a matrix; indices are global.

    The end of a flat shard may cut through a row. Then several ranks hold a part of it, each
    with zeros in place of the rest. Once such parts are summed, all of these ranks have the
    row, and sums over ranks count it once: on the rank where it begins.

    Args:
        indices: of this rank's rows.
        group: over which the dimension is sharded; None: it is not.
        shared: rows of which several ranks of the group hold parts, ascending.
        borrowed: whether this rank's first row begins on another rank, which counts it.
        by_rank: the indices of each rank of the group.
    """

    indices: range
    group: Group | None = None
    shared: tuple[int, ...] = ()
    borrowed: bool = False
    by_rank: tuple[range, ...] = ()

    def __len__(self) -> int:
        return len(self.indices)

    def counted(self, tensor: Tensor) -> Tensor:
        """The rows that this rank counts in sums over the group, of (..., len(self), r)."""
        return tensor[..., 1:, :] if self.borrowed else tensor

    def shared_positions(self) -> list[tuple[int, int]]:
        """Positions of this rank's shared rows: in ``shared``, and in ``indices``."""
        positions = []
        for slot, row in enumerate(self.shared):
            if row in self.indices:
                positions.append((slot, row - self.indices.start))
        return positions


@dataclass(frozen=True)
class MatrixLayout:
    """Orientation and sharding of a matrix.

    B is the ORIENTED matrix, which has at least as many rows as columns:
    (max(m, n), min(m, n)).

    Args:
        shape: global (m, n), output features first.
        rows: this rank's rows of B.
        columns: this rank's columns of B.
        replicas: the ranks with the same shard in other replicas; None for one replica.
        rows_and_replicas: the union of both groups, so that one collective sums over shards
            and averages over replicas; None for one rank.
        columns_and_replicas: likewise.
        shards: all ranks with shards in this replica; None if the matrix is whole.
        parts: the rows and columns of B of each rank in ``shards``.
    """

    shape: tuple[int, int]
    rows: Extent
    columns: Extent
    replicas: Group | None = None
    rows_and_replicas: Group | None = None
    columns_and_replicas: Group | None = None
    shards: Group | None = None
    parts: tuple[tuple[range, range], ...] = ()

    @classmethod
    def whole(cls, shape: tuple[int, int]) -> MatrixLayout:
        """The layout of an unsharded matrix."""
        return cls(shape, Extent(range(max(shape))), Extent(range(min(shape))))

    @property
    def transposed(self) -> bool:
        """Whether B is the transpose of the matrix."""
        return self.shape[0] < self.shape[1]

    def rank(self, options: Options) -> int:
        """r = min(multiple * ceil(fraction * min(m, n) / multiple), m, n)."""
        smaller_side = min(self.shape)
        multiple = int(options["rank_multiple_of"])
        # Users type the fraction as a decimal: 0.07 * 100 must give 7, not 8.
        fraction_of_side = round(float(options["rank_fraction"]) * smaller_side, 9)
        return min(multiple * math.ceil(fraction_of_side / multiple), smaller_side)

    def initial_q(self, options: Options, rows: range) -> Tensor:
        """These rows of the initial Q ~ N(0, 1), (min(m, n), r), float32 on the CPU.

        All of Q is drawn, so that its rows do not depend on which of them a rank holds, and on
        the CPU, so that they do not depend on the device.
        """
        m, n = self.shape
        rank = self.rank(options)
        # Digits in a base above any usual side, so that different shapes have different seeds.
        seed = (m * 1_000_003 + n) * 1_000_003 + rank
        generator = torch.Generator("cpu").manual_seed(seed)
        Q = torch.randn((min(m, n), rank), generator=generator, dtype=torch.float32, device="cpu")
        return Q[rows.start : rows.stop]

    def inside_replica(self) -> MatrixLayout:
        """The same sharding without other replicas."""
        return replace(
            self,
            replicas=None,
            rows_and_replicas=self.rows.group,
            columns_and_replicas=self.columns.group,
        )


@dataclass(frozen=True)
class Block:
    """Rows or columns of one matrix in a local tensor of shape (*stack, rows, ...)."""

    stack: tuple[int, ...]  # the matrix's index in the stack
    rows: slice  # of the local tensor
    columns: slice  # of the dimension after rows; slice(None) unless the group divides columns
    input_first: bool = False  # whether the tensor holds the transpose of each matrix

    is_view = True  # of what :meth:`read` returns

    def elements(self, local: Tensor) -> Tensor:
        """This rank's elements, as a view of any shape."""
        matrix = local[self.stack]
        if self.input_first:
            matrix = matrix.mT
        return matrix[self.rows, self.columns]

    def read(self, local: Tensor) -> Tensor:
        """The shard as a 2-D view, (rows, columns)."""
        # Most matrices are whole parameters, and each view takes the host some time.
        stored_alone = not self.stack and not self.input_first and local.dim() == 2
        stored_alone = stored_alone and self.columns == slice(None)
        if stored_alone and self.rows.start == 0 and self.rows.stop == local.shape[0]:
            return local
        elements = self.elements(local)
        return elements.view(elements.shape[0], math.prod(elements.shape[1:]))

    def held(self, shard: Tensor) -> Tensor:
        """This rank's elements of a shard."""
        return shard

    def store(self, local: Tensor, shard: Tensor) -> None:
        """The inverse of :meth:`read`."""
        self.read(local).copy_(shard)


@dataclass(frozen=True)
class FlatRange:
    """A contiguous range of elements of a row-major matrix (rows, columns), in a flat tensor.

    If the matrix is a block of columns of a wider one, others lie between its rows.

    Args:
        start: the first element, counted from the matrix's first one.
        stop: the end of the range, which excludes it.
        columns: of the matrix as it is stored.
        offset: the place of the first element in the local tensor.
        width: elements from the beginning of a row to that of the next; 0: no others between.
        input_first: whether the transpose of the matrix is stored.
    """

    start: int
    stop: int
    columns: int
    offset: int = 0
    width: int = 0
    input_first: bool = False

    @property
    def rows(self) -> range:
        """Global indices of this rank's rows, whole or partial."""
        if self.start == self.stop:
            return range(0)
        end = -(-self.stop // self.columns)  # rounded up: a partial row counts
        return range(self.start // self.columns, end)

    @property
    def is_view(self) -> bool:
        """Whether this rank's rows are whole: :meth:`read` returns a view."""
        return self.stop - self.start == len(self.rows) * self.columns

    def elements(self, local: Tensor) -> Tensor:
        """This rank's elements: a view, or a 1-D copy of several."""
        views = self._views(local)
        if len(views) == 1:
            return views[0]
        return torch.cat([view.reshape(-1) for view in views])

    def _views(self, local: Tensor) -> list[Tensor]:
        """Views that hold this rank's elements, in order.

        Between the rows of a block of columns there are other elements. So these views are the
        end of a row, whole rows as (rows, columns), and the beginning of a row, if there are
        any.
        """
        flat = local.view(-1)
        length = self.stop - self.start
        n = self.columns
        if self.width in (0, n) or not length:
            return [flat[self.offset : self.offset + length]]
        # Whole rows begin and end at these elements; all may lie inside one row.
        whole_start = min(-(-self.start // n) * n, self.stop)
        whole_stop = max(self.stop // n * n, whole_start)
        views = []
        for start, stop in pairwise((self.start, whole_start, whole_stop, self.stop)):
            if start == stop:
                continue
            first = self._place(start)
            part = flat[first : self._place(stop - 1) + 1]
            is_whole = (start, stop) == (whole_start, whole_stop)
            views.append(part.unfold(0, n, self.width) if is_whole else part)
        return views

    def _place(self, element: int) -> int:
        """The place of an element of the range in the local tensor."""
        rows = element // self.columns - self.start // self.columns
        columns = element % self.columns - self.start % self.columns
        return self.offset + rows * self.width + columns

    def store(self, local: Tensor, shard: Tensor) -> None:
        """The inverse of :meth:`read`; padding is left out."""
        views = self._views(local)
        elements = self.held(shard).split([view.numel() for view in views])
        for view, values in zip(views, elements, strict=True):
            view.copy_(values.view(view.shape))

    def read(self, local: Tensor) -> Tensor:
        """The shard: a view, or a copy with partial rows padded by zeros.

        It is (len(rows), columns), or with the input first the transpose of that.
        """
        elements = self.elements(local)
        if self.is_view:
            # A block of columns has this shape already, and its rows do not touch.
            return self._turned(elements.view(len(self.rows), self.columns))
        shard = self._turned(local.new_zeros(len(self.rows), self.columns))
        self.held(shard).copy_(elements.reshape(-1))
        return shard

    def held(self, shard: Tensor) -> Tensor:
        """This rank's elements of a padded shard, 1-D; a view if its rows are dense."""
        # The elements of the first row that another rank holds.
        skipped = self.start - self.rows.start * self.columns
        return self._turned(shard).reshape(-1)[skipped : skipped + self.stop - self.start]

    def _turned(self, matrix: Tensor) -> Tensor:
        """From the order in which a matrix is stored to output features first, or back."""
        return matrix.mT if self.input_first else matrix
