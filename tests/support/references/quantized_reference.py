"""A float64 reference of replicas that average their weights in codes of a few bits.

Written from benchmarks/results/convergence, docs/layouts.md and the equations in the package's
docstrings, and from nothing in its code. Replicas are simulated in one process. Gradients and
openings are prescribed; each matrix is one 2-D parameter.

Two constants are part of the format and not of the mathematics, and are repeated here: the signs
of the rotation, and the rounds that the iteration for 256 levels takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from support.references.reference import initial_q, positive_qr, rank_of
from support.references.tolerance import Rounding, assert_within

BLOCK = 256
# What a replica holds of a parameter.
TENSORS = ("X", "M", "Q", "S", "anchor", "m", "v", "residual")
IN_CODES = Rounding(torch.float32, terms=8)  # a rotation adds a block's 256 numbers in 8 stages


# ------------------------------------------------------------------------------- codes


def _density_and_share(edges: Tensor) -> tuple[Tensor, Tensor]:
    """Of a normal number at the inner edges, with those at infinity added."""
    zero, one = edges.new_zeros(1), edges.new_ones(1)
    density = torch.cat((zero, torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi), zero))
    return density, torch.cat((zero, torch.special.ndtr(edges), one))


def off_centre(levels: Tensor) -> Tensor:
    """How far each level lies from the mean of the normal numbers that it stands for."""
    density, share = _density_and_share((levels[1:] + levels[:-1]) / 2)
    return levels - (density[:-1] - density[1:]) / (share[1:] - share[:-1])


@lru_cache
def levels_of(bits: int) -> Tensor:
    """The 2^bits levels of least mean square error for a normal number: Newton's method.

    For 8 bits what 500 of Lloyd's rounds reach.
    """
    places = (torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits
    levels = math.sqrt(3) * torch.special.ndtri(places)
    for _ in range(500 if bits == 8 else 30):
        change = off_centre(levels)
        if bits < 8:
            slope = torch.autograd.functional.jacobian(off_centre, levels)
            change = torch.linalg.solve(slope, change)
        levels = levels - change
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

    lr_since_anchor: the sum of lr over the steps since replicas last agreed or, with a delay, last
    sent; steps at which a replica rested count too.
    """

    algorithm: str
    X: list[Tensor]
    lr: float
    r: int = 0
    M: list[Tensor] = field(default_factory=list)
    Q: list[Tensor] = field(default_factory=list)
    S: list[Tensor] = field(default_factory=list)
    aligned: list[int] = field(default_factory=list)  # openings that S has summed up
    anchor: list[Tensor] = field(default_factory=list)
    residual: list[Tensor] = field(default_factory=list)
    m: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)
    t: list[float] = field(default_factory=list)
    lr_since_anchor: float = 0.0
    under_way: UnderWay | None = None
    # How far roundings in float32, and codes that these make flip, may take what came in codes at
    # the last step.
    coded: float = 0.0
    aligned_length: float = 0.0  # L where momenta have been aligned at the last step

    @property
    def length(self) -> float:
        """L: how far a matrix's steps go since replicas agreed, if all have one direction."""
        if self.algorithm != "dion":
            return 0.0
        m, n = self.X[0].shape
        return self.lr_since_anchor * math.sqrt(m / n)

    def moved(self) -> list[Tensor]:
        """D_i by replica."""
        return [X - anchor for X, anchor in zip(self.X, self.anchor, strict=True)]


StepTensors = Mapping[str, "Tensor | None"]
# P and Q of the step just taken, by name and replica.
Factors = Mapping[tuple[str, int], "tuple[Tensor, Tensor]"]
# What a real replica holds of a parameter: the tensors above by name, and "t". While a mean is
# under way, "sent" is D_i and "mean" is D.
Held = Mapping[str, Any]


@dataclass
class QuantizedReference:
    """Replicas under ``sync=QuantizedAverage()``.

    X0: parameters by name, in the optimizer's order. algorithms: "adamw" or "lion" of those that do
    not take "dion", which come last. The next six are those of QuantizedAverage; of two bits, the
    first are on the way to owners and the second on the way back.
    """

    X0: Mapping[str, Tensor]
    replicas: int
    algorithms: Mapping[str, str] = field(default_factory=dict)
    bits: int | tuple[int, int] = 2
    fragments: int = 1
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
    margin: float = IN_CODES.allowed  # how close to an edge a number's code may flip
    next_fragment: int = 0
    fragments_drifted: int = 0
    leaves: dict[str, Leaf] = field(init=False)

    def __post_init__(self) -> None:
        self.leaves = {}
        for name, X0 in self.X0.items():
            leaf = Leaf(self.algorithms.get(name, "dion"), self._each(X0.double()), self.lr)
            zero = torch.zeros_like(X0, dtype=torch.float64)
            leaf.anchor, leaf.residual = self._each(X0.double()), self._each(zero)
            if leaf.algorithm == "dion":
                m, n = X0.shape
                leaf.r = rank_of(self.rank_fraction, (m, n))
                leaf.M = self._each(zero)
                if self.direction == "low_rank":
                    leaf.Q = self._each(initial_q(m, n, leaf.r))
                elif self.align_momentum and self.spectrum_decay:
                    leaf.S = self._each(torch.zeros(leaf.r, leaf.r).double())
                    leaf.aligned = [0] * self.replicas
            else:
                leaf.m, leaf.v = self._each(zero), self._each(zero)
                leaf.t = [0.0] * self.replicas
            self.leaves[name] = leaf

    def _each(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.clone() for _ in range(self.replicas)]

    def fragment_of(self) -> dict[str, int]:
        """Fragments of about equal size: the largest first, each to the smallest one so far."""
        filled = [0] * min(self.fragments, len(self.leaves))
        fragment_of = {}
        for name in sorted(self.leaves, key=lambda name: -self.X0[name].numel()):
            fragment_of[name] = filled.index(min(filled))
            filled[fragment_of[name]] += self.X0[name].numel()
        return fragment_of

    # ---------------------------------------------------------------------- steps

    def step(self, gradients: Sequence[StepTensors], gate_open: bool) -> None:
        """A step of every replica on its own, then an opening.

        A parameter without a gradient on a replica stays there as it is.
        """
        last: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        for leaf in self.leaves.values():
            leaf.coded = leaf.aligned_length = 0.0
        sent = self._turn(1) if self.delay and gate_open else []
        for name in sent:  # what is still under way then arrives before the step, uncorrected
            self._arrive(name, None)
        for name, leaf in self.leaves.items():
            leaf.lr_since_anchor += leaf.lr
            for i, own in enumerate(gradients):
                if own[name] is not None:
                    factors = self._local(leaf, i, own[name].double())
                    if factors is not None:
                        last[name, i] = factors
        self.fragments_drifted = len(set(self.fragment_of().values()))
        if self.delay:
            self._arrive_and_send(sent, last)
        elif gate_open:
            self.sync_weights(1, last)

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
            U, _, Vh = torch.linalg.svd(B, full_matrices=False)
            P, Q = U @ Vh, torch.eye(len(Vh)).double()
        else:
            P = positive_qr(B @ leaf.Q[i])
            R = B.mT @ P
            qr = self.right_factor == "qr"
            Q = leaf.Q[i] = positive_qr(R) if qr else R / R.norm(dim=0, keepdim=True)
            if keeps:
                feedback = oriented_like(P @ R.mT, G) - self.look_ahead * G
                leaf.M[i] = leaf.M[i] - (1 - self.momentum) * feedback
        leaf.X[i] = leaf.X[i] - leaf.lr * math.sqrt(m / n) * oriented_like(P @ Q.mT, G)
        return P, Q

    # ---------------------------------------------------------------------- openings

    def sync_weights(self, count: int, last: Factors | None = None) -> None:
        """Replicas agree on the next fragments.

        Means that are under way are added before. last: factors of the step just taken; None if
        there was none, and then nothing is corrected.
        """
        for name in self.leaves:
            self._arrive(name, None)
        names = self._turn(count)
        self.fragments_drifted = max(0, self.fragments_drifted - count)
        own = {name: self.leaves[name].moved() for name in names}
        for name, D in self._average(names).items():
            leaf = self.leaves[name]
            leaf.anchor = [anchor + D for anchor in leaf.anchor]
            leaf.X = [anchor.clone() for anchor in leaf.anchor]
            self._correct(name, last, own[name], self._each(D), leaf.length)
            leaf.lr_since_anchor = 0.0

    def _turn(self, count: int) -> list[str]:
        """The parameters of the next fragments, whose turn it has been then."""
        fragment_of = self.fragment_of()
        total = len(set(fragment_of.values()))
        now = {(self.next_fragment + i) % total for i in range(count)}
        self.next_fragment = (self.next_fragment + count) % total
        return [name for name in self.leaves if fragment_of[name] in now]

    def _arrive_and_send(self, names: Sequence[str], last: Factors) -> None:
        """Means are added that are due; then these are sent."""
        for name, leaf in self.leaves.items():
            if leaf.under_way is not None:
                leaf.under_way.steps_left -= 1
                if leaf.under_way.steps_left == 0:
                    self._arrive(name, last)
        sent = {name: self.leaves[name].moved() for name in names}
        for name, mean in self._average(names).items():
            leaf = self.leaves[name]
            leaf.under_way = UnderWay(sent[name], self._each(mean), leaf.length, self.delay)
            leaf.lr_since_anchor = 0.0

    def _arrive(self, name: str, last: Factors | None) -> None:
        """X <- X + D - D_i, anchor <- anchor + D; then corrections, with the L of the sending."""
        leaf = self.leaves[name]
        if leaf.under_way is None:
            return
        way, leaf.under_way = leaf.under_way, None
        leaf.coded = IN_CODES.allowed * max(float(own.norm()) for own in way.sent)
        for i, (D, own) in enumerate(zip(way.mean, way.sent, strict=True)):
            leaf.X[i] = leaf.X[i] + D - own
            leaf.anchor[i] = leaf.anchor[i] + D
        self._correct(name, last, way.sent, way.mean, way.length)

    def _correct(
        self,
        name: str,
        last: Factors | None,
        own: Sequence[Tensor],
        means: Sequence[Tensor],
        L: float,
    ) -> None:
        """Momenta and weights, after the means D were added where replicas had moved by D_i."""
        leaf = self.leaves[name]
        if leaf.algorithm != "dion" or last is None or self.local_step != "dion":
            return
        leaf.aligned_length = L if self.align_momentum else 0.0
        for i, (D, D_i) in enumerate(zip(means, own, strict=True)):
            if self.align_momentum and (name, i) in last:
                align_(leaf, i, D - D_i, L, *last[name, i], self.spectrum_decay)
            if self.polar_correction:
                change = polar_change(D, L)
                leaf.anchor[i] = leaf.anchor[i] + change
                leaf.X[i] = leaf.X[i] + change

    def _average(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The means of X - anchor by name, in codes with error feedback."""
        if not names:
            return {}
        leaves = [self.leaves[name] for name in names]
        owed = [
            [(D + e).flatten() for D, e in zip(leaf.moved(), leaf.residual, strict=True)]
            for leaf in leaves
        ]
        sent = [torch.cat([blocks_of(z[i]) for z in owed]) for i in range(self.replicas)]
        (mean, *lost), codes = mean_in_codes(sent, self.bits)
        means, begin = {}, 0
        for name, leaf, z in zip(names, leaves, owed, strict=True):
            span = slice(begin, begin + -(-len(z[0]) // BLOCK))
            begin = span.stop
            means[name], *leaf.residual = (
                blocks[span].flatten()[: len(z[0])].view_as(leaf.X[0]) for blocks in (mean, *lost)
            )
            # A flip of a replica's number moves the mean, which may flip too, and residuals.
            near = (Code(c.y[span], c.scale[span], c.bits) for c in codes)
            flips = sum(code.largest_flip(self.margin) ** 2 for code in near)
            rounded = IN_CODES.allowed * max(float(own.norm()) for own in z)
            leaf.coded = rounded + (self.replicas + 2) * math.sqrt(flips)
        return means

    # ---------------------------------------------------------------------- comparing

    def check(self, held: Sequence[Mapping[str, Held]], rounding: Rounding) -> int:
        """Compare with what replicas hold, up to roundings and codes that these make flip.

        Returns the number of comparisons.
        """
        count = 0
        for name, leaf in self.leaves.items():
            expected = {key: getattr(leaf, key) for key in TENSORS}
            slack = {"X": leaf.coded, "anchor": leaf.coded, "residual": leaf.coded}
            if leaf.under_way is not None:
                expected |= {"sent": leaf.under_way.sent, "mean": leaf.under_way.mean}
                length = max(float(D.norm()) for D in leaf.under_way.sent)
                slack = {"residual": leaf.coded, "mean": leaf.coded}
                slack["sent"] = IN_CODES.allowed * length
            for key, tensors in expected.items():
                for i, tensor in enumerate(tensors):
                    allowed = slack.get(key, 0.0)
                    if key == "M" and leaf.aligned_length > 0:
                        spectral = float(torch.linalg.matrix_norm(tensor, 2))
                        allowed = leaf.coded * spectral / leaf.aligned_length
                    error = float((held[i][name][key].double() - tensor).norm()) - allowed
                    scale = max(float(tensor.norm()), 1e-30)
                    # In this order, max keeps a NaN.
                    assert_within(max(error, 0.0) / scale, rounding, what=(name, i, key))
                    count += 1
        return count

    def take(self, held: Sequence[Mapping[str, Held]]) -> None:
        """Go on from what replicas hold, so that a flipped code is forgotten."""
        for i, replica in enumerate(held):
            for name, state in replica.items():
                leaf = self.leaves[name]
                for key in TENSORS:
                    if getattr(leaf, key):
                        getattr(leaf, key)[i] = state[key].double()
                if leaf.under_way is not None:
                    leaf.under_way.sent[i] = state["sent"].double()
                    leaf.under_way.mean[i] = state["mean"].double()


# ------------------------------------------------------------------------------- means, corrections


def mean_in_codes(
    sent: Sequence[Tensor], bits: int | tuple[int, int]
) -> tuple[tuple[Tensor, ...], list[Code]]:
    """The mean of blocks (k, 256) over the ranks, and what each rank keeps; the codes made.

    Each rank owns an equal share of the blocks, in order, the first ranks one more. It takes its
    own numbers as they are and the others' from their codes, and sends the code of the mean to
    all; what that loses it keeps, times the number of ranks.
    """
    ranks, count = len(sent), len(sent[0])
    up, down = (bits, bits) if isinstance(bits, int) else bits
    codes = [Code.of(z, up) for z in sent]
    decoded = [code.decoded() for code in codes]
    lost = [z - d for z, d in zip(sent, decoded, strict=True)]
    owner = [rank for rank in range(ranks) for _ in range(count // ranks + (rank < count % ranks))]
    total = torch.zeros_like(sent[0])
    for b, rank in enumerate(owner):
        total[b] = sum(sent[i][b] if i == rank else decoded[i][b] for i in range(ranks))
    code = Code.of(total / ranks, down)
    mean = code.decoded()
    for b, rank in enumerate(owner):
        lost[rank][b] = total[b] - ranks * mean[b]
    return (mean, *lost), [*codes, code]


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
