"""A state_dict with one thing wrong in it loads, or is refused with a word and changes nothing."""

import copy
import json
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from curvadion import RMMC, ByteBudget, CurvaDion, FixedPeriod, QuantizedAverage, Replicated
from support.runs import distributed, toy


def trained(steps=3):
    """Under a seldom gate and codes: the state holds all that a state may hold."""
    model = toy.model()
    gate, sync = FixedPeriod(3), QuantizedAverage(fragments=2)
    how = {"gate": gate, "sync": sync, "replicas": "single"}
    optimizer = CurvaDion(toy.groups(model), direction="normuon", **how)
    toy.train(model, optimizer, range(steps))
    return model, optimizer


def low_rank(steps=3):
    model = toy.model()
    optimizer = CurvaDion(toy.groups(model), gate=RMMC(0.3), replicas="single")
    toy.train(model, optimizer, range(steps))
    return model, optimizer


def budgeted(steps=3):
    model = toy.model()
    how = {"gate": ByteBudget(0.5), "sync": QuantizedAverage(fragments=2), "replicas": "single"}
    optimizer = CurvaDion(toy.groups(model), **how)
    toy.train(model, optimizer, range(steps))
    return model, optimizer


def wrapped(steps=3):
    model = toy.model()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    inner = [torch.optim.Muon(matrices), torch.optim.AdamW(others)]
    sync = QuantizedAverage(fragments=2)
    optimizer = Replicated(inner, gate=FixedPeriod(3), sync=sync, replicas="single")
    toy.train(model, optimizer, range(steps))
    return model, optimizer


def all_but_states(optimizer):
    return {key: value for key, value in optimizer.state_dict().items() if key != "state"}


@pytest.mark.parametrize("make", [trained, low_rank])
def test_tensors_that_no_step_can_go_on_from_are_refused(make):
    saved = make()[1].state_dict()
    _, optimizer = make(1)
    states, others = toy.states(optimizer), copy.deepcopy(all_but_states(optimizer))
    tried = set()
    for i, state in saved["state"].items():
        for key, tensor in state.items():
            if not isinstance(tensor, torch.Tensor) or (i > 0 and key in tried):
                continue
            tried.add(key)
            for what, wrong in ("2", torch.ones(2)), ("2 rows", torch.stack([tensor, tensor])):
                damaged_state = copy.deepcopy(saved)
                damaged_state["state"][i][key] = wrong
                try:
                    optimizer.load_state_dict(damaged_state)
                except ValueError as error:
                    assert key in str(error), (key, what, error)
                else:
                    pytest.fail(f"{key} with {what} is taken")
                toy.assert_bitwise_equal(toy.states(optimizer), states)
                assert all_but_states(optimizer) == others
    assert {"momentum", "momentum_norm", "R_scale", "exp_avg", "exp_avg_sq", "step"} <= tried
    assert tried & {"anchor", "Q"}


# --- what is saved besides tensors


def in_record(*path, value):
    """Set an entry of the record; Ellipsis removes it."""

    def damage(saved):
        for group in saved["param_groups"]:
            record = json.loads(group["progress"])
            entries = record
            for key in path[:-1]:
                entries = entries[key]
            entries[path[-1]] = value
            if value is ...:
                del entries[path[-1]]
            group["progress"] = json.dumps(record)

    return damage


def in_group(key, value):
    def damage(saved):
        saved["param_groups"][0][key] = value
        if value is ...:
            del saved["param_groups"][0][key]

    return damage


def in_states(key, change):
    """Change an entry of all states that have it; None removes it from the first."""

    def damage(saved):
        for state in saved["state"].values():
            if key in state:
                if change is None:
                    del state[key]
                    return
                state[key] = change(state[key])

    return damage


def nan(tensor):
    return torch.full_like(tensor, math.nan)


DAMAGES = {
    "no count of steps": (budgeted, in_record("progress", "steps", value=...), "steps"),
    "steps as text": (budgeted, in_record("progress", "steps", value="3"), "progress.steps='3'"),
    "steps before the first": (wrapped, in_record("progress", "steps", value=-1), "steps=-1"),
    "steps that are NaN": (wrapped, in_record("progress", "steps", value=math.nan), "steps=nan"),
    "bytes below 0": (budgeted, in_record("progress", "sent", value=-1.0), "progress.sent=-1.0"),
    "bytes that are NaN": (wrapped, in_record("progress", "sent", value=math.nan), "sent=nan"),
    "no entry of a gate": (budgeted, in_record("gate", "credit", value=...), "credit"),
    "a credit that is NaN": (budgeted, in_record("gate", "credit", value=math.nan), "credit=nan"),
    "a huge balance": (budgeted, in_record("gate", "balance", value=10**400), "balance"),
    "no entry of a sync": (wrapped, in_record("sync", "rates", value=...), "rates"),
    "rates of no fragment": (wrapped, in_record("sync", "rates", value=[]), "rates="),
    "a rate that is NaN": (
        budgeted,
        in_record("sync", "sent_rates", value=[[math.nan], []]),
        r"sent_rates\[0\]\[0\]=nan",
    ),
    "a replica beyond the last": (trained, in_record("replica", value=[2, 2]), r"replica\[0\]"),
    "no record": (wrapped, in_group("progress", "{"), "progress"),
    "a deep record": (trained, in_group("progress", "[" * 100_000), "progress"),
    "an old record": (trained, in_group("progress", "{}"), "entries"),
    "a rate of another kind": (wrapped, in_group("lr", "fast"), r"\['lr'\]='fast'"),
    "no rate": (wrapped, in_group("lr", ...), "'lr'"),
    "other blocks": (
        trained,
        in_group("column_blocks", 2),
        "column_blocks=2 in param group 0, but",
    ),
    "other sizes of blocks": (low_rank, in_group("row_blocks", (1, 2)), r"row_blocks=\(1, 2\) in"),
    "a NaN momentum": (wrapped, in_group("momentum", math.nan), "momentum"),
    "a NaN in a momentum": (trained, in_states("momentum", nan), "'momentum' of .* not finite"),
    "a negative square": (
        trained,
        in_states("exp_avg_sq", lambda t: t - 1),
        "'exp_avg_sq' of .* is negative",
    ),
    "a momentum of integers": (trained, in_states("momentum", torch.Tensor.long), "torch.int64"),
    "an anchor without residual": (trained, in_states("residual", None), "residual"),
    "a NaN residual": (wrapped, in_states("residual", nan), "'residual' of .* not finite"),
    "an anchor as text": (wrapped, in_states("anchor", lambda t: "x"), "'anchor'"),
    "a moment of another shape": (
        wrapped,
        in_states("exp_avg", lambda t: torch.zeros(2, 3, 4)),
        "'exp_avg' of .* is of shape",
    ),
    "no moment": (wrapped, in_states("exp_avg_sq", None), "exp_avg_sq"),
    "a moment as a number": (wrapped, in_states("exp_avg", lambda t: 0.5), "'exp_avg'"),
    "a state that is a list": (
        trained,
        lambda saved: saved["state"].update({0: [1]}),
        r"\['state'\]\[0\]",
    ),
    "a state of no parameter": (
        wrapped,
        lambda saved: saved["state"].update({99: {}}),
        "state of the parameter 99",
    ),
    "one parameter twice": (
        wrapped,
        lambda saved: saved["param_groups"][0]["params"].__setitem__(0, 1),
        "twice",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_named_and_changes_nothing(damage):
    make, change, named = DAMAGES[damage]
    saved = copy.deepcopy(make()[1].state_dict())
    change(saved)
    model, optimizer = make(1)
    states, others = toy.states(optimizer), copy.deepcopy(all_but_states(optimizer))
    with pytest.raises(ValueError, match=named):
        optimizer.load_state_dict(saved)
    toy.assert_bitwise_equal(toy.states(optimizer), states)
    assert all_but_states(optimizer) == others
    toy.train(model, optimizer, range(1, 3))
    assert all(p.isfinite().all() for p in model.parameters())


class OfTomorrow(FixedPeriod):
    """A gate whose state this version cannot load; it notices late."""

    def state_dict(self):
        return {"opened": getattr(self, "opened", 0)}

    def load_state_dict(self, state):
        self.opened = state["opened"]
        raise_if = state["not yet known"] if self.opened > 5 else None
        assert raise_if is None


@pytest.mark.parametrize("kind", ["ours", "wrapped"])
def test_a_gate_that_fails_undoes_the_whole_load(kind):
    def make():
        model = toy.model()
        how = {"gate": OfTomorrow(3), "sync": QuantizedAverage(), "replicas": "single"}
        if kind == "ours":
            return model, CurvaDion(toy.groups(model), **how)
        return model, Replicated(torch.optim.AdamW(model.parameters()), **how)

    model, optimizer = make()
    toy.train(model, optimizer, range(4))
    optimizer.gate.opened = 9
    saved = copy.deepcopy(optimizer.state_dict())
    model, optimizer = make()
    toy.train(model, optimizer, range(1))
    states, others = toy.states(optimizer), copy.deepcopy(all_but_states(optimizer))
    with pytest.raises(ValueError, match="KeyError: 'not yet known'"):
        optimizer.load_state_dict(saved)
    interrupted = [KeyboardInterrupt, None]  # while it loads, not while it undoes that
    failing = mock.patch.object(optimizer.gate, "load_state_dict", side_effect=interrupted)
    with failing, pytest.raises(KeyboardInterrupt):
        optimizer.load_state_dict(saved)
    toy.assert_bitwise_equal(toy.states(optimizer), states)
    assert all_but_states(optimizer) == others


# --- gradients and frozen parameters


@pytest.mark.parametrize("make", [budgeted, wrapped])
def test_loading_beside_gradients_is_refused(make):
    model, optimizer = make()
    saved = get_optimizer_state_dict(model, optimizer)
    assert saved["state"]
    model, optimizer = make(0)
    toy.loss(model, 0).backward()
    empty = get_optimizer_state_dict(model, optimizer)
    with pytest.raises(ValueError, match=r"call optimizer.zero_grad\(\)"):
        set_optimizer_state_dict(model, optimizer, {**saved, "state": empty["state"]})


@pytest.mark.parametrize("kind", ["ours", "wrapped"])
@distributed.on_ranks(2)
def test_a_load_between_thawing_and_a_step_changes_no_bits(rank, kind):
    def weights(*, load):
        model = toy.model()
        how = {"gate": FixedPeriod(3), "sync": QuantizedAverage(bits=2)}
        how["replicas"] = dist.group.WORLD
        if kind == "ours":
            optimizer = CurvaDion(toy.groups(model), **how)
        else:
            optimizer = Replicated(torch.optim.AdamW(model.parameters()), **how)
        toy.train(model, optimizer, range(3), rank)
        frozen = next(p for p in model.parameters() if p.dim() == 2)
        optimizer.synchronize()
        frozen.requires_grad_(False)
        frozen.grad = None
        toy.train(model, optimizer, range(3, 6), rank)
        optimizer.synchronize()
        if load == "while frozen":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        frozen.requires_grad_(True)
        if load == "after thawing":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        toy.train(model, optimizer, range(6, 12), rank)
        return dict(model.named_parameters())

    expected = weights(load=None)
    for load in ("while frozen", "after thawing"):
        toy.assert_bitwise_equal(weights(load=load), expected)


@pytest.mark.parametrize("make", [budgeted, wrapped])
def test_a_frozen_parameter_without_a_saved_state_keeps_its_own(make):
    _, optimizer = make()
    name = "momentum" if make is budgeted else "momentum_buffer"
    frozen = next(p for p, state in optimizer.state.items() if name in state)
    frozen.requires_grad_(False)
    frozen.grad = None
    before = optimizer.state[frozen][name].clone()
    saved = copy.deepcopy(optimizer.state_dict())
    index = [X for group in optimizer.param_groups for X in group["params"]].index(frozen)
    numbers = [i for group in saved["param_groups"] for i in group["params"]]
    del saved["state"][numbers[index]]  # as torch.distributed.checkpoint does
    optimizer.load_state_dict(saved)
    assert optimizer.state[frozen][name].equal(before)
    assert "anchor" not in optimizer.state[frozen]
