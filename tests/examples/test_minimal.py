"""examples/minimal: each script as its docstring starts it; torchrun itself starts one of them."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import os
import re
import runpy
import shlex
from pathlib import Path

import pytest

from support.runs import distributed, forked

pytestmark = pytest.mark.usefixtures("own_workers")
ROOT = Path(__file__).resolve().parents[2]
MINIMAL = ROOT / "examples" / "minimal"
SCRIPTS = sorted(MINIMAL.glob("*.py"))
STEPS = 20
SECONDS = 100
SEARCH_PATH = f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"
NEEDS = {"deepspeed_zero.py": "deepspeed", "elastic.py": "torchft"}
BY_TORCHRUN = "ddp.py"
TORCHRUN = [path for path in SCRIPTS if path.name != "elastic.py"]


def commands(path):
    """The command lines of a script's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text("utf-8")), clean=False)
    return re.findall(r"^    (\S.*)$", text, re.MULTILINE)


def skip_without(path):
    package = NEEDS.get(path.name)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")


def check(said):
    """Every step is printed once, and the loss falls."""
    found = re.findall(r"^step (\d+): loss ([\d.]+)", said, re.MULTILINE)
    assert [int(step) for step, _ in found] == list(range(STEPS)), said
    assert float(found[-1][1]) < 0.5 * float(found[0][1]), said


def started_by_torchrun(arguments):
    """What a script prints in processes of its own."""
    for _ in range(2):
        done = forked.module("torch.distributed.run", *arguments, PYTHONPATH=SEARCH_PATH)
        # Now and then gloo's threads abort Python when it exits, also with torch alone:
        # docs/troubleshooting.md, "It aborts at the end". Something else would abort it twice.
        if "terminate called without an active exception" not in done.stdout:
            break
    assert done.returncode == 0, done.stdout
    return done.stdout


def in_a_worker(rank, script, port):
    """What a script prints in a process that is there already, which saves imports of torch."""
    said = io.StringIO()
    with distributed.as_torchrun_starts(rank, port), contextlib.redirect_stdout(said):
        os.environ["LOCAL_RANK"] = str(rank)
        runpy.run_path(script, run_name="__main__")
    return said.getvalue()


@pytest.mark.parametrize("path", TORCHRUN, ids=lambda path: path.stem)
def test_a_script_trains(path):
    skip_without(path)
    [command] = commands(path)
    launcher, *arguments = shlex.split(command)
    *options, ranks, script = arguments
    assert [launcher, *options] == ["torchrun", "--standalone", "--nproc-per-node"]
    assert ROOT / script == path
    if path.name == BY_TORCHRUN:
        said = started_by_torchrun(arguments)
    else:
        port = distributed.free_port()
        said = "".join(distributed.run(int(ranks), in_a_worker, str(path), port))
    check(said)
    if "wire_budget" in path.read_text("utf-8"):
        assert 1 < said.count("synchronised") < STEPS


def test_elastic_replicas_train():
    path = MINIMAL / "elastic.py"
    skip_without(path)
    from torchft.coordination import LighthouseServer

    lighthouse, variables, *starts = commands(path)
    [least] = re.findall(r"--min_replicas (\d+)", lighthouse)
    assert variables.startswith("export TORCHFT_LIGHTHOUSE=")
    server = LighthouseServer(bind="[::]:0", min_replicas=int(least), join_timeout_ms=30_000)
    shared = {"TORCHFT_LIGHTHOUSE": server.address(), "RUST_LOG": "warn"}
    with contextlib.ExitStack() as ends:
        ends.callback(server.shutdown)
        running = []
        for command in starts:
            site, python, script = shlex.split(command.removesuffix(" &"))
            name, _, value = site.partition("=")
            assert python == "python"
            started = forked.script(ROOT / script, **shared, **{name: value})
            running.append(ends.enter_context(started))
        for program in running:
            done = program.finish(SECONDS)
            assert done.returncode == 0, done.stdout
            check(done.stdout)
            assert "2 at the last opening" in done.stdout


def test_the_table_lists_every_script_with_its_command():
    text = (MINIMAL / "README.md").read_text("utf-8")
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (MINIMAL / link).exists(), link
    rows = [line for line in text.splitlines() if line.startswith("| [`")]
    assert {row.split("`")[1] for row in rows} == {path.name for path in SCRIPTS}
    for path in TORCHRUN:
        [row] = [row for row in rows if row.split("`")[1] == path.name]
        assert row.endswith(f"| `{commands(path)[0]}` |")
