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
from curvadion import CurvaDion, FixedPeriod, QuantizedAverage

DROP = object()
VALUES = [
    *(None, -1, 0, 2**70, -0.5, math.inf, math.nan, True, "x", [], [1], {}, {"a": 1}),
    *(torch.tensor(math.nan), torch.zeros(2, 0), DROP),
]


def trained(steps=3):
    model = toy.model()
    gate, sync = FixedPeriod(3), QuantizedAverage(fragments=2)
    optimizer = CurvaDion(toy.groups(model), gate=gate, sync=sync, replicas="single")
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
    of_record = [(p, v) for p in places(record) for v in VALUES if not isinstance(v, torch.Tensor)]
    chosen = random.Random(0)
    for path, value in chosen.sample(of_state, 500):
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


def test_one_wrong_thing_is_refused_or_harmless():
    saved = trained()[1].state_dict()
    model, optimizer = trained(1)
    before, refused = copy.deepcopy(optimizer.state_dict()), 0
    for what, state in damaged(saved):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.load_state_dict(state)
                toy.train(model, optimizer, range(1))
        except (ValueError, TypeError) as error:
            assert len(str(error)) > 40, (what, error)
            assert_same(optimizer.state_dict(), before)
            refused += 1
        except Exception as error:
            pytest.fail(f"{what}: {type(error).__name__}: {error}")
        else:
            model, optimizer = trained(1)
    assert refused > 300


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda s: s["param_groups"][0]["param_names"].pop(), "param_names=.* one name for each"),
        (lambda s: s["state"][0]["momentum"][0].fill_(math.nan), "a NaN in 'momentum' of "),
        (lambda s: s["param_groups"][0].update(rank_multiple_of=0), "rank_multiple_of=0"),
    ],
)
def test_what_is_wrong_is_said(damage, said):
    _, optimizer = trained(1)
    saved = copy.deepcopy(trained()[1].state_dict())
    damage(saved)
    with pytest.raises(ValueError, match=said):
        optimizer.load_state_dict(saved)
