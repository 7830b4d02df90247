"""Gates that follow a schedule: replicas tell each other nothing between the openings."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor

import distributed
from curvadion import ByteBudget, FixedPeriod, LowRank, QuantizedAverage, WireMeter
from curvadion.sync.coded_mean import message_bytes
from pairwise import all_pairs
from raised import told
from two_replicas import RANKS, SHAPES, Replica, same, same_state

NUMBERS = sum(torch.Size(shape).numel() for shape in SHAPES)
CODES = message_bytes((torch.Size(shape).numel() for shape in SHAPES), 2)
# Of the halves of rows that two ranks hold.
CODES_OF_SHARDS = message_bytes(
    (half.numel() for shape in SHAPES for half in torch.empty(shape).chunk(2)), 2
)
GATES = {"period": FixedPeriod(4), "budget": ByteBudget(0.05)}
SYNCS = {"exact": LowRank(), "codes": QuantizedAverage(bits=2)}


# ------------------------------------------------------------------------ what is sent


def count_bytes(rank, layout, gate, sync):
    """Per step: whether it opened, and the bytes inside the replica and between replicas."""
    replica = Replica(rank, layout, GATES[gate], sync)
    steps = []
    for step in range(9):  # afterwards gradients are looked at
        with WireMeter() as meter:
            report = replica.step(step)
        inside = between = 0
        for (group, _), count in meter.records.items():
            if group == replica.inside:
                inside += count.bytes
            else:
                between += count.bytes
        steps.append((report.gate_open, inside, between, meter.total_sent))
    return steps, replica.optimizer.gate.closed_cost, replica.optimizer.gate.open_cost


@pytest.mark.parametrize(
    ("layout", "gate", "sync"),
    [
        ("whole", "period", LowRank()),
        ("whole", "period", SYNCS["codes"]),
        ("whole", "budget", SYNCS["codes"]),
        ("sharded", "period", SYNCS["codes"]),
        ("sharded", "budget", SYNCS["codes"]),
    ],
)
def test_replicas_send_each_other_nothing_at_closed_steps(layout, gate, sync):
    ranks = distributed.run(RANKS[layout], count_bytes, layout, gate, sync)
    openings = 0
    for steps, closed_cost, open_cost in ranks:
        for is_open, inside, between, _ in steps[1:]:  # the first also compares the replicas
            assert (between > 16) if is_open else (between == 0)
            assert (inside >= 16 or is_open) if layout == "sharded" else inside == 0
            openings += is_open
        if gate == "budget":
            assert closed_cost == 0
            whole = CODES + 16 if layout == "whole" else CODES_OF_SHARDS + 2 * 16
            assert open_cost == pytest.approx(whole / (4 * NUMBERS))
    assert openings >= len(ranks)
    if layout == "whole" and sync.sends_codes:
        for step in range(1, 9):
            mean = sum(steps[step][3] for steps, *_ in ranks) / len(ranks)
            assert mean == (16 + CODES if ranks[0][0][step][0] else 0)


class Reading(FixedPeriod):
    """Says that it follows a schedule, and reads momenta all the same."""

    reads_momentum = True

    def signal(self, before, after):
        return after

    def opens(self, signal, local_steps):
        return signal > 0 and super().opens(signal, local_steps)


def train_reading(rank):
    replica = Replica(rank, "whole", Reading(3), LowRank())
    sent = []
    for step in range(6):
        with WireMeter() as meter:
            replica.step(step)
        sent.append((replica.optimizer.report.gate_open, meter.total_bytes))
    return sent


def test_a_gate_that_reads_signals_follows_no_schedule():
    for sent in distributed.run(2, train_reading):
        assert [is_open for is_open, _ in sent] == [False, False, True] * 2
        assert [count for is_open, count in sent[1:] if not is_open] == [16] * 3


# ------------------------------------------------------------------------ non-finite gradients


def leave_out(rank, layout, sync, spoilt):
    """Per step: report, progress, whether weights and state stayed, and the weights."""
    replica = Replica(rank, layout, FixedPeriod(4), sync)
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


@pytest.mark.parametrize(
    ("layout", "sync"), all_pairs(["whole", "sharded"], ["exact", "codes"]), ids=str
)
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


@pytest.mark.parametrize(
    ("layout", "sync"), all_pairs(["whole", "sharded"], ["codes", "exact"]), ids=str
)
def test_an_opening_with_a_nonfinite_gradient_moves_to_the_next_step(layout, sync):
    ranks = distributed.run(RANKS[layout], leave_out, layout, SYNCS[sync], (3, 4))
    half = len(ranks) // 2
    for steps in ranks:
        assert [report.skipped for report, *_ in steps] == [i in (3, 4) for i in range(12)]
        assert [report.gate_open for report, *_ in steps] == [i in (5, 9) for i in range(12)]
        assert all(steps[i][2] for i in (3, 4))
    for ours, theirs in zip(ranks[:half], ranks[half:], strict=True):
        assert same(ours[5][4], theirs[5][4]) and same(ours[9][4], theirs[9][4])


def spend(rank, spoilt_every):
    """What was sent after the first step, and what the budget has left at the end."""
    replica = Replica(rank, "whole", ByteBudget(0.05), SYNCS["codes"])
    sent, opened, skipped, uneven = 0.0, 0, 0, 0
    for step in range(60):
        apart = replica.progress.uneven_steps > 0
        with WireMeter() as meter:
            report = replica.step(step, spoilt=rank == 1 and step % spoilt_every == 1)
        sent += meter.total_sent if step else 0
        opened += report.gate_open
        skipped += report.skipped
        uneven += report.gate_open and apart
    gate = replica.optimizer.gate
    left = gate.state_dict()["balance"] * gate.open_cost * 4 * NUMBERS
    return sent, left, opened, skipped, uneven


@pytest.mark.parametrize("spoilt_every", [2, 3])
def test_a_budget_is_met_though_openings_are_skipped(spoilt_every):
    ranks = distributed.run(2, spend, spoilt_every)
    sent = sum(sent for sent, *_ in ranks) / 2
    assert ranks[0][3] > 2  # openings that both skip
    allowed = 0.05 * 60 * 4 * NUMBERS
    assert sent <= allowed
    # What was left out elsewhere costs a byte a parameter and a number a matrix, not counted.
    beside = (len(SHAPES) + 8 * 2) * ranks[1][4]
    for _, left, opened, *_ in ranks:
        assert opened == ranks[0][2] > 15
        assert left == pytest.approx(allowed - sent + beside)


SCALED = {"grad_scale": torch.tensor(1.0), "found_inf": torch.tensor(0.0)}


def go_wrong(rank, period, spoilt, scaled, layout="whole"):
    """What is raised, and when; the warnings."""
    replica = Replica(rank, layout, FixedPeriod(period), SYNCS["codes"])
    for name, value in SCALED.items() if scaled else ():
        setattr(replica.optimizer, name, value)  # as a GradScaler does
    last = dist.get_world_size() - 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        raised = told(16, lambda step: replica.step(step, spoilt=rank == last and step in spoilt))
    return raised, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("layout", RANKS)
def test_ten_steps_left_out_in_a_row_are_a_warning_and_at_the_opening_an_error_on_all(layout):
    answers = distributed.run(RANKS[layout], go_wrong, 14, range(1, 13), False, layout)
    for rank, (raised, texts) in enumerate(answers):
        step, error = raised
        assert step == 13 and "NaN" in error and "in a row" in error
        assert len(texts) == (rank >= len(answers) // 2)
        assert all("10 steps in a row" in text and "last: step 11" in text for text in texts)


def test_ten_steps_in_a_row_that_end_at_an_opening_are_an_error_on_all():
    """Nine of one replica's own, and a skipped opening: the other replica has skipped only that."""
    for raised, texts in distributed.run(2, go_wrong, 11, range(1, 11), False):
        assert raised[0] == 11 and "in a row" in raised[1]
        assert not texts


@pytest.mark.parametrize(
    ("spoilt", "scaled"), [((*range(1, 10), *range(11, 13)), False), (range(1, 14), True)]
)
def test_fewer_in_a_row_and_a_grad_scaler_are_no_error(spoilt, scaled):
    assert distributed.run(2, go_wrong, 14, spoilt, scaled) == [(None, [])] * 2


def go_on(rank, sync, spoilt, load_before):
    """Per step: whether this replica skipped it, and weights and state."""
    replica = Replica(rank, "whole", FixedPeriod(4), sync)
    steps = []
    for step in range(8):
        if step == load_before:
            replica = replica.loaded(FixedPeriod(4), sync)
        missing = {(0, 4): [0], (1, 5): [0]}.get((rank, step), ())
        report = replica.step(step, missing=missing, spoilt=(rank, step) in spoilt)
        steps.append((report.skipped, replica.weights(), replica.state()))
    return steps


@pytest.mark.filterwarnings("ignore:state_dict.*differ", "ignore:.*apart")
@pytest.mark.parametrize("load_before", [4, 5, 6, 7])
@pytest.mark.parametrize("sync", SYNCS)
def test_a_run_that_is_resumed_leaves_out_what_the_whole_run_does(sync, load_before):
    """Though all ranks agree at the step after a checkpoint was loaded."""
    spoilt = [(0, 5), (1, 6)]
    whole, resumed = (
        distributed.run(2, go_on, SYNCS[sync], spoilt, at) for at in (None, load_before)
    )
    for ours, again in zip(whole, resumed, strict=True):
        assert [skipped for skipped, *_ in ours] == [skipped for skipped, *_ in again]
        for (_, weights, state), (_, loaded_weights, loaded_state) in zip(ours, again, strict=True):
            assert same(weights, loaded_weights) and same_state(state, loaded_state)


def start_apart(rank, apart):
    replica = Replica(rank, "whole", FixedPeriod(4), LowRank())
    with torch.no_grad():
        replica.X[0][0, 0] += apart * rank
    return told(9, lambda step: replica.step(step, spoilt=(rank, step) == (1, 0)))


def test_a_nonfinite_gradient_at_the_first_step_hides_no_other_weights():
    """Neither replica moves before all have been compared."""
    for step, text in distributed.run(2, start_apart, 1.0):
        assert step == 1 and "different weights" in text
    assert distributed.run(2, start_apart, 0.0) == [None, None]


# ------------------------------------------------------------------------ missing gradients


def miss_gradients(rank, fragments, missing, load_before=None):
    """Weights after each opening, and at the end; missing: (replica, step, parameter).

    load_before: the step before which each rank saves its own state and loads it.
    """
    sync = QuantizedAverage(bits=4, fragments=fragments)
    replica = Replica(rank, "whole", FixedPeriod(4), sync)
    opened = []
    for step in range(4 * 2 * fragments):
        if step == load_before:
            assert replica.progress.uneven_steps == (1 if rank == 1 else 0)
            replica = replica.loaded(FixedPeriod(4), sync)
            assert replica.progress.uneven_steps == (1 if rank == 1 else 0)
        resting = [i for r, s, i in missing if (r, s) == (rank, step)]
        report = replica.step(step, missing=resting)
        if report.gate_open:
            assert replica.progress.uneven_steps == 0
            opened.append(replica.weights())
    replica.optimizer.synchronize(exact=False)
    return [*opened, replica.weights()]


ONE_AT_A_CLOSED_STEP = [(1, 1, 0)]


@pytest.mark.parametrize(
    ("fragments", "missing"),
    [
        (1, ONE_AT_A_CLOSED_STEP),
        (1, [(1, 0, 0), (0, 2, 1), (1, 5, 1), (1, 5, 2)]),
        (2, [(1, 1, 0), (1, 2, 1), (0, 4, 1)]),
    ],
    ids=["one", "several", "fragments"],
)
def test_replicas_agree_though_one_missed_gradients_at_closed_steps(fragments, missing):
    ours, theirs = distributed.run(2, miss_gradients, fragments, missing)
    together = range(len(ours)) if fragments == 1 else [-1]
    for i in together:
        assert same(ours[i], theirs[i])


@pytest.mark.filterwarnings("ignore:state_dict.*differ", "ignore:.*apart")
@pytest.mark.parametrize("load_before", [2, 3], ids=["closed", "opening"])
def test_a_checkpoint_in_between_knows_that_replicas_have_moved_unevenly(load_before):
    whole = distributed.run(2, miss_gradients, 1, ONE_AT_A_CLOSED_STEP)
    loaded = distributed.run(2, miss_gradients, 1, ONE_AT_A_CLOSED_STEP, load_before)
    for ours, theirs in zip(*loaded, strict=True):
        assert same(ours, theirs)
    for before, after in zip(whole, loaded, strict=True):
        assert all(same(a, b) for a, b in zip(before, after, strict=True))


# ------------------------------------------------------------------------ errors of one rank


def go_another_way(rank, layout, way, where):
    """At the closed step 4, between the openings 3 and 7; told: when, and what."""
    replica = Replica(rank, layout, FixedPeriod(4), SYNCS["codes"])
    more = nn.Parameter(torch.ones(6, 6))
    if replica.mesh is not None:
        more = nn.Parameter(distribute_tensor(torch.ones(6, 6), replica.mesh, [Replicate()] * 2))

    def take(step):
        if step == 4 and rank in where:
            if way == "freeze":
                replica.X[1].requires_grad_(False)
            elif way == "add":
                replica.optimizer.add_param_group({"params": [more]})
                replica.X.append(more)
            else:
                replica.optimizer.param_groups[1]["lr"] = -1.0
        replica.step(step)

    return told(10, take)


WAYS = {"freeze": "frozen", "add": "further entries is none", "impossible": "impossible"}


@pytest.mark.parametrize(("layout", "way"), [(x, y) for x in RANKS for y in WAYS])
def test_what_one_rank_changes_at_a_closed_step_is_an_error_on_all(layout, way):
    last = RANKS[layout] - 1
    answers = distributed.run(RANKS[layout], go_another_way, layout, way, (last,), timeout=60)
    for rank, (step, text) in enumerate(answers):
        # Those of the same replica hear of it at once, the others when they next open the gate.
        assert step == (4 if rank > last // 2 else 7)
        assert (WAYS[way] if rank != last or way != "impossible" else "lr=-1.0") in text


def add_on_all(rank, layout):
    return go_another_way(rank, layout, "add", range(dist.get_world_size()))


@pytest.mark.parametrize("layout", RANKS)
def test_what_all_ranks_add_at_a_closed_step_is_no_error(layout):
    assert distributed.run(RANKS[layout], add_on_all, layout) == [None] * RANKS[layout]
