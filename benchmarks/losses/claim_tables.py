r"""Print what README and docs/convergence.md claim, from the records; draw it with error bars.

    python -m benchmarks.losses.claim_tables
    python -m benchmarks.losses.claim_tables --picture benchmarks/results/convergence/claim.png

Records come from claim.py and characters.py. tests/docs checks that the pages contain the tables.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.records import RESULTS
from benchmarks.losses.characters import METHODS, REPORTED
from benchmarks.losses.claim import BASELINE, SIGNIFICANT, Row, rows_by_cell
from benchmarks.losses.simulation.records import known
from benchmarks.losses.simulation.training import Training

CONVERGENCE = RESULTS / "convergence"
SEEDS = 10
TEXTS = {"stdlib": "Python", "headers": "C++", "kernel": "C (Linux)"}
NAMES = {
    "adamw": "AdamW",
    "muon": "Muon",
    "10 %": "`CurvaDion(wire_budget=0.1)`",
    "1 %": "`CurvaDion(wire_budget=0.01)`, `bits=(1, 2)`",
    "adamw at 1 %": "AdamW in `Replicated(wire_budget=0.01)`, `bits=(1, 2)`",
}
Records = Sequence[dict[str, Any]]


def read(name: str) -> list[dict[str, Any]]:
    """Return the records of a file of benchmarks/results/convergence."""
    content = json.loads((CONVERGENCE / f"{name}.json").read_text("utf-8"))
    records: list[dict[str, Any]] = content["records"]
    return records


def percent_sent(share: float) -> str:
    """Return a share of the bytes to two digits: 9.6 %."""
    return f"{100 * share:.3g} %" if share == 1.0 else f"{100 * share:.2g} %"


def gap_of(row: Row) -> str:
    """Return a gap with its standard error, in bold if it is significant; "" if none is known."""
    if row.p is None:
        return ""
    text = f"{row.gap:+.1f} ± {row.gap_error:.1f} %".replace("-", "−")
    return f"**{text}**" if row.p < SIGNIFICANT else text


def gaps(records: Records) -> Iterator[str]:
    """Yield the table of gaps, by budget and text."""
    tables = {text: rows_by_cell(records, ["claim"], text, SEEDS) for text in TEXTS}
    cells = [cell for cell in tables["stdlib"] if cell != BASELINE]
    yield f"| bytes | {' | '.join(TEXTS.values())} |"
    yield f"|---|{'---|' * len(TEXTS)}"
    for cell in cells:
        yield f"| {cell} | {' | '.join(gap_of(tables[text][cell]) for text in TEXTS)} |"


def losses(records: Records) -> Iterator[str]:
    """Yield the table of losses, by text and cell."""
    yield "| text | method | seeds | bytes | loss | gap | p |"
    yield "|---|---|---|---|---|---|---|"
    for text, name in TEXTS.items():
        for cell, row in rows_by_cell(records, ["claim"], text, SEEDS).items():
            line = [name, cell, f"{row.seeds}", percent_sent(row.share)]
            line.append(f"{row.mean:.4f} ± {row.error:.4f}")
            line += ["", ""] if row.p is None else [gap_of(row), f"{row.p:.1g}"]
            yield f"| {' | '.join(line)} |"


def of_characters(records: Records, size: str) -> dict[str, list[dict[str, Any]]]:
    """Return the records of a recipe by method, as characters.py calls it.

    Of several settings of a method the best are taken, and of these all seeds.
    """
    by_method: dict[str, list[dict[str, Any]]] = {}
    for name, method in METHODS.items():
        by_settings: dict[str, list[dict[str, Any]]] = {}
        for r in map(known, records):
            budget = method.get("budget", 0.0)
            if (r["size"], r["method"], r["budget"]) == (size, method["method"], budget):
                settings = {k: r[k] for k in Training.__dataclass_fields__ if k != "seed"}
                by_settings.setdefault(json.dumps(settings), []).append(r)
        if by_settings:
            by_method[name] = min(by_settings.values(), key=mean_of_best)
    return by_method


def mean_of_best(records: Records) -> float:
    """Return the best losses of runs, averaged."""
    losses: list[float] = [r["best_loss"] for r in records]
    return sum(losses) / len(losses)


def best_of(records: Records) -> str:
    """Return the mean of the best losses of runs; of several seeds with its standard error."""
    mean = mean_of_best(records)
    if len(records) == 1:
        return f"{mean:.2f}"
    error = statistics.stdev(r["best_loss"] for r in records) / math.sqrt(len(records))
    return f"{mean:.3f} ± {error:.3f}"


def characters(records: Records, size: str, recipe: str) -> Iterator[str]:
    """Yield the table of a recipe of shakespeare_char: best losses, averaged over seeds."""
    yield "| optimizer | bytes | seeds | best validation loss |"
    yield "|---|---|---|---|"
    yield f"| AdamW, as nanoGPT reports it | 100 % | | {REPORTED[recipe]} |"
    for name, found in of_characters(records, size).items():
        share = percent_sent(found[0]["share"])
        yield f"| {NAMES[name]} | {share} | {len(found)} | {best_of(found)} |"


def main() -> None:
    """Print the tables, or write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--picture", type=Path, help="draw into this file; print nothing")
    path = parser.parse_args().picture
    claim = read("claim")
    trained = read("characters")
    if path is None:
        recipes = [
            characters(trained, "characters-64", "gpu"),
            characters(trained, "characters-12", "cpu"),
        ]
        tables = [gaps(claim), losses(claim), *recipes]
        print("\n\n".join("\n".join(table) for table in tables))
        return
    from benchmarks.losses.claim_picture import draw

    tables_by_text = {
        name: rows_by_cell(claim, ["claim"], text, SEEDS) for text, name in TEXTS.items()
    }
    curves = {
        name: found[0]["curve"] for name, found in of_characters(trained, "characters-64").items()
    }
    draw(tables_by_text, curves, path)


if __name__ == "__main__":
    main()
