"""A sync that a user writes in one file, this one: no other file has to know of it.

``OuterMomentum`` takes local steps, and when the gate opens an outer step: momentum on the mean of
the replicas' pseudo-gradients. The rest compares it with itself in shards and after checkpoints,
copies and other syncs.
"""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

import curvadion
from curvadion import ByteBudget, CurvaDion, FixedPeriod, LowRank, QuantizedAverage, WireMeter
from curvadion.agreement.meeting import MEETING_BYTES
from curvadion.layout.dtensor import local
from curvadion.plan.state import StateKey, StateOwner, key_of
from curvadion.sync.base import Costs
from support.references.tolerance import Rounding, assert_close
from support.runs import distributed, fsdp_training, toy, training
from support.runs.drifts import drift
from support.runs.seeded import half_common, random

pytestmark = pytest.mark.numeric


class OuterMomentum(curvadion.Sync):
    """Local steps, then a step of heavy-ball momentum along the mean pseudo-gradient.

    outer_momentum <- beta outer_momentum + mean over replicas of (X_i - anchor)
    anchor <- anchor + outer_lr outer_momentum,   X_i <- anchor
    """

    state_keys = (
        StateKey("anchor", StateOwner.SYNC, like_parameter=True),
        StateKey("outer_momentum", StateOwner.SYNC, like_parameter=True),
    )

    def __init__(self, outer_lr=0.7, beta=0.5):
        self.outer_lr, self.beta, self.openings = outer_lr, beta, 0

    def costs(self, shards):
        return Costs(4 * sum(map(sum, shards)))

    def begin(self, parameters):
        for p in parameters:
            if "anchor" not in p.state:
                X = p.X.detach()
                wide = torch.promote_types(X.dtype, torch.float32)
                p.state["anchor"] = X.to(wide, copy=True)
                p.state["outer_momentum"] = torch.zeros_like(X, dtype=wide)

    def open_step(self, step):
        for _ in step.batches():
            pass
        for p in step.plan.parameters:
            X, anchor, momentum = p.local, *self._held(p)
            mean = X - anchor
            if step.replicas is not None:
                dist.all_reduce(mean, group=step.replicas)
                mean /= step.replicas.size()
            momentum.mul_(self.beta).add_(mean)
            X.copy_(anchor.add_(momentum, alpha=self.outer_lr))
        self.openings += 1
        return True

    def after_average(self, parameters):
        for p in parameters:
            if "anchor" in p.state:
                self._held(p)[0].copy_(p.local)

    def _held(self, p):
        return local(p.state["anchor"]), local(p.state["outer_momentum"])

    def state_dict(self):
        return super().state_dict() | {"openings": self.openings}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.openings = state["openings"]

    def __repr__(self):
        return f"OuterMomentum(outer_lr={self.outer_lr}, beta={self.beta})"


SHAPES = {"tall": (12, 8), "wide": (5, 9), "square": (8, 8), "vector": (7,)}
NUMBERS = sum(torch.Size(shape).numel() for shape in SHAPES.values())
PERIOD, STEPS = 3, 11
# On one replica, on the other at an opening, on both.
MISSING = {(0, 1, "tall"), (1, 5, "wide"), (0, 8, "square"), (1, 8, "square"), (1, 7, "vector")}


def gradients(step, rank):
    """None where one is missing; half of the others is common to the replicas."""
    return {
        name: None if (rank, step, name) in MISSING else half_common(name, shape, step, rank)
        for name, shape in SHAPES.items()
    }


def parameters():
    drawn = {name: 0.2 * random("X", name, shape=shape) for name, shape in SHAPES.items()}
    return {name: nn.Parameter(x) for name, x in drawn.items()}


def optimizer_of(X, sync, gate=None, **options):
    matrices = [(name, x) for name, x in X.items() if x.dim() == 2]
    groups = [
        {"params": matrices},
        {"params": [("vector", X["vector"])], "algorithm": "adamw", "lr": 0.003},
    ]
    replicas = dist.group.WORLD if dist.is_initialized() else None
    how = {"gate": FixedPeriod(PERIOD) if gate is None else gate, "sync": sync, **options}
    return CurvaDion(groups, replicas=replicas, **how)


def take(X, optimizer, steps, rank):
    for step in steps:
        for name, G in gradients(step, rank).items():
            X[name].grad = G
        optimizer.step()


def held(X, optimizer):
    tensors = {(name, "X"): x.detach().clone() for name, x in X.items()}
    for name, x in X.items():
        state = optimizer.state.get(x, {}).items()
        tensors |= {(name, key): v.clone() for key, v in state if isinstance(v, torch.Tensor)}
    return tensors


@distributed.on_ranks(2)
def test_replicas_agree_at_openings_and_when_they_are_asked(rank):
    X = parameters()
    optimizer = optimizer_of(X, OuterMomentum())
    for step in range(STEPS):
        take(X, optimizer, [step], rank)
        assert optimizer.report.gate_open == (step % PERIOD == PERIOD - 1)
        assert optimizer.drifted == (drift(optimizer) > 0) == (not optimizer.report.gate_open)
    assert optimizer.sync.openings == STEPS // PERIOD
    optimizer.synchronize()
    assert not optimizer.drifted and drift(optimizer) == 0
    toy.assert_bitwise_equal(*distributed.gathered(held(X, optimizer)))


def test_an_outer_step_as_long_as_the_local_ones_changes_nothing():
    ends = []
    for sync, gate in ((OuterMomentum(1.0, 0.0), FixedPeriod(2)), (LowRank(), FixedPeriod(40))):
        X = parameters()
        take(X, optimizer_of(X, sync, gate), range(6), 0)
        ends.append(X)
    for ours, expected in zip(*(X.values() for X in ends), strict=True):
        assert_close(ours, expected, Rounding(torch.float32, terms=12, condition=8, steps=6))


def test_shards_of_replicas_take_the_trajectory_of_whole_ones():
    training.assert_trains_like_whole_replicas(
        fsdp_training.setup,
        "hsdp 2x2",
        2,
        2,
        schedule=training.OPEN_STEPS,
        options=(("sync", OuterMomentum()),),
    )


@distributed.on_ranks(2)
def test_an_opening_sends_the_pseudo_gradients_and_a_budget_knows_it(rank):
    X = parameters()
    optimizer = optimizer_of(X, OuterMomentum(), ByteBudget(0.45))
    openings = 0
    for step in range(24):
        with WireMeter() as meter:
            take(X, optimizer, [step], rank)
        opened = optimizer.report.gate_open
        openings += opened
        if step:  # the first compares replicas
            assert meter.total.sent == (MEETING_BYTES + 4 * NUMBERS) * opened
    assert optimizer.gate.open_cost == pytest.approx(1.0 + MEETING_BYTES / (4 * NUMBERS))
    assert 4 <= openings <= 0.45 * 24


def disturb(rank, at, resumes):
    X = parameters()
    optimizer = optimizer_of(X, OuterMomentum())
    take(X, optimizer, range(at), rank)
    if resumes:
        file = io.BytesIO()
        torch.save((X, optimizer.state_dict()), file)
        file.seek(0)
        X, state = torch.load(file, weights_only=True)
        optimizer = optimizer_of(X, OuterMomentum())
        optimizer.load_state_dict(state)
    take(X, optimizer, range(at, STEPS), rank)
    return held(X, optimizer), optimizer.sync.openings


@pytest.mark.filterwarnings("ignore:state_dict")
def test_a_run_goes_on_bitwise():
    whole, disturbed = (distributed.run(2, disturb, 7, resumes) for resumes in (False, True))
    for (wanted, openings), (actual, as_many) in zip(whole, disturbed, strict=True):
        toy.assert_bitwise_equal(actual, wanted)
        assert openings == as_many == STEPS // PERIOD


def alone(sync):
    X = parameters()
    keys = {"direction": "low_rank", "rank_fraction": 0.25}  # whatever the sync's defaults are
    optimizer = optimizer_of(X, sync, FixedPeriod(1), **keys)
    take(X, optimizer, range(3), 0)
    return optimizer


@pytest.mark.filterwarnings("ignore:state_dict was saved with another sync")
@pytest.mark.parametrize("other", [LowRank(), QuantizedAverage()])
def test_under_another_kind_it_begins_as_it_was_built(other):
    into = alone(OuterMomentum())
    into.load_state_dict(copy.deepcopy(alone(other).state_dict()))
    assert into.sync.openings == 0
    back = alone(other)
    back.load_state_dict(copy.deepcopy(into.state_dict()))
    assert not any("outer_momentum" in state for state in back.state.values())


def test_a_sync_is_chosen_once():
    with pytest.raises(AttributeError):
        alone(LowRank()).sync = QuantizedAverage()


def test_the_optimizer_takes_a_copy_and_no_table_knows_of_its_state():
    assert key_of("outer_momentum") is None
    assert key_of("outer_momentum", OuterMomentum.state_keys).owner is StateOwner.SYNC
    given = OuterMomentum()
    X = parameters()
    optimizer = optimizer_of(X, given)
    take(X, optimizer, range(4), 0)
    assert optimizer.sync is not given and "OuterMomentum(outer_lr=0.7" in repr(optimizer)
    assert (given.openings, optimizer.sync.openings) == (0, 1)
