"""Groups that change between steps: another rank is seen on all ranks, another cut is refused."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import distributed
from curvadion import CurvaDion, Dion, FixedPeriod, LowRank, QuantizedAverage
from flat_shards import declared, flat, matrices_of
from reference import DionReference, initial_q, relative_error
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
FIRST, CHANGE = 0.5, 6  # the rank at first, and the step before which it changes, apart


def rank_of(shape, fraction, multiple=1):
    r = -(-round(fraction * min(shape), 9) // 1)
    return int(min(min(shape), -(-r // multiple) * multiple))


def build(X, replicas, **more):
    """X: parameters in the order of KINDS."""
    options = [keys for _, keys in KINDS.values()]
    groups = [{"params": [x], **o} for x, o in zip(X, options, strict=True)]
    how = {"gate": Scheduled(OPEN_STEPS), "rank_fraction": FIRST, **more}
    return CurvaDion(groups, replicas=replicas, **how)


def change_rank(optimizer, keys):
    for group in optimizer.param_groups:
        group |= keys


def values(X):
    return [x.detach().clone() for x in X]


def train(rank, keys, how, **more):
    X = [nn.Parameter(weights(shape)) for shape, _ in KINDS.values()]
    optimizer = build(X, dist.group.WORLD, **more)
    for step in range(STEPS):
        if step == CHANGE:
            optimizer = change(optimizer, keys, how, more)
            X = [x for group in optimizer.param_groups for x in group["params"]]
        for x, (shape, _) in zip(X, KINDS.values(), strict=True):
            x.grad = gradient(shape, step, rank)
        optimizer.step()
    return values(X)


def change(optimizer, keys, how, more):
    """The optimizer to go on with, whose groups have other keys."""
    if how == "deepcopy":
        optimizer = copy.deepcopy(optimizer)
    elif how == "load":
        X = [x for group in optimizer.param_groups for x in group["params"]]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of replicas that are apart
            saved = copy.deepcopy(optimizer.state_dict())
        asked, optimizer = optimizer.gate.asked, build(X, dist.group.WORLD, **more)
        optimizer.load_state_dict(saved)
        optimizer.gate.asked = asked
    if how == "other groups":
        optimizer.param_groups[:] = [dict(group) for group in optimizer.param_groups]
    change_rank(optimizer, keys)
    return optimizer


class Reference(DionReference):
    """Whose right factors get other columns: the first stay, new ones are initial."""

    def resize(self, r):
        new = initial_q(*self.X0.shape, r)
        for i, Q in enumerate(self.Q):
            kept = min(r, Q.shape[1])
            self.Q[i] = torch.cat([Q[:, :kept], new[:, kept:]], dim=1)


def expected(shape, options, fraction, multiple, at, replicas=2):
    """Weights of the replicas, put together from their matrices."""
    matrices = [
        Reference(X, replicas, rank_of(X.shape, FIRST))
        for X in matrices_of(weights(shape), options)
    ]
    for step in range(STEPS):
        each = [matrices_of(gradient(shape, step, i), options) for i in range(replicas)]
        for m, reference in enumerate(matrices):
            if step == at:
                reference.resize(rank_of(reference.X0.shape, fraction, multiple))
            reference.step([G[m] for G in each], step + 1 in OPEN_STEPS)
    return [flat([reference.X[i] for reference in matrices]) for i in range(replicas)]


def flattened(x, options):
    return flat(matrices_of(x, options))


@pytest.mark.parametrize("how", ["in place", "other groups", "deepcopy", "load"])
@pytest.mark.parametrize(
    ("fraction", "multiple"), [(0.9, 1), (0.2, 1), (FIRST, 3)], ids=["more", "fewer", "multiple"]
)
def test_right_factors_keep_their_first_columns(fraction, multiple, how):
    keys = {"rank_fraction": fraction, "rank_multiple_of": multiple}
    ranks = distributed.run(2, train, keys, how)
    for k, (shape, options) in enumerate(KINDS.values()):
        wanted = expected(shape, options, fraction, multiple, CHANGE)
        unchanged = expected(shape, options, FIRST, 1, None)
        for X, reference, other in zip(ranks, wanted, unchanged, strict=True):
            assert_close(flattened(X[k], options), reference, ROUNDING)
            another = any(
                rank_of(m.shape, FIRST) != rank_of(m.shape, fraction, multiple)
                for m in matrices_of(weights(shape), options)
            )
            assert (relative_error(flattened(X[k], options), other) > 1e-3) == another


def train_with(rank, keys, how, sync):
    return train(rank, keys, how, sync=sync, gate=FixedPeriod(5))


@pytest.mark.parametrize("sync", [QuantizedAverage(fragments=2), QuantizedAverage()], ids=repr)
def test_replicas_agree_after_a_change_of_rank(sync):
    ours, theirs = distributed.run(2, train_with, {"rank_fraction": 0.3}, "in place", sync)
    same = [x.equal(y) for x, y in zip(ours, theirs, strict=True)]
    assert any(same) if sync.fragments > 1 else all(same)


def placed(x, layout, mesh, options):
    if layout == "flat":
        n = x.numel()
        return declared(x, (n // 2 + 1, n), mesh.get_local_rank("shard"), mesh.get_group("shard"))
    return nn.Parameter(shard(x, ("r", layout), mesh))


def train_shards(rank, layout, keys):
    """Per kind, what of a shard of the weights is this rank's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replica = mesh.get_local_rank("replicate")
    X = [placed(weights(shape), layout, mesh, o) for shape, o in KINDS.values()]
    optimizer = build(X, mesh.get_group("replicate"))
    for step in range(STEPS):
        if step == CHANGE:
            change_rank(optimizer, keys)
        for x, (shape, o) in zip(X, KINDS.values(), strict=True):
            x.grad = placed(gradient(shape, step, replica), layout, mesh, o).detach()
        optimizer.step()
    if layout == "flat":
        found = []
        for x in X:
            shards: list = [None, None]
            dist.all_gather_object(shards, x.detach(), group=mesh.get_group("shard"))
            found.append(torch.cat(shards))
        return replica, found
    return replica, [x.full_tensor().detach() for x in X]


@pytest.mark.parametrize("layout", ["0", "1", "flat"])
def test_shards_of_right_factors_keep_them_too(layout):
    keys = {"rank_fraction": 0.9}
    whole = distributed.run(2, train, keys, "in place")
    for replica, found in distributed.run(4, train_shards, layout, keys):
        for x, wanted in zip(found, whole[replica], strict=True):
            assert_close(x.view(wanted.shape), wanted, ROUNDING)


# -------------------------------------------------------------------- what is refused


def change_on(rank, culprits, keys, then_back, freezes=False, loads=False):
    """What is raised if some ranks change a group, and the weights once it has been set back.

    freezes: the first parameter too. loads: a checkpoint just before the change.
    """
    X = [nn.Parameter(weights(shape)) for shape, _ in KINDS.values()]
    optimizer = build(X, dist.group.WORLD)

    def take(step):
        for x, (shape, _) in zip(X, KINDS.values(), strict=True):
            x.grad = gradient(shape, step, rank)
        optimizer.step()

    for step in range(CHANGE):
        take(step)
    if loads:
        optimizer = change(optimizer, {}, "load", {})
    before = [dict(group) for group in optimizer.param_groups]
    if rank in culprits:
        X[0].requires_grad_(not freezes)
        for group, changed in zip(optimizer.param_groups, keys, strict=True):
            group |= changed
    error = None
    try:
        take(CHANGE)
    except (RuntimeError, ValueError) as raised:
        error = type(raised), str(raised)
    if not then_back:
        return error, None
    X[0].requires_grad_(True)
    for group, was in zip(optimizer.param_groups, before, strict=True):
        group |= was
    for step in range(CHANGE if error else CHANGE + 1, STEPS):
        take(step)
    return error, values(X)


NOTHING = [{}] * len(KINDS)


def only(kind, **keys):
    return [keys if name == kind else {} for name in KINDS]


@pytest.mark.parametrize(
    ("kind", "key", "given"),
    [
        ("tall", "row_blocks", (1, 13)),
        ("upright and other blocks", "row_blocks", ((8, 4), (4, 8))),
        ("stack", "stack_dims", (1, 0)),
        ("tall", "input_first", (False, True)),
    ],
)
def test_another_cut_of_a_matrix_with_a_state_is_an_error_on_all_ranks(kind, key, given):
    position = list(KINDS).index(kind)
    plain = distributed.run(2, change_on, [], NOTHING, True)
    changed = distributed.run(2, change_on, [0, 1], only(kind, **{key: given[1]}), True)
    for (error, X), (_, wanted) in zip(changed, plain, strict=True):
        assert error[0] is ValueError
        assert f"param_groups[{position}]['{key}'] was changed from {given[0]!r} to" in error[1]
        assert f"{given[1]!r}" in error[1] and f"param_groups[{position}]['params'][0]" in error[1]
        # Set back, training goes on as if nothing had been.
        assert all(x.equal(y) for x, y in zip(X, wanted, strict=True))


@pytest.mark.parametrize("freezes", [False, True])
def test_an_error_leaves_all_right_factors_as_they_were(freezes):
    """Ranks that change beside a cut, or a freeze of what is apart, that is refused; then back."""
    keys = [{"rank_fraction": 0.9} for _ in KINDS]
    keys[-1] = {} if freezes else {"row_blocks": 2}
    plain = distributed.run(2, change_on, [], NOTHING, True)
    changed = distributed.run(2, change_on, [0, 1], keys, True, freezes)
    for (error, X), (_, wanted) in zip(changed, plain, strict=True):
        assert ("was frozen while replicas are apart" if freezes else "row_blocks") in error[1]
        assert all(x.equal(y) for x, y in zip(X, wanted, strict=True))


@pytest.mark.parametrize(
    "keys", [{"rank_fraction": 0.9}, {"rank_multiple_of": 4}, {"row_blocks": 13}], ids=str
)
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_change_on_one_rank_alone_is_an_error_on_all(culprit, keys):
    (key,) = keys
    for error, _ in distributed.run(2, change_on, [culprit], only("tall", **keys), False):
        assert error[0] is RuntimeError
        assert key in error[1] and f"rank {culprit}" in error[1]


@pytest.mark.parametrize("culprits", [[0], [1], [0, 1]], ids=str)
def test_another_cut_after_loading_is_an_error_on_all_ranks(culprits):
    keys = only("tall", row_blocks=13)
    answers = distributed.run(2, change_on, culprits, keys, False, False, True)
    for rank, (error, _) in enumerate(answers):
        assert error[0] is (ValueError if rank in culprits else RuntimeError)
        assert ("['row_blocks'] was changed" in error[1]) == (rank in culprits)


def test_one_process_alone_sees_a_change_too():
    X = nn.Parameter(weights((13, 8)))
    optimizer = Dion([X], rank_fraction=FIRST)
    for step, fraction in enumerate((FIRST, FIRST, 1.0, 0.25)):
        optimizer.param_groups[0]["rank_fraction"] = fraction
        X.grad = gradient((13, 8), step, 0)
        optimizer.step()
        assert optimizer.state[X]["Q"].shape == (8, rank_of((13, 8), fraction))


def test_a_rank_that_a_direction_does_not_have_is_told():
    X = nn.Parameter(weights((13, 8)))
    optimizer = Dion([X], direction="polar")
    for fraction, told in ((0.25, 0), (0.5, 1), (0.5, 0)):
        optimizer.param_groups[0]["rank_fraction"] = fraction
        X.grad = gradient((13, 8), 0, 0)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            optimizer.step()
        assert ["'polar' has no rank" in str(w.message) for w in heard] == [True] * told
        assert all(w.filename == __file__ for w in heard)


def test_other_state_stays_as_it_is():
    X = nn.Parameter(weights((13, 8)))
    optimizer = CurvaDion([X], gate=FixedPeriod(2), sync=LowRank(), lr=0.0, mu=0.0)
    for step in range(2):
        X.grad = gradient((13, 8), step, 0)
        optimizer.step()
    before = {k: v.clone() for k, v in optimizer.state[X].items()}
    optimizer.param_groups[0]["rank_fraction"] = 1.0
    X.grad = None
    optimizer.step()
    after = optimizer.state[X]
    assert after.keys() == before.keys() and after["Q"].shape == (8, 8)
    assert after["Q"][:, :2].equal(before.pop("Q"))
    assert all(after[key].equal(value) for key, value in before.items())
