"""What replicas compare: their settings, their weights, and whether gradients are their own."""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

import curvadion
import distributed
from curvadion import AlwaysOpen, CurvaDion, Dion, FixedPeriod, WireMeter
from curvadion.sync.verify import GradientWatch
from raised import told
from scheduled import Scheduled

SHAPES = [(12, 8), (8, 12), (9, 7), (40,), (33,)]
KINDS = {
    "dion": {"gate": AlwaysOpen()},
    "threshold": {"threshold": 0.3},
    "period": {"gate": FixedPeriod(3)},
    "budget": {"wire_budget": 0.5},
}


def parameters(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def groups(X):
    matrices = [(f"matrix{i}", x) for i, x in enumerate(X) if x.dim() == 2]
    vectors = [(f"vector{i}", x) for i, x in enumerate(X) if x.dim() < 2]
    return [{"params": matrices}, {"params": vectors, "algorithm": "adamw", "lr": 0.003}]


def optimizer_of(X, kind="threshold", **arguments):
    how = copy.deepcopy(KINDS[kind]) | {"replicas": dist.group.WORLD, "max_local_steps": None}
    return CurvaDion(groups(X), **how | arguments)


def give_gradients(X, step, replica):
    for i, x in enumerate(X):
        generator = torch.Generator().manual_seed(1000 * step + 10 * replica + i)
        x.grad = torch.randn(x.shape, generator=generator).to(x.dtype)


def train(X, optimizer, rank, steps, before=lambda step: None):
    """What is told of steps on the rank's own gradients, each after ``before(step)``."""

    def take(step):
        before(step)
        give_gradients(X, step, rank)
        optimizer.step()

    return told(steps, take)


def warned(function, *arguments):
    """The warnings of a call in which nothing is raised and told."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert function(*arguments) is None
    return [str(warning.message) for warning in caught]


# ---------------------------------------------------------------- settings


def change_one_setting(rank, kind, key, values):
    X = parameters()
    optimizer = optimizer_of(X, kind)

    def change(step):
        if step == 3:
            optimizer.param_groups[0][key] = values[rank]

    return train(X, optimizer, rank, 9, change)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("lr", (0.02, 0.03)),
        ("mu", (0.95, 0.9)),
        ("weight_decay", (0.01, 0.1)),
        ("betas", ((0.9, 0.95), (0.9, 0.99))),
        ("eps", (1e-8, 1e-6)),
        ("local_lr", (0.02, 0.01)),
        ("nesterov", (0.0, 1.0)),
    ],
)
def test_a_setting_that_one_replica_changes_is_an_error_on_all(key, values):
    for step, text in distributed.run(2, change_one_setting, "threshold", key, values):
        assert step == 4  # seen at the step of the change, told at the next
        assert f"param_groups[0]['{key}'] is" in text
        assert f"{values[0]!r} on rank 0" in text and f"{values[1]!r} on rank 1" in text


# Seen at the first time that replicas agree, told at the second. Those of a schedule agree at
# openings: after the change at the steps 5 and 8, and with the budget, which first opens at the
# fourth step, at the steps 3 and 5.
@pytest.mark.parametrize(
    ("kind", "told_at"), [("dion", 4), ("threshold", 4), ("period", 8), ("budget", 5)]
)
def test_learning_rates_are_compared_under_every_gate(kind, told_at):
    told_by_rank = distributed.run(4, change_one_setting, kind, "lr", (0.02, 0.02, 0.03, 0.02))
    for step, text in told_by_rank:
        assert step == told_at
        assert "0.02 on ranks 0, 1, 3 and 0.03 on rank 2" in text


def test_a_setting_that_all_replicas_change_is_none():
    assert distributed.run(2, change_one_setting, "budget", "lr", (0.05, 0.05)) == [None] * 2


def plateau(rank):
    X = parameters()
    optimizer = optimizer_of(X)
    scheduler = ReduceLROnPlateau(optimizer, patience=0)

    def take(step):
        give_gradients(X, step, rank)
        optimizer.step()
        scheduler.step(1.0 - 0.1 * step if rank else 1.0)  # each its own loss

    return told(10, take)


def test_a_scheduler_of_each_replicas_own_loss_is_an_error():
    for step, text in distributed.run(2, plateau):
        assert step <= 4 and "['lr']" in text and "ReduceLROnPlateau" in text


def spoil(rank, key, value, bad_rank):
    X = parameters()
    optimizer = optimizer_of(X, "period")
    weights = []

    def change(step):
        weights[:] = [x.detach().clone() for x in X]
        if step == 2 and rank == bad_rank:
            optimizer.param_groups[1][key] = value

    step, text = train(X, optimizer, rank, 5, change)
    untouched = all(torch.equal(x, w) for x, w in zip(X, weights, strict=True))
    return step, text, untouched


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1])
def test_an_impossible_learning_rate_is_an_error_on_all_ranks_before_the_step(value):
    first, second = distributed.run(2, spoil, "lr", value, 1)
    assert first[0] == second[0] == 2 and first[2] and second[2]
    assert "Another rank" in first[1]
    assert f"param_groups[1]: lr={value!r}" in second[1]


@pytest.mark.parametrize("value", [float("nan"), torch.tensor(float("inf"))])
def test_an_impossible_learning_rate_in_one_process(value):
    X = parameters()
    optimizer = CurvaDion(groups(X))
    give_gradients(X, 0, 0)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = value
    weights = [x.detach().clone() for x in X]
    with pytest.raises(ValueError, match=r"param_groups\[0\]: lr="):
        optimizer.step()
    assert all(torch.equal(x, w) for x, w in zip(X, weights, strict=True))


def build_differently(rank, how):
    shapes = [(12, 8), (12, 8), (40,)]
    X = parameters(shapes=shapes)
    named = groups(X)
    if how == "order" and rank:
        named[0]["params"].reverse()
    elif rank:
        named[0][how] = {"momentum_dtype": "bfloat16", "q_dtype": "bfloat16", "lr": 0.03}[how]
    optimizer = Dion(named, replicas=dist.group.WORLD)

    return train(X, optimizer, rank, 1)


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("order", "matrix0 of shape (12, 8)"),
        ("momentum_dtype", "momentum_dtype"),
        ("q_dtype", "q_dtype"),
        ("lr", "0.03 on rank 1"),
    ],
)
def test_replicas_built_differently_are_told_in_what(how, named):
    for step, text in distributed.run(2, build_differently, how):
        assert step == 0 and "optimizers differ" in text and named in text


def change_parameters(rank, layout, kind, where):
    """Freeze a matrix at step 3 on some ranks, while replicas are together."""
    X = parameters()
    if layout == "sharded":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        placements = [Replicate(), Shard(0)]
        X = [nn.Parameter(distribute_tensor(x.detach(), mesh, placements)) for x in X]
        optimizer = optimizer_of(X, kind, replicas=mesh["replicate"])
    else:
        optimizer = optimizer_of(X, kind)

    def take(step):
        if step == 3 and rank in where:
            X[1].requires_grad_(False)
        if step == 5 and rank in where:
            X[1].requires_grad_(True)
        for i, x in enumerate(X):
            generator = torch.Generator().manual_seed(1000 * step + 10 * rank + i)
            noise = torch.randn(x.shape, generator=generator)
            x.grad = torch.zeros_like(x) if x.requires_grad else None
            if x.grad is not None and layout == "sharded":
                x.grad.to_local().copy_(noise[: len(x.to_local())])
            elif x.grad is not None:
                x.grad.copy_(noise)
        optimizer.step()

    return told(7, take)


FREEZES = [("plain", 2, "dion"), ("plain", 2, "threshold"), ("sharded", 4, "period")]


@pytest.mark.parametrize(("layout", "ranks", "kind"), FREEZES)
def test_parameters_frozen_on_one_rank_only_are_an_error_not_a_hang(layout, ranks, kind):
    answers = distributed.run(ranks, change_parameters, layout, kind, (1,), timeout=30)
    for rank, (step, text) in enumerate(answers):
        # Other replicas that follow a schedule hear of it when they next open the gate.
        assert step == (5 if kind == "period" and rank > 1 else 3)
        assert "matrix1" in text and "frozen" in text and "rank 1" in text


@pytest.mark.parametrize(
    ("layout", "ranks", "kind"), [("plain", 2, "dion"), ("sharded", 4, "period")]
)
def test_parameters_can_be_frozen_and_thawed_on_all_ranks(layout, ranks, kind):
    everywhere = tuple(range(ranks))
    assert distributed.run(ranks, change_parameters, layout, kind, everywhere) == [None] * ranks


def load_on_one_rank(rank):
    X = parameters()
    optimizer = optimizer_of(X, "period")

    def take(step):
        if step == 3 and rank == 0:
            optimizer.load_state_dict(saved[0])
        give_gradients(X, step, rank)
        optimizer.step()
        if step == 1:
            saved.append(copy.deepcopy(optimizer.state_dict()))

    saved: list[dict] = []
    return told(6, take)


@pytest.mark.filterwarnings("ignore:.*apart")
def test_a_checkpoint_loaded_on_one_rank_in_mid_run_is_an_error_not_a_hang():
    loading, other = distributed.run(2, load_on_one_rank, timeout=30)
    assert loading[0] == 3 and other[0] == 5  # at its next opening
    assert "progress is" in loading[1] and "progress is" in other[1]


# ---------------------------------------------------------------- weights


def start_apart(rank, kind, broadcast):
    X = parameters()
    with torch.no_grad():
        X[3][0] += rank
    optimizer = optimizer_of(X, kind)
    if broadcast:
        optimizer.broadcast_weights(1)

    first = X[3].detach()[0].item()
    return train(X, optimizer, rank, 2), first


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_that_start_from_other_weights_are_an_error(kind):
    for (step, text), _ in distributed.run(2, start_apart, kind, False):
        assert step == 0 and "different weights" in text and "broadcast_weights" in text


@pytest.mark.parametrize("kind", KINDS)
def test_one_replicas_weights_can_be_given_to_all(kind):
    wanted = parameters()[3].detach()[0].item() + 1
    assert distributed.run(2, start_apart, kind, True) == [(None, wanted)] * 2


def add_other_weights(rank, kind, unlike):
    X = parameters()
    optimizer = optimizer_of(X, kind)
    more = nn.Parameter(torch.ones(6, 6) * (1 + unlike * rank))

    def add(step):
        if step == 4:
            optimizer.add_param_group({"params": [("more", more)]})

    return train([*X, more], optimizer, rank, 6, add)


@pytest.mark.parametrize("kind", ["threshold", "period", "budget"])
def test_weights_added_later_must_be_alike_too(kind):
    assert distributed.run(2, add_other_weights, kind, 0) == [None] * 2
    for step, text in distributed.run(2, add_other_weights, kind, 1):
        assert step == 4 and "different weights" in text


def train_float64(rank, kind):
    X = parameters(torch.float64)
    optimizer = optimizer_of(X, kind)
    for step in range(4):
        give_gradients(X, step, rank)
        optimizer.step()
    optimizer.synchronize()
    return [x.detach() for x in X]


@pytest.mark.parametrize("kind", KINDS)
def test_float64_parameters_have_replicas(kind):
    first, second = distributed.run(2, train_float64, kind)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ---------------------------------------------------------------- one replica


def train_without_replicas(rank, kind, replicas):
    X = parameters()
    optimizer = optimizer_of(X, kind, replicas=replicas)
    if replicas == "single":
        optimizer = pickle.loads(pickle.dumps(optimizer))
        X = [x for g in optimizer.param_groups for x in g["params"]]

    with WireMeter() as meter:
        return train(X, optimizer, rank, 3), meter.total_bytes


@pytest.mark.parametrize("kind", ["threshold", "period", "budget"])
def test_forgotten_replicas_are_an_error_where_the_gate_can_close(kind):
    for (step, text), _ in distributed.run(2, train_without_replicas, kind, None):
        assert step == 0
        assert "replicas=None" in text and "group.WORLD" in text and "'single'" in text


def test_single_says_that_a_process_trains_by_itself():
    assert distributed.run(2, train_without_replicas, "period", "single") == [(None, 0)] * 2
    assert distributed.run(2, train_without_replicas, "dion", None) == [(None, 0)] * 2


def budget_of_shards(rank):
    mesh = init_device_mesh("cpu", (2,))
    X = [nn.Parameter(distribute_tensor(x.detach(), mesh, [Shard(0)])) for x in parameters()]
    optimizer = CurvaDion(groups(X), wire_budget=0.5)

    def take(step):
        for x in X:
            x.grad = torch.ones_like(x)
        optimizer.step()

    return told(1, take)


def test_a_budget_of_one_sharded_replica_is_an_error():
    for step, text in distributed.run(2, budget_of_shards):
        assert step == 0 and "one replica" in text and "Use Dion" in text


def test_processes_without_a_group_are_warned(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    X = parameters()
    give_gradients(X, 0, 0)
    with pytest.warns(UserWarning, match="WORLD_SIZE=2.*init_process_group"):
        CurvaDion(groups(X)).step()
    CurvaDion(groups(X), replicas="single").step()


def step_alone(rank, gate):
    """What a first step without another replica warns of, and one where that is meant."""
    X = parameters()
    give_gradients(X, 0, rank)
    alone = dist.new_group([rank], use_local_synchronization=True)
    return [warned(CurvaDion(groups(X), replicas=r, **gate).step) for r in (alone, "single")]


@pytest.mark.parametrize(
    ("ranks", "gate", "words"),
    [
        (2, {"threshold": 0.3}, ("this rank alone, and there are 2 ranks", "group.WORLD")),
        (1, {"wire_budget": 0.5}, ("gate=ByteBudget(", "torchrun")),
    ],
)
def test_a_replica_without_another_is_warned_unless_it_is_meant(ranks, gate, words):
    for (text,), meant in distributed.run(ranks, step_alone, gate):
        assert all(word in text for word in (*words, "replicas='single'")) and not meant


# ---------------------------------------------------------------- double synchronisation


def average_(X, how):
    """Average gradients as something else would; by rounding not quite the same on every rank."""
    ranks = dist.get_world_size()
    for x in X:
        if how == "all_reduce":
            dist.all_reduce(x.grad)
            x.grad /= ranks
            continue
        each = [torch.empty_like(x.grad) for _ in range(ranks)]
        dist.all_gather(each, x.grad)
        shift = dist.get_rank()
        x.grad = sum(each[(i + shift) % ranks] for i in range(ranks)) / ranks


SOON = 32  # the period of later looks, in tests of these


@contextmanager
def looking_soon():
    usual = GradientWatch.EVERY
    GradientWatch.EVERY = SOON
    try:
        yield
    finally:
        GradientWatch.EVERY = usual


def averaged_by_others(rank, which, how, since, steps, dtype, kind):
    X = parameters(dtype)
    optimizer = optimizer_of(X, kind)

    def take(step):
        give_gradients(X, step, rank)
        if step >= since:
            average_([X[i] for i in which], how)
        optimizer.step()

    return told(steps, take)


@pytest.mark.parametrize("how", ["all_reduce", "rank order"])
def test_gradients_of_matrices_averaged_by_others_are_an_error_at_the_first_step(how):
    arguments = (0, 1, 2), how, 0, 1, torch.float32, "threshold"
    for step, text in distributed.run(3, averaged_by_others, *arguments):
        assert step == 0 and "the matrices" in text and "identical" in text


# The tenth step is the first look; five parameters are two turns of five looks. Replicas that
# follow a schedule look at openings only, here at every third step from the twelfth on.
TWO_TURNS = {"threshold": 9 + 10, "period": 11 + 3 * 10}


@pytest.mark.parametrize("kind", TWO_TURNS)
@pytest.mark.parametrize(
    ("which", "since", "how"), [((3, 4), 0, "rank order"), ((0, 1, 2), 1, "all_reduce")]
)
def test_some_gradients_averaged_by_others_are_an_error_soon(which, since, how, kind):
    arguments = which, how, since, TWO_TURNS[kind] + 1, torch.float32, kind
    for step, text in distributed.run(3, averaged_by_others, *arguments):
        assert step <= TWO_TURNS[kind] and "identical" in text
        named = [i for i in range(5) if f"matrix{i}" in text or f"vector{i}" in text]
        assert named == list(which)


def one_averaged_by_others(rank, *arguments):
    return warned(averaged_by_others, rank, *arguments)


@pytest.mark.parametrize("kind", TWO_TURNS)
@pytest.mark.parametrize(("which", "dtype"), [(2, torch.bfloat16), (3, torch.float32)])
def test_one_parameter_averaged_by_others_is_a_warning_soon(which, dtype, kind):
    name = "matrix2" if which == 2 else "vector3"
    arguments = (which,), "all_reduce", 1, TWO_TURNS[kind] + 1, dtype, kind
    for (text,) in distributed.run(3, one_averaged_by_others, *arguments):
        assert f"The gradients of {name} had the same direction" in text


def averaged_late(rank, kind, since, steps):
    every = tuple(range(len(SHAPES)))
    with looking_soon():
        return averaged_by_others(rank, every, "rank order", since, steps, torch.float32, kind)


@pytest.mark.parametrize(
    ("kind", "since", "found_at"),
    [
        ("threshold", 25, SOON + 5),
        ("period", 45, 11 + 3 * (SOON + 5 - 9)),  # the looks' steps are openings
    ],
)
def test_averaging_that_starts_late_is_found(kind, since, found_at):
    assert GradientWatch.EVERY == 256
    for step, text in distributed.run(2, averaged_late, kind, since, found_at + 1):
        assert step == found_at and "identical" in text


def watch_own_gradients(rank, dtype):
    """Looks at replicas' own gradients never deceive; what they send."""
    X = parameters(dtype, [(8, 5)] * 6)
    optimizer = Dion(X, replicas=dist.group.WORLD, rank_fraction=0.2)
    sent = []
    with looking_soon():
        for step in range(2 * SOON + 8):
            give_gradients(X, step, rank)
            if step % 7 == 0:
                X[1].grad = None if rank else X[1].grad
                X[2].grad.zero_()
            with WireMeter() as meter:
                optimizer.step()
            sent.append(meter.bytes_by_collective)
    return sent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replicas_own_gradients_are_never_taken_for_averages(dtype):
    for sent in distributed.run(2, watch_own_gradients, dtype):
        usual = sent[1]["all_reduce"]
        looks = [i for i, step in enumerate(sent) if step["all_reduce"] == usual + 48]
        first, later = set(range(9, 19)), {turn + i for turn in (SOON, 2 * SOON) for i in range(5)}
        assert first - {14} <= set(looks) <= first | later
        assert GradientWatch.BYTES == 48


def sharded_and_averaged(rank, since, kind):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    X = [
        nn.Parameter(distribute_tensor(x.detach(), mesh, [Replicate(), Shard(0)]))
        for x in parameters()
    ]
    optimizer = optimizer_of(X, kind, replicas=mesh["replicate"])

    def take(step):
        for i, x in enumerate(X):
            generator = torch.Generator().manual_seed(1000 * step + 10 * rank + i)
            x.grad = torch.zeros_like(x)
            x.grad.to_local().copy_(torch.randn(x.to_local().shape, generator=generator))
            if step >= since and i < 2:
                dist.all_reduce(x.grad.to_local(), group=mesh.get_group("replicate"))
        optimizer.step()

    return warned(told, TWO_TURNS[kind], take)


@pytest.mark.parametrize("kind", TWO_TURNS)
def test_averaging_of_shards_is_found(kind):
    for (text,) in distributed.run(4, sharded_and_averaged, 1, kind):
        assert "matrix0, matrix1 had" in text


# ---------------------------------------------------------------- what is no double synchronisation


def train_honestly(rank, case, kind):
    """Gradients that are alike in some respect although nobody averages them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 200))
    free = nn.Parameter(torch.ones(64))
    table = nn.Parameter(torch.ones(100))
    nn.init.zeros_(net[2].weight)
    nn.init.zeros_(net[2].bias)
    vectors = [net[0].bias, net[2].bias, free, table]
    param_groups = [
        {"params": [net[0].weight, net[2].weight]},
        {"params": vectors, "algorithm": "adamw", "lr": 0.003},
    ]
    optimizer = CurvaDion(param_groups, replicas=dist.group.WORLD, **copy.deepcopy(KINDS[kind]))
    generator = torch.Generator().manual_seed(rank)

    def take(step):
        x = torch.randn(16, 32, generator=generator)
        y = torch.randperm(200, generator=generator)[:16]
        loss = nn.functional.cross_entropy(net(x), y) + table[int(y[0]) % 100]
        if case == "a term without data":
            loss = loss + 0.1 * free.square().sum()
        elif case == "a fixed direction":
            loss = -net(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return warned(told, TWO_TURNS[kind] + 3, take)


@pytest.mark.parametrize("kind", TWO_TURNS)
@pytest.mark.parametrize(
    ("case", "warned"),
    [("labels in another order", 0), ("a term without data", 1), ("a fixed direction", 1)],
)
def test_gradients_that_are_alike_by_themselves_stop_no_run(case, warned, kind):
    for texts in distributed.run(2, train_honestly, case, kind):
        assert len(texts) == warned
        assert all("do not depend on the data" in text for text in texts)


def train_few_numbers(rank, gate):
    X = parameters(shapes=[(4, 5)])
    optimizer = CurvaDion(X, replicas=dist.group.WORLD, gate=gate)
    sent = []
    for step in range(4):
        give_gradients(X, step, rank)
        with WireMeter() as meter:
            optimizer.step()
        sent.append(meter.total_bytes)
    return sent


@pytest.mark.parametrize(("gate", "closed"), [(FixedPeriod(9), 0), (Scheduled(()), 16)])
def test_few_numbers_are_compared_once(gate, closed):
    sent = distributed.run(2, train_few_numbers, gate)
    assert sent == [[16 + 88, closed, closed, closed]] * 2


# ---------------------------------------------------------------- what is alike after all


class Addressed(FixedPeriod):
    """A gate whose repr is another one in every process."""

    def __repr__(self):
        return f"Addressed({os.getpid()})"


def train_with(rank, how):
    X = parameters()
    more = {}
    if how == "gate":
        more["gate"] = Addressed(3)
    if how == "infinite weights":
        with torch.no_grad():
            X[3][0] = -float("inf")
            X[4][0] = float("nan")
    if how == "group of one":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline", "data"))
        more["replicas"] = mesh["data"]
    optimizer = optimizer_of(X, "period", **more)

    def change(step):
        if how == "numpy":
            optimizer.param_groups[0]["lr"] = np.float32(0.01)

    return train(X, optimizer, rank, 3, change)


@pytest.mark.parametrize("how", ["gate", "infinite weights", "group of one", "numpy"])
def test_what_is_meant_is_no_error(how):
    assert distributed.run(2, train_with, how) == [None, None]


# ---------------------------------------------------------------- errors of one rank at the start


def start_wrongly(rank, kind, key, value):
    X = parameters()
    optimizer = optimizer_of(X, kind)
    if rank == 1:
        optimizer.param_groups[0][key] = value

    return train(X, optimizer, rank, 2)


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("lr", float("inf"), "budget"),
        ("mu", 2.0, "threshold"),
        ("algorithm", "x", "budget"),
        ("rank_fraction", 0, "threshold"),
    ],
)
def test_a_wrong_setting_of_one_rank_before_the_first_step(kind, key, value):
    first, second = distributed.run(2, start_wrongly, kind, key, value, timeout=20)
    assert first[0] == second[0] == 0
    assert "Another rank" in first[1] and key in second[1]


def freeze_and_call(rank, call):
    X = parameters()
    optimizer = optimizer_of(X, "period")

    def take(step):
        if step == 3 and rank == 1:
            X[1].requires_grad_(False)
        give_gradients(X, step, rank)
        if not X[1].requires_grad:
            X[1].grad = None
        if step == 3:
            call(optimizer)
        optimizer.step()

    return told(6, take)


def clip(optimizer):
    curvadion.clip_grad_norm_(optimizer, 1.0)


@pytest.mark.parametrize("call", [clip, CurvaDion.synchronize, CurvaDion.drift, CurvaDion.eval])
def test_what_is_called_before_the_step_hides_no_freeze_on_one_rank(call):
    other, freezing = distributed.run(2, freeze_and_call, call, timeout=30)
    assert freezing[0] == 3 and other[0] == 5  # at its next opening
    for _, text in (other, freezing):
        assert "matrix1" in text and "frozen" in text


def start_still(rank):
    """Rank 0 creates its state as checkpoint tools do, rank 1 takes a step."""
    X = parameters()
    optimizer = optimizer_of(X, "threshold")
    if rank == 0:
        for group in optimizer.param_groups:
            group["lr"] = 0.0

    def take(step):
        for x in X:
            x.grad = torch.zeros_like(x)
        optimizer.step()

    return told(2, take)


def test_a_learning_rate_of_zero_on_one_rank_is_an_error_not_a_hang():
    for step, text in distributed.run(2, start_still, timeout=20):
        assert step == 0 and "['lr']" in text


def test_an_optimizer_pickled_without_new_keys_goes_on():
    X = parameters()
    optimizer = CurvaDion(groups(X), wire_budget=0.5)
    give_gradients(X, 0, 0)
    optimizer.step()
    for keys in (optimizer.defaults, *optimizer.param_groups):
        del keys["input_first"]
    del optimizer.gate._balance
    again = pickle.loads(pickle.dumps(optimizer))
    for group in again.param_groups:
        give_gradients(group["params"], 1, 0)
    again.step()
    again.state_dict()
