"""Views of a parameter's local tensor: the shards of its matrices that lie in it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


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
