"""Weight decay only where the step already shrinks a weight (arXiv 2510.12402).

X <- X - lr (scale U + weight_decay [U X >= 0] X)          by element
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from curvadion.update.update_hooks import UpdateBatch


@dataclass(frozen=True)
class CautiousWeightDecay:
    """Decay elements whose sign is that of their direction, by the group's ``weight_decay``.

    Algorithm 1 of Cautious Weight Decay (arXiv 2510.12402). It takes the weight decay of all
    groups with matrices. Register hooks that change directions before it.
    """

    capturable: ClassVar[bool] = True

    def __call__(self, batch: UpdateBatch) -> None:
        """Move the decay into U; collective: nothing is sent."""
        for m in batch:
            # A product of tiny numbers may be zero, one of signs is not.
            agrees = m.U.sign() * m.X.sign() >= 0
            # lr scale U takes what lr weight_decay X took
            share = m.on_device(m.weight_decay / m.scale)
            m.U += share * torch.where(agrees, m.X, 0.0)
            m.weight_decay = 0.0
