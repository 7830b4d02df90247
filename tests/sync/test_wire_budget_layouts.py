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
    """Replicas' drift, and what they send each other against the formula's bytes."""
    model, replicas, _, reader = setup(layout)
    optimizer = CurvaDion(
        transformer.groups(model),
        replicas=replicas,
        gate=FixedPeriod(2),
        sync=QuantizedAverage(bits=bits, delay=delay),
    )
    between = names_between(replicas, delay)
    for step in range(STEPS):
        optimizer.zero_grad()
        transformer.loss_of(model, step, reader).backward()
        with WireMeter() as meter:
            optimizer.step()
            optimizer.sync.settle()
        opened = step % 2 == 1
        assert optimizer.report.gate_open == opened
        assert (drift(optimizer) == 0) == (opened and delay == 0), (delay, step)
        counts = meter.records.items()
        sent = sum(n.sent for (name, kind), n in counts if name in between and "all_to" in kind)
        each = distributed.gathered((sent, codes(optimizer, bits) * opened))
        sent, expected = (sum(of[i] for of in each) for i in (0, 1))
        assert sent == expected and (expected > 0) == opened, (delay, step)
    optimizer.synchronize()
    assert drift(optimizer) == 0, delay


def names_between(replicas, delay):
    """The process groups over which replicas talk."""
    group = replicas.get_group()
    beside = [background_of(group, torch.device("cpu")).group] if delay else []
    return [g.group_name for g in (group, *beside)]


def codes(optimizer, bits):
    """Bytes of a message, on average of those to the owners of blocks and back."""
    sizes = [local(x).numel() for g in optimizer.param_groups for x in g["params"]]
    return sum(message_bytes(sizes, b) for b in bits) / 2


CASES = [
    (fsdp_training.setup, "hsdp 2x2"),
    (fsdp_training.setup, "FSDP1, replicas outside"),
    (tensor_parallel_training.setup, "dp x tp"),
]


@pytest.mark.parametrize(("setup", "layout"), CASES, ids=[layout for _, layout in CASES])
def test_shards_of_replicas_come_together(setup, layout):
    in_one_call(train, setup, layout, [(0, (2, 4)), (1, (1, 2))])


def in_one_call(function, setup, layout, cases):
    """By case, what each rank returns: one call knows DTensor's operators from the case before."""
    ranks = distributed.run(4, each_case, function, setup, layout, cases)
    return [(*case, [rank[i] for rank in ranks]) for i, case in enumerate(cases)]


def each_case(rank, function, setup, layout, cases):
    return [function(rank, setup, layout, *case) for case in cases]


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


@pytest.mark.parametrize(
    ("case", "first"),
    list(zip(CASES, (ALIGNED, ALIGNED, AVERAGED), strict=True)),
    ids=[layout for _, layout in CASES],
)
def test_corrections_of_shards_are_those_of_whole_replicas(case, first):
    setup, layout = case
    replicas, shards, copies = COUNTS[layout]
    pairs = (first, CORRECTED)
    actual = in_one_call(training.train, setup, layout, [(with_it,) for with_it, _ in pairs])
    for pair, (_, ranks) in zip(pairs, actual, strict=True):
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
    for without in (None, *CORRECTIONS):
        model, replicas, _, reader = setup(layout)
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


@pytest.mark.parametrize(
    ("setup", "layout"),
    [(fsdp_training.setup, "hsdp 2x2"), (tensor_parallel_training.setup, "dp x tp")],
    ids=["hsdp 2x2", "dp x tp"],
)
def test_what_is_sent_inside_a_replica_is_the_formulas(setup, layout):
    cases = [("low_rank", 0), ("polar", 1)]
    for direction, delay, ranks in in_one_call(sent_inside, setup, layout, cases):
        for corrections in ranks:
            for added, expected in corrections:
                assert added == expected > 0, (direction, delay)


@pytest.mark.parametrize(("setup", "layout"), CASES, ids=[layout for _, layout in CASES])
@distributed.on_ranks(4)
def test_a_budget_counts_the_blocks_of_shards(rank, setup, layout):
    model, replicas, *_ = setup(layout)
    optimizer = CurvaDion(transformer.groups(model), replicas=replicas, threshold=0.3)
    for p in optimizer._collective_plan().parameters:
        # What the ranks hold, and what this one takes the shards of all to be.
        here, shards = distributed.gathered(p.local.numel()), shard_sizes(p.X)
        assert distributed.gathered(shards) == [shards] * 4
        copies = 4 // len(shards)
        if "FSDP1" in layout:  # each rank knows its own range only
            assert sum(shards) * copies == sum(here)
            for block in (1, 7, 256):
                blocks = [sum(-(-n // block) for n in numbers) for numbers in (shards, here)]
                assert 0 <= blocks[0] - blocks[1] / copies <= len(shards) - 1
        else:
            assert sorted(shards * copies) == sorted(here)
        assert copies % COUNTS[layout][0] == 0


@pytest.mark.parametrize(("setup", "layout"), CASES, ids=[layout for _, layout in CASES])
@distributed.on_ranks(4)
def test_an_exact_synchronisation_costs_a_budget_what_it_sends(rank, setup, layout):
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
    formula = bytes_of_everything(plan, optimizer._state_keys)
    assert formula == pytest.approx(sum(distributed.gathered(own)) / COUNTS[layout][0])
    assert spent == pytest.approx(formula)
