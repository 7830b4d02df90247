"""With a delay, replicas in shards go where whole replicas go.

Codes depend on which numbers make up a block of 256, and on which replica averages it. Shapes and
their order are such that both are the same for whole replicas and for those in shards. Then all
that remains are roundings. ``test_wire_budget_layouts.py`` has models whose blocks differ.
"""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import distributed
from curvadion import CurvaDion, FixedPeriod, QuantizedAverage, WireMeter
from curvadion.comm.background import background_of
from curvadion.layout.dtensor import local
from curvadion.sync.coded_mean import message_bytes
from seeded import gradient, weights
from shards import shard
from tolerance import Rounding, assert_within

pytestmark = pytest.mark.numeric
STEPS = 10
BITS = 3
# As they are sent: one replica averages the first half of a message.
SHAPES = {"one": (4, 512), "two": (4, 512), "elementwise": (8, 512)}
# What tensor parallelism cuts, rows or columns; two fragments part the elementwise one from others.
CUTS = {
    "whole": {},
    "tp": {"one": "0", "two": "1", "elementwise": "0"},
    "tp, one replicated": {"one": "1", "two": "0"},
}
MISSING = {(3, 0, "one"), (4, 1, "two"), (4, 1, "elementwise"), (5, 0, "one"), (7, 1, "one")}


class Placed:
    """The parameters in a layout, with the optimizer's replicas."""

    def __init__(self, layout):
        self.cuts = CUTS[layout]
        self.replica, self.replicas = dist.get_rank(), dist.group.WORLD
        if layout != "whole":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "inside"))
            self.replica, self.replicas = mesh.get_local_rank("replicate"), mesh["replicate"]
            self.inside = mesh["inside"]
        self.X = {n: nn.Parameter(self.cut(n, weights(s) / 10)) for n, s in SHAPES.items()}

    def cut(self, name, whole):
        kind = self.cuts.get(name)
        return whole if kind is None else shard(whole, kind, self.inside)

    @property
    def between(self):
        """The group over which replicas send codes."""
        group = self.replicas if not self.cuts else self.replicas.get_group()
        return background_of(group, torch.device("cpu")).group.group_name

    def optimizer(self, delay, fragments):
        groups = [
            {"params": [self.X["one"], self.X["two"]]},
            {"params": [self.X["elementwise"]], "algorithm": "adamw"},
        ]
        sync = QuantizedAverage(BITS, delay=delay, fragments=fragments, residual_dtype="float32")
        return CurvaDion(groups, replicas=self.replicas, gate=FixedPeriod(3), sync=sync)

    def train(self, optimizer, steps):
        for step in steps:
            for name, x in self.X.items():
                G = self.cut(name, gradient(SHAPES[name], step, self.replica))
                x.grad = None if (step, self.replica, name) in MISSING else G
            optimizer.step()

    def full(self, tensors):
        """Whole tensors from what ranks of a replica hold, by name."""
        tensors = zip(SHAPES, tensors, strict=True)
        return {
            name: (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()
            for name, x in tensors
        }

    def anchors(self, optimizer):
        return self.full(optimizer.state[x]["anchor"] for x in self.X.values())


def train(rank, layout, delay, fragments):
    """Weights and anchors by step; at the end weights that are synchronised; codes' bytes."""
    placed = Placed(layout)
    optimizer = placed.optimizer(delay, fragments)
    history, opened = [], 0
    with WireMeter() as meter:
        for step in range(STEPS):
            placed.train(optimizer, [step])
            history.append((placed.full(placed.X.values()), placed.anchors(optimizer)))
            opened += optimizer.report.gate_open
        optimizer.sync.settle()
    sent = meter.records[placed.between, "all_to_all"].sent - 1  # which connects the two replicas
    optimizer.synchronize()
    codes = message_bytes((local(x).numel() for x in placed.X.values()), BITS)
    return history, placed.full(placed.X.values()), sent, opened * codes


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


@pytest.mark.parametrize(
    ("layout", "delay", "fragments"), [("tp", 1, 1), ("tp, one replicated", 2, 2)]
)
@pytest.mark.chosen_inputs
def test_replicas_in_shards_go_where_whole_ones_go(layout, delay, fragments):
    actual = distributed.run(4, train, layout, delay, fragments)
    expected = distributed.run(2, train, "whole", delay, fragments)
    for rank, (history, synchronized, sent, codes) in enumerate(actual):
        history_whole, synchronized_whole, *_ = expected[rank // 2]
        start = history_whole[0][1]
        same, last = True, start
        for (X, A), (X_whole, A_whole) in zip(history, history_whole, strict=True):
            # After codes that differ, trajectories do.
            same = same and nearly_equal(A, A_whole, last) and nearly_equal(X, X_whole, start)
            if not all(map(torch.equal, A_whole.values(), last.values())):
                last = A_whole
        if same and fragments == 1:  # else the last message has blocks of both
            nearly_equal(synchronized, synchronized_whole, last)
        assert_equal(synchronized, actual[0][1])
        for (_, A), (_, others) in zip(history, actual[0][0], strict=True):
            assert_equal(A, others)
        if fragments == 1:
            assert sent == codes


def resume(rank):
    """Each rank goes on from its own state, by itself and in new objects; what is under way."""
    placed, again = Placed("tp"), Placed("tp")
    optimizer, its = (p.optimizer(2, fragments=2) for p in (placed, again))
    placed.train(optimizer, range(3))
    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
    under_way = sum("due" in state for state in optimizer.state.values())
    with torch.no_grad():
        for name, x in placed.X.items():
            again.X[name].copy_(x)
    its.load_state_dict(saved)
    placed.train(optimizer, range(3, STEPS))
    again.train(its, range(3, STEPS))
    for name, x in placed.X.items():
        assert torch.equal(local(x), local(again.X[name])), name
    assert_equal(placed.anchors(optimizer), again.anchors(its))
    return under_way


@pytest.mark.filterwarnings("ignore:state_dict:UserWarning")
def test_shards_go_on_bitwise_from_what_is_under_way():
    assert all(distributed.run(4, resume))
