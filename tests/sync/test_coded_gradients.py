"""Replicas that share coded gradients take one step, which a float64 reference takes too.

The reference starts each step from what the replicas hold, because a number on an edge between two
codes may fall on either side. Means are compared with those that its own codes give, up to codes
that may flip. Weights, momenta and moments are compared with a step along the replicas' own mean.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import distributed
import fsdp_training
import tensor_parallel_training
import transformer
from curvadion import (
    RMMC,
    AlwaysOpen,
    ByteBudget,
    CodedGradients,
    CurvaDion,
    FixedPeriod,
    QuantizedAverage,
    WireMeter,
)
from curvadion.layout.dtensor import local
from curvadion.sync.coded_mean import message_bytes
from curvadion.sync.meeting import MEETING_BYTES
from polar_reference import polar
from quantized_reference import IN_CODES, NEWTON_SCHULZ, PRODUCTS, blocks_of, mean_in_codes
from reference import initial_q, positive_qr
from seeded import seeded
from tolerance import Rounding, assert_close, assert_within

pytestmark = pytest.mark.numeric
STEPS = 6
# Tall, wide, square, prime, one row; two that fill several blocks.
SHAPES = {
    **{str(i): s for i, s in enumerate([(24, 10), (9, 30), (16, 16), (13, 7), (1, 12), (37, 23)])},
    "bias": (11,),
    "table": (20, 15),
    "signs": (7,),
}
ALGORITHMS = {"bias": "adamw", "table": "adamw", "signs": "lion"}
MISSING = {(2, 0, "4"), (3, 1, "bias"), (4, 0, "2")}
LR, MU, WD, LOOK_AHEAD, BETAS, EPS = 0.03, 0.95, 0.1, 2.0, (0.9, 0.95), 1e-8


def random(*key, shape):
    return torch.randn(shape, generator=seeded(*key))


def gradient(name, step, rank):
    """Half of it common to the replicas; None where it is missing."""
    if (step, rank, name) in MISSING:
        return None
    shape = SHAPES[name]
    return random("all", name, step, shape=shape) + random("own", name, step, rank, shape=shape)


def start(dtype):
    return {n: nn.Parameter(0.2 * random("X", n, shape=s).to(dtype)) for n, s in SHAPES.items()}


def optimizer_of(X, sync=None, **options):
    groups = [{"params": [(n, x) for n, x in X.items() if n not in ALGORITHMS]}]
    groups += [{"params": [(n, X[n])], "algorithm": a} for n, a in ALGORITHMS.items() if n in X]
    known = {"lr": LR, "momentum": MU, "weight_decay": WD, "newton_schulz_steps": 14, **options}
    return CurvaDion(groups, replicas=dist.group.WORLD, sync=sync or CodedGradients(), **known)


def give_gradients(X, step, rank):
    for name, x in X.items():
        G = gradient(name, step, rank)
        x.grad = None if G is None else G.to(x.dtype)


def held(X, optimizer):
    """By name what a replica holds: X, its state, and G, the mean that it stepped with."""
    return {
        name: {
            "X": x.detach().clone(),
            "G": None if x.grad is None else x.grad.clone(),
            **{k: v.clone() for k, v in optimizer.state[x].items() if isinstance(v, torch.Tensor)},
        }
        for name, x in X.items()
    }


def train(rank, dtype, options, bits, steps=STEPS):
    X = start(dtype)
    optimizer = optimizer_of(X, CodedGradients(bits, residual_dtype="float32"), **options)
    found = []
    for step in range(1, steps + 1):
        give_gradients(X, step, rank)
        optimizer.step()
        found.append(held(X, optimizer))
    return found


# ------------------------------------------------------------------------------- the reference


@dataclass
class Leaf:
    """What all replicas hold of a parameter, in float64."""

    name: str
    X: torch.Tensor
    state: dict[str, torch.Tensor]

    @classmethod
    def of(cls, name, held, direction):
        """As held before a step; held: None before the first."""
        if held is not None:
            state = {k: v.double() for k, v in held.items() if k not in ("X", "G")}
            return cls(name, held["X"].double(), state)
        X = 0.2 * random("X", name, shape=SHAPES[name]).double()
        zero = torch.zeros_like(X)
        state = {"momentum": zero, "exp_avg": zero, "exp_avg_sq": zero, "step": zero.sum()}
        if name not in ALGORITHMS and direction == "low_rank":
            state["Q"] = initial_q(*X.shape, min(X.shape))
        return cls(name, X, state)

    def step(self, G):
        if self.name in ALGORITHMS:
            getattr(self, f"_{ALGORITHMS[self.name]}")(G)
            return
        m, n = self.X.shape
        flip = m < n
        M = self.state["momentum"] * (1.0 if "Q" in self.state else MU) + G
        B = M + LOOK_AHEAD * G
        if "Q" not in self.state:
            U = polar(B)
        else:
            B = B.mT if flip else B
            P = positive_qr(B @ self.state["Q"])
            R = B.mT @ P
            Q = self.state["Q"] = positive_qr(R)
            U, kept = ((y.mT if flip else y) for y in (P @ Q.mT, P @ R.mT))
            M = M - (1 - MU) * (kept - LOOK_AHEAD * G)
        self.state["momentum"] = M
        self.X = (1 - LR * WD) * self.X - LR * math.sqrt(m / n) * U

    def _adamw(self, G):
        s = self.state
        s["step"] = s["step"] + 1
        s["exp_avg"] = BETAS[0] * s["exp_avg"] + (1 - BETAS[0]) * G
        s["exp_avg_sq"] = BETAS[1] * s["exp_avg_sq"] + (1 - BETAS[1]) * G.square()
        m, v = (
            s[k] / (1 - b ** s["step"])
            for k, b in zip(("exp_avg", "exp_avg_sq"), BETAS, strict=True)
        )
        self.X = (1 - LR * WD) * self.X - LR * m / (v.sqrt() + EPS)

    def _lion(self, G):
        m = self.state["exp_avg"]
        self.X = (1 - LR * WD) * self.X - LR * (BETAS[0] * m + (1 - BETAS[0]) * G).sign()
        self.state["exp_avg"] = BETAS[1] * m + (1 - BETAS[1]) * G


def sent(step, rank, before):
    """The gradients with what codes have lost, in blocks."""
    blocks = []
    for name in SHAPES:
        G = gradient(name, step, rank)
        G = torch.zeros(SHAPES[name]) if G is None else G
        lost = torch.zeros(G.shape) if before is None else before[rank][name]["residual"]
        blocks.append(blocks_of((G.double() + lost.double()).flatten()))
    return torch.cat(blocks)


def from_blocks(blocks):
    """By name, without the numbers that fill up last blocks."""
    sizes = [math.prod(shape) for shape in SHAPES.values()]
    each = blocks.split([-(-size // 256) for size in sizes])
    return {
        name: rows.flatten()[:size].view(shape)
        for rows, size, (name, shape) in zip(each, sizes, SHAPES.items(), strict=True)
    }


def check_step(step, before, after, bits, direction, dtype):
    """Replicas went where the reference goes; before, after: held by each."""
    ranks = len(after)
    z = [sent(step, rank, before) for rank in range(ranks)]
    received, codes = mean_in_codes(z, bits)
    mean, *lost = map(from_blocks, received)
    flips = sum(code.largest_flip(IN_CODES.allowed) for code in codes)
    for name in SHAPES:
        leaf = Leaf.of(name, None if before is None else before[0][name], direction)
        old, expected = leaf.X, mean[name]
        for rank, (each, loss) in enumerate(zip(after, lost, strict=True)):
            G, what = each[name]["G"], (step, name, rank)
            if G is not None:
                error = float((G - expected).norm()) - flips
                assert_within(max(0.0, error) / float(expected.norm()), IN_CODES, what=what)
            error = float((each[name]["residual"] - loss[name]).norm()) - (ranks + 2) * flips
            assert_within(max(0.0, error) / float(z[rank].norm()), IN_CODES, what=what)
        real = next(each[name]["G"] for each in after if each[name]["G"] is not None)
        leaf.step(real.double())
        # Directions amplify roundings; low-rank ones are fed back to the momentum.
        moved = float((leaf.X - old).norm() / old.norm())
        amplified = {"Q": NEWTON_SCHULZ, "X": 1 + NEWTON_SCHULZ * moved}
        amplified |= {"momentum": NEWTON_SCHULZ} if direction == "low_rank" else {}
        for rank, each in enumerate(after):
            pairs = {"X": leaf.X, **{k: v for k, v in leaf.state.items() if k in each[name]}}
            for key in ("X", "momentum", "exp_avg", "exp_avg_sq", "Q"):
                if key in pairs and pairs[key].any():
                    condition = amplified.get(key, 1.0)
                    rounding = Rounding(dtype, max(leaf.X.shape), condition, PRODUCTS)
                    assert_close(
                        each[name][key], pairs[key], rounding, what=(step, name, rank, key)
                    )


@pytest.mark.parametrize(
    ("ranks", "bits", "dtype", "direction"),
    [
        (4, 2, torch.float32, "polar"),
        (2, 1, torch.float64, "polar"),
        (2, 4, torch.float64, "low_rank"),
    ],
)
@pytest.mark.chosen_inputs
def test_replicas_take_the_references_trajectory(ranks, bits, dtype, direction):
    options = {"direction": direction}
    replicas = distributed.run(ranks, train, dtype, options, bits)
    for step in range(1, STEPS + 1):
        before = None if step == 1 else [replica[step - 2] for replica in replicas]
        after = [replica[step - 1] for replica in replicas]
        check_step(step, before, after, bits, direction, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_that_codes_lose_is_lost(dtype):
    """Means and what replicas still hold add up to the gradients; all replicas are the same."""
    ranks = 2
    replicas = distributed.run(ranks, train, dtype, {}, 2)
    for name in set(SHAPES) - {"2", "4", "bias"}:
        given = sum(
            gradient(name, step, rank).to(dtype).double()
            for step in range(1, STEPS + 1)
            for rank in range(ranks)
        )
        taken = sum(step[name]["G"].double() for step in replicas[0])
        owed = sum(replica[-1][name]["residual"].double() for replica in replicas)
        if dtype == torch.float32:
            assert_close(taken * ranks + owed, given, Rounding(dtype, terms=STEPS))
        else:  # each mean is rounded, by less than 2^-9 of each number
            assert float((taken * ranks + owed - given).norm()) < 1e-2 * float(given.norm())
        assert owed.norm() > 0.05 * given.norm(), name
    for replica in replicas[1:]:
        for step, first in zip(replica, replicas[0], strict=True):
            for name in SHAPES:
                for key in set(first[name]) - {"G", "residual"}:
                    assert step[name][key].equal(first[name][key]), (name, key)


def train_without(rank):
    """What is held before and after a step with a NaN on the last rank."""
    X = start(torch.float32)
    optimizer = optimizer_of(X)
    for step in (1, 5):
        give_gradients(X, step, rank)
        optimizer.step()
    before = held(X, optimizer)
    give_gradients(X, 6, rank)
    if rank == 1:
        X["0"].grad[3, 4] = float("nan")
    optimizer.step()
    skipped = optimizer.report.skipped
    after = held(X, optimizer)
    give_gradients(X, 5, rank)
    optimizer.step()
    return before, after, skipped, optimizer.report.skipped, optimizer.drift()


def test_a_nonfinite_gradient_of_one_replica_is_a_step_left_out_on_all():
    for before, after, skipped, later, drift in distributed.run(2, train_without):
        assert (skipped, later, drift) == (True, False, 0.0)
        for name in SHAPES:
            for key in set(before[name]) - {"G"}:
                assert before[name][key].equal(after[name][key]), (name, key)


# ------------------------------------------------------------------------------- shards


def train_sharded(rank, setup, layout, bits):
    """By step: drift, bytes of codes sent and expected, how far means are from exact ones."""
    model, replicas, _, reader = setup(layout)
    optimizer = CurvaDion(transformer.groups(model), replicas=replicas, sync=CodedGradients(bits))
    group = replicas.get_group()
    found = []
    for step in range(3):
        optimizer.zero_grad()
        transformer.loss_of(model, step, reader).backward()
        X = [x for g in optimizer.param_groups for x in g["params"] if x.grad is not None]
        for x in X:
            if isinstance(x.grad, DTensor):
                x.grad = x.grad.redistribute(placements=x.placements)
        exact = [local(x.grad).double().clone() for x in X]
        for mean in exact:
            dist.all_reduce(mean, group=group)
        lost = [local(optimizer.state[x]["residual"]) if optimizer.state else 0 for x in X]
        for mean, e in zip(exact, lost, strict=True):
            owed = torch.zeros_like(mean) + e
            dist.all_reduce(owed, group=group)
            mean.add_(owed).div_(group.size())
        with WireMeter() as meter:
            optimizer.step()
        codes = sum(
            n.sent
            for (name, kind), n in meter.records.items()
            if name == group.group_name and "all_to" in kind
        )
        errors = [
            float((local(x.grad) - mean).norm() / mean.norm().clamp_min(1e-9))
            for x, mean in zip(X, exact, strict=True)
            if mean.numel()
        ]
        expected = message_bytes((local(x).numel() for x in X), bits)
        found.append((optimizer.drift(), codes, expected, max(errors, default=0.0)))
    return found


@pytest.mark.parametrize(
    ("setup", "layout"),
    [
        (fsdp_training.setup, "hsdp 2x2"),
        (fsdp_training.setup, "FSDP1, replicas outside"),
        (tensor_parallel_training.setup, "dp x tp"),
    ],
    ids=["hsdp", "FSDP1", "dp x tp"],
)
@pytest.mark.chosen_inputs
def test_shards_share_means_with_their_like(setup, layout):
    ranks = distributed.run(4, train_sharded, setup, layout, 8)
    for step in zip(*ranks, strict=True):
        assert all(drift == 0 for drift, *_ in step)
        assert sum(codes for _, codes, _, _ in step) == sum(expected for _, _, expected, _ in step)
        assert max(error for *_, error in step) < 0.03


def bits_of_shards(rank, setup, layout, budget):
    """The bits that are chosen, and what a step sends between replicas, of dense gradients."""
    model, replicas, _, reader = setup(layout)
    optimizer = CurvaDion(
        transformer.groups(model), replicas=replicas, wire_budget=budget, sync=CodedGradients()
    )
    for step in range(2):
        optimizer.zero_grad()
        transformer.loss_of(model, step, reader).backward()
        with WireMeter() as meter:
            optimizer.step()
    group = replicas.get_group()
    sent = sum(n.sent for (name, _), n in meter.records.items() if name == group.group_name)
    return optimizer.sync.bits, sent, optimizer.gate.open_cost


def test_a_budget_chooses_bits_that_shards_can_pay():
    whole = sum(x.numel() for x in transformer.build().parameters())
    for budget, bits in ((0.3, 2), (0.45, 3)):
        ranks = distributed.run(4, bits_of_shards, fsdp_training.setup, "hsdp 2x2", budget)
        assert {chosen for chosen, *_ in ranks} == {bits}
        sent = sum(each for _, each, _ in ranks) / 2  # by a replica
        assert sent / (4 * whole) == pytest.approx(ranks[0][2], rel=0.02)
        assert ranks[0][2] <= budget


# ------------------------------------------------------------------------------- bytes


def spend(rank, options):
    X = start(torch.float32)
    optimizer = optimizer_of(X, **options)
    sent = []
    for step in (1, 5, 6, 1, 5):
        give_gradients(X, step, rank)
        with WireMeter() as meter:
            optimizer.step()
        sent.append(meter.total_sent)
        assert optimizer.report.gate_open
    return sent, optimizer.sync.bits, optimizer.param_groups[0]["look_ahead"], repr(optimizer.gate)


@pytest.mark.parametrize(
    ("options", "bits"),
    [({}, 3), ({"wire_budget": 0.5}, 8), ({"wire_budget": 0.2}, 3)],
)
def test_a_step_sends_the_codes_and_what_replicas_agree_on(options, bits):
    sizes = [math.prod(shape) for shape in SHAPES.values()]
    for sent, chosen, look_ahead, gate in distributed.run(2, spend, options):
        assert (chosen, look_ahead) == (bits, 2.0)
        assert "AlwaysOpen" in gate or "wire_budget" in options
        # The first steps also compare the replicas.
        assert sent[-1] == message_bytes(sizes, bits) + MEETING_BYTES
        if "wire_budget" in options:
            assert sent[-1] <= options["wire_budget"] * 4 * sum(sizes)


# ------------------------------------------------------------------------------- checkpoints


def resume(rank, how):
    """Weights of a run in one piece, and of one that stops and goes on; both end equal."""
    whole, X = start(torch.float32), start(torch.float32)
    optimizers = [optimizer_of(x) for x in (whole, X)]
    for step in (1, 5):
        for x, optimizer in zip((whole, X), optimizers, strict=True):
            give_gradients(x, step, rank)
            optimizer.step()
    if how == "file":
        file = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each rank saves its own
            torch.save(optimizers[1].state_dict(), file)
        optimizers[1] = optimizer_of(X)
        for _ in range(2):
            file.seek(0)
            optimizers[1].load_state_dict(torch.load(file, weights_only=True))
    else:
        X, optimizers[1] = pickle.loads(pickle.dumps((X, optimizers[1])))
    sent = []
    for step in (6, 1):
        for x, optimizer in zip((whole, X), optimizers, strict=True):
            give_gradients(x, step, rank)
            with WireMeter() as meter:
                optimizer.step()
            sent.append(meter.total_sent)
    return all(whole[name].equal(X[name]) for name in SHAPES), sent


@pytest.mark.parametrize("how", ["file", "pickle"])
def test_a_run_goes_on_bitwise(how):
    for equal, sent in distributed.run(2, resume, how):
        assert equal
        assert len(set(sent[2:])) == 1


def synchronise(rank):
    """What a run holds before and after an exact synchronisation in its middle."""
    X = start(torch.float32)
    optimizer = optimizer_of(X, CodedGradients(2, residual_dtype="float32"))
    for step in (1, 5):
        give_gradients(X, step, rank)
        optimizer.step()
    before = held(X, optimizer)
    with WireMeter() as meter:
        optimizer.synchronize()
    optimizer.synchronize(exact=True)
    return before, held(X, optimizer), meter.total_sent


def test_an_exact_synchronisation_keeps_what_codes_owe():
    ranks = distributed.run(2, synchronise)
    for before, after, sent in ranks:
        assert sent == 0  # weights agree anyway
        for name in SHAPES:
            assert before[name]["X"].equal(after[name]["X"])
            mean = sum(r[0][name]["residual"] for r in ranks) / 2
            assert mean.norm() > 0
            assert_close(after[name]["residual"], mean, Rounding(torch.float32))


def load_drifted(rank):
    """Drifts after loading what each replica saved while it had drifted, and after going on."""
    X = start(torch.float32)
    optimizer = optimizer_of(X, QuantizedAverage(2), gate=FixedPeriod(3))
    for step in (1, 5):
        give_gradients(X, step, rank)
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each rank loads its own
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = optimizer_of(X)
        optimizer.load_state_dict(saved)
    drifts = [(optimizer.drift(), optimizer.drifted)]
    give_gradients(X, 6, rank)
    optimizer.step()
    return [*drifts, (optimizer.drift(), optimizer.drifted)], held(X, optimizer)


def test_it_synchronises_what_another_kind_let_drift():
    (first, one), (_, other) = distributed.run(2, load_drifted)
    (before, drifted), (after, still_drifted) = first
    assert before > 0 and drifted and after == 0 and not still_drifted
    for name in SHAPES:
        for key in set(one[name]) - {"G", "residual"}:
            assert one[name][key].equal(other[name][key]), (name, key)


# ------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "gate",
    [RMMC(0.3), FixedPeriod(2), ByteBudget(0.5, by="rmmc")],
    ids=["RMMC", "FixedPeriod", "by rmmc"],
)
def test_a_gate_that_may_close_is_refused(gate):
    with pytest.raises(ValueError, match=r"gate=.* may close.*every step: pass gate=AlwaysOpen"):
        CurvaDion([nn.Parameter(torch.ones(3, 2))], gate=gate, sync=CodedGradients())
    with pytest.raises(ValueError, match=r"gate=RMMC.* may close"):
        CurvaDion([nn.Parameter(torch.ones(3, 2))], threshold=0.1, sync=CodedGradients())


def test_a_budget_below_every_step_is_refused():
    X = nn.Parameter(torch.ones(64, 64))
    CurvaDion([X], wire_budget=0.07, sync=CodedGradients())
    with pytest.raises(ValueError, match=r"wire_budget=0.06 is less than sync=CodedGradients\(bi"):
        CurvaDion([X], wire_budget=0.06, sync=CodedGradients())
    optimizer = CurvaDion([X], wire_budget=0.07, sync=CodedGradients())
    optimizer.gate = ByteBudget(0.03)
    X.grad = torch.ones_like(X)
    with pytest.raises(ValueError, match=r"wire_budget=0.03 is less .* \(6.*larger budget, fewer"):
        optimizer.step()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"bits": 5}, ValueError),
        ({"bits": 2.0}, TypeError),
        ({"residual_dtype": "float16"}, ValueError),
        ({"residual_dtype": torch.float64}, ValueError),
    ],
)
def test_arguments_are_checked(arguments, error):
    [(key, _)] = arguments.items()
    with pytest.raises(error, match=key):
        CodedGradients(**arguments)


def test_one_replica_takes_its_own_gradients():
    X, Y = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(6, 4))
    coded = CurvaDion([X], sync=CodedGradients(1))
    dense = CurvaDion([Y], gate=AlwaysOpen(), direction="polar", rank_fraction=1.0, look_ahead=2.0)
    for step in range(3):
        X.grad, Y.grad = (random("one", step, shape=(6, 4)) for _ in range(2))
        coded.step()
        dense.step()
    assert X.equal(Y)
    assert not coded.state[X]["residual"].any()


def expanded(rank):
    """Weights after a step whose gradient is one row for all, in one replica's memory too."""
    X = nn.Parameter(torch.ones(24, 20))
    optimizer = CurvaDion([X], replicas=dist.group.WORLD, sync=CodedGradients(8))
    for step in range(2):
        row = random("row", step, rank, shape=(1, 20)).expand(24, 20)
        X.grad = row if rank == 0 else row.clone()
        optimizer.step()
    return X.detach()


def test_a_gradient_may_repeat_its_memory():
    first, other = distributed.run(2, expanded)
    assert first.equal(other)
