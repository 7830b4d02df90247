"""Runs the order of tiles of symmetric products by itself, for sizes that no matrix here has."""

import torch
import triton
import triton.language as tl

from curvadion_kernels.symmetric import GROUP, tile_of

COUNT = 4096


@triton.jit
def kernel(tiles, first, rows, GROUP: tl.constexpr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    # Numbers beyond the end take the last tile.
    row, column = tile_of(tl.minimum(first + at, rows * (rows + 1) // 2 - 1), rows, GROUP)
    tl.store(tiles + 2 * at, row)
    tl.store(tiles + 2 * at + 1, column)


def tiles_from(first, rows, device):
    """Row and column of tiles first, first + 1, ... of a lower triangle: (COUNT, 2) int64."""
    tiles = torch.empty(COUNT, 2, dtype=torch.int32, device=device)
    kernel[(1,)](tiles, first, rows, GROUP=GROUP, COUNT=COUNT)
    return tiles.long().cpu()


def number_of(row, column, rows):
    """The number of a tile, from the order's description."""
    first = row // GROUP * GROUP
    height = (rows - first).clamp(max=GROUP)
    before = first * (first + 1) // 2
    i, j = row - first, column - first
    return before + torch.where(j < 0, column * height + i, first * height + i * (i + 1) // 2 + j)


def check_tiles(device):
    """Every number has its own tile, in triangles of any size."""
    for rows in (1, 2, 7, 8, 9, 17, 64, 90):
        count = rows * (rows + 1) // 2
        found = tiles_from(0, rows, device)[:count]
        assert torch.equal(found.unique(dim=0), torch.ones(rows, rows).tril().nonzero())
    for rows in (1000, 4099, 20_001, 46_000):
        count = rows * (rows + 1) // 2
        for first in (0, count // 3, count - rows - COUNT, count - COUNT):
            row, column = tiles_from(first, rows, device).unbind(1)
            assert ((column >= 0) & (column <= row) & (row < rows)).all()
            assert torch.equal(number_of(row, column, rows), torch.arange(first, first + COUNT))
