"""Several replicas: what they compute, what they send, and how they stay together."""

from __future__ import annotations

import math
import zlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distributed
from curvadion import CurvaDion, Dion, FixedPeriod, LowRank, WireMeter
from curvadion.sync.meeting import MEETING_BYTES
from pairwise import all_pairs
from reference import DionReference
from scheduled import Scheduled
from tolerance import Rounding, assert_close, assert_within

pytestmark = pytest.mark.numeric
SHAPES = [(24, 16), (16, 24), (20, 20), (1, 12), (24, 16)]
VECTORS = [(16,), (7, 3), ()]
NUMBERS = sum(torch.Size(shape).numel() for shape in SHAPES + VECTORS)
VECTOR_NUMBERS = sum(torch.Size(shape).numel() for shape in VECTORS)
ROUNDING = Rounding(torch.float32, terms=24)  # of weights after some steps


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES + VECTORS]


def seeded(*key):
    return zlib.crc32(repr(key).encode())


def gradient(seed, step, replica, shape):
    base = torch.Generator().manual_seed(seeded(seed, shape))
    own = torch.Generator().manual_seed(seeded(seed, step, replica, shape))
    return torch.randn(shape, generator=base) + torch.randn(shape, generator=own)


def groups(X, elementwise="adamw"):
    k = len(SHAPES)
    return [
        {"params": X[:k], "rank_fraction": 0.3},
        {"params": X[k:], "algorithm": elementwise, "lr": 0.003, "weight_decay": 0.1},
    ]


def train(rank, make, steps, seed=0, mean_of=None, elementwise="adamw"):
    """Weights, per-step reports, bytes and calls of a run on seeded gradients."""
    X = parameters()
    optimizer = make(groups(X, elementwise))
    reports, sent = [], []
    with WireMeter() as meter:
        for step in range(steps):
            for x in X:
                shape = tuple(x.shape)
                if mean_of is None:
                    x.grad = gradient(seed, step, rank, shape)
                else:
                    each = [gradient(seed, step, replica, shape) for replica in range(mean_of)]
                    x.grad = torch.stack(each).mean(dim=0)
            before = meter.snapshot()
            optimizer.step()
            since = meter.since(before)
            sent.append((since.bytes, since.calls))
            reports.append(optimizer.report)
    return [x.detach() for x in X], reports, sent, optimizer


def dion(param_groups):
    return Dion(param_groups, replicas=dist.group.WORLD if dist.is_initialized() else None)


def run_dion(rank, seed, elementwise):
    return train(rank, dion, 10, seed, elementwise=elementwise)[0]


@pytest.mark.parametrize(("replicas", "seed", "elementwise"), [(4, 0, "adamw"), (2, 1, "lion")])
def test_open_gate_equals_one_process_on_the_mean_gradient(replicas, seed, elementwise):
    alone = train(0, dion, 10, seed, mean_of=replicas, elementwise=elementwise)[0]
    together = distributed.run(replicas, run_dion, seed, elementwise)
    for weights in together:
        assert all(torch.equal(a, b) for a, b in zip(weights, together[0], strict=True))
    for actual, wanted in zip(together[0], alone, strict=True):
        assert_close(actual, wanted, ROUNDING)


OPEN_STEPS = (1, 4, 5, 9)


def scheduled(local_step, average_weights, momentum_rule="error_feedback", look_ahead=0.0):
    def make(param_groups):
        return CurvaDion(
            param_groups, replicas=dist.group.WORLD, gate=Scheduled(OPEN_STEPS),
            local_step=local_step, sync=LowRank(average_weights), momentum_rule=momentum_rule,
            local_lr=0.005, look_ahead=look_ahead,
        )  # fmt: skip

    return make


def run_scheduled(rank, *options):
    weights, reports, _, optimizer = train(rank, scheduled(*options), 11)
    momenta = [optimizer.state[x]["momentum"] for x in optimizer.param_groups[0]["params"]]
    norms = [optimizer.state[x]["momentum_norm"] for x in optimizer.param_groups[0]["params"]]
    return weights, momenta, norms, [report.gate_open for report in reports]


@pytest.mark.parametrize(
    ("local_step", "average_weights", "momentum_rule", "look_ahead"),
    all_pairs(["dion", "gradient"], [True, False], ["error_feedback", "plain"], [0.0, 1.5]),
)
def test_a_gate_on_schedule_equals_a_simulation_of_the_replicas(
    local_step, average_weights, momentum_rule, look_ahead
):
    ranks = distributed.run(
        2, run_scheduled, local_step, average_weights, momentum_rule, look_ahead
    )
    for k, (shape, X0) in enumerate(zip(SHAPES, parameters(), strict=False)):
        rank = -(-round(0.3 * min(shape), 9) // 1)
        reference = DionReference(
            X0.detach(), 2, int(rank), local_lr=0.005, local_step=local_step,
            average_weights=average_weights, momentum_rule=momentum_rule,
            look_ahead=look_ahead,
        )  # fmt: skip
        for step in range(11):
            gradients = [gradient(0, step, replica, shape) for replica in range(2)]
            reference.step(gradients, step + 1 in OPEN_STEPS)
        for replica, (weights, momenta, _, opened) in enumerate(ranks):
            assert [i + 1 for i, is_open in enumerate(opened) if is_open] == list(OPEN_STEPS)
            assert_close(weights[k], reference.X[replica], ROUNDING)
            assert_close(momenta[k], reference.M[replica], ROUNDING)


def run_bytes(rank, average_weights, gate):
    def make(param_groups):
        sync = LowRank(average_weights)
        return CurvaDion(param_groups, replicas=dist.group.WORLD, gate=gate, sync=sync)

    _, reports, sent, _ = train(rank, make, 6)
    return sent, [(report.gate_open, report.wire_bytes) for report in reports]


def low_rank_bytes():
    """4 bytes a number: P (max(m, n) x r) and R (min(m, n) x r) of every matrix."""
    return sum(4 * (m + n) * -(-round(0.3 * min(m, n), 9) // 1) for m, n in SHAPES)


@pytest.mark.parametrize(
    ("replicas", "average_weights", "gate", "closed"),
    [
        (2, True, FixedPeriod(3), 0),
        (2, False, Scheduled((3, 6)), MEETING_BYTES),
        (4, True, Scheduled((3, 6)), MEETING_BYTES),
    ],
)
def test_bytes_of_every_step_equal_the_formula(replicas, average_weights, gate, closed):
    """closed: what a closed step sends. Of a user's own gate nobody knows what it will say."""
    synchronized = MEETING_BYTES + low_rank_bytes() + 4 * VECTOR_NUMBERS
    weights_and_moments = 4 * (NUMBERS + 2 * VECTOR_NUMBERS + len(VECTORS))
    verification = 48
    for sent, reported in distributed.run(replicas, run_bytes, average_weights, gate):
        extra = weights_and_moments if average_weights else 0
        assert [count for count, _ in sent] == [
            MEETING_BYTES + verification,
            closed,
            synchronized + extra,
            closed,
            closed,
            synchronized + extra,
        ]
        calls = [calls for _, calls in sent]
        assert calls[1] == calls[3] == calls[4] == (closed > 0)
        # Gate, P, R, the other parameters' gradients; weights and moments, their counters.
        assert calls[5] == (6 if average_weights else 4)
        assert [count for _, count in reported] == [count for count, _ in sent]


def run_one_replica(rank):
    return train(rank, lambda g: CurvaDion(g, threshold=0.1, replicas="single"), 4)[2]


def test_one_replica_sends_nothing():
    assert distributed.run(2, run_one_replica)[0] == [(0, 0)] * 4


# -------------------------------------------------------------------- non-finite gradients


def state_of(optimizer):
    return {
        (i, key): value.clone()
        for i, x in enumerate(x for g in optimizer.param_groups for x in g["params"])
        for key, value in optimizer.state[x].items()
    }


def run_nonfinite(rank, bad_rank, bad_value, bad_parameter, make):
    X = parameters()
    optimizer = make(groups(X))

    def step(number, poison=False):
        for i, x in enumerate(X):
            x.grad = gradient(0, number, rank, tuple(x.shape))
            if poison and rank == bad_rank and i == bad_parameter:
                x.grad.view(-1)[-1] = bad_value
        optimizer.step()
        return optimizer.report

    step(0)
    step(1)
    weights, state = [x.detach().clone() for x in X], state_of(optimizer)
    skipped = step(2, poison=True)
    kept = all(torch.equal(x, w) for x, w in zip(X, weights, strict=True)) and all(
        torch.equal(value, state[key]) for key, value in state_of(optimizer).items()
    )
    after = step(3)
    moved = not any(torch.equal(x, w) for x, w in zip(X, weights, strict=True))
    finite = all(bool(torch.isfinite(x).all()) for x in X)
    return skipped, kept, after, moved, finite


def rmmc(param_groups):
    return CurvaDion(param_groups, replicas=dist.group.WORLD, threshold=0.1)


def never(param_groups):
    return CurvaDion(
        param_groups, replicas=dist.group.WORLD, threshold=math.inf, max_local_steps=None
    )


@pytest.mark.parametrize(
    ("make", "bad_value", "bad_parameter"),
    all_pairs([dion, rmmc, never], [float("nan"), float("inf"), float("-inf")], [1, len(SHAPES)]),
)
def test_a_nonfinite_gradient_on_one_rank_skips_the_step_on_all(make, bad_value, bad_parameter):
    for skipped, kept, after, moved, finite in distributed.run(
        2, run_nonfinite, 1, bad_value, bad_parameter, make
    ):
        assert skipped.skipped and skipped.reason == "non-finite gradient" and skipped.step == 3
        assert not skipped.gate_open and kept
        assert not after.skipped and after.step == 4 and moved and finite


def run_ten_nonfinite(rank):
    X = parameters()
    optimizer = dion(groups(X))
    for step in range(12):
        for x in X:
            x.grad = gradient(0, step, rank, tuple(x.shape))
        if rank == step % 2:
            X[0].grad[0, 0] = float("nan")
        try:
            optimizer.step()
        except RuntimeError as error:
            return step + 1, str(error)
    return None


def test_ten_nonfinite_steps_in_a_row_are_an_error_on_all_ranks():
    for step, message in distributed.run(2, run_ten_nonfinite):
        assert step == 10
        assert "10 steps in a row" in message and "NaN" in message


# -------------------------------------------------------------------- missing gradients


def run_missing(rank, make):
    """Parameter 0 misses its gradient on rank 1, parameters 2 and 5 on both, at every step."""
    X = parameters()
    optimizer = make(groups(X))
    for step in range(7):
        for i, x in enumerate(X):
            missing = i in (2, 5) or (i == 0 and rank == 1)
            x.grad = None if missing else gradient(0, step, rank, tuple(x.shape))
        optimizer.step()
    keys = [sorted(optimizer.state[x]) for x in X]
    return [x.detach() for x in X], keys, [x.grad is None for x in X]


def every_third(param_groups):
    return CurvaDion(param_groups, replicas=dist.group.WORLD, gate=Scheduled((1, 4, 7)))


def plain(param_groups):
    return Dion(param_groups, replicas=dist.group.WORLD, momentum_rule="plain")


@pytest.mark.parametrize("make", [dion, plain, every_third], ids=["open", "plain", "scheduled"])
def test_a_missing_gradient_is_a_zero_gradient_where_replicas_step_together(make):
    ranks = distributed.run(2, run_missing, make)
    for weights, keys, missing in ranks:
        assert keys == ranks[0][1] and all(keys)
        assert all(torch.equal(x, y) for x, y in zip(weights, ranks[0][0], strict=True))
        assert missing[2] and missing[5]
    if make is every_third:
        return
    rule = "plain" if make is plain else "error_feedback"
    reference = DionReference(parameters()[0].detach(), 2, 5, momentum_rule=rule)
    for step in range(7):
        own = gradient(0, step, 0, SHAPES[0])
        reference.step([own, torch.zeros_like(own)], gate_open=True)
    assert_close(ranks[0][0][0], reference.X[0], ROUNDING)


# -------------------------------------------------------------------- drift, synchronize


def run_drift(rank):
    def make(param_groups):
        return CurvaDion(
            param_groups, replicas=dist.group.WORLD, gate=FixedPeriod(100), max_local_steps=None
        )

    X, _, _, optimizer = train(rank, make, 5)
    stacked = torch.cat([x.flatten().double() for x in X])
    gathered = [torch.empty_like(stacked) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, stacked)
    before = optimizer.drift()
    optimizer.synchronize()
    state = state_of(optimizer)
    norms = [(state[i, "momentum_norm"], state[i, "momentum"].norm()) for i in range(len(SHAPES))]
    return gathered, before, optimizer.drift(), X, state, optimizer.progress.local_steps, norms


@pytest.mark.parametrize("replicas", [4])
def test_drift_is_the_distance_to_the_mean_and_synchronize_removes_it(replicas):
    ranks = distributed.run(replicas, run_drift)
    weights = torch.stack(ranks[0][0])
    mean = weights.mean(dim=0)
    drift = ((weights - mean).norm(dim=1).square().mean().sqrt() / mean.norm()).item()
    assert drift > 1e-3
    for _, before, after, X, state, local_steps, norms in ranks:
        assert_close(before, drift, Rounding(torch.float32, terms=16))
        assert_within(after, Rounding(torch.float32))
        assert local_steps == 0
        assert all(torch.equal(a, b) for a, b in zip(X, ranks[0][3], strict=True))
        assert all(torch.equal(value, ranks[0][4][key]) for key, value in state.items())
        for held, norm in norms:
            assert_close(held, norm, Rounding(torch.float32, terms=16))
