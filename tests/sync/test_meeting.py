"""The meeting: what it sends, what it tells, and that ranks which differ raise in the same step."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from curvadion import RMMC, CurvaDion, FixedPeriod, Gate, LowRank, QuantizedAverage, WireMeter
from curvadion.agreement.meeting import MEETING_BYTES, WORDS_BYTES
from curvadion.ops.code_format import Bits
from support.runs import distributed
from support.runs.raised import told
from support.runs.two_replicas import RANKS, Replica


class Prescribed(Gate):
    """Has the signals that it is given."""

    def signal(self, before, after):
        return self.signals

    def opens(self, signal, local_steps):
        return True


def prescribed(replicas):
    X = [nn.Parameter(torch.eye(2)) for _ in range(4)]
    return CurvaDion(X, replicas=replicas, gate=Prescribed(), lr=0.0, weight_decay=0.0), X


def tell(optimizer, X, signals, spoilt=False):
    """The report of a step with these signals of the matrices."""
    for i, x in enumerate(X):
        x.grad = torch.full((2, 2), math.nan if spoilt and i == 0 else 1.0)
    optimizer.gate.signals = torch.as_tensor(signals)
    optimizer.step()
    return optimizer.report


def check_report(report, by_rank, spoilt=False):
    """by_rank: the signals of each rank."""
    assert report.skipped == (spoilt or any(math.isnan(s) for each in by_rank for s in each))
    if not report.skipped:
        largest = max(0.0, *(s for each in by_rank for s in each))
        assert report.rmmc == largest
        index = int(report.rmmc_parameter.rsplit("[", 1)[1].rstrip("]"))
        assert largest == 0 or largest in [each[index] for each in by_rank]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_signal_that_is_nan_is_not_finite(sign):
    """The processor's own 0 / 0 has the sign bit set."""
    optimizer, X = prescribed("single")
    nan = torch.tensor(math.nan).copysign(torch.tensor(sign))
    assert tell(optimizer, X, torch.stack([torch.tensor(0.5), nan, nan, nan])).skipped


def cases(ranks):
    """Signals of each rank, and which one has a gradient that is not finite, if any."""
    random = np.random.default_rng(ranks)
    special = [0.0, -0.0, math.inf, 2.0**-149]
    for number in range(24):
        signals = np.float32(random.exponential(size=(ranks, 4)) * 10.0 ** random.integers(-30, 30))
        chosen = random.random((ranks, 4)) < random.choice([0.0, 0.3, 1.0])
        signals[chosen] = random.choice(special, chosen.sum())
        yield signals.tolist(), int(random.integers(ranks)) if number % 8 == 7 else None


@distributed.on_ranks(4)
def test_all_ranks_know_the_largest_signal_and_gradients_that_are_not_finite(rank):
    generator = torch.Generator().manual_seed(rank)
    optimizer, X = prescribed(dist.group.WORLD)
    for signals, spoilt in cases(4):
        report = tell(optimizer, X, signals[rank], spoilt == rank)
        check_report(report, signals, spoilt is not None)
        assert all(other == report for other in distributed.gathered(report))
        for x in X:  # identical gradients would be an error
            x.grad = torch.randn(2, 2, generator=generator)


class Misshapen(Prescribed):
    def signal(self, before, after):
        return after[:1]


def test_signals_that_are_not_one_a_matrix_are_an_error():
    optimizer, X = prescribed("single")
    optimizer.gate = Misshapen()
    with pytest.raises(ValueError, match=r"a matrix, of shape \(4,\), got tensor"):
        tell(optimizer, X, [0.0])


@pytest.mark.parametrize("layout", RANKS)
def test_a_meeting_sends_24_bytes(layout):
    distributed.run(RANKS[layout], count, layout)


def count(rank, layout):
    """What is reduced at each step under a gate of signals that stays closed."""
    assert MEETING_BYTES == 24 and WORDS_BYTES == 16
    replica = Replica(rank, layout, RMMC(math.inf), LowRank(), local_step="gradient")
    # Squares of two momenta, summed inside the replica; at first the comparison of the replicas.
    norms, first = (16, 48 + 16 + 16) if layout == "sharded" else (0, 48)
    for step in range(3):
        with WireMeter() as meter:
            replica.step(step)
        wanted = MEETING_BYTES + norms + (0 if step else first)
        assert meter.by_collective["all_reduce"].bytes == wanted


class Remembering(FixedPeriod):
    """A schedule with a memory."""

    def __init__(self, period):
        super().__init__(period)
        self.memory = 0

    def state_dict(self):
        return {"memory": self.memory}

    def load_state_dict(self, state):
        self.memory = state["memory"]


class Reading(Remembering):
    """The same with signals: all ranks meet at every step."""

    def signal(self, before, after):
        return torch.zeros_like(after)


def change(replica, what):
    optimizer = replica.optimizer
    if what == "a setting":
        optimizer.param_groups[0]["lr"] = 0.5
    elif what == "a frozen parameter":
        replica.X[3].requires_grad_(False)
    elif what == "the gate's memory":
        optimizer.gate.memory = 7
    elif what == "the gate's argument":
        optimizer.gate.period = 5
    elif what == "the sync's bits":
        optimizer.sync.bits = Bits(up=2, down=1)
    else:
        more = torch.ones(6, 6)
        if replica.mesh is not None:
            more = distribute_tensor(more, replica.mesh, [Replicate()] * 2, src_data_rank=None)
        replica.X.append(nn.Parameter(more))
        optimizer.add_param_group({"params": replica.X[-1:], "algorithm": "adamw"})


SAID = {
    "a setting": "param_groups[0]['lr'] is 0.02 on rank",
    "a frozen parameter": "parameter 3 is param_groups[1]['params'][1] of shape (12,)",
    "the gate's memory": "the gate's state is {'memory': 0}",
    "the gate's argument": "gate is 'Reading(period=4)' on rank",
    "the sync's bits": "QuantizedAverage(bits=(1, 2), ",
    "a further parameter": "param_groups[2]['algorithm'] is missing on rank",
}


def differ(rank, layout, gate, delay, what, steps):
    """What is raised when the last rank changes something before the step 4, after an opening."""
    sync = QuantizedAverage(bits=(1, 2), delay=delay)
    replica = Replica(rank, layout, gate, sync, lr=0.02)

    def take(step):
        if step == 4 and rank == dist.get_world_size() - 1:
            change(replica, what)
        replica.step(step)

    return told(steps, take)


@pytest.mark.parametrize("what", SAID)
@pytest.mark.parametrize("layout", RANKS)
def test_ranks_that_differ_raise_in_the_same_step(layout, what):
    """A gate with signals meets at every step, before anything has moved."""
    answers = distributed.run(RANKS[layout], differ, layout, Reading(4), 0, what, 6, timeout=30)
    for when, text in answers:
        assert when == 4 and "optimizers differ" in text and SAID[what] in text
        assert f"rank {RANKS[layout] - 1}" in text


@pytest.mark.parametrize("what", [w for w in SAID if w != "the gate's argument"])
def test_replicas_under_a_schedule_that_differ_raise_at_the_opening(what):
    answers = distributed.run(2, differ, "whole", Remembering(4), 0, what, 10, timeout=30)
    for rank, (when, text) in enumerate(answers):
        # Whoever has new parameters wants to meet at once.
        assert when == (4 if rank and what == "a further parameter" else 7)
        assert SAID[what] in text and "rank 1" in text


@pytest.mark.parametrize("what", ["a setting", "a frozen parameter", "the gate's memory"])
def test_ranks_of_one_replica_that_differ_raise_at_a_closed_step(what):
    """Those of the other replica would hear of it at the next opening."""
    answers = distributed.run(4, differ, "sharded", Remembering(4), 0, what, 5, timeout=30)
    assert answers[:2] == [None, None]
    for when, text in answers[2:]:
        assert when == 4 and SAID[what] in text and "rank 3" in text


@pytest.mark.parametrize("what", ["a setting", "the gate's memory"])
def test_with_a_delay_words_are_compared_when_means_are_due(what):
    """The opening at step 7 sends them; its means are added two steps later."""
    for when, text in distributed.run(2, differ, "whole", Remembering(4), 2, what, 12, timeout=30):
        assert when == 9 and SAID[what] in text and "rank 1" in text


@distributed.on_ranks(2)
def test_a_scheduler_of_each_replicas_own_loss_is_an_error(rank):
    replica = Replica(rank, "whole", RMMC(0.3), LowRank())
    scheduler = ReduceLROnPlateau(replica.optimizer, patience=0)

    def take(step):
        replica.step(step)
        scheduler.step(1.0 - 0.1 * step if rank else 1.0)  # each its own loss

    step, text = told(10, take)
    assert step == 2 and "['lr']" in text and "ReduceLROnPlateau" in text


def change_everywhere(rank, layout):
    replica = Replica(rank, layout, FixedPeriod(4), QuantizedAverage(bits=2))

    for step in range(9):
        if step == 4:
            change(replica, "a frozen parameter")
            change(replica, "a further parameter")
        replica.give_gradients(step)
        if step >= 4:  # which is whole on every rank of a replica
            replica.local(replica.X[4].grad).fill_(1.0 + replica.number + step)
        replica.optimizer.step()


@pytest.mark.parametrize("layout", RANKS)
def test_what_all_ranks_change_is_no_error(layout):
    distributed.run(RANKS[layout], change_everywhere, layout)
