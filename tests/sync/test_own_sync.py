"""A sync that a user writes in one file, this one: no other file has to know of it.

``OuterMomentum`` takes local steps, and when the gate opens an outer step: momentum on the mean of
the replicas' pseudo-gradients. The rest compares it with a float64 reference, and with itself after
checkpoints, copies and other syncs.
"""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import sys
import zlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import curvadion
import distributed
import formulas
import fsdp_training
import training
from curvadion import ByteBudget, CurvaDion, FixedPeriod, LowRank, QuantizedAverage, WireMeter
from curvadion.layout.dtensor import local
from curvadion.sync.base import Costs
from curvadion.update.state import Owner, StateKey, key_of
from quantized_reference import QuantizedReference
from tolerance import Rounding, assert_close

pytestmark = pytest.mark.numeric


class OuterMomentum(curvadion.Sync):
    """Local steps, then a step of heavy-ball momentum along the mean pseudo-gradient.

    outer_momentum <- beta outer_momentum + mean over replicas of (X_i - anchor)
    anchor <- anchor + outer_lr outer_momentum,   X_i <- anchor
    """

    state_keys = (
        StateKey("anchor", Owner.SYNC, like_parameter=True),
        StateKey("outer_momentum", Owner.SYNC, like_parameter=True),
    )

    def __init__(self, outer_lr=0.7, beta=0.5):
        self.outer_lr, self.beta, self.openings = outer_lr, beta, 0

    def prepare(self, sizes):
        return Costs(4 * sum(sizes))

    def begin(self, parameters):
        for p in parameters:
            if "anchor" not in p.state:
                p.state["anchor"] = p.X.detach().clone()
                p.state["outer_momentum"] = torch.zeros_like(p.X)

    def open_step(self, step):
        step.local_update()
        for p in step.plan.parameters:
            X, anchor, momentum = p.local, *self._held(p)
            mean = X - anchor
            if step.replicas is not None:
                dist.all_reduce(mean, group=step.replicas)
                mean /= step.replicas.size()
            momentum.mul_(self.beta).add_(mean)
            X.copy_(anchor.add_(momentum, alpha=self.outer_lr))
        self.openings += 1

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
        self.openings = state.get("openings", 0)

    def __repr__(self):
        return f"OuterMomentum(outer_lr={self.outer_lr}, beta={self.beta})"


# -------------------------------------------------------------------- runs

SHAPES = {"tall": (12, 8), "wide": (5, 9), "square": (8, 8), "vector": (7,)}
NUMBERS = sum(torch.Size(shape).numel() for shape in SHAPES.values())
PERIOD, STEPS = 3, 11
# On one replica, on the other at an opening, on both.
MISSING = {(0, 1, "tall"), (1, 5, "wide"), (0, 8, "square"), (1, 8, "square"), (1, 7, "vector")}


def random(*key, shape):
    seed = zlib.crc32(repr(key).encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def start():
    return {name: 0.2 * random("X", name, shape=shape) for name, shape in SHAPES.items()}


def gradients(step, rank):
    """None where one is missing; half of the others is common to the replicas."""
    return {
        name: None
        if (rank, step, name) in MISSING
        else random("all", name, step, shape=shape) + random("own", name, step, rank, shape=shape)
        for name, shape in SHAPES.items()
    }


def parameters():
    return {name: nn.Parameter(x) for name, x in start().items()}


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
    """Weights and every tensor of the state, by parameter and key."""
    tensors = {(name, "X"): x.detach().clone() for name, x in X.items()}
    for name, x in X.items():
        state = optimizer.state.get(x, {}).items()
        tensors |= {(name, key): v.clone() for key, v in state if isinstance(v, torch.Tensor)}
    return tensors


def assert_same(these, those):
    assert these.keys() == those.keys()
    for key, tensor in these.items():
        assert tensor.dtype == those[key].dtype and tensor.equal(those[key]), key


# -------------------------------------------------------------------- what it computes


class OuterReference(QuantizedReference):
    """The same in float64, with the local steps of the reference of quantised averages."""

    def __post_init__(self):
        super().__post_init__()
        self.outer_momentum = {name: torch.zeros_like(x).double() for name, x in self.X0.items()}

    def come_together(self, count, last=None):
        for name, leaf in self.leaves.items():
            mean = sum(leaf.X[i] - leaf.anchor[i] for i in range(self.replicas)) / self.replicas
            self.outer_momentum[name] = 0.5 * self.outer_momentum[name] + mean
            moved = leaf.anchor[0] + 0.7 * self.outer_momentum[name]
            leaf.anchor = self._each(moved)
            leaf.X = self._each(moved)
        return list(self.leaves)


def train(rank, options, exact_at):
    """What is held after each step, and whether replicas then are apart."""
    X = parameters()
    optimizer = optimizer_of(X, OuterMomentum(), **options)
    found = []
    for step in range(STEPS):
        take(X, optimizer, [step], rank)
        assert optimizer.apart == (not optimizer.report.gate_open)
        if step == exact_at:
            optimizer.synchronize()
            assert not optimizer.apart and optimizer.drift() == 0
        found.append(held(X, optimizer))
    assert optimizer.sync.openings == sum(is_open(step, exact_at) for step in range(STEPS))
    return found


def is_open(step, exact_at):
    """Whether a step ends a period, which an exact average before it has begun anew."""
    since = step if exact_at is None or step <= exact_at else step - exact_at - 1
    return since % PERIOD == PERIOD - 1


@pytest.mark.parametrize("exact_at", [None, 3])
@pytest.mark.parametrize(
    "options",
    [{"local_step": "dion", "rank_fraction": 1.0}, {"local_step": "gradient", "local_lr": 0.01}],
    ids=["dion", "gradient"],
)
def test_replicas_take_the_references_trajectory(options, exact_at):
    ranks = distributed.run(2, train, options, exact_at)
    known = {"rank_fraction": 0.25, "right_factor": "column_normalized"} | options
    reference = OuterReference(start(), 2, algorithms={"vector": "adamw"}, **known)
    reference.leaves["vector"].lr = 0.003
    for step in range(STEPS):
        opened = is_open(step, exact_at)
        reference.step([gradients(step, rank) for rank in range(2)], opened)
        if step == exact_at:
            reference.synchronize()
        ours, theirs = (rank[step] for rank in ranks)
        for name, leaf in reference.leaves.items():
            for i, actual in enumerate((ours, theirs)):
                wanted = {"X": leaf.X[i], "anchor": leaf.anchor[i]}
                if leaf.M:
                    wanted["momentum"] = leaf.M[i]
                wanted["outer_momentum"] = reference.outer_momentum[name]
                for key, tensor in wanted.items():
                    if tensor.any():
                        rounding = Rounding(
                            torch.float32, max(tensor.shape) * (step + 1), condition=8
                        )
                        # The outer momentum is made of differences of weights.
                        scale = float(leaf.X[i].norm()) if key == "outer_momentum" else None
                        assert_close(
                            actual[name, key], tensor, rounding, scale=scale, what=(step, name, key)
                        )
            for key in ("anchor", "outer_momentum"):
                assert ours[name, key].equal(theirs[name, key])
            together = ours[name, "X"].equal(theirs[name, "X"])
            assert together == (opened or step == exact_at)
        if step == exact_at:  # all state that replicas have of their own
            assert_same(ours, theirs)


def test_shards_of_replicas_take_the_trajectory_of_whole_ones():
    training.assert_trains_like_whole_replicas(
        fsdp_training.setup, "hsdp 2x2", 2, 2,
        schedule=training.OPEN_STEPS, options=(("sync", OuterMomentum()),),
    )  # fmt: skip


# -------------------------------------------------------------------- what it sends


def spend(rank, gate):
    """Bytes sent at each step, and what the gate was told of the costs."""
    X = parameters()
    optimizer = optimizer_of(X, OuterMomentum(), gate)
    sent = []
    for step in range(24):
        with WireMeter() as meter:
            take(X, optimizer, [step], rank)
        sent.append((optimizer.report.gate_open, meter.total_sent))
    return sent, optimizer.gate.open_cost


def test_an_opening_sends_the_pseudo_gradients_and_a_budget_knows_it():
    for sent, open_cost in distributed.run(2, spend, ByteBudget(0.45)):
        assert open_cost == pytest.approx(1.0 + 16 / (4 * NUMBERS))
        gates = formulas.scheduled_gate([opened for opened, _ in sent], parameters().values())
        for step, (opened, count) in enumerate(sent[1:], 1):  # the first compares replicas
            resting = sum((rank, step, name) in MISSING for rank in range(2) for name in SHAPES)
            beside = count - gates[step] - 4 * NUMBERS * opened
            assert 0 <= beside <= 2 * len(SHAPES) * (resting > 0)
        openings = sum(opened for opened, _ in sent)
        assert 4 <= openings <= 0.45 * len(sent)


# -------------------------------------------------------------------- copies and checkpoints


def save_and_load(saved, X, sync, **options):
    """Weights and an optimizer that go on from what was saved; their own file in between."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    twins = {name: nn.Parameter(weights[name]) for name in X}
    optimizer = optimizer_of(twins, sync, **options)
    optimizer.load_state_dict(state)
    return twins, optimizer


def saved_of(X, optimizer):
    return {name: x.detach() for name, x in X.items()}, optimizer.state_dict()


def disturb(rank, how, at):
    X = parameters()
    optimizer = optimizer_of(X, OuterMomentum())
    take(X, optimizer, range(at), rank)
    if how == "state_dict":
        X, optimizer = save_and_load(saved_of(X, optimizer), X, OuterMomentum())
    elif how is not None:
        before = held(X, optimizer)
        copied = {"deepcopy": copy.deepcopy, "pickle": lambda o: pickle.loads(pickle.dumps(o))}
        twin = copied[how](optimizer)
        twins = dict(zip(X, (x for g in twin.param_groups for x in g["params"]), strict=True))
        assert twin.sync is not optimizer.sync
        assert twin.sync.openings == optimizer.sync.openings
        take(twins, twin, range(at, STEPS), rank)
        assert_same(held(X, optimizer), before)  # of which the copy is independent
        return held(twins, twin), twin.sync.openings
    take(X, optimizer, range(at, STEPS), rank)
    return held(X, optimizer), optimizer.sync.openings


@pytest.mark.filterwarnings("ignore:state_dict.. while the replicas:UserWarning")
@pytest.mark.parametrize(
    ("how", "at"),  # before, at and long after the first opening
    [
        ("state_dict", 2),
        ("state_dict", 7),
        ("deepcopy", 3),
        ("deepcopy", 7),
        ("pickle", 2),
        ("pickle", 3),
    ],
)
def test_a_run_goes_on_bitwise(how, at):
    disturbed = distributed.run(2, disturb, how, at)
    for (wanted, openings), (actual, as_many) in zip(undisturbed(), disturbed, strict=True):
        assert_same(actual, wanted)
        assert openings == as_many == STEPS // PERIOD


@functools.cache
def undisturbed():
    return distributed.run(2, disturb, None, 0)


OTHERS = {"LowRank": LowRank(), "QuantizedAverage": QuantizedAverage(bits=8)}
KEYS = {
    "LowRank": set(),
    "QuantizedAverage": {
        "anchor",
        "residual",
        "lr_since_anchor",
        "spectrum",
        "spectrum_weight",
    },
    "OuterMomentum": {"anchor", "outer_momentum"},
}


def keys_of_sync(X, optimizer):
    """The keys of a matrix' state that the table does not name."""
    return {key for key in optimizer.state[X["tall"]] if key_of(key) is None}


def there_and_back(rank, name):
    """A run that goes on under another sync, and then under the first again."""
    X = parameters()
    optimizer = optimizer_of(X, OuterMomentum())
    take(X, optimizer, range(4), rank)
    found = []
    for kind, sync in ((name, OTHERS[name]), ("OuterMomentum", OuterMomentum())):
        optimizer.synchronize(exact=True)
        before = held(X, optimizer)
        X, optimizer = save_and_load(saved_of(X, optimizer), X, sync)
        kept = {key: x for key, x in held(X, optimizer).items() if key_of(key[1]) or key[1] == "X"}
        # Right factors follow the rank.
        assert_same(
            {key: x for key, x in kept.items() if key[1] != "Q"},
            {key: x for key, x in before.items() if key in kept and key[1] != "Q"},
        )
        assert optimizer.sync.state_dict() == sync.state_dict()
        steps = range(optimizer.progress.steps, optimizer.progress.steps + 4)
        take(X, optimizer, steps[:1], rank)
        assert keys_of_sync(X, optimizer) == KEYS[kind]
        if "anchor" in KEYS[kind]:
            # The weights as they were loaded: whatever was an anchor before is none now.
            assert all(optimizer.state[x]["anchor"].equal(before[n, "X"]) for n, x in X.items())
        if kind == "OuterMomentum":
            assert not any(optimizer.state[x]["outer_momentum"].any() for x in X.values())
        take(X, optimizer, steps[1:], rank)
        found.append(held(X, optimizer))
    return found


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_goes_to_other_syncs_and_back(name):
    ours, theirs = distributed.run(2, there_and_back, name)
    for first, second in zip(ours, theirs, strict=True):
        assert all(bool(x.isfinite().all()) for x in first.values())
        assert not any(first[n, "X"].equal(second[n, "X"]) for n in SHAPES)  # a local step


@pytest.mark.parametrize("name", OTHERS)
def test_the_first_steps_after_a_change_are_those_of_a_new_run(name):
    """What the saved sync remembered plays no part: weights and local states are all there is."""
    finals = []
    for keeps in (True, False):
        X = parameters()
        before = optimizer_of(X, OTHERS[name], rank_fraction=0.5, right_factor="qr", nesterov=1.0)
        take(X, before, range(4), 0)
        before.synchronize(exact=True)
        saved = saved_of(X, before)
        if not keeps:
            for state in saved[1]["state"].values():
                for key in [key for key in state if key_of(key) is None]:
                    del state[key]
        X, optimizer = save_and_load(saved, X, OuterMomentum())
        take(X, optimizer, range(4, 9), 0)
        finals.append(held(X, optimizer))
    assert_same(*finals)


def load_what_was_apart(rank, sync):
    X = parameters()
    optimizer = optimizer_of(X, OuterMomentum())
    take(X, optimizer, range(4), rank)
    try:
        save_and_load(saved_of(X, optimizer), X, sync)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.filterwarnings("ignore:state_dict.. while the replicas:UserWarning")
def test_weights_that_were_apart_are_no_anchor_for_another_sync():
    for message in distributed.run(2, load_what_was_apart, QuantizedAverage()):
        assert "while its replicas were apart" in message and "1 local steps" in message
    assert distributed.run(2, load_what_was_apart, LowRank()) == [None, None]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("saving", ["LowRank", "QuantizedAverage", "OuterMomentum"])
def test_a_distributed_checkpoint_may_lack_its_state(saving, tmp_path):
    sync = OTHERS.get(saving, OuterMomentum())
    model, optimizer = model_of(sync)
    take(dict(model.named_parameters()), optimizer, range(4), 0)
    optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)

    twin, its_optimizer = model_of(OuterMomentum())
    weights, state = get_state_dict(twin, its_optimizer)
    both = {"model": weights, "optimizer": state}
    curvadion.fit_to_checkpoint(both, checkpoint_id=tmp_path)
    dcp.load(both, checkpoint_id=tmp_path)
    set_state_dict(
        twin, its_optimizer, model_state_dict=weights, optim_state_dict=both["optimizer"]
    )
    X = dict(twin.named_parameters())
    take(X, its_optimizer, range(4, 9), 0)
    assert its_optimizer.progress.steps == 9
    assert keys_of_sync(X, its_optimizer) == KEYS["OuterMomentum"]
    if saving == "OuterMomentum":
        others = dict(model.named_parameters())
        take(others, optimizer, range(4, 9), 0)
        assert_same(held(X, its_optimizer), held(others, optimizer))


def model_of(sync):
    model = nn.Module()
    for name, x in parameters().items():
        model.register_parameter(name, x)
    return model, optimizer_of(dict(model.named_parameters()), sync)


# -------------------------------------------------------------------- one file is all


def package():
    """Every function and class of the package, and what is in the classes, by name."""
    found = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] not in ("curvadion", "curvadion_kernels"):
            continue
        for name, value in vars(module).items():
            if inspect.isclass(value) and value.__module__.startswith("curvadion"):
                members = {k: v for k, v in vars(value).items() if not k.startswith("_abc")}
                found |= {(module_name, name, member): v for member, v in members.items()}
            if callable(value):
                found[module_name, name] = value
    return found


def run_and_compare(rank):
    """Names in the package that are other objects after a run, beside those of new modules."""
    X = parameters()
    take(X, optimizer_of(X, LowRank()), range(4), rank)  # imports what is imported late
    before = package()
    X = parameters()
    optimizer = optimizer_of(X, OuterMomentum())
    take(X, optimizer, range(4), rank)
    optimizer.synchronize()
    X, optimizer = save_and_load(saved_of(X, optimizer), X, OuterMomentum())
    take(X, optimizer, range(4, 8), rank)
    after = package()
    return [name for name in before if after[name] is not before[name]]


def test_nothing_of_the_package_is_patched_and_no_table_knows_of_it():
    assert distributed.run(2, run_and_compare) == [[], []]
    assert OuterMomentum.__module__ == __name__ and OuterMomentum.__mro__[1] is curvadion.Sync
    assert key_of("outer_momentum") is None
    assert key_of("outer_momentum", OuterMomentum.state_keys).owner is Owner.SYNC


def test_the_optimizer_takes_a_copy():
    given = OuterMomentum()
    X = parameters()
    optimizer = optimizer_of(X, given)
    take(X, optimizer, range(4), 0)
    assert optimizer.sync is not given and "OuterMomentum(outer_lr=0.7" in repr(optimizer)
    assert (given.openings, optimizer.sync.openings) == (0, 1)
