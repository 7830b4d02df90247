"""A sync among members that come and go, over process groups that the test chooses."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distributed
import toy
from curvadion import CodedGradients, CurvaDion, FixedPeriod, QuantizedAverage, Replicated
from curvadion.comm.members import Members, Opening
from curvadion.comm.worker import Worker
from curvadion.optim.handover import hand_over, take_over

pytestmark = pytest.mark.numeric


class Chosen(Members):
    """Members are those of ``group``; the openings of these numbers fail."""

    def __init__(self, group, fails=()):
        self.group, self.fails, self.records, self.fresh = group, fails, [], False
        self.missed = []  # what brings this one up to date in the middle of its next opening

    def meet(self):
        pass

    def begin(self):
        for catch_up in self.missed:
            catch_up()
        self.missed = []
        return OfGroup(self)


class OfGroup(Opening):
    def __init__(self, members):
        self.members, self.group, self.fresh = members, members.group, members.fresh

    def gather(self, numbers):
        told = [None] * self.group.size()
        dist.all_gather_object(told, list(numbers), group=self.group)
        return told

    def begin(self, what, work):
        self.members.worker = getattr(self.members, "worker", None) or Worker(torch.device("cpu"))
        return self.members.worker.begin(what, work)

    def agree(self):
        dist.barrier(self.group)

    def commit(self, *, failed, record):
        self.members.records.append(record)
        return not failed and len(self.members.records) not in self.members.fails


def vector(rank, members, period, rate=0.1, delay=0):
    """One parameter that moves by a known step, with codes of eight bits."""
    x = nn.Parameter(torch.zeros(512))
    x.grad = torch.randn(512, generator=torch.Generator().manual_seed(rank))
    sync = QuantizedAverage(bits=8, residual_dtype="float32", delay=delay)
    inner = torch.optim.SGD([x], lr=rate)
    return x, Replicated(inner, replicas=members, gate=FixedPeriod(period), sync=sync)


def weighted(rank, openings, weights):
    """Anchors after openings before which one member takes twice as many steps as the other."""
    members = Chosen(dist.group.WORLD)
    members.weight = weights[rank]
    x, optimizer = vector(rank, members, period=4 if rank == 0 else 2)
    for _ in range(openings * (4 if rank == 0 else 2)):
        optimizer.step()
    assert optimizer.report.gate_open
    return optimizer.state[x]["anchor"], x.grad


@pytest.mark.parametrize("weights", [(1, 1), (300, 100)])
def test_means_are_weighted_by_the_steps_of_each(weights):
    (anchor, g), (there, h) = distributed.run(2, weighted, 8, weights)
    assert anchor.equal(there)
    # Over 4 and 2 steps: (4 w D + 2 v D') / (4 w + 2 v), D = -0.1 * 4 g and D' = -0.1 * 2 h, eight
    # times.
    w, v = weights
    expected = -0.1 * 8 * (16 * w * g.double() + 4 * v * h.double()) / (4 * w + 2 * v)
    assert (anchor - expected).norm() < 0.005 * expected.norm()


def leaving(rank):
    """What two members' residuals have moved the anchor by once the third has gone."""
    pair = dist.new_group([0, 1])
    members = Chosen(dist.group.WORLD)
    x, optimizer = vector(rank, members, period=1)
    optimizer.step()
    if rank == 2:
        return None
    members.group = pair
    before, owed = optimizer.state[x]["anchor"].clone(), optimizer.state[x]["residual"].clone()
    x.grad.zero_()
    optimizer.step()
    return optimizer.state[x]["anchor"] - before, owed


def test_residuals_stay_shares_of_the_mean_that_they_are_from():
    (moved, one), (there, two), _ = distributed.run(3, leaving)
    assert moved.equal(there)
    expected = (one.double() + two.double()) / 3
    assert (moved - expected).norm() < 0.15 * expected.norm()  # in codes of eight bits


def missing(rank, delay, local_step):
    """A member that misses two openings, and catches up by the records of the other."""
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    members, model = Chosen(dist.group.WORLD), toy.model()
    sync, gate = QuantizedAverage(fragments=3, delay=delay), FixedPeriod(2)
    optimizer = CurvaDion(
        toy.groups(model), replicas=members, sync=sync, gate=gate, local_step=local_step
    )
    first, second, last = 6 + delay, 10 + delay, 14 + delay  # when what was sent has arrived
    toy.train(model, optimizer, range(first), rank)
    members.group, count = alone, len(members.records)
    if rank == 0:
        toy.train(model, optimizer, range(first, second), rank)
    told = [members.records[count:]]
    dist.broadcast_object_list(told, src=0)
    anchors = [optimizer.state[p]["anchor"] for p in model.parameters()]
    if rank:
        own = [p - a for p, a in zip(model.parameters(), anchors, strict=True)]
        plan, records = optimizer._present_plan(), told[0]
        optimizer.sync.catch_up(plan, records[0])
        members.missed = [lambda: optimizer.sync.catch_up(plan, records[1])]
        for p, a, moved in zip(model.parameters(), anchors, own, strict=True):
            assert torch.allclose(p - a, moved, atol=1e-6)
    members.group = dist.group.WORLD
    toy.train(model, optimizer, range(second, last), rank)
    return anchors


@pytest.mark.parametrize(("delay", "local_step"), [(0, "dion"), (1, "dion"), (0, "gradient")])
def test_who_catches_up_holds_the_same_anchors_and_keeps_what_is_its_own(delay, local_step):
    one, two = distributed.run(2, missing, delay, local_step)
    assert all(map(torch.equal, one, two))


def failing(rank):
    members, model = Chosen(dist.group.WORLD, fails=(2,)), toy.model()
    optimizer = CurvaDion(
        toy.groups(model), replicas=members, sync=QuantizedAverage(), gate=FixedPeriod(3)
    )
    opened = [report.gate_open for report in toy.train(model, optimizer, range(9), rank)]
    return opened, toy.weights(model)


def test_a_failed_opening_is_tried_again_at_the_next_step():
    (opened, weights), (there, others) = distributed.run(2, failing)
    assert opened == there == [False, False, True, False, False, False, True, False, False]
    assert any(not weights[name].equal(others[name]) for name in weights)


def failing_late(rank):
    """By step, the anchor and the residual, where the second of three openings is not written."""
    members = Chosen(dist.group.WORLD, fails=(2,))
    x, optimizer = vector(rank, members, period=3, delay=1)
    held = []
    for _ in range(10):
        optimizer.step()
        held.append([optimizer.state[x][key].clone() for key in ("anchor", "residual")])
    return held, x.grad


def test_an_opening_that_fails_when_it_is_due_puts_all_back():
    (held, g), (there, h) = distributed.run(2, failing_late)
    for of_rank in (held, there):
        assert all(map(torch.equal, of_rank[6], of_rank[4]))
    assert held[9][0].equal(there[9][0])
    expected = -0.1 * 9 * (g.double() + h.double()) / 2
    assert (held[9][0] - expected).norm() < 0.02 * expected.norm()  # what the last codes have lost


def out_of_step(rank):
    """Fragments and anchors where a member cannot take part in the second opening."""
    members, model = Chosen(dist.group.WORLD), toy.model()
    sync = QuantizedAverage(fragments=2, delay=1)
    optimizer = CurvaDion(toy.groups(model), replicas=members, sync=sync, gate=FixedPeriod(3))
    begin, failed = members.begin, []

    def broken(numbers):
        failed.append(numbers)
        raise RuntimeError("a member was lost")

    def begin_broken():
        opening = begin()
        if optimizer.progress.steps == 5:
            opening.gather = broken
        return opening

    members.begin = begin_broken
    toy.train(model, optimizer, range(14), rank)
    assert failed
    optimizer.synchronize()
    return optimizer.sync.next_fragment, toy.weights(model)


def test_all_go_on_with_the_fragment_of_an_opening_that_failed():
    (fragment, weights), (other, theirs) = distributed.run(2, out_of_step)
    assert fragment == other
    assert all(weights[name].equal(theirs[name]) for name in weights)


def from_a_checkpoint(rank):
    """What a replica under way takes over, and whether anything of its own is left."""
    model, members = toy.model(), Chosen(dist.group.WORLD)
    sync, gate = QuantizedAverage(delay=2), FixedPeriod(3)
    optimizer = CurvaDion(toy.groups(model), replicas=members, sync=sync, gate=gate)
    toy.train(model, optimizer, range(3), rank)
    optimizer.load_state_dict(optimizer.state_dict())  # with a mean that is to be added
    own = [p for p in model.parameters() if "due" in optimizer.state[p]]
    take_over(optimizer, hand_over(optimizer))
    return len(own), [key for p in own for key in optimizer.state[p] if key in ("due", "mean")]


def test_who_takes_over_drops_what_it_had_under_way():
    for own, left in distributed.run(2, from_a_checkpoint):
        assert own and not left


def coded(rank):
    """Residuals around a step whose gradients are finite nowhere; evaluation of a loaded state."""
    model, members = toy.model(), Chosen(dist.group.WORLD)
    optimizer = CurvaDion(toy.groups(model), replicas=members, sync=CodedGradients())
    toy.train(model, optimizer, range(2), rank)
    before = [optimizer.state[p]["residual"].clone() for p in model.parameters()]
    weights = toy.weights(model)
    toy.loss(model, 2, rank).backward()
    for p in model.parameters():
        p.grad.fill_(torch.nan)
    optimizer.step()
    after = [optimizer.state[p]["residual"] for p in model.parameters()]
    assert all(map(torch.equal, before, after)) and optimizer.report.skipped
    toy.assert_bitwise_equal(toy.weights(model), weights)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.eval()
    return toy.weights(model)


def test_gradients_in_codes_among_members():
    one, two = distributed.run(2, coded)
    toy.assert_bitwise_equal(one, two)


def alone(rank):
    members, _model = Chosen(dist.group.WORLD), toy.model()
    members.fresh = rank == 1
    x, optimizer = vector(rank, members, period=1)
    optimizer.step()
    return optimizer.state[x]["anchor"], x.grad


def test_a_newcomers_first_mean_is_that_of_the_others():
    (anchor, g), (there, _) = distributed.run(2, alone)
    assert anchor.equal(there)
    assert (anchor + 0.1 * g).norm() < 0.02 * g.norm() * 0.1


HELD = ("residual", "anchor")


def interrupted(rank):
    """The residual and the anchor before and after an opening that an interrupt ends."""
    members = Chosen(dist.group.WORLD)
    x, optimizer = vector(rank, members, period=1)
    optimizer.step()
    held = [optimizer.state[x][key].clone() for key in HELD]
    begin = members.begin

    def begin_interrupted():
        opening = begin()
        opening.agree = mock.Mock(side_effect=KeyboardInterrupt)
        return opening

    members.begin = begin_interrupted
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    members.begin = begin
    optimizer.state_dict()  # as a handler does that saves before it ends the process
    return [optimizer.state[x][key].equal(was) for key, was in zip(HELD, held, strict=True)]


def test_an_interrupted_opening_is_not_written():
    assert distributed.run(2, interrupted) == [[True, True]] * 2


def thawed(rank):
    members, model = Chosen(dist.group.WORLD), toy.model()
    gate, sync = FixedPeriod(4), QuantizedAverage()
    optimizer = CurvaDion(toy.groups(model), replicas=members, sync=sync, gate=gate)
    toy.train(model, optimizer, range(6), rank)
    new = nn.Parameter(torch.zeros(7))
    optimizer.add_param_group({"params": [("new", new)], "algorithm": "adamw"})
    optimizer.eval()
    return toy.weights(model)


def test_members_synchronise_after_a_group_has_been_added():
    one, two = distributed.run(2, thawed)
    assert all(one[name].equal(two[name]) for name in one)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
def test_a_weight_that_is_no_share_is_refused(weight):
    with pytest.raises(ValueError, match=r"replicas\.weight="):
        Chosen(None).weight = weight
