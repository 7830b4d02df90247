"""Hooks on the update: what they see is what a step applies, and what they change counts."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from curvadion import CurvaDion, Dion, FixedPeriod, LowRank, QuantizedAverage, Replicated
from curvadion.optim import replica_optimizer
from support.references.tolerance import Rounding, assert_close
from support.runs import distributed
from support.runs.seeded import gradient, weights

SHAPES = [(12, 8), (8, 12), (9, 9), (3, 6, 4)]
LR, DECAY, MU = 0.1, 0.2, 0.9
DIRECTIONS = {
    "low_rank": {"direction": "low_rank", "rank_fraction": 0.5, "look_ahead": 0.5},
    "plain low_rank": {"direction": "low_rank", "momentum_rule": "plain"},
    "polar": {"direction": "polar", "look_ahead": 0.5},
    "normuon": {"direction": "normuon"},
    "nordion2": {"direction": "nordion2", "rank_fraction": 0.5},
}
FLOAT64 = Rounding(torch.float64, terms=12)


def parameters(dtype=torch.float64):
    return [nn.Parameter(weights(shape).to(dtype)) for shape in SHAPES]


def groups_of(X):
    """The last parameter is a stack of matrices in blocks of rows, stored with the input first."""
    common = {"lr": LR, "weight_decay": DECAY, "momentum": MU}
    stack = {"stack_dims": 1, "input_first": True, "row_blocks": [1, 3]}
    return [{"params": X[:-1], **common}, {"params": X[-1:], **common, **stack}]


def optimizer_of(X, **options):
    return Dion(groups_of(X), replicas="single", **options)


def step(optimizer, X, number):
    for x, shape in zip(X, SHAPES, strict=True):
        x.grad = gradient(shape, number, 0).to(x.dtype)
    optimizer.step()


def of_update(x, m):
    """The elements of a whole parameter that belong to an update."""
    if x.dim() == 2:
        return x
    stack = m.index // 2  # two blocks each
    return x[stack].mT[m.rows.start : m.rows.stop]


class Seen:
    """Keeps what each update is; capturable: no."""

    def __init__(self):
        self.updates = []

    def __call__(self, batch):
        for m in batch:
            self.updates.append((m, m.X.clone(), m.M.clone(), m.U.clone()))


@pytest.mark.numeric
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_hook_sees_what_is_applied(direction):
    X = parameters()
    optimizer = optimizer_of(X, **DIRECTIONS[direction])
    seen = Seen()
    optimizer.register_update_hook(seen)
    for number in range(2):
        seen.updates.clear()
        step(optimizer, X, number)
    assert len(seen.updates) == 3 + 3 * 2
    by_name = {f"param_groups[0]['params'][{i}]": X[i] for i in range(3)}
    by_name["param_groups[1]['params'][0]"] = X[3]
    for m, before, M, U in seen.updates:
        x = by_name[m.name]
        rows, columns = m.shape
        assert U.shape == before.shape == m.shape and m.group["lr"] == LR
        assert (len(m.rows), m.columns) == (rows, range(columns))
        assert m.row_group is None and m.column_group is None
        assert_close(m.scale, math.sqrt(rows / columns), FLOAT64)
        # X <- (1 - lr wd) X - lr scale U
        wanted = (1 - LR * DECAY) * before - LR * m.scale * U
        assert_close(of_update(x.detach(), m), wanted, FLOAT64, what=m)
        assert torch.equal(of_update(optimizer.state[x]["momentum"], m), M)


@pytest.mark.parametrize(("key", "ranges"), [("row_blocks", "rows"), ("column_blocks", "columns")])
def test_a_hook_knows_the_block_of_a_parameter(key, ranges):
    X = nn.Parameter(weights((6, 6)))
    X.grad = torch.ones_like(X)
    optimizer = Dion([{"params": [X], key: [4, 2]}], direction="polar", replicas="single")
    seen = []
    optimizer.register_update_hook(lambda batch: seen.extend(getattr(m, ranges) for m in batch))
    optimizer.step()
    assert sorted(seen, key=lambda r: r.start) == [range(4), range(4, 6)]


@pytest.mark.parametrize("direction", ["polar", "normuon", "nordion2"])
def test_a_hook_that_only_looks_changes_no_bit(direction):
    X, Y = parameters(torch.float32), parameters(torch.float32)
    optimizer, other = (optimizer_of(P, **DIRECTIONS[direction]) for P in (X, Y))
    optimizer.register_update_hook(lambda batch: None)
    for number in range(3):
        step(optimizer, X, number)
        step(other, Y, number)
    assert all(map(torch.equal, X, Y))


@pytest.mark.numeric
@pytest.mark.parametrize("direction", ["low_rank", "plain low_rank"])
def test_factors_that_are_multiplied_for_a_hook_give_the_same_step(direction):
    X, Y = parameters(), parameters()
    optimizer, other = (optimizer_of(P, **DIRECTIONS[direction]) for P in (X, Y))
    optimizer.register_update_hook(lambda batch: None)
    for number in range(2):
        step(optimizer, X, number)
        step(other, Y, number)
    for x, y in zip(X, Y, strict=True):
        rounding = Rounding(torch.float64, terms=12, condition=1e3, steps=2)
        assert_close(x, y, rounding)
        assert_close(optimizer.state[x]["momentum"], other.state[y]["momentum"], rounding)


@pytest.mark.numeric
def test_hooks_change_directions_rates_and_decays_in_their_order():
    X = parameters()
    optimizer = optimizer_of(X, direction="polar")
    seen = Seen()

    def replace(batch):
        for m in batch:
            m.U = torch.full_like(m.U, 2.0)
            m.lr = 0.5
            m.weight_decay = 0.0

    def halve(batch):
        for m in batch:
            m.U *= 0.5
            batch.write_(m.X, m.X + 1)

    handles = [optimizer.register_update_hook(hook) for hook in (replace, halve, seen)]
    before = [x.detach().clone() for x in X]
    step(optimizer, X, 0)
    for x, earlier in zip(X[:3], before, strict=False):
        scale = math.sqrt(x.shape[0] / x.shape[1])
        assert_close(x, earlier + 1 - 0.5 * scale, FLOAT64)
    for handle in handles:
        handle.remove()
    step(optimizer, X, 1)
    assert len(seen.updates) == 9 and not optimizer.inner.update_hooks


def test_hooks_are_not_saved_or_copied():
    X = parameters()
    optimizer = optimizer_of(X)
    optimizer.register_update_hook(lambda batch: None)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert not twin.inner.update_hooks
        twin.register_update_hook(lambda batch: None)
    optimizer.load_state_dict(optimizer.state_dict())
    assert len(optimizer.inner.update_hooks) == 1


def test_hooks_that_cannot_work_are_errors():
    X = parameters(torch.float32)
    with pytest.raises(TypeError, match="hook=3 must be callable"):
        optimizer_of(X).register_update_hook(3)
    replicated = Replicated(torch.optim.SGD(X, lr=0.1), replicas="single")
    with pytest.raises(TypeError, match="SGD moves weights itself"):
        replicated.register_update_hook(Seen())
    captured = optimizer_of(X, capture=True)
    with pytest.raises(ValueError, match="not capturable, but capture=True"):
        captured.register_update_hook(Seen())


@pytest.mark.parametrize("U", [torch.ones(()), torch.ones(12, 1), torch.ones(12, 8).long(), None])
def test_a_direction_of_another_form_is_an_error_and_nothing_moves(U):
    X = parameters(torch.float32)
    optimizer = optimizer_of(X, direction="polar")

    def replace(batch):
        for m in batch:
            m.U = U

    optimizer.register_update_hook(replace)
    with pytest.raises(ValueError, match=r"replace.* has set U of .*must stay a tensor.*\(12, 8\)"):
        step(optimizer, X, 0)
    assert torch.equal(X[0], parameters(torch.float32)[0])


class Noting:
    """Writes weights and a state of its own at each step."""

    def __init__(self):
        self.total = torch.zeros(())

    def __call__(self, batch):
        for m in batch:
            batch.write_(self.total, self.total + m.U.abs().sum())
            batch.write_(m.X, 1.01 * m.X)
            m.U *= 1.5


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_step_that_the_device_cancels_changes_nothing(direction, monkeypatch):
    results = []
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(replica_optimizer, "RUNS_AHEAD", devices)
        X = parameters(torch.float32)
        optimizer = optimizer_of(X, **DIRECTIONS[direction])
        noting = Noting()
        optimizer.register_update_hook(noting)
        for number in range(4):
            for x, shape in zip(X, SHAPES, strict=True):
                x.grad = gradient(shape, number, 0)
            if number == 2:
                X[0].grad[1, 1] = math.nan
            optimizer.step()
        results.append([*X, noting.total, *(optimizer.state[x]["momentum"] for x in X)])
    assert all(map(torch.equal, *results))
    assert torch.isfinite(results[0][-1]).all() and results[0][len(SHAPES)] > 0


@distributed.on_ranks(2)
def test_every_replica_needs_the_same_hooks(rank):
    import torch.distributed as dist

    x = nn.Parameter(weights((6, 4)))
    optimizer = Dion([x], replicas=dist.group.WORLD)
    if rank:
        optimizer.register_update_hook(Noting())
    x.grad = gradient((6, 4), 0, rank)
    with pytest.raises(RuntimeError, match="update hooks"):
        optimizer.step()


@distributed.on_ranks(2)
def test_openings_call_hooks_and_replicas_agree(rank):
    import torch.distributed as dist

    for sync in (LowRank(), QuantizedAverage()):
        x = nn.Parameter(weights((6, 4)))
        gate = FixedPeriod(2)
        optimizer = CurvaDion([x], replicas=dist.group.WORLD, gate=gate, sync=sync)
        calls = []

        def halve(batch, calls=calls):
            for m in batch:
                calls.append(m.U.norm())
                m.U *= 0.5

        optimizer.register_update_hook(halve)
        for number in range(4):
            x.grad = gradient((6, 4), number, rank)
            optimizer.step()
        assert len(calls) == 4 and optimizer.report.gate_open
        each = distributed.gathered(x.detach())
        assert torch.equal(*each)
