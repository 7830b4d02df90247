"""Where the local piece of a matrix lies, and which process groups hold the rest.

A matrix is cut in at most two ways, its rows over one group and its columns over another,
and may be replicated over a third. Everything that decides a trajectory (orientation, rank,
initial right factor, completing directions) follows from the GLOBAL shape and global indices,
so it does not depend on the cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """The process groups that hold the other pieces of an oriented matrix B (rows >= columns).

    Attributes:
        rows: ranks holding the other rows of the same columns; None if the rows are whole.
        columns: ranks holding the other columns of the same rows; None if they are whole.
        replicas: ranks holding the same piece of the other replicas; None for one replica.
        columns_and_replicas, rows_and_replicas: the unions, over which a sum over shards and
            a mean over replicas travel in one collective. They default to the one group that
            exists and are required where both do.
    """

    rows: dist.ProcessGroup | None = None
    columns: dist.ProcessGroup | None = None
    replicas: dist.ProcessGroup | None = None
    columns_and_replicas: dist.ProcessGroup | None = None
    rows_and_replicas: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        for name in ("columns", "rows"):
            shards, union = getattr(self, name), f"{name}_and_replicas"
            if getattr(self, union) is not None:
                continue
            if shards is not None and self.replicas is not None:
                raise ValueError(
                    f"Cut has both {name} and replicas but no {union}: pass the process group "
                    f"of all ranks in either."
                )
            object.__setattr__(self, union, shards or self.replicas)

    def inside_replica(self) -> Cut:
        """The same cut for a step that no other replica takes part in."""
        return Cut(rows=self.rows, columns=self.columns)


@dataclass(frozen=True)
class MatrixLayout:
    """Orientation, cut and global indices of one matrix parameter's local piece.

    Attributes:
        shape: global shape (m, n) of the parameter, output features first.
        cut: the process groups of the ORIENTED matrix B, whose global shape is
            (max(m, n), min(m, n)).
        rows, columns: global indices of B's rows and columns held here, int64 on the CPU.
    """

    shape: tuple[int, int]
    cut: Cut = Cut()
    rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64), compare=False)
    columns: Tensor = field(
        default_factory=lambda: torch.empty(0, dtype=torch.int64), compare=False
    )

    @classmethod
    def whole(cls, shape: tuple[int, int], replicas: dist.ProcessGroup | None) -> MatrixLayout:
        """A matrix that every replica holds uncut."""
        return cls(
            shape,
            Cut(replicas=replicas),
            rows=torch.arange(max(shape)),
            columns=torch.arange(min(shape)),
        )

    @property
    def transposed(self) -> bool:
        """Whether B is the transpose of the parameter: B has no fewer rows than columns."""
        return self.shape[0] < self.shape[1]

    @property
    def update_scale(self) -> float:
        """sqrt(fan_out / fan_in), the factor of the orthonormal update (Dion, section 2)."""
        m, n = self.shape
        return math.sqrt(m / n)

    def oriented(self, tensor: Tensor) -> Tensor:
        """View a tensor of the parameter's shape as B or the like, without a copy."""
        return tensor.mT if self.transposed else tensor

    def rank(self, rank_fraction: float, rank_multiple_of: int) -> int:
        """r = min(multiple * ceil(fraction * min(m, n) / multiple), m, n)."""
        smaller = min(self.shape)
        # The fraction is a decimal that a user typed: 0.07 * 100 must give 7, not 8.
        wanted = math.ceil(round(rank_fraction * smaller, 9) / rank_multiple_of)
        return min(rank_multiple_of * wanted, smaller)

    def initial_q(self, rank: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The rows held here of Q ~ N(0, 1), shape (len(columns), rank), drawn from the shape."""
        m, n = self.shape
        generator = torch.Generator().manual_seed((m * 1_000_003 + n) * 1_000_003 + rank)
        q = torch.randn(min(m, n), rank, generator=generator)
        return q[self.columns].to(device=device, dtype=dtype)

    def without_replicas(self) -> MatrixLayout:
        """The layout of a step that stays inside the replica."""
        return replace(self, cut=self.cut.inside_replica())
