"""Every code block of the documents runs; doc_blocks.py and doc_frameworks.py say what it needs."""

from __future__ import annotations

import importlib.util
import re

import pytest

from support.documents import doc_blocks
from support.documents.doc_checks import AROUND, ENTRIES, PYTHON, check, names_of, page_of_framework

pytestmark = pytest.mark.usefixtures("own_workers")

SHELL = doc_blocks.blocks("bash", "sh")
# Longer lines are cut where a page has menus on both sides.
CHARACTERS = 75


@pytest.mark.parametrize("name", names_of())
def test_runs(name, tmp_path):
    check(name, tmp_path)


def test_each_block_is_run_by_one_file():
    paths = (doc_blocks.ROOT / "tests").rglob("test_*.py")
    sources = [path.read_text("utf-8") for path in paths]
    found = names_of()
    for page in {page_of_framework(name) for name in PYTHON} - {None}:
        runs = f'@pytest.mark.parametrize("name", doc_checks.names_of("{page}"))'
        assert sum(runs in source for source in sources) == 1, page
        found += names_of(page)
    assert sorted(found) == sorted(PYTHON)
    # An entry that is about no block would check nothing.
    assert sorted(filter(None, ENTRIES.values())) == sorted(AROUND)


def test_blocks_fit_on_the_page_and_can_be_pasted():
    for block in doc_blocks.blocks():
        assert block.language != "diff", f"{block.name}: show the result, which can be pasted"
        if block.language != "text":  # output is quoted as it is
            wide = [line for line in block.code.splitlines() if len(line) > CHARACTERS]
            assert not wide, f"{block.page}: break {wide}"


@pytest.mark.parametrize("block", SHELL, ids=lambda block: f"{block.name} {block.language}")
def test_commands_exist(block):
    makefile = (doc_blocks.ROOT / "Makefile").read_text("utf-8")
    for line in block.code.replace("\\\n", " ").splitlines():
        command = line.partition("#")[0].strip()
        for module in re.findall(r"python3? -m (curvadion[\w.]*)", command):
            assert importlib.util.find_spec(module), command
        if command.startswith("make "):
            targets = [word for word in command.split()[1:] if "=" not in word]
            assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
        for script in re.findall(r"(benchmarks\.[\w.]+|(?:examples|tests)/[\w/.-]*\.py)", command):
            path = doc_blocks.ROOT / script
            if script.startswith("benchmarks"):
                path = doc_blocks.ROOT / f"{script.replace('.', '/')}.py"
            assert path.is_file(), command
            options = re.findall(r"--[a-z][\w-]*", command.partition(script)[2])
            source = path.read_text("utf-8")
            for option in options:
                field = option[2:].replace("-", "_")
                known = option in source or re.search(rf"^    {field}: .*option\(", source, re.M)
                assert known or inherited(path, field), f"{script} knows no {option}"


def inherited(path, field):
    """Whether an option is one of the training that the example builds on."""
    base = (doc_blocks.ROOT / "examples" / "gpt" / "train_gpt.py").read_text("utf-8")
    return "train_gpt" in path.read_text("utf-8") and f"    {field}: " in base


def test_each_benchmark_is_listed_with_its_command():
    folder = doc_blocks.ROOT / "benchmarks"
    listed = (folder / "README.md").read_text("utf-8")
    sections = re.split(r"`python -m benchmarks\.(\w+)\.`", listed)[1:]
    named = {
        f"{room}/{name}.py"
        for room, rows in zip(sections[::2], sections[1::2], strict=True)
        for name in re.findall(r"^\|[^|]*\| `(\w+)", rows, re.MULTILINE)
    }
    paths = [path for path in folder.rglob("*.py") if path.parent.name != "common"]
    programs = {
        path.relative_to(folder).as_posix()
        for path in paths
        if '__name__ == "__main__"' in path.read_text("utf-8")
    }
    assert named == programs
