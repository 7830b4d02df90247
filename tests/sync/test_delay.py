"""Means of pseudo-gradients that arrive some steps after they were sent."""

from __future__ import annotations

import copy
import math
import pickle
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distributed
from curvadion import (
    RMMC,
    AlwaysOpen,
    ByteBudget,
    CurvaDion,
    FixedPeriod,
    QuantizedAverage,
    WireMeter,
)
from curvadion.sync.coded_mean import message_bytes
from curvadion.sync.meeting import WORDS_BYTES
from tolerance import Rounding, assert_close
from two_programs import two_programs

pytestmark = pytest.mark.numeric
SHAPES = [(20, 12), (12, 26), (1, 9), (40,)]
LR, DECAY = 0.05, 0.01
NEVER = FixedPeriod(10**6)


def weights(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(0.3 * torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def build(X, gate, delay, **options):
    groups = [{"params": X[:3]}, {"params": X[3:], "algorithm": "adamw"}]
    keys = {"align_momentum", "polar_correction", "fragments", "bits", "residual_dtype"}
    of_sync = {k: options.pop(k) for k in keys & options.keys()}
    sync = QuantizedAverage(delay=delay, **{"bits": 3} | of_sync)
    fixed = {"lr": LR, "max_local_steps": None, "look_ahead": 1.0}
    options = {"replicas": dist.group.WORLD} | fixed | options
    return CurvaDion(groups, gate=gate, sync=sync, weight_decay=DECAY, **options)


def give_gradients(X, step, rank, missing=()):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    for i, x in enumerate(X):
        G = torch.randn(SHAPES[i], generator=generator).to(x.dtype)
        x.grad = None if i in missing else G


def train(X, optimizer, rank, steps, **more):
    for step in steps:
        give_gradients(X, step, rank, **more)
        optimizer.step()


def gathered(tensors):
    """Those of all ranks, by rank."""
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, [t.detach().clone() for t in tensors])
    return every


def anchors(X, optimizer):
    return [optimizer.state[x]["anchor"] for x in X]


def assert_all_equal(every):
    for other in every[1:]:
        assert all(map(torch.equal, every[0], other))


# -------------------------------------------------------------------- what arrives


def follow_one_mean(rank, delay, dtype):
    """Sent at the fifth step (number 4), added ``delay`` steps later."""
    X, twins = weights(dtype), weights(dtype)
    options = {"align_momentum": False, "polar_correction": False, "residual_dtype": "float32"}
    optimizer = build(X, FixedPeriod(5), delay, **options)
    alone = build(twins, NEVER, 0, **options)
    train(X, optimizer, rank, range(5))
    train(twins, alone, rank, range(5))
    start = [x.detach().double() for x in weights(dtype)]
    D_own = [x.detach().double() - x0 for x, x0 in zip(X, start, strict=True)]
    for step in range(5, 4 + delay):
        train(X, optimizer, rank, [step])
        train(twins, alone, rank, [step])
        assert all(map(torch.equal, X, twins)) and optimizer.report.wire_bytes in (None, 0)
        assert all(map(torch.equal, [a.double() for a in anchors(X, optimizer)], start))
    train(X, optimizer, rank, [4 + delay])
    train(twins, alone, rank, [4 + delay])
    D = [a.double() - x0 for a, x0 in zip(anchors(X, optimizer), start, strict=True)]
    lost = [optimizer.state[x]["residual"].double() for x in X]
    assert_all_equal(gathered(anchors(X, optimizer)))
    for i, x in enumerate(X):
        # Error feedback: what replicas have moved on average is the mean and what codes lost.
        both = torch.stack([D_own[i], lost[i]])
        dist.all_reduce(both)
        moved, losses = both / dist.get_world_size()
        # Anchors, means and losses are held in float32.
        anchor = float(start[i].norm())
        assert_close(D[i] + losses, moved, Rounding(torch.float32), scale=anchor)
        expected = twins[i].double() + D[i] - D_own[i]
        if dtype == torch.bfloat16:  # one rounding of each number, by 2^-9 of it
            assert bool(((x.double() - expected).abs() <= 2.0**-8 * expected.abs() + 1e-6).all())
        else:
            assert_close(x, expected, Rounding(torch.float32))


@pytest.mark.parametrize(
    ("delay", "ranks", "dtype"),
    [(1, 2, torch.float32), (2, 4, torch.bfloat16), (4, 2, torch.float64)],
)
def test_the_mean_is_added_later_and_steps_meanwhile_stay(delay, ranks, dtype):
    distributed.run(ranks, follow_one_mean, delay, dtype)


# -------------------------------------------------------------------- what is sent


def count(rank, fragments):
    X = weights()
    optimizer = build(X, FixedPeriod(3), 2, fragments=fragments)
    with WireMeter() as meter:
        train(X, optimizer, rank, [0])
        opened = 0
        for step in range(1, 13):
            train(X, optimizer, rank, [step])
            opened += optimizer.report.gate_open
            assert_all_equal(gathered(anchors(X, optimizer))) if step % 4 == 0 else None
        optimizer.sync.settle()
        calls = meter.bytes_by_collective
    return calls["all_to_all"] - dist.get_world_size(), opened  # a byte a rank connects them


@pytest.mark.parametrize("fragments", [1, 2])
def test_openings_send_the_codes_alone(fragments):
    told = distributed.run(2, count, fragments)
    assert [opened for _, opened in told] == [4, 4]
    sizes = [math.prod(shape) for shape in SHAPES]
    # Each of the two all-to-alls; with two fragments four openings synchronise all twice.
    sent = sum(codes for codes, _ in told) / 2
    assert sent == 2 * message_bytes(sizes, 3) * 4 / fragments


def count_closed(rank):
    X = weights()
    optimizer = build(X, FixedPeriod(4), 2)
    with WireMeter() as meter:
        train(X, optimizer, rank, [0])
        start = meter.total_bytes
        train(X, optimizer, rank, [1, 2])
        assert meter.total_bytes == start
        train(X, optimizer, rank, [3])
        optimizer.sync.settle()
        after = meter.total_bytes
        train(X, optimizer, rank, [4, 5, 6])
        assert meter.total_bytes == after
        return after - start


def test_closed_steps_send_nothing():
    sizes = [math.prod(shape) for shape in SHAPES]
    told = distributed.run(2, count_closed)
    # Codes there and back, and the words that are compared later.
    assert sum(told) / 2 == 2 * message_bytes(sizes, 3) + WORDS_BYTES


# -------------------------------------------------------------------- every second use


@pytest.mark.parametrize("gate", [FixedPeriod(4), RMMC(0.0), ByteBudget(0.3)], ids=repr)
def test_replicas_agree_whenever_they_are_asked(gate):
    distributed.run(2, agree, gate)


def agree(rank, gate):
    X = weights()
    optimizer = build(X, gate, 3)
    for step in range(12):
        train(X, optimizer, rank, [step], missing=(1,) if (step, rank) == (5, 0) else ())
        if step in (4, 7, 9):
            optimizer.synchronize(exact=step == 7)
            assert not optimizer.drifted
            assert_all_equal(gathered(X))
    optimizer.synchronize()
    assert_all_equal(gathered(X))


def broadcast(rank):
    X = weights()
    optimizer = build(X, FixedPeriod(3), 2)
    train(X, optimizer, rank, range(4))
    before = gathered(X)[1]
    optimizer.broadcast_weights(1)
    assert all(map(torch.equal, X, before))
    train(X, optimizer, rank, range(4, 9))
    optimizer.synchronize()
    assert_all_equal(gathered(X))


def test_a_broadcast_takes_the_place_of_what_is_under_way():
    distributed.run(2, broadcast)


def resume(rank, how, stop):
    X, others = weights(), weights()
    optimizer = build(X, FixedPeriod(3), 2, fragments=2)
    train(X, optimizer, rank, range(stop))
    if how == "deepcopy":
        copied = copy.deepcopy(optimizer)
        others = [x for group in copied.param_groups for x in group["params"]]
    else:
        copied = build(others, FixedPeriod(3), 2, fragments=2)
        saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
        for x, other in zip(X, others, strict=True):
            other.data.copy_(x)
        copied.load_state_dict(saved)
        copied.load_state_dict(copied.state_dict())
    train(X, optimizer, rank, range(stop, 12))
    train(others, copied, rank, range(stop, 12))
    assert all(map(torch.equal, X, others))
    for x, other in zip(X, others, strict=True):
        mine, theirs = optimizer.state[x], copied.state[other]
        assert mine.keys() == theirs.keys()


@pytest.mark.filterwarnings("ignore:state_dict:UserWarning")
@pytest.mark.parametrize(("how", "stop"), [("state_dict", 3), ("state_dict", 4), ("deepcopy", 4)])
def test_a_run_goes_on_from_what_is_under_way(how, stop):
    distributed.run(2, resume, how, stop)


# -------------------------------------------------------------------- when something goes wrong


def leave_steps_out(rank, at):
    X = weights()
    optimizer = build(X, FixedPeriod(4), 2)
    for step in range(13):
        give_gradients(X, step, rank)
        if step in at and rank == 1:
            X[1].grad.fill_(math.nan)
        before = [x.detach().clone() for x in X]
        optimizer.step()
        bad = step in at and rank == 1
        assert optimizer.report.skipped == bad and optimizer.progress.steps == step + 1
        if bad and step not in (5, 9):  # at which a mean arrives
            assert all(map(torch.equal, X, before))
    optimizer.synchronize()
    assert_all_equal(gathered(X))
    assert all(torch.isfinite(x).all() for x in X)


@pytest.mark.parametrize("at", [(2,), (3,), (5,), (6, 7, 8)], ids=str)
def test_a_nonfinite_gradient_concerns_its_replica(at):
    distributed.run(2, leave_steps_out, at)


def wait_for_the_other(rank, folder):
    """Rank 1 takes its opening's step only when rank 0 has taken all steps before the arrival."""
    X, delay = weights(), 4
    optimizer = build(X, FixedPeriod(6), delay)
    train(X, optimizer, rank, range(5))
    done = Path(folder) / "done"
    if rank == 1:
        while not done.exists():
            time.sleep(0.01)
    train(X, optimizer, rank, range(5, 5 + delay))
    done.touch()
    train(X, optimizer, rank, range(5 + delay, 8 + delay))
    optimizer.synchronize()
    assert_all_equal(gathered(X))


def test_nobody_waits_for_a_slow_replica_before_the_delay_is_used_up(tmp_path):
    distributed.run(2, wait_for_the_other, str(tmp_path))


PROGRAM = """
    import datetime, os, sys, time
    import torch, torch.distributed as dist
    from torch import nn
    from curvadion import CurvaDion, FixedPeriod, QuantizedAverage
    rank = int(sys.argv[1])
    dist.init_process_group(
        "gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=15),
    )
    X = nn.Parameter(torch.eye(30))
    sync = QuantizedAverage(delay=2)
    optimizer = CurvaDion([X], replicas=dist.group.WORLD, gate=FixedPeriod(3), sync=sync)
    for step in range(9):
        X.grad = torch.randn(30, 30, generator=torch.Generator().manual_seed(10 * step + rank))
        if step == {stop} and rank == 1:
            {ends}
        optimizer.step()
    print("took", optimizer.progress.steps)
    {last}
"""


def test_a_lost_replica_ends_the_others_with_an_error(tmp_path):
    """It ends at the step of an opening, before it sends."""
    one, other = two_programs(PROGRAM, tmp_path, stop=5, ends="os._exit(3)", last="")
    ended = one.finish(90)
    assert other.finish(10).returncode == 3
    err = ended.stderr
    assert ended.returncode == 1, err
    assert "RuntimeError: The comparison of the replicas' settings failed" in err, err
    assert "A replica may have ended" in err


@pytest.mark.parametrize("last", ["pass", "dist.destroy_process_group()"])
def test_a_process_that_ends_with_something_under_way_ends_well(tmp_path, last):
    """The last opening is at the ninth step, and nothing takes in what it sends.

    One replica takes this step later: the exchange of the other still waits when it ends.
    """
    for process in two_programs(PROGRAM, tmp_path, stop=8, ends="time.sleep(2)", last=last):
        said = process.finish(90)
        assert said.returncode == 0, said.stderr
        assert said.stdout.strip() == "took 9" and "terminate" not in said.stderr


# -------------------------------------------------------------------- beside the training


def roundings(rank):
    """Weights move by what bfloat16 cannot hold; what it rounds away must arrive once."""
    X = weights()
    optimizer = build(X, FixedPeriod(2), 1, bits=8, lr=0.0)
    for step in range(40):
        give_gradients(X, step, rank)
        optimizer.step()
        with torch.no_grad():
            for x in X:
                x.add_(1.001)
    optimizer.synchronize(exact=True)
    for x, x0 in zip(X, weights(), strict=True):
        assert_close(x - x0, torch.full_like(x, 40 * 1.001), Rounding(torch.float32, steps=40))


def test_what_bfloat16_rounds_away_is_sent_once():
    distributed.run(2, roundings)


@pytest.mark.parametrize("gate", [FixedPeriod(2), AlwaysOpen()], ids=repr)
def test_a_delay_must_be_less_than_the_period(gate):
    with pytest.raises(ValueError, match="means would arrive after the next opening"):
        CurvaDion(weights()[:3], gate=gate, sync=QuantizedAverage(delay=2))


def test_a_delay_must_be_an_integer():
    sync = QuantizedAverage()
    sync.delay = "1"
    with pytest.raises(TypeError, match=r"sync\.delay='1' must be an integer"):
        CurvaDion(weights()[:3], gate=FixedPeriod(3), sync=sync)
