r"""Count the steps to a loss of 3.28 on modded-nanogpt's Track 3, and the bytes that they send.

    torchrun --standalone --nproc-per-node 8 -m benchmarks.losses.track3 \
        --method muon --overrun 0.06 --tail 0.6 \
        --data data/fineweb10B --out runs/track3/muon-0
    torchrun --standalone --nproc-per-node 8 -m benchmarks.losses.track3 \
        --method curvadion --budget 0.01 --overrun 0.06 --tail 0.6 \
        --data data/fineweb10B --out runs/track3/one-percent-0
    python -m benchmarks.losses.track3 --summary runs/track3/*/log.jsonl

A toy for two CPUs adds ``--nproc-per-node 2`` and ``--layers 1 --heads 2 --dim 32 --context 32
--tokens-per-step 1024 --micro-batch 4 --steps 30 --validation-tokens 2048`` to shards of its own.

**It has never run at full size**, only as a toy on CPUs: its authors had no node of 8 GPUs. Its
rates for ``dion`` and ``curvadion`` are those of ``muon``, which nobody has tuned for them.

The task is that of modded-nanogpt's Track 3 (github.com/KellerJordan/modded-nanogpt,
``records/track_3_optimization``, commit f411b3d3), written anew. From its README: the target, the
rule of significance, that a run may not end by its loss, that all runs may be compared at the
earliest step whose mean is significant, and that logs hold the code. From its baseline, result 36
(``train_gpt_simple.py``), which reaches 3.28 in 3,250 steps: the architecture and the initial
values (track3_model.py), 524,288 tokens a step in sequences of 1,024, the first 10,485,760 tokens
of the validation file, evaluations every 125 steps and every 25 in the last tenth, Nesterov's
momentum of 0.95, the rates, decays and betas, and a cooldown over the last 70 % without a warm-up.
Its script ``data/cached_fineweb10B.py 20`` fetches the 2 billion tokens.

What differs from it, apart from the method:
    - Windows of the training files are read in a random order that depends on the seed, not in the
      order of the files.
    - Weights are float32 and products bfloat16 by autocast. There, the embedding and the stream
      between layers are bfloat16.
    - Losses are means, and AdamW's eps is divided by the tokens of a step in exchange.
    - Polar factors come from this package's iterations: 4, where it takes 12 of another kind.
    - A log names the version of this package and does not hold its code, so it is no submission.

Methods, all on ranks with local gradients:
    muon: polar factors with a look-ahead of 1 / momentum, gradients averaged at every step.
    dion: Dion's low-rank step, synchronised at every step.
    curvadion: each rank is a replica, within ``--budget`` of DDP's bytes; at 1 % codes of 1 bit up
        and 2 bits down, from 5 % on of 3 bits. Needs two ranks or more, and its result depends on
        their number. Evaluations before the end read the weights of the last opening.

A rank takes as many micro-batches as make up the tokens of a step. ``--out`` gets log.jsonl, one
JSON object a line: ``run`` (options, source code, versions, machine), ``evaluation`` (loss, bytes
that a rank has sent, their share of what DDP's all-reduces of float32 gradients would have sent,
seconds of training) and ``end``. It also gets the newest checkpoint, a file for each rank. With
``--resume`` a run with as many ranks continues bitwise.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before init_process_group: its functions keep it as a default
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import checkpoint
import curvadion
import train_gpt
from benchmarks.common import records
from benchmarks.losses import track3_model, track3_summary
from benchmarks.losses.track3_model import Track3GPT
from command_line import option, parse
from curvadion import checks
from curvadion.integrations.ddp import keep_gradients_local
from gpt import GPTConfig
from parallel import unsynchronized
from run_log import RunLog
from token_data import (
    SHARD_MAGIC,
    SHARD_VERSION,
    Split,
    TrainingBatches,
    load,
    validation_batches,
)

MANY_BYTES = 0.05  # the budget from which on codes have 3 bits
SUMMED_LOSS_EPS = 1e-10  # AdamW's, for gradients that are sums over the tokens of a step
FINE_FROM = 0.9  # share of the steps after which evaluations are more frequent
TAIL_HORIZONS = 25  # that a run has, each 1 / (1 - decay) steps of the average of the last weights
TAIL_START = 0.8  # share of the steps after which it begins: five horizons before the end


@dataclass(frozen=True)
class Options:
    """Count the steps to a loss of 3.28 on modded-nanogpt's Track 3."""

    out: str = option("runs/track3/run", "folder of the log and the checkpoint")
    seed: int = option(0, "seed of the weights and of the data order")
    resume: bool = option(False, "continue from the checkpoint in --out, if there is one")
    summary: tuple[str, ...] = option((), "train nothing; say what these logs show together")

    # Method
    method: Literal["muon", "dion", "curvadion"] = option(
        "muon", "muon and dion synchronise at every step, curvadion within --budget"
    )
    budget: float = option(0.01, "curvadion: share of DDP's bytes to send")
    bits: tuple[int, ...] = option((), "curvadion: bits of a code; default 1 2, from 5 % on 3")
    rank_fraction: float = option(0.25, "dion: rank as a share of a matrix's smaller side")
    look_ahead: float | None = option(
        None, "weight of the gradient beside the momentum; default: the method's"
    )

    # Rates: those of Track 3's tuned Muon
    lr: float = option(0.025, "rate of matrices")
    embedding_lr: float = option(0.7, "rate of the embedding")
    head_lr: float = option(0.004, "rate of the output head")
    vector_lr: float = option(0.015, "rate of biases and gains")
    weight_decay: float = option(0.05, "weight decay of matrices")
    elementwise_decay: float = option(0.001, "weight decay of all other parameters")
    momentum: float = option(0.95, "momentum of matrices")
    beta1: float = option(0.8, "AdamW's decay of the first moment")
    beta2: float = option(0.95, "AdamW's decay of the second moment")

    # Schedule
    steps: int = option(3250, "optimizer steps")
    cooldown: float = option(0.7, "share of the steps over which the rate of matrices falls")
    elementwise_cooldown: float = option(0.7, "the same for all other parameters")
    overrun: float = option(
        0.0, "how far beyond the last step rates reach zero, as a share of the steps"
    )
    tail: float = option(0.0, "weight of the average of the last weights in those evaluated")

    # Data
    data: str = option(
        "data/fineweb10B",
        "folder of fineweb_train_*.bin and fineweb_val_*.bin: 256 int32 (20240520, 1, number of "
        "tokens), then uint16 tokens",
    )
    tokens_per_step: int = option(524_288, "tokens that all ranks together read in a step")
    micro_batch: int = option(64, "sequences that a rank computes at once")
    context: int = option(1024, "tokens in a sequence")
    validation_tokens: int = option(10_485_760, "the first so many tokens are held out")
    validate_every: int = option(125, "steps between evaluations")
    validate_every_at_end: int = option(25, "the same in the last tenth of the steps")
    target: float = option(3.28, "the loss to reach")

    # Model
    layers: int = option(12, "transformer blocks")
    heads: int = option(6, "attention heads")
    dim: int = option(768, "width of the residual stream")
    vocab_size: int = option(50_304, "entries of the vocabulary")

    # Running
    checkpoint_every: int = option(500, "steps between checkpoints; 0: only at the end")
    compile: bool = option(True, "torch.compile the model on GPUs")

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that no run can have."""
        for name in (
            *("steps", "tokens_per_step", "micro_batch", "context", "validation_tokens"),
            *("validate_every", "validate_every_at_end"),
        ):
            checks.integer(name, getattr(self, name), 1)
        checks.integer("checkpoint_every", self.checkpoint_every, 0)
        for name in ("cooldown", "elementwise_cooldown"):
            checks.number(name, getattr(self, name), least=1 / self.steps, most=1.0)
        checks.number("overrun", self.overrun)
        checks.number("tail", self.tail, most=1.0)

    def accumulation(self, ranks: int) -> int:
        """Return the micro-batches that each rank takes in a step.

        Raises:
            ValueError: if the tokens of a step or of an evaluation cannot be divided.
        """
        at_once = ranks * self.micro_batch * self.context
        for name in ("tokens_per_step", "validation_tokens"):
            tokens = getattr(self, name)
            if tokens % at_once:
                raise ValueError(
                    f"{name}={tokens} must be a multiple of {at_once}: {ranks} ranks x "
                    f"micro_batch={self.micro_batch} x context={self.context}. Change "
                    f"--micro-batch or the number of ranks."
                )
        return self.tokens_per_step // at_once

    def rate_shares(self, step: int) -> dict[str, float]:
        """Return the rates at a step, from 0, as shares of the highest, by algorithm."""
        end = self.steps * (1 + self.overrun)
        cooldowns = {"dion": self.cooldown, "adamw": self.elementwise_cooldown}
        # The cooldown begins a share of the steps before the last one, whatever the overrun.
        return {
            algorithm: min(1.0, (end - step) / (end - self.steps + cooldown * self.steps))
            for algorithm, cooldown in cooldowns.items()
        }

    def evaluates(self, step: int) -> bool:
        """Return whether an evaluation follows after so many steps."""
        every = self.validate_every
        if step >= FINE_FROM * self.steps:
            every = self.validate_every_at_end
        return step == self.steps or step % every == 0

    def saves(self, step: int) -> bool:
        """Return whether a checkpoint follows after so many steps."""
        due = self.checkpoint_every > 0 and step % self.checkpoint_every == 0
        return due or step == self.steps


@dataclass
class Progress:
    """What a checkpoint holds beside weights and states."""

    step: int = 0
    """Steps done."""
    sent_bytes: float = 0.0
    """The fewest bytes that this rank must have sent for its collectives in training."""
    seconds: float = 0.0
    """Time spent training, without evaluations and checkpoints."""
    losses: list[tuple[int, float]] = field(default_factory=list)
    """Held-out losses, by the number of steps."""

    def first_at(self, target: float) -> int | None:
        """Return the first evaluated step with a loss at or below the target."""
        return next((step for step, loss in self.losses if loss <= target), None)


def token_files(options: Options, part: Literal["train", "val"]) -> list[str]:
    """Return the token files of a part of the data, in order; ValueError if there are none."""
    files = sorted(Path(options.data).glob(f"fineweb_{part}_*.bin"))
    if not files:
        raise ValueError(
            f"data={options.data!r} has no file fineweb_{part}_*.bin: pass the folder that "
            f"modded-nanogpt's data/cached_fineweb10B.py has filled"
        )
    for file in files:
        if list(np.fromfile(file, dtype=np.int32, count=2)) != [SHARD_MAGIC, SHARD_VERSION]:
            raise ValueError(
                f"data={options.data!r}: {file.name} does not begin with {SHARD_MAGIC} and "
                f"{SHARD_VERSION} as int32, the header of modded-nanogpt's shards"
            )
    return [str(file) for file in files]


def held_out_batches(options: Options, rank: int, ranks: int) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's part of the first validation tokens.

    Args:
        options: of the run.
        rank: this one.
        ranks: how many share the tokens.

    Returns:
        Inputs and targets, (micro_batch, context) int64.
    """
    tokens = load(token_files(options, "val"), 0, options.vocab_size)
    needed = options.validation_tokens + 1  # the last one is a target only
    if len(tokens) < needed:
        raise ValueError(
            f"validation_tokens={options.validation_tokens} needs {needed} tokens, and "
            f"data={options.data!r} has {len(tokens)} in fineweb_val_*.bin"
        )
    first = Split(tokens, 0, needed)
    batches = validation_batches(
        first, options.context, options.micro_batch, options.validation_tokens
    )
    return batches[rank::ranks]


def build_optimizer(
    options: Options, model: nn.Module, ranks: int
) -> curvadion.Dion | curvadion.CurvaDion:
    """Return the optimizer of the options' method.

    Raises:
        ValueError: for curvadion on a single rank.
    """
    elementwise = {
        "weight_decay": options.elementwise_decay,
        "betas": (options.beta1, options.beta2),
        "eps": SUMMED_LOSS_EPS / options.tokens_per_step,
    }
    groups = curvadion.param_groups(
        model,
        options={
            "embedding": {"lr": options.embedding_lr, **elementwise},
            "head": {"lr": options.head_lr, **elementwise},
            "vector": {"lr": options.vector_lr, **elementwise},
        },
    )
    shared: dict[str, Any] = {
        "lr": options.lr,
        "replicas": dist.group.WORLD if ranks > 1 else None,
        "weight_decay": options.weight_decay,
        "momentum": options.momentum,
        "update_scale": "original",  # Muon's, to which the rates belong
        "look_ahead": options.look_ahead,
    }
    if options.method == "dion":
        return curvadion.Dion(groups, rank_fraction=options.rank_fraction, **shared)
    if options.method == "muon":
        if options.look_ahead is None:
            shared["look_ahead"] = 1 / options.momentum  # Nesterov's
        return curvadion.Dion(groups, direction="polar", **shared)
    if ranks == 1:
        raise ValueError(
            "method='curvadion' needs two ranks or more, which are its replicas: start torchrun "
            "with --nproc-per-node 8"
        )
    bits = options.bits or ((3,) if options.budget >= MANY_BYTES else (1, 2))
    sync = curvadion.QuantizedAverage(bits=bits[0] if len(bits) == 1 else bits)
    return curvadion.CurvaDion(groups, wire_budget=options.budget, sync=sync, **shared)


class Run:
    """One rank's share of a run."""

    def __init__(self, options: Options, device: torch.device):
        self.options = options
        self.device = device
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()
        self.accumulation = options.accumulation(self.ranks)
        tokens = load(token_files(options, "train"), 0, options.vocab_size)
        self.batches = TrainingBatches(
            Split(tokens, 0, len(tokens)),
            options.context,
            options.micro_batch,
            self.ranks,
            self.accumulation,
            options.seed,
        )
        self.held_out = held_out_batches(options, self.rank, self.ranks)
        torch.manual_seed(options.seed)
        shape = GPTConfig(options.vocab_size, options.layers, options.heads, options.dim)
        self.model = Track3GPT(shape).to(device)
        self.on_gpu = device.type == "cuda"
        if options.compile and self.on_gpu:
            self.model.compile(dynamic=False)
        self.module = keep_gradients_local(DistributedDataParallel(self.model))
        self.optimizer = build_optimizer(options, self.model, self.ranks)
        self.highest_lr = train_gpt.learning_rates(self.optimizer)
        # One that never begins still says which weights all replicas have in common.
        start = round(TAIL_START * options.steps) if options.tail else options.steps + 1
        self.tail = curvadion.TailAverage(
            self.optimizer,
            start=start,
            decay=max(0.0, 1 - TAIL_HORIZONS / options.steps),
            blend=options.tail,
        )

    @property
    def dense_bytes(self) -> float:
        """What an all-reduce of float32 gradients makes a rank send at a step."""
        parameters = sum(p.numel() for p in self.model.parameters())
        return 4 * parameters * 2 * (self.ranks - 1) / self.ranks

    def loss(self, module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a micro-batch."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.on_gpu):
            loss: Tensor = module(inputs.to(self.device), targets.to(self.device))
        return loss

    def step(self, step: int) -> Tensor:
        """Take a step, from 0, and return this rank's loss before it."""
        shares = self.options.rate_shares(step)
        for group, rates in zip(self.optimizer.param_groups, self.highest_lr, strict=True):
            share = shares[group["algorithm"]]
            group.update({key: share * rate for key, rate in rates.items()})
        mean_loss = torch.zeros((), device=self.device)
        for i, batch in enumerate(self.batches(step, self.rank), start=1):
            last = i == self.accumulation
            with nullcontext() if last else unsynchronized(self.module):
                loss = self.loss(self.module, *batch) / self.accumulation
                loss.backward()
            mean_loss += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return mean_loss

    def held_out_loss(self) -> float:
        """Return the loss of the weights that all ranks have in common; collective."""
        with self.tail.averaged():
            return train_gpt.held_out_loss(
                self.model, partial(self.loss, self.model), self.held_out
            )

    def wait(self) -> None:
        """Wait for the GPU, before the clock is read."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    # --- checkpoints

    @property
    def checkpoints(self) -> Path:
        """The folder with a folder for the newest checkpoint."""
        return Path(self.options.out) / "checkpoints"

    @property
    def must_match(self) -> dict[str, Any]:
        """What a run that continues another must have in common with it."""
        settings = asdict(self.options)
        for name in track3_summary.NOT_SETTINGS:
            del settings[name]
        return {**settings, "ranks": self.ranks}

    def save(self, progress: Progress) -> None:
        """Write a checkpoint, in place of the one before; collective.

        Replicas differ between openings, so each rank writes what it holds.
        """
        final = self.checkpoints / f"step-{progress.step:08d}"
        unfinished = final.with_name(f".{final.name}")
        unfinished.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            # It says that each rank must save its own state, as here.
            warnings.filterwarnings("ignore", message=r"state_dict\(\) while the replicas'")
            state = {
                "settings": self.must_match,
                "progress": asdict(progress),
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "tail": self.tail.state_dict(),
            }
        torch.save(state, unfinished / f"rank-{self.rank}.pt")
        dist.barrier()
        if self.rank == 0:
            unfinished.replace(final)
            for older in checkpoint.all_in(self.checkpoints)[1:]:
                shutil.rmtree(older)
        dist.barrier()

    def resume(self) -> Progress:
        """Load the newest checkpoint, if there is one and the options resume; collective.

        Raises:
            ValueError: if --out holds a run that the options do not continue, or one with
                other settings.
        """
        found: list[Any] = [checkpoint.all_in(self.checkpoints), self._has_log()]
        dist.broadcast_object_list(found)
        folders, has_log = found
        if not self.options.resume and (folders or has_log):
            raise ValueError(
                f"out={self.options.out!r} holds a run: pass --resume to continue it, or another "
                f"--out"
            )
        if not folders:
            return Progress()
        file = folders[0] / f"rank-{self.rank}.pt"
        if not file.exists():
            raise ValueError(
                f"out={self.options.out!r} has no checkpoint of rank {self.rank}: resume with as "
                f"many ranks as saved it"
            )
        saved = torch.load(file, map_location=self.device, weights_only=True)
        wanted = self.must_match
        other = {k: v for k, v in saved["settings"].items() if v != wanted.get(k)}
        if other:
            given = ", ".join(f"{name}={wanted.get(name)!r}" for name in other)
            had = ", ".join(f"{name}={value!r}" for name, value in other.items())
            raise ValueError(
                f"out={self.options.out!r} holds a run with {had}, not {given}: resume with the "
                f"same settings"
            )
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.tail.load_state_dict(saved["tail"])
        return Progress(**saved["progress"])

    def _has_log(self) -> bool:
        """Whether --out holds a log."""
        return (Path(self.options.out) / "log.jsonl").exists()


def description(run: Run) -> dict[str, Any]:
    """Return what a log holds of a run beside its numbers."""
    sources = [Path(__file__)]
    for module in (track3_model, track3_summary):
        sources.append(Path(str(module.__file__)))
    return {
        "settings": asdict(run.options),
        "ranks": run.ranks,
        "accumulation": run.accumulation,
        "optimizer": repr(run.optimizer),
        "curvadion": curvadion.__version__,
        "environment": records.environment(run.device),
        "program": records.program(),
        "sources": {source.name: source.read_text("utf-8") for source in sources},
    }


def train(options: Options, device: torch.device) -> dict[str, Any]:
    """Train as the options say, and return the result; collective."""
    run = Run(options, device)
    progress = run.resume()
    log = RunLog(
        Path(options.out), after_step=progress.step, tensorboard=False, active=run.rank == 0
    )
    carried = progress.sent_bytes
    with log, curvadion.WireMeter() as meter:
        log.write("run", progress.step, **description(run))
        started = time.perf_counter()
        while progress.step < options.steps:
            train_loss = run.step(progress.step)
            progress.step += 1
            if progress.step == options.steps and run.optimizer.drifted:
                run.optimizer.synchronize()
            evaluates = options.evaluates(progress.step)
            saves = options.saves(progress.step)
            if not (evaluates or saves):
                continue
            run.wait()
            progress.seconds += time.perf_counter() - started
            progress.sent_bytes = carried + meter.total.sent
            with meter.paused():
                if evaluates:
                    log.write("evaluation", progress.step, **evaluation(run, progress, train_loss))
                if saves:
                    run.save(progress)
            started = time.perf_counter()
        result = ended(run, progress)
        log.write("end", progress.step, **result)
    return result


def evaluation(run: Run, progress: Progress, train_loss: Tensor) -> dict[str, Any]:
    """Evaluate, note the loss in the progress, and return what to log; collective.

    Args:
        run: what to evaluate.
        progress: of the run.
        train_loss: of this rank at the last step.
    """
    val_loss = run.held_out_loss()
    progress.losses.append((progress.step, val_loss))
    return {
        "val_loss": val_loss,
        "train_loss": train_gpt.mean_over_ranks(train_loss),
        **traffic(run, progress),
        "rate_shares": run.options.rate_shares(progress.step - 1),
        "seconds": progress.seconds,
    }


def traffic(run: Run, progress: Progress) -> dict[str, float]:
    """Return the bytes that a rank has sent, on average, and their share of DDP's; collective."""
    sent = torch.tensor(progress.sent_bytes, dtype=torch.float64, device=run.device)
    bytes_per_rank = train_gpt.mean_over_ranks(sent)
    dense = progress.step * run.dense_bytes
    return {"sent_bytes": bytes_per_rank, "share": bytes_per_rank / dense if dense else 0.0}


def ended(run: Run, progress: Progress) -> dict[str, Any]:
    """Return the result of a run."""
    return {
        "method": run.options.method,
        "val_loss": progress.losses[-1][1],
        "target": run.options.target,
        "first_step_at_target": progress.first_at(run.options.target),
        **traffic(run, progress),
        "seconds": progress.seconds,
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any] | None:
    """Train, or print what logs show together."""
    options = parse(Options, arguments)
    if options.summary:
        rows = track3_summary.summarised([Path(path) for path in options.summary])
        print(track3_summary.table(rows))
        return None
    return train_gpt.launch(train, options)


if __name__ == "__main__":
    main()
