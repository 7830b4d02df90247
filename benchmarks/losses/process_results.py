"""Results of train_processes.py: each method and setting at its best learning rates."""

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.losses.planned_runs import ELEMENTWISE, Run

Record = dict[str, Any]
Rates = tuple[float, float | None]  # of matrices; of other parameters, as a share of that


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


def read_records(folder: Path) -> list[Record]:
    """Return all records of a folder, in the order of their files' names."""
    return [json.loads(file.read_text("utf-8")) for file in sorted(folder.glob("*.json"))]
