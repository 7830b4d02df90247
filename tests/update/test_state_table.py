"""An exact synchronisation does to each key of state what the table of state says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from curvadion import CurvaDion, FixedPeriod, LowRank, QuantizedAverage
from curvadion.plan.state import StateOwner, key_of
from curvadion.update.registry import state_keys
from support.references.tolerance import Rounding, assert_close
from support.runs import distributed

pytestmark = pytest.mark.numeric

# Shapes with the keys of their group. Of 12 rows in blocks of 8 and 4 with 5 columns, one block is
# upright and one is not.
KINDS = {
    "matrix": ((8, 6), {}),
    "unequal blocks": ((12, 5), {"row_blocks": [8, 4]}),
    "stacked blocks": ((2, 12, 5), {"stack_dims": 1, "row_blocks": [8, 4]}),
    "input first": ((6, 8), {"input_first": True}),
    "narrow": ((8, 6), {"state_dtype": "bfloat16", "q_dtype": "bfloat16"}),
    "adamw": ((7,), {"algorithm": "adamw"}),
    "lion": ((4, 3), {"algorithm": "lion"}),
}
SYNCS = {
    "LowRank": LowRank(),
    "QuantizedAverage": QuantizedAverage(fragments=2, spectrum_decay=0.8),
}


def random(shape, *seeds):
    seed = sum(1000**i * s for i, s in enumerate(seeds))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def trained(kind, rank):
    """An optimizer after four steps: one on its own, after an opening."""
    groups = [
        {"params": [(f"x{i}", nn.Parameter(random(shape, i)))], **options}
        for i, (shape, options) in enumerate(KINDS.values())
    ]
    how = {"replicas": dist.group.WORLD, "gate": FixedPeriod(3), "sync": SYNCS[kind]}
    optimizer = CurvaDion(groups, **how)
    X = [x for group in optimizer.param_groups for x in group["params"]]
    for step in range(4):
        for i, x in enumerate(X):
            x.grad = random(x.shape, i, step, rank)
        optimizer.step()
    return optimizer, X


def synchronize(rank, kind):
    """Before and after an exact synchronisation, when all state is the rank's own."""
    optimizer, X = trained(kind, rank)
    for i, x in enumerate(X):
        for key, value in optimizer.state[x].items():
            if isinstance(value, torch.Tensor) and key != "step":
                value += 0.1 * random(value.shape, i, len(key), rank).to(value.dtype)
        if "step" in optimizer.state[x]:
            optimizer.state[x]["step"] += rank
        optimizer.state[x]["mystery"] = random((3,), i, rank)
        optimizer.state[x]["text"] = f"of rank {rank}"
    before = [snapshot(optimizer, x) for x in X]
    optimizer.synchronize(exact=True)
    return before, [snapshot(optimizer, x) for x in X]


def snapshot(optimizer, x):
    state = optimizer.state[x].items()
    held = {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in state}
    return held | {"X": x.detach().clone()}


@pytest.mark.parametrize("kind", SYNCS)
def test_an_exact_synchronisation_does_to_each_key_what_the_table_says(kind):
    (ours, after), (theirs, after_there) = distributed.run(2, synchronize, kind)
    sync = SYNCS[kind]
    seen = set()
    for mine, yours, now, there in zip(ours, theirs, after, after_there, strict=True):
        assert now.keys() == mine.keys()
        for name, value in now.items():
            key = key_of(name, (*sync.state_keys, *state_keys()))
            if key is None and name != "X":
                # No table names it: it is each rank's own as it was.
                for left, was in ((value, mine[name]), (there[name], yours[name])):
                    assert left == was if isinstance(was, str) else left.equal(was)
                seen.add(None)
                continue
            if key is not None:
                seen.add(key.owner)
            if key is None or key.owner is StateOwner.REPLICA:
                lost = (
                    (mine["residual"].float() + yours["residual"].float()) / 2
                    if name == "X" and "residual" in mine
                    else 0
                )
                mean = (mine[name].float() + yours[name].float()) / 2 + lost
                assert_close(value, mean.to(value.dtype), Rounding(torch.float32), what=name)
                assert value.equal(there[name]), name
            elif key.owner is StateOwner.MEASURED:
                assert value.equal(there[name])
                norm = now["momentum"].float().norm()
                rounding = Rounding(torch.float32, terms=now["momentum"].numel())
                assert_close(value.square().sum().sqrt(), norm, rounding, what=name)
            elif name == "anchor":
                assert value.equal(now["X"])
            else:
                assert name in ("residual", "spectrum", "spectrum_weight")
                assert not torch.as_tensor(value).any()
    expected = {None, StateOwner.REPLICA, StateOwner.MEASURED}
    assert seen == expected | ({StateOwner.SYNC} if sync.state_keys else set())
