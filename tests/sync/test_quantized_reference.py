"""Replicas under quantised averaging take the trajectory of an independent float64 reference.

The reference starts each step from what the replicas hold: a number that lies on an edge between
two codes may fall on either side of it, and all later steps depend on that.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from curvadion import CurvaDion, QuantizedAverage, Replicated
from curvadion.ops.code_format import BITS, levels
from support.references.quantized_reference import QuantizedReference, off_centre
from support.references.tolerance import Rounding
from support.runs import distributed
from support.runs.scheduled import Scheduled
from support.runs.seeded import half_common, random

pytestmark = pytest.mark.numeric
# Directions amplify roundings by the ratio of singular values, which square matrices have large.
ROUNDING = Rounding(torch.float64, terms=64, condition=1e6)
STEPS = 9
OPEN_STEPS = (2, 5, 6, 9)
# Tall, wide, square, prime, one row; two that fill several blocks.
MATRICES = [(24, 10), (9, 30), (16, 16), (13, 7), (1, 12), (37, 23)]
VECTORS = {"bias": (11,), "table": (20, 15)}
MISSING = {(3, 0, "4"), (4, 1, "bias"), (5, 1, "0"), (8, 0, "2"), (8, 1, "2")}
STATE = {
    "momentum": "M",
    "Q": "Q",
    "spectrum": "S",
    "anchor": "anchor",
    "exp_avg": "m",
    "exp_avg_sq": "v",
    "residual": "residual",
    "sent": "sent",
    "mean": "mean",
}


# Of the reference's settings, those of the sync.
OF_SYNC = {"bits", "fragments", "align_momentum", "polar_correction", "spectrum_decay", "delay"}


class OnSchedule(Scheduled):
    """Replicas meet at openings only."""

    follows_schedule = True


def shapes():
    return {str(i): shape for i, shape in enumerate(MATRICES)} | VECTORS


def gradient(name, step, rank):
    """None where it is missing."""
    missing = (step, rank, name) in MISSING
    return None if missing else half_common(name, shapes()[name], step, rank)


def start(dtype):
    return {
        name: 0.2 * random("X", name, shape=shape).to(dtype) for name, shape in shapes().items()
    }


def optimizer_of(X, options, scheduled):
    gate = (OnSchedule if scheduled else Scheduled)(OPEN_STEPS)
    if "inner" in options:
        keys = {"lr": options["lr"], "betas": (0.9, 0.95), "weight_decay": 0.01}
        inner = options["inner"](X.items(), **keys)
        return Replicated(inner, replicas=dist.group.WORLD, gate=gate, sync=options["sync"])
    matrices = [(name, x) for name, x in X.items() if name not in VECTORS]
    others = [(name, x) for name, x in X.items() if name in VECTORS]
    groups = [{"params": matrices}, {"params": others, "algorithm": "adamw"}]
    return CurvaDion(groups, replicas=dist.group.WORLD, gate=gate, **options)


def train(rank, dtype, fall, scheduled, steps, options):
    """Per step what is held of each parameter, and with a delay once more after synchronize()."""
    X = {name: nn.Parameter(x) for name, x in start(dtype).items()}
    optimizer = optimizer_of(X, options, scheduled)
    held = []
    for step in range(1, steps + 1):
        for name, x in X.items():
            G = gradient(name, step, rank)
            x.grad = None if G is None else G.to(dtype)
        if step == 7:
            for group in optimizer.param_groups:
                group["lr"] *= fall
        optimizer.step()
        optimizer.sync.settle()  # so that a mean that is under way can be compared
        held.append({name: state_of(x, optimizer.state[x]) for name, x in X.items()})
    if optimizer.sync.delay:
        optimizer.synchronize()
        held.append({name: state_of(x, optimizer.state[x]) for name, x in X.items()})
    return held


def state_of(x, state):
    held = {own: state[key].clone() for key, own in STATE.items() if key in state}
    if "S" in held:
        held["S"] = held["S"].view(min(x.shape), -1)
    return held | {"X": x.detach().clone()}


def follow(ranks, dtype, settings, rounding=ROUNDING):
    """The number of comparisons of a run with the reference of these settings.

    Beside those of the reference: "fall", the factor of the rates after the third opening; and
    "scheduled", whether replicas meet at openings only; "inner", an optimizer of torch in the place
    of ours.
    """
    known = {"look_ahead": 2.0, "lr": 0.03, "direction": "low_rank", **settings}
    fall, scheduled = known.pop("fall", 0.5), known.pop("scheduled", False)
    inner = {"inner": known.pop("inner")} if "inner" in known else {}
    algorithms = dict.fromkeys(shapes() if inner else VECTORS, "adamw")
    reference = QuantizedReference(start(dtype), ranks, algorithms=algorithms, **known)
    rule = {k: v for k, v in known.items() if k not in OF_SYNC | {"margin"}}
    rule["newton_schulz_steps"] = 14  # bring every singular value to 1
    if "wd" in rule:
        rule["weight_decay"] = rule.pop("wd")
    of_sync = {k: v for k, v in known.items() if k in OF_SYNC}
    rule |= inner
    rule["sync"] = QuantizedAverage(**of_sync, residual_dtype="float32")
    # The last mean is still under way at the end: synchronize() adds it.
    steps = STEPS + max(0, reference.delay - 1)
    replicas = distributed.run(ranks, train, dtype, fall, scheduled, steps, rule)
    compared = 0
    for step in range(1, steps + 1):
        if step == 7:
            for leaf in reference.leaves.values():
                leaf.lr *= fall
        gradients = [
            {name: gradient(name, step, rank) for name in shapes()} for rank in range(ranks)
        ]
        reference.step(gradients, step in OPEN_STEPS)
        held = [replica[step - 1] for replica in replicas]
        compared += reference.check(held, rounding)
        reference.take(held)
    if reference.delay:
        assert any(leaf.under_way is not None for leaf in reference.leaves.values())
        reference.sync_weights(reference.fragments_drifted)
        compared += reference.check([replica[-1] for replica in replicas], rounding)
    return compared


SETTINGS = {
    "2 bits": {},
    "1 bit to the owners, 2 back": {"bits": (1, 2)},
    "8 bits, two fragments": {"bits": 8, "fragments": 2},
    "more fragments than parameters": {"fragments": 50},
    "no alignment": {"align_momentum": False, "bits": 4},
    "no polar correction": {"polar_correction": False, "bits": 4},
    "quarter of the rank, normalised columns": {
        "rank_fraction": 0.25,
        "right_factor": "column_normalized",
    },
    "gradient steps": {"local_step": "gradient", "local_lr": 0.01},
    "plain momentum": {"momentum_rule": "plain", "momentum": 0.8, "wd": 0.2, "look_ahead": 0.0},
    "a fall of the rate": {"fall": 1e-3, "bits": 1},
    "a delay longer than the time between openings": {"delay": 4},
    "a delay under a schedule, a fall of the rate": {
        "delay": 2,
        "scheduled": True,
        "fall": 1e-3,
        "bits": 3,
    },
    "torch's AdamW inside": {"inner": torch.optim.AdamW, "fragments": 2, "scheduled": True},
    "torch's AdamW inside, a delay": {"inner": torch.optim.AdamW, "delay": 2, "scheduled": True},
    "polar factors": {"direction": "polar"},
    "polar factors, two fragments": {
        "direction": "polar",
        "spectrum_decay": 0.75,
        "fragments": 2,
        "bits": 4,
    },
    "polar factors, a delay of two, two fragments": {
        "direction": "polar",
        "delay": 2,
        "fragments": 2,
        "bits": (2, 4),
    },
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_replicas_take_the_references_trajectory(settings):
    ranks = 4 if settings in ("gradient steps", "polar factors, two fragments") else 2
    assert follow(ranks, torch.float64, SETTINGS[settings]) > 500


def test_replicas_in_float32_take_the_trajectory_of_the_reference():
    rounding = Rounding(torch.float32, terms=64, condition=10)
    assert follow(2, torch.float32, {"bits": 8, "margin": 1e-3}, rounding) > 500


@pytest.mark.parametrize("bits", BITS)
def test_the_codes_levels_are_means_of_the_normal_numbers_that_they_stand_for(bits):
    """Up to float32; those for 8 bits, up to the rounds that their iteration takes."""
    assert off_centre(levels(bits).double()).abs().max() < (1e-5 if bits < 8 else 0.02)
