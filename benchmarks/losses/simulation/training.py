"""One simulated training, from its settings to its record."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import torch

import curvadion
from benchmarks.common.corpora import CORPORA
from benchmarks.common.sent_elements import powersgd_rank
from benchmarks.common.tasks import SIZES, Task
from benchmarks.losses.simulation.inner import Direction, Inner, Replicas
from benchmarks.losses.simulation.outer import Average, CodedGradients, Outer, QuantizedAverage
from benchmarks.losses.simulation.rivals import (
    OuterMomentum,
    OuterStep,
    PowerSGD,
    Sparse,
    SparseAverage,
)
from benchmarks.losses.simulation.world import World
from curvadion import checks
from curvadion.layout.matrix import UPDATE_SCALES
from curvadion.ops.code_format import BITS
from train_gpt import Config, lr_scale

Method = Literal[
    "adamw",
    "muon",
    "normuon",
    "dion2",
    "nordion2",
    "dion",
    "ours",
    "coded_gradients",
    "averaged_weights",
    "diloco",
    "muloco",
    "sparseloco",
    "sparse_muon",
    "powersgd",
    "powersgd_muon",
]
SYNCHRONISED = ("adamw", "muon", "normuon", "dion2", "nordion2", "dion")
# Settings of "ours".
OURS = ("fragments", "delay", "align", "polar", "strided", "spectrum_decay", "exact_momenta")
SPARSE = ("sparseloco", "sparse_muon")
DIRECTIONS: dict[str, Direction] = {
    "adamw": "adamw",
    "normuon": "normuon",
    "dion2": "dion2",
    "nordion2": "nordion2",
    "diloco": "adamw",
    "sparseloco": "adamw",
    "powersgd": "adamw",
    "dion": "low_rank",
}
NESTEROV = 1 / 0.95  # the look-ahead of Nesterov's momentum at 0.95
# Methods with Nesterov's momentum unless a look-ahead is given.
MUON_INSIDE = ("muon", "normuon", "dion2", "nordion2", "muloco", "sparse_muon", "powersgd_muon")


@dataclass(frozen=True)
class Training:
    """Settings of a run; None takes the method's default.

    Attributes:
        method: methods in SYNCHRONISED average gradients at every step; others keep to a budget.
        lr, elementwise, weight_decay, look_ahead, update_scale: as in :class:`Inner`.
        budget: share of the bytes of float32 gradients at every step.
        bits, fragments, strided, delay, align, polar, spectrum_decay, exact_momenta: of "ours"
            (:class:`Average`); bits also of "coded_gradients", DiLoCo and MuLoCo, 0 for float32.
        outer_lr, outer_momentum: of DiLoCo and MuLoCo; the rate also of the sparse methods.
        kept: of a chunk's 4096 elements, by "sparseloco" (around AdamW) and "sparse_muon".
        size, corpus, batch_size, replicas, steps, seed: the task; ``batch_size`` counts sequences
            of one replica.
        warmdown: share of the steps over which the learning rate falls to zero.
    """

    method: Method
    lr: float
    elementwise: float = 0.5
    weight_decay: float = 0.01
    look_ahead: float | None = None
    update_scale: str = "spectral"
    budget: float = 0.0
    bits: int = 2
    fragments: int = 1
    delay: int = 0
    align: float = 1.0
    polar: float = 1.0
    strided: bool = False
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    kept: int = 64
    size: str = "small"
    corpus: str = "python"
    batch_size: int = 8
    replicas: int = 8
    steps: int = 300
    seed: int = 0
    warmdown: float = 0.2
    spectrum_decay: float = 0.8
    exact_momenta: bool = False

    def __post_init__(self) -> None:
        checks.one_of("method", self.method, get_args(Method))
        checks.one_of("size", self.size, tuple(SIZES))
        checks.one_of("corpus", self.corpus, CORPORA)
        checks.number("lr", self.lr)
        checks.number("elementwise", self.elementwise)
        checks.number("budget", self.budget, most=1.0)
        checks.number("warmdown", self.warmdown, most=1.0)
        checks.one_of("update_scale", self.update_scale, tuple(UPDATE_SCALES))
        checks.one_of("bits", self.bits, (0, *BITS))
        for key in ("batch_size", "replicas", "steps", "fragments", "kept"):
            checks.integer(key, getattr(self, key), 1)
        checks.integer("delay", self.delay, 0)

    @property
    def task(self) -> Task:
        """The model and its data."""
        return replace(SIZES[self.size], corpus=self.corpus, batch_size=self.batch_size)

    def outer(self, world: World) -> Outer | None:
        """Return how replicas synchronise; None if they share all gradients."""
        if self.method in SYNCHRONISED:
            return None
        if self.method == "ours":
            chosen = {key: getattr(self, key) for key in OURS}
            return QuantizedAverage(Average(self.budget, self.bits or None, **chosen), world)
        if self.method.startswith("powersgd"):
            rank = powersgd_rank(self.task.shapes(), self.budget, self.steps)
            if rank is None:
                raise ValueError(f"PowerSGD sends more than {self.budget:%}, even of rank 1")
            return PowerSGD(rank, world)
        if self.method == "coded_gradients":
            return CodedGradients(self.bits or None, self.budget, world)
        if self.method in SPARSE:
            sparse = Sparse(1, self.outer_lr, kept=self.kept)
            return SparseAverage.within(self.budget, self.steps, sparse, world)
        settings = OuterStep(1, self.outer_lr, self.outer_momentum, self.bits or None)
        if self.method == "averaged_weights":
            settings = OuterStep(1, 1.0, 0.0)
        return OuterMomentum.within(self.budget, self.steps, settings, world)

    def inner(self, outer: Outer | None) -> Inner:
        """Return the settings of the local optimizer."""
        ahead = self.look_ahead
        if ahead is None:
            ahead = NESTEROV if self.method in MUON_INSIDE else 0.0
            if isinstance(outer, CodedGradients):
                ahead = curvadion.CodedGradients.group_defaults["look_ahead"]
            if isinstance(outer, QuantizedAverage):
                ahead = curvadion.QuantizedAverage().look_ahead(outer.period)
        direction = DIRECTIONS.get(self.method, "polar")
        return Inner(
            direction,
            self.lr,
            self.elementwise,
            ahead,
            weight_decay=self.weight_decay,
            update_scale=self.update_scale,
        )


@torch.no_grad()
def trained(training: Training, world: World, *, check_every: int = 20) -> tuple[Replicas, float]:
    """Train; return the replicas and the share of the bytes. Ends early if weights diverge."""
    outer = training.outer(world)
    apart = outer is not None and outer.apart
    own = Replicas(training.inner(outer), world, training.replicas if apart else 1)
    schedule = Config(steps=training.steps, warmdown_fraction=training.warmdown)
    for step in range(training.steps):
        scale, last = lr_scale(step, schedule), step == training.steps - 1
        gradients = world.gradients(step, own.X, each=outer is not None)
        own.step(step, scale, outer.gradients(step, gradients) if outer else gradients)
        if outer is not None:
            outer.after(step, own, scale * training.lr, last=last)
        if step % check_every == 0 and not all(x.isfinite().all() for x in own.X.values()):
            break
    return own, 1.0 if outer is None else outer.sent / training.steps


def train(training: Training, device: str = "cpu", *, compiled: bool = False) -> dict[str, Any]:
    """Return the record of a run: its settings, the held-out loss and the share of bytes.

    compiled: as in :class:`World`. The loss is None if weights are no longer finite.
    """
    begun = time.perf_counter()
    world = World(training.task, training.seed, training.replicas, device, compiled=compiled)
    own, share = trained(training, world)
    loss = world.loss(own.X)
    tokens = training.steps * training.replicas * training.batch_size * training.task.context
    return {
        **asdict(training),
        "loss": round(loss, 5) if math.isfinite(loss) else None,
        "share": share,
        "parameters": world.parameters,
        "tokens_per_parameter": round(tokens / world.parameters, 2),
        "seconds": round(time.perf_counter() - begun, 1),
    }
