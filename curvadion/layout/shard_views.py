"""From a parameter's local tensor to the local pieces of its matrices, and back."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Whole rows of one matrix in a local tensor of shape (*stack, rows, ...).

    Attributes:
        stack: index into the leading dimensions that enumerate matrices; () if there are none.
        rows: the block's rows among the local ones.
        input_first: the tensor holds the transpose of each matrix.
    """

    stack: tuple[int, ...]
    rows: slice
    input_first: bool = False

    is_view = True

    def elements(self, local: Tensor) -> Tensor:
        """The held elements as a view of any shape."""
        matrix = local[self.stack]
        return (matrix.mT if self.input_first else matrix)[self.rows]

    def read(self, local: Tensor) -> Tensor:
        """The piece as a 2-D view."""
        held = self.elements(local)
        return held.view(held.shape[0], math.prod(held.shape[1:]))

    def held(self, piece: Tensor) -> Tensor:
        """The elements of a piece that are held here: all."""
        return piece

    def write(self, local: Tensor, piece: Tensor) -> None:
        """Nothing to do: the piece is a view of the local tensor."""


@dataclass(frozen=True)
class FlatRange:
    """Elements [start, stop) of a row-major (m, n) matrix, from ``offset`` in a flat tensor.

    The first and the last row may be held in part: :meth:`read` fills them up with zeros, so that
    products are this rank's summands. ``input_first``: the pieces to read, write and hold are those
    of the matrix's transpose.
    """

    start: int
    stop: int
    columns: int
    offset: int = 0
    input_first: bool = False

    @property
    def rows(self) -> range:
        """Global indices of the rows of which elements are held here."""
        if self.start == self.stop:
            return range(0)
        return range(self.start // self.columns, -(-self.stop // self.columns))

    @property
    def is_view(self) -> bool:
        """Whether all rows held here are whole."""
        return self.stop - self.start == len(self.rows) * self.columns

    def elements(self, local: Tensor) -> Tensor:
        """The held elements as a 1-D view."""
        return local.view(-1)[self.offset : self.offset + self.stop - self.start]

    def read(self, local: Tensor) -> Tensor:
        """The piece (len(rows), n), a view where its rows are whole and a padded copy elsewhere."""
        held = self.elements(local)
        if self.is_view:
            return self._turned(held.view(len(self.rows), self.columns))
        padded = torch.zeros(len(self.rows), self.columns, dtype=local.dtype, device=local.device)
        piece = self._turned(padded)
        self.held(piece).copy_(held)
        return piece

    def write(self, local: Tensor, piece: Tensor) -> None:
        """Copy the held elements of a piece back, unless it is a view of them."""
        if not self.is_view:
            self.elements(local).copy_(self.held(piece))

    def held(self, piece: Tensor) -> Tensor:
        """The elements of a padded piece that are held here, 1-D; a view if its rows are dense."""
        skipped = self.start - self.rows.start * self.columns
        return self._turned(piece).reshape(-1)[skipped : skipped + self.stop - self.start]

    def _turned(self, piece: Tensor) -> Tensor:
        return piece.mT if self.input_first else piece


Piece = Block | FlatRange
