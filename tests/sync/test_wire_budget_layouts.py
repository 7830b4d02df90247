"""Replicas in shards synchronise shard by shard: the same bits, and no more bytes than codes."""

import functools

import pytest
import torch

from curvadion import CurvaDion, FixedPeriod, QuantizedAverage, WireMeter
from curvadion.comm.background import background_of
from curvadion.comm.collectives import group_size
from curvadion.layout.dtensor import local
from curvadion.layout.placements import shard_sizes
from curvadion.sync.coded_mean import message_bytes
from curvadion.sync.exact_average import bytes_of_everything, sizes
from support.runs import distributed, fsdp_training, tensor_parallel_training, training, transformer
from support.runs.drifts import drift

pytestmark = pytest.mark.numeric
STEPS = 4


def train(rank, setup, layout, delay, bits):
    """By step whether it is open, the drift, and the bytes that all ranks send and the formula's.

    The drift in the end, too.
    """
    model, replicas, _, reader = setup(layout)
    optimizer = CurvaDion(
        transformer.groups(model),
        replicas=replicas,
        gate=FixedPeriod(2),
        sync=QuantizedAverage(bits=bits, delay=delay),
    )
    between = names_between(replicas, delay)
    steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        transformer.loss_of(model, step, reader).backward()
        with WireMeter() as meter:
            optimizer.step()
            optimizer.sync.settle()
        counts = meter.records.items()
        sent = sum(n.sent for (name, kind), n in counts if name in between and "all_to" in kind)
        steps.append((optimizer.report.gate_open, drift(optimizer), sent, codes(optimizer, bits)))
    optimizer.synchronize()
    return steps, drift(optimizer)


def names_between(replicas, delay):
    """The process groups over which replicas talk."""
    group = replicas.get_group()
    beside = [background_of(group, torch.device("cpu")).group] if delay else []
    return [g.group_name for g in (group, *beside)]


def codes(optimizer, bits):
    """Bytes of a message, on average of those to the owners of blocks and back."""
    sizes = [local(x).numel() for g in optimizer.param_groups for x in g["params"]]
    return sum(message_bytes(sizes, b) for b in bits) / 2


SETUPS = {
    "hsdp 2x2": fsdp_training.setup,
    "FSDP1, replicas outside": fsdp_training.setup,
    "dp x tp": tensor_parallel_training.setup,
}


@functools.cache
def found(layout):
    """What the functions below return: by function a list of its cases, each a list of ranks.

    In one call: what one function learns of DTensor's operators, the next one knows.
    """
    ranks = distributed.run(4, each_case, layout, timeout=200.0)
    return {
        function: list(zip(*(rank[function] for rank in ranks), strict=True))
        for function in ranks[0]
    }


def each_case(rank, layout):
    cases = {
        train: TOGETHER,
        training.train: [(with_it,) for with_it, _ in pairs_of(layout)],
        sent_inside: INSIDE if layout != "FSDP1, replicas outside" else [],
        blocks: [()],
        exactly: [()],
    }
    return {
        function: [function(rank, SETUPS[layout], layout, *case) for case in each]
        for function, each in cases.items()
    }


TOGETHER = [(0, (2, 4)), (1, (1, 2))]


@pytest.mark.parametrize("layout", SETUPS)
def test_shards_of_replicas_come_together(layout):
    for (delay, _), told in zip(TOGETHER, found(layout)[train], strict=True):
        ranks, ends = zip(*told, strict=True)
        assert ends == (0.0,) * 4, delay
        for step, each in enumerate(zip(*ranks, strict=True)):
            opens = step % 2 == 1
            gates, drifts, sent, expected = zip(*each, strict=True)
            assert gates == (opens,) * 4
            assert {apart == 0 for apart in drifts} == {opens and delay == 0}, (delay, step)
            assert sum(sent) == sum(expected) * opens, (delay, step)
            assert sum(expected) > 0


COUNTS = {"hsdp 2x2": (2, 2, 1), "FSDP1, replicas outside": (2, 2, 1), "dp x tp": (2, 1, 2)}
CORRECTIONS = ["align_momentum", "polar_correction"]


@functools.cache
def eight_bits(fragments, delay, *corrections, spectrum_decay=0.0):
    chosen = {name: name in corrections for name in CORRECTIONS}
    how = {"fragments": fragments, "delay": delay, "spectrum_decay": spectrum_decay}
    sync = QuantizedAverage(bits=8, **how, **chosen)
    return training.Setting((2, 4), (("sync", sync), ("rank_fraction", 1.0)), steps=5)


# A correction, and what to train with where it is missing.
ALIGNED = eight_bits(1, 0, "align_momentum"), eight_bits(1, 0)
AVERAGED = (
    eight_bits(1, 0, "align_momentum", spectrum_decay=0.8),
    eight_bits(1, 0, "align_momentum"),
)
CORRECTED = eight_bits(2, 1, "polar_correction"), eight_bits(2, 1)


def pairs_of(layout):
    return (AVERAGED if layout == "dp x tp" else ALIGNED), CORRECTED


@pytest.mark.parametrize("layout", SETUPS)
def test_corrections_of_shards_are_those_of_whole_replicas(layout):
    replicas, shards, copies = COUNTS[layout]
    for pair, ranks in zip(pairs_of(layout), found(layout)[training.train], strict=True):
        whole, other = (training.whole(replicas, shards, how) for how in pair)
        for rank, (weights, _, _) in enumerate(ranks):
            expected, _, _ = whole[rank // (shards * copies)]
            without, _, _ = other[rank // (shards * copies)]
            # Shards have blocks of their own, so that codes differ a little.
            assert distance(weights, expected) < 0.1 * distance(without, expected), pair


def distance(weights, others):
    """Distance of matrices that take Dion, of all together."""
    return sum(
        float((weights[name] - other).square().sum())
        for name, other in others.items()
        if other.ndim > 1 and "embedding" not in name
    )


def sent_inside(rank, setup, layout, direction, delay):
    """Bytes that each correction adds inside a replica where means arrive, and the formula's."""
    sent = {}
    model, replicas, _, reader = setup(layout)
    for without in (None, *CORRECTIONS):
        sync = QuantizedAverage(delay=delay, **({without: False} if without else {}))
        assert all(getattr(sync, name) == (name != without) for name in CORRECTIONS)
        options = dict(gate=FixedPeriod(2), sync=sync, direction=direction)
        optimizer = CurvaDion(transformer.groups(model), replicas=replicas, **options)
        for step in range(2 + delay):
            optimizer.zero_grad()
            transformer.loss_of(model, step, reader).backward()
            with WireMeter() as meter:
                optimizer.step()
        between = names_between(replicas, delay)
        counts = meter.records.items()
        sent[without] = sum(n.bytes for (name, _), n in counts if name not in between)
        optimizer.synchronize(exact=True)  # the next optimizer begins with equal weights
    plan = optimizer._collective_plan()
    return [(sent[None] - sent[name], added_inside(plan, name)) for name in CORRECTIONS]


def added_inside(plan, correction):
    expected = 0
    for m in plan.matrices:
        rows, columns, n = m.layout.rows, m.layout.columns, min(m.layout.shape)
        cut = group_size(columns.group)
        length = 4 * (group_size(m.layout.shards) > 1)  # of what is corrected
        if correction == "align_momentum" and m.parameter.direction == "low_rank":
            # A product with the momentum's Q, and one with its P.
            r = m.Q.shape[1]
            expected += 4 * len(rows) * r * (cut > 1) + length
            expected += 4 * len(columns) * r * (group_size(rows.group) > 1)
            continue
        # An n x n product; where columns are cut, shards go there as rows and what is found back.
        # The polar correction is measured before, too.
        expected += length * (n * n + 1 + (correction == "polar_correction"))
        if cut > 1:
            # Directions of owners, momenta and changes; or D.
            there = 3 if correction == "align_momentum" else 1
            mine = len(rows) // cut + (columns.group.rank() < len(rows) % cut)
            expected += 4 * (there * len(rows) * len(columns) + mine * n)
    return expected


INSIDE = [("low_rank", 0), ("polar", 1)]


@pytest.mark.parametrize("layout", ["hsdp 2x2", "dp x tp"])
def test_what_is_sent_inside_a_replica_is_the_formulas(layout):
    for case, ranks in zip(INSIDE, found(layout)[sent_inside], strict=True):
        for corrections in ranks:
            for added, expected in corrections:
                assert added == expected > 0, case


def blocks(rank, setup, layout):
    """By parameter, how many numbers are here, and what the shards of all are taken to hold."""
    model, replicas, *_ = setup(layout)
    optimizer = CurvaDion(transformer.groups(model), replicas=replicas, threshold=0.3)
    parameters = optimizer._collective_plan().parameters
    return [(p.local.numel(), shard_sizes(p.X)) for p in parameters]


@pytest.mark.parametrize("layout", SETUPS)
def test_a_budget_counts_the_blocks_of_shards(layout):
    [ranks] = found(layout)[blocks]
    for each in zip(*ranks, strict=True):
        here, told = zip(*each, strict=True)
        shards = told[0]
        assert told == (shards,) * 4
        copies = 4 // len(shards)
        if "FSDP1" in layout:  # each rank knows its own range only
            assert sum(shards) * copies == sum(here)
            for block in (1, 7, 256):
                counts = [sum(-(-n // block) for n in numbers) for numbers in (shards, here)]
                assert 0 <= counts[0] - counts[1] / copies <= len(shards) - 1
        else:
            assert sorted([*shards] * copies) == sorted(here)
        assert copies % COUNTS[layout][0] == 0


def exactly(rank, setup, layout):
    """An exact synchronisation's bytes: sent by this rank, by the formula, and of the budget."""
    model, replicas, _, reader = setup(layout)
    optimizer = CurvaDion(transformer.groups(model), replicas=replicas, wire_budget=0.5)
    transformer.loss_of(model, 0, reader).backward()
    optimizer.step()
    balance = optimizer.gate._balance
    with WireMeter() as meter:
        optimizer.synchronize(exact=True)
    plan = optimizer._collective_plan()
    dense = 4 * sum(sizes([p.X for p in plan.parameters]))
    spent = (balance - optimizer.gate._balance) * dense
    own = meter.records[replicas.get_group().group_name, "all_reduce"].bytes
    own -= 16  # for comparing which states there are
    return own, bytes_of_everything(plan, optimizer._state_keys), spent


@pytest.mark.parametrize("layout", SETUPS)
def test_an_exact_synchronisation_costs_a_budget_what_it_sends(layout):
    [ranks] = found(layout)[exactly]
    sent, formulas, spent = zip(*ranks, strict=True)
    for formula, of_budget in zip(formulas, spent, strict=True):
        assert formula == pytest.approx(sum(sent) / COUNTS[layout][0])
        assert of_budget == pytest.approx(formula)
