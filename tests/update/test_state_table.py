"""The table of state names every key that an optimizer makes, and decides what is averaged."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distributed
from curvadion import CurvaDion, Dion, FixedPeriod, LowRank, QuantizedAverage
from curvadion.update.state import Owner, key_of, like_parameter
from flat_shards import declared
from tolerance import Rounding, assert_close

pytestmark = pytest.mark.numeric

# Shapes with the keys of their group. Of 12 rows in blocks of 8 and 4 with 5 columns, one block is
# upright and one is not.
KINDS = {
    "matrix": ((8, 6), {}),
    "unequal blocks": ((12, 5), {"row_blocks": [8, 4]}),
    "stacked blocks": ((2, 12, 5), {"stack_dims": 1, "row_blocks": [8, 4]}),
    "input first": ((6, 8), {"input_first": True}),
    "narrow": ((8, 6), {"momentum_dtype": "bfloat16", "q_dtype": "bfloat16"}),
    "adamw": ((7,), {"algorithm": "adamw"}),
    "lion": ((4, 3), {"algorithm": "lion"}),
}
OPTIMIZERS = {
    "Dion": None,
    "LowRank": LowRank(),
    "QuantizedAverage": QuantizedAverage(fragments=2, spectrum_decay=0.8),
}


def random(shape, *seeds):
    seed = sum(1000**i * s for i, s in enumerate(seeds))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def optimizer_of(groups, kind, replicas):
    if OPTIMIZERS[kind] is None:
        return Dion(groups, replicas=replicas)
    return CurvaDion(groups, replicas=replicas, gate=FixedPeriod(3), sync=OPTIMIZERS[kind])


def run(kind, replicas, groups, rank, shapes):
    """An optimizer after four steps: one on its own, after an opening."""
    optimizer = optimizer_of(groups, kind, replicas)
    X = [x for group in optimizer.param_groups for x in group["params"]]
    for step in range(4):
        for i, (x, shape) in enumerate(zip(X, shapes, strict=True)):
            x.grad = random(shape, i, step, rank)
        optimizer.step()
    return optimizer, X


def of_whole_parameters(kind, replicas, rank):
    made = [(random(shape, i), options) for i, (shape, options) in enumerate(KINDS.values())]
    groups = [{"params": [(f"x{i}", nn.Parameter(x))], **o} for i, (x, o) in enumerate(made)]
    return run(kind, replicas, groups, rank, [shape for shape, _ in KINDS.values()])


def made(optimizer):
    """Per parameter, the keys of its state and whether each has the parameter's shape."""
    return [
        {key: getattr(value, "shape", None) == x.shape for key, value in state.items()}
        for x, state in optimizer.state.items()
    ]


def flat_shards(rank, kind):
    """Two replicas of a matrix, a stack and a vector in flat shards."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    group, replica, place = mesh.get_group(1), *(mesh.get_local_rank(i) for i in (0, 1))
    sharding = {
        "matrix": ((9, 7), (31, 63), {}),
        "stack": ((3, 6, 4), (29, 72), {"stack_dims": 1}),
        "blocks": ((12, 5), (29, 60), {"row_blocks": [8, 4]}),
        "adamw": ((8,), (3, 8), {"algorithm": "adamw"}),
        "lion": ((8,), (3, 8), {"algorithm": "lion"}),
    }
    X = [declared(random(shape, 1), ends, place, group) for shape, ends, _ in sharding.values()]
    groups = [{"params": [x], **o} for x, (_, _, o) in zip(X, sharding.values(), strict=True)]
    shapes = [x.shape for x in X]
    return made(run(kind, mesh.get_group(0), groups, 2 * replica + place, shapes)[0])


def check(states, kind):
    sync = OPTIMIZERS[kind] or LowRank()
    shaped = like_parameter(sync.state_keys)
    for state in states:
        for name, like in state.items():
            assert key_of(name, sync.state_keys) is not None, name
            assert name not in shaped or like, name
    return {key_of(name, sync.state_keys).name for state in states for name in state}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_key_of_every_state_is_in_the_table(kind):
    ours, theirs = distributed.run(2, keys_of_whole_parameters, kind)
    assert ours == theirs
    seen = check(ours, kind)
    wanted = {"momentum", "R_scale", "exp_avg", "exp_avg_sq", "step", "momentum_norm"}
    if kind == "QuantizedAverage":
        of_sync = {"anchor", "residual", "spectrum", "spectrum_weight"}
        assert seen == wanted | of_sync
        return
    assert seen == wanted | {"Q"}
    assert any("Q_rows" in state for state in ours)


def keys_of_whole_parameters(rank, kind):
    return made(of_whole_parameters(kind, dist.group.WORLD, rank)[0])


@pytest.mark.parametrize("kind", ["Dion", "QuantizedAverage"])
def test_every_key_of_flat_shards_is_in_the_table(kind):
    for states in distributed.run(4, flat_shards, kind):
        assert {"flat_shard_start", "momentum"} <= check(states, kind)
        assert any("Q_1" in state for state in states) == (kind == "Dion")


# -------------------------------------------------------------------- what is averaged


def synchronize(rank, kind):
    """Before and after an exact synchronisation, when all state is the rank's own."""
    optimizer, X = of_whole_parameters(kind, dist.group.WORLD, rank)
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


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_exact_synchronisation_does_to_each_key_what_the_table_says(kind):
    (ours, after), (theirs, after_there) = distributed.run(2, synchronize, kind)
    sync = OPTIMIZERS[kind] or LowRank()
    seen = set()
    for mine, yours, now, there in zip(ours, theirs, after, after_there, strict=True):
        assert now.keys() == mine.keys()
        for name, value in now.items():
            key = key_of(name, sync.state_keys)
            if key is None and name != "X":
                # No table names it: it is each rank's own as it was.
                for left, was in ((value, mine[name]), (there[name], yours[name])):
                    assert left == was if isinstance(was, str) else left.equal(was)
                seen.add(None)
                continue
            if key is not None:
                seen.add(key.owner)
            if key is None or key.owner is Owner.REPLICA:
                lost = (
                    (mine["residual"].float() + yours["residual"].float()) / 2
                    if name == "X" and "residual" in mine
                    else 0
                )
                mean = (mine[name].float() + yours[name].float()) / 2 + lost
                assert_close(value, mean.to(value.dtype), Rounding(torch.float32), what=name)
                assert value.equal(there[name]), name
            elif key.owner is Owner.MEASURED:
                assert value.equal(there[name])
                norm = now["momentum"].float().norm()
                rounding = Rounding(torch.float32, terms=now["momentum"].numel())
                assert_close(value.square().sum().sqrt(), norm, rounding, what=name)
            elif name == "anchor":
                assert value.equal(now["X"])
            else:
                assert name in ("residual", "spectrum", "spectrum_weight")
                assert not torch.as_tensor(value).any()
    expected = {None, Owner.REPLICA, Owner.MEASURED}
    assert seen == expected | ({Owner.SYNC} if sync.state_keys else set())
