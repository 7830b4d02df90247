"""The tables of losses are what the records say."""

from pathlib import Path

import pytest

import claim

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(
    ("table", "page"), [(claim.claim, "convergence.md"), (claim.by_seed, "convergence-lab.md")]
)
def test_tables_are_those_of_the_records(table, page):
    assert "\n".join(table(claim.read())) in (DOCS / page).read_text("utf-8")


def test_a_missing_record_is_named():
    with pytest.raises(ValueError, match=r"no record of: simulate.py --lr 0.04 --seed 0"):
        claim.ended([], "--lr 0.04")


def test_gaps_round_to_a_signless_zero():
    assert [claim.percent(x) for x in (1.0004, 0.9996, 1.025, 0.975)] == [
        "0.0 %",
        "0.0 %",
        "+2.5 %",
        "−2.5 %",
    ]
