"""A float64 reference of replicas that average their weights in codes of a few bits.

Written from docs/convergence-lab.md, docs/layouts.md and the equations in the package's docstrings,
and from nothing in its code. Replicas are simulated in one process. Gradients and openings are
prescribed; each matrix is one 2-D parameter.

Two constants are part of the format and not of the mathematics, and are repeated here: the signs
of the rotation, and the rounds that the iteration for 256 levels takes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reference import initial_q, positive_qr
from tolerance import Rounding, assert_within

BLOCK = 256
# The ratio of singular values for which Newton-Schulz's polynomials are the best: the first of them
# takes singular values of any size to ones that are smaller than the largest by up to so much.
NEWTON_SCHULZ = 1e3
TENSORS = ("X", "M", "Q", "S", "anchor", "m", "v")  # what each replica holds of a parameter


# ------------------------------------------------------------------------------- codes


def _density_and_share(edges: Tensor) -> tuple[Tensor, Tensor]:
    """Of a normal number at the inner edges, with those at infinity added."""
    zero, one = edges.new_zeros(1), edges.new_ones(1)
    density = torch.cat((zero, torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi), zero))
    return density, torch.cat((zero, torch.special.ndtr(edges), one))


def _off_centre(levels: Tensor) -> Tensor:
    """How far each level lies from the mean of the normal numbers that it stands for."""
    density, share = _density_and_share((levels[1:] + levels[:-1]) / 2)
    return levels - (density[:-1] - density[1:]) / (share[1:] - share[:-1])


@lru_cache
def best_levels(bits: int) -> Tensor:
    """The 2^bits levels of least mean square error for a normal number: Newton's method."""
    places = (torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits
    levels = math.sqrt(3) * torch.special.ndtri(places)
    for _ in range(30):
        slope = torch.autograd.functional.jacobian(_off_centre, levels)
        levels = levels - torch.linalg.solve(slope, _off_centre(levels))
    return levels


@lru_cache
def levels_of(bits: int) -> Tensor:
    """The levels of the codes: the best ones, but for 8 bits what 500 of Lloyd's rounds reach."""
    if bits < 8:
        return best_levels(bits)
    places = (torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits
    levels = math.sqrt(3) * torch.special.ndtri(places)
    for _ in range(500):
        levels = levels - _off_centre(levels)
    return levels


@lru_cache
def rotation() -> Tensor:
    """(256, 256), orthogonal: Sylvester's Hadamard matrix over 16, after random signs."""
    generator = torch.Generator().manual_seed(0)
    signs = 2.0 * torch.randint(0, 2, (BLOCK,), generator=generator).double() - 1
    odd = [[(i & j).bit_count() % 2 for j in range(BLOCK)] for i in range(BLOCK)]
    return (1 - 2 * torch.tensor(odd, dtype=torch.float64)) / 16 * signs


class Code(NamedTuple):
    """Blocks in codes: y, (k, 256), are rotated and of mean square 1; scale, (k, 1), exact."""

    y: Tensor
    scale: Tensor
    bits: int

    @classmethod
    def of(cls, blocks: Tensor, bits: int) -> Code:
        y = blocks @ rotation().mT
        scale = y.square().mean(1, keepdim=True).sqrt()
        return cls(y / scale.where(scale > 0, 1.0), scale, bits)

    def decoded(self) -> Tensor:
        levels = levels_of(self.bits)
        nearest = torch.bucketize(self.y, (levels[1:] + levels[:-1]) / 2)
        return levels[nearest] * self.scale.bfloat16().double() @ rotation()

    def largest_flip(self, margin: float) -> float:
        """How far decoded numbers go if all codes that are this close to an edge flip."""
        levels = levels_of(self.bits)
        edges = (levels[1:] + levels[:-1]) / 2
        right = torch.bucketize(self.y, edges).clamp_max(len(edges) - 1)
        left = (right - 1).clamp_min(0)
        gaps = [
            ((self.y - edges[e]).abs() < margin) * (levels[e + 1] - levels[e])
            for e in (left, right)
        ]
        flips = torch.maximum(*gaps)
        low, high = ((self.scale * (1 + s * margin)).bfloat16() for s in (-1, 1))
        tie = (low != high) * 2.0**-8 * self.y
        return float(((flips + tie.abs()) * self.scale).norm())


def blocks_of(numbers: Tensor) -> Tensor:
    """Flat numbers in blocks of 256, the last filled up with zeros."""
    return torch.nn.functional.pad(numbers, (0, -len(numbers) % BLOCK)).view(-1, BLOCK)


# ------------------------------------------------------------------------------- the replicas


@dataclass
class UnderWay:
    """A pseudo-gradient on its way: D_i and the mean D by replica, and L when it was sent."""

    sent: list[Tensor]
    mean: list[Tensor]
    length: float
    steps_left: int


@dataclass
class Leaf:
    """One parameter on all replicas; lists have one tensor a replica.

    shards: per rank of a replica, the flat indices of what it holds. residual: per replica and
    rank, flat. lr_since_anchor: the sum over the steps since replicas last agreed, or since they
    sent if means arrive later, whoever moved at them.
    """

    name: str
    algorithm: str
    X: list[Tensor]
    shards: list[Tensor]
    lr: float
    r: int = 0
    trainable: bool = True
    M: list[Tensor] = field(default_factory=list)
    Q: list[Tensor] = field(default_factory=list)
    S: list[Tensor] = field(default_factory=list)
    aligned: list[int] = field(default_factory=list)  # openings that S has summed up
    anchor: list[Tensor] = field(default_factory=list)
    residual: list[list[Tensor]] = field(default_factory=list)
    m: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)
    t: list[float] = field(default_factory=list)
    lr_since_anchor: float = 0.0
    under_way: UnderWay | None = None
    # Of a mean that is under way or was added at the last step: codes by replica and of the mean,
    # unless it is known how they fell, and the largest norm of what was coded.
    codes: list[Code] = field(default_factory=list)
    coded_norm: float = 0.0
    # That norm of the mean added at the last step, and L of the one added last.
    added_norm: float = 0.0
    added_length: float = 0.0
    # Of the last step, whether a direction was made of rounding errors.
    degenerate: bool = False
    # By how much polar factors that iterations on Gram matrices find amplify roundings more than
    # exact ones, since a follower went on from a run's state.
    gram_condition: float = 1.0

    @property
    def length(self) -> float:
        """L: how far a matrix's steps go since replicas agreed, if all have one direction."""
        if self.algorithm != "dion":
            return 0.0
        m, n = self.X[0].shape
        return self.lr_since_anchor * math.sqrt(m / n)

    def await_as(self, earlier: Leaf) -> None:
        """A twin keeps what roundings before the sending did to a mean that is not known yet."""
        if self.codes and self.under_way is not None and earlier.under_way is not None:
            self.codes, self.residual = earlier.codes, earlier.residual
            self.under_way.mean = earlier.under_way.mean


Gradients = Mapping[str, "Tensor | None"]
# P and Q of the step just taken, by name and replica.
Factors = Mapping[tuple[str, int], "tuple[Tensor, Tensor]"]
# What a real replica holds of a parameter: the tensors above by name, "t", and "residual", a list.
# While a mean is under way "sent" is D_i; "mean" and "residual" are there once they are known.
Held = Mapping[str, Any]


@dataclass
class QuantizedReference:
    """Replicas under ``sync=QuantizedAverage()``.

    X0: parameters by name, in the optimizer's order. algorithms: "adamw" or "lion" of those that do
    not take "dion". shards: per rank of a replica and name, the flat indices held; by default one
    rank holds all. bits, fragments, align_momentum, polar_correction, spectrum_decay, delay: as of
    QuantizedAverage.
    """

    X0: Mapping[str, Tensor]
    replicas: int
    bits: int = 2
    fragments: int = 1
    algorithms: Mapping[str, str] = field(default_factory=dict)
    shards: Sequence[Mapping[str, Tensor]] | None = None
    align_momentum: bool = True
    polar_correction: bool = True
    spectrum_decay: float = 0.8
    delay: int = 0
    lr: float = 0.02
    momentum: float = 0.95
    wd: float = 0.01
    look_ahead: float = 0.0
    local_step: str = "dion"
    local_lr: float | None = None
    direction: str = "low_rank"
    momentum_rule: str = "error_feedback"
    right_factor: str = "qr"
    rank_fraction: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    next_fragment: int = 0
    fragments_drifted: int = 0
    leaves: dict[str, Leaf] = field(init=False)

    def __post_init__(self) -> None:
        self.leaves = {}
        for name, X0 in self.X0.items():
            algorithm = self.algorithms.get(name, "dion")
            all_here = [torch.arange(X0.numel())]
            shards = all_here if self.shards is None else [held[name] for held in self.shards]
            leaf = Leaf(name, algorithm, self._each(X0.double()), shards, self.lr)
            leaf.anchor = self._each(X0.double())
            leaf.residual = [[torch.zeros(len(s)).double() for s in shards] for _ in leaf.X]
            leaf.t = [0.0] * self.replicas
            zero = torch.zeros_like(X0, dtype=torch.float64)
            if algorithm == "dion":
                m, n = X0.shape
                leaf.r = math.ceil(round(self.rank_fraction * min(m, n), 9))
                leaf.M = self._each(zero)
                if self.direction == "low_rank":
                    leaf.Q = self._each(initial_q(m, n, leaf.r))
                elif self.align_momentum and self.spectrum_decay:
                    leaf.S = self._each(torch.zeros(leaf.r, leaf.r).double())
                    leaf.aligned = [0] * self.replicas
            else:
                leaf.m, leaf.v = self._each(zero), self._each(zero)
            self.leaves[name] = leaf

    def _each(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.clone() for _ in range(self.replicas)]

    @property
    def trainable(self) -> list[Leaf]:
        """Those that are not frozen, matrices first."""
        here = [leaf for leaf in self.leaves.values() if leaf.trainable]
        return sorted(here, key=lambda leaf: leaf.algorithm != "dion")

    def fragment_of(self) -> dict[str, int]:
        """Fragments of about equal size: the largest first, each to the smallest one so far."""
        filled = [0] * min(self.fragments, len(self.trainable))
        fragment_of = {}
        for leaf in sorted(self.trainable, key=lambda leaf: -leaf.X[0].numel()):
            fragment_of[leaf.name] = filled.index(min(filled))
            filled[fragment_of[leaf.name]] += leaf.X[0].numel()
        return fragment_of

    # ---------------------------------------------------------------------- steps

    def step(self, gradients: Sequence[Gradients], gate_open: bool) -> list[str]:
        """A step of every replica on its own, then an opening; the names that were synchronised.

        A parameter without a gradient on a replica stays there as it is. With a delay none have.
        """
        last: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        for leaf in self.leaves.values():
            leaf.degenerate, leaf.added_norm = False, 0.0
            if leaf.under_way is None:
                leaf.codes = []
        later = self.delay and self.replicas > 1
        sent = self._turn(1) if later and gate_open else []
        for leaf in sent:  # what is still under way then arrives before the step, uncorrected
            self._arrive(leaf, None)
        for leaf in self.trainable:
            own = [g.get(leaf.name) for g in gradients]
            leaf.lr_since_anchor += leaf.lr
            for i, G in enumerate(own):
                if G is not None:
                    factors = self._local(leaf, i, G.double())
                    if factors is not None:
                        last[leaf.name, i] = factors
        self.fragments_drifted = len(set(self.fragment_of().values()))
        if later:
            self._arrive_and_send(sent, last)
            return []
        return self.sync_weights(1, last) if gate_open else []

    def _local(self, leaf: Leaf, i: int, G: Tensor) -> tuple[Tensor, Tensor] | None:
        if leaf.algorithm != "dion":
            elementwise_(leaf, i, G, self.wd, self.betas, self.eps)
            return None
        polar = self.direction == "polar"
        keeps = self.momentum_rule == "error_feedback" and not polar
        leaf.M[i] = (leaf.M[i] if keeps else self.momentum * leaf.M[i]) + G
        leaf.X[i] = (1 - leaf.lr * self.wd) * leaf.X[i]
        if self.local_step == "gradient":
            leaf.X[i] = leaf.X[i] - (leaf.lr if self.local_lr is None else self.local_lr) * G
            return None
        m, n = leaf.X[i].shape
        B = oriented(leaf.M[i] + self.look_ahead * G)
        if polar:
            U, S, Vh = torch.linalg.svd(B, full_matrices=False)
            leaf.degenerate |= float(S.min()) < 1e-5 * float(S.max())
            if not leaf.degenerate:
                condition = max(NEWTON_SCHULZ, float(S.max() / S.min()))
                leaf.gram_condition = max(leaf.gram_condition, condition)
            step = leaf.lr * math.sqrt(m / n) * oriented_like(U @ Vh, G)
            leaf.X[i] = leaf.X[i] - step
            return U @ Vh, torch.eye(len(Vh)).double()
        P = positive_qr(B @ leaf.Q[i])
        R = B.mT @ P
        leaf.degenerate |= deficient(B @ leaf.Q[i]) or deficient(R)
        if self.right_factor == "qr":
            leaf.Q[i] = positive_qr(R)
        else:
            leaf.Q[i] = R / R.norm(dim=0, keepdim=True)
        if keeps:
            feedback = oriented_like(P @ R.mT, G) - self.look_ahead * G
            leaf.M[i] = leaf.M[i] - (1 - self.momentum) * feedback
        U = oriented_like(P @ leaf.Q[i].mT, G)
        leaf.X[i] = leaf.X[i] - leaf.lr * math.sqrt(m / n) * U
        return P, leaf.Q[i]

    # ---------------------------------------------------------------------- openings

    def sync_weights(self, count: int, last: Factors | None = None) -> list[str]:
        """Replicas agree on the next fragments; the names of what is in them.

        Means that are under way are added before. last: factors of the step just taken; None if
        there was none, and then nothing is corrected.
        """
        self._arrive_all()
        leaves = self._turn(count)
        self.fragments_drifted = max(0, self.fragments_drifted - count)
        if self.replicas == 1:
            for leaf in leaves:
                leaf.anchor = [leaf.X[0].clone()]
                leaf.lr_since_anchor = 0.0
            return [leaf.name for leaf in leaves]
        own = {leaf.name: moved(leaf) for leaf in leaves}
        means = self._average(leaves)
        for leaf in leaves:
            D = means[leaf.name]
            leaf.anchor = [anchor + D for anchor in leaf.anchor]
            leaf.X = [anchor.clone() for anchor in leaf.anchor]
            self._correct(leaf, last, own[leaf.name], self._each(D), leaf.length)
            leaf.lr_since_anchor = 0.0
        return [leaf.name for leaf in leaves]

    def _turn(self, count: int) -> list[Leaf]:
        """The parameters of the next fragments, whose turn it has been then."""
        fragment_of = self.fragment_of()
        total = len(set(fragment_of.values()))
        now = {(self.next_fragment + i) % total for i in range(count)}
        self.next_fragment = (self.next_fragment + count) % total
        return [leaf for leaf in self.trainable if fragment_of[leaf.name] in now]

    def _arrive_and_send(self, leaves: Sequence[Leaf], last: Factors) -> None:
        """Means are added that are due; then these are sent."""
        for leaf in self.leaves.values():
            if leaf.under_way is not None:
                leaf.under_way.steps_left -= 1
                if leaf.under_way.steps_left == 0:
                    self._arrive(leaf, last)
        sent = {leaf.name: moved(leaf) for leaf in leaves}
        for name, mean in self._average(leaves).items():
            leaf = self.leaves[name]
            leaf.under_way = UnderWay(sent[name], self._each(mean), leaf.length, self.delay)
            leaf.lr_since_anchor = 0.0

    def _arrive_all(self) -> None:
        for leaf in self.leaves.values():
            self._arrive(leaf, None)

    def _arrive(self, leaf: Leaf, last: Factors | None) -> None:
        """X <- X + D - D_i, anchor <- anchor + D; then corrections, with the L of the sending."""
        if leaf.under_way is None:
            return
        way, leaf.under_way = leaf.under_way, None
        for i, (D, own) in enumerate(zip(way.mean, way.sent, strict=True)):
            leaf.X[i] = leaf.X[i] + D - own
            leaf.anchor[i] = leaf.anchor[i] + D
        self._correct(leaf, last, way.sent, way.mean, way.length)

    def _correct(
        self,
        leaf: Leaf,
        last: Factors | None,
        own: Sequence[Tensor],
        means: Sequence[Tensor],
        L: float,
    ) -> None:
        """Momenta and weights, after the means D were added where replicas had moved by D_i."""
        leaf.added_length, leaf.added_norm = L, leaf.coded_norm
        if leaf.algorithm != "dion" or last is None or self.local_step != "dion":
            return
        for i, (D, D_i) in enumerate(zip(means, own, strict=True)):
            if self.align_momentum and (leaf.name, i) in last:
                align_(leaf, i, D - D_i, L, *last[leaf.name, i], self.spectrum_decay)
            if self.polar_correction:
                change = polar_change(D, L)
                leaf.anchor[i] = leaf.anchor[i] + change
                leaf.X[i] = leaf.X[i] + change

    def _average(self, leaves: Sequence[Leaf]) -> dict[str, Tensor]:
        """The means of X - anchor by name, in codes with error feedback."""
        # Ranks that hold the same of a parameter do so of all of these, and own the same blocks.
        by_sharding: dict[tuple[int, ...], list[Leaf]] = {}
        for leaf in leaves:
            first = (next(j for j, t in enumerate(leaf.shards) if t.equal(s)) for s in leaf.shards)
            by_sharding.setdefault(tuple(first), []).append(leaf)
        means: dict[str, Tensor] = {}
        for equal in by_sharding.values():
            means |= self._average_together(equal)
        return means

    def _average_together(self, leaves: Sequence[Leaf]) -> dict[str, Tensor]:
        means = {leaf.name: torch.zeros_like(leaf.anchor[0]) for leaf in leaves}
        for leaf in leaves:
            leaf.codes, leaf.coded_norm = [], 0.0
        for s in range(len(leaves[0].shards)):
            sent = [self._to_send(leaves, i, s) for i in range(self.replicas)]
            received, codes = mean_in_codes(sent, self.bits)
            starts = 0
            for leaf in leaves:
                held = leaf.shards[s]
                span = slice(starts, starts + -(-len(held) // BLOCK))
                starts = span.stop
                mean, *lost = (x[span].flatten()[: len(held)] for x in received)
                means[leaf.name].view(-1)[held] = mean
                for i in range(self.replicas):
                    leaf.residual[i][s] = lost[i].clone()
                leaf.codes += [Code(c.y[span], c.scale[span], c.bits) for c in codes]
                norms = (float(z[span].norm()) for z in sent)
                leaf.coded_norm = max(leaf.coded_norm, *norms)
        return means

    def _to_send(self, leaves: Sequence[Leaf], i: int, s: int) -> Tensor:
        own = (moved(leaf)[i].flatten()[leaf.shards[s]] for leaf in leaves)
        residuals = (leaf.residual[i][s] for leaf in leaves)
        return torch.cat([blocks_of(d + e) for d, e in zip(own, residuals, strict=True)])

    def synchronize(self) -> None:
        """Exact: the means of weights with what codes have lost, of momenta, factors, moments.

        Means that are under way are added before. Frozen weights stay as they are.
        """
        self._arrive_all()
        for leaf in self.leaves.values():
            before = list(leaf.X)
            for i in range(self.replicas):
                lost = torch.zeros_like(leaf.X[i])
                for held, residual in zip(leaf.shards, leaf.residual[i], strict=True):
                    lost.view(-1)[held] = residual  # ranks may hold the same: added once
                    residual.zero_()
                leaf.X[i] = leaf.X[i] + lost
            for key in ("X", "M", "Q", "m", "v", "t"):
                held = getattr(leaf, key)
                if held:
                    mean = sum(held) / len(held)
                    setattr(leaf, key, [mean + 0 for _ in held])
            if not leaf.trainable:
                leaf.X = before
            leaf.anchor = [X.clone() for X in leaf.X]
            leaf.S = [torch.zeros_like(S) for S in leaf.S]
            leaf.aligned = [0 for _ in leaf.aligned]
            leaf.lr_since_anchor = 0.0
        self.fragments_drifted = 0

    # ---------------------------------------------------------------------- comparing

    def shaken(self, spacing: float, seed: int) -> QuantizedReference:
        """A copy whose tensors are off by random roundings of this relative size."""
        twin = copy.deepcopy(self)
        generator = torch.Generator().manual_seed(seed)
        for leaf in twin.leaves.values():
            for key in ("X", "M", "Q", "S", "m", "v"):
                setattr(leaf, key, [shake(t, spacing, generator) for t in getattr(leaf, key)])
        return twin

    def take(self, name: str, i: int, held: Held) -> None:
        """Go on from what a real replica holds."""
        leaf = self.leaves[name]
        for key in TENSORS:
            if getattr(leaf, key) and key in held:
                getattr(leaf, key)[i] = held[key].double().clone()
        if "t" in held:
            leaf.t[i] = float(held["t"])
        if leaf.under_way is not None and "sent" in held:
            leaf.under_way.sent[i] = held["sent"].double().clone()
        if leaf.under_way is not None and "mean" in held:
            leaf.under_way.mean[i] = held["mean"].double().clone()
            leaf.codes = []
        if "residual" in held:
            leaf.residual[i] = [lost.double().clone() for lost in held["residual"]]

    def expected(
        self, twin: QuantizedReference, name: str, i: int, spacing: float, rounding: Rounding
    ) -> Iterator[Expected]:
        """What a real replica should hold.

        spacing: of the twin's roundings, relative. rounding: of the replica's numbers. How far
        roundings took a tensor of the twin tells how ill-conditioned it is. Codes that lie too
        close to an edge may flip; all that these could move is added where their mean is, or has
        just been added.
        """
        leaf, other = self.leaves[name], twin.leaves[name]
        flips = self._flips(leaf, other, rounding.allowed / spacing)
        of_codes = (leaf.coded_norm, flips) if leaf.codes else (0.0, 0.0)
        of_mean = leaf.added_norm, flips if leaf.under_way is None else 0.0

        def of(
            key: str, tensor: Tensor, shaken: Tensor, coded: tuple[float, float], times: float = 1.0
        ) -> Expected:
            moved = float((tensor - shaken).norm()) / spacing
            scale = float(tensor.norm()) + leaf.gram_condition * moved
            return Expected(key, tensor, scale, *(times * number for number in coded))

        for key in TENSORS:
            if getattr(leaf, key):
                tensor, shaken = getattr(leaf, key)[i], getattr(other, key)[i]
                times = 1.0 if key in ("X", "anchor") else 0.0
                aligned = self.align_momentum and self.local_step == "dion"
                if key == "M" and aligned and leaf.added_length > 0:
                    times = float(torch.linalg.matrix_norm(tensor, 2)) / leaf.added_length
                yield of(key, tensor, shaken, of_mean, times)
        if leaf.under_way is not None and other.under_way is not None:
            sent, mean = leaf.under_way.sent[i], leaf.under_way.mean[i]
            held = float(sent.norm()), 0.0  # in float32
            yield of("sent", sent, other.under_way.sent[i], held)
            yield of("mean", mean, other.under_way.mean[i], of_codes)
        pairs = zip(leaf.residual[i], other.residual[i], strict=True)
        for s, (lost, shaken) in enumerate(pairs):
            yield of(f"residual {s}", lost, shaken, of_codes)

    def _flips(self, leaf: Leaf, shaken: Leaf, times: float) -> float:
        """What codes that are close to an edge may move.

        times: by how much more a replica's roundings may move numbers than the twin's have.

        If a number of a replica moves by a flip f, the mean moves by f / replicas and may then
        flip too, and its owner's residual has the mean's error times the replicas.
        """
        flips = 0.0
        for code, other in zip(leaf.codes, shaken.codes, strict=True):
            if code.y.numel():
                moved = float((code.y - other.y).abs().median())
                margin = IN_CODES.allowed + times * moved
                flips += code.largest_flip(margin) ** 2
        return (self.replicas + 2) * math.sqrt(flips)


class Expected(NamedTuple):
    """A tensor, and what its distance (Frobenius) from a real replica's may come from.

    scale: what its roundings are relative to. coded: the same of float32 roundings before codes.
    flips: how far codes may take it that fall on the other side of an edge.
    """

    key: str
    tensor: Tensor
    scale: float
    coded: float
    flips: float


def mean_in_codes(sent: Sequence[Tensor], bits: int) -> tuple[tuple[Tensor, ...], list[Code]]:
    """The mean of blocks (k, 256) over the ranks, and what each rank keeps; the codes made.

    Each rank owns an equal share of the blocks, in order, the first ranks one more. It takes its
    own numbers as they are and the others' from their codes, and sends the code of the mean to
    all; what that loses it keeps, times the number of ranks.
    """
    ranks, count = len(sent), len(sent[0])
    codes = [Code.of(z, bits) for z in sent]
    decoded = [code.decoded() for code in codes]
    lost = [z - d for z, d in zip(sent, decoded, strict=True)]
    owner = [rank for rank in range(ranks) for _ in range(count // ranks + (rank < count % ranks))]
    total = torch.zeros_like(sent[0])
    for b, rank in enumerate(owner):
        total[b] = sum(sent[i][b] if i == rank else decoded[i][b] for i in range(ranks))
    code = Code.of(total / ranks, bits)
    mean = code.decoded()
    for b, rank in enumerate(owner):
        lost[rank][b] = total[b] - ranks * mean[b]
    return (mean, *lost), [*codes, code]


def moved(leaf: Leaf) -> list[Tensor]:
    """D_i by replica."""
    return [X - anchor for X, anchor in zip(leaf.X, leaf.anchor, strict=True)]


def align_(
    leaf: Leaf, i: int, missing: Tensor, L: float, P: Tensor, Q: Tensor, decay: float
) -> None:
    """M <- M - (D - D_i) S / L, S = Q (M^T P)^T; shorter where D - D_i exceeds L sqrt(r).

    Of polar factors, S is a mean over openings, weighted by decay to the power of their age.
    """
    D, M = oriented(missing), oriented(leaf.M[i])
    longest = L * math.sqrt(leaf.r)
    share = L * leaf.r / max(longest**2, float(D.square().sum()), 1e-38)
    S = Q @ (M.mT @ P).mT
    if leaf.S:
        leaf.S[i] = decay * leaf.S[i] + (1 - decay) * S
        leaf.aligned[i] += 1
        S = leaf.S[i] / (1 - decay ** leaf.aligned[i])
    M = M - share * D @ S
    leaf.M[i] = oriented_like(M, leaf.M[i])


def polar_change(D: Tensor, L: float) -> Tensor:
    """L (V - V V^T V) / 2, V = D / L; no longer than singular values up to 1 make it."""
    if L <= 1e-10:
        return torch.zeros_like(D)
    V = D / L
    change = (V - V @ V.mT @ V) / 2
    s = 1 / math.sqrt(3)  # where s - s^3 is largest
    longest = (s - s**3) / 2 * math.sqrt(min(V.shape))
    return change * L * min(1.0, longest / max(float(change.norm()), 1e-300))


def elementwise_(
    leaf: Leaf, i: int, G: Tensor, wd: float, betas: tuple[float, float], eps: float
) -> None:
    """AdamW (arXiv 1711.05101) or Lion (arXiv 2302.06675)."""
    beta1, beta2 = betas
    leaf.t[i] += 1
    X = (1 - leaf.lr * wd) * leaf.X[i]
    if leaf.algorithm == "lion":
        leaf.X[i] = X - leaf.lr * (beta1 * leaf.m[i] + (1 - beta1) * G).sign()
        leaf.m[i] = beta2 * leaf.m[i] + (1 - beta2) * G
        return
    leaf.m[i] = beta1 * leaf.m[i] + (1 - beta1) * G
    leaf.v[i] = beta2 * leaf.v[i] + (1 - beta2) * G.square()
    m, v = leaf.m[i] / (1 - beta1 ** leaf.t[i]), leaf.v[i] / (1 - beta2 ** leaf.t[i])
    leaf.X[i] = X - leaf.lr * m / (v.sqrt() + eps)


def oriented(X: Tensor) -> Tensor:
    """No fewer rows than columns."""
    return X.mT if X.shape[0] < X.shape[1] else X


def oriented_like(B: Tensor, X: Tensor) -> Tensor:
    """The inverse for a tensor of X's shape."""
    return B.mT if X.shape[0] < X.shape[1] else B


def deficient(A: Tensor) -> bool:
    """Whether some column depends on others, up to what float32 tells."""
    lengths = A.norm(dim=0)
    if float(lengths.min()) <= 1e-6 * float(lengths.max()):
        return True
    diagonal = torch.linalg.qr(A / lengths).R.diagonal().abs()
    return float(diagonal.min()) < 1e-5


def shake(tensor: Tensor, spacing: float, generator: torch.Generator) -> Tensor:
    """Relative roundings at random."""
    return tensor * (1 + spacing * torch.randn(tensor.shape, generator=generator).double())


IN_CODES = Rounding(torch.float32, terms=8)  # a rotation adds a block's 256 numbers in 8 stages
PRODUCTS = 3  # of a step, one after another: B Q, B^T P, P R^T


@dataclass
class Follower:
    """Goes beside a real run and says where it leaves the reference.

    dtype: of the run. terms: of its longest sums.
    """

    reference: Any
    dtype: torch.dtype
    terms: int = 64
    seed: int = 0
    twin: Any = None
    earlier: Any = None  # the last twin
    steps: int = 1  # since then
    compared: int = 0

    @property
    def spacing(self) -> float:
        """Of the twin's roundings: the dtype's, or more, so that the reference's own vanish."""
        return max(torch.finfo(self.dtype).eps, 1e-11)

    @property
    def rounding(self) -> Rounding:
        return Rounding(self.dtype, self.terms, condition=2, steps=PRODUCTS * self.steps)

    def step(
        self,
        gradients: Sequence[Gradients],
        gate_open: bool,
        held: Sequence[Mapping[str, Held]],
        *,
        feed_back: bool,
    ) -> list[str]:
        """Take the step that a run took, compare, and go on from the run's state if asked to.

        held: per replica and name, after the step.
        """
        self.before()
        self.reference.step(gradients, gate_open)
        self.twin.step([self._shaken(g) for g in gradients], gate_open)
        return self.compare(held, feed_back=feed_back)

    def before(self) -> None:
        """Make the twin where there is none."""
        self.steps += 1
        if self.twin is None:
            self.seed += 1
            self.steps = 1
            for leaf in self.reference.leaves.values():
                leaf.gram_condition = 1.0
            self.twin = self.reference.shaken(self.spacing, self.seed)
            for name, leaf in self.twin.leaves.items():
                if self.earlier is not None:
                    leaf.await_as(self.earlier.leaves[name])

    def _shaken(self, gradients: Gradients) -> Gradients:
        generator = torch.Generator().manual_seed(self.seed)
        return {
            name: None if G is None else shake(G.double(), self.spacing, generator)
            for name, G in gradients.items()
        }

    def compare(self, held: Sequence[Mapping[str, Held]], *, feed_back: bool) -> list[str]:
        """What is farther from the reference than roundings explain."""
        problems = []
        for name, leaf in self.reference.leaves.items():
            for i, replica in enumerate(held):
                actual = dict(replica[name])
                for s, lost in enumerate(actual.get("residual", [])):
                    actual[f"residual {s}"] = lost
                for expected in self.reference.expected(
                    self.twin, name, i, self.spacing, self.rounding
                ):
                    if leaf.degenerate or expected.key not in actual:
                        continue
                    self.compared += 1
                    try:
                        self._compare(actual[expected.key], expected, f"{name} on replica {i}")
                    except AssertionError as error:
                        problems.append(str(error))
        if feed_back or any(leaf.degenerate for leaf in self.reference.leaves.values()):
            self.feed_back(held)
        return problems

    def _compare(self, actual: Tensor, expected: Expected, whose: str) -> None:
        distance = float((actual.double() - expected.tensor).norm())
        error = max(0.0, distance - expected.flips)
        # Before codes all is rounded in float32.
        scale = expected.scale + expected.coded * IN_CODES.allowed / self.rounding.allowed
        what = f"{expected.key} of {whose}, of norm {float(expected.tensor.norm()):.2e}"
        assert_within(error / scale if error else 0.0, self.rounding, what=what)

    def feed_back(self, held: Sequence[Mapping[str, Held]]) -> None:
        """Go on from what the replicas hold, so that a flipped code is forgotten."""
        for i, replica in enumerate(held):
            for name, state in replica.items():
                self.reference.take(name, i, state)
        self.earlier, self.twin = self.twin, None
