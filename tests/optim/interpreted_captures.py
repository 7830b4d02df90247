"""Captured steps without a GPU: a replayed step has the bits of an eager one, whatever changes.

test_capture.py runs this file in Triton's interpreter.
"""

from __future__ import annotations

import copy
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from curvadion import Dion
from curvadion.hooks import Attention, CautiousWeightDecay, QKClip, RowFloor
from curvadion.layout.dtensor import local
from curvadion.optim import capture as captures
from support.devices.emulated_graph import graphs_on_cpu
from support.devices.interpreter import speed_up
from support.runs import distributed
from support.runs.seeded import weights
from support.runs.shards import shard

SHAPES = [(32, 16), (16, 32), (16, 16)]
OTHERS = [(20, 16), (16,)]
STEPS = 5  # the last one replays numbers that have changed since the recording
# The first step is always eager, and so is one equal step after it, for few interpreted steps.
EQUAL = 1
FIRST = 1 + EQUAL
BAD = LOADED = 3
speed_up()  # in the workers, too
SHORT = {"newton_schulz_steps": 2}
DIRECTIONS = {
    "polar": {"direction": "polar", **SHORT},
    "polar in bfloat16": {"direction": "polar", **SHORT, "stochastic_rounding": True},
    "normuon in 8 bits": {
        "direction": "normuon",
        "state_dtype": "int8",
        "row_blocks": 2,
        **SHORT,
    },
    "dion2": {"direction": "dion2", "rank_fraction": 0.5},
    "nordion2": {"direction": "nordion2", "rank_fraction": 0.5},
    "low_rank": {"direction": "low_rank", "rank_fraction": 0.5},
    "low_rank with hooks": {"direction": "low_rank", "rank_fraction": 0.5, "hooked": True},
}


def change_everything(optimizer, step):
    """Every number that schedules and users change during a run."""
    matrices, rest = optimizer.param_groups
    matrices |= {"lr": 0.02 * (1 - step / 10), "momentum": 0.95 - 0.02 * step}
    matrices |= {"weight_decay": 0.01 * step, "look_ahead": 1.05 + 0.1 * step}
    rest |= {"lr": 1e-3 * (1 - step / 10), "weight_decay": 0.02 * step, "eps": 1e-8 * (step + 1)}
    for group in (matrices, rest):
        group["betas"] = (0.9 - 0.01 * step, 0.95 - 0.01 * step)


def load_a_checkpoint(optimizer, step):
    if step == LOADED:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def gradient(step, i, shape, dtype):
    generator = torch.Generator().manual_seed(100 * step + i)
    G = torch.randn(shape, generator=generator).to(dtype)
    if step == BAD and i == 1:
        G[0, 0] = math.nan
    return G


def trained(options, change, *, new_gradients, capture):
    """Weights, states, and which steps were replayed; hooked: with every hook."""
    torch.manual_seed(0)
    hooked = options.get("hooked", False)
    options = {key: value for key, value in options.items() if key != "hooked"}
    dtype = torch.bfloat16 if options.get("stochastic_rounding") else torch.float32
    X = [nn.Parameter(0.02 * torch.randn(shape).to(dtype)) for shape in SHAPES]
    Y = [nn.Parameter(0.02 * torch.randn(shape).to(dtype)) for shape in OTHERS]
    named = [(str(i), x) for i, x in enumerate(X)]
    groups = [
        {"params": named},
        {"params": [("3", Y[0]), ("4", Y[1])], "algorithm": "adamw", "lr": 1e-3},
    ]
    options = {"look_ahead": 1.05, "replicas": "single", **options}
    optimizer = Dion(groups, capture=capture, **options)
    static = [torch.zeros_like(p) for p in (*X, *Y)]
    captured = []
    clip = QKClip(optimizer, [Attention("0", "2", heads=4, head_dim=8, key_heads=2)])
    if hooked:
        for hook in (RowFloor(), CautiousWeightDecay(), clip):
            optimizer.register_update_hook(hook)

    def memory():
        states = [t for state in optimizer.state.values() for t in state.values()]
        states += clip._observed.values()
        return [p.detach() for p in (*X, *Y)] + [t for t in states if isinstance(t, torch.Tensor)]

    with graphs_on_cpu(memory), mock.patch.object(captures, "EQUAL_STEPS", EQUAL):
        for step in range(STEPS):
            change(optimizer, step)
            for i, (p, place) in enumerate(zip((*X, *Y), static, strict=True)):
                G = gradient(step, i, p.shape, dtype)
                p.grad = G if new_gradients else place.copy_(G)
            clip.observe(0, 50.0 * torch.arange(4) * step)
            optimizer.step()
            captured.append(optimizer.report.captured)
        found = [t.clone() for t in memory()]
    return found, captured


def on_shards(rank, capture):
    """Weights and states of rows sharded over the ranks, and which steps were replayed.

    capture: by rank.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def placed(x):
        return shard(x, ("0",), mesh)

    X = [nn.Parameter(placed(weights(shape))) for shape in SHAPES]
    Y = [nn.Parameter(weights(shape)) for shape in OTHERS]
    groups = [{"params": X}, {"params": Y, "algorithm": "adamw", "lr": 1e-3}]
    optimizer = Dion(groups, direction="polar", look_ahead=1.05, capture=capture[rank], **SHORT)
    captured = []

    def memory():
        states = [t for state in optimizer.state.values() for t in state.values()]
        every = [p.detach() for p in (*X, *Y)] + states
        return [local(t) for t in every if isinstance(t, torch.Tensor)]

    with graphs_on_cpu(memory), mock.patch.object(captures, "EQUAL_STEPS", EQUAL):
        for step in range(STEPS):
            change_everything(optimizer, step)
            for i, p in enumerate((*X, *Y)):
                G = gradient(step, i, p.shape, torch.float32)
                p.grad = placed(G) if p in set(X) else G
            optimizer.step()
            captured.append(optimizer.report.captured)
        found = [t.clone() for t in memory()]
    return found, captured


def test_a_replay_on_shards_has_the_bits_of_a_step_whatever_other_ranks_do():
    eager = distributed.run(2, on_shards, (False, False))
    replayed = distributed.run(2, on_shards, (None, False))
    assert replayed[0][1] == [step >= FIRST for step in range(STEPS)]
    assert not any(replayed[1][1])
    for (wanted, _), (found, _) in zip(eager, replayed, strict=True):
        assert all(map(torch.equal, found, wanted))


def check(options, change, *, new_gradients):
    wanted, eager = trained(options, change, new_gradients=new_gradients, capture=False)
    found, captured = trained(options, change, new_gradients=new_gradients, capture=True)
    assert not any(eager)
    ended = [change is load_a_checkpoint and step >= LOADED for step in range(STEPS)]
    assert captured == [step >= FIRST and not end for step, end in enumerate(ended)]
    for actual, expected in zip(found, wanted, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_replay_has_the_bits_of_a_step_whatever_changes(direction):
    check(DIRECTIONS[direction], change_everything, new_gradients=True)


def test_a_checkpoint_ends_a_recording():
    check(DIRECTIONS["polar"], load_a_checkpoint, new_gradients=False)
