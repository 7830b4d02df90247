"""A rank's part of a matrix, and the process groups that hold the rest.

What affects a trajectory (orientation, rank, initial right factor) follows from the GLOBAL
shape and global indices, not from the sharding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from curvadion.comm.groups import Group

Options = Mapping[str, Any]  # a parameter group
# Of the orthonormal update of a matrix (m, n): Dion's (section 2), Muon's and Moonlight's
# (arXiv 2502.16982).
UPDATE_SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda m, n: math.sqrt(m / n),
    "original": lambda m, n: math.sqrt(max(1.0, m / n)),
    "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n)),
}


def block_sizes(rows: int, row_blocks: int | Sequence[int], name: str = "row_blocks") -> list[int]:
    """The rows of each block.

    Args:
        rows: the number of rows of all blocks.
        row_blocks: the number of equal blocks, or their sizes.
        name: of the option in errors.
    """
    if isinstance(row_blocks, int):
        if rows % row_blocks:
            raise ValueError(
                f"{name}={row_blocks!r} does not divide {rows} rows: list the sizes of the blocks"
            )
        return [rows // row_blocks] * row_blocks
    if sum(row_blocks) != rows:
        raise ValueError(
            f"{name}={row_blocks!r} must add up to the {rows} rows, not to {sum(row_blocks)}: "
            f"list the rows of all blocks"
        )
    return list(row_blocks)


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
    """Whole rows of one matrix in a local tensor of shape (*stack, rows, ...)."""

    stack: tuple[int, ...]  # the matrix's index in the stack
    rows: slice  # of the local tensor
    input_first: bool = False  # whether the tensor holds the transpose of each matrix

    is_view = True  # of what :meth:`read` returns

    def elements(self, local: Tensor) -> Tensor:
        """This rank's elements, as a view of any shape."""
        matrix = local[self.stack]
        if self.input_first:
            matrix = matrix.mT
        return matrix[self.rows]

    def read(self, local: Tensor) -> Tensor:
        """The shard as a 2-D view, (rows, columns)."""
        # Most matrices are whole parameters, and each view takes the host some time.
        stored_alone = not self.stack and not self.input_first and local.dim() == 2
        if stored_alone and self.rows.start == 0 and self.rows.stop == local.shape[0]:
            return local
        elements = self.elements(local)
        return elements.view(elements.shape[0], math.prod(elements.shape[1:]))

    def held(self, shard: Tensor) -> Tensor:
        """This rank's elements of a shard."""
        return shard


@dataclass(frozen=True)
class FlatRange:
    """A contiguous range of elements of a row-major matrix (rows, columns), in a flat tensor.

    Args:
        start: the first element, counted from the matrix's first one.
        stop: the end of the range, which excludes it.
        columns: of the matrix as it is stored.
        offset: the place of the first element in the local tensor.
        input_first: whether the transpose of the matrix is stored.
    """

    start: int
    stop: int
    columns: int
    offset: int = 0
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
        """This rank's elements, as a 1-D view."""
        return local.view(-1)[self.offset : self.offset + self.stop - self.start]

    def read(self, local: Tensor) -> Tensor:
        """The shard: a view, or a copy with partial rows padded by zeros.

        It is (len(rows), columns), or with the input first the transpose of that.
        """
        elements = self.elements(local)
        if self.is_view:
            return self._turned(elements.view(len(self.rows), self.columns))
        shard = self._turned(local.new_zeros(len(self.rows), self.columns))
        self.held(shard).copy_(elements)
        return shard

    def held(self, shard: Tensor) -> Tensor:
        """This rank's elements of a padded shard, 1-D; a view if its rows are dense."""
        # The elements of the first row that another rank holds.
        skipped = self.start - self.rows.start * self.columns
        return self._turned(shard).reshape(-1)[skipped : skipped + self.stop - self.start]

    def _turned(self, matrix: Tensor) -> Tensor:
        """From the order in which a matrix is stored to output features first, or back."""
        return matrix.mT if self.input_first else matrix
