"""The tables of losses are what the records say."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from benchmarks.losses import claim_tables, offload
from benchmarks.losses.claim import BASELINE, CELLS, losses_by_seed, rows_by_cell
from benchmarks.losses.claim import compared as of_seeds
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
from benchmarks.losses.simulation.records import known
from benchmarks.losses.simulation.training import Training
from command_line import parse

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


@pytest.mark.parametrize("varied", [claim_tables.rates, claim_tables.schedules])
def test_losses_by_rate_and_by_schedule_are_those_of_the_records(varied):
    table = varied(claim_tables.read("claim"))
    assert "\n".join(table) in text_of("benchmarks/results/convergence/README.md")


def test_gaps_of_gradients_in_codes_are_those_of_the_records():
    records = claim_tables.read("claim")
    page = text_of("docs/convergence.md")
    assert "\n".join(claim_tables.gradients(records)) in page
    settings = CELLS["budgets"]["3 %, 2 both ways"]
    for text, name in (("stdlib", "Python"), ("headers", "C++")):
        weights, share = losses_by_seed(records, settings, text, 5)
        muon, _ = losses_by_seed(records, CELLS["gradients"][BASELINE], text, 5)
        gap = claim_tables.difference(of_seeds(weights, muon, share)).removeprefix("+")
        assert f"{gap} ({name})" in page


def test_half_a_million_parameters_are_those_of_the_records():
    records = claim_tables.read("claim")
    assert "\n".join(claim_tables.larger(records)) in text_of("docs/convergence.md")
    rows = rows_by_cell(records, ["larger"], "stdlib", 10, "medium")
    weights, gradients = (
        rows[f"{cell} at 0.04"].gap for cell in ("10 %", "10 %, gradients in codes")
    )
    said = " ".join(text_of("README.md").split())
    assert f"by {weights:.1f} % with half a million" in said
    assert f"({gradients:.1f} % with gradients in codes; two seeds)" in said


def test_gaps_by_number_of_replicas_are_those_of_the_records():
    table = claim_tables.replicas(claim_tables.read("claim"), claim_tables.read("bits"))
    page = text_of("docs/convergence.md")
    assert "\n".join(table) in page
    python, cpp = re.findall(r"[\d.]+(?= ±)", next(x for x in page.split("\n") if "| 16 |" in x))
    assert f"{python} to {cpp} % higher" in text_of("README.md")
    assert f"{python} to {cpp} % with sixteen" in text_of("docs/faq.md")


def test_bits_are_compared_as_in_the_records():
    records = [r for name in ("claim", "tuning", "bits") for r in claim_tables.read(name)]
    assert "\n".join(claim_tables.bits(records)) in text_of("docs/convergence.md")


def test_losses_of_characters_are_those_of_the_records():
    records = claim_tables.read("characters")
    page = text_of("docs/convergence.md")
    for size, recipe in (("characters-64", "gpu"), ("characters-12", "cpu")):
        assert "\n".join(claim_tables.characters(records, size, recipe)) in page
    best = {
        name: min(r["best_loss"] for r in found)
        for name, found in claim_tables.of_characters(records, "characters-64").items()
    }
    said = " ".join(text_of("README.md").split())
    assert f"a validation loss of {best['1 %']:.2f}" in said
    assert f"Muon reaches {best['muon']:.2f} and AdamW {best['adamw']:.2f}" in said
    shorter = claim_tables.of_characters(records, "characters-12")
    ours, muon = (claim_tables.mean_of_best(shorter[name]) for name in ("1 %", "muon"))
    assert f"1 % ends {100 * (ours / muon - 1):.1f} % above Muon (three seeds)" in said
    ten = [
        claim_tables.mean_of_best(found["10 %"]) / claim_tables.mean_of_best(found["muon"]) - 1
        for found in (claim_tables.of_characters(records, "characters-64"), shorter)
    ]
    assert "by {:.1f} and {:.1f} % on nanoGPT".format(*(100 * gap for gap in ten)) in said


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


def test_distances_under_deepspeed_are_those_of_the_records():
    page = " ".join(text_of("docs/deepspeed.md").split())
    records = offload.read()
    assert " ".join(offload.table(records)) in page
    assert {record["deepspeed"] for record in records} == {"0.19.8"}
    [plain], clipped = (
        {
            round(record["losses"][-1], 2)
            for record in records
            if record["optimizer"] == "DeepSpeed"
            and record["training"] == training
            and record["layout"][0] in "123"
        }
        for training in ("plain", "clipping")
    )
    assert f"its loss ends at {clipped.pop()} instead of {plain}." in page and not clipped
    older = offload.read(offload.RECORD.with_name("offload-0.19.7.json"))
    assert {record["deepspeed"] for record in older} == {"0.19.7"}
    with_offload, without = (
        offload.short(offload.largest(older, "DeepSpeed", ["plain"], layouts))
        for layouts in (
            [x for x in offload.SHARDED if x.stage in (1, 2) and x.offload],
            [x for x in offload.SHARDED if x.stage in (1, 2) and not x.offload],
        )
    )
    assert f"its Muon ends {with_offload} away at stages 1 and 2" in page
    assert f"Without offload it ends {without} away there" in page
    at_stage_3 = [r for r in older if r["optimizer"] == "DeepSpeed" and r["layout"][0] == "3"]
    assert at_stage_3 and all("Gloo" in record["error"] for record in at_stage_3)


def made_by(command):
    """The simulated runs that a command makes."""
    python, module_flag, name, *arguments = shlex.split(command)
    assert (python, module_flag) == ("python", "-m")
    program = importlib.import_module(name)
    return set(program.trainings(parse(program.Options, arguments)))


@pytest.mark.parametrize(
    "file",
    [
        *("claim", "bits", "tuning", "characters", "ladder", "simulated", "fragments"),
        "later_directions",
    ],
)
def test_the_command_of_a_record_makes_it(file):
    records = claim_tables.read(file)
    runs = {command: made_by(command) for command in {r["command"] for r in records}}
    assert records
    for record in records:
        settings = {key: known(record)[key] for key in Training.__dataclass_fields__}
        assert Training(**settings) in runs[record["command"]], record["command"]
