"""Gates that decide one step late: what replicas tell each other at a step counts at the next."""

from __future__ import annotations

import copy
import math
import pickle
import re
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor

import distributed
from curvadion import (
    RMMC,
    ByteBudget,
    CurvaDion,
    FixedPeriod,
    LowRank,
    QuantizedAverage,
    WireMeter,
    clip_grad_norm_,
)
from raised import told
from scheduled import Scheduled
from tolerance import Rounding, assert_close
from two_programs import two_programs
from two_replicas import RANKS, SHAPES, Replica, same, same_state

pytestmark = pytest.mark.numeric
SYNCS = {
    "exact": LowRank(),
    "codes": QuantizedAverage(bits=2),
    "delayed": QuantizedAverage(bits=2, delay=1),
    "delayed more": QuantizedAverage(bits=2, delay=3),
}
LAYOUTS_AND_SYNCS = [
    ("whole", "exact"),
    ("sharded", "codes"),
    ("whole", "delayed"),
    ("sharded", "delayed more"),
    ("sharded", "exact"),
    ("whole", "codes"),
]
both = pytest.mark.parametrize(("layout", "sync"), LAYOUTS_AND_SYNCS)


TAU = 0.8
LATE = RMMC(TAU, delay=1)


class Varied(Replica):
    """Its gradients are now and then larger, so that momenta change by more than TAU."""

    def __init__(self, rank, layout, gate, sync, **options):
        super().__init__(rank, layout, gate, sync, **{"mu": 0.3} | options)

    def give_gradients(self, step, **how):
        super().give_gradients(step, **how)
        for x in self.X:
            if x.grad is not None:
                x.grad.mul_(4.0 if step % 4 == 3 else 1.0)


class Planned(Scheduled):
    """Opens at given steps, which replicas know beforehand; counted from 1."""

    follows_schedule = True


# ------------------------------------------------------------------------ trajectories


def change(replica):
    """The largest relative change of a matrix's momentum on any replica, in float64."""
    squares = []
    for x in replica.X[:2]:
        G = replica.local(x.grad).double()
        M = replica.optimizer.state[x].get("momentum") if x in replica.optimizer.state else None
        M = torch.zeros_like(G) if M is None else replica.local(M).double()
        # The momentum of polar directions decays first.
        group = replica.optimizer.param_groups[0]
        decay = group["mu"] if group["direction"] == "polar" else 1.0
        squares += [M.square().sum(), (decay * M + G).square().sum()]
    squares = torch.stack(squares)
    if replica.mesh is not None:
        dist.all_reduce(squares, group=replica.mesh.get_group("shard"))
    before, after = squares.sqrt().view(2, 2).unbind(1)
    changes = ((after - before).abs() / before).max()
    dist.all_reduce(changes, op=dist.ReduceOp.MAX)
    return changes.item()


def follow(rank, layout, sync, steps):
    """Changes by hand, reports and weights of a late run; weights of one with the same openings."""
    replica = Varied(rank, layout, LATE, SYNCS[sync])
    changes, reports, weights = [], [], []
    for step in range(steps):
        replica.give_gradients(step)
        changes.append(change(replica))
        replica.optimizer.step()
        reports.append(replica.optimizer.report)
        weights.append(replica.weights())
    opened = [t + 1 for t in range(1, steps) if changes[t - 1] > TAU]
    ahead = replica.optimizer.defaults["nesterov"]
    twin = Varied(rank, layout, Planned(opened), SYNCS[sync], nesterov=ahead)
    twins = [(twin.step(step), twin.weights())[1] for step in range(steps)]
    return changes, reports, weights, twins


@both
def test_the_change_at_a_step_opens_the_next(layout, sync):
    steps = 14
    for changes, reports, weights, twins in distributed.run(
        RANKS[layout], follow, layout, sync, steps
    ):
        assert changes[0] == math.inf and min(abs(c - TAU) for c in changes[1:]) > 1e-5
        opens = [False, *(c > TAU for c in changes[:-1])]
        assert 3 <= sum(opens) <= steps - 4
        assert [report.gate_open for report in reports] == opens
        assert reports[0].rmmc is reports[0].rmmc_parameter is None
        for report, before in zip(reports[1:], changes, strict=False):
            if before == math.inf:
                assert report.rmmc == math.inf
                continue
            # A difference of norms, relative to one of them.
            assert_close(report.rmmc, before, Rounding(torch.float32, 64, 1 / min(before, 1.0)))
            assert report.rmmc_parameter in {
                "param_groups[0]['params'][0]",
                "param_groups[0]['params'][1]",
            }
            assert report.reason == ("threshold" if report.gate_open else "closed")
        for ours, theirs in zip(weights, twins, strict=True):
            assert same(ours, theirs)


def alone(gate, steps=10):
    generator = torch.Generator().manual_seed(0)
    X = nn.Parameter(torch.eye(6))
    optimizer = CurvaDion([X], gate=gate)
    reports = []
    for _ in range(steps):
        X.grad = torch.randn(6, 6, generator=generator)
        optimizer.step()
        reports.append(optimizer.report)
    return reports


@pytest.mark.chosen_inputs
def test_one_replica_decides_late_too():
    reports = alone(RMMC(0.4, delay=1))
    assert not reports[0].gate_open and reports[0].rmmc is None
    assert reports[1].gate_open and reports[1].rmmc == math.inf
    assert [r.gate_open for r in reports[1:]] == [r.rmmc > 0.4 for r in reports[1:]]
    assert {r.gate_open for r in reports[2:]} == {False, True}


def test_a_warm_up_opens_the_first_steps():
    generator = torch.Generator().manual_seed(0)
    X = nn.Parameter(torch.eye(6))
    optimizer = CurvaDion([X], gate=RMMC(1e9, delay=1), warmup_steps=2, max_local_steps=3)
    reasons = []
    for _ in range(7):
        X.grad = torch.randn(6, 6, generator=generator)
        optimizer.step()
        reasons.append(optimizer.report.reason)
    assert reasons == ["warm-up", "warm-up", *["closed"] * 3, "longest local run", "closed"]


def spend(rank, delay):
    gate = ByteBudget(0.06, "rmmc", delay=1)
    replica = Varied(rank, "whole", gate, QuantizedAverage(bits=2, delay=delay))
    mirror = ByteBudget(0.06, "rmmc")
    opened, expected, local_steps, before, sent = [], [], 0, 0.0, 0.0
    for step in range(60):
        replica.give_gradients(step)
        changes = change(replica)
        with WireMeter() as meter:
            replica.optimizer.step()
            replica.optimizer.sync.settle()
        sent += meter.total_sent if step else 0
        opened.append(replica.optimizer.report.gate_open)
        gate = replica.optimizer.gate
        mirror.open_cost, mirror.closed_cost = gate.open_cost, gate.closed_cost
        mirror.openings_per_agreement = gate.openings_per_agreement
        expected.append(mirror.opens(before, local_steps))
        local_steps += 1
        if expected[-1]:
            mirror.spend(1)
            local_steps = 0
        before = changes
    assert repr(gate) == "ByteBudget(share=0.06, by='rmmc', delay=1)"
    return opened, expected, sent / (60 * 4 * sum(math.prod(s) for s in SHAPES))


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.chosen_inputs
def test_a_budget_by_rmmc_decides_late(delay):
    for opened, expected, share in distributed.run(2, spend, delay):
        # Without a delay looks at the gradients are paid for, too.
        assert (opened == expected or not delay) and 4 < sum(opened) < 40
        assert share <= 0.06


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: RMMC(0.3, delay=2), ValueError, "delay=2"),
        (lambda: RMMC(0.3, delay=-1), ValueError, "delay=-1"),
        (lambda: RMMC(0.3, delay=True), TypeError, "delay=True"),
        (lambda: RMMC(0.3, delay=0.5), TypeError, "delay=0.5"),
        (lambda: ByteBudget(0.1, "rmmc", delay=3), ValueError, "delay=3"),
        (lambda: ByteBudget(0.1, delay=1), ValueError, "delay=1 needs by='rmmc'"),
    ],
)
def test_impossible_delays(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_an_impossible_delay_of_a_gate_of_ones_own():
    gate = RMMC(0.3)
    gate.delay = 2
    with pytest.raises(ValueError, match=r"gate\.delay=2 must be one of \(0, 1\)"):
        CurvaDion([nn.Parameter(torch.eye(4))], gate=gate)


# ------------------------------------------------------------------------ what is sent


def count_bytes(rank, layout, sync):
    replica = Varied(rank, layout, LATE, SYNCS[sync])
    steps = []
    for step in range(9):  # afterwards gradients are looked at
        dist.barrier()
        with WireMeter() as meter:
            report = replica.step(step)
            replica.optimizer.state_dict()  # waits for what is under way
        records = meter.records.items()
        between = sum(count.bytes for (group, _), count in records if group != replica.inside)
        steps.append((report.gate_open, between))
    return steps


@pytest.mark.filterwarnings("ignore:state_dict")
@both
def test_replicas_send_16_bytes_at_closed_steps(layout, sync):
    for steps in distributed.run(RANKS[layout], count_bytes, layout, sync):
        assert all((sent > 16) if opened else (sent == 16) for opened, sent in steps[1:])
        assert {opened for opened, _ in steps[2:]} == {False, True}


def count_open_bytes(rank, gate):
    """Bytes of all steps but the first, and openings."""
    replica = Replica(rank, "whole", gate, QuantizedAverage(bits=2))
    with WireMeter() as meter:
        replica.step(0)
        replica.optimizer.state_dict()
        first, opened = meter.total_bytes, 0
        for step in range(1, 9):
            opened += replica.step(step).gate_open
        replica.optimizer.state_dict()
        return meter.total_bytes - first, opened


@pytest.mark.filterwarnings("ignore:state_dict")
def test_openings_send_no_more_than_without_the_delay():
    for late, at_once in zip(
        distributed.run(2, count_open_bytes, RMMC(0.0, delay=1)),
        distributed.run(2, count_open_bytes, RMMC(0.0)),
        strict=True,
    ):
        assert late == at_once and late[1] == 8


# ------------------------------------------------------------------------ nobody waits


def straggle(rank, folder, sync):
    """Rank 1 takes a closed step only when rank 0 has taken it; then the two swap."""
    replica = Replica(rank, "whole", RMMC(1e9, delay=1), SYNCS[sync])
    replica.step(0)
    replica.step(1)
    replica.optimizer.synchronize()
    for step in range(2, 13):
        done, slow = Path(folder) / str(step), step // 4 % 2
        if rank == slow:
            while not done.exists():
                time.sleep(0.005)
        replica.step(step)
        if rank != slow:
            done.touch()
    return replica.optimizer.progress.steps


@pytest.mark.parametrize("sync", ["exact", "delayed"])
def test_nobody_waits_for_a_replica_that_is_one_step_behind(tmp_path, sync):
    assert distributed.run(2, straggle, str(tmp_path), sync) == [13, 13]


def wait_for(rank):
    replica = Replica(rank, "whole", RMMC(1e9, delay=1), LowRank())
    waited = []
    for step in range(8):
        if rank == 1 and step == 4:
            time.sleep(0.6)
        waited.append(replica.step(step).waited_seconds)
    return waited


def test_what_is_late_is_waited_for_and_told():
    """The fast replica takes step 4 and waits at step 5 for what the other tells at step 4."""
    fast, _ = distributed.run(2, wait_for)
    assert fast[5] > 0.3


def tells_beside_codes(rank, folder):
    """Rank 1 sends codes late: what replicas tell meanwhile must not wait for them."""
    replica = Replica(rank, "whole", RMMC(1e9, delay=1), QuantizedAverage(bits=2, delay=4))
    replica.step(0)
    background, go = replica.optimizer._background, Path(folder) / "go"
    if rank == 1:

        def slow():
            while not go.exists():
                time.sleep(0.005)

        background(torch.device("cpu")).begin("a slow link", slow)
    else:
        background(torch.device("cpu"))
    for step in range(1, 4):  # step 1 opens
        assert replica.step(step).gate_open == (step == 1)
    go.touch()
    for step in range(4, 7):
        replica.step(step)
    replica.optimizer.synchronize()
    return replica.weights()


def test_what_replicas_tell_does_not_wait_for_codes(tmp_path):
    ours, theirs = distributed.run(2, tells_beside_codes, str(tmp_path))
    assert same(ours, theirs)


# ------------------------------------------------------------------------ non-finite gradients


def leave_out(rank, layout, sync, spoilt, tau):
    """Per step: report, steps and local steps, whether weights and state stayed, the weights."""
    replica = Replica(rank, layout, RMMC(tau, delay=1), SYNCS[sync])
    steps = []
    for step in range(12):
        weights, state = replica.weights(), replica.state() if step else None
        report = replica.step(step, spoilt=step in spoilt and rank == dist.get_world_size() - 1)
        untouched = bool(step) and same(weights, replica.weights())
        untouched = untouched and same_state(state, replica.state())
        steps.append((report, replica.progress.local_steps, untouched, replica.weights()))
    return steps


@pytest.mark.parametrize(("layout", "sync"), [("whole", "codes"), ("sharded", "exact")])
def test_a_replica_leaves_out_a_closed_step_of_its_own(layout, sync):
    ranks = distributed.run(RANKS[layout], leave_out, layout, sync, (4, 5, 8), 1e9)
    half = len(ranks) // 2
    for rank, steps in enumerate(ranks):
        for step, (report, local_steps, untouched, _) in enumerate(steps):
            skips = step in (4, 5, 8) and rank >= half
            assert report.skipped == untouched == skips
            assert report.gate_open == (step == 1) and local_steps == max(step - 1, step == 0)
            assert math.isfinite(report.rmmc) if step > 1 and not skips else True


@pytest.mark.parametrize(("layout", "sync"), [("whole", "exact"), ("sharded", "codes")])
def test_an_opening_with_a_nonfinite_gradient_moves_to_the_next_step(layout, sync):
    ranks = distributed.run(RANKS[layout], leave_out, layout, sync, (1, 2, 6), 1e9)
    half = len(ranks) // 2
    for rank, steps in enumerate(ranks):
        for step, (report, _, untouched, _) in enumerate(steps):
            assert report.skipped == (step in (1, 2) or (step == 6 and rank >= half)) == untouched
            assert report.gate_open == (step == 3)
    for ours, theirs in zip(ranks[:half], ranks[half:], strict=True):
        assert same(ours[3][3], theirs[3][3])


@pytest.mark.parametrize("layout", RANKS)
def test_the_first_step_is_skipped_by_all(layout):
    for steps in distributed.run(RANKS[layout], leave_out, layout, "codes", (0,), 1e9):
        assert [report.skipped for report, *_ in steps] == [True] + [False] * 11
        assert [report.gate_open for report, *_ in steps] == [i == 2 for i in range(12)]


def test_a_delayed_opening_waits_for_no_nonfinite_gradient():
    ranks = distributed.run(2, leave_out, "whole", "delayed", (1, 6), 1e9)
    for rank, steps in enumerate(ranks):
        assert [r.skipped for r, *_ in steps] == [rank == 1 and i in (1, 6) for i in range(12)]
        assert all(torch.isfinite(x).all() for *_, weights in steps for x in weights)


def never_finite(rank, layout, scaled):
    replica = Replica(rank, layout, RMMC(1e9, delay=1), SYNCS["codes"])
    if scaled:
        replica.optimizer.grad_scale = torch.tensor(1.0)
        replica.optimizer.found_inf = torch.tensor(0.0)
    last = dist.get_world_size() - 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        raised = told(18, lambda step: replica.step(step, spoilt=rank == last and step > 2))
    return raised, [str(w.message) for w in caught]


@pytest.mark.parametrize("layout", RANKS)
def test_ten_steps_left_out_in_a_row_are_an_error_on_all(layout):
    """Left out at the steps 3 to 12, told at step 13, heard before step 14."""
    answers = distributed.run(RANKS[layout], never_finite, layout, False)
    for rank, ((step, error), texts) in enumerate(answers):
        assert step == 14 and "NaN" in error and "in a row" in error
        assert len(texts) == (rank >= len(answers) // 2)
    assert distributed.run(2, never_finite, "whole", True) == [(None, [])] * 2


def clip(rank):
    replica = Replica(rank, "whole", RMMC(1e9, delay=1), SYNCS["codes"])
    reports = []
    for step in range(6):
        replica.give_gradients(step, spoilt=(rank, step) == (1, 4))
        clip_grad_norm_(replica.optimizer, 1.0)
        replica.optimizer.step()
        reports.append(replica.optimizer.report)
    return reports


def test_a_norm_that_is_not_finite_lets_all_replicas_skip():
    for reports in distributed.run(2, clip):
        assert [report.skipped for report in reports] == [step == 4 for step in range(6)]
        assert [report.gate_open for report in reports] == [step == 1 for step in range(6)]


def miss_gradients(rank, sync):
    replica = Replica(rank, "whole", RMMC(1e9, delay=1), SYNCS[sync], max_local_steps=3)
    for step in range(12):
        missing = {(0, 3): [0], (1, 4): [1, 2], (1, 5): [0]}.get((rank, step), ())
        replica.step(step, missing=missing)
    replica.optimizer.synchronize()
    return replica.weights()


@pytest.mark.parametrize("sync", SYNCS)
def test_replicas_agree_though_gradients_are_missing(sync):
    ours, theirs = distributed.run(2, miss_gradients, sync)
    assert same(ours, theirs)


# ------------------------------------------------------------------------ errors of one rank


def go_another_way(rank, layout, sync, way, where, at):
    """Told: when, and what. Step 1 opens, and the others are closed."""
    replica = Replica(rank, layout, RMMC(1e9, delay=1), SYNCS[sync])
    more = nn.Parameter(torch.ones(6, 6))
    if replica.mesh is not None:
        more = nn.Parameter(distribute_tensor(torch.ones(6, 6), replica.mesh, [Replicate()] * 2))
    optimizer = replica.optimizer

    def take(step):
        if step == (at + 1 if rank == 0 and "later" in way else at) and rank in where:
            if way == "freeze":
                replica.X[1].requires_grad_(False)
            elif way in ("add", "later"):
                optimizer.add_param_group({"params": [more]})
                replica.X.append(more)
            elif way in ("load", "load later"):
                optimizer.load_state_dict(optimizer.state_dict())
            elif way == "rate":
                optimizer.param_groups[0]["lr"] = 0.5
            else:
                optimizer.param_groups[1]["lr"] = -1.0
        replica.step(step)

    return told(12, take)


WAYS = {
    "freeze": ("frozen", "on some ranks only"),
    "add": ("further entries is none", "on some ranks only"),
    "load": ("differ", "on some ranks only"),
    "rate": ("lr",),
    "impossible": ("impossible",),
}


@pytest.mark.filterwarnings("ignore:state_dict")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("layout", "sync", "at"),
    [
        ("whole", "exact", 4),
        ("sharded", "codes", 4),
        ("whole", "codes", 1),
        ("whole", "delayed", 1),
    ],
)
def test_what_one_rank_does_is_an_error_on_all(layout, sync, at, way):
    last = RANKS[layout] - 1
    if (layout, way) == ("sharded", "load"):
        pytest.skip("all shards make the plan together after a state was loaded, or wait for it")
    answers = distributed.run(RANKS[layout], go_another_way, layout, sync, way, (last,), at)
    for rank, (step, text) in enumerate(answers):
        assert at <= step <= at + 2
        expected = WAYS[way] if rank != last or way != "impossible" else ("lr=-1.0",)
        assert any(each in text for each in expected)


@pytest.mark.filterwarnings("ignore:state_dict")
@pytest.mark.parametrize("way", ["later", "load later"])
def test_the_same_change_at_another_step_is_an_error_on_all(way):
    for step, text in distributed.run(2, go_another_way, "whole", "exact", way, (0, 1), 4):
        assert step in (4, 5) and "on some ranks only" in text


@pytest.mark.filterwarnings("ignore:state_dict")
@pytest.mark.parametrize("way", ["add", "load", "rate"])
@pytest.mark.parametrize("layout", RANKS)
@pytest.mark.parametrize("at", [1, 4])
def test_what_all_ranks_do_is_no_error(layout, way, at):
    ranks = tuple(range(RANKS[layout]))
    answers = distributed.run(RANKS[layout], go_another_way, layout, "codes", way, ranks, at)
    assert answers == [None] * RANKS[layout]


def begin_with_another_gate(rank, which):
    gate, sync = [
        (RMMC(0.3, delay=rank), LowRank()),
        (FixedPeriod(4), QuantizedAverage(delay=rank)),
        (FixedPeriod(4) if rank else RMMC(0.3, delay=1), LowRank()),
    ][which]
    return told(3, Replica(rank, "whole", gate, sync).step)


@pytest.mark.parametrize("which", range(3))
def test_delays_of_some_ranks_only_are_an_error_at_the_first_step(which):
    for step, text in distributed.run(2, begin_with_another_gate, which):
        assert step == 0 and "differ" in text and "delay" in text


def follow_a_schedule_in_between(rank):
    """Whether each step opened, and by which signal; steps 4 to 8 follow a schedule."""
    replica, reports = Replica(rank, "whole", RMMC(1e9, delay=1), LowRank()), []
    for step in range(12):
        if step == 4:
            replica.optimizer.gate = FixedPeriod(50)
        elif step == 9:
            assert replica.optimizer.state_dict()["param_groups"][0]
            replica.optimizer.gate = RMMC(0.0, delay=1)
        report = replica.step(step)
        reports.append((report.gate_open, report.rmmc is None))
    return reports


def test_a_signal_of_before_a_schedule_opens_nothing():
    for reports in distributed.run(2, follow_a_schedule_in_between):
        assert reports[9] == (False, True) and reports[10] == (True, False)


def impossible_from_the_start(rank, warmup):
    replica = Replica(rank, "whole", LATE, LowRank(), warmup_steps=warmup)
    if rank == 1:
        replica.optimizer.param_groups[0]["lr"] = -1.0
    return told(3, replica.step)


@pytest.mark.parametrize("warmup", [0, 2])
def test_an_impossible_value_at_the_first_step(warmup):
    (step, text), (own_step, own_text) = distributed.run(2, impossible_from_the_start, warmup)
    assert (step, own_step) == (0, 0) and "impossible" in text and "lr=-1.0" in own_text


def start_apart(rank):
    replica = Replica(rank, "whole", LATE, LowRank())
    with torch.no_grad():
        replica.X[0][0, 0] += rank
    return told(3, replica.step)


def test_other_weights_at_the_start_are_an_error():
    for step, text in distributed.run(2, start_apart):
        assert step == 0 and "different weights" in text


# ------------------------------------------------------------------------ checkpoints


def copied(replica, how, gate, sync):
    """Another replica that goes on where this one is."""
    if how == "state_dict":
        return replica.loaded(gate, sync)
    other = copy.copy(replica)
    make = copy.deepcopy if how == "deepcopy" else lambda x: pickle.loads(pickle.dumps(x))
    other.optimizer = make(replica.optimizer)
    other.X = [x for group in other.optimizer.param_groups for x in group["params"]]
    return other


def resume(rank, how, sync, stop, gate):
    replica = Varied(rank, "whole", gate, SYNCS[sync])
    for step in range(stop):
        replica.step(step)
    other = copied(replica, how, gate, SYNCS[sync])
    assert replica.progress.steps == other.progress.steps == stop
    reports = []
    for step in range(stop, 14):
        reports.append((replica.step(step), other.step(step)))
        assert same(replica.weights(), other.weights())
        assert same_state(replica.state(), other.state())
    for ours, theirs in reports:
        assert (ours.gate_open, ours.rmmc, ours.rmmc_parameter, ours.reason) == (
            (theirs.gate_open, theirs.rmmc, theirs.rmmc_parameter, theirs.reason)
        )
    assert {ours.gate_open for ours, _ in reports} == {False, True}


@pytest.mark.filterwarnings("ignore:state_dict", "ignore:.*apart")
@pytest.mark.parametrize("stop", [1, 2, 5, 6])
@pytest.mark.parametrize(
    ("how", "sync"), [("state_dict", "codes"), ("deepcopy", "delayed"), ("pickle", "exact")]
)
def test_a_run_goes_on_from_what_replicas_have_told(how, sync, stop):
    distributed.run(2, resume, how, sync, stop, LATE)


@pytest.mark.filterwarnings("ignore:state_dict", "ignore:.*apart")
@pytest.mark.parametrize("stop", [5, 9])
@pytest.mark.chosen_inputs
def test_a_late_budget_goes_on_from_a_checkpoint(stop):
    distributed.run(2, resume, "state_dict", "codes", stop, ByteBudget(0.4, "rmmc", delay=1))


def save_alone(rank):
    """One rank saves, and the other does not wait for it."""
    replica = Varied(rank, "whole", LATE, SYNCS["codes"])
    for step in range(6):
        replica.step(step)
        if rank == 0:
            pickle.dumps(replica.optimizer.state_dict())
    replica.optimizer.synchronize()
    return replica.weights()


@pytest.mark.filterwarnings("ignore:state_dict")
def test_one_rank_may_save_alone():
    ours, theirs = distributed.run(2, save_alone)
    assert same(ours, theirs)


def from_another_gate(rank):
    """What was saved without a late gate holds no signal: nothing opens the first step after it."""
    early = Replica(rank, "whole", RMMC(0.0), SYNCS["codes"])
    for step in range(4):
        early.step(step)
    early.optimizer.synchronize(exact=True)
    saved = early.optimizer.state_dict()
    for group in saved["param_groups"]:
        # As an earlier version wrote it.
        for key in ("signal", "signal_parameter"):
            group["progress"] = group["progress"].replace(f', "{key}": null', "")
        assert '"signal' not in group["progress"]
    replica = Replica(rank, "whole", RMMC(0.0, delay=1), SYNCS["codes"])
    replica.optimizer.load_state_dict(saved)
    with torch.no_grad():
        for x, weights in zip(replica.X, early.weights(), strict=True):
            x.copy_(weights)
    first = replica.step(4)
    assert not first.gate_open and first.rmmc is None
    assert replica.step(5).gate_open
    back = replica.loaded(RMMC(0.0), SYNCS["codes"])
    assert back.step(6).gate_open and back.progress.signal is None


@pytest.mark.filterwarnings("ignore:state_dict", "ignore:.*apart")
def test_a_checkpoint_of_another_gate_loads():
    distributed.run(2, from_another_gate)


def come_together(rank, sync, exact):
    replica = Varied(rank, "whole", LATE, SYNCS[sync])
    opened = []
    for step in range(12):
        opened.append(replica.step(step).gate_open)
        if step in (2, 5, 6):
            replica.optimizer.synchronize(exact=exact)
            assert not replica.optimizer.apart
    replica.optimizer.synchronize()
    return opened, replica.weights()


@pytest.mark.parametrize(("sync", "exact"), [("codes", None), ("delayed", True), ("exact", None)])
def test_replicas_agree_whenever_they_are_asked(sync, exact):
    (opened, ours), (also_opened, theirs) = distributed.run(2, come_together, sync, exact)
    assert same(ours, theirs) and opened == also_opened and {True, False} == set(opened)


def change_gates(rank):
    replica = Varied(rank, "whole", LATE, LowRank())
    optimizer = replica.optimizer
    for step in range(12):
        if step % 3 == 0:
            optimizer.gate = [RMMC(0.2, delay=1), FixedPeriod(2), RMMC(0.3)][step // 3 % 3]
        replica.step(step)
    optimizer.synchronize()
    return replica.weights()


def test_gates_may_change():
    ours, theirs = distributed.run(2, change_gates)
    assert same(ours, theirs)


# ------------------------------------------------------------------------ the end of a process

PROGRAM = """
    import datetime, os, sys
    import torch, torch.distributed as dist
    from torch import nn
    from curvadion import RMMC, CurvaDion
    rank = int(sys.argv[1])
    dist.init_process_group(
        "gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=15),
    )
    X = nn.Parameter(torch.eye(30))
    optimizer = CurvaDion([X], replicas=dist.group.WORLD, gate=RMMC(1e9, delay=1))
    for step in range(9):
        X.grad = torch.randn(30, 30, generator=torch.Generator().manual_seed(10 * step + rank))
        if step == {stop} and rank == 1:
            os._exit(3)
        optimizer.step()
    print("took", optimizer.progress.steps)
"""


def test_a_lost_replica_ends_the_others_with_an_error(tmp_path):
    one, other = two_programs(PROGRAM, tmp_path, stop=5)
    ended = one.finish(90)
    assert other.finish(10).returncode == 3
    err = ended.stderr
    assert ended.returncode == 1, err
    # What the other told at its last step may have left it, or not.
    assert re.search(r"RuntimeError: What replicas tell each other at step [56] failed", err), err


def test_a_process_ends_well_with_something_told_and_not_heard(tmp_path):
    for process in two_programs(PROGRAM, tmp_path, stop=99):
        said = process.finish(90)
        assert said.returncode == 0, said.stderr
        assert said.stdout.strip() == "took 9" and "terminate" not in said.stderr
