"""A run goes on under another gate or sync kind than it was saved with."""

import copy
import itertools
import re
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from curvadion import CurvaDion, Dion, FixedPeriod, QuantizedAverage
from curvadion.optim.checkpoint import OF_SYNCS
from curvadion.update.registry import DIRECTIONS
from support.runs import distributed, toy
from support.runs.pairwise import all_pairs

KINDS = {
    "rmmc": (CurvaDion, {"threshold": 0.3}),
    "budget": (CurvaDion, {"wire_budget": 0.5, "rank_fraction": 0.25}),
    "quantized period": (
        CurvaDion,
        {"gate": FixedPeriod(3), "sync": QuantizedAverage(), "rank_fraction": 0.25},
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
    partial = DefaultLoadPlanner(allow_partial_load=True)  # another sync has other keys
    dcp.load(held, checkpoint_id=f"{folder}/{kind}.{way}", planner=partial)
    parts = {"model_state_dict": held["model"], "optim_state_dict": held["optimizer"]}
    set_state_dict(model, optimizer, **parts, options=how)


def go_on(rank, folder, way, pairs):
    """What came of the pairs: an error's text; or warnings, whether anchors exist, and weights."""
    outcomes = {}
    for saved, kind in pairs:
        model, optimizer = build(kind)
        try:
            told = quietly(load, model, optimizer, folder, saved, way, rank)
        except ValueError as error:
            outcomes[saved, kind] = str(error)
            continue
        assert optimizer.progress.steps == TRAINED
        toy.train(model, optimizer, range(TRAINED, TRAINED + 4), rank)
        anchored = all("anchor" in state for state in optimizer.state.values())
        optimizer.synchronize()
        outcomes[saved, kind] = told, anchored, toy.weights(model)
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
                assert re.search(r"sync=QuantizedAverage\(.*\) needs equal weights", text)
            continue
        assert isinstance(one[pair], tuple), (pair, one[pair])
        told, anchored, weights = one[pair]
        assert all(torch.isfinite(x).all() for x in weights.values()), pair
        toy.assert_bitwise_equal(weights, other[pair][2])
        assert anchored == (kind in QUANTIZED), pair
        another_sync = (saved in QUANTIZED) != (kind in QUANTIZED)
        assert ["another sync" in text for text in told] == [True] * another_sync, pair


def trained_state(optimizer, model):
    toy.train(model, optimizer, range(2))
    return optimizer.state_dict()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_run_goes_on_along_its_direction_alone(direction):
    model, optimizer = build("dion", direction=direction)
    state = trained_state(optimizer, model)
    for other in DIRECTIONS:
        again, into = build("dion", direction=other)
        again.load_state_dict(model.state_dict())
        if other != direction:
            with pytest.raises(
                ValueError, match=f"direction='{direction}'.*Build the optimizer as"
            ):
                into.load_state_dict(state)
            assert into.progress.steps == 0 and not into.state
            continue
        into.load_state_dict(copy.deepcopy(state))
        toy.train(again, into, range(2, 4))
        same = again.state_dict()
    toy.train(model, optimizer, range(2, 4))
    assert all(torch.equal(x, same[name]) for name, x in model.state_dict().items())


def test_another_rank_is_refused():
    model, optimizer = build("dion", rank_fraction=0.5)
    saved = trained_state(optimizer, model)
    for given in ({"rank_fraction": 0.75}, {"rank_fraction": 0.5, "rank_multiple_of": 3}):
        with pytest.raises(ValueError, match=f"state_dict has {list(given)[-1]}=.*Build the opt"):
            build("dion", **given)[1].load_state_dict(saved)


@pytest.mark.parametrize("kind", ["dion", "budget"])
def test_right_factor_and_look_ahead_belong_to_the_sync(kind):
    given = {"right_factor": "qr", "look_ahead": 0.5}
    model, optimizer = build("rmmc", **given, momentum=0.8, lr=0.01)
    saved = trained_state(optimizer, model)
    model, into = build(kind, momentum=0.9)
    wanted = values(into if kind == "budget" else optimizer, OF_SYNCS)
    told = quietly(into.load_state_dict, saved)
    assert ["another sync (LowRank)" in text for text in told] == [True] * (kind == "budget")
    assert values(into, OF_SYNCS) == wanted
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


def test_a_sync_without_fragments_averages_what_fragments_had_moved():
    model = toy.model()
    optimizer = CurvaDion(
        toy.groups(model), gate=FixedPeriod(3), sync=QuantizedAverage(fragments=2)
    )
    toy.train(model, optimizer, range(3))
    assert optimizer.progress.local_steps == 0 and optimizer.sync.fragments_drifted == 1
    into = CurvaDion(toy.groups(model), gate=FixedPeriod(3), direction="polar", rank_fraction=1.0)
    quietly(into.load_state_dict, optimizer.state_dict())
    assert into.progress.local_steps == 1
