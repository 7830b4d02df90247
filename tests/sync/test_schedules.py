"""Gates that follow a schedule: replicas tell each other nothing between the openings."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

import distributed
from curvadion import (
    RMMC,
    AlwaysOpen,
    ByteBudget,
    CodedGradients,
    FixedPeriod,
    LowRank,
    QuantizedAverage,
    WireMeter,
)
from curvadion.sync.coded_mean import message_bytes
from curvadion.sync.meeting import MEETING_BYTES
from raised import told
from two_replicas import RANKS, SHAPES, Replica, same, same_state

NUMBERS = sum(torch.Size(shape).numel() for shape in SHAPES)
CODES = message_bytes((torch.Size(shape).numel() for shape in SHAPES), 2)
# Of the halves of rows that two ranks hold.
CODES_OF_SHARDS = message_bytes(
    (half.numel() for shape in SHAPES for half in torch.empty(shape).chunk(2)), 2
)
GATES = {"period": FixedPeriod(4), "budget": ByteBudget(0.08)}
SYNCS = {"exact": LowRank(), "codes": QuantizedAverage(bits=2)}


# ------------------------------------------------------------------------ what is sent


def count_bytes(rank, layout, gate, sync):
    """Per step: whether it opened, and the bytes inside the replica and between replicas."""
    replica = Replica(rank, layout, GATES[gate], sync)
    steps = []
    for step in range(9):
        with WireMeter() as meter:
            report = replica.step(step)
        inside = between = 0
        for (group, _), count in meter.records.items():
            if group == replica.inside:
                inside += count.bytes
            else:
                between += count.bytes
        steps.append((report.gate_open, inside, between, meter.total_sent))
    return steps, replica.optimizer.gate.open_cost


@pytest.mark.parametrize(
    ("layout", "gate", "sync"),
    [
        ("whole", "period", LowRank()),
        ("whole", "budget", SYNCS["codes"]),
        ("sharded", "period", SYNCS["codes"]),
        ("sharded", "budget", SYNCS["codes"]),
    ],
)
def test_replicas_send_each_other_nothing_at_closed_steps(layout, gate, sync):
    """The ranks of one replica meet at every step, all ranks at openings."""
    ranks = distributed.run(RANKS[layout], count_bytes, layout, gate, sync)
    openings = 0
    for steps, open_cost in ranks:
        for is_open, inside, between, _ in steps[1:]:  # the first also compares the replicas
            assert (between > MEETING_BYTES) if is_open else (between == 0)
            if layout == "whole":
                assert inside == 0
            else:
                assert is_open or inside >= MEETING_BYTES
            openings += is_open
        if gate == "budget":
            codes = CODES + MEETING_BYTES
            if layout == "sharded":
                codes = CODES_OF_SHARDS + 2 * MEETING_BYTES
            assert open_cost == pytest.approx(codes / (4 * NUMBERS))
    assert openings >= len(ranks)
    if layout == "whole" and sync.sends_codes:
        for step in range(1, 9):
            mean = sum(steps[step][3] for steps, *_ in ranks) / len(ranks)
            assert mean == (MEETING_BYTES + CODES if ranks[0][0][step][0] else 0)


# ------------------------------------------------------------------------ non-finite gradients


def leave_out(rank, layout, sync, spoilt, gate=GATES["period"]):
    """Per step: report, progress, whether weights and state stayed, and the weights."""
    replica = Replica(rank, layout, gate, sync)
    steps = []
    for step in range(12):
        weights = replica.weights()
        state = replica.state() if step else None
        # One rank of the second replica.
        report = replica.step(step, spoilt=step in spoilt and rank == dist.get_world_size() - 1)
        kept = bool(step) and same(weights, replica.weights())
        untouched = kept and same_state(state, replica.state())
        moved = not any(torch.equal(a, b) for a, b in zip(weights, replica.weights(), strict=True))
        counted = replica.progress.steps, replica.progress.local_steps
        steps.append((report, counted, untouched, moved, replica.weights()))
    return steps


@pytest.mark.parametrize(("layout", "sync"), [("whole", "exact"), ("sharded", "codes")])
def test_a_replica_leaves_out_a_closed_step_of_its_own(layout, sync):
    """At the steps 1, 2 and 9 of openings at 3, 7 and 11."""
    ranks = distributed.run(RANKS[layout], leave_out, layout, SYNCS[sync], (1, 2, 9))
    half = len(ranks) // 2
    for rank, steps in enumerate(ranks):
        for step, (report, counted, untouched, moved, _) in enumerate(steps):
            skips = step in (1, 2, 9) and rank >= half
            assert report.skipped == skips
            assert (untouched, moved) == (skips, not skips)
            assert report.gate_open == (step % 4 == 3)
            assert counted == (step + 1, (step + 1) % 4)
            if skips:
                assert report.reason == "non-finite gradient"
    for step in range(12):
        for ours, theirs in zip(ranks[:half], ranks[half:], strict=True):
            assert same(ours[step][4], theirs[step][4]) == (step % 4 == 3)


@pytest.mark.parametrize(("layout", "sync"), [("whole", "codes"), ("sharded", "exact")])
def test_an_opening_with_a_nonfinite_gradient_moves_to_the_next_step(layout, sync):
    ranks = distributed.run(RANKS[layout], leave_out, layout, SYNCS[sync], (3, 4))
    half = len(ranks) // 2
    for steps in ranks:
        assert [report.skipped for report, *_ in steps] == [i in (3, 4) for i in range(12)]
        assert [report.gate_open for report, *_ in steps] == [i in (5, 9) for i in range(12)]
        assert all(steps[i][2] for i in (3, 4))
    for ours, theirs in zip(ranks[:half], ranks[half:], strict=True):
        assert same(ours[5][4], theirs[5][4]) and same(ours[9][4], theirs[9][4])


@pytest.mark.parametrize(
    ("gate", "sync"),
    [
        (AlwaysOpen(), LowRank()),
        (AlwaysOpen(), CodedGradients()),
        (RMMC(0.1), LowRank()),
        (RMMC(math.inf), LowRank()),
    ],
)
def test_where_replicas_meet_at_every_step_all_leave_out_a_nonfinite_gradient(gate, sync):
    for steps in distributed.run(2, leave_out, "whole", sync, (2, 5), gate):
        for step, (report, _, untouched, moved, _) in enumerate(steps):
            skips = step in (2, 5)
            assert (report.skipped, untouched, moved) == (skips, skips, not skips)


def spend(rank, spoilt_every):
    """What was sent after the first step, and what the budget has left at the end."""
    replica = Replica(rank, "whole", ByteBudget(0.05), SYNCS["codes"])
    sent, opened, skipped = 0.0, 0, 0
    for step in range(60):
        with WireMeter() as meter:
            report = replica.step(step, spoilt=rank == 1 and step % spoilt_every == 1)
        sent += meter.total_sent if step else 0
        opened += report.gate_open
        skipped += report.skipped
    gate = replica.optimizer.gate
    left = gate.state_dict()["balance"] * gate.open_cost * 4 * NUMBERS
    return sent, left, opened, skipped


def test_a_budget_is_met_though_openings_are_skipped():
    ranks = distributed.run(2, spend, 2)
    sent = sum(sent for sent, *_ in ranks) / 2
    skipped = ranks[0][3]  # openings that both skip, and whose meeting is not counted
    assert skipped > 2
    allowed = 0.05 * 60 * 4 * NUMBERS
    assert sent <= allowed
    for _, left, opened, _ in ranks:
        assert opened == ranks[0][2] > 15
        assert left == pytest.approx(allowed - sent + skipped * MEETING_BYTES)


SCALED = {"grad_scale": torch.tensor(1.0), "found_inf": torch.tensor(0.0)}


def go_wrong(rank, spoilt, scaled, layout):
    """What is raised, and when, of steps between openings."""
    replica = Replica(rank, layout, FixedPeriod(20), SYNCS["codes"])
    for name, value in SCALED.items() if scaled else ():
        setattr(replica.optimizer, name, value)  # as a GradScaler does
    last = dist.get_world_size() - 1
    return told(16, lambda step: replica.step(step, spoilt=rank == last and step in spoilt))


@pytest.mark.parametrize("layout", RANKS)
def test_ten_steps_left_out_in_a_row_are_an_error_of_that_replica(layout):
    answers = distributed.run(RANKS[layout], go_wrong, range(1, 13), False, layout)
    half = len(answers) // 2
    assert answers[:half] == [None] * half
    for step, error in answers[half:]:
        assert step == 10 and "10 steps in a row" in error and "NaN" in error


def test_ten_that_a_grad_scaler_finds_are_no_error():
    assert distributed.run(2, go_wrong, range(1, 14), True, "whole") == [None] * 2


def go_on(rank, layout, gate, sync, load_before):
    """Per step: whether this replica skipped it, and weights and state."""
    replica = Replica(rank, layout, gate, sync)
    steps = []
    for step in range(8):
        if step == load_before:
            replica = replica.loaded(gate, sync)
        missing = {(0, 4): [0], (1, 6): [0, 3]}.get((replica.number, step), ())
        report = replica.step(step, missing=missing, spoilt=(rank, step) == (0, 5))
        steps.append((report.skipped, replica.weights(), replica.state()))
    return steps


@pytest.mark.filterwarnings("ignore:state_dict")
@pytest.mark.parametrize(
    ("layout", "gate", "sync", "load_before"),
    [
        ("whole", FixedPeriod(4), LowRank(), 6),
        ("whole", FixedPeriod(4), SYNCS["codes"], 4),
        ("sharded", FixedPeriod(4), QuantizedAverage(bits=2, fragments=2, delay=2), 4),
        ("whole", AlwaysOpen(), CodedGradients(), 4),
    ],
    ids=["exact", "codes", "codes under way", "coded gradients"],
)
def test_a_resumed_run_is_the_whole_run_bitwise(layout, gate, sync, load_before):
    """Though gradients are missing or not finite on one replica."""
    whole, resumed = (
        distributed.run(RANKS[layout], go_on, layout, gate, sync, at) for at in (None, load_before)
    )
    for ours, again in zip(whole, resumed, strict=True):
        assert [skipped for skipped, *_ in ours] == [skipped for skipped, *_ in again]
        for (_, weights, state), (_, loaded_weights, loaded_state) in zip(ours, again, strict=True):
            assert same(weights, loaded_weights) and same_state(state, loaded_state)


def start_drifted(rank, difference):
    replica = Replica(rank, "whole", FixedPeriod(4), LowRank())
    with torch.no_grad():
        replica.X[0][0, 0] += difference * rank
    return told(9, lambda step: replica.step(step, spoilt=(rank, step) == (1, 0)))


def test_a_nonfinite_gradient_at_the_first_step_hides_no_other_weights():
    """Neither replica moves before all have been compared."""
    for step, text in distributed.run(2, start_drifted, 1.0):
        assert step == 1 and "different weights" in text
    assert distributed.run(2, start_drifted, 0.0) == [None, None]
