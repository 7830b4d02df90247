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
    """The rows of each block; row_blocks: the number of equal blocks, or their sizes."""
    if isinstance(row_blocks, int):
        if rows % row_blocks:
            raise ValueError(f"{name}={row_blocks!r} does not divide {rows} rows: list the sizes")
        return [rows // row_blocks] * row_blocks
    if sum(row_blocks) != rows:
        raise ValueError(f"{name}={row_blocks!r} must add up to the {rows} rows")
    return list(row_blocks)


def within(indices: range, part: range) -> range:
    """The indices in ``part``, counted from its start."""
    start = max(indices.start, part.start)
    return range(start - part.start, max(start, min(indices.stop, part.stop)) - part.start)


@dataclass(frozen=True)
class Extent:
    """This rank's rows (or columns) of a matrix; indices are global."""

    indices: range
    group: Group | None = None  # over which the dimension is sharded
    shared: tuple[int, ...] = ()  # rows of which several ranks hold parts, ascending
    borrowed: bool = False  # whether the first row begins on another rank, which counts it
    by_rank: tuple[range, ...] = ()  # the indices of each rank of the group

    def __len__(self) -> int:
        return len(self.indices)

    def counted(self, tensor: Tensor) -> Tensor:
        """The rows of (..., len(self), r) that count in sums over the group."""
        return tensor[..., 1:, :] if self.borrowed else tensor

    def shared_here(self) -> list[tuple[int, int]]:
        """Positions of this rank's shared rows in ``shared`` and in ``indices``."""
        here, start = self.indices, self.indices.start
        return [(slot, row - start) for slot, row in enumerate(self.shared) if row in here]


@dataclass(frozen=True)
class MatrixLayout:
    """Orientation and sharding of a matrix; B, the ORIENTED one: (max(m, n), min(m, n))."""

    shape: tuple[int, int]  # global (m, n), output features first
    rows: Extent  # of B
    columns: Extent  # of B
    replicas: Group | None = None  # ranks with the same shard; None for one replica
    # Unions of these groups: one collective sums shards and averages.
    rows_and_replicas: Group | None = None
    columns_and_replicas: Group | None = None
    shards: Group | None = None  # all ranks of this replica's shards
    parts: tuple[tuple[range, range], ...] = ()  # their rows and columns of B

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
        smaller, multiple = min(self.shape), int(options["rank_multiple_of"])
        # Users type the fraction as a decimal: 0.07 * 100 must give 7, not 8.
        wanted = round(float(options["rank_fraction"]) * smaller, 9)
        return min(multiple * math.ceil(wanted / multiple), smaller)

    def initial_q(self, options: Options, held: range) -> Tensor:
        """These rows of the initial Q ~ N(0, 1), (min(m, n), r), float32 on the CPU."""
        (m, n), rank = self.shape, self.rank(options)
        generator = torch.Generator("cpu").manual_seed((m * 1_000_003 + n) * 1_000_003 + rank)
        shape = min(m, n), rank
        whole = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return whole[held.start : held.stop]

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

    stack: tuple[int, ...]
    rows: slice
    input_first: bool = False  # whether the tensor holds the transpose of each matrix

    is_view = True

    def elements(self, local: Tensor) -> Tensor:
        """This rank's elements, as a view of any shape."""
        matrix = local[self.stack]
        return (matrix.mT if self.input_first else matrix)[self.rows]

    def read(self, local: Tensor) -> Tensor:
        """The shard as a 2-D view, (rows, columns)."""
        alone = not (self.stack or self.input_first) and local.dim() == 2
        if alone and (self.rows.start, self.rows.stop) == (0, local.shape[0]):
            return local  # most matrices are whole parameters, and views take time
        held = self.elements(local)
        return held.view(held.shape[0], math.prod(held.shape[1:]))

    def held(self, shard: Tensor) -> Tensor:
        """This rank's elements of a shard."""
        return shard


@dataclass(frozen=True)
class FlatRange:
    """Elements [start, stop) of a row-major (m, n) matrix, at ``offset`` in a flat tensor."""

    start: int
    stop: int
    columns: int  # n
    offset: int = 0
    input_first: bool = False  # whether the tensor holds transposes

    @property
    def rows(self) -> range:
        """Global indices of this rank's rows, whole or partial."""
        if self.start == self.stop:
            return range(0)
        return range(self.start // self.columns, -(-self.stop // self.columns))

    @property
    def is_view(self) -> bool:
        """Whether this rank's rows are whole: :meth:`read` returns a view."""
        return self.stop - self.start == len(self.rows) * self.columns

    def elements(self, local: Tensor) -> Tensor:
        """This rank's elements, as a 1-D view."""
        return local.view(-1)[self.offset : self.offset + self.stop - self.start]

    def read(self, local: Tensor) -> Tensor:
        """The shard (len(rows), n): a view, or a copy with partial rows padded by zeros."""
        held = self.elements(local)
        if self.is_view:
            return self._turned(held.view(len(self.rows), self.columns))
        shard = self._turned(local.new_zeros(len(self.rows), self.columns))
        self.held(shard).copy_(held)
        return shard

    def held(self, shard: Tensor) -> Tensor:
        """This rank's elements of a padded shard, 1-D; a view if its rows are dense."""
        skipped = self.start - self.rows.start * self.columns
        return self._turned(shard).reshape(-1)[skipped : skipped + self.stop - self.start]

    def _turned(self, matrix: Tensor) -> Tensor:
        return matrix.mT if self.input_first else matrix
