"""Simulate variants of "local Dion steps, then an average" in one process.

    python benchmarks/explore.py --out benchmarks/results/convergence/explored.json

This is a simulation: replicas are the leading dimension of every tensor, nothing is sent, and
bytes are computed from the bits of the codes instead of metered. Model, data, codes and schedule
are the convergence benchmark's, the steps are written out here: Dion on matrices, AdamW on all
else. One seed shows directions; it proves nothing. What --out holds of the same steps and seed is
not run again.
"""

import json
import math
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[1:1] = [str(ROOT / folder) for folder in ("", "kernels", "examples")]

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from command_line import option, parse
from convergence import data
from curvadion import param_groups
from curvadion.layout.matrix import Extent
from curvadion.sync.codec import BLOCK, decode, encode
from curvadion.sync.coded_mean import message_bytes
from curvadion.update.orthonormalize import orthonormalize
from demo import aligned
from grids import SIZES, Task
from token_data import TrainingBatches
from train_gpt import Config, lr_scale

Weights = dict[str, Tensor]  # a leading dimension of replicas, 1 for what all share

TASK, REPLICAS = SIZES["small"], 8
WEIGHT_DECAY, BETA1, BETA2, EPSILON = 0.01, 0.9, 0.95, 1e-8


@dataclass(frozen=True)
class Options:
    """Simulate variants of local steps with averages; record losses and computed bytes."""

    steps: int = option(300, "optimizer steps")
    seed: int = option(0, "of the weights and of the data order")
    out: str = option("runs/explored.json", "the record; what it holds is not run again")
    only: tuple[str, ...] = option((), "names of variants; all where there are none")


@dataclass(frozen=True)
class Variant:
    """How replicas step and what they agree on."""

    name: str
    synchronised: bool = option(False, "every step on the mean gradient, dense: no averages")
    period: int = option(6, "steps between averages; there is always one after the last step")
    first_half: int | None = option(None, "another period for the first half of the steps")
    averaged_start: int = option(0, "so many steps at the start are each followed by an average")
    bits: int | None = option(2, "of the codes, whose errors are fed back; None: exact averages")
    uplink_bits: int | None = option(None, "of the codes that replicas send, where they differ")
    momenta: bool = option(False, "average Dion's momenta too, as exactly as the weights")
    replay: bool = option(False, "average what momenta gathered; take the steps again with that")
    outer_lr: float = option(1.0, "factor of the averaged drift")
    outer_momentum: float = option(0.0, "of a Nesterov step with the averaged drift")
    correction: float = option(1.0, "share of momenta's turn from their own direction to the mean")
    nesterov: float = option(0.0, "share of the gradient in directions, beside the momentum")
    polar: float = option(0.0, "share of a Newton-Schulz step that the mean drift takes")
    orthonormalized: bool = option(False, "polar factor of the mean drift, as long as the steps")
    elementwise_every: int = option(1, "averages from one of all but the matrices to the next")
    parts: int = option(1, "averages from one of a tensor to the next: one fragment at each")
    drift_rank: int | None = option(None, "of matrices' drifts, sent as float32 factors; no codes")
    qr: bool = option(False, "the right factor is orthonormal, not only normalised")
    rank_fraction: float = option(1.0, "of Dion's low-rank factors")
    mu: float = option(0.95, "Dion's momentum")
    lr: float = option(0.04, "the highest learning rate of matrices")
    elementwise_lr: float = option(0.04, "the highest learning rate of all else")

    def averages_after(self, step: int, local_steps: int, steps: int) -> bool:
        """Whether replicas agree after a step, 0 to steps - 1, the last of so many local ones."""
        period = self.first_half if self.first_half and 2 * step < steps else self.period
        return local_steps >= period or step < self.averaged_start or step == steps - 1


VARIANTS = (
    Variant("synchronised", synchronised=True, elementwise_lr=0.02),
    Variant("default"),
    Variant("own-momenta", correction=0.0),
    Variant("half-corrected", correction=0.5),
    Variant("bits-1-period-3", bits=1, period=3),
    Variant("bits-3-period-9", bits=3, period=9),
    Variant("exact-period-6", bits=None),
    Variant("exact-period-3", bits=None, period=3),
    Variant("period-1", period=1),
    Variant("period-2", period=2),
    Variant("bits-3-period-3", bits=3, period=3),
    Variant("bits-4-period-2", bits=4, period=2),
    Variant("bits-1-up-2-down", uplink_bits=1, first_half=4, period=5),
    Variant("averaged-momenta-period-12", momenta=True, period=12, correction=0.0),
    Variant("exact-momenta", bits=None, momenta=True, correction=0.0),
    Variant("dense-first-half", first_half=4, period=12),
    Variant("dense-second-half", first_half=12, period=4),
    Variant("averaged-start-20", averaged_start=20),
    Variant("outer-momentum-0.3", outer_momentum=0.3),
    Variant("outer-lr-1.3", outer_lr=1.3),
    Variant("orthonormalized", orthonormalized=True),
    Variant("exact-replay", bits=None, replay=True),
    Variant("replay", replay=True),
    Variant("mu-0.9", mu=0.9),
    Variant("rank-1/4", rank_fraction=0.25),
    Variant("rank-1/4-own-momenta", rank_fraction=0.25, correction=0.0),
    Variant("elementwise-lr-0.01", elementwise_lr=0.01),
    Variant("lr-0.06", lr=0.06, elementwise_lr=0.06),
    Variant("look-ahead-2", nesterov=2.0),
    Variant("polar", polar=1.0),
    Variant("look-ahead-1-polar", nesterov=1.0, polar=1.0),
    Variant("look-ahead-2-polar", nesterov=2.0, polar=1.0),
    Variant("qr", qr=True),
    Variant("look-ahead-2-polar-qr", nesterov=2.0, polar=1.0, qr=True),
    *(
        Variant(f"look-ahead-{w:g}-polar-qr-period-{p}", nesterov=w, polar=1.0, qr=True, period=p)
        for p, weights in ((2, (1.0, 2.0, 4.0)), (6, (4.0,)), (24, (2.0, 4.0, 8.0)))
        for w in weights
    ),
    Variant(
        "look-ahead-4-polar-qr-period-5-elementwise-15",
        nesterov=4.0,
        polar=1.0,
        qr=True,
        period=5,
        elementwise_every=3,
    ),
    Variant("look-ahead-5.5-polar-qr-period-12", nesterov=5.5, polar=1.0, qr=True, period=12),
    *(
        Variant(
            f"look-ahead-{w:g}-polar-qr-period-{p}-in-{parts}-parts",
            nesterov=w,
            polar=1.0,
            qr=True,
            period=p // parts,
            parts=parts,
        )
        for p, w, counts in ((6, 4.0, (2, 3, 6)), (12, 5.5, (3,)), (24, 8.0, (3,)))
        for parts in counts
    ),
    Variant("drift-rank-3", drift_rank=3, correction=0.0),
    *(
        Variant(
            f"diloco-lr-{lr:g}",
            correction=0.0,
            outer_lr=0.7,
            outer_momentum=0.9,
            lr=lr,
            elementwise_lr=lr,
        )
        for lr in (0.005, 0.01, 0.02)
    ),
    Variant("synchronised-qr", synchronised=True, qr=True, elementwise_lr=0.02),
    Variant("synchronised-look-ahead-1", synchronised=True, nesterov=1.0, elementwise_lr=0.02),
)

# ------------------------------------------------------------------------------------- steps


class World:
    """The model, its initial weights and its data."""

    def __init__(self, task: Task, seed: int, replicas: int):
        training, self.held_out = data(task)
        self.batches = TrainingBatches(training, task.context, task.batch_size, replicas, 1, seed)
        self.seed, self.replicas = seed, replicas
        torch.manual_seed(seed)
        self.model = task.model()
        self.initial = {name: X.detach() for name, X in self.model.named_parameters()}
        groups = [g for g in param_groups(self.model) if g["algorithm"] == "dion"]
        self.matrices = [name for group in groups for name, _ in group["params"]]

    def gradients(self, step: int, X: Weights) -> Weights:
        """Each replica's gradient of its own batch; of all batches where there is one replica."""
        count = len(next(iter(X.values())))
        batches = [batch for rank in range(self.replicas) for batch in self.batches(step, rank)]
        tokens, targets = (torch.stack(each) for each in zip(*batches, strict=True))
        shares = zip(tokens.chunk(count), targets.chunk(count), strict=True)
        each = []
        for i, (mine, wanted) in enumerate(shares):
            own = {name: x[i].clone().requires_grad_() for name, x in X.items()}
            batch = mine.flatten(0, 1), wanted.flatten(0, 1)
            loss = functional_call(self.model, own, batch)
            each.append(torch.autograd.grad(loss, list(own.values())))
        return dict(zip(X, map(torch.stack, zip(*each, strict=True)), strict=True))

    @torch.no_grad()
    def loss(self, X: Weights) -> float:
        """Return the held-out loss of the first replica's weights."""
        first = {name: x[0] for name, x in X.items()}
        losses = [float(functional_call(self.model, first, batch)) for batch in self.held_out]
        counts = [len(tokens) for tokens, _ in self.held_out]
        return sum(map(math.prod, zip(losses, counts, strict=True))) / sum(counts)


def power_iteration(M: Tensor, Q: Tensor, *, qr: bool) -> tuple[Tensor, Tensor, Tensor]:
    """One of Dion's on M, (replicas, m, n): the direction U, what Q reaches of M, the next Q."""
    tall = M.shape[-2] >= M.shape[-1]
    B = M if tall else M.mT
    [P] = orthonormalize([B @ Q], [Extent(range(B.shape[-2]))])
    R = B.mT @ P
    n = range(R.shape[-2])
    [Q] = orthonormalize([R], [Extent(n)]) if qr else [R / (R.norm(dim=-2, keepdim=True) + EPSILON)]
    U, reached = P @ Q.mT, P @ R.mT
    return (U, reached, Q) if tall else (U.mT, reached.mT, Q)


def shape_scale(X: Tensor) -> float:
    """Return sqrt(m / n), by which Dion's steps are longer than their learning rate."""
    m, n = X.shape[-2:]
    return math.sqrt(m / n)


class Replicas:
    """The weights of so many replicas, and their optimizers' state."""

    def __init__(self, variant: Variant, world: World, count: int):
        self.variant = variant
        self.X = {name: x.repeat(count, *[1] * x.ndim) for name, x in world.initial.items()}
        self.M = {name: torch.zeros_like(self.X[name]) for name in world.matrices}
        self.U: Weights = {}
        self.Q: Weights = {}
        generator = torch.Generator().manual_seed(world.seed)
        for name, M in self.M.items():
            n = min(M.shape[1:])
            r = math.ceil(variant.rank_fraction * n)
            self.Q[name] = torch.randn(n, r, generator=generator).repeat(count, 1, 1)
        others = {name: X for name, X in self.X.items() if name not in self.M}
        self.first = {name: torch.zeros_like(X) for name, X in others.items()}
        self.second = {name: torch.zeros_like(X) for name, X in others.items()}

    def step(self, step: int, scale: float, gradients: Weights) -> None:
        """Take a step with gradients of one's own, at a share of the highest learning rates."""
        for name, G in gradients.items():
            if name in self.M:
                M = self.M[name].add_(G)
                ahead = self.variant.nesterov * G
                reached = self.dion(name, scale, M + ahead)
                M.sub_(reached - ahead, alpha=1 - self.variant.mu)
            else:
                self.adamw(name, step, scale, G)

    def dion(self, name: str, scale: float, M: Tensor) -> Tensor:
        """Take a step along M's direction; return what the factors reach of M."""
        X, lr = self.X[name], scale * self.variant.lr
        self.U[name], reached, self.Q[name] = power_iteration(M, self.Q[name], qr=self.variant.qr)
        X.mul_(1 - WEIGHT_DECAY * lr).sub_(self.U[name], alpha=lr * shape_scale(X))
        return reached

    def adamw(self, name: str, step: int, scale: float, G: Tensor) -> None:
        """Take AdamW's step, without decay, number ``step`` from 0."""
        first = self.first[name].lerp_(G, 1 - BETA1) / (1 - BETA1 ** (step + 1))
        second = self.second[name].lerp_(G.square(), 1 - BETA2) / (1 - BETA2 ** (step + 1))
        update = first / (second.sqrt() + EPSILON)
        self.X[name].sub_(update, alpha=scale * self.variant.elementwise_lr)

    def adopt(self, shared: "Replicas") -> None:
        """Go on from the one replica in ``shared``."""
        for state in ("X", "M", "Q", "first", "second"):
            for name, own in getattr(self, state).items():
                own.copy_(getattr(shared, state)[name])


# -------------------------------------------------------------------------------- agreements


def rounded(x: Tensor, bits: int) -> Tensor:
    """Return what codes of x, (replicas, ...), stand for."""
    flat = x.flatten(1)
    padded = F.pad(flat, (0, -flat.shape[1] % BLOCK))
    decoded = decode(encode(padded.flatten(), bits), bits).view_as(padded)
    return decoded[:, : flat.shape[1]].reshape(x.shape)


class Mean:
    """Means over replicas: exact, or in codes up and down whose errors are added next time.

    ``bytes`` counts what a replica sends and receives, halved.
    """

    def __init__(self, bits: int | None, uplink_bits: int | None):
        self.down, self.up = bits, uplink_bits or bits
        self.bytes = 0.0
        self.lost: dict[tuple[str, str], Tensor] = {}
        self.factors: dict[tuple[str, str], Tensor] = {}
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, name: str, x: Tensor) -> Tensor:
        """(replicas, ...) -> (1, ...); errors are kept by name."""
        sent = self._sent(("up", name), x, self.up)
        return self._sent(("down", name), sent.mean(0, keepdim=True), self.down)

    def low_rank(self, name: str, x: Tensor, rank: int) -> Tensor:
        """(replicas, m, n) -> (1, m, n): one power iteration on the mean; each keeps its own error.

        Two all-reduces of float32 factors, of (m + n) rank numbers together.
        """
        key = ("low rank", name)
        m, n = x.shape[-2:]
        wanted = x + self.lost[key] if key in self.lost else x
        if key not in self.factors:
            self.factors[key] = torch.randn(n, min(rank, m, n), generator=self.generator)
        [P] = orthonormalize(
            [(wanted @ self.factors[key]).mean(0, keepdim=True)], [Extent(range(m))]
        )
        R = (wanted.mT @ P).mean(0, keepdim=True)
        self.bytes += 4 * (m + n) * P.shape[-1]
        [self.factors[key]] = R / (R.norm(dim=-2, keepdim=True) + EPSILON)
        mean = P @ R.mT
        self.lost[key] = wanted - mean
        return mean

    def _sent(self, key: tuple[str, str], x: Tensor, bits: int | None) -> Tensor:
        if bits is None:
            self.bytes += 4 * x[0].numel() / 2
            return x
        self.bytes += message_bytes([x[0].numel()], bits) / 2
        wanted = x + self.lost[key] if key in self.lost else x
        sent = rounded(wanted, bits)
        self.lost[key] = wanted - sent
        return sent


class Averaging:
    """Replicas average how far their weights went, and momenta if asked to."""

    def __init__(self, variant: Variant, world: World):
        self.variant, self.mean = variant, Mean(variant.bits, variant.uplink_bits)
        self.shared = Replicas(variant, world, 1)
        self.averages = 0
        self.length = dict.fromkeys(self.shared.X, 0.0)  # of the steps since a tensor's average
        self.velocity = {name: torch.zeros_like(X) for name, X in self.shared.X.items()}

    def gather(self, gradients: Weights) -> None:
        """Note the gradients of a local step."""

    def agree(
        self, own: Replicas, window: Sequence[tuple[int, float]], *, last: bool = False
    ) -> None:
        """Bring replicas together after the steps, each with its scale, since the last time.

        ``last``: of all times, at which nothing is left out.
        """
        self.averages += 1
        gone = self.variant.lr * sum(scale for _, scale in window)
        for i, (name, X) in enumerate(own.X.items()):
            self.length[name] += gone
            every = self.variant.elementwise_every if name not in own.M else 1
            if not last and (self.averages % every or (self.averages - i) % self.variant.parts):
                continue
            length, self.length[name] = self.length[name], 0.0
            agreed = self.shared.X[name]
            drift = X - agreed
            mean = self._mean(name, drift)
            if name in own.M and self.variant.correction:
                self._correct(own, name, (mean - drift) / (length * shape_scale(X)))
            agreed += self._outer(name, mean, length)
            X.copy_(agreed)
        for name, M in own.M.items() if self.variant.momenta else ():
            M.copy_(self.shared.M[name].add_(self.mean("M " + name, M - self.shared.M[name])))

    def _mean(self, name: str, drift: Tensor) -> Tensor:
        rank = self.variant.drift_rank
        if rank is None or name not in self.shared.M:
            return self.mean(name, drift)
        return self.mean.low_rank(name, drift, rank)

    def _correct(self, own: Replicas, name: str, turn: Tensor) -> None:
        # M = U S with a symmetric S; weights go along -U, so that ``turn`` is own - mean direction.
        U, M = own.U[name], own.M[name]
        tall = M.shape[-2] >= M.shape[-1]
        turned = turn @ (U.mT @ M) if tall else (M @ U.mT) @ turn
        M.sub_(turned, alpha=self.variant.correction)

    def _outer(self, name: str, mean: Tensor, length: float) -> Tensor:
        velocity = self.velocity[name].mul_(self.variant.outer_momentum).add_(mean)
        mean = self.variant.outer_lr * (mean + self.variant.outer_momentum * velocity)
        if name not in self.shared.M:
            return mean
        V = mean / (length * shape_scale(mean))
        mean = mean + self.variant.polar * length * shape_scale(mean) * (V - V @ V.mT @ V) / 2
        if not self.variant.orthonormalized:
            return mean
        left, _, right = torch.linalg.svd(mean, full_matrices=False)
        polar: Tensor = left @ right
        return length * shape_scale(mean) * polar


class Replay(Averaging):
    """Replicas average what their momenta gathered, and all take the same steps with that.

    The mean enters the shared momentum step by step, as equal gradients would. AdamW's steps take
    the mean gradient of the window.
    """

    def __init__(self, variant: Variant, world: World):
        super().__init__(variant, world)
        self.gathered: Weights = {}

    def gather(self, gradients: Weights) -> None:
        for name, G in gradients.items():
            decay = self.variant.mu if name in self.shared.M else 1.0
            self.gathered[name] = decay * self.gathered[name] + G if name in self.gathered else G

    def agree(
        self, own: Replicas, window: Sequence[tuple[int, float]], *, last: bool = False
    ) -> None:
        for name, gathered in self.gathered.items():
            mean = self.mean(name, gathered)
            if name in self.shared.M:
                self._dion(name, mean, window)
            else:
                for step, scale in window:
                    self.shared.adamw(name, step, scale, mean / len(window))
        self.gathered.clear()
        own.adopt(self.shared)

    def _dion(self, name: str, mean: Tensor, window: Sequence[tuple[int, float]]) -> None:
        mu, M = self.variant.mu, self.shared.M[name].clone()
        for i, (_, scale) in enumerate(window, start=1):
            entered = (1 - mu**i) / (1 - mu ** len(window))
            replayed = mu ** (i - 1) * M + entered * mean
            self.shared.dion(name, scale, replayed)
            self.shared.M[name].copy_(mu * replayed)


# -------------------------------------------------------------------------------------- runs


@torch.no_grad()
def train(
    variant: Variant, task: Task, steps: int, seed: int, replicas: int = REPLICAS
) -> dict[str, Any]:
    """Return the held-out loss of what replicas agreed on, None if it is not finite, and bytes.

    ``share`` is of the bytes that dense float32 gradients take at every step.
    """
    begun, world = time.perf_counter(), World(task, seed, replicas)
    own = Replicas(variant, world, 1 if variant.synchronised else replicas)
    agreement = (Replay if variant.replay else Averaging)(variant, world)
    schedule = Config(steps=steps, warmdown_fraction=0.2)
    window: list[tuple[int, float]] = []
    for step in range(steps):
        window.append((step, lr_scale(step, schedule)))
        with torch.enable_grad():
            gradients = world.gradients(step, own.X)
        own.step(*window[-1], gradients)
        agreement.gather(gradients)
        averages = variant.averages_after(step, len(window), steps)
        if averages and not variant.synchronised:
            agreement.agree(own, window, last=step == steps - 1)
            window.clear()
    loss = world.loss(own.X)
    dense = 4 * steps * sum(X.numel() for X in world.initial.values())
    return {
        "loss": loss if math.isfinite(loss) else None,
        "share": 1.0 if variant.synchronised else agreement.mean.bytes / dense,
        "seconds": round(time.perf_counter() - begun, 1),
    }


def selected(names: Sequence[str]) -> list[Variant]:
    """Return the variants of these names, all for none.

    Raises:
        ValueError: for a name that no variant has.
    """
    known = [variant.name for variant in VARIANTS]
    if unknown := set(names) - set(known):
        raise ValueError(f"only={sorted(unknown)}: the variants are {known}")
    return [variant for variant in VARIANTS if not names or variant.name in names]


def write(file: Path, command: str, records: Sequence[dict[str, Any]]) -> None:
    """Write a JSON object with one record a line, the whole file or nothing of it."""
    head = f'{{"command": {json.dumps(command)},\n"torch": {json.dumps(torch.__version__)},\n'
    lines = ",\n".join(json.dumps(record, allow_nan=False) for record in records)
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".tmp")
    unfinished.write_text(f'{head}"variants": [\n{lines}\n]}}\n')
    unfinished.replace(file)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the selected variants that have no record yet, and print a table of all selected."""
    options = parse(Options, arguments)
    file, variants = Path(options.out), selected(options.only)
    given = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "benchmarks/explore.py", *given])
    records = json.loads(file.read_text("utf-8"))["variants"] if file.exists() else []
    rows = [["variant", "held-out loss", "bytes"]]
    for variant in variants:
        wanted = {"name": variant.name, "steps": options.steps, "seed": options.seed}
        wanted |= {"variant": asdict(variant)}
        record = next((r for r in records if wanted.items() <= r.items()), None)
        if record is None:
            record = wanted | train(variant, TASK, options.steps, options.seed)
            records.append(record)
            write(file, command, records)
            print(f"{variant.name}: {record['seconds']:.0f} s", flush=True)
        loss = "diverged" if record["loss"] is None else f"{record['loss']:.4f}"
        rows.append([variant.name, loss, f"{record['share']:.3%}"])
    print(aligned(rows))


if __name__ == "__main__":
    torch.set_num_threads(1)  # the tensors are small
    main()
