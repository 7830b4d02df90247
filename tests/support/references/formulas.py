"""What an optimizer step sends, in bytes per rank, as functions of how a matrix is held.

B is the matrix or its transpose, whichever has no fewer rows than columns, and r its rank. A rank
holds ``rows`` of B's rows, the others being with ``row_ranks`` ranks (itself included), and
``columns`` of its columns, the others with ``column_ranks``. Products are float32, Gram matrices
and squares float64. A collective over one rank is not sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

GATE = 24  # what the ranks of a meeting agree on


@dataclass(frozen=True)
class Held:
    """One matrix as one rank holds it; shared: rows or columns that lie on several ranks.

    row_axes, column_axes: names of the mesh axes that shard them.
    """

    rows: int
    columns: int
    r: int
    row_ranks: int = 1
    column_ranks: int = 1
    replicas: int = 1
    shared_rows: int = 0
    shared_columns: int = 0
    row_axes: tuple[object, ...] = ()
    column_axes: tuple[object, ...] = ()


def chunk(size, pieces, place):
    """How many of ``size`` the rank at ``place`` holds: torch.chunk's rule."""
    whole = -(-size // pieces)
    return max(0, min(whole, size - place * whole))


def held(shape, r, *, m_cuts=(), n_cuts=(), replicas=1):
    """An (m, n) matrix; m_cuts, n_cuts: (axis, its size, this place on it), the first one first."""
    sizes, ranks, axes = list(shape), [1, 1], [(), ()]
    for dim, shardings in enumerate((m_cuts, n_cuts)):
        for axis, pieces, place in shardings:
            sizes[dim], ranks[dim] = chunk(sizes[dim], pieces, place), ranks[dim] * pieces
            axes[dim] += (axis,)
    if shape[0] < shape[1]:
        sizes, ranks, axes = sizes[::-1], ranks[::-1], axes[::-1]
    return Held(*sizes, r, *ranks, replicas, row_axes=axes[0], column_axes=axes[1])


def left_product(x: Held) -> int:
    """P = B Q: summed over the columns' ranks and averaged over replicas in one collective."""
    return 4 * x.rows * x.r if x.column_ranks * x.replicas > 1 else 0


def right_product(x: Held) -> int:
    """R = B^T P: summed over the rows' ranks and averaged over replicas in one collective."""
    return 4 * x.columns * x.r if x.row_ranks * x.replicas > 1 else 0


def shared_products(x: Held) -> int:
    """Rows of P and of R whose summands lie on several ranks: shards of elements only."""
    return 4 * (x.shared_rows + x.shared_columns) * x.r


def gram(x: Held) -> int:
    """One triangle of P^T P: sent twice to make P's columns orthonormal."""
    return 8 * x.r * (x.r + 1) // 2 if x.row_ranks > 1 else 0


def column_norms(x: Held) -> int:
    """Squared lengths of R's columns, whose rows are B's columns, in float64."""
    return 8 * x.r if x.column_ranks > 1 else 0


def norm(x: Held) -> int:
    """One square that is summed over the shards of one replica, in float64."""
    return 8 if x.row_ranks * x.column_ranks > 1 else 0


def low_rank_step(x: Held) -> int:
    """Everything that the update of one matrix sends."""
    products = left_product(x) + right_product(x) + shared_products(x)
    return products + 2 * gram(x) + column_norms(x)


def open_step(matrices: Iterable[Held], *, elementwise=0, reads_momentum=False) -> int:
    """A step with the gate open; elementwise: numbers held of AdamW's and Lion's parameters.

    A gate that reads momenta needs their norms before the step, and what the step took from them.
    """
    norms = 2 if reads_momentum else 0
    matrices = list(matrices)
    replicated = any(x.replicas > 1 for x in matrices)
    update = sum(low_rank_step(x) + norms * norm(x) for x in matrices)
    return GATE + update + (4 * elementwise if replicated else 0)


def closed_step(matrices: Iterable[Held], *, reads_momentum=True) -> int:
    """A step with the gate closed, where the local step is the gradient's."""
    return GATE + (sum(norm(x) for x in matrices) if reads_momentum else 0)


def largest_message(matrices: Iterable[Held]) -> int:
    """The largest single message of an open-gate step.

    Messages of one kind over the same ranks travel together: all P's, all R's, and so on.
    """
    messages: dict[tuple[object, ...], int] = {}
    for x in matrices:
        rows, columns = frozenset(x.row_axes), frozenset(x.column_axes)
        for kind, axes in (
            (left_product, (columns, x.replicas)),
            (right_product, (rows, x.replicas)),
            (shared_products, rows | columns),
            (gram, rows),
            (column_norms, columns),
            (norm, rows | columns),
        ):
            messages[kind, axes] = messages.get((kind, axes), 0) + kind(x)
    return max(GATE, *messages.values())
