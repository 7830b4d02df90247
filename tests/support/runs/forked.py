"""Python programs in processes of their own that have imported torch already, as workers have.

said = forked.module("benchmarks.seconds.optimizer_step", "--device", "cpu")
assert said.returncode == 0, said.stdout

How long imports take, what they import, and how an interpreter ends: only a program of fresh.py
shows that.
"""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.runs import distributed, fresh


class Program:
    """A function in a process that has started; ``environment``: added to that of workers."""

    def __init__(
        self, function: Callable[..., object], *arguments: Any, **environment: str
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="curvadion-program-")
        self._output = Path(self._folder.name, "output")
        given = str(self._output), environment, function, arguments
        self._process = distributed.of_forkserver(_run, given)
        self._process.start()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._folder.cleanup()

    def finish(self, timeout: float = 110.0) -> subprocess.CompletedProcess[str]:
        """What it has done; what it has printed and its errors are both in ``stdout``."""
        with self:
            self._process.join(timeout)
            code = self._process.exitcode
            said = self._output.read_text("utf-8", "replace") if self._output.exists() else ""
        return subprocess.CompletedProcess(self._process.name, -9 if code is None else code, said)


def module(name: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """What ``python -m name *arguments`` does."""
    return Program(_module, name, [*map(str, arguments)], **environment).finish()


def script(path: Path, *arguments: object, **environment: str) -> Program:
    """``python path *arguments``, which has started."""
    return Program(_script, str(path), [*map(str, arguments)], **environment)


def _run(
    output: str,
    environment: dict[str, str],
    function: Callable[..., object],
    arguments: tuple[Any, ...],
) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.chdir(fresh.ROOT)
    os.environ.update(environment)
    try:
        function(*arguments)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out


def _module(name: str, arguments: list[str]) -> None:
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _script(path: str, arguments: list[str]) -> None:
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
