r"""Say how far 1 and 10 % of the bytes end above Muon at every step, and how sure that is.

    python -m benchmarks.losses.claim --seeds 10 --workers 12
    python -m benchmarks.losses.claim --cells bits schedule --seeds 5 --corpus stdlib headers
    python -m benchmarks.losses.claim --cells larger --size medium --seeds 3 \
        --corpus stdlib headers

Rates were tuned on ``stdlib``; the other texts are reported with the same rates. All texts are
files of runs/texts: ``stdlib``, the sources of Python's standard library; ``headers``, the C++
headers of PyTorch; ``kernel``, sources of Linux, on which nobody tuned. A record holds the text's
SHA-256; pack_text.py makes such files.

Runs of one seed begin with the same weights and read the same data, so cells are compared seed by
seed: the gap is the mean of the relative differences, its standard error that of this mean, and p
the probability of so large a difference, in either direction, if there were none (Student's t). A
gap is significant if p < 0.001, the level of modded-nanogpt's Track 3. A cell of which a run
diverged has an infinite loss. Records are those of simulate.py.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.records import command_of
from benchmarks.losses.simulation.records import Machine, add_missing, record_of
from benchmarks.losses.simulation.training import Training
from command_line import option, parse
from curvadion import checks
from demo import aligned

SIGNIFICANT = 0.001
STEPS = {"small": 640, "medium": 2400}  # 20 tokens for each parameter
# The cooldown over the last 40 %, which would end 6 % beyond the last step, and the average of the
# last weights.
TAIL: dict[str, Any] = {"warmdown": 0.4, "overrun": 0.06, "tail": 0.6}
MUON: dict[str, Any] = {"method": "muon", "lr": 0.04, "look_ahead": 3.0, "elementwise": 0.25}
ONE: dict[str, Any] = {"method": "ours", "lr": 0.08, "budget": 0.01, "bits": 2}
TEN: dict[str, Any] = {"method": "ours", "lr": 0.08, "budget": 0.1, "bits": 3}
# The synchronous settings, because replicas stay identical.
CODED_GRADIENTS = MUON | {"method": "coded_gradients", "budget": 0.1}
BASELINE = "Muon, every step"
# Each group of cells, by name; the first group is the claim.
CELLS: dict[str, dict[str, dict[str, Any]]] = {
    "claim": {
        BASELINE: MUON | TAIL,
        "1 %": ONE | TAIL | {"up": 1},
        "10 %": TEN | TAIL,
    },
    # On the text for tuning: the best of these is the claim's baseline.
    "baseline": {
        f"Muon, look-ahead {ahead:g}, others {elementwise:g}": MUON
        | TAIL
        | {"look_ahead": ahead, "elementwise": elementwise}
        for ahead, elementwise in itertools.product((2.0, 3.0), (0.5, 0.25))
    },
    "bits": {
        "1 %, 1 up 2 down": ONE | TAIL | {"up": 1},
        "1 %, 2 both ways": ONE | TAIL,
        "1 %, 1 both ways": ONE | TAIL | {"bits": 1},
    },
    "budgets": {
        BASELINE: MUON | TAIL,
        "3 %, 1 up 2 down": ONE | TAIL | {"up": 1, "budget": 0.03},
        "3 %, 2 both ways": ONE | TAIL | {"budget": 0.03},
        "0.25 %, 1 both ways": ONE | TAIL | {"bits": 1, "budget": 0.0025},
        "0.25 %, 1 up 2 down": ONE | TAIL | {"up": 1, "budget": 0.0025},
        "10 %, 3 both ways": TEN | TAIL,
        "10 %, 2 up 4 down": TEN | TAIL | {"up": 2, "bits": 4},
    },
    "gradients": {
        BASELINE: MUON | TAIL,
        "3 bits both ways": CODED_GRADIENTS | TAIL | {"bits": 3},
        "2 bits up, 4 down": CODED_GRADIENTS | TAIL | {"up": 2, "bits": 4},
        "2 bits both ways": CODED_GRADIENTS | TAIL | {"bits": 2},
        "1 bit up, 2 down": CODED_GRADIENTS | TAIL | {"up": 1, "bits": 2},
        "1 bit both ways": CODED_GRADIENTS | TAIL | {"bits": 1},
    },
    "schedule": {
        f"{kind}, {name}": method | schedule
        for kind, method in {"Muon": MUON, "1 %": ONE | {"up": 1}}.items()
        for name, schedule in {
            "20 %": {},
            "20 % with tail": TAIL | {"warmdown": 0.2},
            "40 %": {"warmdown": 0.4},
            "40 % with tail": TAIL,
            "70 % with tail": TAIL | {"warmdown": 0.7},
            "100 % with tail": TAIL | {"warmdown": 1.0},
            "70 % with tail, others 40 %": TAIL | {"warmdown": 0.7, "elementwise_warmdown": 0.4},
            "40 % with tail, others 70 %": TAIL | {"elementwise_warmdown": 0.7},
        }.items()
    },
    "rates": {
        f"{kind} at {lr}, others {elementwise}": method
        | TAIL
        | {"lr": lr, "elementwise": elementwise}
        for kind, method, rates in (
            ("Muon", MUON, (0.028, 0.04, 0.056)),
            ("1 %", ONE | {"up": 1}, (0.056, 0.08, 0.113)),
        )
        for lr in rates
        for elementwise in (0.25, 0.5)
    },
    # Of the size "medium", which needs lower rates.
    "larger": {
        **{f"Muon at {lr}": MUON | TAIL | {"lr": lr} for lr in (0.04, 0.02)},
        **{f"1 % at {lr}": ONE | TAIL | {"up": 1, "lr": lr} for lr in (0.02, 0.04, 0.08)},
        "1 % in 2 bits at 0.04": ONE | TAIL | {"lr": 0.04},
        "10 % at 0.04": TEN | TAIL | {"lr": 0.04},
        "10 %, gradients in codes at 0.04": CODED_GRADIENTS | TAIL | {"bits": 3},
    },
}


@dataclass(frozen=True)
class Options(Machine):
    """Compare 1 and 10 % of the bytes with the best synchronous run, with standard errors."""

    cells: tuple[str, ...] = option(("claim",), f"groups of cells: {', '.join(CELLS)}")
    size: str = option("small", f"of {', '.join(STEPS)}")
    corpus: tuple[str, ...] = option(
        ("stdlib", "headers", "kernel"), "files of runs/texts by name, or python or cpp"
    )
    seeds: int = option(10, "seeds of a cell, from 0")
    out: str = option("runs/claim.json", "the records")


class Row(NamedTuple):
    """A cell's losses, compared with the baseline's of the same seeds.

    Attributes:
        seeds: how many, both in the cell and in the baseline.
        mean, error: of the losses, and the mean's standard error.
        share: of the bytes.
        gap, gap_error: of the relative differences, in percent; None for the baseline.
    """

    seeds: int
    mean: float
    error: float
    share: float
    gap: float | None = None
    gap_error: float | None = None

    @property
    def p(self) -> float | None:
        """The probability of a difference at least as large if there were none."""
        if self.gap is None or not self.gap_error or not math.isfinite(self.gap_error):
            return None
        return 2 * upper_tail(abs(self.gap) / self.gap_error, self.seeds - 1)


def upper_tail(t: float, freedom: int) -> float:
    """P(T > t) of Student's t.

    With T = sqrt(freedom) tan(angle), the density of the angle is proportional to
    cos(angle)^(freedom - 1) between -pi / 2 and pi / 2.
    """
    count = 20_000
    width = math.pi / count
    angles = [-math.pi / 2 + (i + 0.5) * width for i in range(count)]
    first = math.atan(t / math.sqrt(freedom))
    density = [math.cos(angle) ** (freedom - 1) for angle in angles]
    above = sum(d for d, angle in zip(density, angles, strict=True) if angle > first)
    return above / sum(density)


def compared(
    losses: Mapping[int, float], baseline: Mapping[int, float] | None, share: float
) -> Row:
    """Return the row of losses by seed.

    Args:
        losses: of a cell; infinite where a run diverged.
        baseline: of the cell to compare with, of which only seeds in both count; None: of none.
        share: of the bytes.
    """
    if baseline is None:
        return Row(len(losses), *_mean_and_error(list(losses.values())), share)
    both = sorted(losses.keys() & baseline.keys())
    mean, error = _mean_and_error([losses[seed] for seed in both])
    gaps = [100 * (losses[seed] / baseline[seed] - 1) for seed in both]
    return Row(len(both), mean, error, share, *_mean_and_error(gaps))


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error; NaN where there are too few values or one is infinite."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return (sum(values) / len(values) if values else math.nan), math.nan
    return statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))


def trainings(options: Options) -> list[Training]:
    """Return the runs, each once, all cells of a seed before the next seed."""
    checks.one_of("size", options.size, tuple(STEPS))
    runs = (
        training_of(cell, options.size, corpus, seed)
        for seed in range(options.seeds)
        for cell in cells_of(options.cells).values()
        for corpus in options.corpus
    )
    return list(dict.fromkeys(runs))


def training_of(cell: Mapping[str, Any], size: str, corpus: str, seed: int) -> Training:
    """Return a cell's run.

    Args:
        cell: settings of a training, without those below.
        size: a key of STEPS.
        corpus: the text.
        seed: of the weights and of the data order.
    """
    steps = STEPS[size]
    where: dict[str, Any] = {"size": size, "corpus": corpus, "seed": seed, "steps": steps}
    return Training(**{"tail_decay": tail_decay(steps), **cell, **where})


def tail_decay(steps: int) -> float:
    """Return the decay of an average whose horizon is 4 % of the steps."""
    return round(1 - 1 / (0.04 * steps), 4)


def rows_by_cell(
    records: Sequence[dict[str, Any]],
    groups: Sequence[str],
    corpus: str,
    seeds: int,
    size: str = "small",
) -> dict[str, Row]:
    """Return the rows of cells that have records; the first cell is the baseline.

    Without records of the first cell no gaps are known.

    Args:
        records: of simulated runs.
        groups: keys of CELLS.
        corpus: the text.
        seeds: from 0.
        size: key of STEPS.
    """
    found: dict[str, Row] = {}
    cells = cells_of(groups)
    baseline: dict[int, float] | None = None
    for number, (cell, settings) in enumerate(cells.items()):
        losses, share = losses_by_seed(records, settings, corpus, seeds, size)
        if losses:
            found[cell] = compared(losses, baseline, share)
            if number == 0:
                baseline = losses
    return found


def losses_by_seed(
    records: Sequence[dict[str, Any]],
    settings: Mapping[str, Any],
    corpus: str,
    seeds: int,
    size: str = "small",
) -> tuple[dict[int, float], float]:
    """Return the losses of a cell's runs that have records, and the share of the bytes.

    Args:
        records: of simulated runs.
        settings: of the cell.
        corpus: the text.
        seeds: from 0.
        size: key of STEPS.
    """
    losses = {}
    share = 0.0
    for seed in range(seeds):
        record = record_of(training_of(settings, size, corpus, seed), records)
        if record is not None:
            losses[seed] = math.inf if record["loss"] is None else record["loss"]
            share = record["share"]
    return losses, share


def lines(records: Sequence[dict[str, Any]], options: Options) -> list[list[str]]:
    """Return the lines of the table: one for each text and cell with records."""
    result = []
    for corpus in options.corpus:
        found = rows_by_cell(records, options.cells, corpus, options.seeds, options.size)
        for cell, row in found.items():
            line = [corpus, cell, f"{row.seeds}", f"{row.share:.2%}"]
            line += [f"{row.mean:.4f}", f"{row.error:.4f}"]
            if row.p is None:
                line += ["", "", ""]
            else:
                significant = "yes" if row.p < SIGNIFICANT else "no"
                line += [f"{row.gap:+.2f} ± {row.gap_error:.2f} %", f"{row.p:.1g}", significant]
            result.append(line)
    return result


def cells_of(groups: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the cells of several groups, each once."""
    for group in groups:
        checks.one_of("cells", group, tuple(CELLS))
    return {name: cell for group in groups for name, cell in CELLS[group].items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what has no record yet, and print the table."""
    options = parse(Options, arguments)
    command = command_of("benchmarks.losses.claim", arguments)
    try:
        records = add_missing(trainings(options), Path(options.out), command, options)
    except ValueError as error:
        raise SystemExit(f"claim: {error}") from error
    head = ["text", "cell", "seeds", "bytes", "loss", "s.e.", "gap", "p", "significant"]
    print(aligned([head, *lines(records, options)]))


if __name__ == "__main__":
    main()
