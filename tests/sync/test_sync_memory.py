"""A sync kind gets its memory back as it gave it, and begins anew under another kind."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from curvadion import CurvaDion, FixedPeriod, LowRank, QuantizedAverage
from curvadion.sync import Owner, StateKey, Sync


class Strict(Sync):
    """Counts openings, and takes a memory of exactly its own keys."""

    state_keys = (StateKey("own", Owner.REPLICA, like_parameter=True),)

    def __init__(self):
        self.openings = 0

    def begin(self, parameters):
        for p in parameters:
            p.state.setdefault("own", torch.zeros_like(p.X))

    def open_step(self, step):
        for _ in step.batches():
            pass
        self.openings += 1

    def state_dict(self):
        return {"openings": self.openings}

    def load_state_dict(self, state):
        (self.openings,) = state.values()


def trained(sync, steps=3):
    torch.manual_seed(0)
    X = [nn.Parameter(torch.randn(6, 4))]
    optimizer = CurvaDion(X, gate=FixedPeriod(1), sync=sync)
    for number in range(steps):
        X[0].grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
        optimizer.step()
    return optimizer


def test_a_memory_comes_back_as_it_was_given():
    saved = copy.deepcopy(trained(Strict()).state_dict())
    into = trained(Strict(), steps=0)
    into.load_state_dict(saved)
    assert into.sync.state_dict() == {"openings": 3}


@pytest.mark.filterwarnings("ignore:state_dict was saved with another sync")
@pytest.mark.parametrize("other", [LowRank(), QuantizedAverage()])
def test_under_another_kind_it_begins_as_it_was_built(other):
    saved = copy.deepcopy(trained(other).state_dict())
    into = trained(Strict())
    into.load_state_dict(saved)
    assert into.sync.state_dict() == {"openings": 0}
    back = trained(other, steps=0)
    back.load_state_dict(copy.deepcopy(into.state_dict()))
    assert "own" not in back.state_dict()["state"][0]


def test_a_sync_is_chosen_once():
    with pytest.raises(AttributeError):
        trained(LowRank()).sync = QuantizedAverage()


@pytest.mark.parametrize("number", [-1, True, 1.5])
def test_a_damaged_memory_is_an_error(number):
    with pytest.raises((TypeError, ValueError), match="next_fragment"):
        memory = QuantizedAverage().state_dict() | {"next_fragment": number}
        QuantizedAverage().load_state_dict(memory)
