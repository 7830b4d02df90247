"""A state_dict with one thing wrong in it loads, or is refused with a word and changes nothing."""

from __future__ import annotations

import copy
import json
import math
import random
import warnings

import pytest
import torch

import toy
from curvadion import RMMC, CurvaDion, FixedPeriod, QuantizedAverage

DROP = object()
VALUES = [
    *(None, -1, 0, -0.5, math.inf, math.nan, True, "x", [], [1], {}, {"a": 1}),
    *(torch.tensor(math.nan), torch.zeros(2, 0), DROP),
]


def trained(steps=3):
    """Under a seldom gate and codes: the state holds all that a state may hold."""
    model = toy.model()
    gate, sync = FixedPeriod(3), QuantizedAverage(fragments=2)
    optimizer = CurvaDion(toy.groups(model), gate=gate, sync=sync, replicas="single")
    toy.train(model, optimizer, range(steps))
    return model, optimizer


def low_rank(steps=3):
    model = toy.model()
    optimizer = CurvaDion(toy.groups(model), gate=RMMC(0.3), replicas="single")
    toy.train(model, optimizer, range(steps))
    return model, optimizer


def places(tree, path=()):
    """Where something can be wrong: the paths to all values of a tree."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield (*path, key)
        if isinstance(value, (dict, list)) and key != "params":
            yield from places(value, (*path, key))


def put(tree, path, value):
    *path, last = path
    for key in path:
        tree = tree[key]
    if value is DROP:
        del tree[last]
    else:
        tree[last] = value


def damaged(saved):
    """Copies with one thing wrong each, by what it is."""
    record = json.loads(saved["param_groups"][0]["progress"])
    of_state = [(path, value) for path in places(saved) for value in VALUES]
    plain = [2**70, *(v for v in VALUES if not isinstance(v, torch.Tensor))]
    of_record = [(path, value) for path in places(record) for value in plain]
    chosen = random.Random(0)
    for path, value in chosen.sample(of_state, 300):
        copied = copy.deepcopy(saved)
        put(copied, path, value)
        yield (path, value), copied
    for path, value in chosen.sample(of_record, 150):
        held, copied = copy.deepcopy(record), copy.deepcopy(saved)
        put(held, path, value)
        for group in copied["param_groups"]:
            group["progress"] = json.dumps(held)
        yield ("progress", path, value), copied
    copied = copy.deepcopy(saved)
    copied["param_groups"][0]["progress"] = "[" * 100_000
    yield "a deep record", copied


def spoiled(key, tensor):
    """Tensors in the place of one of a state, each of which no step may go on from."""
    element = tensor.clone()
    element.view(-1)[0] = math.inf
    yield "inf", element
    if key in ("exp_avg_sq", "step"):
        yield "-1", torch.full_like(tensor, -1.0)
    yield "int32", tensor.to(torch.int32)
    yield "complex64", tensor.to(torch.complex64)
    yield "2 elements", torch.ones(2)
    yield "2 rows", torch.stack([tensor, tensor])


def assert_same(one, other):
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


def assert_goes_on(model, optimizer, what):
    """Three steps leave all weights and states finite."""
    toy.train(model, optimizer, range(3))
    assert not optimizer.report.skipped, what
    assert all(torch.isfinite(p).all() for p in model.parameters()), what
    for state in optimizer.state.values():
        for key, value in state.items():
            assert torch.isfinite(torch.as_tensor(value)).all(), (what, key)


def test_one_wrong_thing_is_refused_or_harmless():
    saved = trained()[1].state_dict()
    model, optimizer = trained(1)
    before, refused = copy.deepcopy(optimizer.state_dict()), 0
    for what, state in damaged(saved):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.load_state_dict(state)
        except (ValueError, TypeError) as error:
            assert len(str(error)) > 40, (what, error)
            assert_same(optimizer.state_dict(), before)
            refused += 1
            continue
        except Exception as error:
            pytest.fail(f"{what}: {type(error).__name__}: {error}")
        assert_goes_on(model, optimizer, what)
        model, optimizer = trained(1)
    assert refused > 200


@pytest.mark.parametrize("make", [trained, low_rank])
def test_tensors_that_no_step_can_go_on_from_are_refused(make):
    saved = make()[1].state_dict()
    _, optimizer = make(1)
    before, tried = copy.deepcopy(optimizer.state_dict()), set()
    for i, state in saved["state"].items():
        for key, tensor in state.items():
            if not isinstance(tensor, torch.Tensor) or (i > 0 and key in tried):
                continue
            tried.add(key)
            for what, wrong in spoiled(key, tensor):
                damaged_state = copy.deepcopy(saved)
                damaged_state["state"][i][key] = wrong
                try:
                    optimizer.load_state_dict(damaged_state)
                except (ValueError, TypeError) as error:
                    assert key in str(error), (key, what, error)
                else:
                    pytest.fail(f"{key} with {what} is taken")
                assert_same(optimizer.state_dict(), before)
    assert {"momentum", "momentum_norm", "R_scale", "exp_avg", "exp_avg_sq", "step"} <= tried
    assert tried & {"anchor", "Q"}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda s: s["param_groups"][0]["param_names"].pop(), "param_names=.* one name for each"),
        (lambda s: s["state"][0]["momentum"][0].fill_(math.nan), "'momentum' with a NaN .* for "),
        (lambda s: s["param_groups"][0].update(rank_multiple_of=0), "rank_multiple_of=0"),
    ],
    ids=["names", "NaN", "group"],
)
def test_what_is_wrong_is_said(damage, said):
    _, optimizer = trained(1)
    saved = copy.deepcopy(trained()[1].state_dict())
    damage(saved)
    with pytest.raises(ValueError, match=said):
        optimizer.load_state_dict(saved)
