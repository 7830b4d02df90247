"""A sync among members that come and go, over process groups that the test chooses."""

import gc
import importlib.util
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from curvadion import (
    CodedGradients,
    CurvaDion,
    FixedPeriod,
    QuantizedAverage,
    Replicated,
    WireMeter,
    clip_grad_norm_,
)
from curvadion.comm.exchange_thread import Worker
from curvadion.comm.lost import MemberLost
from curvadion.comm.members import Members
from support.references.tolerance import Rounding, assert_close
from support.runs import distributed, toy

pytestmark = pytest.mark.numeric


# ---------------------------------------------------------------- members and their parameter


class Chosen(Members):
    """Members are those of ``group``; the openings of these numbers fail."""

    def __init__(self, group, fails=()):
        self.group, self.fails, self.records, self.fresh = group, fails, [], False
        self.missed = []  # what brings this one up to date in the middle of its next opening

    def meet(self, *, ahead=False):
        if not ahead:
            for catch_up in self.missed:
                catch_up()
            self.missed = []

    def gather(self, numbers):
        told = [None] * self.group.size()
        dist.all_gather_object(told, list(numbers), group=self.group)
        return told

    def during_training(self, device):
        return self

    def begin(self, what, work):
        self.worker = getattr(self, "worker", None) or Worker(torch.device("cpu"))
        return self.worker.begin(what, work)

    def agree(self):
        dist.barrier(self.group)

    def commit(self, *, error, record):
        self.records.append(record)
        return error is None and len(self.records) not in self.fails


def vector(rank, members, period, rate=0.1, delay=0, residual_dtype="float32"):
    """One parameter that moves by a known step, with codes of eight bits."""
    x = nn.Parameter(torch.zeros(512))
    x.grad = torch.randn(512, generator=torch.Generator().manual_seed(rank))
    sync = QuantizedAverage(bits=8, residual_dtype=residual_dtype, delay=delay)
    inner = torch.optim.SGD([x], lr=rate)
    return x, Replicated(inner, replicas=members, gate=FixedPeriod(period), sync=sync)


# ---------------------------------------------------------------- means


@pytest.mark.parametrize(("weights", "delay"), [((1, 1), 0), ((300, 100), 0), ((300, 100), 1)])
@distributed.on_ranks(2)
def test_means_are_weighted_by_the_steps_of_each(rank, weights, delay):
    """One member takes twice as many steps as the other before each of eight openings."""
    members = Chosen(dist.group.WORLD)
    members.weight = weights[rank]
    x, optimizer = vector(rank, members, period=4 if rank == 0 else 2, delay=delay)
    for _ in range(8 * (4 if rank == 0 else 2) + delay):
        optimizer.step()
    assert optimizer.report.gate_open == (not delay)
    anchor = optimizer.state[x]["anchor"]
    (g, one), (h, other) = distributed.gathered((x.grad.double(), anchor))
    assert one.equal(other)
    # Over 4 and 2 steps: (4 w D + 2 v D') / (4 w + 2 v), D = -0.1 * 4 g and D' = -0.1 * 2 h, eight
    # times.
    w, v = weights
    expected = -0.1 * 8 * (16 * w * g + 4 * v * h) / (4 * w + 2 * v)
    assert (anchor - expected).norm() < 0.005 * expected.norm()


@pytest.mark.parametrize("of", ["weights", "gradients"])
@distributed.on_ranks(3)
def test_residuals_stay_shares_of_the_mean_that_they_are_from(rank, of):
    """What two members' residuals move the anchor by once the third has gone."""
    pair = dist.new_group([0, 1])
    members = Chosen(dist.group.WORLD)
    x, optimizer = vector(rank, members, period=1)
    if of == "gradients":
        inner, sync = torch.optim.SGD([x], lr=1.0), CodedGradients(8)
        optimizer = Replicated(inner, replicas=members, sync=sync)
    optimizer.step()
    before, owed = x.detach().double(), optimizer.state[x]["residual"].double()
    if rank < 2:
        members.group = pair
        x.grad.zero_()
        optimizer.step()
    moved = before - x.detach() if of == "gradients" else x.detach() - before
    (one, first), (other, second), _ = distributed.gathered((moved, owed))
    assert one.equal(other)
    expected = (first + second) / 3
    assert (one - expected).norm() < 0.15 * expected.norm()  # in codes of eight bits


@pytest.mark.parametrize(("delay", "local_step"), [(0, "dion"), (1, "dion"), (0, "gradient")])
@distributed.on_ranks(2)
def test_who_catches_up_holds_the_same_anchors_and_keeps_what_is_its_own(rank, delay, local_step):
    """A member that misses two openings, and catches up by the records of the other."""
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    members, model = Chosen(dist.group.WORLD), toy.model()
    sync, gate = QuantizedAverage((1, 2), fragments=3, delay=delay), FixedPeriod(2)
    optimizer = CurvaDion(
        toy.groups(model), replicas=members, sync=sync, gate=gate, local_step=local_step
    )
    first, second, last = 6 + delay, 10 + delay, 14 + delay  # when what was sent has arrived
    toy.train(model, optimizer, range(first), rank)
    members.group, count = alone, len(members.records)
    if rank == 0:
        toy.train(model, optimizer, range(first, second), rank)
    records, _ = distributed.gathered(members.records[count:])
    anchors = [optimizer.state[p]["anchor"] for p in model.parameters()]
    if rank:
        own = [p - a for p, a in zip(model.parameters(), anchors, strict=True)]
        plan = optimizer._collective_plan()
        optimizer.sync.catch_up(plan, records[0])
        members.missed = [lambda: optimizer.sync.catch_up(plan, records[1])]
        for p, a, moved in zip(model.parameters(), anchors, own, strict=True):
            rounding = Rounding(torch.float32, condition=float(p.norm() / moved.norm()))
            assert_close(p - a, moved, rounding)
    members.group = dist.group.WORLD
    toy.train(model, optimizer, range(second, last), rank)
    assert all(map(torch.equal, *distributed.gathered(anchors)))


# ---------------------------------------------------------------- openings that fail


@pytest.mark.parametrize("sync", [QuantizedAverage(), CodedGradients()])
@distributed.on_ranks(1)
def test_a_failed_opening_keeps_no_tensors_alive(rank, sync):
    """Even if Python collects no cycles."""
    members, model, alive = Chosen(dist.group.WORLD), toy.model(), []
    gate = None if sync.every_step else FixedPeriod(1)
    optimizer = CurvaDion(toy.groups(model), replicas=members, sync=sync, gate=gate)

    def lost():
        raise MemberLost("lost")

    members.agree = lost
    gc.disable()
    for step in range(12):
        toy.train(model, optimizer, [step], rank)
        members.records.clear()
        alive.append(sum(isinstance(held, torch.Tensor) for held in gc.get_objects()))
    gc.enable()
    # A copy of all residuals would add 5 each time; a thread may still hold a few tensors.
    assert alive[11] - alive[1] < 20


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), ValueError("a bug")])
@pytest.mark.parametrize(
    "sync", [QuantizedAverage(), CodedGradients(), QuantizedAverage(residual_dtype="int8")]
)
@distributed.on_ranks(1)
def test_an_error_that_is_no_lost_member_ends_the_rank_and_restores_residuals(rank, sync, error):
    members, model = Chosen(dist.group.WORLD), toy.model()
    gate = None if sync.every_step else FixedPeriod(1)
    optimizer = CurvaDion(toy.groups(model), replicas=members, sync=sync, gate=gate)
    toy.train(model, optimizer, range(2), rank)
    before = [optimizer.state[p]["residual"].clone() for p in model.parameters()]
    with (
        mock.patch.object(members, "agree", side_effect=error),
        pytest.raises(type(error), match=str(error)),
    ):
        toy.train(model, optimizer, [2], rank)
    after = [optimizer.state[p]["residual"] for p in model.parameters()]
    assert all(map(torch.equal, before, after))


@distributed.on_ranks(2)
def test_a_failed_opening_is_tried_again_at_the_next_step(rank):
    members, model = Chosen(dist.group.WORLD, fails=(2,)), toy.model()
    gate, sync = FixedPeriod(3), QuantizedAverage()
    optimizer = CurvaDion(toy.groups(model), replicas=members, sync=sync, gate=gate)
    optimizer.gate.spend = mock.Mock()
    reports = toy.train(model, optimizer, range(9), rank)
    opened = [report.gate_open for report in reports]
    assert opened == [False, False, True, False, False, False, True, False, False]
    reasons = [report.reason for report in reports]
    assert reasons[2:7] == ["period", "closed", "closed", "no opening", "period"]
    assert [spent for (spent,), _ in optimizer.gate.spend.call_args_list] == [1, 0, 1]
    one, other = distributed.gathered(toy.weights(model))
    assert not all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize("residual_dtype", ["float32", "int8"])
@distributed.on_ranks(2)
def test_an_opening_that_fails_when_it_is_due_puts_all_back(rank, residual_dtype):
    """The second of three openings is not written."""
    members = Chosen(dist.group.WORLD, fails=(2,))
    x, optimizer = vector(rank, members, period=3, delay=1, residual_dtype=residual_dtype)
    held = []
    for _ in range(10):
        optimizer.step()
        held.append([optimizer.state[x][key].clone() for key in ("anchor", "residual")])
    assert all(map(torch.equal, held[6], held[4]))
    anchor = held[9][0]
    (one, g), (other, h) = distributed.gathered((anchor, x.grad.double()))
    assert one.equal(other)
    expected = -0.1 * 9 * (g + h) / 2
    assert (anchor - expected).norm() < 0.02 * expected.norm()  # what the last codes have lost


@distributed.on_ranks(2)
def test_all_go_on_with_the_fragment_of_an_opening_that_failed(rank):
    members, model = Chosen(dist.group.WORLD), toy.model()
    sync = QuantizedAverage(fragments=2, delay=1)
    optimizer = CurvaDion(toy.groups(model), replicas=members, sync=sync, gate=FixedPeriod(3))
    gather, failed = members.gather, []

    def broken(numbers):
        if optimizer.progress.steps != 5:
            return gather(numbers)
        failed.append(numbers)
        raise MemberLost("a member was lost")

    members.gather = broken
    toy.train(model, optimizer, range(14), rank)
    assert failed
    optimizer.synchronize()
    assert len({*distributed.gathered(optimizer.sync.state_dict()["next_fragment"])}) == 1
    toy.assert_bitwise_equal(*distributed.gathered(toy.weights(model)))


# ---------------------------------------------------------------- members that come


def trained_with_delay(members, delay):
    model = toy.model()
    sync, gate = QuantizedAverage(delay=delay), FixedPeriod(4)
    return model, CurvaDion(toy.groups(model), replicas=members, sync=sync, gate=gate)


def assert_same_anchors(model, optimizer):
    plan = optimizer._collective_plan()
    optimizer.sync.finish(plan, optimizer._resting_step(plan))
    anchors = [optimizer.state[p]["anchor"] for p in model.parameters()]
    one, other = distributed.gathered(anchors)
    assert all(map(torch.equal, one, other))


@distributed.on_ranks(2)
def test_means_that_arrive_at_an_opening_give_all_the_same_anchors(rank):
    """A newcomer counts its steps from its first opening, so its means are due at the next one."""
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    members = Chosen(alone)
    model, optimizer = trained_with_delay(members, delay=3)
    if rank == 0:
        toy.train(model, optimizer, range(3), rank)
    members.group = dist.group.WORLD
    if rank == 0:
        toy.train(model, optimizer, [3], rank)
    else:
        optimizer.open_without_step()
    toy.train(model, optimizer, range(4, 12), rank)
    assert len(members.records) > 1
    assert_same_anchors(model, optimizer)


@distributed.on_ranks(2)
def test_means_that_arrive_before_they_are_due_give_all_the_same_anchors(rank):
    members = Chosen(dist.group.WORLD)
    model, optimizer = trained_with_delay(members, delay=3)
    toy.train(model, optimizer, range(4), rank)
    if rank == 0:
        toy.train(model, optimizer, range(4, 8), rank)
    else:
        toy.train(model, optimizer, [4], rank)
        optimizer.eval()  # opens beside the other's eighth step
    assert_same_anchors(model, optimizer)


@distributed.on_ranks(1)
def test_an_opening_with_a_delay_that_fails_at_once_is_tried_again_at_the_next_step(rank):
    members = Chosen(dist.group.WORLD)
    model, optimizer = trained_with_delay(members, delay=2)
    toy.train(model, optimizer, range(3), rank)
    with mock.patch.object(members, "gather", side_effect=MemberLost("other anchors")):
        [report] = toy.train(model, optimizer, [3], rank)
        assert not report.gate_open and not optimizer.open_without_step()
    [report] = toy.train(model, optimizer, [4], rank)
    assert report.gate_open


@distributed.on_ranks(1)
def test_an_error_of_the_thread_ends_the_opening_and_states_can_be_saved(rank):
    members = Chosen(dist.group.WORLD)
    model, optimizer = trained_with_delay(members, delay=2)
    toy.train(model, optimizer, range(3), rank)
    before = [optimizer.state[p]["residual"].clone() for p in model.parameters()]
    with mock.patch.object(members, "agree", side_effect=ValueError("a bug")):
        toy.train(model, optimizer, [3], rank)
        optimizer.sync._pending.opening._agreement._future.exception()  # wait for the thread
    with pytest.raises(RuntimeError, match="a bug"):
        toy.train(model, optimizer, range(4, 7), rank)
    optimizer.state_dict()
    after = [optimizer.state[p]["residual"] for p in model.parameters()]
    assert all(map(torch.equal, before, after))


@pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="needs torchft")
@distributed.on_ranks(2)
def test_who_takes_over_drops_what_it_had_under_way(rank):
    from curvadion.integrations.torchft.handover import hand_over, take_over

    model, members = toy.model(), Chosen(dist.group.WORLD)
    sync, gate = QuantizedAverage(delay=2, residual_dtype="int8"), FixedPeriod(3)
    optimizer = CurvaDion(toy.groups(model), replicas=members, sync=sync, gate=gate)
    toy.train(model, optimizer, range(4), rank)
    optimizer.load_state_dict(optimizer.state_dict())  # with a mean that is to be added
    own = [p for p in model.parameters() if "due" in optimizer.state[p]]
    take_over(optimizer, hand_over(optimizer))
    assert optimizer.progress.local_steps == 0
    assert own and not any({"due", "mean"} & optimizer.state[p].keys() for p in own)
    assert not any(optimizer.state[p]["residual"].any() for p in model.parameters())


@distributed.on_ranks(2)
def test_gradients_in_codes_among_members(rank):
    """Around a step whose gradients are finite nowhere; evaluation of a loaded state."""
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
    toy.assert_bitwise_equal(*distributed.gathered(toy.weights(model)))
    loaded, held = CodedGradients(), optimizer.sync.state_dict()
    loaded.load_state_dict(held)
    assert loaded.state_dict() == held


@distributed.on_ranks(2)
def test_a_newcomers_first_mean_is_that_of_the_others(rank):
    members = Chosen(dist.group.WORLD)
    members.fresh = rank == 1
    x, optimizer = vector(rank, members, period=1)
    optimizer.step()
    (anchor, g), (there, _) = distributed.gathered((optimizer.state[x]["anchor"], x.grad))
    assert anchor.equal(there)
    assert (anchor + 0.1 * g).norm() < 0.02 * g.norm() * 0.1


# ---------------------------------------------------------------- interruptions


@distributed.on_ranks(2)
def test_an_interrupted_opening_is_not_written(rank):
    members = Chosen(dist.group.WORLD)
    x, optimizer = vector(rank, members, period=1)
    optimizer.step()
    state = optimizer.state[x]
    held = {key: state[key].clone() for key in ("residual", "anchor")}
    members.agree = mock.Mock(side_effect=KeyboardInterrupt)
    members.disconnect = mock.Mock()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    members.disconnect.assert_called_once()  # others may wait for this one
    optimizer.state_dict()  # as a handler does that saves before it ends the process
    assert all(state[key].equal(was) for key, was in held.items())


@pytest.mark.parametrize("delay", [0, 1])
@distributed.on_ranks(2)
def test_an_error_while_an_opening_is_applied_tells_that_weights_have_changed(rank, delay):
    members = Chosen(dist.group.WORLD)
    _, optimizer = vector(rank, members, period=2, delay=delay)
    applies = "_arrive" if delay else "_take_in"
    error = torch.OutOfMemoryError("no memory")
    with mock.patch.object(optimizer.sync, applies, side_effect=error):
        members.changed = mock.Mock()
        with pytest.raises(torch.OutOfMemoryError):
            for _ in range(3):
                optimizer.step()
    assert members.changed.call_count == 2  # at the first step, too


@distributed.on_ranks(2)
def test_an_opening_whose_end_is_interrupted_is_written_later(rank):
    members = Chosen(dist.group.WORLD)
    x, optimizer = vector(rank, members, period=3, delay=1)
    for _ in range(3):
        optimizer.step()
    opening = optimizer.sync._pending.opening
    agreement, before = opening._agreement, optimizer.state[x]["anchor"].clone()
    opening._agreement = mock.Mock(result=mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert not members.records
    opening._agreement = agreement
    optimizer.step()
    assert len(members.records) == 1
    one, two = distributed.gathered(optimizer.state[x]["anchor"])
    assert one.equal(two)
    assert not one.equal(before)


# ---------------------------------------------------------------- new groups, and weights


@distributed.on_ranks(2)
def test_members_synchronise_after_a_group_has_been_added(rank):
    members, model = Chosen(dist.group.WORLD), toy.model()
    gate, sync = FixedPeriod(4), QuantizedAverage()
    optimizer = CurvaDion(toy.groups(model), replicas=members, sync=sync, gate=gate)
    toy.train(model, optimizer, range(6), rank)
    new = nn.Parameter(torch.zeros(7))
    optimizer.add_param_group({"params": [("new", new)], "algorithm": "adamw"})
    optimizer._collective_plan()
    assert optimizer.sync.state_dict()["weights"] == [2.0]
    optimizer.eval()
    toy.assert_bitwise_equal(*distributed.gathered(toy.weights(model)))


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
def test_a_weight_that_is_no_share_is_refused(weight):
    with pytest.raises(ValueError, match=r"replicas\.weight="):
        Chosen(None).weight = weight


@distributed.on_ranks(2)
def test_members_clip_by_their_own_norms_and_wait_for_nobody(rank):
    x = nn.Parameter(torch.zeros(4))
    x.grad = torch.full((4,), 2.0 + rank)
    optimizer = CurvaDion(
        [{"params": [x], "algorithm": "adamw"}],
        replicas=Chosen(dist.group.WORLD),
        sync=QuantizedAverage(),
        gate=FixedPeriod(4),
    )
    with WireMeter() as meter:
        norm = clip_grad_norm_(optimizer, 1.0)
    assert meter.total.calls == 0
    assert float(norm) == 4.0 + 2 * rank
    assert torch.allclose(x.grad, torch.full((4,), 0.5), rtol=1e-5)
