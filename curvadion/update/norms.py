"""Norms of momenta: one tensor for all, of which the states hold views."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from curvadion.layout.dtensor import local
from curvadion.update.gradients import same
from curvadion.update.state import MOMENTUM_NORM

_stored = itemgetter(MOMENTUM_NORM)


class StoredNorms:
    """Every state's "momentum_norm" as one tensor, (k,): the states hold views of it.

    Hundreds of copies of one number each would take longer than the norms themselves. States that
    are sharded, or that have come from elsewhere, are read and written one by one.
    """

    def __init__(self) -> None:
        self._views: list[Tensor] = []
        self._all = torch.empty(0, dtype=torch.float32, device="cpu")

    def read(self, states: Sequence[dict[str, Any]]) -> Tensor:
        """The norms that the states hold, (k,)."""
        stored = list(map(_stored, states))
        if not same(self._views, stored):
            held = [local(norm) for norm in stored]
            self._all = torch.cat([norm.reshape(-1) for norm in held])
            if not same(held, stored):
                return self._all
            split = self._all.split([norm.numel() for norm in held])
            self._views = [view.view(n.shape) for view, n in zip(split, held, strict=True)]
            for state, view in zip(states, self._views, strict=True):
                state[MOMENTUM_NORM] = view
        return self._all

    def write(self, states: Sequence[dict[str, Any]], norms: Tensor) -> None:
        """Store one norm per matrix, (k,)."""
        stored = list(map(_stored, states))
        if same(self._views, stored):
            self._all.copy_(norms)
            return
        held = [local(norm) for norm in stored]
        split = norms.split([norm.numel() for norm in held])
        for norm, values in zip(held, split, strict=True):
            norm.copy_(values.view(norm.shape))
