"""Trains the small transformer in some layout, and as whole replicas to compare it with."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from curvadion import CurvaDion, Dion
from support.references.tolerance import Rounding, assert_close, assert_within, worst
from support.runs import distributed, transformer
from support.runs.drifts import drift
from support.runs.scheduled import Watching

# The gate opens after a closed step, at which replicas have drifted, and after an open one, and is
# closed at the end.
STEPS = 5
OPEN_STEPS = (1, 3, 4)
# The same, and each of the three sets of replicas that use the experts has an open step and a
# closed one.
SPARING = {"sparing": True, "steps": 7, "schedule": (1, 5, 6)}


@dataclass(frozen=True)
class Setting:
    """How to train; options: pairs for the optimizer.

    schedule: the steps at which the gate opens; None for all.
    clip: what gradients are clipped to.
    sparing: whether the experts rest on some replicas at some steps.
    """

    schedule: tuple[int, ...] | None = None
    options: tuple[tuple[str, object], ...] = ()
    clip: float | None = None
    sparing: bool = False
    steps: int = STEPS


def train(rank, setup, layout, setting):
    """Weights after the steps; drifts, clipped norms and RMMCs on the way; weights synchronised.

    setup(layout): the model, the optimizer's replicas, this replica's and this reader's number.
    """
    model, replicas, replica, reader = setup(layout)
    return steps_of(model, replicas, replica, [reader], setting)


def train_whole(rank, shards, setting):
    """The same of replicas that are one process each, which reads all its shards' batches."""
    replicas = dist.group.WORLD if dist.get_world_size() > 1 else None
    readers = range(rank * shards, (rank + 1) * shards)
    return steps_of(transformer.build(), replicas, rank, readers, setting)


def steps_of(model, replicas, replica, readers, setting):
    gate = Watching(setting.schedule or range(1, setting.steps + 1))
    optimizer = CurvaDion(
        transformer.groups(model), replicas=replicas, gate=gate, **dict(setting.options)
    )
    seen = []
    for step in range(setting.steps):
        optimizer.zero_grad()
        # All use the experts, the first replica does, nobody does.
        expert = (True, replica == 0, False)[step % 3] if setting.sparing else True
        for reader in readers:
            (transformer.loss_of(model, step, reader, expert) / len(readers)).backward()
        if setting.clip is not None:
            seen.append(clip_(model, setting.clip))
        optimizer.step()
        seen.append(drift(optimizer))
    seen += optimizer.gate.seen
    own = full_weights(model)
    optimizer.synchronize()
    return own, seen, full_weights(model)


def clip_(model, clip):
    if isinstance(model, FullyShardedDataParallel):
        return float(model.clip_grad_norm_(clip))
    return float(full(nn.utils.clip_grad_norm_(model.parameters(), clip)))


def full_weights(model):
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return transformer.weights(model)
    return {name: full(weight) for name, weight in transformer.weights(model).items()}


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_trains_like_whole_replicas(setup, layout, replicas, shards, copies=1, **setting):
    """All ranks of a layout, numbered by replica, shard and copy of the shard's batch."""
    setting = Setting(**setting)
    actual = distributed.run(replicas * shards * copies, train, setup, layout, setting)
    expected = whole(replicas, shards, setting)
    for rank, (own, seen, synchronized) in enumerate(actual):
        own_whole, seen_whole, synchronized_whole = expected[rank // (shards * copies)]
        rounding = transformer.rounding(setting.steps)
        transformer.assert_close(own, own_whole, rounding)
        transformer.assert_close(synchronized, synchronized_whole, rounding)
        for i, (value, wanted) in enumerate(zip(seen, seen_whole, strict=True)):
            if wanted == float("inf"):  # the first signal
                assert value == wanted
                continue
            # Drifts and signals are differences of norms, relative to these.
            scale = max(abs(wanted), 1.0)
            assert_close(value, wanted, rounding, scale=scale, what=f"number {i} seen")


@functools.cache
def whole(replicas, shards, setting):
    return distributed.run(replicas, train_whole, shards, setting)


def assert_trains_like_one_process(setup, layout, readers, copies=1, steps=4):
    actual = distributed.run(readers * copies, train, setup, layout, Setting(steps=steps))
    expected = one_process(readers, steps)
    for own, seen, _ in actual:
        transformer.assert_close(own, expected, transformer.rounding(steps))
        # The drifts: replicas stay equal.
        assert_within(worst(seen[:steps]), Rounding(torch.float32, steps=steps))


@functools.cache
def one_process(readers, steps):
    """Weights after one process has read all batches of all readers."""
    model = transformer.build()
    optimizer = Dion(transformer.groups(model))
    for step in range(steps):
        optimizer.zero_grad()
        sum(transformer.loss_of(model, step, reader) for reader in range(readers)).div(
            readers
        ).backward()
        optimizer.step()
    return transformer.weights(model)
