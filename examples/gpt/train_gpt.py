"""Train a small GPT with AdamW, Dion or CurvaDion on one or more processes.

    torchrun --standalone --nproc-per-node 2 examples/gpt/train_gpt.py --wire-budget 0.01

Every process is a replica with its own data, unless ``--parallel`` chooses another layout. It runs
on GPUs (NCCL) if there are any, otherwise on CPUs (gloo), and writes a log, checkpoints and a
summary below ``--out``.
"""

import gc
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn  # before init_process_group: its functions keep it as a default
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import checkpoint
import curvadion
from checkpoint import Progress
from command_line import option, parse
from curvadion import (
    RMMC,
    AlwaysOpen,
    ByteBudget,
    CodedGradients,
    CurvaDion,
    Dion,
    FixedPeriod,
    Gate,
    LowRank,
    QuantizedAverage,
    ReplicaOptimizer,
    StepReport,
    Sync,
)
from curvadion.comm.replicas import ReplicasArgument
from gpt import GPT, GPTConfig
from optional import need
from parallel import Layout, Parallel, Sizes, mesh_sizes, unsynchronized
from run_log import RunLog
from token_data import TrainingBatches, load, split, validation_batches

T = TypeVar("T")


@dataclass(frozen=True)
class Config:
    """Train a small GPT with AdamW, Dion or CurvaDion."""

    out: str = option("runs/gpt", "folder of the log, the checkpoints and the summary")
    seed: int = option(0, "seed of the weights and of the data order")
    resume: bool = option(False, "continue from the newest checkpoint in --out, if there is one")

    # Data
    data: tuple[str, ...] = option(
        (), "text files and folders, or .bin token files; default: Python's standard library"
    )
    data_bytes: int = option(10_000_000, "maximum bytes of text to use")
    validation_fraction: float = option(0.05, "share of the tokens, at their end, held out")
    validation_tokens: int = option(32_768, "held-out tokens per evaluation, the same each time")

    # Model
    layers: int = option(6, "transformer blocks")
    heads: int = option(4, "attention heads")
    dim: int = option(256, "width of the residual stream")
    context: int = option(256, "tokens in a sequence")
    vocab_size: int | None = option(None, "default: 256 for bytes, 50304 for token files")
    tie: bool = option(False, "use the embedding as the output head")

    # Processes
    parallel: Parallel = option("ddp", "how the model is laid out over the processes")
    shards: int | None = option(None, "hsdp, hsdp_tp: FSDP shards of a replica; default: 2")
    tensor: int | None = option(None, "fsdp_tp, hsdp_tp: ranks that share a layer; default: 2")
    node_size: int = option(1, "ranks of a node, to count what crosses between nodes")
    elastic: int | None = option(
        None, "this process is one of this many elastic replicas, through torchft"
    )

    # Steps
    steps: int = option(1000, "optimizer steps")
    batch_size: int = option(16, "sequences in a micro-batch of one data-parallel rank")
    accumulation: int = option(1, "micro-batches in a step")
    schedule: Literal["wsd", "cosine"] = option("wsd", "warmup-stable-warmdown, or cosine")
    warmup_steps: int = option(20, "steps of linear learning-rate warm-up")
    warmdown_fraction: float = option(0.3, "wsd: share of the steps in the final linear descent")
    final_lr_fraction: float = option(0.0, "learning rate at the end, as a share of the highest")
    clip_norm: float | None = option(None, "clip gradients to this norm, over all replicas")

    # Optimizer
    optimizer: Literal["adamw", "dion", "curvadion"] = option("curvadion", "adamw: plain DDP")
    lr: float | None = option(
        None, "rate of matrices, with adamw of all; default 0.02, adamw 0.003"
    )
    embedding_lr: float = option(3e-3, "dion, curvadion: rate of the embedding")
    head_lr: float = option(3e-3, "dion, curvadion: rate of the output head")
    vector_lr: float = option(3e-3, "dion, curvadion: rate of the norms' gains")
    weight_decay: float = option(0.01, "weight decay of matrices; other parameters have none")
    beta1: float = option(0.9, "AdamW's decay of the first moment")
    beta2: float = option(0.95, "AdamW's decay of the second moment")
    momentum: float = option(0.95, "Dion's momentum")
    look_ahead: float | None = option(
        None,
        "weight of the gradient beside it; default 0, with codes larger for rarer openings",
    )
    direction: Literal["low_rank", "polar", "normuon", "dion2", "nordion2"] | None = option(
        None, "Dion's direction; default low_rank, with codes at full rank polar (Muon's)"
    )
    newton_schulz_steps: int = option(4, "iterations for polar directions")
    rank_fraction: float | None = option(
        None, "rank as a share of a matrix's smaller side; default 1/4, with codes 1"
    )
    momentum_rule: Literal["error_feedback", "plain"] = option("error_feedback", "Dion's")
    right_factor: Literal["column_normalized", "qr"] | None = option(
        None, "Dion's; default column_normalized, with codes qr"
    )

    # CurvaDion: when replicas synchronise (one of three, except with coded_gradients)
    wire_budget: float | None = option(
        None, "share of dense gradients' bytes to send; 0.01 is recommended"
    )
    period: int | None = option(None, "synchronise at every period-th step")
    threshold: float | None = option(None, "RMMC above which replicas synchronise; the paper's")

    # CurvaDion: how they synchronise, and their local steps
    local_step: Literal["dion", "gradient"] = option("dion", "step while the gate is closed")
    local_lr: float | None = option(
        None, "its learning rate for matrices; default: that of open steps"
    )
    max_local_steps: int = option(50, "longest run of local steps")
    synchronized_steps: int = option(0, "steps at the start that always synchronise")
    sync: (
        Literal["low_rank", "low_rank_unaveraged", "quantized_average", "coded_gradients"] | None
    ) = option(
        None, "how replicas synchronise; default low_rank, with --wire-budget quantized_average"
    )
    bits: tuple[int, ...] = option(
        (),
        "bits of a code, or of one to the owners of blocks and one back, such as 1 2; default by "
        "--wire-budget, else 2, coded_gradients 3",
    )
    fragments: int = option(1, "quantized_average: parts of the model, one per opening")
    delay: int = option(0, "quantized_average: steps until means arrive")
    align_momentum: bool = option(True, "quantized_average: align momenta with the mean direction")
    spectrum_decay: float = option(0.8, "quantized_average: weight of earlier openings in that")
    polar_correction: bool = option(True, "quantized_average: restore lengths lost by averaging")

    # Running
    validate_every: int = option(100, "steps between evaluations")
    checkpoint_every: int = option(0, "steps between checkpoints; 0: none")
    tensorboard: bool = option(False, "write TensorBoard events to --out too")
    progress: bool = option(True, "show a progress bar")
    bfloat16: bool = option(False, "compute in bfloat16, keep float32 weights")
    compile: bool = option(False, "torch.compile the model")

    @property
    def sizes(self) -> Sizes:
        """The mesh of all processes."""
        return mesh_sizes(self.parallel, dist.get_world_size(), self.shards, self.tensor)

    @property
    def readers(self) -> int:
        """The number of data-parallel places, which read their own samples."""
        return (self.elastic or 1) * self.sizes.readers

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all processes together read in one step."""
        return self.accumulation * self.batch_size * self.context * self.readers


def lr_scale(step: int, config: Config) -> float:
    """Return the learning rate at a step, 0 to steps - 1, as a share of the highest."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "cosine":
        done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
        descent = 0.5 * (1 + math.cos(math.pi * done))
    else:
        descent = min(1.0, (config.steps - step) / max(1, config.warmdown_fraction * config.steps))
    return config.final_lr_fraction + (1 - config.final_lr_fraction) * descent


def learning_rates(optimizer: Optimizer) -> list[dict[str, float]]:
    """Return the learning rates of each group."""
    keys = ("lr", "local_lr")
    return [{k: g[k] for k in keys if g.get(k) is not None} for g in optimizer.param_groups]


def set_learning_rates(optimizer: Optimizer, highest: list[dict[str, float]], scale: float) -> None:
    """Set each group's learning rates to a share of the highest."""
    for group, rates in zip(optimizer.param_groups, highest, strict=True):
        group.update({key: scale * rate for key, rate in rates.items()})


def check_elastic(config: Config) -> None:
    """Raise ValueError for settings that elastic replicas do not support."""
    wrong = None
    if config.optimizer != "curvadion":
        wrong = f"optimizer={config.optimizer!r}: pass curvadion"
    elif config.sizes.replicas > 1:
        wrong = f"parallel={config.parallel!r} over {dist.get_world_size()} processes: pass fsdp"
    elif config.checkpoint_every:
        wrong = f"checkpoint_every={config.checkpoint_every}: leave it out"
    if wrong:
        raise ValueError(f"elastic={config.elastic} with {wrong}")


def build_optimizer(config: Config, model: GPT, replicas: ReplicasArgument) -> Optimizer:
    """Return the optimizer that the configuration names, for these replicas."""
    groups = curvadion.param_groups(
        model,
        options={
            "embedding": {"lr": config.embedding_lr},
            "head": {"lr": config.head_lr},
            "vector": {"lr": config.vector_lr},
        },
    )
    lr, betas = config.lr, (config.beta1, config.beta2)
    if config.optimizer == "adamw":
        decay = {"dion": config.weight_decay, "adamw": 0.0}
        plain = [{"params": g["params"], "weight_decay": decay[g["algorithm"]]} for g in groups]
        return torch.optim.AdamW(plain, lr=3e-3 if lr is None else lr, betas=betas)
    shared: dict[str, Any] = dict(
        lr=0.02 if lr is None else lr,
        replicas=replicas,
        momentum=config.momentum,
        betas=betas,
        weight_decay=config.weight_decay,
        momentum_rule=config.momentum_rule,
        newton_schulz_steps=config.newton_schulz_steps,
    )
    for optional in ("look_ahead", "direction", "rank_fraction", "right_factor"):
        if (value := getattr(config, optional)) is not None:
            shared[optional] = value
    if config.optimizer == "dion":
        return Dion(groups, **shared)
    return CurvaDion(
        groups,
        gate=gate(config),
        sync=sync(config),
        local_step=config.local_step,
        local_lr=config.local_lr,
        max_local_steps=config.max_local_steps,
        warmup_steps=config.synchronized_steps,
        **shared,
    )


def gate(config: Config) -> Gate:
    """Return the gate that the configuration asks for."""
    choices = {
        "wire_budget": config.wire_budget,
        "period": config.period,
        "threshold": config.threshold,
    }
    given = [f"{name}={value}" for name, value in choices.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)}: give one of them")
    if config.wire_budget is not None:
        return ByteBudget(config.wire_budget)
    if config.period is not None:
        return FixedPeriod(config.period)
    if config.threshold is not None:
        return RMMC(config.threshold)
    if config.sync == "coded_gradients":
        return AlwaysOpen()
    raise ValueError(
        "--optimizer curvadion needs to know when replicas synchronise: pass --wire-budget 0.01 "
        "(recommended), --period 50 or, for the paper's gate, --threshold 0.3"
    )


def sync(config: Config) -> Sync:
    """Return the sync that the configuration asks for."""
    kind = config.sync or ("low_rank" if config.wire_budget is None else "quantized_average")
    bits = config.bits[0] if len(config.bits) == 1 else config.bits or None
    if kind == "quantized_average":
        return QuantizedAverage(
            bits=bits,
            fragments=config.fragments,
            delay=config.delay,
            align_momentum=config.align_momentum,
            spectrum_decay=config.spectrum_decay,
            polar_correction=config.polar_correction,
        )
    if kind == "coded_gradients":
        return CodedGradients(bits)
    return LowRank(average_weights=kind == "low_rank")


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Join torchrun's process group, or one of a single process, and yield this rank's device.

    An existing process group is used as it is.
    """
    joins = not dist.is_initialized()
    if joins:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        alone: dict[str, Any] = dict(init_method="tcp://localhost:0", rank=0, world_size=1)
        dist.init_process_group(backend, **({} if "RANK" in os.environ else alone))
    device = torch.device("cpu")
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    try:
        yield device
        if joins:
            dist.barrier()
    finally:
        if joins:
            leave_process_group()


def leave_process_group() -> None:
    """Destroy the default process group and end its threads, on every rank after a barrier.

    Gloo's threads end with the last reference to the group, which reference cycles may hold. A
    thread that frees a tensor while the interpreter exits aborts it.
    """
    dist.destroy_process_group()
    gc.collect()


def load_data(config: Config) -> tuple[TrainingBatches, list[tuple[Tensor, Tensor]], int]:
    """Return the training batches, the fixed validation batches and the vocabulary's size."""
    tokens = load(config.data, config.data_bytes, config.vocab_size)
    training, held_out = split(tokens, config.validation_fraction)
    batches = TrainingBatches(
        training,
        config.context,
        config.batch_size,
        config.readers,
        config.accumulation,
        config.seed,
    )
    fixed = validation_batches(
        held_out, config.context, config.batch_size, config.validation_tokens
    )
    return batches, fixed, tokens.vocab_size


def whole(parameter: Tensor) -> Tensor:
    """Return a parameter, gathered from its shards; collective."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def mean_over_ranks(value: Tensor) -> float:
    """Return the mean of a number over all ranks; data-parallel ranks have equal weight."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


@torch.no_grad()
def held_out_loss(
    module: nn.Module, loss: Callable[..., Tensor], batches: Sequence[tuple[Tensor, Tensor]]
) -> float:
    """Return the mean loss over batches with the module in evaluation mode, averaged over ranks."""
    module.eval()
    losses = [loss(*batch) * len(batch[0]) for batch in batches]
    module.train()
    sequences = sum(len(inputs) for inputs, _ in batches)
    return mean_over_ranks(torch.stack(losses).sum() / sequences)


@torch.no_grad()
def drift(weights: Iterable[Tensor], replicas: dist.ProcessGroup | None) -> float:
    """Return sqrt(mean over replicas of ||X_i - mean||^2) / ||mean||; collective."""
    if replicas is None:
        return 0.0
    deviation = 0.0
    norm = 0.0
    for X in weights:
        mean = X.to(torch.float32, copy=True)
        dist.all_reduce(mean, group=replicas)
        mean /= replicas.size()
        square = (X - mean).square().sum().double()
        dist.all_reduce(square, group=replicas)
        deviation += float(square) / replicas.size()
        norm += float(mean.square().sum())
    return math.sqrt(deviation / norm) if norm > 0 else 0.0


KEPT = (
    *("gate_open", "rmmc", "local_steps", "skipped"),
    *("waited_seconds", "opening_seconds", "step_seconds", "share"),
)


def decision(report: StepReport) -> dict[str, Any]:
    """Return the parts of an optimizer's report that a log keeps: the gate's."""
    kept = report.as_dict()
    return {key: kept[key] for key in KEPT}


class Counted(NamedTuple):
    """A meter's counts at some time."""

    payload: int
    sent: float
    crossing: float
    node_size: int

    @classmethod
    def by(cls, meter: curvadion.WireMeter, node_size: int) -> "Counted":
        """Return the meter's current counts."""
        crossing = meter.between(node_size).sent
        return cls(meter.total.bytes, meter.total.sent, crossing, node_size)

    def add_to(self, progress: Progress, meter: curvadion.WireMeter) -> int:
        """Add the counts since then to the progress, and return their payload."""
        now = Counted.by(meter, self.node_size)
        progress.wire_bytes += now.payload - self.payload
        progress.sent_bytes += now.sent - self.sent
        progress.crossing_bytes += now.crossing - self.crossing
        return now.payload - self.payload


class Trainer:
    """A model, its optimizer and its data: one rank's share of the training."""

    def __init__(self, config: Config, device: torch.device):
        self.config, self.device = config, device
        self.meter = curvadion.WireMeter()
        self.checkpoints = Path(config.out) / "checkpoints"
        self.batches, self.held_out, vocab_size = load_data(config)
        torch.manual_seed(config.seed)
        shape = GPTConfig(vocab_size, config.layers, config.heads, config.dim, config.tie)
        self.model = GPT(shape).to(device)
        if config.compile:
            if config.parallel != "ddp":
                raise ValueError(f"compile with parallel={config.parallel!r}: only with 'ddp'")
            self.model.compile()
        self.layout = Layout(config.parallel, config.sizes, device)
        communicates = config.optimizer != "adamw"
        self.wrapped = self.layout.wrap(
            self.model, config.context, gradients_stay_local=communicates
        )
        self.reader, replicas = self.layout.reader, self.layout.replicas
        members: Any = None
        if config.elastic:
            from curvadion.integrations import torchft

            check_elastic(config)
            number = int(os.environ["REPLICA_GROUP_ID"].rpartition("_")[2])
            self.reader += number * config.sizes.readers
            members = torchft.ElasticReplicas()
        self.optimizer = build_optimizer(config, self.model, members or replicas)
        self.highest_lr = learning_rates(self.optimizer)
        if members:
            members.start(self.optimizer)

    def loss(self, model: torch.nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.bfloat16):
            loss: Tensor = model(inputs.to(self.device), targets.to(self.device))
        return loss

    def step(self, step: int) -> dict[str, Any]:
        """Take a step; return its loss, learning rate, gate, and what the optimizer sent."""
        set_learning_rates(self.optimizer, self.highest_lr, lr_scale(step, self.config))
        mean_loss = torch.zeros((), device=self.device)
        for i, batch in enumerate(self.batches(step, self.reader), start=1):
            last = i == self.config.accumulation
            with nullcontext() if last else unsynchronized(self.wrapped):
                loss = self.loss(self.wrapped, *batch) / self.config.accumulation
                loss.backward()
            mean_loss += loss.detach()
        if self.config.clip_norm is not None:
            self.clip(self.config.clip_norm)
        sent = self.meter.total.bytes
        self.optimizer.step()
        sent = self.meter.total.bytes - sent
        self.optimizer.zero_grad()
        lr = self.optimizer.param_groups[0]["lr"]  # of the matrices
        return {"loss": mean_loss, "lr": lr, **self.gate(), "optimizer_bytes": sent}

    def clip(self, norm: float) -> None:
        """Clip gradients, which are averaged for AdamW and local for the others."""
        if isinstance(self.optimizer, ReplicaOptimizer):
            curvadion.clip_grad_norm_(self.optimizer, norm)
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def gate(self) -> dict[str, Any]:
        """Return what the last step's gate did; with AdamW every step synchronises."""
        if not isinstance(self.optimizer, ReplicaOptimizer) or self.optimizer.report is None:
            return {
                "gate_open": True,
                "rmmc": None,
                "local_steps": 0,
                "skipped": False,
                "waited_seconds": 0.0,
                "share": None,
            }
        return decision(self.optimizer.report)

    def validation_loss(self) -> float:
        """Return the held-out loss of each replica's own weights, averaged over the replicas.

        Drifted weights are evaluated as they are, without averaging them.
        """
        return held_out_loss(self.model, partial(self.loss, self.model), self.held_out)

    def drift(self) -> float:
        """Return how far the replicas' weights are from their mean, relative to its norm."""
        return drift((whole(p.detach()) for p in self.model.parameters()), self.layout.replicas)

    def resume(self) -> Progress:
        """Load the newest undamaged checkpoint, if there is one and the configuration resumes."""
        # Other replicas know the step.
        if self.config.elastic and isinstance(self.optimizer, ReplicaOptimizer):
            return Progress(step=self.optimizer.progress.steps)
        if not self.config.resume:
            if checkpoint.all_in(self.checkpoints):
                raise ValueError(
                    f"out={self.config.out!r} holds checkpoints of a run: pass --resume to "
                    "continue it, or another --out"
                )
            return Progress()
        return checkpoint.resume(self.checkpoints, self.model, self.optimizer) or Progress()

    def save(self, progress: Progress) -> None:
        """Synchronise the replicas if they may differ, and write a checkpoint."""
        if isinstance(self.optimizer, ReplicaOptimizer):
            counted = Counted.by(self.meter, self.config.node_size)
            # A checkpoint keeps one replica's optimizer state, which all of them load.
            self.optimizer.synchronize(exact=True)
            progress.optimizer_bytes += counted.add_to(progress, self.meter)
        with self.meter.paused():
            checkpoint.save(self.checkpoints, self.model, self.optimizer, progress)


def train(config: Config, device: torch.device) -> dict[str, Any]:
    """Run the training that the configuration describes and return its summary."""
    trainer = Trainer(config, device)
    progress = trainer.resume()
    first, out = dist.get_rank() == 0, Path(config.out)
    log = RunLog(out, after_step=progress.step, tensorboard=config.tensorboard, active=first)
    bar = progress_bar(config, progress) if config.progress and first else None
    if first:
        write_json(out / "config.json", asdict(config))
    # The meter counts training only: evaluation and logging pause it.
    with log, trainer.meter as meter:
        while progress.step < config.steps:
            record = train_step(trainer, progress)
            log.write("train", progress.step, **record, **position(config, progress))
            if bar:
                bar.set_postfix(loss=f"{record['loss']:.3f}", sent=f"{progress.wire_bytes:.2e} B")
                bar.update()
            if is_due(config.validate_every, config, progress):
                with meter.paused():
                    progress.val_loss, progress.drift = trainer.validation_loss(), trainer.drift()
                judged = {"val_loss": progress.val_loss, "drift": progress.drift}
                log.write("validation", progress.step, **judged, **position(config, progress))
            if config.checkpoint_every and is_due(config.checkpoint_every, config, progress):
                trainer.save(progress)
    summary = summarise(config, progress)
    if first:
        write_json(out / "summary.json", summary)
    return summary


def train_step(trainer: Trainer, progress: Progress) -> dict[str, Any]:
    """Take one step, update the progress and return what to log."""
    counted = Counted.by(trainer.meter, trainer.config.node_size)
    started = time.perf_counter()
    record = trainer.step(progress.step)
    with trainer.meter.paused():
        record["loss"] = mean_over_ranks(record["loss"])
    progress.step += 1
    progress.seconds += time.perf_counter() - started
    counted.add_to(progress, trainer.meter)
    if record["share"] is None and trainer.config.parallel == "ddp":
        # LowRank and DDP do not know what they send, but the meter has counted it.
        replicas = trainer.config.sizes.replicas
        elements = sum(p.numel() for p in trainer.model.parameters())
        dense = 4 * elements * 2 * (replicas - 1) / replicas
        record["share"] = progress.sent_bytes / (progress.step * dense) if dense else None
    progress.optimizer_bytes += record["optimizer_bytes"]
    progress.open_gates += record["gate_open"]
    return record


def progress_bar(config: Config, progress: Progress) -> Any:
    """Return a progress bar over the steps."""
    tqdm = need("tqdm", "--progress").tqdm
    return tqdm(desc=config.optimizer, total=config.steps, initial=progress.step, unit="step")


def is_due(every: int, config: Config, progress: Progress) -> bool:
    """Return whether something that is due every ``every`` steps, and at the last, is due now."""
    return progress.step == config.steps or (every > 0 and progress.step % every == 0)


def position(config: Config, progress: Progress) -> dict[str, float]:
    """Return the x values of a log record: tokens read and bytes sent."""
    return {
        "tokens": progress.step * config.tokens_per_step,
        "wire_bytes": progress.wire_bytes,
        "sent_bytes": progress.sent_bytes,
    }


def summarise(config: Config, progress: Progress) -> dict[str, Any]:
    """Return the results of a run."""
    steps = max(1, progress.step)
    return {
        "name": config.optimizer,
        "parallel": config.parallel,
        **config.sizes._asdict(),
        "val_loss": progress.val_loss,
        "tokens_per_step": config.tokens_per_step,
        "wire_bytes_per_step": progress.wire_bytes / steps,
        "sent_bytes_per_step": progress.sent_bytes / steps,
        "crossing_bytes_per_step": progress.crossing_bytes / steps,
        "optimizer_bytes_per_step": progress.optimizer_bytes / steps,
        "open_gate_share": progress.open_gates / steps,
        "drift": progress.drift,
        "seconds": progress.seconds,
        "steps": progress.step,
        **position(config, progress),
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file for people to read."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Train with the command line's settings and return the summary."""
    return launch(train, parse(Config, arguments))


def launch(train: Callable[[T, torch.device], dict[str, Any]], config: T) -> dict[str, Any]:
    """Train in torchrun's process group, print the summary on its first rank and return it."""
    with process_group() as device:
        summary = train(config, device)
        if dist.get_rank() == 0:
            print(json.dumps(summary))
    return summary


if __name__ == "__main__":
    main()
