"""With a delay, replicas in shards go where whole replicas go.

Codes depend on which numbers make up a block of 256, and on which replica averages it. Shapes and
their order are such that both are the same for whole replicas and for those in shards. Then all
that remains are roundings. ``test_wire_budget_layouts.py`` has models whose blocks differ.
"""

from __future__ import annotations

import functools
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel

import distributed
from curvadion import ByteBudget, CurvaDion, FixedPeriod, QuantizedAverage, WireMeter
from curvadion.comm.background import background_of
from curvadion.integrations.fsdp import declare_flat_shards
from curvadion.layout.dtensor import local
from curvadion.sync.coded_mean import message_bytes
from deepspeed_engines import Dot
from seeded import gradient, weights
from shards import shard
from tolerance import Rounding, assert_within

pytestmark = pytest.mark.numeric
STEPS = 10
BITS = 3
# As they are sent, without the frozen one: one replica averages the first half of a message.
SHAPES = {"one": (4, 512), "frozen": (3, 5), "two": (4, 512), "elementwise": (8, 512)}
# A flat cut runs through the middle row of a matrix.
FLAT_SHAPES = {"one": (3, 512), "frozen": (3, 5), "two": (3, 512), "elementwise": (6, 512)}
# What tensor parallelism cuts, rows or columns; two fragments part the elementwise one from others.
CUTS = {
    "tp": {"one": "0", "two": "1", "elementwise": "0"},
    "tp, one replicated": {"one": "1", "two": "0"},
}
GATES = {
    "period": functools.partial(FixedPeriod, 3),
    # Not with flat shards: it counts the blocks that these may fill, and opens later.
    "budget": functools.partial(ByteBudget, 0.08),
}


class Placed:
    """The parameters in a layout, with the optimizer's replicas."""

    def __init__(self, layout):
        self.layout = layout
        self.replica, self.replicas = dist.get_rank(), dist.group.WORLD
        if layout != "whole" and layout != "whole, of FSDP1":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "inside"))
            self.replica, self.replicas = mesh.get_local_rank("replicate"), mesh["replicate"]
            self.inside = mesh["inside"]
        self.shapes = FLAT_SHAPES if "FSDP1" in layout else SHAPES
        self.modules = {name: self.module(name) for name in self.shapes}

    def module(self, name):
        of = Dot(*self.shapes[name], bias=False)
        whole = weights(self.shapes[name]) / 10
        of.weight = nn.Parameter(self.cut(name, whole), requires_grad=name != "frozen")
        if self.layout != "FSDP1":
            return of
        group, cpu = self.inside.get_group(), torch.device("cpu")
        alone = FullyShardedDataParallel(
            of, process_group=group, device_id=cpu, use_orig_params=True
        )
        return declare_flat_shards(alone)

    def cut(self, name, whole):
        kind = CUTS.get(self.layout, {}).get(name)
        return whole if kind is None else shard(whole, kind, self.inside)

    @property
    def trained(self):
        return [name for name in self.shapes if name != "frozen"]

    def parameter(self, name):
        return next(self.modules[name].parameters())

    def optimizer(self, delay, gate, **options):
        groups = [
            {"params": [self.parameter(name)]}
            | ({"algorithm": "adamw"} if name == "elementwise" else {})
            for name in self.trained
        ]
        sync = QuantizedAverage(BITS, delay=delay, residual_dtype="float32", **options)
        return CurvaDion(groups, replicas=self.replicas, gate=gate, sync=sync, max_local_steps=None)

    def train(self, optimizer, steps, missing=()):
        """missing: (step, replica, name) without a gradient."""
        for step in steps:
            optimizer.zero_grad()
            for name in self.trained:
                if (step, self.replica, name) in missing:
                    continue
                G = gradient(self.shapes[name], step, self.replica)
                if self.layout == "FSDP1":
                    self.modules[name]({"weight": G}).backward()
                else:
                    self.parameter(name).grad = self.cut(name, G)
            optimizer.step()

    def full(self, tensors):
        """Whole tensors from what ranks of a replica hold, by name."""
        found = {}
        for name, tensor in tensors.items():
            if hasattr(tensor, "full_tensor"):
                tensor = tensor.full_tensor()
            elif self.layout == "FSDP1":
                parts = [None, None]
                dist.all_gather_object(parts, tensor.detach(), group=self.inside.get_group())
                tensor = torch.cat(parts).view(self.shapes[name])
            found[name] = tensor.detach().clone()
        return found

    def weights(self):
        return self.full({name: self.parameter(name) for name in self.shapes})

    def states(self, optimizer, key):
        held = {name: optimizer.state[self.parameter(name)][key] for name in self.trained}
        return self.full(held)


def train(rank, layout, delay, gate, fragments, missing):
    """Weights and anchors by step; at the end weights that are synchronised; what was sent."""
    placed = Placed(layout)
    optimizer = placed.optimizer(delay, GATES[gate](), fragments=fragments)
    history, opened = [], 0
    with WireMeter() as meter:
        for step in range(STEPS):
            placed.train(optimizer, [step], missing)
            states = (placed.states(optimizer, key) for key in ("anchor", "residual"))
            history.append((placed.weights(), *states))
            opened += optimizer.report.gate_open
        optimizer.sync.settle()
    under_way = sum("due" in state for state in optimizer.state.values())
    group = placed.replicas if layout.startswith("whole") else placed.replicas.get_group()
    between = background_of(group, torch.device("cpu")).group.group_name
    sent = {kind: n.sent for (name, kind), n in meter.records.items() if name == between}
    sent["all_to_all"] -= 1  # which connects the two replicas
    optimizer.synchronize()
    mine = [local(placed.parameter(name)).numel() for name in placed.trained]
    return history, placed.weights(), (sent, opened, mine), under_way


@functools.cache
def whole(layout, *how):
    of = "whole, of FSDP1" if layout == "FSDP1" else "whole"
    return distributed.run(2, train, of, *how)


def assert_equal(these, those):
    for name, tensor in these.items():
        assert torch.equal(tensor, those[name]), name


ROUNDING = Rounding(torch.float32, terms=STEPS)


def nearly_equal(these, those, before):
    """Whether tensors are the same up to roundings; if not, all but a few codes must be.

    Roundings may bring a number over an edge between two codes. One code of 2048 moves the mean by
    a fiftieth at most of all that it adds to the weights ``before``.
    """
    same = True
    for name, tensor in these.items():
        wanted = those[name]
        error = float((tensor - wanted).norm())
        if same := same and error <= ROUNDING.allowed * float(wanted.norm()):
            assert_within(error / float(wanted.norm()), ROUNDING, what=name)
        else:
            assert error <= 0.1 * float((wanted - before.get(name, wanted)).norm()), name
    return same


MISSING = frozenset(
    {(3, 0, "one"), (4, 1, "two"), (4, 1, "elementwise"), (5, 0, "one"), (7, 1, "one")}
)


@pytest.mark.parametrize(
    ("layout", "delay", "gate", "fragments", "missing"),
    [
        ("tp", 1, "period", 1, MISSING),
        ("tp", 2, "budget", 1, frozenset()),
        ("tp, one replicated", 2, "period", 2, MISSING),
        ("FSDP1", 2, "period", 1, frozenset()),
    ],
)
@pytest.mark.chosen_inputs
def test_replicas_in_shards_go_where_whole_ones_go(layout, delay, gate, fragments, missing):
    how = delay, gate, fragments, missing
    actual = distributed.run(4, train, layout, *how)
    expected = whole(layout, *how)
    for rank, (history, synchronized, _, under_way) in enumerate(actual):
        history_whole, synchronized_whole, _, under_way_whole = expected[rank // 2]
        assert under_way == under_way_whole
        start = history_whole[0][1]
        same, last = True, start
        for (X, A, _), (X_whole, A_whole, _) in zip(history, history_whole, strict=True):
            # After codes that differ, trajectories do.
            same = same and nearly_equal(A, A_whole, last) and nearly_equal(X, X_whole, start)
            if not all(map(torch.equal, A_whole.values(), last.values())):
                last = A_whole
        if same and fragments == 1:  # else the last message has blocks of both
            nearly_equal(synchronized, synchronized_whole, last)
        assert_equal(synchronized, actual[0][1])
        for (_, A, _), (_, others, _) in zip(history, actual[0][0], strict=True):
            assert_equal(A, others)
    assert delay == 1 or any(under_way for *_, under_way in actual)
    for rank, (_, _, (sent, opened, mine), _) in enumerate(actual):
        sent_whole, opened_whole, _ = expected[rank // 2][2]
        assert opened == opened_whole > 1
        assert sent["all_reduce"] == sent_whole["all_reduce"]
        if fragments == 1:
            assert sent["all_to_all"] == opened * message_bytes(mine, BITS)
            assert 2 * sent["all_to_all"] == sent_whole["all_to_all"]


def resume(rank, layout, stop):
    """Each rank goes on from its own state, by itself and in new objects."""
    placed, again = Placed(layout), Placed(layout)
    optimizer, its = (p.optimizer(2, FixedPeriod(3), fragments=2) for p in (placed, again))
    placed.train(optimizer, range(stop))
    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
    under_way = [
        name for name in placed.trained if "due" in optimizer.state[placed.parameter(name)]
    ]
    with torch.no_grad():
        for name in placed.shapes:
            local(again.parameter(name)).copy_(local(placed.parameter(name)))
    its.load_state_dict(saved)
    placed.train(optimizer, range(stop, STEPS))
    again.train(its, range(stop, STEPS))
    for name in placed.trained:
        X, Y = placed.parameter(name), again.parameter(name)
        assert torch.equal(local(X), local(Y)), name
        mine, theirs = optimizer.state[X], its.state[Y]
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(local(value), local(theirs[key])), (name, key)
            else:
                assert value == theirs[key], (name, key)
    assert optimizer.progress == its.progress
    return under_way


@pytest.mark.filterwarnings("ignore:state_dict:UserWarning")
@pytest.mark.parametrize(("layout", "stop"), [("tp", 3), ("FSDP1", 4)])
def test_shards_go_on_bitwise_from_what_is_under_way(layout, stop):
    assert all(distributed.run(4, resume, layout, stop))
