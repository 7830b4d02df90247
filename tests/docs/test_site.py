"""The site is built without a warning, and asks nothing of other hosts."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from doc_blocks import ROOT

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")),
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
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages | {"CONTRIBUTING", "CHANGELOG"} <= {path.stem for path in site.glob("*.html")}
    assert (site / "repository/benchmarks/results/demo/summary.json").is_file()


def test_a_page_loads_nothing_from_elsewhere(site):
    loads = re.compile(
        r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(https?:|//)|"""
        r"""<link\b[^>]*\brel=["']?(?:stylesheet|preload|preconnect)[^>]*\bhref=["']?(https?:|//)"""
    )
    for page in site.rglob("*.html"):
        assert loads.search(page.read_text("utf-8")) is None, page


def test_public_names_are_in_the_reference(site):
    import curvadion

    text = (site / "api.html").read_text("utf-8")
    for name in curvadion.__all__:
        assert f'id="curvadion.{name}"' in text, name
