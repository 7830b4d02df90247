"""Make a table and a picture of the records of benchmarks/convergence.py.

    python benchmarks/convergence_report.py

Each method and setting is shown at the learning rates with the lowest mean loss over seeds. Writes
all records, two tables and the picture below ``--out``: ``<name>.json``, ``.md`` and ``.png``. The
first table and the picture show each method's best setting at each budget, the second table all
settings.
"""

import json
import math
import shlex
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[1:1] = [str(ROOT / folder) for folder in ("", "kernels", "examples")]

import convergence_plot
from command_line import option, parse
from demo import aligned
from grids import ELEMENTWISE, Run

Record = dict[str, Any]
Rates = tuple[float, float | None]  # of matrices; of other parameters, as a share of that

HEADER = [
    "size",
    "steps",
    "method",
    "settings",
    "budget",
    "bytes",
    "kB/step",
    "gate open",
    "lr",
    "AdamW lr",
    "seeds",
    "val loss",
    "± seeds",
    "mean weights",
    "over Dion",
]
CAPTION = (
    "bytes: sent, as a share of AdamW with DDP. val loss: of the replicas' own weights, mean over "
    "replicas and seeds; mean weights: loss of their mean. over Dion: above the lowest loss of "
    "Dion synchronised at every step. lr*: the best rate is the lowest or highest tried. AdamW lr: "
    "rate of the parameters that take AdamW beside Dion."
)


@dataclass(frozen=True)
class Options:
    """Make a table and a picture of the records of benchmarks/convergence.py."""

    runs: str = option("runs/convergence", "folder of the records")
    out: str = option("benchmarks/results/convergence", "folder for the report")
    name: str = option("runs", "name of the report's files")


@dataclass(frozen=True)
class Result:
    """A method with its settings, at its best learning rates.

    Attributes:
        size, steps, method, settings, budget: as in the runs.
        lr, elementwise: the rates with the lowest mean loss over seeds; the second is a share of
            the first, None where all parameters take one rate.
        at_edge: whether ``lr`` is the lowest or highest rate tried.
        losses: of the replicas' own weights, one per seed; infinite if a run diverged.
        records: of the runs at that rate, one per seed.
    """

    size: str
    steps: int
    method: str
    settings: dict[str, Any]
    budget: float | None
    lr: float
    elementwise: float | None
    at_edge: bool
    losses: list[float]
    records: list[Record]

    @property
    def loss(self) -> float:
        """Mean over seeds."""
        return statistics.fmean(self.losses)

    @property
    def deviation(self) -> float:
        """Standard deviation over seeds; 0 for one seed or if a run diverged."""
        several = len(self.losses) > 1 and math.isfinite(self.loss)
        return statistics.stdev(self.losses) if several else 0.0

    def mean(self, key: str) -> float:
        """Return the mean over seeds of a number in the records; infinite if it is missing."""
        return statistics.fmean(_number(record[key]) for record in self.records)


def _number(value: float | None) -> float:
    return math.inf if value is None else value


def best_results(records: Iterable[Record]) -> list[Result]:
    """Return one result for each size, length, method and setting, in the order of the records.

    Rates with fewer seeds than others of the same method are left out.
    """
    variants: dict[str, dict[Rates, list[Record]]] = {}
    for record in records:
        key, rates = _variant_and_rates(record["run"])
        variants.setdefault(key, {}).setdefault(rates, []).append(record)
    return [_best(by_rates) for by_rates in variants.values()]


def at_best_rates(runs: Iterable[Run], records: Iterable[Record]) -> list[Run]:
    """Return the runs, without duplicates, at the best rates in the records where there are any."""
    best = {}
    for result in best_results(records):
        key, rates = _variant_and_rates(result.records[0]["run"])
        best[key] = rates
    chosen: dict[str, Run] = {}
    for run in runs:
        key, (lr, elementwise) = _variant_and_rates(run.as_dict())
        lr, elementwise = best.get(key, (lr, elementwise))
        tuned = {} if elementwise is None else {ELEMENTWISE: elementwise}
        run = replace(run, lr=lr, settings={**run.settings, **tuned})
        chosen[run.slug] = run
    return list(chosen.values())


def _variant_and_rates(run: dict[str, Any]) -> tuple[str, Rates]:
    """A run without its tuned rates, and those rates."""
    settings = {key: value for key, value in run["settings"].items() if key != ELEMENTWISE}
    what = [run[key] for key in ("steps", "method", "budget", "replicas")]
    return json.dumps([_task(run), *what, settings]), (run["lr"], run["settings"].get(ELEMENTWISE))


def _task(run: dict[str, Any]) -> str:
    """The size of the model, and the text unless it is Python."""
    corpus = run["task"].get("corpus", "python")
    return str(run["size"]) if corpus == "python" else f"{run['size']}, {corpus}"


def _best(by_rates: dict[Rates, list[Record]]) -> Result:
    seeds = max(map(len, by_rates.values()))
    covered = {rates: records for rates, records in by_rates.items() if len(records) == seeds}
    losses = {rates: [_number(r["val_loss"]) for r in each] for rates, each in covered.items()}
    best = min(losses, key=lambda rates: statistics.fmean(losses[rates]))
    tried = [lr for lr, elementwise in by_rates if elementwise == best[1]]
    run = covered[best][0]["run"]
    return Result(
        size=_task(run),
        steps=run["steps"],
        method=run["method"],
        settings={key: value for key, value in run["settings"].items() if key != ELEMENTWISE},
        budget=run["budget"],
        lr=best[0],
        elementwise=best[1],
        at_edge=best[0] in (min(tried), max(tried)),
        losses=losses[best],
        records=covered[best],
    )


def rows(results: Sequence[Result]) -> list[list[str]]:
    """Return the table's cells, the header first."""
    reference: dict[tuple[str, int], float] = {}
    for result in results:
        if result.method == "dion":
            task = result.size, result.steps
            reference[task] = min(result.loss, reference.get(task, math.inf))
    return [HEADER, *(_row(r, reference.get((r.size, r.steps))) for r in results)]


def _row(result: Result, reference: float | None) -> list[str]:
    diverged = not math.isfinite(result.loss)
    excess = "" if reference is None or diverged else f"{result.loss / reference - 1:+.2%}"
    return [
        result.size,
        str(result.steps),
        result.method,
        " ".join(f"{key}={value:g}" for key, value in result.settings.items()),
        "" if result.budget is None else f"{result.budget:.1%}",
        f"{result.mean('share'):.3%}",
        f"{result.mean('sent_per_step') / 1e3:.2f}",
        f"{result.mean('gate_open_share'):.1%}",
        f"{result.lr:g}" + "*" * result.at_edge,
        "" if result.elementwise is None else f"{result.lr * result.elementwise:g}",
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


def read_records(folder: Path) -> list[Record]:
    """Return all records of a folder, in the order of their files' names."""
    return [json.loads(file.read_text("utf-8")) for file in sorted(folder.glob("*.json"))]


def write_json(path: Path, command: str, records: Sequence[Record]) -> None:
    """Write all records with the command that made the report, one record per line."""
    lines = ",\n".join(json.dumps(record, allow_nan=False) for record in records)
    path.write_text(f'{{"command": {json.dumps(command)},\n"records": [\n{lines}\n]}}\n')


def best_at_budgets(results: Iterable[Result]) -> list[Result]:
    """Return each method's best setting at each budget, and every setting without a budget.

    Settings with fewer seeds than others are left out.
    """
    alike: dict[str, list[Result]] = {}
    for r in results:
        what = r.settings if r.budget is None else r.budget
        alike.setdefault(json.dumps([r.size, r.steps, r.method, what]), []).append(r)
    return [min(each, key=lambda r: (-len(r.losses), r.loss)) for each in alike.values()]


def points(results: Iterable[Result]) -> list[convergence_plot.Point]:
    """Return the picture's points; results that diverged have none."""
    return [
        convergence_plot.Point(
            f"{r.size}, {r.steps} steps", r.method, r.mean("share"), r.loss, r.deviation
        )
        for r in results
        if math.isfinite(r.loss)
    ]


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    """Write the report, print the shorter table and return the results of all settings."""
    options = parse(Options, arguments)
    records = read_records(Path(options.runs))
    if not records:
        raise SystemExit(
            f"runs={options.runs!r} has no record: run benchmarks/convergence.py first"
        )
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    given = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "benchmarks/convergence_report.py", *given])
    results = sorted(
        best_results(records),
        key=lambda r: (r.mean("parameters"), r.steps, r.method, -r.mean("share")),
    )
    best = best_at_budgets(results)
    cells = rows(best)
    write_json(out / f"{options.name}.json", command, records)
    (out / f"{options.name}.md").write_text(
        f"{markdown(cells)}\n{CAPTION}\n\nEvery setting:\n\n{markdown(rows(results))}",
        encoding="utf-8",
    )
    convergence_plot.draw(points(best), out / f"{options.name}.png")
    print(f"{aligned(cells)}\n\n{CAPTION}\n\n{out}/{options.name}.json, .md and .png")
    return results


if __name__ == "__main__":
    main()
