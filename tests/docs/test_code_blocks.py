"""Every code block of the documents runs; doc_blocks.py and doc_frameworks.py say what it needs."""

from __future__ import annotations

import importlib.util
import re
import socket

import pytest

import distributed
import doc_blocks
import doc_frameworks
from curvadion import ops

pytestmark = pytest.mark.usefixtures("own_workers")

AROUND = doc_blocks.AROUND | doc_frameworks.AROUND
PYTHON = {block.name: block for block in doc_blocks.blocks("python")}
ENTRIES = {name: doc_blocks.entry_of(block, AROUND) for name, block in PYTHON.items()}
SHELL = doc_blocks.blocks("bash", "sh")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def require(package):
    if package == "the compiled library":
        if (lacks := ops.lacking("cpu")) is not None:
            pytest.skip(f"needs it: {lacks}")
    elif importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")


def page_of_framework(name):
    return PYTHON[name].page if ENTRIES[name] in doc_frameworks.AROUND else None


@pytest.fixture(scope="module")
def workers():
    """New ones for each page: what DeepSpeed leaves in torch breaks torchtitan's classes."""
    distributed.shutdown()


CASES = [(page_of_framework(name), name) for name in PYTHON]


@pytest.mark.parametrize(
    ("workers", "name"), CASES, indirect=["workers"], ids=[*PYTHON], scope="module"
)
def test_runs(workers, name, tmp_path):
    around = AROUND.get(ENTRIES[name], doc_blocks.Around())
    for package in around.needs:
        require(package)
    block, folder = PYTHON[name], str(tmp_path)
    distributed.run(around.ranks, doc_blocks.run, block, around, folder, free_port(), timeout=100.0)


@pytest.mark.parametrize("entry", AROUND)
def test_an_entry_is_about_one_block(entry):
    assert [*ENTRIES.values()].count(entry) == 1


def test_blocks_are_found():
    assert len(PYTHON) > 20 and len(SHELL) > 8


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
        for script in re.findall(r"((?:examples|benchmarks|tests)/[\w/.-]*\.py)", command):
            path = doc_blocks.ROOT / script
            assert path.is_file(), command
            options = re.findall(r"--[a-z][\w-]*", command.partition(script)[2])
            source = path.read_text("utf-8")
            for option in options:
                field = option[2:].replace("-", "_")
                known = option in source or re.search(rf"^    {field}: .*option\(", source, re.M)
                assert known or inherited(path, field), f"{script} knows no {option}"


def inherited(path, field):
    """Whether an option is one of the training that the example builds on."""
    base = (doc_blocks.ROOT / "examples" / "train_gpt.py").read_text("utf-8")
    return "train_gpt" in path.read_text("utf-8") and f"    {field}: " in base
