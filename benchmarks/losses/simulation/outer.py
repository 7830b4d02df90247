"""How replicas synchronise: the interface, and our averages of weights and gradients in codes.

Each class counts the bytes that a rank sends, as a share of all-reducing all gradients in float32
at every step. With n replicas an all-reduce sends 2 (n - 1) / n times its payload, and so do codes
that go to owners and back.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.losses.simulation.inner import Replicas
from benchmarks.losses.simulation.world import Weights, World
from curvadion import ops
from curvadion.agreement.meeting import MEETING_BYTES, WORDS_BYTES
from curvadion.division import divide, shares
from curvadion.gates import ByteBudget
from curvadion.ops.code_format import BLOCK, block_bytes
from curvadion.sync.coded_mean import RESIDUAL_DTYPES, message_bytes

# The largest (s - s^3) / 2 of a singular value s in [0, 1], at sqrt(1 / 3).
LARGEST_CORRECTION = 1 / (3 * math.sqrt(3))


class Outer(ABC):
    """Synchronises replicas.

    Attributes:
        drifts: whether replicas' weights differ between openings.
        sent: bytes so far, in multiples of all gradients in float32 at one step.
    """

    drifts = True

    def __init__(self, world: World):
        self.anchor = {name: x[None].clone() for name, x in world.initial.items()}
        self.sizes = {name: x.numel() for name, x in world.initial.items()}
        self.sent = 0.0

    def gradients(self, step: int, own: Weights) -> Weights:
        """Return the gradients that replicas step with.

        own: (replicas, ...), the gradients of each replica's batches.
        """
        return own

    @abstractmethod
    def after(self, step: int, own: Replicas, lr: float, *, last: bool) -> None:
        """Synchronise after a step, if one is due.

        Args:
            step: its number, from 0.
            own: the replicas; changed.
            lr: the learning rate of matrices at this step.
            last: whether this is the last step, after which replicas must hold the same weights.
        """


class Synchronous(Outer):
    """Replicas with the same weights, because they share one gradient: (1, ...) for all."""

    drifts = False

    @abstractmethod
    def gradients(self, step: int, own: Weights) -> Weights: ...

    def after(self, step: int, own: Replicas, lr: float, *, last: bool) -> None:
        pass


class Codes:
    """Means over replicas, exact or in codes of a few bits that go to owners and back.

    Every replica owns an equal share of the blocks, and does not encode its own values of those.
    Senders and owners each keep the residuals of their codes and send them next time.
    """

    def __init__(self, bits: int | None, up: int | None = None, residual_dtype: str = "float32"):
        """Take the bits of a code; None for exact means.

        up: of the codes to owners; None: as of those of means. residual_dtype: a key of the
        package's RESIDUAL_DTYPES.
        """
        self.bits = bits
        self.up = bits if up is None else up
        self.residual_dtype = residual_dtype
        self._count = 0  # of means
        self._lost: dict[tuple[str, ...], Tensor] = {}

    def means(self, moved: Weights) -> Weights:
        """(replicas, ...) -> (1, ...); the same tensors each time."""
        if self.bits is None or self.up is None:
            return {name: x.mean(0, keepdim=True) for name, x in moved.items()}
        rows = [_rows(x) for x in moved.values()]
        wanted = torch.cat(rows, dim=1)  # (replicas, blocks, 256)
        key, count = tuple(moved), len(wanted)
        wanted = wanted + self._lost.get(key, torch.zeros_like(wanted))
        owned = torch.zeros(wanted.shape[:2], dtype=torch.bool, device=wanted.device)
        start = 0
        for rank, share in enumerate(shares(wanted.shape[1], count)):
            owned[rank, start : start + share] = True
            start += share
        sent = torch.where(owned[..., None], wanted, _coded(wanted, self.up))
        exact = sent.mean(0, keepdim=True)
        mean = _coded(exact, self.bits)
        self._lost[key] = self._kept(wanted - sent + owned[..., None] * count * (exact - mean))
        blocks = [each.shape[1] for each in rows]
        return {
            name: each.flatten(1)[:, : x[0].numel()].view_as(x[:1])
            for (name, x), each in zip(moved.items(), mean.split(blocks, dim=1), strict=True)
        }

    def _kept(self, lost: Tensor) -> Tensor:
        """What residuals (replicas, blocks, 256) are in their dtype."""
        if self.residual_dtype != "int8":
            return lost.to(RESIDUAL_DTYPES[self.residual_dtype]).float()
        self._count += 1
        each = list(lost)
        size = ops.code_bytes(each[0].numel())
        codes = list(lost.new_zeros(len(each), size, dtype=torch.int8))
        # Equal on all replicas, as in the package, and far from that of the next mean.
        seed = self._count * 0x9E3779B1 & 0xFFFFFFFF
        ops.encode_states_(codes, each, [seed] * len(each), roots=False)
        return torch.stack(ops.decode_states(codes, each, roots=False))

    def share(self, sizes: Sequence[int]) -> float:
        """Bytes of one mean of these tensors, as a share of their float32 bytes."""
        if self.bits is None or self.up is None:
            return 1.0
        both_ways = message_bytes(sizes, self.up) + message_bytes(sizes, self.bits)
        return float(both_ways / 2 / (4 * sum(sizes)))


def _coded(rows: Tensor, bits: int) -> Tensor:
    """What the codes of rows (..., 256) stand for."""
    numbers = rows.flatten()
    shape = (len(numbers) // BLOCK, block_bytes(bits))
    codes = numbers.new_empty(shape, dtype=torch.uint8)
    ops.encode_difference_(codes, [numbers], bits=bits)
    stand_for = torch.empty_like(numbers)
    ops.decode_add_([stand_for], (), codes, bits)
    return stand_for.view(rows.shape)


def _rows(x: Tensor) -> Tensor:
    """(replicas, ...) -> (replicas, blocks, 256), padded with zeros."""
    flat = x.flatten(1)
    return F.pad(flat, (0, -flat.shape[1] % BLOCK)).view(len(x), -1, BLOCK)


class CodedGradients(Synchronous):
    """Mean gradients in codes at every step, with error feedback in both directions.

    The package's sync of this name (DoubleSqueeze, arXiv 1905.05957), around any optimizer.
    """

    def __init__(self, bits: int | None, up: int | None, budget: float, world: World):
        super().__init__(world)
        self.codes = Codes(bits, up)
        self.cost = self.codes.share(list(self.sizes.values()))
        if self.cost > budget:
            raise ValueError(
                f"bits={bits or 0}: gradients at every step send {self.cost:.2%}, "
                f"more than the budget of {budget:.2%}"
            )

    def gradients(self, step: int, own: Weights) -> Weights:
        self.sent += self.cost
        return self.codes.means(own)


@dataclass(frozen=True)
class Average:
    """Settings of :class:`QuantizedAverage`, named as in the package.

    wire_budget: share of the bytes. bits: of the codes of means; None for float32. up: of the codes
    to owners; None: the same. delay: steps. align, polar: strengths of the two corrections.
    spectrum_decay: weight of earlier openings' spectra in the alignment of a momentum.
    exact_momenta: average momenta exactly at openings instead of aligning them, without counting
    bytes. This is not a method; it shows how much better momenta could gain.
    strided: a fragment is every n-th parameter, as Streaming DiLoCo takes every n-th block;
    otherwise fragments have about equal sizes, as in the package. residual_dtype: of residuals.
    """

    wire_budget: float
    bits: int | None = 2
    up: int | None = None
    fragments: int = 1
    delay: int = 0
    align: float = 1.0
    polar: float = 1.0
    strided: bool = False
    spectrum_decay: float = 0.8
    exact_momenta: bool = False
    residual_dtype: str = "float32"


@dataclass(frozen=True)
class Arrival:
    """A pending mean: D, the mean of the movements D_i of a parameter over steps of length L."""

    due: int
    name: str
    D: Tensor
    D_i: Tensor
    L: float


class QuantizedAverage(Outer):
    """Local steps, then the mean pseudo-gradient in codes; momenta and weights corrected."""

    def __init__(self, settings: Average, world: World):
        super().__init__(world)
        self.settings = settings
        self.codes = Codes(settings.bits, settings.up, settings.residual_dtype)
        names = list(self.anchor)
        parts = divide(list(self.sizes.values()), settings.fragments)
        if settings.strided:
            parts = [i % settings.fragments for i in range(len(names))]
        count = max(parts) + 1
        self._fragments = [
            [name for name, part in zip(names, parts, strict=True) if part == k]
            for k in range(count)
        ]
        self._length = dict.fromkeys(names, 0.0)
        self._next = 0
        self._drifted_fragments = 0
        self._local = 0
        self._under_way: list[Arrival] = []
        self._spectra: dict[str, tuple[Tensor, float]] = {}  # weighted sums of S, sums of weights
        self.gate = ByteBudget(settings.wire_budget)
        met = WORDS_BYTES if settings.delay else MEETING_BYTES
        self.gate.open_cost = self.codes.share(list(self.sizes.values())) / count
        self.gate.open_cost += met / (4 * world.parameters)
        self.gate.openings_per_full_sync = count

    @property
    def period(self) -> float:
        """Steps between two openings that synchronise the same weight."""
        return len(self._fragments) * self.gate.expected_period()

    def after(self, step: int, own: Replicas, lr: float, *, last: bool) -> None:
        for name in self._length:
            self._length[name] += lr
        self._drifted_fragments = len(self._fragments)
        opens = self.gate.opens(0.0, self._local)
        self._local = 0 if opens else self._local + 1
        going = set(self._fragments[self._next]) if opens else set[str]()
        due = [a for a in self._under_way if a.due <= step or a.name in going]
        self._under_way = [a for a in self._under_way if a not in due]
        for arrival in due:
            self._arrive(own, arrival, corrected=True)
        if opens:
            self._send(own, step)
            if not self.settings.delay:
                self._drifted_fragments -= 1
        if last:
            self._finish(own, step)

    def _send(self, own: Replicas, step: int, *, corrected: bool = True) -> None:
        moved = {name: own.X[name] - self.anchor[name] for name in self._fragments[self._next]}
        for (name, D_i), D in zip(moved.items(), self.codes.means(moved).values(), strict=True):
            arrival = Arrival(step + self.settings.delay, name, D, D_i, self._length[name])
            self._length[name] = 0.0
            if self.settings.delay and corrected:
                self._under_way.append(arrival)
            else:
                self._arrive(own, arrival, corrected=corrected)
        self._next = (self._next + 1) % len(self._fragments)
        self._spend()

    def _spend(self) -> None:
        self.gate.spend(1)
        self.sent += self.gate.open_cost

    def _finish(self, own: Replicas, step: int) -> None:
        for arrival in self._under_way:
            self._arrive(own, arrival, corrected=False)
        for _ in range(self._drifted_fragments):
            self._send(own, step, corrected=False)
        for name, X in own.X.items():
            X.copy_(self.anchor[name].expand_as(X))

    def _arrive(self, own: Replicas, arrival: Arrival, *, corrected: bool) -> None:
        name, D = arrival.name, arrival.D
        anchor, missing = self.anchor[name], D - arrival.D_i
        if name in own.M and corrected:
            length = arrival.L * own.scales[name]
            if self.settings.exact_momenta:
                own.M[name].copy_(own.M[name].mean(0, keepdim=True).expand_as(own.M[name]))
            else:
                self._align(own, name, missing, length)
            D = D + self._correction(D, length)
        anchor += D
        own.X[name] += D - arrival.D_i
        if not self.settings.delay:
            own.X[name].copy_(anchor.expand_as(own.X[name]))

    def _align(self, own: Replicas, name: str, missing: Tensor, L: float) -> None:
        """M <- M - (D - D_i) S / L, scaled down if D - D_i is too long.

        S = U^T M shares noise with D_i: the mean over replicas of D_i S differs from D times the
        mean of S, so momenta lose part of their mean. Averaging S over openings reduces this.

        Args:
            own: the replicas, whose momentum M changes.
            name: of the matrix.
            missing: D - D_i, (replicas, m, n).
            L: the sum of the learning rates since the last mean, times the scale of steps.
        """
        U, M = own.U[name], own.M[name]
        r = min(M.shape[1:])
        squares = missing.square().sum((1, 2), keepdim=True)
        turn = missing * (self.settings.align * L * r / squares.clamp_min(L * L * r))
        tall = M.shape[-2] >= M.shape[-1]
        S = U.mT @ M if tall else M @ U.mT
        if decay := self.settings.spectrum_decay:
            total, weight = self._spectra.get(name, (torch.zeros_like(S), 0.0))
            total = total.lerp(S, 1 - decay)
            weight = decay * weight + 1 - decay
            self._spectra[name] = total, weight
            S = total / weight
        M.sub_(turn @ S if tall else S @ turn)

    def _correction(self, D: Tensor, L: float) -> Tensor:
        """Return a bounded Newton-Schulz step of D towards its polar factor, times L."""
        V = D / L
        change = (V - V @ V.mT @ V) * (self.settings.polar / 2)
        limit = LARGEST_CORRECTION * math.sqrt(min(D.shape[1:]))
        bounded: Tensor = L * change * (limit / change.norm().clamp_min(limit))
        return bounded
