"""The site is built without a warning, and asks nothing of other hosts."""

from __future__ import annotations

import html
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.documents import doc_blocks
from support.documents.doc_blocks import ROOT

PACKAGES = ("mkdocs", "material", "mkdocstrings", "latex2mathml")
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in PACKAGES),
    reason="needs the extra docs",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    said = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )
    assert said.returncode == 0, said.stdout + said.stderr
    return folder


def test_every_page_is_built(site):
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    pages |= {Path("CONTRIBUTING.md"), Path("CHANGELOG.md")}
    assert all((site / page.with_suffix(".html")).is_file() for page in pages)
    assert (site / "repository/benchmarks/results/demo/summary.json").is_file()


def test_a_page_loads_nothing_from_elsewhere(site):
    loads = re.compile(
        r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(https?:|//)|"""
        r"""<link\b[^>]*\brel=["']?(?:stylesheet|preload|preconnect)[^>]*\bhref=["']?(https?:|//)"""
    )
    for page in site.rglob("*.html"):
        assert loads.search(page.read_text("utf-8")) is None, page


def test_search_works_from_a_folder(site):
    # A browser reads neither JSON nor a worker's script beside a page that it opened as a file.
    assert (site / "search/search_index.js").read_text("utf-8").startswith("var __index = {")
    assert (site / "javascripts/iframe-worker.js").is_file()
    for page in [site / "index.html", *(site / "api").glob("*.html")]:
        scripts = re.findall(r"""<script src="?([^"> ]+)""", page.read_text("utf-8"))
        [shim] = [path for path in scripts if "iframe-worker" in path]
        assert (page.parent / shim).is_file(), page


def test_search_finds_text_and_names(site):
    text = (site / "search/search_index.json").read_text("utf-8")
    found = {entry["location"] for entry in json.loads(text)["docs"]}
    assert {"index.html", "faq.html", "api/gates.html#curvadion.ByteBudget"} <= found
    # Laboratory notes have a page, but would be a quarter of what is found.
    notes = "repository/benchmarks/results/"
    assert (site / f"{notes}convergence/index.html").is_file()
    assert not any(location.startswith(notes) for location in found)


def test_public_names_are_in_the_reference(site):
    import curvadion

    text = "".join(page.read_text("utf-8") for page in (site / "api").glob("*.html"))
    for name in curvadion.__all__:
        assert f'id="curvadion.{name}"' in text, name


@pytest.mark.parametrize("page", ["dion", "curvadion"])
def test_signatures_show_options_with_defaults(site, page):
    from curvadion.optim.group_keys import DEFAULTS

    signature = (site / f"api/{page}.html").read_text("utf-8").split("<pre>")[1].split("</pre>")[0]
    text = html.unescape(re.sub(r"<[^>]+>", "", signature))
    for name, default in DEFAULTS.items():
        shown = f'"{default}"' if isinstance(default, str) else repr(default)
        assert re.search(rf"\b{name}: .* = {re.escape(shown)},", text), name


def test_docstrings_link_to_classes(site):
    text = (site / "api/curvadion.html").read_text("utf-8")
    assert re.search(r'href="?dion\.html#curvadion\.Dion\b', text)  # from a docstring
    assert re.search(r'href="?extending\.html#curvadion\.Gate\b', text)  # from the signature
    assert not re.search(r":(?:class|func|meth|mod):", text)


def test_items_of_lists_are_no_text(site):
    # To Markdown a line after an indented paragraph is more of it, unless one between is blank.
    for page in site.rglob("*.html"):
        assert not re.search(r"^(?:[0-9]+\.|-) ", page.read_text("utf-8"), re.MULTILINE), page


def test_formulas_of_pages_are_mathematics(site):
    formulas = Counter(block.page for block in doc_blocks.blocks("math"))
    assert "docs/architecture.md" in formulas
    for name, number in formulas.items():
        page = (site / Path(name).relative_to("docs")).with_suffix(".html")
        assert page.read_text("utf-8").count("<math ") == number, name


def html_of(latex):
    import markdown

    path = ROOT / "docs" / "hooks" / "formulas.py"
    spec = importlib.util.spec_from_file_location("formulas", path)
    formulas = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(formulas)
    configs = formulas.on_config(SimpleNamespace(mdx_configs={})).mdx_configs
    extensions = ["pymdownx.superfences"]
    return markdown.markdown(
        f"```math\n{latex}\n```", extensions=extensions, extension_configs=configs
    )


def test_a_formula_becomes_mathml():
    html_of_rows = html_of(r"\begin{split} X &\leftarrow B^\top \\ D &= V / 2 \end{split}")
    assert html_of_rows.count("<math ") == 1 and html_of_rows.count("<mtr>") == 2
    assert "<msup><mi>B</mi><mo>&#x022A4;</mo></msup>" in html_of_rows


@pytest.mark.parametrize(
    "latex",
    [
        r"\frac{1}{2",
        r"\undefined X",
        r"x_1_2",
        r"X & Y",
        r"\begin{split} X",
        r"\begin{aligned} X \end{aligned}",
    ],
)
def test_a_formula_that_cannot_be_read_is_an_error(latex):
    from pymdownx.superfences import SuperFencesException

    with pytest.raises(SuperFencesException, match="this formula cannot be read"):
        html_of(latex)
