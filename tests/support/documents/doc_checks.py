"""Which tests run the documents' code blocks, and how.

A framework's own tests run those that need it, in workers that have imported it already;
tests/docs/test_code_blocks.py runs all others.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from curvadion import ops
from support.documents import doc_blocks, doc_frameworks
from support.runs import distributed

AROUND = doc_blocks.AROUND | doc_frameworks.AROUND
PYTHON = {block.name: block for block in doc_blocks.blocks("python")}
ENTRIES = {name: doc_blocks.entry_of(block, AROUND) for name, block in PYTHON.items()}


def names_of(page: str | None = None) -> list[str]:
    """The blocks of a page that need its framework; without a page, those that need none."""
    return [name for name in PYTHON if page_of_framework(name) == page]


def page_of_framework(name: str) -> str | None:
    return PYTHON[name].page if ENTRIES[name] in doc_frameworks.AROUND else None


def check(name: str, folder: Path) -> None:
    """Run a block on its ranks."""
    around = AROUND.get(ENTRIES[name] or "", doc_blocks.Around())
    for package in around.needs:
        _require(package)
    block, port = PYTHON[name], distributed.free_port()
    distributed.run(around.ranks, doc_blocks.run, block, around, str(folder), port, timeout=100.0)


def _require(package: str) -> None:
    if package == "the compiled library":
        if (lacks := ops.lacking("cpu")) is not None:
            pytest.skip(f"needs it: {lacks}")
    elif importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
