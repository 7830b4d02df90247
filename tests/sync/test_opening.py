"""An opening: who weighs how much, who may apply it, and what is restored if nobody does."""

from __future__ import annotations

import threading

import pytest
import torch

from curvadion.comm.exchange_thread import Worker
from curvadion.comm.lost import MemberLost
from curvadion.comm.members import Members
from curvadion.comm.replicas import FixedMembers
from curvadion.plan.coded_states import encoded
from curvadion.plan.parameter import Parameter
from curvadion.sync.opening import Opening


class Told(Members):
    """Members whose numbers and votes a test chooses; this one is the first.

    Args:
        others: what the other members tell, weights first.
        votes: whether they apply openings.
        lost: what their agreement raises; None if none of them is lost.
    """

    def __init__(self, others=(), *, votes=True, lost=None):
        self.others = others
        self.votes = votes
        self.lost = lost
        self.log = []
        self.committed = []
        self.worker = None

    def meet(self, *, ahead=False):
        self.log.append("meet")

    def gather(self, numbers):
        return [list(numbers), *map(list, self.others)]

    def during_training(self, device):
        self.worker = self.worker or Worker(device)
        return self.worker

    def agree(self):
        self.log.append("agree")
        if self.lost is not None:
            raise self.lost

    def commit(self, *, error, record):
        self.committed.append((error, record))
        return error is None and self.votes


def opening_of(members):
    """An opening with two residuals, of threes and of fives."""
    residuals = [torch.full((2, 3), 3.0), torch.full((4,), 5.0)]
    return Opening(members, [parameter(residual) for residual in residuals]), residuals


def parameter(residual, X=None):
    """A parameter of the residual's shape, if X is None."""
    X = torch.zeros_like(residual) if X is None else X
    return Parameter(X, {"algorithm": "inner"}, {X: {"residual": residual}}, "x")


def assert_values(residuals, first, second):
    assert residuals[0].equal(torch.full((2, 3), first))
    assert residuals[1].equal(torch.full((4,), second))


def add_to(residuals):
    """What an exchange does to residuals."""
    for residual in residuals:
        residual.add_(1.0)


# ---------------------------------------------------------------- weights


def test_members_tell_each_other_weights_and_numbers():
    opening, residuals = opening_of(Told([(1.0, 7.0, 8.0), (2.0, 9.0, 10.0)]))
    assert opening.count == 0
    assert opening.weigh(3.0, (5.0, 6.0)) == [[5.0, 6.0], [7.0, 8.0], [9.0, 10.0]]
    assert opening.total == 6.0
    assert opening.count == 3
    assert opening.share == 1.5  # 3 of 6, where an equal share is 2
    assert_values(residuals, 3.0, 5.0)  # there was no mean before


def test_all_count_equally_where_no_steps_count():
    opening, _ = opening_of(Told([(0.0,), (0.0,)]))
    assert opening.weigh(0.0) == [[], [], []]
    assert opening.share == 1.0
    opening, _ = opening_of(Told([(2.0,)]))
    opening.weigh(0.0)
    assert opening.share == 0.0


@pytest.mark.parametrize(("earlier", "factor"), [(0, 1.0), (3, 1.0), (2, 1.5), (6, 0.5)])
def test_residuals_become_parts_of_a_mean_of_those_present(earlier, factor):
    opening, residuals = opening_of(Told([(1.0,), (1.0,)]))
    opening.weigh(1.0, earlier=earlier)
    assert_values(residuals, 3.0 * factor, 5.0 * factor)


def test_residuals_in_8_bits_keep_their_codes_and_change_their_scale():
    X = torch.zeros(300)
    coded = encoded("residual", X, torch.linspace(-2.0, 3.0, 300))
    before = coded.clone()
    opening = Opening(Told([(1.0,)] * 2), [parameter(coded, X)])
    opening.weigh(1.0, earlier=2)
    assert coded[:512].equal(before[:512])
    scales = coded[512:].view(torch.float32) / before[512:].view(torch.float32)
    assert (scales / 1.5 - 1).abs().max() < 2**-16  # a scale has 17 bits
    opening.restore()
    assert coded.equal(before)


def test_a_replica_alone_counts_fully():
    opening, _ = opening_of(FixedMembers())
    opening.weigh(0.0)
    assert opening.count == 1
    assert opening.share == 1.0


# ---------------------------------------------------------------- exchange and vote


def test_an_opening_is_applied_if_all_have_received_everything():
    members = Told([(1.0,)])
    opening, residuals = opening_of(members)
    opening.record["codes"] = "the means"
    with opening.exchanging():
        add_to(residuals)
        assert members.log == []
    assert members.log == ["agree"]
    opening.wait()  # no thread has anything to do
    assert opening.vote()
    assert members.committed == [(None, {"codes": "the means"})]
    assert_values(residuals, 4.0, 6.0)


def test_nobody_applies_what_another_member_cannot():
    members = Told([(1.0,)], votes=False)
    opening, residuals = opening_of(members)
    opening.weigh(1.0, earlier=1)
    with opening.exchanging():
        add_to(residuals)
    assert not opening.vote()
    assert members.committed[0][0] is None
    assert_values(residuals, 3.0, 5.0)  # from before they were scaled


@pytest.mark.parametrize("where", ["exchange", "agreement"])
def test_a_lost_member_is_a_reason_not_to_apply_an_opening(where):
    lost = MemberLost("the second is gone")
    members = Told([(1.0,)], lost=lost if where == "agreement" else None)
    opening, residuals = opening_of(members)
    with opening.exchanging():
        add_to(residuals)
        if where == "exchange":
            raise lost
    assert_values(residuals, 4.0, 6.0)  # all members vote before anything is restored
    assert not opening.vote()
    assert members.committed == [("the second is gone", {})]
    assert_values(residuals, 3.0, 5.0)


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt()])
def test_another_error_restores_residuals_and_is_raised(error):
    members = Told([(1.0,)])
    opening, residuals = opening_of(members)
    with pytest.raises(type(error)), opening.exchanging():
        add_to(residuals)
        raise error
    assert_values(residuals, 3.0, 5.0)
    assert members.log == []


def test_an_opening_that_has_not_exchanged_anything_is_not_applied():
    members = Told([(1.0,)])
    opening, _ = opening_of(members)
    assert not opening.vote()
    assert members.committed == [("it was interrupted", {})]


def test_a_fixed_group_ends_with_its_first_lost_member():
    """It applies all openings, so it keeps no copy of residuals."""
    opening, residuals = opening_of(FixedMembers())
    with opening.exchanging():
        add_to(residuals)
    assert opening.vote()
    opening.restore()
    assert_values(residuals, 4.0, 6.0)
    with pytest.raises(MemberLost, match="gone"), opening.exchanging():
        raise MemberLost("gone")


# ---------------------------------------------------------------- during training


def test_members_agree_in_a_thread_after_the_exchanges():
    members = Told([(1.0,)])
    opening, residuals = opening_of(members)
    released = threading.Event()

    def exchange():
        released.wait(20)
        members.log.append("exchange")
        add_to(residuals)

    thread = members.during_training(torch.device("cpu"))
    begun = thread.begin("an exchange", exchange)
    with opening.exchanging():
        opening.end_later(thread, [begun])
    assert members.log == []  # training goes on
    released.set()
    opening.wait()
    assert members.log == ["exchange", "agree"]
    assert opening.vote()
    assert_values(residuals, 4.0, 6.0)


@pytest.mark.parametrize("where", ["exchange", "agreement"])
def test_a_member_that_is_lost_in_the_thread_is_a_reason_not_to_apply_an_opening(where):
    lost = MemberLost("the second is gone")
    members = Told([(1.0,)], lost=lost if where == "agreement" else None)
    opening, residuals = opening_of(members)

    def exchange():
        add_to(residuals)
        if where == "exchange":
            raise lost

    with opening.exchanging():
        thread = members.during_training(torch.device("cpu"))
        opening.end_later(thread, [thread.begin("an exchange", exchange)])
    opening.wait()
    assert not opening.vote()
    ((error, _),) = members.committed
    assert "the second is gone" in error
    # Members agree only about what they have received.
    assert members.log == (["agree"] if where == "agreement" else [])
    assert_values(residuals, 3.0, 5.0)


def test_another_error_in_the_thread_is_raised_with_its_name():
    members = Told([(1.0,)], lost=ValueError("a bug"))
    opening, _ = opening_of(members)
    with opening.exchanging():
        opening.end_later(members.during_training(torch.device("cpu")), [])
    with pytest.raises(RuntimeError, match="The end of an opening failed: a bug"):
        opening.wait()
