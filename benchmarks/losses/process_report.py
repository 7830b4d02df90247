"""Make a table and a picture of the records of train_processes.py.

    python -m benchmarks.losses.process_report

Each method and setting is shown at the learning rates with the lowest mean loss over seeds. Writes
all records, two tables and the picture below ``--out``: ``<name>.json``, ``.md`` and ``.png``. The
first table and the picture show each method's best setting at each budget, the second table all
settings.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.records import command_of
from benchmarks.losses import process_picture
from benchmarks.losses.process_results import Record, Result, best_results, read_records
from command_line import option, parse
from demo import aligned

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
    """Make a table and a picture of the records of train_processes.py."""

    runs: str = option("runs/convergence", "folder of the records")
    out: str = option("benchmarks/results/convergence", "folder for the report")
    name: str = option("runs", "name of the report's files")


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


def write_json(path: Path, command: str, records: Sequence[Record]) -> None:
    """Write all records with the command that made the report, one record per line."""
    lines = ",\n".join(json.dumps(record, allow_nan=False) for record in records)
    path.write_text(f'{{"command": {json.dumps(command)},\n"records": [\n{lines}\n]}}\n')


def best_at_budgets(results: Iterable[Result]) -> list[Result]:
    """Return each method's best setting at each budget, and every setting without a budget.

    Settings with fewer seeds than others are left out.
    """
    by_setting: dict[str, list[Result]] = {}
    for r in results:
        what = r.settings if r.budget is None else r.budget
        by_setting.setdefault(json.dumps([r.size, r.steps, r.method, what]), []).append(r)
    return [min(each, key=lambda r: (-len(r.losses), r.loss)) for each in by_setting.values()]


def points(results: Iterable[Result]) -> list[process_picture.Point]:
    """Return the picture's points; results that diverged have none."""
    return [
        process_picture.Point(
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
            f"runs={options.runs!r} has no record: run benchmarks.losses.train_processes first"
        )
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    command = command_of("benchmarks.losses.process_report", arguments)
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
    process_picture.draw(points(best), out / f"{options.name}.png")
    print(f"{aligned(cells)}\n\n{CAPTION}\n\n{out}/{options.name}.json, .md and .png")
    return results


if __name__ == "__main__":
    main()
