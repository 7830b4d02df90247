"""Where the local piece of a matrix lies, and which process groups hold the rest.

A matrix is cut in at most two ways, its rows over one group and its columns over another,
and may be replicated over a third. Everything that decides a trajectory (orientation, rank,
initial right factor, completing directions) follows from the GLOBAL shape and global indices,
so it does not depend on the cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from curvadion.comm.collectives import group_size


@dataclass(frozen=True)
class Extent:
    """The rows (or columns) of a matrix that are held here, of a dimension cut over a group.

    Attributes:
        indices: global indices held here, contiguous; may be empty.
        group: the ranks that hold the others; None if all are here.
        shared: global indices of which several ranks of the group hold a part each, ascending. A
            cut between elements instead of between rows (ZeRO, FSDP1) leaves such rows.
        borrowed: whether the first index held here is a shared one that begins on another rank,
            which is the one to count it in sums over the group.
    """

    indices: range
    group: dist.ProcessGroup | None = None
    shared: tuple[int, ...] = ()
    borrowed: bool = False

    def __len__(self) -> int:
        return len(self.indices)

    def positions(self, device: torch.device) -> Tensor:
        """The global indices as an int64 tensor, (len(self),)."""
        return torch.arange(self.indices.start, self.indices.stop, device=device)

    def counted(self, tensor: Tensor) -> Tensor:
        """The part of (..., len(self), r) that this rank contributes to sums over the group."""
        return tensor[..., 1:, :] if self.borrowed else tensor

    def shared_here(self) -> list[tuple[int, int]]:
        """(place in ``shared``, place among ``indices``) of the shared indices held here."""
        return [
            (slot, index - self.indices.start)
            for slot, index in enumerate(self.shared)
            if index in self.indices
        ]


@dataclass(frozen=True)
class MatrixLayout:
    """Orientation and cut of one matrix.

    Attributes:
        shape: global shape (m, n), output features first.
        rows, columns: of the ORIENTED matrix B, the matrix or its transpose, whose global shape is
            (max(m, n), min(m, n)).
        replicas: the ranks holding the same piece of the other replicas; None for one replica.
        rows_and_replicas, columns_and_replicas: the unions, over which a sum over shards and a
            mean over replicas travel in one collective. They default to the one group that exists
            and are required where both do.
        shards: the ranks that hold all pieces of this replica's matrix; None if it is whole.
    """

    shape: tuple[int, int]
    rows: Extent
    columns: Extent
    replicas: dist.ProcessGroup | None = None
    rows_and_replicas: dist.ProcessGroup | None = None
    columns_and_replicas: dist.ProcessGroup | None = None
    shards: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        rows, columns = self.rows.group, self.columns.group
        self._default_union("rows_and_replicas", rows, self.replicas)
        self._default_union("columns_and_replicas", columns, self.replicas)
        self._default_union("shards", rows, columns)

    def _default_union(
        self, name: str, one: dist.ProcessGroup | None, other: dist.ProcessGroup | None
    ) -> None:
        if getattr(self, name) is None:
            if one is not None and other is not None:
                raise ValueError(f"{name} is needed: pass the process group of all ranks in either")
            object.__setattr__(self, name, one or other)

    @classmethod
    def whole(
        cls, shape: tuple[int, int], replicas: dist.ProcessGroup | None = None
    ) -> MatrixLayout:
        """A matrix that every replica holds uncut."""
        return cls(shape, Extent(range(max(shape))), Extent(range(min(shape))), replicas)

    @property
    def transposed(self) -> bool:
        """Whether B is the transpose: B has no fewer rows than columns."""
        return self.shape[0] < self.shape[1]

    @property
    def update_scale(self) -> float:
        """sqrt(fan_out / fan_in), the factor of the orthonormal update (Dion, section 2)."""
        m, n = self.shape
        return math.sqrt(m / n)

    def rank(self, rank_fraction: float, rank_multiple_of: int) -> int:
        """r = min(multiple * ceil(fraction * min(m, n) / multiple), m, n)."""
        smaller = min(self.shape)
        # The fraction is a decimal that a user typed: 0.07 * 100 must give 7, not 8.
        wanted = math.ceil(round(rank_fraction * smaller, 9) / rank_multiple_of)
        return min(rank_multiple_of * wanted, smaller)

    def initial_q(self, rank: int) -> Tensor:
        """The rows held here of Q ~ N(0, 1), (len(columns), rank) float32, drawn from the shape."""
        m, n = self.shape
        generator = torch.Generator("cpu").manual_seed((m * 1_000_003 + n) * 1_000_003 + rank)
        q = torch.randn(min(m, n), rank, generator=generator, dtype=torch.float32, device="cpu")
        return q[self.columns.indices.start : self.columns.indices.stop]

    def inside_replica(self) -> MatrixLayout:
        """The same cut, for a step that no other replica takes part in."""
        return replace(self, replicas=None, rows_and_replicas=None, columns_and_replicas=None)

    def share_of_R(self) -> float:
        """What part of this rank's R counts in a sum over ``shards``: rows' ranks hold it alike."""
        return 1.0 / group_size(self.rows.group)
