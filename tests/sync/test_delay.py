"""Means of pseudo-gradients that arrive some steps after they were sent."""

import math
import os
import textwrap
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from curvadion import RMMC, ByteBudget, CurvaDion, FixedPeriod, QuantizedAverage
from support.references.tolerance import Rounding, assert_close
from support.runs import distributed, forked, fresh

pytestmark = pytest.mark.numeric
SHAPES = [(20, 12), (12, 26), (1, 9), (40,)]


def weights():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(0.3 * torch.randn(s, generator=generator)) for s in SHAPES]


def build(X, gate, delay, bits=3, **options):
    groups = [{"params": X[:3]}, {"params": X[3:], "algorithm": "adamw"}]
    how = {"gate": gate, "sync": QuantizedAverage(bits, delay=delay), "max_local_steps": None}
    return CurvaDion(groups, replicas=dist.group.WORLD, **how, **options)


def give_gradients(X, step, rank, missing=()):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    for i, x in enumerate(X):
        G = torch.randn(SHAPES[i], generator=generator)
        x.grad = None if i in missing else G


def train(X, optimizer, rank, steps, **more):
    for step in steps:
        give_gradients(X, step, rank, **more)
        optimizer.step()


def assert_agree(X):
    first, *others = distributed.gathered(X)
    assert all(all(map(torch.equal, first, other)) for other in others)


@pytest.mark.parametrize("gate", [RMMC(0.0), ByteBudget(0.3)], ids=repr)
@distributed.on_ranks(2)
def test_replicas_agree_whenever_they_are_asked(rank, gate):
    X = weights()
    optimizer = build(X, gate, 3)
    for step in range(12):
        train(X, optimizer, rank, [step], missing=(1,) if (step, rank) == (5, 0) else ())
        if step in (4, 7, 9):
            optimizer.synchronize(exact=step == 7)
            assert not optimizer.drifted
            assert_agree(X)
    optimizer.synchronize()
    assert_agree(X)


@pytest.mark.parametrize("at", [(3,), (5,), (6, 7, 8)], ids=str)
@distributed.on_ranks(2)
def test_a_nonfinite_gradient_concerns_its_replica(rank, at):
    X = weights()
    optimizer = build(X, FixedPeriod(4), 2)
    for step in range(13):
        give_gradients(X, step, rank)
        bad = step in at and rank == 1
        if bad:
            X[1].grad.fill_(math.nan)
        before = [x.detach().clone() for x in X]
        optimizer.step()
        assert optimizer.report.skipped == bad and optimizer.progress.steps == step + 1
        if bad and step not in (5, 9):  # at which a mean arrives
            assert all(map(torch.equal, X, before))
    optimizer.synchronize()
    assert_agree(X)
    assert all(torch.isfinite(x).all() for x in X)


@distributed.on_ranks(2)
def test_nobody_waits_for_a_slow_replica_before_the_delay_is_used_up(rank, tmp_path):
    """Rank 1 takes its opening's step only when rank 0 has taken all steps before the arrival."""
    X, delay, done = weights(), 4, tmp_path / "done"
    optimizer = build(X, FixedPeriod(6), delay)
    train(X, optimizer, rank, range(5))
    while rank == 1 and not done.exists():
        time.sleep(0.01)
    train(X, optimizer, rank, range(5, 5 + delay))
    done.touch()
    train(X, optimizer, rank, range(5 + delay, 8 + delay))
    optimizer.synchronize()
    assert_agree(X)


PROGRAM = """
    import sys, time
    import torch, torch.distributed as dist
    from torch import nn
    from curvadion import CurvaDion, FixedPeriod, QuantizedAverage
    rank = int(sys.argv[1])
    dist.init_process_group(
        "gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2
    )
    X = nn.Parameter(torch.eye(30))
    sync = QuantizedAverage(delay=2)
    optimizer = CurvaDion([X], replicas=dist.group.WORLD, gate=FixedPeriod(3), sync=sync)
    for step in range(9):
        X.grad = torch.randn(30, 30, generator=torch.Generator().manual_seed(10 * step + rank))
        if step == 8 and rank == 1:
            time.sleep(2)
        optimizer.step()
    print("took", optimizer.progress.steps)
"""


def end_at_an_opening(rank):
    """The second replica ends before it sends; the first has sent, and waits for an answer."""
    X = weights()
    optimizer = build(X, FixedPeriod(3), 2)
    train(X, optimizer, rank, range(5))
    if rank == 1:
        os._exit(3)
    train(X, optimizer, rank, range(5, 6))
    with pytest.raises(RuntimeError, match="another rank has exited or is late: find the first"):
        optimizer.state_dict()
    train(X, optimizer, rank, range(6, 9))


def test_a_lost_replica_ends_the_others_with_an_error():
    with pytest.raises(distributed.RankFailure) as failed:
        distributed.run(2, end_at_an_opening)
    said = str(failed.value)
    assert "rank 1 died with exit code 3" in said
    assert "RuntimeError: The comparison of the replicas' settings failed" in said
    assert "A replica may have ended" in said


def test_a_process_that_ends_with_something_under_way_ends_well(tmp_path):
    """The last opening is at the ninth step, and nothing takes in what it sends.

    One replica takes this step later: the exchange of the other still waits when it ends.
    """
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    with forked.script(program, 1, tmp_path / "store") as late:
        first = fresh.python(program, 0, tmp_path / "store")
        assert first.returncode == 0, first.stderr
        assert first.stdout.strip() == "took 9" and "terminate" not in first.stderr
        other = late.finish(90)
        assert other.returncode == 0 and "took 9" in other.stdout, other.stdout


@distributed.on_ranks(2)
def test_what_bfloat16_rounds_away_is_sent_once(rank):
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


def test_a_delay_must_be_less_than_the_period():
    with pytest.raises(ValueError, match="means would arrive after the next opening"):
        CurvaDion(weights()[:3], gate=FixedPeriod(2), sync=QuantizedAverage(delay=2))
