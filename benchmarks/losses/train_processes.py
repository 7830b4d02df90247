"""Train small GPTs by every method and record losses and bytes; resumes an interrupted grid.

    python -m benchmarks.losses.train_processes --grid quick

Each replica is a process. The processes start once and train the runs of a grid that have no record
yet; a record is a JSON file in ``--out``. Models, data order and tokens are the same for all
methods. Bytes are those of training, without evaluation. process_report.py makes a table and a
picture of the records.
"""

import json
import math
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.nn  # before init_process_group: its functions keep it as a default
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes

import train_gpt
from benchmarks.common.records import command_of
from benchmarks.common.tasks import Batches, data
from benchmarks.losses.methods import CODED, LOOK_AHEAD, METHODS, POLAR, Method
from benchmarks.losses.planned_runs import GRIDS, Choice, Run
from benchmarks.losses.process_results import at_best_rates, read_records
from command_line import option, parse
from curvadion import WireMeter, checks
from curvadion.comm.collectives import mean_
from token_data import TrainingBatches

POINTS = 10  # of a curve
# CurvaDion gives up at the tenth non-finite gradient in a row; this finds divergence earlier.
CHECK_EVERY = 5
PRELOADED = ["numpy", "torch", "torch._dynamo"]  # once, for all processes


@dataclass(frozen=True)
class Options:
    """Train small GPTs by every method and record losses and bytes."""

    grid: Literal["quick", "full", "inside"] = option("quick", "which runs")
    out: str = option("runs/convergence", "folder of the records, one file per run")
    list: bool = option(
        False, "list the runs, which of them are done, and how long the others will take"
    )
    method: tuple[str, ...] = option((), "only these methods")
    size: tuple[str, ...] = option((), "only these sizes")
    seed: tuple[int, ...] = option((), "these seeds instead of the grid's")
    budget: tuple[float, ...] = option(
        (),
        "full: these budgets instead of the grid's; quick: only these of the grid's. "
        "0: methods without a budget",
    )
    lr: tuple[float, ...] = option((), "these learning rates instead of the grid's")
    elementwise: tuple[float, ...] = option(
        (), "rates of the other parameters beside Dion, as shares of --lr"
    )
    steps: int | None = option(None, "number of steps, instead of the grid's")
    newton_schulz_steps: int | None = option(
        None, "iterations of polar directions, instead of the default"
    )
    parts: tuple[int, ...] = option(
        (), "only these numbers of fragments, for methods with fragments"
    )
    delay: int | None = option(None, "delay of methods that average in codes, instead of 0")
    look_ahead: float | None = option(
        None, "look-ahead of dion, muon and ours, instead of the default"
    )
    corpus: str = option("python", "the text, see corpora.py")
    best: bool = option(False, "only the best rates among those with records")
    replicas: int = option(8, "processes")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto: a GPU if there is one")


# ------------------------------------------------------------------------------------ one run


class Trial:
    """One rank's share of a run."""

    def __init__(self, run: Run, device: torch.device):
        self.run, self.device = run, device
        self.rank = dist.get_rank()
        training, self.held_out = data(run.task)
        self.batches = TrainingBatches(
            training, run.task.context, run.task.batch_size, run.replicas, 1, run.seed
        )
        torch.manual_seed(run.seed)
        self.model = run.task.model().to(device)
        self.method: Method = METHODS[run.method](
            self.model, dist.group.WORLD, run.lr, **run.settings
        )
        self.schedule = train_gpt.Config(steps=run.steps, warmdown_fraction=0.2)
        self.highest_lr = train_gpt.learning_rates(self.method.optimizer)

    def step(self, step: int) -> Tensor:
        """Take a step and return this replica's loss before it."""
        scale = train_gpt.lr_scale(step, self.schedule)
        train_gpt.set_learning_rates(self.method.optimizer, self.highest_lr, scale)
        [(inputs, targets)] = self.batches(step, self.rank)
        loss: Tensor = self.method.module(inputs.to(self.device), targets.to(self.device))
        loss.backward()
        if step % CHECK_EVERY == 0:  # of this replica, or the same on all replicas
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            loss = loss.detach() + 0 * nn.utils.get_total_norm(gradients)
        self.method.step()
        self.method.optimizer.zero_grad()
        return loss.detach()

    @torch.no_grad()
    def loss(self, model: nn.Module, batches: Batches, *, pooled: bool) -> float:
        """Return the mean loss over batches and ranks; ``pooled``: ranks share the batches."""
        totals = torch.zeros(2, device=self.device, dtype=torch.float64)
        for inputs, targets in batches:
            each = model(inputs.to(self.device), targets.to(self.device)).double()
            totals += len(inputs) * torch.stack([each, torch.ones_like(each)])
        if not pooled:
            totals /= totals[1].clone()
        dist.all_reduce(totals)
        return float(totals[0] / totals[1])

    def quick_loss(self) -> float:
        """Return the held-out loss; each replica evaluates its own weights on its own part."""
        return self.loss(self.model, self.held_out[self.rank :: self.run.replicas], pooled=True)

    def own_loss(self) -> float:
        """Return the held-out loss of each replica's own weights, averaged over replicas."""
        return self.loss(self.model, self.held_out, pooled=False)

    def mean_loss(self) -> float:
        """Return the held-out loss of the replicas' mean weights; leaves them in the model."""
        mean_([p.detach() for p in self.model.parameters()], dist.group.WORLD)
        return self.quick_loss()


def train(run: Run, device: torch.device) -> dict[str, Any]:
    """Train as the run says; collective. Every rank returns the same record.

    A run diverges when a loss or gradient of any replica is not finite; it then ends, and its
    results are None.
    """
    if dist.get_world_size() != run.replicas:
        raise ValueError(f"replicas={run.replicas}, but there are {dist.get_world_size()} ranks")
    started = time.perf_counter()
    used = time.process_time()
    training_seconds = 0.0
    trial = Trial(run, device)
    curve = []
    diverged = False
    step = 0
    with WireMeter() as meter:
        while step < run.steps and not diverged:
            begun = time.perf_counter()
            loss = trial.step(step)
            step += 1
            if step == run.steps:
                trial.method.finish()
            training_seconds += time.perf_counter() - begun
            trial.method.settle()  # no exchange may run while the meter is paused
            with meter.paused():
                if (step - 1) % CHECK_EVERY == 0 or step == run.steps:
                    diverged = not math.isfinite(train_gpt.mean_over_ranks(loss))
                if step % max(1, run.steps // POINTS) == 0 and not diverged:
                    curve.append((step, trial.quick_loss()))
        with meter.paused():
            drift = train_gpt.drift(trial.model.parameters(), dist.group.WORLD)
            own, mean = trial.own_loss(), trial.mean_loss()
    diverged = diverged or not math.isfinite(own)
    used = time.process_time() - used
    # A rank that owns a larger share of a mean sends more than the others.
    totals = [meter.total.sent, meter.total.bytes, used]
    means = torch.tensor(totals, dtype=torch.float64, device=device)
    mean_([means], dist.group.WORLD)
    sent, payload, used = means.tolist()
    parameters = sum(p.numel() for p in trial.model.parameters())
    dense = 4 * parameters * 2 * (run.replicas - 1) / run.replicas
    return {
        "run": run.as_dict(),
        "diverged": diverged,
        "val_loss": None if diverged else own,
        "mean_weights_val_loss": None if diverged else mean,
        "drift": None if diverged else drift,
        "curve": [(at, loss) for at, loss in curve if math.isfinite(loss)],
        "parameters": parameters,
        "steps": step,
        "sent_per_step": sent / step,
        "payload_per_step": payload / step,
        "share": sent / step / dense,
        "gate_open_share": trial.method.open_steps / step,
        "training_seconds": training_seconds,
        "seconds": time.perf_counter() - started,
        "processor_seconds": run.replicas * used,
        "torch": torch.__version__,
        "device": f"{describe(device)}, {dist.get_backend()}",
    }


def describe(device: torch.device) -> str:
    """Return a device's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


# --------------------------------------------------------------------------------- many runs


def read_record(run: Run, folder: Path) -> dict[str, Any] | None:
    """Return the record of exactly this run, or None."""
    file = folder / f"{run.slug}.json"
    record: dict[str, Any] | None = json.loads(file.read_text("utf-8")) if file.exists() else None
    same = record is not None and record["run"] == json.loads(json.dumps(run.as_dict()))
    return record if same else None


def by_lines(record: dict[str, Any]) -> str:
    """Return a JSON object with one key per line."""
    lines = (f"{json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in record.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def work_off(runs: Sequence[Run], folder: Path, device: torch.device, command: str) -> None:
    """Train one run after the other; the first rank writes each record when its run ends.

    Args:
        runs: to train.
        folder: of the records.
        device: of this rank.
        command: that made the records.
    """
    for number, run in enumerate(runs, start=1):
        record = {**train(run, device), "command": command}
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"{run.slug}.json"
            unfinished = file.with_suffix(".tmp")
            unfinished.write_text(by_lines(record))
            unfinished.replace(file)
            print(f"[{number}/{len(runs)}] {summary(run, record)}", flush=True)


def summary(run: Run, record: dict[str, Any] | None) -> str:
    """Return one line on a run."""
    if record is None:
        return f"{run.slug}: to do"
    loss = "diverged" if record["diverged"] else f"loss {record['val_loss']:.4f}"
    return f"{run.slug}: {loss}, {record['share']:.3%} of the bytes, {record['seconds']:.0f} s"


def _worker(
    rank: int,
    runs: Sequence[Run],
    folder: Path,
    store: str,
    kind: str,
    command: str,
    parent: Connection,
) -> None:
    """Train the runs as one rank of a process group.

    Args:
        rank: of this process.
        runs: to train, all with as many replicas.
        folder: of the records.
        store: the file at which ranks meet.
        kind: of device, "cpu" or "cuda".
        command: that made the records.
        parent: the other end of a pipe that the parent holds; the process ends with it.
    """
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    replicas = runs[0].replicas
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    # NCCL needs a GPU for each rank; gloo moves tensors of any device.
    one_each = kind == "cuda" and torch.cuda.device_count() >= replicas
    dist.init_process_group(
        "nccl" if one_each else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=replicas,
    )
    work_off(runs, folder, device, command)
    dist.barrier()
    train_gpt.leave_process_group()


def _end_with(parent: Connection) -> None:
    """End this process once the parent, at the pipe's other end, has ended for any reason."""
    parent.poll(None)
    os._exit(1)


def selected(options: Options) -> list[Run]:
    """Return the runs that the options ask for.

    Raises:
        ValueError: for fewer than two replicas, for an invalid budget, for a method, size or budget
            that the grid lacks, and if no run of the grid matches all options.
    """
    if options.replicas < 2:
        raise ValueError(f"replicas={options.replicas} must be >= 2: one sends nothing")
    for budget in options.budget:
        checks.number("budget", budget, most=1.0)
    choice = Choice(options.seed, options.lr, options.elementwise, options.steps, options.budget)
    runs = list(GRIDS[options.grid](options.replicas, choice))
    if options.parts:
        runs = [run for run in runs if run.settings.get("parts", options.parts[0]) in options.parts]
    runs = [replace(run, task=replace(run.task, corpus=options.corpus)) for run in runs]
    for name, value, methods in (
        ("newton_schulz_steps", options.newton_schulz_steps or None, POLAR),
        ("delay", options.delay or None, CODED),
        ("look_ahead", options.look_ahead, LOOK_AHEAD),
    ):
        if value is not None:
            runs = [
                replace(run, settings={**run.settings, name: value})
                if run.method in methods
                else run
                for run in runs
            ]
    if options.best:
        runs = at_best_rates(runs, read_records(Path(options.out)))
    of_runs = [(run.method, run.size, run.budget or 0.0) for run in runs]
    wanted: tuple[tuple[Any, ...], ...] = (options.method, options.size, options.budget)
    # With other budgets a grid may lack methods.
    known: list[list[Any]] = [list(METHODS)]
    known += (list(dict.fromkeys(one[i] for one in of_runs)) for i in (1, 2))
    for name, values, there in zip(("method", "size", "budget"), wanted, known, strict=True):
        if unknown := set(values) - set(there):
            raise ValueError(f"{name}={sorted(unknown)}: grid={options.grid!r} has {there}")
    chosen = [
        run
        for run, values in zip(runs, of_runs, strict=True)
        if all(not some or value in some for some, value in zip(wanted, values, strict=True))
    ]
    if not chosen:
        asked = dict(zip(("method", "size", "budget"), map(list, wanted), strict=True))
        told = ", ".join(f"{name}={values}" for name, values in asked.items() if values)
        raise ValueError(f"grid={options.grid!r} has no run with {told}")
    return chosen


def estimate(records: dict[str, dict[str, Any]], pending: Sequence[Run]) -> str:
    """Return how long pending runs will take, from the mean seconds per step of finished ones."""
    rates: dict[str, list[float]] = {}
    for record in records.values():
        rates.setdefault(record["run"]["size"], []).append(record["seconds"] / record["steps"])
    seconds = sum(
        run.steps * sum(rates[run.size]) / len(rates[run.size])
        for run in pending
        if run.size in rates
    )
    unknown = sum(run.size not in rates for run in pending)
    text = f"{len(records)} runs done, {len(pending)} to do"
    if len(pending) > unknown:
        text += f", {len(pending) - unknown} of them in about {seconds / 60:.0f} minutes"
    if unknown:
        text += f"; {unknown} of a size that no run has measured yet"
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the runs of the command line that have no record yet."""
    options = parse(Options, arguments)
    folder, runs = Path(options.out), selected(options)
    found = {run.slug: read_record(run, folder) for run in runs}
    records = {slug: record for slug, record in found.items() if record is not None}
    pending = [run for run in runs if run.slug not in records]
    if options.list:
        print("\n".join(summary(run, found[run.slug]) for run in runs))
    print(estimate(records, pending), flush=True)
    if options.list or not pending:
        return
    kind = options.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    command = command_of("benchmarks.losses.train_processes", arguments)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    parent, lifeline = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="convergence-") as rendezvous, lifeline:
        start_processes(
            _worker,
            args=(pending, folder, f"{rendezvous}/store", kind, command, parent),
            nprocs=options.replicas,
            start_method="forkserver",
        )


if __name__ == "__main__":
    main()
