"""Every code block of the documents runs; tests/support/doc_blocks.py says what it needs."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import socket

import pytest

import distributed
import doc_blocks
from curvadion import ops

pytestmark = pytest.mark.usefixtures("own_workers")

PYTHON = {block.name: block for block in doc_blocks.blocks("python")}
ENTRIES = {name: doc_blocks.entry_of(block) for name, block in PYTHON.items()}
NOT_RUN = [name for name, entry in ENTRIES.items() if entry in doc_blocks.NOT_RUN]
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


@pytest.mark.parametrize("name", [name for name in PYTHON if name not in NOT_RUN])
def test_runs(name, tmp_path):
    around = doc_blocks.AROUND.get(ENTRIES[name], doc_blocks.Around())
    for package in around.needs:
        require(package)
    distributed.run(around.ranks, doc_blocks.run, PYTHON[name], str(tmp_path), free_port())


@pytest.mark.parametrize("name", NOT_RUN)
def test_one_that_cannot_run_here_compiles_and_imports_what_there_is(name):
    for node in ast.walk(ast.parse(PYTHON[name].code)):
        if isinstance(node, ast.Import):
            modules = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for module, attribute in modules:
            package = "deepspeed" if module == "curvadion.deepspeed" else module.partition(".")[0]
            require(package)
            imported = importlib.import_module(module)
            assert attribute is None or hasattr(imported, attribute), f"{module}.{attribute}"


@pytest.mark.parametrize("entry", [*doc_blocks.AROUND, *doc_blocks.NOT_RUN])
def test_an_entry_is_about_one_block_or_a_whole_page(entry):
    count = [*ENTRIES.values()].count(entry)
    assert count == 1 or (count > 1 and entry.endswith(": "))


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
