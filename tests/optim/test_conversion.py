"""A run goes on under another gate, sync kind or rank than it was saved with."""

from __future__ import annotations

import copy
import itertools
import re
import warnings

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
import shards
import toy
from curvadion import RMMC, CurvaDion, Dion, FixedPeriod, QuantizedAverage, fit_to_checkpoint
from curvadion.layout.flat_shard import declare_flat_shard
from curvadion.layout.matrix import MatrixLayout
from pairwise import all_pairs
from tolerance import Rounding, assert_close

KINDS = {
    "rmmc": (CurvaDion, {"threshold": 0.3}),
    "budget": (CurvaDion, {"wire_budget": 0.5}),
    "quantized period": (
        CurvaDion,
        {"gate": FixedPeriod(3), "sync": QuantizedAverage()},
    ),
    "gradient": (CurvaDion, {"gate": FixedPeriod(4), "local_step": "gradient", "local_lr": 0.01}),
    "dion": (Dion, {}),
}
QUANTIZED = ("budget", "quantized period")
PAIRS = list(itertools.product(KINDS, KINDS))
BY_SYNC = ("direction", "rank_fraction", "rank_multiple_of", "right_factor", "nesterov")
TRAINED = 5
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def build(kind, **more):
    model = toy.model()
    make, options = KINDS[kind]
    replicas = dist.group.WORLD if dist.is_initialized() else None
    return model, make(toy.groups(model), replicas=replicas, lr=0.015, **options, **more)


def values(optimizer, keys):
    return [[group[key] for key in keys] for group in optimizer.param_groups]


def quietly(function, *args, **kwargs):
    """Call it; return the warnings' texts."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        function(*args, **kwargs)
    return [str(w.message) for w in told if "torch.distributed is disabled" not in str(w.message)]


# ---------------------------------------------------------------- every pair of kinds


def write(rank, folder, together):
    """Save every kind, as one state of each rank and as a distributed checkpoint."""
    apart = {}
    for kind in KINDS:
        model, optimizer = build(kind)
        toy.train(model, optimizer, range(TRAINED), rank)
        if together:
            optimizer.synchronize(exact=True)
        apart[kind] = optimizer.apart
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(saved, f"{folder}/{kind}.{rank}.pt")
            for name, how in {"dcp": None, "flat": FLAT}.items():
                weights, state = get_state_dict(model, optimizer, options=how)
                held = {"model": weights, "optimizer": unmarked(state)}
                dcp.save(held, checkpoint_id=f"{folder}/{kind}.{name}")
    return apart


def unmarked(state):
    """Without what keeps torch from saving replicas that differ: versions before wrote these."""
    if isinstance(state, dict):
        return {key: unmarked(value) for key, value in state.items()}
    if isinstance(state, list):
        return [unmarked(value) for value in state]
    return str(state) if isinstance(state, str) else state


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


def go_on(rank, folder, way, pairs):
    """What came of the pairs: an error's text, or what a continued run must show."""
    outcomes = {}
    for saved, kind in pairs:
        model, optimizer = build(kind)
        wanted = values(optimizer, BY_SYNC)
        for attempt in range(2):
            try:
                told = quietly(load, model, optimizer, folder, saved, way, rank)
                problem = None
            except ValueError as error:
                problem = str(error)
            if problem is not None:
                break
            again = values(optimizer, BY_SYNC)
            assert again == wanted
            assert optimizer.progress.steps == TRAINED, attempt
        if problem is not None:
            outcomes[saved, kind] = problem
            continue
        toy.train(model, optimizer, range(TRAINED, TRAINED + 4), rank)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            held = optimizer.state_dict()["state"]
        assert {"anchor" in s for s in held.values()} == {kind in QUANTIZED}
        ranks = {tuple(s["Q"].shape) for s in held.values() if "Q" in s}
        optimizer.synchronize()
        finite = all(torch.isfinite(p).all() for p in model.parameters())
        outcomes[saved, kind] = (
            finite, optimizer.drift(), toy.weights(model), ranks, told,
            [group["lr"] for group in optimizer.param_groups],
        )  # fmt: skip
    return outcomes


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {together: str(tmp_path_factory.mktemp("saved")) for together in (True, False)}
    apart = {t: distributed.run(2, write, folder, t) for t, folder in made.items()}
    assert not any(itertools.chain(*(told.values() for told in apart[True])))
    assert apart[False][0] == apart[False][1]
    assert any(apart[False][0].values())
    return made, apart[False][0]


# Every pair from each replica's own state after steps apart, and once in one of the other ways;
# every kind saved and every kind loaded in each of these.
WAYS = [("own", True), ("dcp", True), ("dcp", False), ("flat", True)]
PAIRS_OF = {("own", False): PAIRS} | {
    way: [
        (saved, kind)
        for saved, kind, its in all_pairs(list(KINDS), list(KINDS), WAYS)
        if its == way
    ]
    for way in WAYS
}


LOOK_AHEAD = "another default of ['nesterov']"  # in what is said where periods differ


@pytest.mark.parametrize(("way", "together"), PAIRS_OF, ids=str)
def test_every_pair_goes_on_or_says_why_not(folders, way, together):
    made, apart = folders
    pairs = PAIRS_OF[way, together]
    outcomes = distributed.run(2, go_on, made[together], way, pairs, timeout=100)
    for pair in pairs:
        saved, kind = pair
        one, other = (outcome[pair] for outcome in outcomes)
        if not together and apart[saved] and kind in QUANTIZED and saved not in QUANTIZED:
            for text in (one, other):
                assert re.search(
                    r"sync=QuantizedAverage\(.*\) needs weights on which they agree", text
                )
            continue
        assert not isinstance(one, str), (pair, one)
        finite, drift, weights, ranks, told, rates = one
        assert finite, pair
        assert drift == 0.0, pair
        toy.assert_bitwise_equal(weights, other[2])
        # (8, 6) and (11, 8) at a quarter of the rank; polar factors keep none.
        assert ranks == (set() if kind in QUANTIZED else {(6, 2), (8, 2)}), pair
        assert rates == [0.015] * len(rates), pair
        lost = [text for text in (*told, *other[4]) if "is lost" in text]
        assert bool(lost) == (not together and apart[saved] and way != "own"), pair
        if together:
            same_kind = saved in QUANTIZED and kind in QUANTIZED
            assert not [t for t in told if not (same_kind and LOOK_AHEAD in t)], pair


# ---------------------------------------------------------------- which values count


def trained_state(optimizer, model):
    toy.train(model, optimizer, range(2))
    return optimizer.state_dict()


def test_groups_keep_their_values_within_a_kind():
    model, optimizer = build("rmmc", rank_fraction=0.5, nesterov=0.5, mu=0.8)
    saved = trained_state(optimizer, model)
    _, into = build("dion", mu=0.9)
    into.load_state_dict(saved)
    keys = ("rank_fraction", "nesterov", "mu")
    assert values(into, keys) == values(optimizer, keys)


def test_given_values_count_under_another_kind():
    model, optimizer = build("dion", rank_fraction=0.5, mu=0.8)
    saved = trained_state(optimizer, model)
    model, into = build("budget", rank_fraction=0.75, mu=0.9)
    into.load_state_dict(saved)
    assert {group["rank_fraction"] for group in into.param_groups} == {0.75}
    assert {group["right_factor"] for group in into.param_groups} == {"qr"}
    assert {group["mu"] for group in into.param_groups} == {0.8}
    toy.train(model, into, range(2, 4))


def test_another_budget_brings_its_own_look_ahead():
    saved = {
        budget: trained_state(CurvaDion(toy.groups(model), wire_budget=budget), model)
        for budget, model in ((0.5, toy.model()), (0.01, toy.model()))
    }
    into = CurvaDion(toy.groups(toy.model()), gate=FixedPeriod(9), sync=QuantizedAverage())
    for group in saved[0.5]["param_groups"]:
        group["rank_fraction"] = 0.5
    for _ in range(2):
        with pytest.warns(UserWarning, match=re.escape(LOOK_AHEAD) + ".*3\\.0"):
            into.load_state_dict(copy.deepcopy(saved[0.5]))
        assert {group["nesterov"] for group in into.param_groups} == {4.1}
        assert into.param_groups[0]["rank_fraction"] == 0.5
        assert not quietly(into.load_state_dict, saved[0.01])
        assert {group["nesterov"] for group in into.param_groups} == {4.1}


def test_a_look_ahead_of_ones_own_stays_where_the_default_does():
    def of_groups(look_ahead, budget):
        matrices, *others = toy.groups(toy.model())
        return CurvaDion([{**matrices, **look_ahead}, *others], wire_budget=budget)

    saved = of_groups({"nesterov": 2.0}, 0.01).state_dict()
    into = of_groups({}, 0.0025)
    into.load_state_dict(saved)
    assert into.param_groups[0]["nesterov"] == 2.0
    into = of_groups({"nesterov": 3.0}, 0.5)
    with pytest.warns(UserWarning, match=re.escape(LOOK_AHEAD)):
        into.load_state_dict(saved)
    assert into.param_groups[0]["nesterov"] == 3.0


def test_spectra_begin_where_a_state_has_none():
    model = toy.model()
    without = QuantizedAverage(spectrum_decay=0.0)
    optimizer = CurvaDion(toy.groups(model), gate=FixedPeriod(3), sync=without)
    saved = trained_state(optimizer, model)
    assert not any("spectrum" in state for state in saved["state"].values())
    again, into = build("quantized period")
    into.load_state_dict(saved)
    toy.train(again, into, range(2))
    kept = [state for state in into.state.values() if "momentum" in state]
    assert kept and all({"spectrum", "spectrum_weight"} <= state.keys() for state in kept)


def test_memory_of_another_gate_is_left():
    model = toy.model()
    optimizer = CurvaDion(toy.groups(model), wire_budget=0.5)
    saved = trained_state(optimizer, model)
    again = CurvaDion(toy.groups(toy.model()), wire_budget=0.25)
    again.load_state_dict(saved)
    assert again.gate.state_dict() == optimizer.gate.state_dict()
    other = CurvaDion(toy.groups(toy.model()), gate=FixedPeriod(2), sync=QuantizedAverage())
    other.load_state_dict(saved)
    assert other.gate.state_dict() == {}


def test_anchors_that_a_tool_put_beside_a_state_are_not_believed():
    """torch's full states keep what the loading optimizer had and the file lacks."""
    model, optimizer = build("dion")
    saved = trained_state(optimizer, model)
    for i, X in enumerate(p for g in optimizer.param_groups for p in g["params"]):
        saved["state"][i]["anchor"] = torch.full_like(X, 1e6)
        saved["state"][i]["residual"] = torch.zeros_like(X)
    resumed, into = build("budget")
    resumed.load_state_dict(model.state_dict())
    into.load_state_dict(saved)
    toy.train(resumed, into, range(2, 5))
    for state in into.state.values():
        assert state["anchor"].abs().max() < 100


def dropped_losses(rank):
    model, optimizer = build("quantized period")
    toy.train(model, optimizer, range(3), rank)
    assert not optimizer.apart
    _, into = build("dion")
    first = quietly(into.load_state_dict, optimizer.state_dict())
    optimizer.synchronize(exact=True)
    return first, quietly(into.load_state_dict, optimizer.state_dict())


def test_losses_of_codes_are_not_dropped_in_silence():
    for before, after in distributed.run(2, dropped_losses):
        assert len(before) == 1
        assert "codes have lost" in before[0]
        assert after == []


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


@pytest.mark.parametrize(("before", "after"), [(0.25, 1.0), (1.0, 0.25), (0.5, 0.5)])
@pytest.mark.parametrize("shape", [(11, 7), (5, 13), (1, 9), (6, 6)], ids=str)
def test_right_factor_of_a_matrix(shape, before, after):
    torch.manual_seed(0)
    x = nn.Parameter(torch.randn(shape))
    optimizer = Dion([x], rank_fraction=before)
    x.grad = torch.randn(shape)
    optimizer.step()
    Q = optimizer.state[x]["Q"].clone()
    into = CurvaDion(
        [x], gate=FixedPeriod(2), sync=QuantizedAverage(), direction="low_rank", rank_fraction=after
    )
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
    into = CurvaDion(
        [dict(g) for g in groups],
        gate=FixedPeriod(2),
        sync=QuantizedAverage(),
        direction="low_rank",
    )
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


def sharded_pieces(rank, cuts):
    """The same, cut: every rank holds its part of what one process would hold."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    wholes = [torch.randn(s) for s in [(13, 6), (5, 6, 4)]]
    gradients = [torch.randn_like(w) for w in wholes]
    qs = []
    for cut in (False, True):
        place = [
            shards.shard(t, c, mesh) if cut else t.clone()
            for t, c in zip([*wholes, *gradients], [*cuts, *cuts], strict=True)
        ]
        qkv, experts = map(nn.Parameter, place[:2])
        qkv.grad, experts.grad = place[2:]
        groups = [
            {"params": [qkv], "row_blocks": [8, 3, 2]},
            {"params": [experts], "stack_dims": 1},
        ]
        optimizer = Dion([dict(group) for group in groups], rank_fraction=0.4)
        optimizer.step()
        into = CurvaDion(
            [dict(g) for g in groups],
            gate=FixedPeriod(2),
            sync=QuantizedAverage(),
            direction="low_rank",
            replicas="single",
        )
        into.load_state_dict(optimizer.state_dict())
        kept = [("Q", qkv), ("Q_rows", qkv), ("Q", experts)]
        qs.append([into.state[p][key] for key, p in kept])
        into.step()
    return [(whole, piece.full_tensor()) for whole, piece in zip(*qs, strict=True)]


@pytest.mark.numeric
@pytest.mark.parametrize("cuts", [(("0",), ("0",)), (("0",), ("1",)), (("1",), ("2",))], ids=str)
def test_right_factors_of_shards(cuts):
    for pairs in distributed.run(2, sharded_pieces, cuts):
        for whole, gathered in pairs:
            assert_close(gathered, whole, Rounding(torch.float32, terms=13, condition=10))


@pytest.mark.parametrize("shape", [(4, 3, 5), (4, 5, 3)], ids=str)
def test_right_factors_of_flat_shards(shape):
    """Whole here; every matrix has a key of its own."""
    torch.manual_seed(0)
    flat = nn.Parameter(torch.randn(60))
    declare_flat_shard(flat, shape, 0, 60, None)
    optimizer = Dion([{"params": [flat], "stack_dims": 1}], rank_fraction=0.4)
    flat.grad = torch.randn(60)
    optimizer.step()
    into = CurvaDion(
        [{"params": [flat], "stack_dims": 1}],
        gate=FixedPeriod(2),
        sync=QuantizedAverage(),
        direction="low_rank",
    )
    into.load_state_dict(optimizer.state_dict())
    for i in range(4):
        was = optimizer.state[flat][f"Q_{i}"]
        assert was.shape == (3, 2)
        assert torch.equal(into.state[flat][f"Q_{i}"], expected(was, shape[1:], 3))
    into.step()


def test_checkpoint_to_fit_to():
    with pytest.raises(ValueError, match=r"checkpoint_id=None and storage_reader=None"):
        fit_to_checkpoint({})


# ---------------------------------------------------------------- groups changed in mid-run


@pytest.mark.parametrize("after", [{"rank_fraction": 1.0}, {"rank_multiple_of": 4}], ids=str)
@pytest.mark.parametrize("make", [Dion, CurvaDion])
def test_a_rank_changed_in_mid_run_resizes_right_factors(make, after):
    model, twin = toy.model(), toy.model()
    optimizer, other = make(toy.groups(model)), make(toy.groups(twin))
    toy.train(model, optimizer, range(3))
    toy.train(twin, other, range(3))
    for each in (optimizer, other):
        for group in each.param_groups:
            group.update(after)
    # What the first optimizer is to do by itself, by hand.
    for group in other.param_groups:
        for X in group["params"]:
            state = other.state[X]
            if "Q" in state:
                rank = MatrixLayout.whole(X.shape).rank(
                    group["rank_fraction"], group["rank_multiple_of"]
                )
                assert rank > state["Q"].shape[-1]
                state["Q"] = expected(state["Q"], X.shape, rank)
    toy.train(model, optimizer, range(3, 6))
    toy.train(twin, other, range(3, 6))
    toy.assert_bitwise_equal(toy.weights(model), toy.weights(twin))
    toy.assert_bitwise_equal(toy.states(optimizer), toy.states(other))
    into = make(toy.groups(toy.model()))
    into.load_state_dict(optimizer.state_dict())
    assert values(into, BY_SYNC) == values(optimizer, BY_SYNC)


def change_on(rank, ranks, changes):
    """What ranks are told that change a group before the fourth step, and whether weights moved."""
    model, optimizer = build("rmmc")
    toy.train(model, optimizer, range(3), rank)
    before = toy.weights(model)
    group = optimizer.param_groups[0]
    kept = dict(group)
    if rank in ranks:
        group.update(changes)
    try:
        toy.train(model, optimizer, [3], rank)
        told = None
    except (ValueError, RuntimeError) as error:
        told = f"{type(error).__name__}: {error}"
        toy.assert_bitwise_equal(toy.weights(model), before)
        if rank in ranks and isinstance(error, ValueError):
            group.update(kept)
            toy.train(model, optimizer, [3], rank)
    return told, toy.weights(model)


def test_a_rank_that_all_replicas_change():
    (told, weights), (other, its_weights) = distributed.run(
        2, change_on, (0, 1), {"rank_fraction": 1.0}
    )
    assert told is other is None
    assert weights.keys() == its_weights.keys()


def test_a_rank_that_one_replica_changes():
    for told, _ in distributed.run(2, change_on, (1,), {"rank_fraction": 1.0}):
        assert "rank_fraction=0.25" in told and "rank_fraction=1.0" in told


@pytest.mark.parametrize(
    ("key", "value"), [("row_blocks", 2), ("row_blocks", [2, 6]), ("input_first", True)], ids=str
)
def test_matrices_cannot_be_cut_otherwise_in_mid_run(key, value):
    for told, _ in distributed.run(2, change_on, (0, 1), {key: value}):
        assert told.startswith(f"ValueError: param_groups[0][{key!r}] was changed from ")
        assert f"to {tuple(value) if isinstance(value, list) else value!r}, but " in told
        assert "set it back" in told


@pytest.mark.parametrize("gate", [FixedPeriod(2), RMMC(0.1)], ids=repr)
def test_a_parameter_without_a_state_may_start_afresh_otherwise(gate):
    """As the error advises."""
    x, y = nn.Parameter(torch.ones(8, 6)), nn.Parameter(torch.ones(6, 6))
    optimizer = CurvaDion([{"params": [x]}, {"params": [y]}], gate=gate)
    for key, value in (("row_blocks", 1), ("row_blocks", 2), ("algorithm", "adamw")):
        optimizer.state.pop(x, None)
        optimizer.param_groups[0][key] = value
        for _ in range(2):
            x.grad, y.grad = torch.ones_like(x), torch.ones_like(y)
            optimizer.step()
        if key == "row_blocks":
            assert optimizer.state[x]["momentum_norm"].numel() == value
    assert optimizer.state[x]["step"] == 2
