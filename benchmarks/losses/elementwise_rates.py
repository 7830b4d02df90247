r"""Find learning rates for the parameters that take AdamW or Lion beside Dion.

    python -m benchmarks.losses.elementwise_rates --out benchmarks/results/param_groups/rates.json
    python -m benchmarks.losses.elementwise_rates --out benchmarks/results/param_groups/rates.json \
        --tasks wide --elementwise adamw --kinds embedding head vector --rates 1e-3 3e-3 2e-2

One process trains a byte-level GPT on Python's standard library; matrices take Dion at its default
learning rate 0.02. Embedding, head and norms take AdamW or Lion at a rate of the grid: all three,
or one of them while the others take --others. The record holds the held-out loss of each run. Runs
that are already in it are not repeated.
"""

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.records import environment
from benchmarks.common.tasks import Task
from benchmarks.losses.one_process import held_out_loss
from command_line import option, parse
from curvadion import Dion, param_groups
from demo import aligned
from train_gpt import Config

KINDS = ("embedding", "head", "vector")
TASKS = {
    "narrow": Task(layers=2, dim=64, batch_size=32),
    "wide": Task(layers=2, dim=128, batch_size=16),
}


@dataclass(frozen=True)
class Options:
    """Train at every rate of a grid and record held-out losses."""

    out: str = option("runs/elementwise_rates.json", "the record")
    tasks: tuple[str, ...] = option(("narrow", "wide"), "models: narrow, wide")
    rates: tuple[float, ...] = option((1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 2e-2), "learning rates")
    seeds: tuple[int, ...] = option((0,), "seeds of the weights and of the data order")
    steps: int = option(300, "optimizer steps")
    lr: float = option(0.02, "Dion's learning rate")
    elementwise: tuple[str, ...] = option(("adamw", "lion"), "what runs beside Dion")
    kinds: tuple[str, ...] = option(("all",), "whose rate varies: all, embedding, head, vector")
    others: float = option(0.01, "rate of the other kinds")


def runs(options: Options) -> Iterator[dict[str, Any]]:
    """Yield the settings of each run."""
    choices = product(
        options.seeds, options.tasks, options.elementwise, options.kinds, options.rates
    )
    for seed, task, elementwise, kind, rate in choices:
        rates = {each: rate if kind in (each, "all") else options.others for each in KINDS}
        yield {
            "task": task,
            "model": asdict(TASKS[task]),
            "elementwise": elementwise,
            "kind": kind,
            "rate": rate,
            "rates": rates,
            "lr": options.lr,
            "seed": seed,
            "steps": options.steps,
        }


def train(run: dict[str, Any]) -> dict[str, Any]:
    """Return the held-out loss after a run, in nats per byte."""
    task = TASKS[run["task"]]
    torch.manual_seed(run["seed"])
    model = task.model()
    groups = param_groups(
        model,
        elementwise=run["elementwise"],
        options={kind: {"lr": rate} for kind, rate in run["rates"].items()},
    )
    optimizer = Dion(groups, lr=run["lr"])
    schedule = Config(steps=run["steps"])
    return {"loss": held_out_loss(task, model, optimizer, schedule, run["seed"])}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what has no record yet and print losses by rate."""
    options = parse(Options, arguments)
    file = Path(options.out)
    file.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(file.read_text()) if file.exists() else {"commands": [], "records": []}
    commands, records = before["commands"], before["records"]
    given = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "-m", "benchmarks.losses.elementwise_rates", *given])
    for run in runs(options):
        if not any(run.items() <= record.items() for record in records):
            records.append(run | train(run))
            record = {
                "commands": [*(c for c in commands if c != command), command],
                "environment": environment(torch.device("cpu")),
                "records": records,
            }
            file.write_text(json.dumps(record, indent=1) + "\n")
    every = sorted({record["rate"] for record in records})
    header = ["model", "beside Dion", "kind", *(f"{rate:g}" for rate in every)]
    losses: dict[tuple[str, ...], dict[float, list[float]]] = {}
    for record in records:
        row = losses.setdefault(tuple(record[key] for key in ("task", "elementwise", "kind")), {})
        row.setdefault(record["rate"], []).append(record["loss"])
    rows = [
        [*key, *(f"{sum(at[r]) / len(at[r]):.4f}" if r in at else "" for r in every)]
        for key, at in losses.items()
    ]
    print(aligned([header, *rows]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
