"""What pages quote is there: errors in the source, numbers in tables, files behind links."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from support.documents.doc_blocks import PAGES, ROOT

TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
# Cells and headings that are nothing but code.
QUOTED = re.findall(r"^(?:\| |### )`([^`]+)`(?: \||$)", TROUBLES, re.MULTILINE)
ANYTHING = "…"


@functools.cache
def texts():
    """Every string of the package, with what is filled in as ANYTHING."""
    found = []
    for path in sorted((ROOT / "curvadion").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else ANYTHING
                    for part in node.values
                ]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def in_source(quoted):
    """Whether a string of the package has this text, where ANYTHING stands for anything."""
    pieces = [re.escape(piece) for piece in quoted.split(ANYTHING)]
    pattern = re.compile(".*".join(pieces), re.DOTALL)
    return any(pattern.search(text) for text in texts())


def test_errors_are_found_on_the_page():
    assert len(QUOTED) > 20


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_quoted_error_is_in_the_source(quoted):
    assert in_source(quoted)


def test_each_option_has_its_default_in_the_docstring():
    # The signature has only **options.
    from curvadion import Dion
    from curvadion.optim.group_keys import DEFAULTS

    listed = Dion.__doc__.split("Keyword Args:")[1].split("Attributes:")[0]
    items = re.split(r"^        (?=\w[\w, ]*: )", listed, flags=re.MULTILINE)[1:]
    texts = {}
    for item in items:
        names, _, text = item.partition(": ")
        texts |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    assert texts.keys() == DEFAULTS.keys()
    for name, default in DEFAULTS.items():
        shown = f'"{default}"' if isinstance(default, str) else repr(default).replace("e-0", "e-")
        said = re.search(r"Defaults? .*", texts[name])[0]
        assert re.search(rf"(?<![\w.]){re.escape(shown)}(?!\w)", said), name


SECONDS = ROOT / "benchmarks" / "results" / "scaling" / "README.md"


def rows(text):
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`*") for cell in line.strip("|").split("|")] for line in lines]


def test_days_are_those_of_the_cost_model():
    page, notes = (rows(path.read_text("utf-8")) for path in (ROOT / "docs/scaling.md", SECONDS))
    days = [row for row in page if len(row) == 5]
    assert len(days) == 11 and all(row in notes for row in days)


def test_seconds_to_choose_by_are_those_of_the_cost_model():
    scaling = SECONDS.read_text("utf-8")
    links = ("100 Gb/s", "10 Gb/s", "1 Gb/s", "100 Mb/s")
    of_model = {}
    for name, computed, part in re.findall(
        r"^\*\*(\S+)\*\*: compute ([\d.]+) s a step\n(.*?)(?=^\*\*|\Z)", scaling, re.M | re.S
    ):
        for method, _, _, _, *seconds in (row for row in rows(part) if len(row) == 8):
            for link, value in zip(links, seconds, strict=True):
                of_model.setdefault((link, name), {"compute": computed})[method] = value
    chosen = [row for row in rows((ROOT / "docs/choosing.md").read_text("utf-8")) if len(row) == 6]
    chosen = [row for row in chosen if row[0] in links]
    assert len(chosen) == 12 == len(of_model)
    for link, model, dense, take, seconds, compute in chosen:
        known = of_model[link, model]
        method = "AdamW-DDP" if take.startswith("AdamW") else f"CurvaDion, {take}"
        assert (dense, seconds, compute) == (known["AdamW-DDP"], known[method], known["compute"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for path in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text("utf-8")):
        assert (page.parent / path).exists(), path


def test_extras_that_commands_install_exist():
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    section = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras_of_project = set(re.findall(r"^([\w-]+) = \[", section, flags=re.M))
    sources = [
        path for folder in ("curvadion", "examples") for path in (ROOT / folder).rglob("*.py")
    ]
    named = {
        extra
        for path in (*PAGES, *sources)
        for command in re.findall(r"pip install .*", path.read_text("utf-8"))
        for extras in re.findall(r"\[([\w,-]+)\]'", command)
        for extra in extras.split(",")
    }
    assert {"train", "huggingface"} <= named <= extras_of_project
