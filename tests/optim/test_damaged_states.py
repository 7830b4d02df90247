"""A state_dict with one thing wrong in it loads, or is refused with a word and changes nothing."""

import copy

import pytest
import torch

from curvadion import RMMC, CurvaDion, FixedPeriod, QuantizedAverage
from support.runs import toy


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
