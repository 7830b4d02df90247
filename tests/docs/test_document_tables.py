"""The tables of losses are what the records say."""

import re
from pathlib import Path

import pytest

from benchmarks.losses.document_tables import (
    IN_CODES,
    IN_THREE,
    SIZES,
    TEXTS,
    by_seed,
    compared,
    curves,
    gaps,
    read,
)

ROOT = Path(__file__).resolve().parents[2]
HOW = {
    "CodedGradients()": IN_CODES,
    "QuantizedAverage(fragments=3)": IN_THREE,
}


@pytest.mark.parametrize(
    ("table", "page"),
    [
        (gaps, "docs/convergence.md"),
        (by_seed, "benchmarks/results/convergence/README.md"),
    ],
)
def test_tables_are_those_of_the_records(table, page):
    assert "\n".join(table(read())) in (ROOT / page).read_text("utf-8")


@pytest.mark.parametrize(("page", "count"), [("README.md", 5), ("docs/choosing.md", 6)])
def test_gaps_beside_arguments_are_those_of_the_records(page, count):
    records = read()
    pattern = r"^\| .*`wire_budget=([\d.]+)(?:, sync=(.+))?`\)? \| ([^|]+ %) \| ([^|]+ %) \|$"
    found = re.findall(pattern, (ROOT / page).read_text("utf-8"), re.MULTILINE)
    assert len(found) == count
    for budget, sync, *cells in found:
        for size, cell in zip(SIZES, cells, strict=True):
            wanted = (float(budget), HOW.get(sync, ""))
            [row] = [r for r in size.rows() if (r.budget, r.how) == wanted]
            ended = [compared(records, size, corpus, row)[:2] for corpus in TEXTS]
            assert cell == ", ".join(ours.above(baseline) for baseline, ours in ended), row.name


def test_the_picture_shows_what_the_readme_says():
    small, medium = (dict(curves(read(), size)) for size in SIZES)
    assert {"Curvadion", "mean weights in codes", "best synchronous"} <= {*medium} < {*small}
    [(_, adamw)] = small["AdamW"]
    [at_one_percent] = [loss for share, loss in small["Curvadion"] if 0.009 < share < 0.011]
    said = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert "the loss is about 4 % lower than that of AdamW on DDP" in said
    assert round(100 * (1 - at_one_percent / adamw)) == 4
