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
from typing import Any, NamedTuple

from benchmarks.common.records import RESULTS
from benchmarks.losses.characters import METHODS, REPORTED
from benchmarks.losses.claim import (
    BASELINE,
    CELLS,
    SIGNIFICANT,
    Row,
    compared,
    losses_by_seed,
    rows_by_cell,
)
from benchmarks.losses.simulation.records import known
from benchmarks.losses.simulation.training import Training

CONVERGENCE = RESULTS / "convergence"
SEEDS = 10
TEXTS = {"stdlib": "Python", "headers": "C++", "kernel": "C (Linux)"}
TWO_TEXTS = ("stdlib", "headers")  # of tables without the third
NAMES = {
    "adamw": "AdamW",
    "muon": "Muon",
    "10 %": "`CurvaDion(wire_budget=0.1)`",
    "10 %, gradients in codes": "`CurvaDion(wire_budget=0.1, sync=CodedGradients())`",
    "1 %": "`CurvaDion(wire_budget=0.01)`",
    "adamw at 1 %": "AdamW in `Replicated(wire_budget=0.01)`",
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
    return f"**{difference(row)}**" if row.p < SIGNIFICANT else difference(row)


def seeds_of(rows: Sequence[Row]) -> str:
    """Return how many seeds rows have, each number once."""
    return " and ".join(f"{n}" for n in dict.fromkeys(row.seeds for row in rows))


def difference(row: Row) -> str:
    """Return a row's difference from its baseline, with its standard error."""
    return f"{row.gap:+.1f} ± {row.gap_error:.1f} %".replace("-", "−")


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


def schedules(records: Records) -> Iterator[str]:
    """Yield the table of schedules: how far each ends above the one of the claim, by seed."""
    names = [cell.removeprefix("Muon, ") for cell in CELLS["schedule"] if cell.startswith("Muon")]
    header = ["cooldown"]
    columns = []
    for method in ("Muon", "1 %"):
        for corpus in TWO_TEXTS:
            losses_of = {}
            for name in names:
                cell = CELLS["schedule"][f"{method}, {name}"]
                losses_of[name], _ = losses_by_seed(records, cell, corpus, SEEDS)
            recommended = losses_of.pop("40 % with tail")
            rows = {name: compared(found, recommended, 1.0) for name, found in losses_of.items()}
            seeds = " or ".join(f"{n}" for n in sorted({row.seeds for row in rows.values()}))
            header.append(f"{method}, {TEXTS[corpus]} ({seeds} seeds)")
            columns.append(rows)
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for name in columns[0]:
        yield f"| {name} | {' | '.join(difference(rows[name]) for rows in columns)} |"


def replicas(records: Records, other_numbers: Records) -> Iterator[str]:
    """Yield the table of gaps by the number of replicas, at as many tokens a step.

    Muon's runs are the same for all: it averages the gradients of the same 64 sequences.

    Args:
        records: of eight replicas, and of Muon.
        other_numbers: of other numbers.
    """
    seeds = 5
    yield f"| replicas | seeds | {' | '.join(TEXTS[corpus] for corpus in TWO_TEXTS)} |"
    yield f"|---|---|{'---|' * len(TWO_TEXTS)}"
    for count in (2, 4, 8, 16):
        cell = CELLS["claim"]["1 %"]
        of_ours = records
        if count != 8:
            cell = cell | {"replicas": count, "batch_size": 64 // count, "tail_decay": 0.96}
            of_ours = other_numbers
        rows = []
        for corpus in TWO_TEXTS:
            muon, _ = losses_by_seed(records, CELLS["claim"][BASELINE], corpus, seeds)
            ours, share = losses_by_seed(of_ours, cell, corpus, seeds)
            rows.append(compared(ours, muon, share))
        yield f"| {count} | {seeds} | {' | '.join(map(gap_of, rows))} |"


def gradients(records: Records) -> Iterator[str]:
    """Yield the table of gradients in codes: how far each ends above Muon, by seed."""
    tables = [rows_by_cell(records, ["gradients"], corpus, SEEDS) for corpus in TWO_TEXTS]
    yield f"| codes of gradients | bytes | seeds | {' | '.join(TEXTS[c] for c in TWO_TEXTS)} |"
    yield f"|---|---|---|{'---|' * len(TWO_TEXTS)}"
    for cell in CELLS["gradients"]:
        if cell == BASELINE:
            continue
        rows = [table[cell] for table in tables]
        line = [cell, percent_sent(rows[0].share), seeds_of(rows), *map(gap_of, rows)]
        yield f"| {' | '.join(line)} |"


def larger(records: Records) -> Iterator[str]:
    """Yield the table of half a million parameters."""
    yield "| text | method | rate | seeds | loss | gap |"
    yield "|---|---|---|---|---|---|"
    for corpus in TWO_TEXTS:
        for cell, row in rows_by_cell(records, ["larger"], corpus, SEEDS, "medium").items():
            method, _, rate = cell.partition(" at ")
            loss = f"{row.mean:.4f}" if row.seeds == 1 else f"{row.mean:.4f} ± {row.error:.4f}"
            gap = ""
            if row.gap is not None:
                gap = difference(row) if row.seeds > 1 else f"{row.gap:+.1f} %".replace("-", "−")
            text = TEXTS[corpus]
            yield f"| {text} | {method} | {rate} | {row.seeds} | {loss} | {gap} |"


def rates(records: Records) -> Iterator[str]:
    """Yield the table of losses by rate, on the text for tuning; means over the same seeds."""
    shares = (0.25, 0.5)
    yield f"| method | rate | {' | '.join(f'others at {share:g} of it' for share in shares)} |"
    yield f"|---|---|{'---|' * len(shares)}"
    found: dict[tuple[str, str], dict[float, dict[int, float]]] = {}
    for name, cell in CELLS["rates"].items():
        of_rate = found.setdefault((name.split(" at ")[0], f"{cell['lr']:g}"), {})
        of_rate[cell["elementwise"]], _ = losses_by_seed(records, cell, "stdlib", SEEDS)
    all_losses = [losses for of_rate in found.values() for losses in of_rate.values()]
    seeds = set.intersection(*(set(losses) for losses in all_losses))
    for (method, rate), of_rate in found.items():
        means = [statistics.mean(of_rate[share][seed] for seed in seeds) for share in shares]
        yield f"| {method} | {rate} | {' | '.join(f'{mean:.4f}' for mean in means)} |"


class BitsCompared(NamedTuple):
    """Bits of codes, and those with which they are compared; as flags of simulate.py.

    Attributes:
        budget: of the bytes.
        replicas: how many.
        bits, other: (up, down); up is None for as many as down.
    """

    budget: float
    replicas: int
    bits: tuple[int | None, int]
    other: tuple[int | None, int]


COMPARED_BITS = (
    BitsCompared(0.1, 8, (2, 4), (None, 3)),
    BitsCompared(0.03, 8, (1, 2), (None, 2)),
    BitsCompared(0.02, 8, (1, 2), (None, 2)),
    *(BitsCompared(0.01, replicas, (1, 2), (None, 2)) for replicas in (2, 4, 8, 16)),
    BitsCompared(0.01, 8, (None, 1), (None, 2)),
    BitsCompared(0.0025, 8, (1, 2), (None, 1)),
)


def bits(records: Records) -> Iterator[str]:
    """Yield the table of losses with some bits above those with others."""
    yield "| budget | replicas | bits | instead of | seeds | Python | C++ |"
    yield "|---|---|---|---|---|---|---|"
    for case in COMPARED_BITS:
        found = [_bits_apart(records, case, corpus) for corpus in TWO_TEXTS]
        cells = [f"{100 * case.budget:g} %", f"{case.replicas}"]
        cells += [_written(case.bits), _written(case.other), seeds_of(found)]
        cells += map(difference, found)
        yield f"| {' | '.join(cells)} |"


def _written(bits: tuple[int | None, int]) -> str:
    """Bits as an argument of a sync."""
    up, down = bits
    return f"{down}" if up is None else f"({up}, {down})"


def _bits_apart(records: Records, case: BitsCompared, corpus: str) -> Row:
    """Return the losses of a case's bits compared with those of the others, by seed.

    Runs are compared whose other settings are all the same.
    """
    losses: dict[tuple[int | None, int], dict[str, float]] = {case.bits: {}, case.other: {}}
    wanted = ("ours", "small", corpus, case.budget, case.replicas, 640)
    for r in map(known, records):
        given = (r["method"], r["size"], r["corpus"], r["budget"], r["replicas"], r["steps"])
        if given == wanted and (r["up"], r["bits"]) in losses:
            varied = ("up", "bits")
            same = {k: r[k] for k in Training.__dataclass_fields__ if k not in varied}
            losses[r["up"], r["bits"]][json.dumps(same)] = r["loss"]
    both = sorted(losses[case.bits].keys() & losses[case.other].keys())
    by_run = [{i: losses[each][run] for i, run in enumerate(both)} for each in losses]
    return compared(by_run[0], by_run[1], case.budget)


def of_characters(records: Records, size: str) -> dict[str, list[dict[str, Any]]]:
    """Return the records of a recipe by method, as characters.py calls it.

    Of several settings of a method those with the most seeds are taken, and of these the best.
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
            most = max(map(len, by_settings.values()))
            tried = [found for found in by_settings.values() if len(found) == most]
            by_method[name] = min(tried, key=mean_of_best)
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
        coded = [r for name in ("claim", "tuning", "bits") for r in read(name)]
        tables = [
            gaps(claim),
            losses(claim),
            replicas(claim, read("bits")),
            rates(claim),
            bits(coded),
            schedules(claim),
        ]
        tables += [gradients(claim), larger(claim), *recipes]
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
