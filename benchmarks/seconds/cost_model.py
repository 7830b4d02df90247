"""A model of the bytes of an average step, and of its seconds over a given link.

A step consists of work (forward, backward and the optimizer's products) and of communication. Each
collective takes sequential rounds of messages, and time to send its bytes:

    seconds = work + max(0, communication - hidden)
    communication = sum over collectives of  rounds * latency + sent / bandwidth

DDP hides communication behind the backward pass. With a delay of d steps and an opening at every
p-th step, communication hides behind d of the p steps. Nothing else is hidden.

Rounds and bytes are those of a ring: an all-reduce of b bytes over n ranks takes 2 (n - 1) rounds
and sends 2 (n - 1) / n b; any other collective takes half of both. ``Cost`` holds the factors by
which an implementation differs from a ring.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import curvadion
from benchmarks.common.model_shapes import Model, Shape
from curvadion.agreement.meeting import MEETING_BYTES, WORDS_BYTES
from curvadion.comm.collectives import chunks
from curvadion.layout.matrix import MatrixLayout
from curvadion.ops.code_format import Bits
from curvadion.plan.plan import batches_of_sizes, most_in_a_batch
from curvadion.sync.coded_mean import bits_of_weights, message_bytes

FLOAT = 4
DDP_BUCKET = 25 * 1024 * 1024
BACKWARD = 2 / 3  # of a step's compute: twice the products of the forward pass


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind at an average step, in the wire meter's terms.

    Attributes:
        kind: "all_reduce", "all_to_all", ...
        calls: their number; ``bytes``: their total payload.
    """

    kind: str
    calls: float
    bytes: float

    def times(self, factor: float) -> Traffic:
        """The traffic scaled by ``factor``."""
        return replace(self, calls=factor * self.calls, bytes=factor * self.bytes)

    def rounds(self, ranks: int) -> float:
        """Sequential messages."""
        return self.calls * (ranks - 1) * _passes(self.kind)

    def sent(self, ranks: int) -> float:
        """Bytes that a rank sends, on average over the ranks."""
        return self.bytes * (ranks - 1) / ranks * _passes(self.kind)


def _passes(kind: str) -> int:
    return 2 if kind == "all_reduce" else 1


def total(traffic: Iterable[Traffic]) -> list[Traffic]:
    """One entry per kind."""
    kinds: dict[str, Traffic] = {}
    for t in traffic:
        known = kinds.get(t.kind, Traffic(t.kind, 0, 0))
        kinds[t.kind] = Traffic(t.kind, known.calls + t.calls, known.bytes + t.bytes)
    return list(kinds.values())


# ---------------------------------------------------------------- seconds


@dataclass(frozen=True)
class Link:
    """The link between any two replicas.

    Attributes:
        bandwidth: bits per second that a replica can send, and receive at the same time.
        latency: seconds until a small message arrives.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Cost:
    """Rounds and bytes of a collective, as multiples of a ring's."""

    rounds: float = 1.0
    bytes: float = 1.0


def collective_seconds(traffic: Traffic, link: Link, ranks: int, cost: Cost = Cost()) -> float:
    """Seconds that the collectives take one after another.

    Args:
        traffic: the collectives, all of one kind.
        link: between any two ranks.
        ranks: how many.
        cost: of the implementation, as multiples of a ring's.
    """
    waiting = cost.rounds * traffic.rounds(ranks) * link.latency
    return waiting + cost.bytes * traffic.sent(ranks) * 8 / link.bandwidth


def step_seconds(
    compute: float,
    traffic: Iterable[Traffic],
    link: Link,
    ranks: int,
    *,
    optimizer: float = 0.0,
    overlap: float = 0.0,
    beside: float = 0.0,
    costs: Mapping[str, Cost] | None = None,
) -> float:
    """Seconds of an average step.

    Args:
        compute: seconds of forward and backward.
        traffic: collectives of the step.
        link: between replicas.
        ranks: number of replicas.
        optimizer: seconds of the optimizer's products.
        overlap: share of the backward pass that can hide communication.
        beside: share of whole steps that can hide communication, from :func:`beside_steps`.
        costs: by kind of collective; missing kinds cost as much as a ring's.
    """
    known, work = costs or {}, compute + optimizer
    needed = sum(collective_seconds(t, link, ranks, known.get(t.kind, Cost())) for t in traffic)
    return work + max(0.0, needed - overlap * BACKWARD * compute - beside * work)


def delay_within(period: float) -> int:
    """The longest delay that ends before the next opening: one step less than the period.

    period: mean steps between openings; a fraction means that they alternate between two lengths.
    """
    return math.ceil(period) - 1


def beside_steps(delay: int, period: float) -> float:
    """The share of steps during which exchanges run: ``delay`` of ``period``."""
    return min(1.0, delay / period)


def compute_seconds(parameters: int, tokens: int, flops_per_second: float) -> float:
    """Forward and backward: 6 floating-point operations per parameter and token."""
    return 6 * parameters * tokens / flops_per_second


# ---------------------------------------------------------------- the optimizer's products

TILE = 128  # symmetric products skip the tiles above the diagonal
HALF, SINGLE, DOUBLE = "float16", "float32", "float64"
Products = dict[str, float]  # floating-point operations by dtype


def polar_products(m: int, n: int, iterations: int = 4) -> Products:
    """Products of a polar step of an m x n matrix on a GPU: two passes in half precision.

    Each pass computes a Gram matrix, iterates on it, and computes B Z. An iteration has four
    symmetric products of n x n matrices; the first of a pass has one less, the last two less.
    """
    m, n = max(m, n), min(m, n)
    share = (1 + TILE / max(n, TILE)) / 2
    gram, square = 2 * m * n * n * share, 2 * n**3 * share
    return {HALF: 2 * (gram + 2 * m * n * n) + (4 * iterations - 2 * 3) * square}


def opening_products(m: int, n: int) -> Products:
    """Products of momentum alignment (U^T M, C S) and polar correction (V^T V, V G)."""
    m, n = max(m, n), min(m, n)
    return {HALF: 8 * m * n * n}


def power_iteration_products(m: int, n: int, r: int, *, qr: bool = False) -> Products:
    """Products of a Dion step: M Q, M^T P, X - P Q^T, M - P R^T; P is orthonormalised in float64.

    Args:
        m: rows.
        n: columns.
        r: the rank.
        qr: whether Q is orthonormalised too, in float64.
    """
    m, n = max(m, n), min(m, n)
    rows = m + n if qr else m
    return {SINGLE: 8 * m * n * r, DOUBLE: 6 * rows * r * r}


def quarter_products(m: int, n: int) -> Products:
    """Products of a Dion step of rank 1/4."""
    return power_iteration_products(m, n, -(-min(m, n) // 4))


def products_of(shapes: Shapes, each: Callable[[int, int], Products]) -> Products:
    """The sum of the products over a model's matrices."""
    return summed((1.0, each(m, n)) for m, n in shapes.matrices)


def summed(parts: Iterable[tuple[float, Products]]) -> Products:
    """The weighted sum of products."""
    total: Products = {}
    for factor, products in parts:
        for dtype, count in products.items():
            total[dtype] = total.get(dtype, 0.0) + factor * count
    return total


# ---------------------------------------------------------------- methods


@dataclass(frozen=True)
class Shapes:
    """A model as the wire sees it: shapes of its matrices, and of all other parameters."""

    matrices: Sequence[Shape]
    others: Sequence[Shape]

    @classmethod
    def of(cls, model: Model | nn.Module) -> Shapes:
        """The shapes of a model of model_shapes.py, or of a module grouped by ``param_groups``."""
        if isinstance(model, Model):
            return cls(model.matrices(), model.others())
        return cls.of_groups(curvadion.param_groups(model))

    @classmethod
    def of_groups(cls, groups: Iterable[Mapping[str, object]]) -> Shapes:
        """The shapes of parameter groups that hold (name, parameter) pairs."""
        matrices: list[Shape] = []
        others: list[Shape] = []
        for group in groups:
            pairs = group["params"]
            assert isinstance(pairs, list)
            kept = matrices if group["algorithm"] == "dion" else others
            kept += [tuple(parameter.shape) for _, parameter in pairs]
        return cls(matrices, others)

    @property
    def parameters(self) -> int:
        """The number of elements of the model."""
        return _elements([*self.matrices, *self.others])


def _elements(shapes: Iterable[Shape]) -> int:
    return sum(map(math.prod, shapes))


def _tensors(shapes: Iterable[Shape]) -> list[Tensor]:
    return [torch.empty(shape, device="meta") for shape in shapes]


MEETING = Traffic("all_reduce", 1, MEETING_BYTES)


def _dense(shapes: Sequence[Shape]) -> Traffic:
    """An all-reduce of whole tensors in float32."""
    return Traffic("all_reduce", len(list(chunks(_tensors(shapes)))), FLOAT * _elements(shapes))


def ddp(shapes: Shapes, bytes_per_element: int = FLOAT) -> list[Traffic]:
    """All gradients, in DDP's buckets."""
    torch_dist: Any = dist  # where DDP takes them from
    tensors = _tensors([*shapes.matrices, *shapes.others])[::-1]
    limits = [torch_dist._DEFAULT_FIRST_BUCKET_BYTES, DDP_BUCKET]
    buckets, _ = torch_dist._compute_bucket_assignment_by_size(tensors, limits)
    return [Traffic("all_reduce", len(buckets), bytes_per_element * shapes.parameters)]


def _open_step(shapes: Shapes, rank_fraction: float) -> list[Traffic]:
    """All P's, all R's and the other parameters' gradients; without the gate."""
    layouts = [MatrixLayout.whole((m, n)) for m, n in shapes.matrices]
    options = {"rank_fraction": rank_fraction, "rank_multiple_of": 1}
    ranks = [layout.rank(options) for layout in layouts]
    factors = [
        FLOAT * sum(r * side(s) for r, s in zip(ranks, shapes.matrices, strict=True))
        for side in (max, min)
    ]
    products = [Traffic("all_reduce", 1, f) for f in factors if f]
    return products + ([_dense(shapes.others)] if shapes.others else [])


def dion(shapes: Shapes, rank_fraction: float = 0.25) -> list[Traffic]:
    """Dion at every step."""
    return total([MEETING, *_open_step(shapes, rank_fraction)])


def averaging(shapes: Shapes, period: int, rank_fraction: float = 0.25) -> list[Traffic]:
    """Local Dion steps; every ``period``-th averages weights and AdamW moments before Dion's."""
    averaged = [_dense([*shapes.matrices, *shapes.others, *shapes.others, *shapes.others])]
    if shapes.others:
        averaged.append(Traffic("all_reduce", 1, FLOAT * len(shapes.others)))  # step counters
    opened = [MEETING, *averaged, *_open_step(shapes, rank_fraction)]
    return total([t.times(1 / period) for t in opened])


def wire_budget(
    shapes: Shapes, share: float, bits: Bits | None = None, *, delayed: bool = False
) -> list[Traffic]:
    """CurvaDion with a budget: coded pseudo-gradients, as often as the budget allows.

    With a delay a header replaces the gate's bytes, and one more message carries the lengths of all
    matrices.

    Args:
        shapes: of the model.
        share: of the bytes of gradients in float32 at every step.
        bits: of a code on each way; None: the budget's choice.
        delayed: whether means are added later.
    """
    sizes = [math.prod(shape) for shape in [*sorted(shapes.matrices), *shapes.others]]
    # Batches of a CPU; a GPU's are larger, so it sends fewer messages than this.
    most = most_in_a_batch(sum(sizes), torch.device("cpu"))
    batches = batches_of_sizes(((size, None, 1) for size in sizes), most)
    bits = bits or bits_of_weights(share, 1)
    codes = message_bytes(sizes, bits.up) + message_bytes(sizes, bits.down)
    met = Traffic("all_reduce", 1, WORDS_BYTES if delayed else MEETING_BYTES)
    sent = [met, Traffic("all_to_all", 2 * (batches[-1] + 1), codes)]
    rate = openings(shapes, share, bits, delayed=delayed)
    return total(t.times(rate) for t in sent)


def openings(
    shapes: Shapes, share: float, bits: Bits | None = None, *, delayed: bool = False
) -> float:
    """Openings per step that a budget allows, as the gate computes them.

    Args:
        shapes: of the model.
        share: of the bytes of gradients in float32 at every step.
        bits: of a code on each way; None: the budget's choice.
        delayed: whether means are added later.
    """
    sizes = [math.prod(shape) for shape in [*shapes.matrices, *shapes.others]]
    bits = bits or bits_of_weights(share, 1)
    costs = curvadion.QuantizedAverage(bits, delay=int(delayed)).costs([[n] for n in sizes])
    met = WORDS_BYTES if delayed else MEETING_BYTES
    gate = curvadion.ByteBudget(share)
    gate.open_cost = (costs.opening_bytes + met) / (FLOAT * shapes.parameters)
    return 1 / gate.expected_period()


@dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
        name: in tables. traffic: function from a model's shapes to its traffic.
        products: function from shapes to the optimizer's products at an average step.
        overlaps: whether it communicates during the backward pass.
        period: with a delay, the steps between openings.
    """

    name: str
    traffic: Callable[[Shapes], list[Traffic]]
    products: Callable[[Shapes], Products] = lambda shapes: {}
    overlaps: bool = False
    period: Callable[[Shapes], float] | None = None

    def delay(self, shapes: Shapes) -> int:
        """Steps from an opening until its means are added."""
        return 0 if self.period is None else delay_within(self.period(shapes))

    def beside(self, shapes: Shapes) -> float:
        """The share of steps during which exchanges run."""
        return 0.0 if self.period is None else beside_steps(self.delay(shapes), self.period(shapes))


def _dion_products(shapes: Shapes) -> Products:
    return products_of(shapes, quarter_products)


def _budgeted(share: float, *, delayed: bool = False) -> Method:
    def rate(shapes: Shapes) -> float:
        return openings(shapes, share, delayed=delayed)

    def products(shapes: Shapes) -> Products:
        local, opening = (products_of(shapes, each) for each in (polar_products, opening_products))
        return summed([(1.0, local), (rate(shapes), opening)])

    return Method(
        f"CurvaDion, wire_budget={share}" + (DELAYED if delayed else ""),
        lambda shapes: wire_budget(shapes, share, delayed=delayed),
        products,
        period=(lambda shapes: 1 / rate(shapes)) if delayed else None,
    )


DELAYED = ", delay"  # suffix of the names of methods with a delay
METHODS = (
    Method("AdamW-DDP", ddp, overlaps=True),
    Method("AdamW-DDP, bfloat16 gradients", lambda s: ddp(s, 2), overlaps=True),
    Method("Dion, rank 1/4", dion, _dion_products),
    Method("averaging every 25 steps", lambda s: averaging(s, 25), _dion_products),
    _budgeted(0.01),
    _budgeted(0.003),
    _budgeted(0.01, delayed=True),
    _budgeted(0.003, delayed=True),
)
