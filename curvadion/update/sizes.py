"""How many elements a step works on at a time, by device.

A GPU needs few large batches, because each costs a fixed number of launches. A CPU needs many small
ones, which stay in its caches. Ranks must agree on them, so only the type of the device decides.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Most(NamedTuple):
    """The most elements of a batch; a single matrix may have more."""

    batch: int  # on a rank; a step or an opening holds about five copies
    squares: int  # of the n x n matrices of Newton-Schulz iterations, about six copies
    wide: int  # of float64 copies while columns are orthonormalised


ON_CPU = Most(batch=2**22, squares=2**20, wide=2**20)
ON_ACCELERATORS = Most(batch=2**27, squares=2**27, wide=2**26)


def most_together(device: torch.device) -> Most:
    """The sizes for tensors on a device."""
    return ON_CPU if device.type == "cpu" else ON_ACCELERATORS
