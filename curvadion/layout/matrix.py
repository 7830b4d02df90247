"""Which part of a matrix this rank holds, and which process groups hold the rest.

A matrix is sharded in at most two ways, its rows over one group and its columns over another,
and may be replicated over a third. Whatever decides a trajectory (orientation, rank, initial right
factor, completing directions) follows from the GLOBAL shape and from global indices. So it does not
depend on how the matrix is sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

# The factor of the orthonormal update of a matrix (m, n): of Dion (section 2), Muon and Moonlight
# (arXiv 2502.16982).
UPDATE_SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda m, n: math.sqrt(m / n),
    "original": lambda m, n: math.sqrt(max(1.0, m / n)),
    "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n)),
}


@dataclass(frozen=True)
class Extent:
    """The rows (or columns) of a matrix that this rank holds.

    Attributes:
        indices: global indices held here, contiguous; may be empty.
        group: the ranks among which the dimension is sharded; None if all of it is here.
        shared: global indices of the rows that several ranks of the group hold in part, ascending.
            Shards that begin in the middle of a row (ZeRO, FSDP1) have such rows.
        borrowed: whether the first row held here is shared and begins on another rank. Sums over
            the group count the row on that rank.
        by_rank: of columns, the indices that each rank of the group holds, by its rank in the
            group; () without a group. Of rows nobody asks for them.
    """

    indices: range
    group: dist.ProcessGroup | None = None
    shared: tuple[int, ...] = ()
    borrowed: bool = False
    by_rank: tuple[range, ...] = ()

    def __len__(self) -> int:
        return len(self.indices)

    def counted(self, tensor: Tensor) -> Tensor:
        """The rows of (..., len(self), r) that this rank contributes to sums over the group."""
        return tensor[..., 1:, :] if self.borrowed else tensor

    def shared_here(self) -> list[tuple[int, int]]:
        """The shared rows held here, each as (position in ``shared``, position in ``indices``)."""
        return [
            (slot, index - self.indices.start)
            for slot, index in enumerate(self.shared)
            if index in self.indices
        ]


@dataclass(frozen=True)
class MatrixLayout:
    """Orientation and sharding of one matrix.

    Attributes:
        shape: global shape (m, n), output features first.
        rows, columns: of the ORIENTED matrix B, which is the matrix or its transpose and has the
            global shape (max(m, n), min(m, n)).
        replicas: the ranks that hold the same shard in other replicas; None for one replica.
        rows_and_replicas, columns_and_replicas: the unions of these groups. Over a union, one
            collective takes the sum over shards and the mean over replicas. Must be given where
            both groups exist, and so must ``shards``.
        shards: the ranks that hold the shards of this replica's matrix; None if it is whole.
        parts: the rows and columns of B that each rank of ``shards`` holds, in whole or in part.
    """

    shape: tuple[int, int]
    rows: Extent
    columns: Extent
    replicas: dist.ProcessGroup | None = None
    rows_and_replicas: dist.ProcessGroup | None = None
    columns_and_replicas: dist.ProcessGroup | None = None
    shards: dist.ProcessGroup | None = None
    parts: tuple[tuple[range, range], ...] = ()

    def __post_init__(self) -> None:
        rows, columns = self.rows.group, self.columns.group
        for name, one, other in (
            ("rows_and_replicas", rows, self.replicas),
            ("columns_and_replicas", columns, self.replicas),
            ("shards", rows, columns),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, one or other)

    @classmethod
    def whole(
        cls, shape: tuple[int, int], replicas: dist.ProcessGroup | None = None
    ) -> MatrixLayout:
        """The layout of a matrix that every replica holds unsharded."""
        return cls(shape, Extent(range(max(shape))), Extent(range(min(shape))), replicas)

    @property
    def transposed(self) -> bool:
        """Whether B is the transpose of the matrix; B never has fewer rows than columns."""
        return self.shape[0] < self.shape[1]

    def rank(self, rank_fraction: float, rank_multiple_of: int) -> int:
        """r = min(multiple * ceil(fraction * min(m, n) / multiple), m, n)."""
        smaller = min(self.shape)
        # The fraction is a decimal that a user typed: 0.07 * 100 must give 7, not 8.
        wanted = math.ceil(round(rank_fraction * smaller, 9) / rank_multiple_of)
        return min(rank_multiple_of * wanted, smaller)

    def initial_q(self, rank: int) -> Tensor:
        """The rows held here of the initial Q ~ N(0, 1), (n_j, rank) float32 on the CPU."""
        m, n = self.shape
        generator = torch.Generator("cpu").manual_seed((m * 1_000_003 + n) * 1_000_003 + rank)
        q = torch.randn(min(m, n), rank, generator=generator, dtype=torch.float32, device="cpu")
        return q[self.columns.indices.start : self.columns.indices.stop]

    def inside_replica(self) -> MatrixLayout:
        """The same sharding, for a step in which no other replica takes part."""
        return replace(self, replicas=None, rows_and_replicas=None, columns_and_replicas=None)


# -------------------------------------------------------- where shards lie in local tensors


@dataclass(frozen=True)
class Block:
    """Whole rows of one matrix in a local tensor of shape (*stack, rows, ...).

    stack: index into the leading dimensions, which enumerate matrices. rows: the block's rows in
    the local tensor. input_first: whether the tensor holds the transpose of each matrix.
    """

    stack: tuple[int, ...]
    rows: slice
    input_first: bool = False

    is_view = True

    def elements(self, local: Tensor) -> Tensor:
        """The elements held here, as a view of any shape."""
        matrix = local[self.stack]
        return (matrix.mT if self.input_first else matrix)[self.rows]

    def read(self, local: Tensor) -> Tensor:
        """The shard as a 2-D view, (rows, columns)."""
        held = self.elements(local)
        return held.view(held.shape[0], math.prod(held.shape[1:]))

    def held(self, shard: Tensor) -> Tensor:
        """The elements of a shard that are held here: all of them."""
        return shard


@dataclass(frozen=True)
class FlatRange:
    """Elements [start, stop) of a row-major (m, n) matrix, from ``offset`` on in a flat tensor.

    This rank may hold only a part of the first and of the last row. :meth:`read` fills these rows
    up with zeros; a product with such a shard is this rank's summand of the whole product.

    columns: n. input_first: whether the tensor holds transposes; shards are of the matrix itself.
    """

    start: int
    stop: int
    columns: int
    offset: int = 0
    input_first: bool = False

    @property
    def rows(self) -> range:
        """Global indices of the rows that this rank holds, in whole or in part."""
        if self.start == self.stop:
            return range(0)
        return range(self.start // self.columns, -(-self.stop // self.columns))

    @property
    def is_view(self) -> bool:
        """Whether all rows held here are whole, so that :meth:`read` gives a view."""
        return self.stop - self.start == len(self.rows) * self.columns

    def elements(self, local: Tensor) -> Tensor:
        """The elements held here, as a 1-D view."""
        return local.view(-1)[self.offset : self.offset + self.stop - self.start]

    def read(self, local: Tensor) -> Tensor:
        """The shard (len(rows), n): a view if its rows are whole, else a padded copy."""
        held = self.elements(local)
        if self.is_view:
            return self._transposed_if_input_first(held.view(len(self.rows), self.columns))
        padded = torch.zeros(len(self.rows), self.columns, dtype=local.dtype, device=local.device)
        shard = self._transposed_if_input_first(padded)
        self.held(shard).copy_(held)
        return shard

    def held(self, shard: Tensor) -> Tensor:
        """The elements of a padded shard that are held here, 1-D; a view if its rows are dense."""
        skipped = self.start - self.rows.start * self.columns
        stored = self._transposed_if_input_first(shard)
        return stored.reshape(-1)[skipped : skipped + self.stop - self.start]

    def _transposed_if_input_first(self, matrix: Tensor) -> Tensor:
        return matrix.mT if self.input_first else matrix


ShardView = Block | FlatRange
