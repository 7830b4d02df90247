"""The tables of losses are what the records say."""

import re
from pathlib import Path

import pytest

from benchmarks.losses import claim_tables
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


def text_of(page):
    return (ROOT / page).read_text("utf-8")


@pytest.mark.parametrize(
    ("table", "page"),
    [
        (gaps, "benchmarks/results/convergence/README.md"),
        (by_seed, "benchmarks/results/convergence/README.md"),
    ],
)
def test_tables_are_those_of_the_records(table, page):
    assert "\n".join(table(read())) in text_of(page)


@pytest.mark.parametrize("page", ["README.md", "docs/convergence.md"])
def test_the_claim_is_that_of_its_records(page):
    assert "\n".join(claim_tables.gaps(claim_tables.read("claim"))) in text_of(page)


def test_all_losses_of_the_claim_are_in_the_notes():
    losses = claim_tables.losses(claim_tables.read("claim"))
    assert "\n".join(losses) in text_of("benchmarks/results/convergence/README.md")


def test_losses_of_characters_are_those_of_the_records():
    records = claim_tables.read("characters")
    page = text_of("docs/convergence.md")
    assert "\n".join(claim_tables.characters(records, "characters-64", "gpu")) in page
    best = {
        name: min(r["best_loss"] for r in found)
        for name, found in claim_tables.of_characters(records, "characters-64").items()
    }
    said = " ".join(text_of("README.md").split())
    assert f"a validation loss of {best['1 %']:.2f}" in said
    assert f"Muon reaches {best['muon']:.2f} and AdamW {best['adamw']:.2f}" in said
    assert f"`Replicated` reaches {best['adamw at 1 %']:.2f}" in said


def test_gaps_beside_arguments_are_those_of_the_records():
    page = "docs/choosing.md"
    records = read()
    pattern = r"^\| .*`wire_budget=([\d.]+)(?:, sync=(.+))?`\)? \| ([^|]+ %) \| ([^|]+ %) \|$"
    found = re.findall(pattern, text_of(page), re.MULTILINE)
    assert len(found) == 6
    for budget, sync, *cells in found:
        for size, cell in zip(SIZES, cells, strict=True):
            wanted = (float(budget), HOW.get(sync, ""))
            [row] = [r for r in size.rows() if (r.budget, r.how) == wanted]
            ended = [compared(records, size, corpus, row)[:2] for corpus in TEXTS]
            assert cell == ", ".join(ours.above(baseline) for baseline, ours in ended), row.name


def test_the_picture_shows_what_its_page_says():
    small, medium = (dict(curves(read(), size)) for size in SIZES)
    assert {"Curvadion", "mean weights in codes", "best synchronous"} <= {*medium} < {*small}
    [(_, adamw)] = small["AdamW"]
    [at_one_percent] = [loss for share, loss in small["Curvadion"] if 0.009 < share < 0.011]
    assert "1 % ends 4 % below AdamW synchronised at every step" in text_of("docs/convergence.md")
    assert round(100 * (1 - at_one_percent / adamw)) == 4
