"""Replicas that share coded gradients take one step, along the mean that a float64 reference finds.

The reference starts each step from what the replicas hold, because a number on an edge between two
codes may fall on either side of it.
"""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from curvadion import (
    AlwaysOpen,
    CodedGradients,
    CurvaDion,
    FixedPeriod,
    LowRank,
    Replicated,
    WireMeter,
)
from curvadion.agreement.meeting import MEETING_BYTES
from curvadion.layout.dtensor import local
from curvadion.sync.coded_mean import message_bytes
from support.references.quantized_reference import IN_CODES, blocks_of, mean_in_codes
from support.references.tolerance import Rounding, assert_close, assert_within
from support.runs import distributed, fsdp_training, tensor_parallel_training, transformer
from support.runs.drifts import drift
from support.runs.seeded import half_common, random

pytestmark = pytest.mark.numeric
STEPS = 6
# Tall, wide, square, prime, one row; two that fill several blocks.
SHAPES = {
    **{str(i): s for i, s in enumerate([(24, 10), (9, 30), (16, 16), (13, 7), (1, 12), (37, 23)])},
    "bias": (11,),
    "table": (20, 15),
    "signs": (7,),
}
ALGORITHMS = {"bias": "adamw", "table": "adamw", "signs": "lion"}
MISSING = {(2, 0, "4"), (3, 1, "bias"), (4, 0, "2")}
FULL_RANK = {"gate": AlwaysOpen(), "rank_fraction": 1.0, "right_factor": "qr"}


def gradient(name, step, rank):
    """None where it is missing."""
    missing = (step, rank, name) in MISSING
    return None if missing else half_common(name, SHAPES[name], step, rank)


def start(dtype):
    return {n: nn.Parameter(0.2 * random("X", n, shape=s).to(dtype)) for n, s in SHAPES.items()}


def optimizer_of(X, sync=None, **options):
    groups = [{"params": [(n, x) for n, x in X.items() if n not in ALGORITHMS]}]
    groups += [{"params": [(n, X[n])], "algorithm": a} for n, a in ALGORITHMS.items() if n in X]
    known = {"lr": 0.03, "weight_decay": 0.1, "sync": sync or CodedGradients()}
    replicas = dist.group.WORLD if dist.is_initialized() else "single"
    return CurvaDion(groups, replicas=replicas, **known | options)


def give_gradients(X, step, rank):
    for name, x in X.items():
        G = gradient(name, step, rank)
        x.grad = None if G is None else G.to(x.dtype)


def held(X, optimizer):
    """By name what a replica holds: X, its state, and G, the mean that it stepped with."""
    return {
        name: {
            "X": x.detach().clone(),
            "G": None if x.grad is None else x.grad.clone(),
            **{k: v.clone() for k, v in optimizer.state[x].items() if isinstance(v, torch.Tensor)},
        }
        for name, x in X.items()
    }


def train(rank, dtype, options, bits, steps=STEPS):
    X = start(dtype)
    optimizer = optimizer_of(X, CodedGradients(bits, residual_dtype="float32"), **options)
    found = []
    for step in range(1, steps + 1):
        give_gradients(X, step, rank)
        optimizer.step()
        found.append(held(X, optimizer))
    return found


def sent(step, rank, before):
    """The gradients with what codes have lost, in blocks."""
    blocks = []
    for name in SHAPES:
        G = gradient(name, step, rank)
        G = torch.zeros(SHAPES[name]) if G is None else G
        lost = torch.zeros(G.shape) if before is None else before[rank][name]["residual"]
        blocks.append(blocks_of((G.double() + lost.double()).flatten()))
    return torch.cat(blocks)


def from_blocks(blocks):
    """By name, without the numbers that fill up last blocks."""
    sizes = [math.prod(shape) for shape in SHAPES.values()]
    each = blocks.split([-(-size // 256) for size in sizes])
    return {
        name: rows.flatten()[:size].view(shape)
        for rows, size, (name, shape) in zip(each, sizes, SHAPES.items(), strict=True)
    }


def check_means(step, before, after, bits):
    """The means that replicas stepped with, and what they keep; before, after: held by each."""
    z = [sent(step, rank, before) for rank in range(len(after))]
    received, codes = mean_in_codes(z, bits)
    mean, *lost = map(from_blocks, received)
    flips = sum(code.largest_flip(IN_CODES.allowed) for code in codes)
    for name in SHAPES:
        for rank, (each, loss) in enumerate(zip(after, lost, strict=True)):
            G, what = each[name]["G"], (step, name, rank)
            if G is not None:
                error = float((G - mean[name]).norm()) - flips
                # In this order, max keeps a NaN.
                assert_within(max(error, 0.0) / float(mean[name].norm()), IN_CODES, what=what)
            error = float((each[name]["residual"] - loss[name]).norm()) - (len(z) + 2) * flips
            assert_within(max(error, 0.0) / float(z[rank].norm()), IN_CODES, what=what)


@pytest.mark.parametrize(
    ("ranks", "bits", "dtype", "direction"),
    [
        (4, 2, torch.float32, "polar"),
        (2, (1, 2), torch.float64, "polar"),
        (2, 4, torch.float64, "low_rank"),
    ],
)
@pytest.mark.chosen_inputs
def test_replicas_step_along_the_references_means(ranks, bits, dtype, direction):
    """And as one process steps that is given these means as its gradients."""
    options = {"direction": direction, "look_ahead": 2.0}
    replicas = distributed.run(ranks, train, dtype, options, bits)
    X = start(dtype)
    alone = optimizer_of(X, LowRank(), **FULL_RANK | options)
    for replica in replicas[1:]:
        for step, first in zip(replica, replicas[0], strict=True):
            for name in SHAPES:
                for key in set(first[name]) - {"G", "residual"}:
                    assert step[name][key].equal(first[name][key]), (name, key)
    for step in range(1, STEPS + 1):
        before = None if step == 1 else [replica[step - 2] for replica in replicas]
        after = [replica[step - 1] for replica in replicas]
        check_means(step, before, after, bits)
        for name, x in X.items():
            given = (each[name]["G"] for each in after)
            x.grad = next(G for G in given if G is not None)
        alone.step()
        rounding = Rounding(dtype, terms=max(SHAPES["5"]), condition=10, steps=step)
        for name, state in held(X, alone).items():
            for key in set(state) - {"G"}:
                assert_close(after[0][name][key], state[key], rounding, what=(step, name, key))


@pytest.mark.parametrize(
    ("setup", "layout"),
    [
        (fsdp_training.setup, "hsdp 2x2"),
        (fsdp_training.setup, "FSDP1, replicas outside"),
        (tensor_parallel_training.setup, "dp x tp"),
    ],
    ids=["hsdp", "FSDP1", "dp x tp"],
)
@pytest.mark.chosen_inputs
@distributed.on_ranks(4)
def test_shards_share_means_with_their_like(rank, setup, layout):
    model, replicas, _, reader = setup(layout)
    optimizer = CurvaDion(transformer.groups(model), replicas=replicas, sync=CodedGradients((4, 8)))
    group = replicas.get_group()
    for step in range(2):
        optimizer.zero_grad()
        transformer.loss_of(model, step, reader).backward()
        X = [x for g in optimizer.param_groups for x in g["params"] if x.grad is not None]
        for x in X:
            if isinstance(x.grad, DTensor):
                x.grad = x.grad.redistribute(placements=x.placements)
        exact = [local(x.grad).double().clone() for x in X]
        for mean in exact:
            dist.all_reduce(mean, group=group)
            mean /= group.size()
        with WireMeter() as meter:
            optimizer.step()
        assert drift(optimizer) == 0
        codes = sum(
            n.sent
            for (name, kind), n in meter.records.items()
            if name == group.group_name and "all_to" in kind
        )
        sizes = [local(x).numel() for x in X]
        expected = (message_bytes(sizes, 4) + message_bytes(sizes, 8)) / 2
        assert sum(distributed.gathered(codes)) == sum(distributed.gathered(expected))
        for x, mean in zip(X, exact, strict=True):
            assert (local(x.grad) - mean).norm() <= 0.5 * mean.norm()  # of four bits' errors


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ({}, (3, 3)),
        ({"wire_budget": 0.5}, (8, 8)),
        ({"wire_budget": 0.2}, (3, 3)),
        ({"wire_budget": 0.2, "sync": CodedGradients((2, 4))}, (2, 4)),
    ],
)
@distributed.on_ranks(2)
def test_a_step_sends_the_codes_and_what_replicas_agree_on(rank, options, bits):
    X = start(torch.float32)
    optimizer = optimizer_of(X, **options)
    for step in (1, 5, 6, 1, 5):
        give_gradients(X, step, rank)
        with WireMeter() as meter:
            optimizer.step()
        assert optimizer.report.gate_open
    assert (optimizer.sync.bits, optimizer.param_groups[0]["look_ahead"]) == (bits, 2.0)
    assert "AlwaysOpen" in repr(optimizer.gate) or "wire_budget" in options
    # The first steps also compare the replicas.
    sizes = [math.prod(shape) for shape in SHAPES.values()]
    blocks = sum(-(-size // 256) for size in sizes)
    assert meter.total.sent == blocks * (16 * sum(bits) + 2) + MEETING_BYTES
    assert meter.total.sent <= options.get("wire_budget", 1.0) * 4 * sum(sizes)


@distributed.on_ranks(2)
def test_an_exact_synchronisation_keeps_what_codes_owe(rank):
    X = start(torch.float32)
    optimizer = optimizer_of(X, CodedGradients(2, residual_dtype="float32"))
    for step in (1, 5):
        give_gradients(X, step, rank)
        optimizer.step()
    before = held(X, optimizer)
    with WireMeter() as meter:
        optimizer.synchronize()
    assert meter.total.bytes == 16  # weights agree anyway, and are compared
    optimizer.synchronize(exact=True)
    after, each = held(X, optimizer), distributed.gathered(before)
    for name in SHAPES:
        assert before[name]["X"].equal(after[name]["X"])
        mean = sum(of[name]["residual"] for of in each) / 2
        assert mean.norm() > 0
        assert_close(after[name]["residual"], mean, Rounding(torch.float32))


@pytest.mark.parametrize("call", ["synchronize", "eval"])
@distributed.on_ranks(2)
def test_weights_changed_on_one_rank_are_found_and_averaged(rank, call):
    X = start(torch.float32)
    optimizer = optimizer_of(X)
    for step in range(3):
        for name, x in X.items():
            x.grad = gradient(name, step, rank)
        optimizer.step()
        if step == 1 and rank:
            X["3"].data[0] += 0.5
    compare = getattr(optimizer, call)
    with pytest.warns(UserWarning, match="different weights although they had not drifted"):
        compare()
    assert drift(optimizer) == 0.0
    with warnings.catch_warnings(), WireMeter() as meter:
        warnings.simplefilter("error")
        compare()
    assert meter.total.bytes == 16


def test_a_gate_that_may_close_is_refused():
    for gate in ({"gate": FixedPeriod(2)}, {"threshold": 0.1}):
        with pytest.raises(ValueError, match=r"gate=.* may close.*every step: pass AlwaysOpen"):
            CurvaDion([nn.Parameter(torch.ones(3, 2))], **gate, sync=CodedGradients())


def test_a_budget_below_every_step_is_refused():
    X = nn.Parameter(torch.ones(64, 64))
    CurvaDion([X], wire_budget=0.07, sync=CodedGradients())
    with pytest.raises(ValueError, match=r"wire_budget=0.06 is less than sync=CodedGradients\(bi"):
        CurvaDion([X], wire_budget=0.06, sync=CodedGradients())


def test_one_replica_takes_its_own_gradients():
    X, Y = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(6, 4))
    coded = CurvaDion([X], sync=CodedGradients(1))
    dense = CurvaDion([Y], gate=AlwaysOpen(), direction="polar", rank_fraction=1.0, look_ahead=2.0)
    for step in range(3):
        X.grad, Y.grad = (random("one", step, shape=(6, 4)) for _ in range(2))
        coded.step()
        dense.step()
    assert X.equal(Y)
    assert not coded.state[X]["residual"].any()


def save_what_is_owed(rank):
    """The weights and the state of two replicas with the same residual."""
    x = nn.Parameter(torch.zeros(512))
    x.grad = torch.randn(512, generator=torch.Generator().manual_seed(rank))
    inner = torch.optim.SGD([x], lr=1.0)
    sync = CodedGradients(1, residual_dtype="float32")
    optimizer = Replicated(inner, replicas=dist.group.WORLD, sync=sync)
    for _ in range(3):
        optimizer.step()
    optimizer.synchronize(exact=True)
    return x.detach(), optimizer.state_dict()


def share_of_what_was_owed(rank, weights, state):
    """How much of a loaded residual the next step applies, if gradients are nearly zero."""
    x = nn.Parameter(weights.clone())
    inner = torch.optim.SGD([x], lr=1.0)
    sync = CodedGradients(8, residual_dtype="float32")
    optimizer = Replicated(inner, replicas=dist.group.WORLD, sync=sync)
    optimizer.load_state_dict(state)
    residual = optimizer.state[x]["residual"].clone()
    x.grad = torch.zeros(512)
    x.grad[rank] = 1e-6 * (rank + 1)
    optimizer.step()
    applied = weights - x.detach()
    return float(applied.dot(residual) / residual.dot(residual))


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_mean_residual_is_right_for_any_number_of_replicas(replicas):
    (weights, state), _ = distributed.run(2, save_what_is_owed)
    for share in distributed.run(replicas, share_of_what_was_owed, weights, state):
        assert share == pytest.approx(1.0, abs=0.05)
