"""Zeros in place of gradients that are missing here: for every form that a shard can have."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from curvadion import Dion
from curvadion.update.gradients import _filled

FORMS = {
    "matrix": torch.ones(3, 4),
    "transposed": torch.ones(4, 3).mT,
    "channels last": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "one number": torch.ones(1, 1),
    "no rows": torch.ones(0, 4),
    "no columns": torch.ones(4, 0),
    "neither": torch.ones(0, 0),
    "no rows of a wider tensor": torch.ones(8, 16)[:0, :4],
}


@pytest.mark.parametrize("form", FORMS)
def test_a_missing_gradient_is_zeros_of_the_same_form(form):
    x = FORMS[form]
    given = torch.full_like(FORMS["matrix"], 2.0)
    zeros, other = _filled([None, given], [x, FORMS["matrix"]])
    assert other is given
    assert zeros.shape == x.shape and zeros.dtype == x.dtype and not zeros.any()
    if x.numel():
        assert zeros.stride() == x.stride()


def test_missing_gradients_of_one_dtype_share_memory():
    a, b = _filled([None, None], [torch.ones(3, 4), torch.ones(5, 6)])
    assert a.data_ptr() == b.data_ptr()


@pytest.mark.parametrize("way", ["deepcopy", "state_dict"])
def test_a_copy_made_between_a_change_of_rank_and_the_next_step_has_the_new_rank(way):
    def built():
        torch.manual_seed(0)
        return nn.Parameter(torch.randn(8, 8))

    x, twin = built(), built()
    optimizer, straight = Dion([x], rank_fraction=0.25), Dion([twin], rank_fraction=0.25)

    def step(of, number, *optimizers):
        of.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(number))
        for each in optimizers:
            each.step()

    step(x, 0, optimizer)
    step(twin, 0, straight)
    for each in (optimizer, straight):
        each.param_groups[0]["rank_fraction"] = 1.0
    if way == "deepcopy":
        copied = copy.deepcopy(optimizer)
        (x,) = copied.param_groups[0]["params"]
    else:
        copied = Dion([x], rank_fraction=0.25)
        copied.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(x, 1, copied)
    step(twin, 1, straight)
    assert copied.state[x]["Q"].shape == (8, 8)
    assert torch.equal(x, twin)
    assert torch.equal(copied.state[x]["Q"], straight.state[twin]["Q"])
