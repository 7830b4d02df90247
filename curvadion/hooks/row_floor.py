"""No row moves by less than a share of its length (RowFloor, modded-nanogpt pull request 328).

U_i <- U_i max(1, ratio |X_i| / (scale |U_i|))             by row i
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from curvadion import checks
from curvadion.update.update_hooks import UpdateBatch


@dataclass(frozen=True)
class RowFloor:
    """Lengthen rows of an update that are shorter than ``ratio`` times the row of weights.

    So after a step with learning rate lr each row has moved by lr ratio |X_i| or more: a floor
    of the relative step, which replaces what decay does to long rows. In the record of
    modded-nanogpt's optimizer benchmark (pull request 328) it saved 18 of about 2700 steps, where
    weights were also rescaled to a fixed length after each step; without that, rows may grow. A
    row of zeros stays. On shards that cut rows it sends two numbers a row.

    Args:
        ratio: of lengths, 0 or more. Default 0.3825, the record's.
    """

    ratio: float = 0.3825

    capturable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.number("ratio", self.ratio)

    def __call__(self, batch: UpdateBatch) -> None:
        """Scale rows of U; collective over the shards of rows."""
        weights = batch.row_sums([m.X.to(m.U.dtype).square() for m in batch])
        updates = batch.row_sums([m.U.square() for m in batch])
        for m, x, u in zip(batch, weights, updates, strict=True):
            # max(1, ratio |X_i| / (scale |U_i|))
            factor = (self.ratio / m.scale * x.sqrt() / u.sqrt()).clamp_min(1.0)
            m.U *= torch.where(u > 0, factor, 1.0)[:, None].to(m.U.dtype)
