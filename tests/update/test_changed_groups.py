"""Another rank takes effect when a state is loaded, and in mid-run is refused."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import distributed
from curvadion import CurvaDion, Dion
from flat_shards import declared, flat, matrices_of
from reference import DionReference, initial_q
from scheduled import Scheduled
from seeded import gradient, weights
from shards import shard
from tolerance import Rounding, assert_close

pytestmark = pytest.mark.numeric

# Shapes with the keys of their group.
KINDS = {
    "tall": ((13, 8), {}),
    "wide": ((6, 11), {}),
    "upright and other blocks": ((12, 5), {"row_blocks": (8, 4)}),
    "stack": ((3, 7, 5), {"stack_dims": 1}),
    "input first": ((9, 14), {"input_first": True}),
}
STEPS, OPEN_STEPS = 10, (1, 4, 5, 8)
ROUNDING = Rounding(torch.float32, terms=14, steps=STEPS)
FIRST, CHANGE = 0.5, 6  # the rank at first, and the step before which another one is loaded


def rank_of(shape, fraction, multiple=1):
    r = -(-round(fraction * min(shape), 9) // 1)
    return int(min(min(shape), -(-r // multiple) * multiple))


def build(X, replicas, **more):
    """X: parameters in the order of KINDS."""
    options = [keys for _, keys in KINDS.values()]
    groups = [{"params": [x], **o} for x, o in zip(X, options, strict=True)]
    how = {"gate": Scheduled(OPEN_STEPS), "rank_fraction": FIRST, **more}
    return CurvaDion(groups, replicas=replicas, **how)


def with_another_rank(optimizer, X, replicas, keys):
    """A new optimizer that goes on from the state of this one, while replicas have drifted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of replicas that have drifted
        saved = copy.deepcopy(optimizer.state_dict())
    changed = build(X, replicas, **keys)
    changed.load_state_dict(saved)
    changed.gate.asked = optimizer.gate.asked
    return changed


def placed(x, layout, mesh):
    if layout == "flat":
        n = x.numel()
        return declared(x, (n // 2 + 1, n), mesh.get_local_rank("shard"), mesh.get_group("shard"))
    return nn.Parameter(shard(x, ("r", layout), mesh))


def train(rank, layout, keys):
    """The replica and its whole weights; shards are those of two ranks, "r" is none."""
    shards = 1 if layout == "r" else 2
    mesh = init_device_mesh("cpu", (2, shards), mesh_dim_names=("replicate", "shard"))
    replica, replicas = mesh.get_local_rank("replicate"), mesh.get_group("replicate")
    X = [placed(weights(shape), layout, mesh) for shape, _ in KINDS.values()]
    optimizer = build(X, replicas)
    for step in range(STEPS):
        if step == CHANGE:
            optimizer = with_another_rank(optimizer, X, replicas, keys)
        for x, (shape, _) in zip(X, KINDS.values(), strict=True):
            x.grad = placed(gradient(shape, step, replica), layout, mesh).detach()
        optimizer.step()
    if layout != "flat":
        return replica, [x.full_tensor().detach() for x in X]
    found = []
    for x, (shape, _) in zip(X, KINDS.values(), strict=True):
        pieces: list = [None, None]
        dist.all_gather_object(pieces, x.detach(), group=mesh.get_group("shard"))
        found.append(torch.cat(pieces).view(shape))
    return replica, found


class Reference(DionReference):
    """Whose right factors get other columns: the first stay, new ones are initial."""

    def resize(self, r):
        new = initial_q(*self.X0.shape, r)
        for i, Q in enumerate(self.Q):
            kept = min(r, Q.shape[1])
            self.Q[i] = torch.cat([Q[:, :kept], new[:, kept:]], dim=1)


def expected(shape, options, keys):
    """Weights of the two replicas, put together from their matrices."""
    matrices = [
        Reference(X, 2, rank_of(X.shape, FIRST)) for X in matrices_of(weights(shape), options)
    ]
    for step in range(STEPS):
        each = [matrices_of(gradient(shape, step, i), options) for i in range(2)]
        for m, reference in enumerate(matrices):
            if step == CHANGE:
                fraction, multiple = keys["rank_fraction"], keys.get("rank_multiple_of", 1)
                reference.resize(rank_of(reference.X0.shape, fraction, multiple))
            reference.step([G[m] for G in each], step + 1 in OPEN_STEPS)
    return [flat([reference.X[i] for reference in matrices]) for i in range(2)]


@pytest.mark.parametrize(
    ("layout", "keys"),
    [
        ("r", {"rank_fraction": FIRST, "rank_multiple_of": 3}),
        ("0", {"rank_fraction": 0.9}),
        ("1", {"rank_fraction": 0.2}),
        ("flat", {"rank_fraction": 0.9}),
    ],
    ids=str,
)
def test_loaded_right_factors_keep_their_first_columns(layout, keys):
    wanted = [expected(shape, options, keys) for shape, options in KINDS.values()]
    for replica, found in distributed.run(2 if layout == "r" else 4, train, layout, keys):
        for x, each, (_, options) in zip(found, wanted, KINDS.values(), strict=True):
            assert_close(flat(matrices_of(x, options)), each[replica], ROUNDING)


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
        optimizer = Dion([{"params": [("w", X)], **options}], rank_fraction=FIRST)
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
