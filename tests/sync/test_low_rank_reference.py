"""Replicas under LowRank take a float64 reference's steps with all parameters, matrices or not.

Gradients are prescribed. The reference of AdamW and Lion is written from their papers and from what
an opening does to them: after local steps their weights and moments become means, and then all
replicas take one step with the mean gradient.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from curvadion import CurvaDion, FixedPeriod, LowRank
from support.references.quantized_reference import Leaf, elementwise_
from support.references.reference import DionReference
from support.references.tolerance import Rounding, assert_close
from support.runs import distributed
from support.runs.seeded import gradient, weights

pytestmark = pytest.mark.numeric
# The gate opens at the steps 3, 6 and 9.
STEPS, PERIOD = 10, 3
SHAPES = {
    "matrix": (9, 14),
    "tall": (14, 9),
    "bias": (11,),
    "table": (7, 5),
    "scale": (),
    "signs": (13,),
}
ALGORITHMS = {"bias": "adamw", "table": "adamw", "scale": "adamw", "signs": "lion"}
# By step and replica: at local steps, after which counters of steps differ, and at an open one.
MISSING = {
    (2, 1, "bias"),
    (5, 0, "table"),
    (5, 0, "signs"),
    (6, 1, "signs"),
    (6, 0, "scale"),
    (6, 1, "tall"),
}
LR, WD, BETAS, EPS, RANK = 0.03, 0.1, (0.8, 0.95), 1e-6, 4
# By the reference's names.
STATE = {
    "dion": {"M": "momentum", "Q": "Q"},
    "adamw": {"m": "exp_avg", "v": "exp_avg_sq", "t": "step"},
    "lion": {"m": "exp_avg"},
}


def gradients(step, replica):
    """Of a replica by name, in float64; None where one is missing."""
    return {
        name: None if (step, replica, name) in MISSING else gradient(shape, step, replica).double()
        for name, shape in SHAPES.items()
    }


def train(rank, dtype, average_weights, options):
    """By step and parameter what this replica holds."""
    options = dict(options)
    local_step = options.pop("local_step")
    X = {name: nn.Parameter(weights(shape).to(dtype)) for name, shape in SHAPES.items()}
    groups = [{"params": [X["matrix"], X["tall"]], "rank_fraction": RANK / 9, **options}]
    groups += [{"params": [X[name]], "algorithm": each} for name, each in ALGORITHMS.items()]
    optimizer = CurvaDion(
        groups,
        lr=LR,
        replicas=dist.group.WORLD,
        gate=FixedPeriod(PERIOD),
        sync=LowRank(average_weights),
        betas=BETAS,
        eps=EPS,
        weight_decay=WD,
        local_step=local_step,
        local_lr=0.005,
    )
    found = []
    for step in range(1, STEPS + 1):
        for name, G in gradients(step, rank).items():
            X[name].grad = None if G is None else G.to(dtype)
        optimizer.step()
        assert optimizer.report.gate_open == (step % PERIOD == 0)
        found.append({name: {"X": x.detach().clone()} for name, x in X.items()})
        for name, x in X.items():
            keys = STATE[ALGORITHMS.get(name, "dion")].items()
            found[-1][name] |= {own: optimizer.state[x][key].clone() for own, key in keys}
    return found


def start(name, replicas):
    """The reference of replicas of a parameter that takes AdamW or Lion."""
    zero = torch.zeros(SHAPES[name]).double()
    begun = {"X": weights(SHAPES[name]).double(), "m": zero, "v": zero, "t": 0.0}
    each = {key: [value] * replicas for key, value in begun.items()}
    return Leaf(ALGORITHMS[name], lr=LR, **each)


def step_(leaf, gradients, gate_open, average_weights):
    """A step; before an open gate there are local ones."""
    if gate_open:
        if average_weights:
            for key in ("X", "m", "v", "t"):
                setattr(leaf, key, means(getattr(leaf, key)))
        gradients = means([torch.zeros_like(leaf.X[0]) if G is None else G for G in gradients])
    for i, G in enumerate(gradients):
        if G is not None:
            elementwise_(leaf, i, G, WD, BETAS, EPS)


def means(each):
    return [sum(each) / len(each) for _ in each]


DION = {"local_step": "dion", "momentum_rule": "error_feedback", "look_ahead": 0.0}
GRADIENT = {"local_step": "gradient", "momentum_rule": "plain", "look_ahead": 1.5}


@pytest.mark.parametrize(
    ("replicas", "dtype", "average_weights", "options"),
    [
        (2, torch.float32, True, DION),
        (4, torch.float64, True, GRADIENT),
        (2, torch.float64, False, DION | {"momentum_rule": "plain"}),
        (2, torch.float64, False, GRADIENT | {"momentum_rule": "error_feedback"}),
        (2, torch.float64, True, DION | {"look_ahead": 1.5}),
    ],
)
def test_replicas_take_the_references_steps(replicas, dtype, average_weights, options):
    ranks = distributed.run(replicas, train, dtype, average_weights, options)
    leaves = {name: start(name, replicas) for name in ALGORITHMS}
    known = {"lr": LR, "wd": WD, "average_weights": average_weights, "local_lr": 0.005, **options}
    matrices = {
        name: DionReference(weights(SHAPES[name]), replicas, RANK, **known)
        for name in ("matrix", "tall")
    }
    for step in range(1, STEPS + 1):
        gate_open = step % PERIOD == 0
        given = [gradients(step, replica) for replica in range(replicas)]
        for name, matrix in matrices.items():
            own = [torch.zeros(SHAPES[name]) if G[name] is None else G[name] for G in given]
            matrix.step(own, gate_open)
        for name, leaf in leaves.items():
            step_(leaf, [G[name] for G in given], gate_open, average_weights)
        for name, reference in {**matrices, **leaves}.items():
            for replica, found in enumerate(ranks):
                if gate_open and average_weights:
                    assert found[step - 1][name]["X"].equal(ranks[0][step - 1][name]["X"])
                for key, actual in found[step - 1][name].items():
                    wanted = torch.as_tensor(getattr(reference, key)[replica])
                    # Orthonormalising P amplifies rounding errors by its condition.
                    rounding = Rounding(dtype, terms=14, condition=8, steps=step)
                    assert_close(actual, wanted, rounding, what=(step, replica, name, key))
