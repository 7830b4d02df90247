"""docs/architecture.md names what is in the files to which it links."""

from __future__ import annotations

import re

import pytest

from support.documents.doc_blocks import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
PROSE = re.sub(r"^ *```text\n.*?^ *```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)
LINKED = sorted(set(re.findall(r"\]\(\.\./([\w/]+\.(?:py|cpp))\)", PAGE)))
NAMES = sorted(set(re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)(?:\([^`]*\))?`", PROSE)))


def test_names_and_files_are_found():
    assert len(LINKED) > 25 and len(NAMES) > 50


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_in_a_linked_file(name):
    sources = [(ROOT / path).read_text("utf-8") for path in LINKED]
    for part in name.removeprefix("ops.").split("."):
        assert any(re.search(rf"\b{part}\b", source) for source in sources), part


def test_paths_of_the_diagram_exist():
    [diagram] = re.findall(r"```text\n(optimizer\.step.*?)```", PAGE, re.DOTALL)
    paths = re.findall(r"\b(\w+(?:/\w+)?\.py)\b", diagram)
    assert len(paths) > 8
    for path in paths:
        assert (ROOT / "curvadion" / path).is_file(), path
