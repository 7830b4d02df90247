"""Print the tables of docs/convergence.md and of its details from the records.

    python benchmarks/claim.py

A row is a sync under a budget, at one size and on one text: its mean loss over seeds, above the
best synchronous method's, beside the best rival's within the same bytes. The records are those of
simulate.py, whose flags say here what is compared. tests/docs holds the pages to these tables.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[1:1] = [str(ROOT / folder) for folder in ("", "kernels", "examples")]

from command_line import parse
from simulate import Options, known, selected

RECORDS = ROOT / "benchmarks" / "results" / "convergence" / "simulated.json"
TEXTS = {"python": "Python", "cpp": "C++"}
GRADIENTS = "--method coded_gradients --bits 3 --look-ahead 2"


class Row(NamedTuple):
    """A sync under a budget, and the best rival within it; flags of simulate.py."""

    budget: float
    ours: str
    rival: str
    how: str = ""

    @property
    def name(self) -> str:
        """As the tables have it."""
        return f"{100 * self.budget:g} %" + (f", {self.how}" if self.how else "")


@dataclass(frozen=True)
class Size:
    """The best synchronous method of a size, and what is compared with it; flags of simulate.py."""

    name: str
    every: str
    baseline: str
    rows: tuple[Row, ...]


def mean_weights(bits: int, lr: float) -> str:
    """Muon inside each replica, and the mean of weights in codes."""
    return f"--method muloco --outer-lr 1 --outer-momentum 0 --bits {bits} --lr {lr}"


IN_CODES, IN_THREE = "gradients in codes", "three fragments"
SMALL = Size(
    "131 thousand parameters",
    "--steps 640",
    "--method muon --look-ahead 3 --lr 0.04",
    (
        Row(0.1, "--lr 0.08", mean_weights(4, 0.04)),
        Row(0.1, f"{GRADIENTS} --lr 0.04", mean_weights(4, 0.04), IN_CODES),
        Row(0.03, "--lr 0.08", mean_weights(2, 0.04)),
        Row(0.01, "--lr 0.08", mean_weights(1, 0.04)),
        Row(0.01, "--lr 0.08 --fragments 3", mean_weights(1, 0.04), IN_THREE),
        Row(0.0025, "--lr 0.04 --look-ahead 4.1", mean_weights(1, 0.02)),
        Row(0.0025, "--lr 0.04 --look-ahead 4.1 --fragments 3", mean_weights(1, 0.02), IN_THREE),
    ),
)
# Mean weights in three fragments: our averages without their corrections.
UNCORRECTED = (
    "--align 0 --polar 0 --spectrum-decay 0 --bits 1 --look-ahead 2 --fragments 3 --lr 0.02"
)
MEDIUM = Size(
    "half a million parameters",
    "--size medium --steps 2400",
    "--method dion --look-ahead 2 --lr 0.02",
    (
        Row(0.1, "--lr 0.04", mean_weights(4, 0.02)),
        Row(0.1, f"{GRADIENTS} --lr 0.02", mean_weights(4, 0.02), IN_CODES),
        Row(0.03, "--lr 0.02", mean_weights(2, 0.02)),
        Row(0.01, "--lr 0.02", mean_weights(1, 0.02)),
        Row(0.01, "--lr 0.02 --fragments 3", mean_weights(1, 0.02), IN_THREE),
        Row(0.0025, "--lr 0.02 --look-ahead 4.1", UNCORRECTED),
        Row(0.0025, "--lr 0.02 --look-ahead 4.1 --fragments 3", UNCORRECTED, IN_THREE),
    ),
)
SIZES = (SMALL, MEDIUM)


class Ended(NamedTuple):
    """Losses by seed, and what was sent as a share of all gradients in float32."""

    losses: tuple[float, ...]
    share: float

    @property
    def mean(self) -> float:
        """Over seeds."""
        return sum(self.losses) / len(self.losses)

    def above(self, baseline: Ended) -> str:
        """How far the mean is above another's."""
        return percent(self.mean / baseline.mean)


def percent(ratio: float) -> str:
    """Return what a ratio is above 1: +1.2 %."""
    text = f"{100 * (ratio - 1):+.1f} %"
    return "0.0 %" if text in ("+0.0 %", "-0.0 %") else text.replace("-", "−")


def ended(records: Sequence[Mapping[str, Any]], flags: str) -> Ended:
    """Return how the trainings ended that simulate.py would run with these flags, three seeds."""
    found = []
    for training in selected(parse(Options, [*flags.split(), "--seed", "0", "1", "2"])):
        settings = asdict(training).items()
        record = next((r for r in records if settings <= r.items()), None)
        if record is None:
            raise ValueError(f"no record of: simulate.py {flags} --seed {training.seed}")
        found.append(record)
    return Ended(tuple(r["loss"] for r in found), found[0]["share"])


def by_seed(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the table of all rows."""
    yield "| budget | sent | CurvaDion | above the baseline | by seed | the best rival |"
    yield "|---|---|---|---|---|---|"
    for size in SIZES:
        for corpus, text in TEXTS.items():
            where = f"{size.every} --corpus {corpus}"
            baseline = ended(records, f"{where} {size.baseline}")
            yield f"| **{size.name}**, {text}, baseline {baseline.mean:.3f} | | | | | |"
            for row in size.rows:
                ours, rival = both(records, where, row)
                pairs = zip(ours.losses, baseline.losses, strict=True)
                seeds = ", ".join(percent(x / y).removesuffix(" %") for x, y in pairs)
                yield (
                    f"| {row.name} | {100 * ours.share:.2g} % | {ours.mean:.3f} "
                    f"| **{ours.above(baseline)}** | {seeds} "
                    f"| {rival.mean:.3f}, {rival.above(baseline)} |"
                )


def claim(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the table of gaps on both texts, without those of fragments."""
    yield "| parameters | budget | Python: CurvaDion | best rival | C++: CurvaDion | best rival |"
    yield "|---|---|---|---|---|---|"
    for size in SIZES:
        named = size.name.removesuffix(" parameters")
        for row in (r for r in size.rows if r.how != IN_THREE):
            cells = [named, row.name]
            for corpus in TEXTS:
                where = f"{size.every} --corpus {corpus}"
                baseline = ended(records, f"{where} {size.baseline}")
                cells += [x.above(baseline) for x in both(records, where, row)]
            yield f"| {' | '.join(cells)} |"
            named = ""


def both(records: Sequence[Mapping[str, Any]], where: str, row: Row) -> tuple[Ended, Ended]:
    """Return how ours and the best rival of a row ended."""
    budget = f"{where} --budget {row.budget}"
    return ended(records, f"{budget} {row.ours}"), ended(records, f"{budget} {row.rival}")


def read() -> list[dict[str, Any]]:
    """Return the records, with the defaults of settings that did not exist when they were made."""
    return [known(r) for r in json.loads(RECORDS.read_text("utf-8"))["records"]]


if __name__ == "__main__":
    records = read()
    print("\n".join([*claim(records), "", *by_seed(records)]))
