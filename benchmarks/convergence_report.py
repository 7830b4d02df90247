"""Make a table and a picture of the records that benchmarks/convergence.py has left.

    python benchmarks/convergence_report.py --grid full

Of each method and setting the learning rate with the lowest mean loss over seeds counts. Writes
all records, the table and the picture below ``--out``: ``<grid>.json``, ``.md`` and ``.png``.
"""

import json
import math
import shlex
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[1:1] = [str(ROOT / folder) for folder in ("", "kernels", "examples")]

import convergence_plot
from command_line import option, parse
from demo import aligned

Record = dict[str, Any]

HEADER = [
    "size",
    "method",
    "settings",
    "budget",
    "bytes",
    "kB/step",
    "gate open",
    "lr",
    "seeds",
    "val loss",
    "± seeds",
    "mean weights",
    "over Dion",
]
CAPTION = (
    "bytes: sent, as a share of AdamW with DDP. val loss: of the replicas' own weights, mean over "
    "replicas and seeds; mean weights: of their mean. over Dion: above the lowest loss of Dion "
    "synchronised at every step. lr*: the best is the lowest or highest rate tried."
)


@dataclass(frozen=True)
class Options:
    """Make a table and a picture of the records that benchmarks/convergence.py has left."""

    grid: str = option("quick", "which runs")
    runs: str = option("runs/convergence", "folder of the records")
    out: str = option("benchmarks/results/convergence", "folder of what is made")


@dataclass(frozen=True)
class Result:
    """A method with its settings at the best of its learning rates.

    Attributes:
        size, method, settings, budget: as in the runs.
        lr: the rate with the lowest mean loss over seeds.
        at_edge: whether no lower, or no higher, rate was tried.
        losses: of the replicas' own weights, one a seed; infinite where a run diverged.
        records: of the runs at that rate, one a seed.
    """

    size: str
    method: str
    settings: dict[str, Any]
    budget: float | None
    lr: float
    at_edge: bool
    losses: list[float]
    records: list[Record]

    @property
    def loss(self) -> float:
        """Mean over seeds."""
        return statistics.fmean(self.losses)

    @property
    def deviation(self) -> float:
        """Standard deviation over seeds; 0 for one seed or where a run diverged."""
        several = len(self.losses) > 1 and math.isfinite(self.loss)
        return statistics.stdev(self.losses) if several else 0.0

    def mean(self, key: str) -> float:
        """Return the mean over seeds of a number in the records; infinite where it is missing."""
        return statistics.fmean(_number(record[key]) for record in self.records)


def _number(value: float | None) -> float:
    return math.inf if value is None else value


def best_results(records: Iterable[Record]) -> list[Result]:
    """Return one result for each size, method and setting, in the order of the first records.

    Rates with fewer seeds than others of the same method are left out.
    """
    variants: dict[str, dict[float, list[Record]]] = {}
    for record in records:
        run = record["run"]
        key = json.dumps([run[k] for k in ("size", "method", "settings", "budget", "replicas")])
        variants.setdefault(key, {}).setdefault(run["lr"], []).append(record)
    return [_best(by_lr) for by_lr in variants.values()]


def _best(by_lr: dict[float, list[Record]]) -> Result:
    seeds = max(map(len, by_lr.values()))
    covered = {lr: records for lr, records in by_lr.items() if len(records) == seeds}
    losses = {lr: [_number(r["val_loss"]) for r in each] for lr, each in covered.items()}
    lr = min(losses, key=lambda rate: statistics.fmean(losses[rate]))
    run = covered[lr][0]["run"]
    return Result(
        size=run["size"],
        method=run["method"],
        settings=run["settings"],
        budget=run["budget"],
        lr=lr,
        at_edge=lr in (min(by_lr), max(by_lr)),
        losses=losses[lr],
        records=covered[lr],
    )


def rows(results: Sequence[Result]) -> list[list[str]]:
    """Return the table's cells, the header first."""
    reference: dict[str, float] = {}
    for result in results:
        if result.method == "dion":
            best = min(result.loss, reference.get(result.size, math.inf))
            reference[result.size] = best
    return [HEADER, *(_row(result, reference.get(result.size)) for result in results)]


def _row(result: Result, reference: float | None) -> list[str]:
    diverged = not math.isfinite(result.loss)
    excess = "" if reference is None or diverged else f"{result.loss / reference - 1:+.2%}"
    return [
        result.size,
        result.method,
        " ".join(f"{key}={value:g}" for key, value in result.settings.items()),
        "" if result.budget is None else f"{result.budget:.1%}",
        f"{result.mean('share'):.3%}",
        f"{result.mean('sent_per_step') / 1e3:.2f}",
        f"{result.mean('gate_open_share'):.1%}",
        f"{result.lr:g}" + "*" * result.at_edge,
        str(len(result.losses)),
        "diverged" if diverged else f"{result.loss:.4f}",
        f"{result.deviation:.4f}" if len(result.losses) > 1 else "",
        "" if diverged else f"{result.mean('mean_weights_val_loss'):.4f}",
        excess,
    ]


def markdown(cells: Sequence[Sequence[str]]) -> str:
    """Return the table in Markdown."""
    rule = ["---"] * 3 + ["---:"] * (len(cells[0]) - 3)
    lines = [cells[0], rule, *cells[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def read_records(folder: Path, grid: str) -> list[Record]:
    """Return the records of a grid, in the order of their files' names."""
    records = [json.loads(file.read_text()) for file in sorted(folder.glob(f"{grid}-*.json"))]
    return [record for record in records if record["run"]["grid"] == grid]


def write_json(path: Path, command: str, records: Sequence[Record]) -> None:
    """Write all records with the command that made the report, one record a line."""
    lines = ",\n".join(json.dumps(record, allow_nan=False) for record in records)
    path.write_text(f'{{"command": {json.dumps(command)},\n"records": [\n{lines}\n]}}\n')


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    """Write the report, print the table and return its rows' results."""
    options = parse(Options, arguments)
    records = read_records(Path(options.runs), options.grid)
    if not records:
        raise SystemExit(
            f"runs={options.runs!r} has no record of grid={options.grid!r}: "
            f"run benchmarks/convergence.py --grid {options.grid} first"
        )
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    given = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "benchmarks/convergence_report.py", *given])
    results = sorted(
        best_results(records), key=lambda r: (r.mean("parameters"), r.method, -r.mean("share"))
    )
    cells = rows(results)
    write_json(out / f"{options.grid}.json", command, records)
    (out / f"{options.grid}.md").write_text(f"{markdown(cells)}\n{CAPTION}\n")
    convergence_plot.draw(
        [
            convergence_plot.Point(r.size, r.method, r.mean("share"), r.loss, r.deviation)
            for r in results
            if math.isfinite(r.loss)
        ],
        out / f"{options.grid}.png",
    )
    print(f"{aligned(cells)}\n\n{CAPTION}\n\n{out}/{options.grid}.json, .md and .png")
    return results


if __name__ == "__main__":
    main()
