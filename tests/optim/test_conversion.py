"""A run goes on under another gate, sync kind or rank than it was saved with."""

from __future__ import annotations

import copy
import itertools
import re
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import distributed
import toy
from curvadion import CurvaDion, Dion, FixedPeriod, QuantizedAverage, fit_to_checkpoint
from curvadion.layout.matrix import MatrixLayout
from curvadion.optim.conversion import OF_STATES, OF_SYNCS
from pairwise import all_pairs

KINDS = {
    "rmmc": (CurvaDion, {"threshold": 0.3}),
    "budget": (CurvaDion, {"wire_budget": 0.5}),
    "quantized period": (
        CurvaDion,
        {"gate": FixedPeriod(3), "sync": QuantizedAverage()},
    ),
    "dion": (Dion, {}),
}
QUANTIZED = ("budget", "quantized period")
PAIRS = list(itertools.product(KINDS, KINDS))
TRAINED = 5
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def build(kind, **more):
    model = toy.model()
    make, options = KINDS[kind]
    replicas = dist.group.WORLD if dist.is_initialized() else None
    return model, make(toy.groups(model), replicas=replicas, **{"lr": 0.015, **options, **more})


def values(optimizer, keys):
    return [[group[key] for key in keys] for group in optimizer.param_groups]


def quietly(function, *args, **kwargs):
    """Call it; return the warnings' texts."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        function(*args, **kwargs)
    return [str(w.message) for w in told if "torch.distributed is disabled" not in str(w.message)]


# ---------------------------------------------------------------- every pair of kinds


def write(rank, folder, agreed):
    """Save every kind, as one state of each rank and as a distributed checkpoint."""
    drifted = {}
    for kind in KINDS:
        model, optimizer = build(kind)
        toy.train(model, optimizer, range(TRAINED), rank)
        if agreed:
            optimizer.synchronize(exact=True)
        drifted[kind] = optimizer.drifted
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(saved, f"{folder}/{kind}.{rank}.pt")
            for name, how in {"dcp": None, "flat": FLAT}.items() if agreed else ():
                weights, state = get_state_dict(model, optimizer, options=how)
                held = {"model": weights, "optimizer": state}
                dcp.save(held, checkpoint_id=f"{folder}/{kind}.{name}")
    return drifted


def load(model, optimizer, folder, kind, way, rank):
    if way == "own":
        saved = torch.load(f"{folder}/{kind}.{rank}.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        return
    how = FLAT if way == "flat" else None
    weights, state = get_state_dict(model, optimizer, options=how)
    held = {"model": weights, "optimizer": state}
    fit_to_checkpoint(held, checkpoint_id=f"{folder}/{kind}.{way}")
    dcp.load(held, checkpoint_id=f"{folder}/{kind}.{way}")
    set_state_dict(
        model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"],
        options=how,
    )  # fmt: skip


@dataclass
class WentOn:
    """What a continued run shows."""

    told: list[str]
    right_factors: set[tuple[int, ...]]
    anchored: bool
    drift: float
    weights: dict[str, torch.Tensor]


def go_on(rank, folder, way, pairs):
    """What came of the pairs: an error's text, or how the run went on."""
    outcomes = {}
    for saved, kind in pairs:
        model, optimizer = build(kind)
        wanted = values(optimizer, OF_STATES)
        try:
            told = quietly(load, model, optimizer, folder, saved, way, rank)
        except ValueError as error:
            outcomes[saved, kind] = str(error)
            continue
        assert values(optimizer, OF_STATES) == wanted
        assert optimizer.progress.steps == TRAINED
        toy.train(model, optimizer, range(TRAINED, TRAINED + 4), rank)
        held = optimizer.state.values()
        right_factors = {tuple(s["Q"].shape) for s in held if "Q" in s}
        anchored = all("anchor" in s for s in held)
        optimizer.synchronize()
        weights = toy.weights(model)
        outcomes[saved, kind] = WentOn(told, right_factors, anchored, optimizer.drift(), weights)
    return outcomes


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {agreed: str(tmp_path_factory.mktemp("saved")) for agreed in (True, False)}
    drifted = {a: distributed.run(2, write, folder, a) for a, folder in made.items()}
    assert not any(itertools.chain(*(told.values() for told in drifted[True])))
    assert drifted[False][0] == drifted[False][1]
    return made, drifted[False][0]


# Every pair from each replica's own state after local steps, and once in one of the other ways;
# every kind saved and every kind loaded in each of these.
WAYS = ["own", "dcp", "flat"]
PAIRS_OF = {("own", False): PAIRS} | {
    (way, True): [
        (saved, kind)
        for saved, kind, its in all_pairs(list(KINDS), list(KINDS), WAYS)
        if its == way
    ]
    for way in WAYS
}


@pytest.mark.parametrize(("way", "agreed"), PAIRS_OF, ids=str)
def test_every_pair_goes_on_or_says_why_not(folders, way, agreed):
    made, drifted = folders
    pairs = PAIRS_OF[way, agreed]
    one, other = distributed.run(2, go_on, made[agreed], way, pairs, timeout=100)
    for pair in pairs:
        saved, kind = pair
        if not agreed and drifted[saved] and kind in QUANTIZED and saved not in QUANTIZED:
            for text in (one[pair], other[pair]):
                assert re.search(r"sync=QuantizedAverage\(.*\) needs weights on which", text)
            continue
        found = one[pair]
        assert isinstance(found, WentOn), (pair, found)
        assert found.drift == 0.0, pair
        assert all(torch.isfinite(x).all() for x in found.weights.values()), pair
        toy.assert_bitwise_equal(found.weights, other[pair].weights)
        # (8, 6) and (11, 8) at a quarter of the rank; polar factors keep none.
        assert found.right_factors == (set() if kind in QUANTIZED else {(6, 2), (8, 2)}), pair
        assert found.anchored == (kind in QUANTIZED), pair
        another_sync = (saved in QUANTIZED) != (kind in QUANTIZED)
        assert ["another sync" in text for text in found.told] == [True] * another_sync, pair


# ---------------------------------------------------------------- which values count


def trained_state(optimizer, model):
    toy.train(model, optimizer, range(2))
    return optimizer.state_dict()


def test_direction_and_rank_are_those_of_the_optimizer_that_loads():
    given = {"rank_fraction": 0.5, "right_factor": "qr", "look_ahead": 0.5, "momentum": 0.8}
    model, optimizer = build("rmmc", **given)
    saved = trained_state(optimizer, model)
    _, into = build("dion", rank_fraction=0.75, momentum=0.9)
    into.load_state_dict(saved)
    assert {group["rank_fraction"] for group in into.param_groups} == {0.75}
    keys = ("right_factor", "look_ahead", "momentum")
    assert values(into, keys) == values(optimizer, keys)


def test_right_factor_and_look_ahead_too_under_another_sync():
    model, optimizer = build("dion", rank_fraction=0.5, momentum=0.8, lr=0.01)
    saved = trained_state(optimizer, model)
    model, into = build("budget", rank_fraction=0.75, momentum=0.9)
    wanted = values(into, (*OF_STATES, *OF_SYNCS))
    with pytest.warns(UserWarning, match=r"another sync \(LowRank\)") as told:
        into.load_state_dict(saved)
    assert len(told) == 1
    assert values(into, (*OF_STATES, *OF_SYNCS)) == wanted
    assert {(group["momentum"], group["lr"]) for group in into.param_groups} == {(0.8, 0.01)}
    toy.train(model, into, range(2, 4))


def test_anchors_that_a_tool_put_beside_a_state_are_not_believed():
    """torch's full states keep what the loading optimizer had and the file lacks."""
    model, optimizer = build("dion")
    saved = trained_state(optimizer, model)
    for i, X in enumerate(p for g in optimizer.param_groups for p in g["params"]):
        saved["state"][i]["anchor"] = torch.full_like(X, 1e6)
        saved["state"][i]["residual"] = torch.zeros_like(X)
    resumed, into = build("budget")
    resumed.load_state_dict(model.state_dict())
    quietly(into.load_state_dict, saved)
    toy.train(resumed, into, range(2, 5))
    for state in into.state.values():
        assert state["anchor"].abs().max() < 100


def test_fewer_fragments_than_the_saved_run_had():
    def of(fragments):
        model = toy.model()
        sync = QuantizedAverage(fragments=fragments)
        return model, CurvaDion(toy.groups(model), gate=FixedPeriod(1), sync=sync)

    model, optimizer = of(3)
    saved = trained_state(optimizer, model)
    assert optimizer.sync.next_fragment == 2
    model, into = of(2)
    into.load_state_dict(saved)
    toy.train(model, into, range(2, 5))
    assert into.sync.fragments_drifted == 1
    assert into.sync.next_fragment == 1


def test_right_factors_that_fit_no_rank():
    model, optimizer = build("rmmc")
    saved = trained_state(optimizer, model)
    i = next(i for i, state in saved["state"].items() if "Q" in state)
    saved["state"][i]["Q"] = saved["state"][i]["Q"][:, :1]
    with pytest.raises(ValueError, match=r"right factors of shapes.*rank_fraction=0\.25.*make"):
        build("rmmc")[1].load_state_dict(saved)


# ---------------------------------------------------------------- right factors of another rank


def expected(Q, shape, rank):
    """The first columns, and beyond them those of the initial Q of the new rank."""
    made = MatrixLayout.whole(shape).initial_q(rank)
    kept = min(rank, Q.shape[-1])
    made = made.expand(*Q.shape[:-2], -1, -1).clone()
    made[..., :kept] = Q[..., :kept]
    return made


@pytest.mark.parametrize(("before", "after"), [(0.25, 1.0), (1.0, 0.25)])
@pytest.mark.parametrize("shape", [(11, 7), (5, 13), (1, 9)], ids=str)
def test_right_factor_of_a_matrix(shape, before, after):
    torch.manual_seed(0)
    x = nn.Parameter(torch.randn(shape))
    optimizer = Dion([x], rank_fraction=before)
    x.grad = torch.randn(shape)
    optimizer.step()
    Q = optimizer.state[x]["Q"].clone()
    into = CurvaDion([x], gate=FixedPeriod(2), rank_fraction=after)
    into.load_state_dict(optimizer.state_dict())
    rank = max(1, -(-int(after * 100 * min(shape)) // 100))
    assert torch.equal(into.state[x]["Q"], expected(Q, shape, rank))
    into.step()


def test_right_factors_of_row_blocks_and_stacks():
    """One weight of blocks of both orientations, and stacked experts."""
    torch.manual_seed(0)
    qkv, experts = (nn.Parameter(torch.randn(s)) for s in [(13, 6), (5, 6, 4)])
    groups = [
        {"params": [qkv], "row_blocks": [8, 3, 2]},
        {"params": [experts], "stack_dims": 1},
    ]
    optimizer = Dion([dict(group) for group in groups], rank_fraction=0.4)
    for p in (qkv, experts):
        p.grad = torch.randn_like(p)
    optimizer.step()
    was = {p: {k: v.clone() for k, v in optimizer.state[p].items()} for p in (qkv, experts)}
    into = CurvaDion([dict(g) for g in groups], gate=FixedPeriod(2), rank_fraction=1.0)
    into.load_state_dict(optimizer.state_dict())
    now = into.state[qkv]
    assert torch.equal(now["Q"], expected(was[qkv]["Q"], (8, 6), 6))
    rows, old = now["Q_rows"], was[qkv]["Q_rows"]
    assert rows.shape == (13, 3)
    assert not rows[:8].any()
    assert torch.equal(rows[8:11], expected(old[8:11, :2], (3, 6), 3))
    assert torch.equal(rows[11:, :2], expected(old[11:, :1], (2, 6), 2))
    assert torch.equal(into.state[experts]["Q"], expected(was[experts]["Q"], (6, 4), 4))

    back = Dion([dict(group) for group in groups], rank_fraction=0.4)
    into.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    back.load_state_dict(into.state_dict())
    for p, state in was.items():
        for key, tensor in state.items():
            assert torch.equal(back.state[p][key], tensor), key


def test_checkpoint_to_fit_to():
    with pytest.raises(ValueError, match=r"checkpoint_id=None and storage_reader=None"):
        fit_to_checkpoint({})


# ---------------------------------------------------------------- groups changed in mid-run


@pytest.mark.parametrize(
    ("key", "value"),
    [("direction", "polar"), ("rank_fraction", 1.0), ("rank_multiple_of", 4), ("row_blocks", 2)],
)
def test_what_states_depend_on_cannot_change_in_mid_run(key, value):
    model, optimizer = build("rmmc")
    toy.train(model, optimizer, range(3))
    before, group = toy.weights(model), optimizer.param_groups[0]
    kept = group[key]
    group[key] = value
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{key}={value!r}.*was changed.*load this one's"):
            optimizer.step()
    toy.assert_bitwise_equal(toy.weights(model), before)
    group[key] = kept
    toy.train(model, optimizer, [3])


def test_a_sync_without_fragments_averages_what_fragments_had_moved():
    model = toy.model()
    optimizer = CurvaDion(
        toy.groups(model), gate=FixedPeriod(3), sync=QuantizedAverage(fragments=2)
    )
    toy.train(model, optimizer, range(3))
    assert optimizer.progress.local_steps == 0 and optimizer.sync.fragments_drifted == 1
    into = CurvaDion(toy.groups(model), gate=FixedPeriod(3))
    quietly(into.load_state_dict, optimizer.state_dict())
    assert into.progress.local_steps == 1


@pytest.mark.parametrize("options", [{"rank_multiple_of": 3}, {"rank_fraction": 0.5}])
def test_the_rank_is_that_of_the_arguments(options):
    model = toy.model()
    before = Dion(toy.groups(model))
    toy.train(model, before, range(2))
    into = Dion(toy.groups(model), **options)
    into.load_state_dict(before.state_dict())
    assert into.param_groups[0] | options == into.param_groups[0]
    toy.train(model, into, range(2, 4))
