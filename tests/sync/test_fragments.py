"""Fragments: how parameters are divided, whose turn it is, and what each one has done."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from curvadion import Dion
from curvadion.sync.fragments import Fragments


def plan_of(*lrs):
    """The plan of two matrices in a group for each learning rate."""
    groups = []
    for lr in lrs:
        groups.append({"params": [nn.Parameter(torch.ones(4, 4)) for _ in range(2)], "lr": lr})
    return Dion(groups, replicas="single")._collective_plan()


def only_groups(plan, *positions):
    """The part of a plan in these groups."""
    return plan.select([p.position in positions for p in plan.parameters])


def fragments_of(count, parameters=4):
    fragments = Fragments()
    assert fragments.divide([1] * parameters, count)
    return fragments


# ---------------------------------------------------------------- the division


@pytest.mark.parametrize(("parameters", "count", "there"), [(4, 2, 2), (4, 9, 4), (1, 1, 1)])
def test_there_are_no_more_fragments_than_parameters(parameters, count, there):
    fragments = fragments_of(count, parameters)
    assert fragments.count == there
    assert {*fragments.of_parameter} == {*range(there)}
    assert len(fragments.rates) == len(fragments.sent_rates) == there
    assert fragments.weights == [0.0] * there
    assert fragments.members == [0] * there


def test_without_parameters_there_is_one_fragment():
    fragments = Fragments()
    fragments.divide([], 3)
    assert fragments.count == 1
    assert fragments.weights == [0.0]


def test_each_parameter_is_in_one_fragment():
    plan = plan_of(0.1, 0.2)
    fragments = fragments_of(3)
    parts = [fragments.select(plan, number).parameters for number in range(3)]
    for number, part in enumerate(parts):
        assert part == [
            p for p, of in zip(plan.parameters, fragments.of_parameter, strict=True) if of == number
        ]
    assert sum(map(len, parts)) == len(plan.parameters)


def take(fragments, fragment, plan):
    """What a fragment has done, which is sent."""
    movement = fragments.movement(fragment, plan)
    fragments.begin_again(fragment, sent_rates=movement.rates)
    return movement.rates, movement.weight


def test_fragments_take_turns():
    fragments = fragments_of(3)
    turns = []
    for _ in range(5):
        turns.append(fragments.next)
        fragments.go_on_after(fragments.next)
    assert turns == [0, 1, 2, 0, 1]


def test_an_equal_division_changes_nothing():
    plan = plan_of(0.5, 0.25)
    fragments = fragments_of(2)
    fragments.count_step(plan, 3.0)
    take(fragments, 1, plan)
    fragments.go_on_after(0)
    before = copy.deepcopy(fragments.state_dict())
    assert not fragments.divide([1] * 4, 2)
    assert fragments.state_dict() == before


def test_new_fragments_have_done_as_much_as_any_old_one():
    fragments = fragments_of(3)
    fragments.rates = [[1.0, 5.0], [2.0], []]
    fragments.sent_rates = [[0.0], [0.5, 0.25], [0.75]]
    fragments.weights = [3.0, 7.0, 1.0]
    fragments.members = [2, 0, 4]
    fragments.next = 2
    assert fragments.divide([1] * 4, 2)
    assert fragments.rates == [[2.0, 5.0]] * 2
    assert fragments.sent_rates == [[0.75, 0.25]] * 2
    assert fragments.weights == [7.0] * 2
    assert fragments.members == [4] * 2
    assert fragments.next == 0
    # Each has its own sums.
    fragments.rates[0].append(1.0)
    assert fragments.rates[1] == [2.0, 5.0]


# ---------------------------------------------------------------- what they have done


def test_steps_count_for_all_fragments_until_one_is_taken():
    plan = plan_of(0.5, 0.25)
    fragments = fragments_of(2)
    fragments.count_step(plan, 1.0)
    fragments.count_step(plan, 2.0)
    assert take(fragments, 0, plan) == ([1.0, 0.5], 3.0)
    fragments.count_step(plan, 4.0)
    assert take(fragments, 0, plan) == ([0.5, 0.25], 4.0)
    assert take(fragments, 0, plan) == ([0.0, 0.0], 0.0)
    assert take(fragments, 1, plan) == ([1.5, 0.75], 7.0)


def test_groups_whose_parameters_are_frozen_have_no_rate_in_a_step():
    plan = plan_of(0.5, 0.25, 0.125)
    fragments = fragments_of(1)
    fragments.count_step(only_groups(plan, 1), 1.0)
    fragments.count_step(only_groups(plan, 0, 1), 1.0)
    assert take(fragments, 0, plan) == ([0.5, 0.5, 0.0], 2.0)
    fragments.count_step(plan, 1.0)
    assert take(fragments, 0, only_groups(plan, 0)) == ([0.5], 1.0)


def test_an_opening_that_is_not_applied_gives_back_what_it_took():
    """Beside the steps since then, and a group that has come since then."""
    fragments = fragments_of(2)
    plan = plan_of(0.5)
    fragments.count_step(plan, 1.0)
    movement = fragments.movement(1, plan)
    fragments.begin_again(1, sent_rates=[9.0, 9.0])
    assert fragments.sent_rates[1] == [9.0, 9.0]
    fragments.count_step(plan_of(0.25, 2.0), 2.0)
    fragments.put_back(1, movement)
    assert fragments.rates == [[0.75, 2.0]] * 2
    assert fragments.weights == [3.0, 3.0]
    assert fragments.sent_rates[1] == movement.last_sent_rates != [9.0, 9.0]


def test_a_sent_rate_is_that_of_the_parameters_fragment_and_group():
    plan = plan_of(0.5, 0.25)
    fragments = fragments_of(2)
    fragments.sent_rates = [[1.0, 2.0], [3.0]]
    rate = fragments.sent_rate(plan)
    for p, of in zip(plan.parameters, fragments.of_parameter, strict=True):
        # A group that has come since that opening had no rate in it.
        assert rate(p) == [[1.0, 2.0], [3.0, 0.0]][of][p.position]


def test_new_anchors_begin_without_rates():
    plan = plan_of(0.5)
    fragments = fragments_of(2)
    fragments.count_step(plan, 1.0)
    fragments.sent_rates = [[1.0], [2.0]]
    fragments.forget_rates()
    assert fragments.rates == [[], []]
    assert fragments.sent_rates == [[1.0], [2.0]]
    fragments.count_step(plan, 1.0)
    assert fragments.rates == [[0.5], [0.5]]


# ---------------------------------------------------------------- checkpoints


def used():
    """Fragments that have nothing left of their beginning, and their state."""
    fragments = fragments_of(2)
    fragments.rates = [[1.0], [2.0, 3.0]]
    fragments.sent_rates = [[4.0], [5.0]]
    fragments.weights = [6.0, 7.0]
    fragments.members = [8, 9]
    fragments.go_on_after(0)
    return fragments, copy.deepcopy(fragments.state_dict())


def test_fragments_go_on_from_a_checkpoint():
    _, state = used()
    resumed = Fragments()
    resumed.load_state_dict(copy.deepcopy(state))
    assert not resumed.divide([1] * 4, 2)
    assert resumed.state_dict() == state
    assert resumed.next == 1
    assert resumed.count == 2


def test_a_checkpoint_of_another_division_is_noticed():
    _, state = used()
    resumed = Fragments()
    resumed.load_state_dict(state)
    assert resumed.divide([1] * 4, 3)
    assert resumed.rates == [[2.0, 3.0]] * 3
    assert resumed.members == [9] * 3
    assert resumed.next == 1
