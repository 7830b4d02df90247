"""Another rank, direction or form of the matrices is refused in mid-run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from curvadion import Dion
from support.runs.seeded import gradient, weights

# Shapes with the keys of their group.
KINDS = {"tall": ((13, 8), {}), "stack": ((3, 7, 5), {"stack_dims": 1})}


@pytest.mark.parametrize(
    ("kind", "key", "given"),
    [
        ("tall", "rank_fraction", 0.9),
        ("tall", "direction", "polar"),
        ("tall", "row_blocks", 13),
        ("stack", "stack_dims", 0),
    ],
)
def test_in_mid_run_it_is_refused_and_set_back_changes_nothing(kind, key, given):
    ends = []
    for changes in (False, True):
        shape, options = KINDS[kind]
        X = nn.Parameter(weights(shape))
        optimizer = Dion([{"params": [("w", X)], **options}], rank_fraction=0.5)
        (group,) = optimizer.param_groups
        before = group[key]
        for step in range(4):
            X.grad = gradient(shape, step, 0)
            if changes and step == 2:
                group[key] = given
                with pytest.raises(ValueError, match=rf"w.*{key}={given!r}"):
                    optimizer.step()
                group[key] = before
            optimizer.step()
        ends.append(X.detach())
    assert torch.equal(*ends)
