r"""Compare our Muon and DeepSpeed's at every ZeRO stage, with and without CPU offload.

    python -m benchmarks.losses.offload --out benchmarks/results/deepspeed/offload.json
    python -m benchmarks.losses.offload --table

With another DeepSpeed first in PYTHONPATH, such as one of pip's --target, that one is compared.

A small GPT trains on two processes, and again on one, where no matrix is sharded. Both optimizers
have the settings of torch.optim.Muon, AdamW for embeddings and norms, and equal learning rates, so
that they take the same steps. All is float32, DeepSpeed's Newton-Schulz iteration too, which is in
half precision where the hardware has it. Its AdamW is torch's, because its own must be compiled.
Tokens and weights come from torch's generators, so that every machine has the same.

What is compared is the way that the weights have moved: a distance is ‖X - Y‖ / ‖Y - Z‖, with X
the weights at the end, Y those of the same optimizer on one process and Z the initial ones. The
largest one of all parameters counts. Stage 0 on two processes shows how much rounding makes.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, start_processes

from benchmarks.common.records import RESULTS, write
from command_line import option, parse
from gpt import GPT, GPTConfig
from train_gpt import leave_process_group

RECORD = RESULTS / "deepspeed" / "offload.json"
SEQUENCES = 8  # of a step, of all processes together
CONTEXT = 32
MODEL = GPTConfig(vocab_size=64, layers=2, heads=2, dim=52)  # 52 x 52 and 208 x 52 are cut anywhere
LR, ELEMENTWISE_LR = 0.02, 0.004
MOMENTUM = 0.95
BETAS, EPS = (0.9, 0.95), 1e-8
TIMEOUT = 120.0  # seconds of a collective
RESULT, ERROR = "result.pt", "error.txt"
PRELOADED = ["curvadion.deepspeed", "deepspeed", "gpt", "torch._dynamo"]

# By the names in the tables: optimizer.type of the JSON, and its params.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Curvadion": (
        "Dion",
        {
            "lr": LR,
            "momentum": MOMENTUM,
            "weight_decay": 0.0,
            "betas": BETAS,
            "eps": EPS,
            "direction": "polar",
            "look_ahead": 1 / MOMENTUM,
            "newton_schulz": "muon",
            "newton_schulz_steps": 5,
            "update_scale": "original",
            # DeepSpeed tells kinds by names, and takes the head for a matrix.
            "patterns": {"head.weight": "matrix"},
            "options": {kind: {"lr": ELEMENTWISE_LR} for kind in ("embedding", "vector")},
        },
    ),
    "DeepSpeed": (
        "Muon",
        {
            "muon_lr": LR,
            "adam_lr": ELEMENTWISE_LR,
            "momentum": MOMENTUM,
            "weight_decay": 0.0,
            "betas": BETAS,
            "eps": EPS,
            "torch_adam": True,
        },
    ),
}


@dataclass(frozen=True)
class Layout:
    """Where a run keeps what.

    Attributes:
        name: in the tables.
        processes: how many there are.
        stage: of ZeRO.
        offload: whether the optimizer's state is on the host.
        offload_param: whether the weights are, too.
    """

    name: str
    processes: int
    stage: int
    offload: bool = False
    offload_param: bool = False

    def zero(self) -> dict[str, Any]:
        """Return zero_optimization of the JSON."""
        settings: dict[str, Any] = {"stage": self.stage}
        if self.offload:
            settings["offload_optimizer"] = {"device": "cpu"}
        if self.offload_param:
            settings["offload_param"] = {"device": "cpu"}
        if self.stage:
            # What DeepSpeed's Muon asks for at stage 3, and up to 0.19.7 with offload.
            settings["reduce_scatter"] = False
        if self.stage == 3:
            settings["stage3_param_persistence_threshold"] = 0  # weights of any size are sharded
        return settings


ALONE = Layout("one process", 1, 0)
SHARDED = (
    Layout("0", 2, 0),
    Layout("1", 2, 1),
    Layout("2", 2, 2),
    Layout("3", 2, 3),
    Layout("1, offload", 2, 1, offload=True),
    Layout("2, offload", 2, 2, offload=True),
    Layout("3, offload", 2, 3, offload=True),
    Layout("3, offload of weights too", 2, 3, offload=True, offload_param=True),
)
LAYOUTS = (ALONE, *SHARDED)


@dataclass(frozen=True)
class Training:
    """What a step is made of.

    Attributes:
        name: in the tables.
        accumulation: batches of a step.
        clipping: the largest norm of gradients; 0: any.
    """

    name: str
    accumulation: int
    clipping: float


TRAININGS = (
    Training("plain", 1, 0.0),
    Training("accumulation", 2, 0.0),
    Training("clipping", 1, 1.0),
)


@dataclass(frozen=True)
class Options:
    """Compare our Muon and DeepSpeed's at every ZeRO stage, with and without CPU offload."""

    steps: int = option(20, "steps of a run")
    trainings: tuple[str, ...] = option(tuple(x.name for x in TRAININGS), "trainings by name")
    out: Path = option(Path("runs/offload.json"), "the file to write")
    table: bool = option(False, "print the table of docs/deepspeed.md; run nothing")


@dataclass(frozen=True)
class Run:
    """One optimizer in one layout."""

    optimizer: str
    layout: Layout
    training: Training
    steps: int

    def config(self) -> dict[str, Any]:
        """Return DeepSpeed's JSON."""
        kind, params = OPTIMIZERS[self.optimizer]
        micro = SEQUENCES // self.layout.processes // self.training.accumulation
        return {
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": self.training.accumulation,
            "gradient_clipping": self.training.clipping,
            "steps_per_print": 10**9,
            "optimizer": {"type": kind, "params": params},
            "zero_optimization": self.layout.zero(),
        }


def sequences(step: int) -> tuple[Tensor, Tensor]:
    """Return a step's tokens and targets, both (sequences, context) int64.

    Each token is its predecessor plus 1, 2 or 3, so a loss of log 3 can be learned.
    """
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(MODEL.vocab_size, (SEQUENCES, 1), generator=generator)
    moves = torch.randint(1, 4, (SEQUENCES, CONTEXT), generator=generator)
    tokens = torch.cat([start, start + moves.cumsum(1)], dim=1) % MODEL.vocab_size
    return tokens[:, :-1], tokens[:, 1:]


def initial_model() -> GPT:
    """Return the model, the same in every run."""
    torch.manual_seed(0)
    return GPT(MODEL)


def train(run: Run) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses by step and the whole weights by name, on every process.

    The process group has ``run.layout.processes`` ranks, and DeepSpeed's variables are set.
    """
    rank, processes = dist.get_rank(), run.layout.processes
    accumulation = run.training.accumulation
    engine = make_engine(run)
    losses = []
    for step in range(run.steps):
        tokens, targets = (x.chunk(processes)[rank] for x in sequences(step))
        total = torch.zeros(())
        for batch in zip(tokens.chunk(accumulation), targets.chunk(accumulation), strict=True):
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / accumulation
        dist.all_reduce(total)
        losses.append(float(total) / processes)
    return losses, whole_weights(engine)


def train_process(rank: int, run: Run, folder: str) -> None:
    """Train as one of the processes; the first one saves what came out, or each one why not.

    Args:
        rank: of this process.
        run: what to train.
        folder: for the results and for the store of the process group.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=run.layout.processes,
        timeout=timedelta(seconds=TIMEOUT),
    )
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(run.layout.processes),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }
    try:
        result = train(run)
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        Path(folder, ERROR).write_text(f"{type(error).__name__}: {first_line}")
        raise
    if rank == 0:
        torch.save(result, f"{folder}/{RESULT}")
    dist.barrier()
    leave_process_group()


def make_engine(run: Run) -> Any:
    """Return DeepSpeed's engine, once its process group is there."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    import curvadion.deepspeed  # noqa: F401

    deepspeed.logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    # The iteration of DeepSpeed's Muon is then in float32.
    type(get_accelerator()).is_fp16_supported = lambda self: False
    return deepspeed.initialize(model=initial_model(), config=run.config())[0]


def whole_weights(engine: Any) -> dict[str, Tensor]:
    """Return the weights by name, on every process."""
    import deepspeed

    parameters = dict(engine.module.named_parameters())
    sharded = engine.zero_optimization_stage() == 3
    with deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=sharded):
        return {name: p.detach().clone() for name, p in parameters.items()}


@dataclass(frozen=True)
class Ended:
    """Losses by step and weights by name, or why there are none."""

    losses: Sequence[float] = ()
    weights: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    error: str | None = None


def ended(run: Run) -> Ended:
    """Train in new processes."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            start_processes(
                train_process,
                args=(run, folder),
                nprocs=run.layout.processes,
                start_method="forkserver",
            )
        except ProcessException as error:
            written = Path(folder, ERROR)
            return Ended(error=written.read_text() if written.exists() else str(error))
        losses, weights = torch.load(f"{folder}/{RESULT}")
    return Ended(losses, weights)


def distances(X: dict[str, Tensor], Y: dict[str, Tensor]) -> dict[str, float]:
    """Return the distance of weights X from Y, by name, as a share of the way that Y moved."""
    initial = {name: p.detach() for name, p in initial_model().named_parameters()}
    return {name: float((X[name] - y).norm() / (y - initial[name]).norm()) for name, y in Y.items()}


def record_of(run: Run, found: Ended, alone: Ended) -> dict[str, Any]:
    """Return what is written of a run.

    Args:
        run: what was trained.
        found: how it ended.
        alone: how the same optimizer ended on one process.
    """
    record: dict[str, Any] = {
        "training": run.training.name,
        "optimizer": run.optimizer,
        "layout": run.layout.name,
        "deepspeed": version("deepspeed"),
        "config": run.config(),
    }
    if found.error is not None:
        return {**record, "error": found.error}
    by_name = distances(found.weights, alone.weights)
    changes = [abs(x - y) for x, y in zip(found.losses, alone.losses, strict=True)]
    return {
        **record,
        "distance": max(by_name.values()),
        "farthest": max(by_name, key=by_name.__getitem__),
        "loss_difference": max(changes),
        "losses": list(found.losses),
    }


def records_of(training: Training, options: Options) -> Iterator[dict[str, Any]]:
    """Train both optimizers in all layouts, and yield the records."""
    reference: Ended | None = None  # of the first optimizer
    for optimizer in OPTIMIZERS:
        alone = ended(Run(optimizer, ALONE, training, options.steps))
        reference = reference or alone
        for layout in LAYOUTS:
            run = Run(optimizer, layout, training, options.steps)
            found = alone if layout is ALONE else ended(run)
            record = record_of(run, found, alone)
            if layout is ALONE:
                record["from_curvadion"] = max(distances(alone.weights, reference.weights).values())
            yield record


# ---------------------------------------------------------------- the table

COLUMNS = {
    "without clipping": ("plain", "accumulation"),
    '`"gradient_clipping": 1.0`': ("clipping",),
}
ROWS = {
    "stage 0: no shards": [x for x in SHARDED if x.stage == 0],
    "stages 1 to 3": [x for x in SHARDED if x.stage and not x.offload],
    "stages 1 to 3, CPU offload": [x for x in SHARDED if x.offload],
}


def read(path: Path = RECORD) -> list[dict[str, Any]]:
    """Return the records of a file."""
    records: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["records"]
    return records


def largest(
    records: Sequence[dict[str, Any]],
    optimizer: str,
    trainings: Sequence[str],
    layouts: Sequence[Layout],
) -> float:
    """Return the largest distance of several runs.

    Args:
        records: of a file.
        optimizer: by name.
        trainings: by name.
        layouts: none of them may have raised an error.
    """
    names = [layout.name for layout in layouts]
    found = [
        float(record["distance"])
        for record in records
        if record["optimizer"] == optimizer
        and record["training"] in trainings
        and record["layout"] in names
    ]
    if len(found) != len(names) * len(trainings):
        raise ValueError(f"{len(found)} records of {optimizer}, {trainings}, {names}")
    return max(found)


def short(distance: float) -> str:
    """Return a distance to one digit, or to a tenth: 3e-5, 1.2."""
    return f"{distance:.1f}" if distance >= 0.1 else f"{distance:.0e}".replace("e-0", "e-")


def table(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of docs/deepspeed.md."""
    heads = [f"{name}, {how}" for how in COLUMNS for name in ("Curvadion", "DeepSpeed's Muon")]
    yield f"| | {' | '.join(heads)} |"
    yield f"|---|{'---|' * len(heads)}"
    for name, layouts in ROWS.items():
        cells = [
            short(largest(records, optimizer, trainings, layouts))
            for trainings in COLUMNS.values()
            for optimizer in OPTIMIZERS
        ]
        yield f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Run all and write the records, or print the table."""
    options = parse(Options)
    if options.table:
        print("\n".join(table(read())))
        return
    os.environ |= {"DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"}
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    records = []
    for training in (x for x in TRAININGS if x.name in options.trainings):
        for record in records_of(training, options):
            records.append(record)
            ending = record.get("error", f"distance {record.get('distance', 0.0):.1e}")
            print(f"{training.name}, {record['optimizer']}, {record['layout']}: {ending}")
    write(options.out, torch.device("cpu"), records)


if __name__ == "__main__":
    main()
