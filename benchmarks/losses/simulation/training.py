"""One simulated training, from its settings to its record."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch

import curvadion
from benchmarks.common.corpora import hash_of
from benchmarks.common.records import name_of
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
from benchmarks.losses.simulation.world import Weights, World
from curvadion import checks
from curvadion.layout.matrix import UPDATE_SCALES
from curvadion.ops.code_format import BITS
from curvadion.sync.coded_mean import RESIDUAL_DTYPES
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
    "replicated_adamw",
]
SYNCHRONISED = ("adamw", "muon", "normuon", "dion2", "nordion2", "dion")
# Settings of "ours".
OURS = (
    *("up", "fragments", "delay", "align", "polar", "strided", "spectrum_decay"),
    *("exact_momenta", "residual_dtype"),
)
AVERAGED = ("ours", "replicated_adamw")  # by the package's QuantizedAverage
SPARSE = ("sparseloco", "sparse_muon")
DIRECTIONS: dict[str, Direction] = {
    "adamw": "adamw",
    "normuon": "normuon",
    "dion2": "dion2",
    "nordion2": "nordion2",
    "diloco": "adamw",
    "sparseloco": "adamw",
    "powersgd": "adamw",
    "replicated_adamw": "adamw",
    "dion": "low_rank",
}
FORECAST_FROM = (20, 80)  # the steps between which a run's speed is measured
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
        bits, up, fragments, strided, delay, align, polar, spectrum_decay, exact_momenta,
            residual_dtype: of "ours" (:class:`Average`); bits also of "coded_gradients", DiLoCo and
            MuLoCo, 0 for float32.
        outer_lr, outer_momentum: of DiLoCo and MuLoCo; the rate also of the sparse methods.
        kept: of a chunk's 4096 elements, by "sparseloco" (around AdamW) and "sparse_muon".
        size, corpus, batch_size, replicas, steps, seed: the task; ``batch_size`` counts sequences
            of one replica.
        warmdown: share of the steps over which the learning rate of matrices falls.
        elementwise_warmdown: likewise of AdamW's parameters beside directions; None: the same.
        overrun: how far beyond the last step rates would reach zero, as a share of the steps.
        tail: weight of the average of the last weights in those that are evaluated.
        tail_decay: weight of that average's past at a step.
        cosine: whether rates fall by a cosine from the warm-up on to a tenth of the highest.
        warmup: steps of linear warm-up.
        beta2, clip: of :class:`Inner`.
        sequences: of all replicas at a step, split as evenly as possible; None: ``batch_size`` for
            each.
        autocast: whether the model's products are bfloat16.
        evaluate_every: steps between evaluations; 0: the end only.
    """

    method: Method
    lr: float
    elementwise: float = 0.5
    weight_decay: float = 0.01
    look_ahead: float | None = None
    update_scale: str = "spectral"
    budget: float = 0.0
    bits: int = 2
    up: int | None = None
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
    elementwise_warmdown: float | None = None
    overrun: float = 0.0
    tail: float = 0.0
    tail_decay: float = 0.96
    cosine: bool = False
    warmup: int = 20
    beta2: float = 0.95
    clip: float | None = None
    sequences: int | None = None
    autocast: bool = False
    evaluate_every: int = 0
    residual_dtype: str = "float32"

    def __post_init__(self) -> None:
        checks.one_of("method", self.method, get_args(Method))
        checks.one_of("size", self.size, tuple(SIZES))
        checks.number("lr", self.lr)
        checks.number("elementwise", self.elementwise)
        checks.number("budget", self.budget, most=1.0)
        checks.number("warmdown", self.warmdown, most=1.0)
        checks.one_of("update_scale", self.update_scale, tuple(UPDATE_SCALES))
        checks.one_of("bits", self.bits, (0, *BITS))
        checks.one_of("up", self.up, (None, *BITS))
        checks.one_of("residual_dtype", self.residual_dtype, tuple(RESIDUAL_DTYPES))
        checks.number("tail", self.tail, most=1.0)
        checks.number("tail_decay", self.tail_decay, below=1.0)
        checks.number("overrun", self.overrun)
        checks.number("beta2", self.beta2, below=1.0)
        checks.integer("evaluate_every", self.evaluate_every, 0)
        if self.clip is not None:
            checks.number("clip", self.clip)
        if self.sequences is not None:
            checks.integer("sequences", self.sequences, self.replicas)
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
        if self.method in AVERAGED:
            chosen = {key: getattr(self, key) for key in OURS}
            return QuantizedAverage(Average(self.budget, self.bits or None, **chosen), world)
        if self.method.startswith("powersgd"):
            rank = powersgd_rank(self.task.shapes(), self.budget, self.steps)
            if rank is None:
                raise ValueError(f"PowerSGD sends more than {self.budget:%}, even of rank 1")
            return PowerSGD(rank, world)
        if self.method == "coded_gradients":
            return CodedGradients(self.bits or None, self.up, self.budget, world)
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
            beta2=self.beta2,
            clip=self.clip,
        )

    def rates(self, step: int) -> tuple[float, float]:
        """Shares of the highest rates at a step: of matrices, and of AdamW's parameters."""
        end = round(self.steps * (1 + self.overrun))
        schedule = Config(
            steps=end,
            warmup_steps=self.warmup,
            warmdown_fraction=self.warmdown * self.steps / end + (end - self.steps) / end,
            schedule="cosine" if self.cosine else "wsd",
            final_lr_fraction=0.1 if self.cosine else 0.0,
        )
        matrices = lr_scale(step, schedule)
        if self.elementwise_warmdown is None or DIRECTIONS.get(self.method) == "adamw":
            return matrices, matrices
        fraction = self.elementwise_warmdown * self.steps / end + (end - self.steps) / end
        return matrices, lr_scale(step, replace(schedule, warmdown_fraction=fraction))


class TailAverage:
    """A partial average of weights over the end of a training.

    EMA <- decay EMA + (1 - decay) X  at each of the last 5 / (1 - decay) steps, from X on, and
    (1 - blend) X + blend EMA at the end. Between openings X are the anchors, so an anchor weighs by
    the steps that follow it; in :class:`curvadion.TailAverage` it weighs by those that lead to it.
    """

    def __init__(self, blend: float, decay: float, steps: int):
        self.blend = blend
        self.decay = decay
        self.first = max(0, steps - round(5 / (1 - decay)))
        self._average: Weights | None = None

    def update(self, step: int, X: Weights) -> None:
        """Take in the weights after a step, (1, ...)."""
        if not self.blend or step < self.first:
            return
        if self._average is None:
            self._average = {name: x.clone() for name, x in X.items()}
        for name, x in X.items():
            self._average[name].lerp_(x, 1 - self.decay)

    def blended(self, X: Weights) -> Weights:
        """Return the weights to evaluate, (1, ...)."""
        if self._average is None:
            return X
        return {name: x.lerp(self._average[name], self.blend) for name, x in X.items()}


class Trained(NamedTuple):
    """What a training leaves.

    Attributes:
        own: the replicas.
        weights: those to evaluate, (1, ...).
        share: of the bytes.
        curve: (step, held-out loss) of the evaluations before the end; None where it is not
            finite.
    """

    own: Replicas
    weights: Weights
    share: float
    curve: list[tuple[int, float | None]]


@torch.no_grad()
def trained(
    training: Training, world: World, *, check_every: int = 20, ends: float = math.inf
) -> Trained:
    """Train; ends early if weights diverge.

    Evaluations before the end read the weights that all replicas share, those of the last opening.

    Args:
        training: the settings.
        world: the model and its data.
        check_every: steps between tests for weights that are not finite.
        ends: the value of ``time.monotonic()`` by which the run must end.

    Raises:
        TimeoutError: the first steps show that the run would end later.
    """
    outer = training.outer(world)
    drifts = outer is not None and outer.drifts
    own = Replicas(training.inner(outer), world, training.replicas if drifts else 1)
    tail = TailAverage(training.tail, training.tail_decay, training.steps)
    curve: list[tuple[int, float | None]] = []
    begun = 0.0
    for step in range(training.steps):
        if step in FORECAST_FROM:
            _wait_for(world.device)
            if step == FORECAST_FROM[0]:
                begun = time.monotonic()
            else:
                _check_forecast(begun, step, training.steps, ends)
        matrices, others = training.rates(step)
        last = step == training.steps - 1
        gradients = world.gradients(step, own.X, each=outer is not None)
        if outer is not None:
            gradients = outer.gradients(step, gradients)
        own.step(step, matrices, gradients, others)
        if outer is not None:
            outer.after(step, own, matrices * training.lr, last=last)
        shared = outer.anchor if outer is not None and drifts else own.X
        tail.update(step, shared)
        every = training.evaluate_every
        if every and (step + 1) % every == 0 and not last:
            curve.append((step + 1, _rounded(world.loss(tail.blended(shared)))))
            print(f"{training.method}, step {step + 1}: loss {curve[-1][1]}", flush=True)
        if step % check_every == 0 and not bool(
            torch.stack([x.isfinite().all() for x in own.X.values()]).all()
        ):
            break
    weights = tail.blended({name: x[:1] for name, x in own.X.items()})
    share = 1.0 if outer is None else outer.sent / training.steps
    return Trained(own, weights, share, curve)


def _rounded(loss: float) -> float | None:
    """A loss as it is recorded; None if it is not finite."""
    return round(loss, 5) if math.isfinite(loss) else None


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _check_forecast(begun: float, step: int, steps: int, ends: float) -> None:
    """Print how long a run will take; raise TimeoutError if that is too long.

    Args:
        begun: the value of ``time.monotonic()`` at the first step of FORECAST_FROM.
        step: the present one.
        steps: of the run.
        ends: the value of ``time.monotonic()`` by which it must end.
    """
    now = time.monotonic()
    each = (now - begun) / (step - FORECAST_FROM[0])
    left = each * (steps - step)
    if math.isfinite(ends):
        print(f"{1000 * each:.1f} ms a step, {left:.0f} s to go", flush=True)
    if now + left > ends:
        raise TimeoutError(f"{left:.0f} s to go and {ends - now:.0f} s left")


def train(
    training: Training, device: str = "cpu", *, compiled: bool = False, ends: float = math.inf
) -> dict[str, Any]:
    """Return the record of a run: its settings, the held-out loss and the share of bytes.

    The loss is None if weights are no longer finite. ``best_loss`` is the lowest of all
    evaluations.

    Args:
        training: the settings.
        device: of all tensors.
        compiled: as in :class:`World`.
        ends: as in :func:`trained`.
    """
    begun = time.perf_counter()
    world = World(
        training.task,
        training.seed,
        training.replicas,
        device,
        sequences=training.sequences,
        autocast=training.autocast,
        compiled=compiled,
    )
    result = trained(training, world, ends=ends)
    loss = _rounded(world.loss(result.weights))
    tokens = training.steps * sum(world.counts) * training.task.context
    record = {
        **asdict(training),
        "loss": loss,
        "share": result.share,
        "parameters": world.parameters,
        "tokens_per_parameter": round(tokens / world.parameters, 2),
        "seconds": round(time.perf_counter() - begun, 1),
        "torch": torch.__version__,
        "device": name_of(world.device),
    }
    if training.evaluate_every:
        record["curve"] = [*result.curve, (training.steps, loss)]
        finite = [value for _, value in record["curve"] if value is not None]
        record["best_loss"] = min(finite, default=None)
    if (digest := hash_of(training.corpus)) is not None:
        record["text_sha256"] = digest
    if world.device.type == "cuda":
        record["compiled"] = compiled
    return record
