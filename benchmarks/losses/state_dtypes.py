r"""Say what states in 8 bits cost in loss.

    python -m benchmarks.losses.state_dtypes --out benchmarks/results/convergence/state_dtypes.json
    python -m benchmarks.losses.state_dtypes --table

One process trains a byte-level GPT of 131 thousand parameters for 20 tokens a parameter, on
Python's standard library and on the C++ headers of PyTorch. Either matrices take polar directions,
and embedding, head and norms AdamW, or all parameters take AdamW. States are float32, or momenta
are bfloat16, or all are in 8 bits. Runs of one seed begin with the same weights and read the same
data, so losses are compared seed by seed, as benchmarks.losses.claim does. Runs that are already
in the record are not repeated.

The method "1 %" is the cell of that name of claim.py: eight simulated replicas that send 1 % of the
bytes. Its states are float32, and the dtype is that of the residuals, whose bytes alone count.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.records import RESULTS, command_of
from benchmarks.common.tasks import Task, data
from benchmarks.losses.claim import CELLS, compared, training_of
from benchmarks.losses.one_process import add_missing, held_out_loss
from benchmarks.losses.simulation import training as simulated
from command_line import option, parse
from curvadion import Dion, ops, param_groups
from demo import aligned
from token_data import TrainingBatches
from train_gpt import Config

RECORD = RESULTS / "convergence" / "state_dtypes.json"
STEPS = 640
SEQUENCES = 64  # of a step
REPLICAS = "1 %"  # the method whose residuals differ
METHODS: dict[str, dict[str, Any]] = {
    "polar": {"lr": 0.04, "direction": "polar", "look_ahead": 3.0},
    "adamw": {"lr": 0.004},
    REPLICAS: CELLS["claim"][REPLICAS],
}
# By their names in the table; momenta of AdamW are in bfloat16 only with bfloat16 weights.
DTYPES = {
    "polar": (None, "bfloat16", "int8"),
    "adamw": (None, "int8"),
    REPLICAS: (None, "bfloat16", "int8"),
}
KEYS = ("corpus", "method", "state_dtype", "seed")  # of a run


@dataclass(frozen=True)
class Options:
    """Train with states of several dtypes, and compare held-out losses."""

    out: str = option("runs/state_dtypes.json", "the record")
    corpus: tuple[str, ...] = option(("python", "cpp"), "texts")
    methods: tuple[str, ...] = option(tuple(METHODS), f"of {', '.join(METHODS)}")
    seeds: int = option(5, "seeds of a cell, from 0")
    steps: int = option(STEPS, "optimizer steps")
    table: bool = option(False, "only print the table of the record in benchmarks/results")


def runs(options: Options) -> Iterator[dict[str, Any]]:
    """Yield the settings of each run."""
    for seed in range(options.seeds):
        for corpus in options.corpus:
            for method in options.methods:
                for dtype in DTYPES[method]:
                    values = (corpus, method, dtype, seed)
                    yield dict(zip(KEYS, values, strict=True)) | {"steps": options.steps}


def train(run: dict[str, Any]) -> dict[str, Any]:
    """Return the held-out loss after a run, in nats per byte, and the bytes of its states."""
    if run["method"] == REPLICAS:
        return train_replicas(run)
    task = Task(layers=2, dim=64, batch_size=SEQUENCES, corpus=run["corpus"])
    torch.manual_seed(run["seed"])
    model = task.model()
    groups: Any = param_groups(model)
    if run["method"] == "adamw":
        groups = [{"params": list(model.parameters()), "algorithm": "adamw"}]
    optimizer = Dion(groups, state_dtype=run["state_dtype"], **METHODS[run["method"]])
    schedule = Config(steps=run["steps"], warmdown_fraction=0.4)
    training, held_out = data(task)
    batches = TrainingBatches(training, task.context, task.batch_size, 1, 1, run["seed"])
    loss = held_out_loss(model, optimizer, batches, held_out, schedule)
    states = [value for state in optimizer.state.values() for value in state.values()]
    state_bytes = sum(value.nbytes for value in states if isinstance(value, torch.Tensor))
    parameters = sum(x.numel() for x in model.parameters())
    return {"loss": loss, "bytes_per_parameter": state_bytes / parameters}


def train_replicas(run: dict[str, Any]) -> dict[str, Any]:
    """As :func:`train`, of replicas with residuals of a dtype."""
    dtype = run["state_dtype"] or "float32"
    cell = METHODS[REPLICAS] | {"residual_dtype": dtype}
    training = training_of(cell, "small", run["corpus"], run["seed"])
    record = simulated.train(replace(training, steps=run["steps"]))
    # Of whole blocks; a parameter's last one may have fewer elements.
    size = ops.code_bytes(256) / 256 if dtype == "int8" else getattr(torch, dtype).itemsize
    return {"loss": record["loss"], "bytes_per_parameter": size}


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return the mean losses, and their differences to those of states in float32."""
    cells: dict[tuple[str, str, str | None], dict[int, float]] = {}
    sizes: dict[tuple[str, str, str | None], float] = {}
    for record in records:
        cell = (record["corpus"], record["method"], record["state_dtype"])
        cells.setdefault(cell, {})[record["seed"]] = record["loss"]
        sizes[cell] = record["bytes_per_parameter"]
    lines = [["text", "optimizer", "states", "bytes a parameter", "seeds", "loss", "gap", "p"]]
    for (corpus, method, dtype), losses in cells.items():
        wide = cells[corpus, method, None]
        row = compared(losses, None if dtype is None else wide, 0.0)
        line = [corpus, method, dtype or "float32", f"{sizes[corpus, method, dtype]:.2f}"]
        line += [f"{row.seeds}", f"{row.mean:.4f}"]
        if row.gap is None:
            line += ["", ""]
        else:
            p = "" if row.p is None else f"{row.p:.2g}"
            line += [f"{row.gap:+.2f} ± {row.gap_error:.2f} %", p]
        lines.append(line)
    return aligned(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what has no record yet, and print the table."""
    options = parse(Options, arguments)
    if options.table:
        print(table(json.loads(RECORD.read_text())["records"]))
        return
    command = command_of("benchmarks.losses.state_dtypes", arguments)
    records = add_missing(runs(options), train, Path(options.out), command)
    print(table(records))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
