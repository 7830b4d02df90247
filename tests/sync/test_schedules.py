"""Gates that follow a schedule: replicas tell each other nothing between the openings."""

import math

import pytest
import torch
import torch.distributed as dist

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
from curvadion.agreement.meeting import MEETING_BYTES
from curvadion.sync.coded_mean import message_bytes
from support.runs import distributed
from support.runs.raised import told
from support.runs.two_replicas import RANKS, SHAPES, Replica, same, same_state

NUMBERS = sum(torch.Size(shape).numel() for shape in SHAPES)
CODES = message_bytes((torch.Size(shape).numel() for shape in SHAPES), 2)
# Of the halves of rows that two ranks hold.
CODES_OF_SHARDS = message_bytes(
    (half.numel() for shape in SHAPES for half in torch.empty(shape).chunk(2)), 2
)
GATES = {"period": FixedPeriod(4), "budget": ByteBudget(0.08)}
SYNCS = {"exact": LowRank(), "codes": QuantizedAverage(bits=2)}


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
    distributed.run(RANKS[layout], count_bytes, layout, gate, sync)


def count_bytes(rank, layout, gate, sync):
    replica, openings = Replica(rank, layout, GATES[gate], sync), 0
    for step in range(9):
        with WireMeter() as meter:
            is_open = replica.step(step).gate_open
        inside = between = 0
        for (group, _), count in meter.records.items():
            if group == replica.inside:
                inside += count.bytes
            else:
                between += count.bytes
        mean = sum(distributed.gathered(meter.total.sent)) / dist.get_world_size()
        if step:  # the first also compares the replicas
            openings += is_open
            assert (between > MEETING_BYTES) if is_open else (between == 0)
            if layout == "sharded":
                assert is_open or inside >= MEETING_BYTES
            else:
                assert inside == 0
                if sync.sends_codes:
                    assert mean == (MEETING_BYTES + CODES if is_open else 0)
    assert openings
    if gate == "budget":
        sharded = layout == "sharded"
        codes = CODES_OF_SHARDS + 2 * MEETING_BYTES if sharded else CODES + MEETING_BYTES
        assert replica.optimizer.gate.open_cost == pytest.approx(codes / (4 * NUMBERS))


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


@distributed.on_ranks(2)
def test_a_budget_is_met_though_openings_are_skipped(rank):
    replica = Replica(rank, "whole", ByteBudget(0.05), SYNCS["codes"])
    sent, opened, skipped = 0.0, 0, 0
    for step in range(60):
        with WireMeter() as meter:
            report = replica.step(step, spoilt=rank == 1 and step % 2 == 1)
        sent += meter.total.sent if step else 0
        opened += report.gate_open
        skipped += report.skipped
    gate, each = replica.optimizer.gate, distributed.gathered((sent, opened, skipped))
    left = gate.state_dict()["balance"] * 4 * NUMBERS
    sent = sum(sent for sent, *_ in each) / 2
    skipped = each[0][2]  # openings that both skip, and whose meeting is not counted
    assert skipped > 2
    allowed = 0.05 * 60 * 4 * NUMBERS
    assert sent <= allowed
    assert opened == each[0][1] > 15
    assert left == pytest.approx(allowed - sent + skipped * MEETING_BYTES)


SCALED = {"grad_scale": torch.tensor(1.0), "found_inf": torch.tensor(0.0)}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("layout", RANKS)
def test_ten_steps_left_out_in_a_row_are_an_error_of_that_replica(layout, scaled):
    """Unless a GradScaler finds them."""
    distributed.run(RANKS[layout], go_wrong, layout, scaled)


def go_wrong(rank, layout, scaled):
    replica = Replica(rank, layout, FixedPeriod(20), SYNCS["codes"])
    for name, value in SCALED.items() if scaled else ():
        setattr(replica.optimizer, name, value)  # as a GradScaler does
    last = dist.get_world_size() - 1
    said = told(16, lambda step: replica.step(step, spoilt=rank == last and 1 <= step < 13))
    if scaled or replica.number == 0:
        assert said is None
    else:
        assert said[0] == 10 and "10 steps in a row" in said[1] and "NaN" in said[1]


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
        ("sharded", FixedPeriod(4), QuantizedAverage((1, 2), fragments=2, delay=2), 4),
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


@pytest.mark.parametrize("difference", [0.0, 1.0])
@distributed.on_ranks(2)
def test_a_nonfinite_gradient_at_the_first_step_hides_no_other_weights(rank, difference):
    """Neither replica moves before all have been compared."""
    replica = Replica(rank, "whole", FixedPeriod(4), LowRank())
    with torch.no_grad():
        replica.X[0][0, 0] += difference * rank
    said = told(9, lambda step: replica.step(step, spoilt=(rank, step) == (1, 0)))
    if difference:
        assert said[0] == 1 and "different weights" in said[1]
    else:
        assert said is None
