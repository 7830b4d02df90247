"""What a parameter of a plan knows of its state and of its direction."""

import pytest
import torch
from torch import nn

from curvadion import Dion
from curvadion.update.registry import DIRECTIONS


def only_parameter(optimizer):
    (parameter,) = optimizer._collective_plan().parameters
    return parameter


def test_reading_a_missing_state_creates_none_and_writing_to_it_is_an_error():
    X = nn.Parameter(torch.eye(4))
    optimizer = Dion([X], replicas="single")
    p = only_parameter(optimizer)
    assert not p.state and "momentum" not in p.state and p.state.get("momentum") is None
    with pytest.raises(TypeError):
        p.state["momentum"] = torch.zeros(4, 4)
    assert X not in optimizer.state
    X.grad = torch.ones(4, 4)
    optimizer.step()
    assert p.state is optimizer.state[X]
    p.state["more"] = 1.0
    assert optimizer.state[X]["more"] == 1.0


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_plan_asks_the_direction_whether_it_feeds_back(direction, monkeypatch):
    X = nn.Parameter(torch.eye(4))
    feeds_back = only_parameter(Dion([X], direction=direction, replicas="single")).feeds_back
    assert feeds_back == DIRECTIONS[direction].feeds_back
    monkeypatch.setattr(type(DIRECTIONS[direction]), "feeds_back", not feeds_back)
    p = only_parameter(Dion([X], direction=direction, replicas="single", momentum=0.75))
    assert p.feedback == (0.0 if feeds_back else 0.25)
    assert p.momentum_decay == (0.75 if feeds_back else 1.0)
