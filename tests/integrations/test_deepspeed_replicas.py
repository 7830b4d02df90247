"""Replicas of two ranks under every ZeRO stage: where they go, what they hold, what they send."""

from __future__ import annotations

import copy
import importlib.util
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import deepspeed_engines as ds
import distributed
from curvadion import CodedGradients, Dion, FixedPeriod, QuantizedAverage
from curvadion.integrations.deepspeed.partitions import partitions_of
from curvadion.integrations.deepspeed.process_groups import Reaching
from deepspeed_replicas import SIZE, ByHand, by_hand_groups, engine_of
from quantized_reference import Follower, QuantizedReference
from tolerance import assert_within

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]
STEPS = 6
# Of each of DeepSpeed's classes of optimizers, and what changes how gradients or weights lie.
NAMES = [
    "0", "0 bf16", "0 accumulation", "1", "1 BF16_Optimizer", "2 round robin", "2 alignment",
    "2 autocast", "2 accumulation", "2 offload", "3 sub-groups", "3 bf16", "3 offload parameters",
]  # fmt: skip


# -------------------------------------------------------------------- where they go


def trajectories(rank, names, size):
    """Distances from two replicas in the float64 equations, and who holds what; by name."""
    world, found = dist.get_world_size(), {}
    for name in names:
        engine = engine_of(name, ds.SCHEDULE, size)
        covered = ds.coverage(engine) if ds.stage_of(engine) else None
        replicas = world // size
        expected = ds.Expected(0, world, local_lr=ds.SCHEDULE["local_lr"], replicas=replicas)
        reports = ds.train(engine, range(STEPS))
        for step in range(STEPS):
            expected.step(step, step in ds.OPEN_STEPS)
        distances = expected.distances(ds.masters(engine), rank)
        found[name] = distances, [report.gate_open for report in reports], covered
        assert engine.train_batch_size() == world * engine.gradient_accumulation_steps()
        assert engine.global_samples == STEPS * engine.train_batch_size()
    return found


def check_trajectories(names, world, size):
    for found in distributed.run(world, trajectories, names, size):
        for name, (distances, opened, covered) in found.items():
            assert_within(max(distances.values()), ds.ROUNDING, what=(name, distances))
            assert opened == [step in ds.OPEN_STEPS for step in range(STEPS)], name
            if covered is None:
                continue
            counts, right = covered
            assert right, name
            for parameter, count in counts.items():
                wanted = 0 if parameter.startswith("frozen") else 1
                assert count.eq(wanted).all(), (name, parameter)


def test_prescribed_openings_are_those_of_two_replicas():
    check_trajectories(NAMES, 4, SIZE)


def test_replicas_of_three_ranks_and_of_one():
    """Sizes that no number of ranks divides; one rank holds all that it steps on."""
    check_trajectories(["1", "2 round robin", "3"], 6, 3)
    check_trajectories(["1", "2 offload", "3"], 2, 1)


def like_ddp(rank, names):
    """Distances from four ranks of plain DDP with the gate always open."""
    plain = DistributedDataParallel(ds.model(), find_unused_parameters=True)
    groups = by_hand_groups(plain.module)
    optimizer = Dion(groups, ds.LR, rank_fraction=ds.FRACTION, replicas="single")
    for step in range(STEPS):
        optimizer.zero_grad()
        plain(ds.gradients(step, rank, dist.get_world_size())).backward()
        optimizer.step()
    wanted = dict(plain.module.named_parameters())
    found = {}
    for name in names:
        engine = engine_of(name, {})
        ds.train(engine, range(STEPS))
        found[name] = max(
            ds.relative_error(W, wanted[n].detach()) for n, W in ds.masters(engine).items()
        )
    return found


def test_a_gate_that_is_always_open_is_plain_ddp():
    for found in distributed.run(4, like_ddp, ["0", "0 bf16", "1", "2 bf16", "2", "3", "3 bf16"]):
        assert_within(max(found.values()), ds.ROUNDING, what=found)


SYNCS = {
    "codes": {"gate": FixedPeriod(3), "sync": QuantizedAverage(bits=2, spectrum_decay=0.8)},
    "fragments": {"gate": FixedPeriod(2), "sync": QuantizedAverage(bits=3, fragments=2)},
    "delay": {"gate": FixedPeriod(3), "sync": QuantizedAverage(bits=3, fragments=2, delay=2)},
    "budget": {"wire_budget": 0.8, "sync": QuantizedAverage(bits=1, delay=1)},
    "low rank": {"gate": FixedPeriod(3), "local_step": "dion", "direction": "polar"},
    "coded gradients": {"sync": CodedGradients(bits=2)},
}
JSON = {
    "codes": {
        "gate": {"type": "period", "period": 3},
        "sync": {"type": "quantized_average", "bits": 2, "spectrum_decay": 0.8},
    },
    "fragments": {
        "gate": {"type": "period", "period": 2},
        "sync": {"type": "quantized_average", "bits": 3, "fragments": 2},
    },
    "delay": {
        "gate": {"type": "period", "period": 3},
        "sync": {"type": "quantized_average", "bits": 3, "fragments": 2},
        "delay": 2,
    },
    "budget": {
        "wire_budget": 0.8, "delay": 1, "sync": {"type": "quantized_average", "bits": 1},
    },
    "low rank": {
        "gate": {"type": "period", "period": 3}, "local_step": "dion", "direction": "polar",
    },
    "coded gradients": {"sync": {"type": "coded_gradients", "bits": 2}},
}  # fmt: skip
LONG, FEW = 11, 8
SPOILED = {(4, 1), (5, 2), (7, 0)}  # of the first FEW steps, the second at an opening


def by_hand(rank, cases):
    """What differs from the optimizer made in code, and drifts, openings, skips; by case."""
    found = {}
    for name, how, spoil in cases:
        engine = engine_of(name, JSON[how])
        other = ByHand(engine, **SYNCS[how])
        ours, theirs = engine.basic_optimizer, other.optimizer
        assert repr(ours.sync) == repr(theirs.sync) and repr(ours.gate) == repr(theirs.gate)
        unlike, told = set(), []
        for step in range(FEW):
            (report,) = ds.train(engine, [step], spoil=spoil)
            other.step(step, spoil)
            assert (report.gate_open, report.skipped) == (
                theirs.report.gate_open, theirs.report.skipped,
            )  # fmt: skip
            if step in (5, FEW - 1):
                unlike |= other.unlike(ds.masters(engine))
            told.append((report.gate_open, report.skipped))
        drifts = [ours.drift()]
        assert drifts[0] == theirs.drift()
        for each in (ours, theirs):
            each.synchronize()
        drifts.append(ours.drift())
        unlike |= other.unlike(ds.masters(engine))
        found[name, how] = unlike, told, drifts, ds.masters(engine)
    return found


CASES = [
    ("1", "codes", ()),
    ("2", "fragments", SPOILED),
    ("2 offload", "delay", ()),
    ("1 BF16_Optimizer", "delay", SPOILED),
    ("3 sub-groups", "codes", SPOILED),
    ("3 bf16", "low rank", SPOILED),
    ("3 offload", "budget", ()),
    ("2", "coded gradients", SPOILED),
    ("3 bf16", "coded gradients", ()),
]


def test_every_sync_goes_where_flat_shards_declared_in_code_go():
    """Bitwise, with and without NaNs on single ranks, and what all agree on in the end."""
    first, *others = distributed.run(4, by_hand, CASES)
    for name, how, spoil in CASES:
        unlike, told, (apart, together), weights = first[name, how]
        for found in others:
            assert all(torch.equal(W, found[name, how][3][n]) for n, W in weights.items())
            unlike |= found[name, how][0]
        assert not unlike, (name, how)
        assert (apart > 0) == (how != "coded gradients") and together == 0, (name, how)
        closed = FEW - sum(opened for opened, _ in told)
        assert closed == len(spoil) if how == "coded gradients" else 0 < closed < FEW, (name, how)
        skipped = any(s for each in (first, *others) for _, s in each[name, how][1])
        assert skipped == bool(spoil), (name, how)


# -------------------------------------------------------------------- codes, in float64

IN_CODES = {
    "gate": {"type": "period", "period": 3},
    "sync": {
        "type": "quantized_average", "bits": 4, "fragments": 2, "residual_dtype": "float32",
    },
    "direction": "low_rank", "rank_fraction": 1.0, "right_factor": "qr", "nesterov": 2.0,
    "weight_decay": 0.0,
}  # fmt: skip
NAME_OF = {"momentum": "M", "Q": "Q", "anchor": "anchor", "exp_avg": "m", "exp_avg_sq": "v"}


def held_of(engine):
    """Of each range that this rank holds, where it lies, its weights and its state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # replicas are apart
        saved = copy.deepcopy(engine.basic_optimizer.state_dict())
    names = [n for group in saved["param_groups"] for n in group["param_names"]]
    places = [i for group in saved["param_groups"] for i in group["params"]]
    states = {n: saved["state"][i] for n, i in zip(names, places, strict=True)}
    found = {}
    for partition in partitions_of(engine.optimizer, Reaching()):
        for r in partition.ranges:
            name, length = engine.param_names[r.parameter], r.stop - r.start
            X = partition.flat[r.offset : r.offset + length].detach().clone()
            found[name] = r.start, r.stop, X, states[name]
    return found


def steps_in_codes(rank, names):
    found = {}
    for name in names:
        engine = engine_of(name, IN_CODES)
        found[name] = []
        for step in range(LONG):
            (report,) = ds.train(engine, [step])
            found[name].append((report.gate_open, held_of(engine)))
    return found


def of_replica(ranks, start):
    """What the ranks of a replica hold together, as the reference takes it."""
    whole = {}
    for name, X0 in start.items():
        pieces = [held[name] for held in ranks]
        state = {"X": filled(X0, [(a, b, X) for a, b, X, _ in pieces])}
        for key, own in NAME_OF.items():
            # A range of a matrix has the whole of the right factor, which its shards share.
            if key in pieces[0][3] and key != "Q":
                state[own] = filled(X0, [(a, b, held[key]) for a, b, _, held in pieces])
        if "step" in pieces[0][3]:
            state["t"] = float(pieces[0][3]["step"])
        state["residual"] = [held["residual"].flatten() for *_, held in pieces]
        whole[name] = state
    return whole


def filled(like, pieces):
    full = torch.full((like.numel(),), torch.nan)
    for start, stop, piece in pieces:
        full[start:stop] = piece.flatten()
    return full.view(like.shape)


def test_codes_of_replicas_follow_a_float64_simulation():
    """It goes on from what the engines hold after openings, where codes may fall on either side."""
    each = distributed.run(4, steps_in_codes, ["1", "3 sub-groups"])
    start = {n: p.detach() for n, p in ds.model().named_parameters() if p.requires_grad}
    for name in each[0]:
        shards = [
            {n: torch.arange(a, b) for n, (a, b, *_) in each[rank][name][0][1].items()}
            for rank in range(SIZE)
        ]
        vectors = {n: "adamw" for n, X in start.items() if X.dim() == 1}
        reference = QuantizedReference(
            start, 2, bits=4, fragments=2, algorithms=vectors, shards=shards, lr=ds.LR, wd=0.0,
            nesterov=2.0, scheduled=True,
        )  # fmt: skip
        for vector in vectors:
            reference.leaves[vector].lr = ds.ELEMENTWISE_LR
        follower = Follower(reference, torch.float32)
        for step in range(LONG):
            opened = each[0][name][step][0]
            assert opened == (step % 3 == 2)
            held = [
                of_replica([each[rank][name][step][1] for rank in (first, first + 1)], start)
                for first in (0, SIZE)
            ]
            G = [flat_names(ds.replica_gradients(step, i, SIZE, 4)) for i in range(2)]
            assert not follower.step(G, opened, held, feed_back=opened), (name, step)
        assert follower.compared > 500, follower.compared


def flat_names(G):
    return {f"{owner}.{kind}": t for owner, own in G.items() for kind, t in own.items()}


# -------------------------------------------------------------------- what stays DeepSpeed's


class Numbers(torch.utils.data.Dataset):
    """Each of 24 samples is its number."""

    def __len__(self):
        return 24

    def __getitem__(self, place):
        return torch.tensor(float(place))


def loaded(rank):
    """The batch settings, and the samples that this rank reads."""
    batches = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3}
    engine = engine_of("3", {}, **batches)
    loader = engine.deepspeed_io(Numbers(), pin_memory=False, num_local_io_workers=0)
    read = [int(x) for batch in loader for x in batch]
    return engine.gradient_accumulation_steps(), engine.train_batch_size(), read


def test_batches_and_data_loaders_count_all_ranks():
    each = distributed.run(4, loaded)
    assert all((accumulation, batch) == (2, 24) for accumulation, batch, _ in each)
    assert sorted(sample for *_, read in each for sample in read) == list(range(24))


class Recomputed(ds.Model):
    """Computes its activations again in the backward."""

    def forward(self, G, skip=()):
        return checkpoint(super().forward, G, use_reentrant=False)


def recomputed(rank, names):
    """Whether weights are the same bits where activations are computed twice."""
    found = {}
    for name in names:
        weights = []
        for kind in (ds.Model, Recomputed):
            of = kind()
            of.load_state_dict(ds.model().state_dict())
            engine = engine_of(name, JSON["codes"], of=of)
            ds.train(engine, range(4))
            weights.append(ds.masters(engine))
        found[name] = all(torch.equal(W, weights[1][n]) for n, W in weights[0].items())
    return found


def test_activation_checkpointing_changes_nothing():
    for found in distributed.run(4, recomputed, ["2", "3"]):
        assert all(found.values()), found
